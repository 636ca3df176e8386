"""A study as it was in git: checked out apart, with what git does not have linked there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ...objectives.task_code import sources_of
from ...spaces.errors import StudyFileError
from ...spaces.study.spec import StudySpec

# What is not data: today's code and settings, databases, and what this project writes.
_NOT_LINKED = (".py", ".pyc", ".yaml", ".yml", "results", "__pycache__", ".venv")


def study_at(file: Path, revision: str) -> tuple[Path, Path]:
    """The study file of a revision, and the folder below git's own where that is; what git does not have is linked there anew.

    Raises:
        StudyFileError: there is no such revision, or it does not have the file.
    """
    file = file.resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=False)  # noqa: S603, S607
        if done.returncode:
            got = done.stderr.strip().removeprefix("fatal: ")
            raise StudyFileError(f"--against {revision}: expected a revision of the git repository of {file}; git says: {got}")
        return done.stdout.strip("\n")

    root = Path(git("rev-parse", "--show-toplevel"))
    commit = git("rev-parse", "--verify", "--short=12", "--end-of-options", f"{revision}^{{commit}}")
    folder = Path(git("rev-parse", "--absolute-git-dir"), "bsearch", commit)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        packed, part = folder.with_suffix(".tar"), folder.with_suffix(".part")
        git("-C", str(root), "archive", "--format=tar", f"--output={packed}", commit)
        shutil.rmtree(part, ignore_errors=True)
        shutil.unpack_archive(packed, part, "tar", filter="data")
        packed.unlink()
        part.rename(folder)
    for name in git("-C", str(root), "ls-files", "-z", "--others", "--directory").split("\0"):
        data, link = root / name.rstrip("/"), folder / name.rstrip("/")
        is_code = data.name.endswith(_NOT_LINKED) or ".db" in data.suffixes or ".db-" in data.name or any(data.glob("*.py"))
        if name and not is_code and link.parent.is_dir() and not os.path.lexists(link):
            link.symlink_to(data)
    then = folder / file.relative_to(root)
    if not then.is_file():
        raise StudyFileError(f"--against {revision}: {file.relative_to(root)} is not in that revision of the repository")
    return then, folder


def check_code_of(spec: StudySpec, folder: Path, file: Path) -> None:
    """Check that a study of a revision trains that revision's code.

    Raises:
        StudyFileError: it would import files of today's.
    """
    repository = next((each for each in file.resolve().parents if (each / ".git").exists()), file.resolve().parent)
    today = [path for path in sources_of(spec.task) if path.is_relative_to(repository) and not path.is_relative_to(folder)]
    if today:
        raise StudyFileError(
            f"--against: the study would import {today[0]} as it is today, such as from an installed package; a revision is "
            "compared where its code lies beside its task"
        )

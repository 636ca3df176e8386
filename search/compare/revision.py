"""A study as it was in git: checked out apart, with what git does not have linked there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...objectives.machine.environment import environment, same_folder, working_folder
from ...objectives.task_code import sources_of
from ...spaces.errors import StudyFileError
from ...spaces.study.spec import StudySpec

# What is not data: today's code and settings, databases, and what this project writes.
_NOT_LINKED = (".py", ".pyc", ".yaml", ".yml", "results", "__pycache__", ".venv")


@dataclass(frozen=True, slots=True)
class Revision:
    """A study in a revision of its repository.

    Args:
        root: of the repository.
        folder: the revision's files, below git's own.
        file: the study file among them.
    """

    root: Path
    folder: Path
    file: Path

    @classmethod
    def of(cls, file: Path, revision: str) -> Revision:
        """Check a revision out, with what git does not have linked there anew. Nothing else of git's folder changes.

        Raises:
            StudyFileError: there is no such revision, or it does not have the file.
        """
        file = file.resolve()

        def git(*arguments: str) -> str:
            done = subprocess.run(  # noqa: S603
                ["git", *arguments],  # noqa: S607
                cwd=file.parent,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                got = done.stderr.strip().removeprefix("fatal: ")
                raise StudyFileError(
                    f"--against {revision}: expected a revision of the git repository of {file}; git says: {got}"
                )
            return done.stdout.strip("\n")

        for name in git("rev-parse", "--local-env-vars").split():
            os.environ.pop(name, None)  # a hook's: they would name its repository to whatever runs git
        root = Path(git("rev-parse", "--show-toplevel")).resolve()
        commit = git("rev-parse", "--verify", "--short=12", "--end-of-options", f"{revision}^{{commit}}")
        folder = Path(git("rev-parse", "--absolute-git-dir"), "bsearch", commit).resolve()
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
            is_code = (
                data.name.endswith(_NOT_LINKED)
                or ".db" in data.suffixes
                or ".db-" in data.name
                or any(data.glob("*.py"))
            )
            if name and not is_code and link.parent.is_dir() and not os.path.lexists(link):
                link.symlink_to(data)
        then = folder / file.relative_to(root)
        if not then.is_file():
            raise StudyFileError(
                f"--against {revision}: {file.relative_to(root)} is not in that revision of the repository"
            )
        return cls(root, folder, then)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which the current folder, and every place of modules in the repository, is the revision's, for this
        process and those that it starts.

        Raises:
            StudyFileError: the revision does not have the current folder.
        """
        variable = "PYTHONPATH"
        places = map(self._there, os.environ.get(variable, "").split(os.pathsep))
        modules = sys.path[:]
        with environment({variable: os.pathsep.join(places)}), same_folder():
            sys.path[:] = map(self._there, modules)
            try:
                os.chdir(self._there(working_folder()))
            except OSError:
                raise StudyFileError(
                    f"--against: expected a current folder that the revision has, got {working_folder()}"
                ) from None
            else:
                yield
            finally:
                sys.path[:] = modules

    def _there(self, place: str) -> str:
        """A place in the revision; the same where it is not in the repository, or Python's own."""
        path = Path(place).resolve()
        inside = (
            place and path.is_relative_to(self.root) and not path.is_relative_to(Path(sys.prefix).resolve())
        )
        return str(self.folder / path.relative_to(self.root)) if inside else place

    def check_code_of(self, spec: StudySpec) -> None:
        """Check that the study trains the revision's code.

        Raises:
            StudyFileError: it would import files of today's.
        """
        files = sources_of(spec.task)
        today = [
            path for path in files if path.is_relative_to(self.root) and not path.is_relative_to(self.folder)
        ]
        if today:
            raise StudyFileError(
                f"--against: the study would import {today[0]} as it is today, such as from an installed package; a revision "
                "is compared where its code lies beside its task"
            )

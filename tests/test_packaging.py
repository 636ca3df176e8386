"""The wheel holds what the tree holds, and the installed wheel runs a study in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging]
ROOT = Path(__file__).parent.parent
PACKAGES = ("spaces", "objectives", "search", "cluster", "commands", "extras")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: the tree's own build/ may hold modules that have moved since.
    tree = folder / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results")
    )
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    tree = {"bsearch/__init__.py", "bsearch/__main__.py", "bsearch/cli.py", "bsearch/py.typed"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                tree.add(f"bsearch/{path.relative_to(ROOT)}")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("bsearch/")}
    assert held == tree
    others = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} - {"bsearch"}
    assert all(name.endswith(".dist-info") for name in others)


def test_the_installed_wheel_runs_a_study_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = subprocess.run(
        [sys.executable, "-c", "import bsearch; print(bsearch.__file__)"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert where.stdout.startswith(str(site))
    start, briefly = [sys.executable, "-m", "bsearch"], ["--set", "budget.profile_s=1"]
    for arguments in (
        ["init"],
        ["check", "study.yaml", *briefly],
        ["run", "study.yaml", "--trials", "2", *briefly],
    ):
        done = subprocess.run(
            [*start, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "Front of my-study" in done.stdout
    assert (folder / "results" / "my-study" / "front.json").exists()

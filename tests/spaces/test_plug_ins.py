"""What is found by entry points: everything that pyproject.toml names, whatever the installed metadata say."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import get_args

import pytest
from bsearch.spaces.boundary import plug_ins
from bsearch.spaces.boundary.plug_ins import plug_in
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.study.spec import Framework, Tracker

GROUPS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]


def installed(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(
        plug_ins,
        "entry_points",
        lambda group, name: [p for p in points if (p.group, p.name) == (group, name)],
    )


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in GROUPS[group]])
def test_every_entry_point_is_found_in_a_checkout_with_older_metadata(
    group: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    assert plug_in(group, name).__name__ == GROUPS[group][name].partition(":")[2]


def test_every_name_of_the_study_file_has_its_door() -> None:
    assert set(GROUPS["bsearch.trackers"]) == set(get_args(Tracker))
    assert set(GROUPS["bsearch.exporters"]) < set(get_args(Framework))


def test_an_installed_package_brings_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, EntryPoint("mine", "pathlib:Path", "bsearch.exporters"))
    assert plug_in("bsearch.exporters", "mine") is Path


@pytest.mark.parametrize("value", ["pathlib:NoSuchThing", "no_such_module:x"])
def test_one_that_cannot_be_loaded_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, EntryPoint("mine", value, "bsearch.exporters"))
    with pytest.raises(StudyFileError, match=f"mine: {value} cannot be loaded: "):
        plug_in("bsearch.exporters", "mine")


def test_without_any_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plug_ins, "_PROJECT", tmp_path / "pyproject.toml")  # as where a wheel is installed
    installed(monkeypatch)
    with pytest.raises(
        StudyFileError, match=r"mlflow: expected an entry point of bsearch.trackers .* Reinstall bsearch"
    ):
        plug_in("bsearch.trackers", "mlflow")

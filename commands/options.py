"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..spaces.boundary.storage import is_url, sqlite_parts, storage_of
from ..spaces.domain import share
from ..spaces.errors import StudyFileError, cut, plain
from ..spaces.study.file import changed_study, plain_value, read_study
from ..spaces.study.space import Space
from ..spaces.study.spec import StudySpec

if TYPE_CHECKING:
    from ..search.store.stored import StoredStudy

# One definition for each option that several commands have: no name means two things (tests/test_cli.py).
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON and nothing else on stdout: one line; run prints a line per event.",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the study for this command, such as training.precision=bf16. In space: one value (space.width=32), "
    "several (32,64) or a range (0:0.3).",
)


def out_option(what: str) -> Callable[[Any], Any]:
    """Where a command writes its result."""
    return click.option(
        "--out", type=click.Path(path_type=Path), metavar="PATH", help=f"Where to write: {what}"
    )


def keep_option(default: str) -> Callable[[Any], Any]:
    """Where a trained model is kept."""
    return click.option(
        "--keep",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help=f"Folder for the trained model; default: {default}.",
    )


def serial_option(what: str) -> Callable[[Any], Any]:
    """Not using Ray."""
    return click.option("--serial", is_flag=True, help=f"Without Ray: {what}")


def batch_option(what: str) -> Callable[[Any], Any]:
    """Effective batches that are asked about."""
    return click.option(
        "--batch",
        "batches",
        type=click.IntRange(min=1),
        metavar="N",
        multiple=True,
        help=f"Only this batch: {what}",
    )


def until_option(what: str) -> Callable[[Any], Any]:
    """A value of the metric that training has to reach."""
    return click.option(
        "--until", type=VALUE, metavar="VALUE", help=f"A value of the metric to reach: {what}"
    )


def study_in(path: Path, settings: tuple[str, ...] = ()) -> StudySpec:
    """The study in a file, with the storage that the environment names, if it names one, and what `--set` gives."""
    return with_settings(read_study(path, storage=storage_of(os.environ)), settings)


def named(study: str) -> tuple[str, str | None]:
    """A study's file or URL, and which study of its database, written STUDY#NAME.

    >>> named("sqlite:///old.db#runs-2"), named("study.yaml")
    (('sqlite:///old.db', 'runs-2'), ('study.yaml', None))
    """
    source, mark, name = study.rpartition("#")
    path = (sqlite_parts(study) or (study,))[0] if is_url(study) else study
    return (source, name) if mark and name and not os.path.lexists(path) else (study, None)


def opened(study: str) -> StoredStudy:
    """The study that a file, or a URL, names."""
    from ..search.store.stored import StoredStudy

    return StoredStudy.open(*named(study))


class _Share(click.ParamType[float]):
    """A share >= 0 and < 1, written 5% or 0.05."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read it as study files do."""
        try:
            return share(value if value.strip().endswith("%") else float(value))
        except ValueError:
            self.fail(f"expected a share >= 0 and < 1, got {cut(value, 60)!r}. Write 5% or 0.05.", param, ctx)


class _Value(click.ParamType[float]):
    """A finite number."""

    name = "value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {cut(str(value), 60)!r}", param, ctx)
        return number


class _Pick(click.ParamType[dict[str, Any]]):
    """Which trial of a study, as the arguments of a `Choice`."""

    name = "pick"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        kind, colon, text = value.partition(":")
        if colon and kind == "within":
            return {"within": SHARE.convert(text, param, ctx)}
        if colon and kind in ("reaches", "cheapest"):
            return {"target" if kind == "reaches" else "cheapest_to": VALUE.convert(text, param, ctx)}
        if value == "best":
            return {"trial": value}
        if not value.isdecimal():
            self.fail(f"expected a trial's number or one of {_PICKS}; got {cut(value, 60)!r}", param, ctx)
        return {"trial": int(value)}


_PICKS = "best, within:1%, reaches:.9, cheapest:.9"
SHARE, VALUE = _Share(), _Value()


def pick_option(more: str = "") -> Callable[[Any], Any]:
    """Which trial of a study."""
    return click.option(
        "--pick",
        type=_Pick(),
        metavar="PICK",
        help="Which trial: its number, best, within:1% (the fastest within 1% of the best metric), reaches:.9 (the "
        f"fastest that reaches .9) or cheapest:.9 (of all trials that reach it, the one of least cost){more}.",
    )


def study_keys(settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Keys of a study by section, from `--set SECTION.KEY=VALUE`; in `space` one value, several to search, or a range.

    >>> study_keys(("training.precision=bf16", "space.width=32,64", "space.decay=0.1:1", "space.kind=a:b"))
    {'training': {'precision': 'bf16'}, 'space': {'width': {'choices': [32, 64], 'changes_cost': True}, \
'decay': {'low': 0.1, 'high': 1}, 'kind': 'a:b'}}
    """
    found: dict[str, dict[str, Any]] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and section and name) or "." in name:
            unknown = equals and section and not dot and section not in StudySpec.model_fields
            hint = f" Write space.{plain(cut(text, 60))} for a parameter of the task." if unknown else ""
            raise click.UsageError(
                f"--set: expected SECTION.KEY=VALUE such as training.precision=bf16, got {cut(text, 60)!r}.{hint}"
            )
        if (
            option := {"space.effective_batch": "--batches", "space.reference_rate": "--rate"}.get(key)
        ) is not None:
            raise click.UsageError(
                f"--set: expected a key other than {key}. Change it in the study file, or with {option} if STUDY is a task."
            )
        if name in found.setdefault(section, {}):
            raise click.UsageError(f"--set: expected {key} once, got it twice")
        found[section][name] = (
            _searched(key, value) if section == "space" else plain_value(value, f"--set {key}")
        )
    return found


def with_settings(study: StudySpec, settings: tuple[str, ...]) -> StudySpec:
    """The study with the keys that `--set` gives.

    Raises:
        StudyFileError: all their faults.
    """
    keys = study_keys(settings)
    try:
        return changed_study(study, keys)
    except StudyFileError as error:  # located here, since the line of the file says something else
        given = [f"{section}.{name}." for section, values in keys.items() for name in values]

        def is_given(key: str) -> bool:
            return any(f"{key}.".startswith(setting) or setting.startswith(f"{key}.") for setting in given)

        raise StudyFileError(
            replace(fault, file="--set") if is_given(fault.key) else fault for fault in error.faults
        ) from None


def _searched(key: str, value: str) -> Any:
    """One value of a parameter, several to search, or a range."""
    where = f"--set {key}"
    if value.lstrip().startswith(("[", "{")):
        return plain_value(value, where)
    several = [plain_value(text, where) for text in value.split(",")]
    ends = [plain_value(text, where) for text in value.split(":")]
    if len(several) > 1:
        # Where a parameter of a task does not change cost, that only costs time.
        return (
            several
            if key.removeprefix("space.") in Space.model_fields
            else {"choices": several, "changes_cost": True}
        )
    if len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
        return {"low": ends[0], "high": ends[1]}
    return plain_value(value, where)

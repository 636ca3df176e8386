"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import click

from ..search.report.completion import study_names
from ..spaces.boundary.storage import storage_of
from ..spaces.domain import share
from ..spaces.errors import StudyFileError, cut
from ..spaces.study.file import changed_study, plain_value, read_study, resolve_study, study_from_dict
from ..spaces.study.space import Space
from ..spaces.study.spec import StudySpec

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")
storage_option = click.option(
    "--storage",
    metavar="URL",
    callback=lambda ctx, option, url: url or storage_of(os.environ),
    help="Database of the results, instead of the study's own.",
)


def study_in(path: Path, settings: tuple[str, ...] = ()) -> StudySpec:
    """The study in a file, with the storage that the environment names, if it names one, and what `--set` gives."""
    return with_settings(read_study(path, storage=storage_of(os.environ)), settings)


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


class _Times(click.ParamType[float]):
    """A factor, written 10x or 10."""

    name = "times"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            factor = float(value.strip().removesuffix("x"))
        except ValueError:
            factor = math.nan
        if not 1 <= factor < 1e9:
            self.fail(f"expected a factor of 1 or more, such as 10x, got {cut(value, 60)!r}", param, ctx)
        return factor


class _Trial(click.ParamType[int | Literal["best", "knee"]]):
    """A trial's number, or what it is on the front."""

    name = "trial"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["best", "knee"]:
        if value in ("best", "knee"):
            return cast(Literal["best", "knee"], value)
        if not value.isdecimal():
            self.fail(f"expected a trial's number, best or knee; got {cut(value, 60)!r}", param, ctx)
        return int(value)


SHARE, VALUE, TIMES, TRIAL = _Share(), _Value(), _Times(), _Trial()

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the study for this command, such as training.precision=bf16. In space: one value (space.width=32), "
    "several (32,64) or a range (0:0.3).",
)


def choice_options(before: str = "") -> Callable[[Any], Any]:
    """Options that choose a point of the front, for a `Choice`."""

    def add(command: Any) -> Any:
        within = "the fastest trial whose metric is within this share of the best: 1% or 0.01; default: 1%."
        for option in (
            click.option("--within", type=SHARE, metavar="SHARE", help=_sentence(before + within)),
            click.option(
                "--target",
                type=VALUE,
                metavar="VALUE",
                help=_sentence(before + "the fastest trial whose metric reaches this value."),
            ),
            click.option(
                "--cheapest-to",
                type=VALUE,
                metavar="VALUE",
                help=_sentence(before + "of all trials, the one of least cost whose metric reaches this value."),
            ),
            click.option(
                "--trial",
                type=TRIAL,
                metavar="N|best|knee",
                help=_sentence(before + "this trial of the front, the one with the best metric, or the one where it bends."),
            ),
        ):
            command = option(command)
        return command

    return add


def device_options(text: str, *, required: bool = False) -> Callable[[Any], Any]:
    """Options for other devices' profiles and prices."""

    def add(command: Any) -> Any:
        price = click.option(
            "--price",
            "prices",
            type=VALUE,
            multiple=True,
            metavar="VALUE",
            help="What one such device costs in an hour, in any currency: one for each --profile, in the same order; default: "
            "the study's devices.prices.",
        )
        profile = click.option(
            "--profile", "profile_files", type=click.Path(path_type=Path), required=required, multiple=True, help=text
        )
        return profile(price(command))

    return add


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


name_option = click.option(
    "--name", metavar="NAME", shell_complete=study_names, help="Which study, if the storage holds several."
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
            hint = f" Write space.{cut(text, 60)} for a parameter of the task." if unknown else ""
            raise click.UsageError(
                f"--set: expected SECTION.KEY=VALUE such as training.precision=bf16, got {cut(text, 60)!r}.{hint}"
            )
        if (option := {"space.effective_batch": "--batch", "space.reference_rate": "--rate"}.get(key)) is not None:
            raise click.UsageError(
                f"--set: expected a key other than {key}. Change it in the study file, or with {option} if STUDY is a task."
            )
        if name in found.setdefault(section, {}):
            raise click.UsageError(f"--set: expected {key} once, got it twice")
        found[section][name] = _searched(key, value) if section == "space" else plain_value(value, f"--set {key}")
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

        raise StudyFileError(replace(fault, file="--set") if is_given(fault.key) else fault for fault in error.faults) from None


def study_of_task(
    name: str, task: str, space: Mapping[str, Any], settings: tuple[str, ...], storage: str | None = None
) -> StudySpec:
    """A study without a file, from a task and options.

    Raises:
        StudyFileError: all its faults.
    """
    keys = study_keys(settings)
    data = {"study": name, "task": task, **keys, "space": {**space, **keys.get("space", {})}}
    return resolve_study(study_from_dict(data), Path.cwd(), storage)


def _searched(key: str, value: str) -> Any:
    """One value of a parameter, several to search, or a range."""
    where = f"--set {key}"
    if value.lstrip().startswith(("[", "{")):
        return plain_value(value, where)
    several = [plain_value(text, where) for text in value.split(",")]
    ends = [plain_value(text, where) for text in value.split(":")]
    if len(several) > 1:
        # Where a parameter of a task does not change cost, that only costs time.
        return several if key.removeprefix("space.") in Space.model_fields else {"choices": several, "changes_cost": True}
    if len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
        return {"low": ends[0], "high": ends[1]}
    return plain_value(value, where)

"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..search.report.completion import study_names
from ..spaces.domain import share
from ..spaces.errors import cut
from ..spaces.storage import storage_of
from ..spaces.study.file import plain_value, read_study
from ..spaces.study.spec import StudySpec

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")
storage_option = click.option(
    "--storage",
    metavar="URL",
    callback=lambda ctx, option, url: url or storage_of(os.environ),
    help="Database of the results, instead of the study's own.",
)


def study_in(path: Path) -> StudySpec:
    """The study in a file, with the storage that the environment names, if it names one."""
    return read_study(path, storage=storage_of(os.environ))


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


SHARE, VALUE, TIMES = _Share(), _Value(), _Times()

set_option = click.option(
    "--set",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the task, if STUDY is a task: width=32, width=32,64 or noise=0:0.3.",
)


def choice_options(before: str = "") -> Callable[[Any], Any]:
    """Options that choose a point of the front, for a `Choice`."""

    def add(command: Any) -> Any:
        within = "the fastest trial whose metric is within this share of the best: 1% or 0.01; default: 1%."
        for option in (
            click.option("--within", type=SHARE, metavar="SHARE", help=_sentence(before + within)),
            click.option("--best", is_flag=True, help=_sentence(before + "the trial of the front with the best metric.")),
            click.option("--knee", is_flag=True, help=_sentence(before + "the trial where the front bends.")),
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
            click.option("--trial", type=int, metavar="N", help=_sentence(before + "this trial of the front.")),
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


def task_parameters(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parameters of a task from `--set`: one value, several to search, or a range.

    >>> task_parameters(("width=32,64", "decay=0.1:1", "kind=a:b"))
    {'width': {'choices': [32, 64], 'changes_cost': True}, 'decay': {'low': 0.1, 'high': 1}, 'kind': 'a:b'}
    """
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--set: expected NAME=VALUE, got {text!r}")
        several = [plain_value(choice, f"--set {name}") for choice in value.split(",")]
        ends = [plain_value(end, f"--set {name}") for end in value.split(":")]
        if len(several) > 1:
            given[name] = {"choices": several, "changes_cost": True}  # where it does not, that only costs time
        elif len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            given[name] = {"low": ends[0], "high": ends[1]}
        else:
            given[name] = plain_value(value, f"--set {name}")
    return given

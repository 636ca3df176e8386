"""The command line: each command reads, calls and prints."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import traceback
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, get_args

import click
from click.shell_completion import get_completion_class
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__
from .search.report.completion import launchers, study_files, study_names
from .search.report.terminal.signals import handled_signals, is_termination
from .spaces.errors import (
    BsearchError,
    ClusterError,
    NoStudyError,
    OutputError,
    StorageError,
    StudyFileError,
    cut,
    plain,
)
from .spaces.laws.cards import card_named
from .spaces.learning_rate import RATE_RULES, OptimizerSettings, RuleConstants, rule_fact, scaled_settings
from .spaces.plan import plan_batch
from .spaces.readable import from_here
from .spaces.storage import masked, storage_of
from .spaces.study import Objectives, Speed, StudySpec, Tracker, share
from .spaces.study_file import located, plain_value, read_study, resolve_study, study_from_dict

if TYPE_CHECKING:
    from .cluster.submit.submitter import Submitter
    from .search.analysis.retime import Retimed
    from .search.run.driver import StudyResult
    from .search.run.study_run import StudyRun
    from .search.store.stored import StoredStudy
    from .search.suggest.scale_up import NextStudy

# Exit codes: 0 done, 1 the study failed, 2 bad input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class _Commands(click.Group):
    """Turns our errors into messages and exit codes; shows a traceback only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        with handled_signals():
            return self._invoke(ctx)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BsearchError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(plain(masked(str(error))), err=True)
            ctx.exit(FAILED if isinstance(error, StorageError | ClusterError | OutputError) else BAD_INPUT)
        except (KeyboardInterrupt, SystemExit) as error:
            terminated = is_termination(error)
            if isinstance(error, SystemExit) and not terminated:
                raise
            click.echo("terminated" if terminated else "interrupted", err=True)
            ctx.exit(TERMINATED if terminated else INTERRUPTED)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, such as head, is done
            ctx.exit(0)
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(
                f"internal error: {type(error).__name__}: {plain(masked(str(error)))}\n"
                "This is a bug in bsearch: please report it, with what `bsearch --debug ...` prints.",
                err=True,
            )
            ctx.exit(FAILED)


@click.group("bsearch", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bsearch")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Find the best batch size, learning rate and accumulation: the front of training speed against accuracy.

    Start with `bsearch init`, then `bsearch check study.yaml` and `bsearch run study.yaml`.
    """


def _epilog(example: str) -> str:
    return f"\b\nExample:\n  {example}"


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else.")
storage_option = click.option(
    "--storage",
    metavar="URL",
    callback=lambda ctx, option, url: url or storage_of(os.environ),
    help="Database of the results, instead of the study's own.",
)


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


_SHARE, _VALUE, _TIMES = _Share(), _Value(), _Times()
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
            click.option("--within", type=_SHARE, metavar="SHARE", help=_sentence(before + within)),
            click.option("--best", is_flag=True, help=_sentence(before + "the trial of the front with the best metric.")),
            click.option("--knee", is_flag=True, help=_sentence(before + "the trial where the front bends.")),
            click.option(
                "--target",
                type=_VALUE,
                metavar="VALUE",
                help=_sentence(before + "the fastest trial whose metric reaches this value."),
            ),
            click.option(
                "--cheapest-to",
                type=_VALUE,
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
            type=_VALUE,
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


class _Terminal(Console):
    """Prints text literally: names and messages come from files, tasks and databases that others may have written."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


def _terminal(as_json: bool = False) -> Console:
    """The console for people: stdout, or stderr where stdout is a document."""
    console = _Terminal(stderr=as_json, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 1000)  # a file or a pipe has no width to fit
    return console


# ---------------------------------------------------------------- run


@main.command(epilog=_epilog("bsearch run study.yaml\n  bsearch run tasks.py:Cifar --batch 16:4096 --rate 1e-3:1 --trials 20"))
@click.argument("study", shell_complete=study_files)
@click.option("--batch", metavar="LOW:HIGH", help="Effective batch, if STUDY is a task.")
@click.option("--rate", metavar="LOW:HIGH[@BATCH]", help="Reference rate, if STUDY is a task.")
@click.option("--epochs", metavar="N|LOW:HIGH", help="Epochs, if STUDY is a task; default: 5.")
@click.option("--rule", metavar="RULE[,RULE]", help="Learning-rate rules, if STUDY is a task; default: sqrt.")
@set_option
@click.option("--name", metavar="NAME", help="Name of the study, if STUDY is a task.")
@click.option("--trials", type=click.IntRange(min=1), help="Trials to finish, instead of budget.trials.")
@click.option(
    "--until-worth",
    type=_SHARE,
    help="Start no more trials once another ten are expected to add less than this share to the front, such as 1%; instead "
    "of budget.until_worth.",
)
@click.option("--new", is_flag=True, help="Create a new study beside the existing one.")
@click.option(
    "--same-experiment", is_flag=True, help="Resume even though the task's code has changed; both versions are recorded."
)
@click.option("--serial", is_flag=True, help="Run trials one after the other in this process, without Ray.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for front.csv, front.json and front.png.")
@click.option(
    "--metrics", metavar="HOST:PORT", help="Serve numbers for Prometheus there while it runs, such as 127.0.0.1:9100."
)
@storage_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    study: str,
    batch: str | None,
    rate: str | None,
    epochs: str | None,
    rule: str | None,
    parameters: tuple[str, ...],
    name: str | None,
    trials: int | None,
    until_worth: float | None,
    new: bool,
    same_experiment: bool,
    serial: bool,
    out: Path | None,
    metrics: str | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Run the study in STUDY, or resume it, and print its front.

    STUDY is a study file, or a task as module:name or path/file.py:name with --batch and --rate.
    The same command again resumes the study.
    """
    options = {"batch": batch, "rate": rate, "epochs": epochs, "rule": rule, "name": name}
    file, spec = _study(study, options, trials, storage, parameters)
    if until_worth is not None:
        spec = spec.changed({"budget": {"until_worth": until_worth}})
    console = _terminal(as_json)
    with _located(file):
        with _documents_only(as_json):
            folder = out or _results(spec, spec.study)
            result = _run(spec, folder, console, metrics, new=new, same_experiment=same_experiment, serial=serial)
        _print_result(result, spec, file or Path(study), out or _results(spec, result.study.name), console, as_json)
    ctx.exit(FAILED if result.failure else 128 + result.interrupted if result.interrupted else 0)


def _study(
    study: str, options: dict[str, str | None], trials: int | None, storage: str | None, parameters: tuple[str, ...]
) -> tuple[Path | None, StudySpec]:
    """The study that a file or the options describe."""
    given = [key for key, value in options.items() if value is not None] + ["set"] * bool(parameters)
    if ":" in study and not os.path.lexists(study):
        spec = _study_of_options(study, options, storage, parameters)
        file = None
    else:
        if given:
            raise click.UsageError(f"--{given[0]} is for a task; a study file has its own setting. Edit {study}.")
        file = Path(study)
        spec = read_study(file, storage=storage)
    if trials is not None:
        spec = spec.changed({"budget": {"trials": trials}})
    return file, spec


def _study_of_options(task: str, options: dict[str, str | None], storage: str | None, parameters: tuple[str, ...]) -> StudySpec:
    if options["batch"] is None or options["rate"] is None:
        raise click.UsageError("a task needs --batch LOW:HIGH and --rate LOW:HIGH, such as --batch 16:4096 --rate 1e-3:1")
    rate, _, at_batch = options["rate"].partition("@")
    space: dict[str, Any] = {"effective_batch": _span("--batch", options["batch"]), "reference_rate": _span("--rate", rate)}
    if at_batch:
        reference = space["reference_rate"]
        reference = reference if isinstance(reference, dict) else {"value": reference}
        space["reference_rate"] = reference | {"at_batch": _number("--rate", at_batch)}
    if options["epochs"]:
        space["epochs"] = _span("--epochs", options["epochs"])
    if options["rule"]:
        space["rule"] = options["rule"].split(",")
    space |= _task_parameters(parameters)
    name = options["name"] or task.rpartition(":")[2].lower()
    return resolve_study(study_from_dict({"study": name, "task": task, "space": space}), Path.cwd(), storage)


def _task_parameters(texts: tuple[str, ...]) -> dict[str, Any]:
    """Parameters of a task from `--set`: one value, several to search, or a range.

    >>> _task_parameters(("width=32,64", "decay=0.1:1", "kind=a:b"))
    {'width': {'choices': [32, 64], 'changes_cost': True}, 'decay': {'low': 0.1, 'high': 1}, 'kind': 'a:b'}
    """
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--set: expected NAME=VALUE, got {text!r}")
        several = [plain_value(one, f"--set {name}") for one in value.split(",")]
        ends = [plain_value(one, f"--set {name}") for one in value.split(":")]
        if len(several) > 1:
            given[name] = {"choices": several, "changes_cost": True}  # where it does not, that only costs time
        elif len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
            given[name] = {"low": ends[0], "high": ends[1]}
        else:
            given[name] = plain_value(value, f"--set {name}")
    return given


def _span(option: str, text: str) -> Any:
    low, colon, high = text.partition(":")
    return {"low": _number(option, low), "high": _number(option, high)} if colon else _number(option, low)


def _number(option: str, text: str) -> int | float:
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise click.UsageError(f"{option}: expected LOW:HIGH such as 16:4096, got {cut(text, 60)!r}") from None


def _results(spec: StudySpec, name: str) -> Path:
    return spec.folder / "results" / name


def _results_beside(study: str) -> Path:
    """The results folder of a study file; for a database URL, the one in this folder."""
    return (Path() if "://" in study else Path(study).parent) / "results"


def _documents_only(as_json: bool) -> AbstractContextManager[Any]:
    """With --json, output of the task goes to stderr: stdout is for the document."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


@contextmanager
def _located(file: Path | None) -> Any:
    """Add file and line to faults found after the file was read."""
    try:
        yield
    except StudyFileError as error:
        raise (located(error, file) if file is not None else error) from None


def _run(
    spec: StudySpec, out: Path, console: Console, metrics: str | None, *, new: bool, same_experiment: bool, serial: bool
) -> StudyResult:
    from .cluster.study import run_study_here
    from .search.report.metrics import metrics_server
    from .search.report.terminal.live import LiveView

    with metrics_server(metrics) as serve, LiveView(console) as view:

        def watch(run: StudyRun) -> None:
            serve(run)
            view.watch(run)

        return run_study_here(
            spec, out, serial=serial, new=new, same_experiment=same_experiment, notify=view.notify, watch=watch
        )


def _print_result(result: StudyResult, spec: StudySpec, study: Path, out: Path, console: Console, as_json: bool) -> None:
    """The end of a run: the front, its files, and what to do next."""
    from .search.report.export import json_text, study_document, write_front
    from .search.report.page.draw import picture
    from .search.report.page.figures import StudyFigures
    from .search.report.terminal.tables import outcome_counts
    from .search.run.study_run import gain_sentence
    from .spaces.readable import count, seconds
    from .spaces.trial import counted

    stored = result.study
    document = study_document(stored.name, masked(stored.url), stored.front, stored.records)
    document |= {"stopped": result.stopped or None, "elapsed_s": result.elapsed_s, "expected_gain": result.gain}
    done = counted(stored.records)
    console.print()
    if stored.front.trials:
        _print_front(stored, sum(record.counts > 0 for record in stored.records), console)
        for path in write_front(out, document, picture(StudyFigures(stored).front_figure(), "png")):
            console.print(f"wrote {from_here(path)}", style="dim")
    else:
        console.print(f"{stored.name} has no finished trial yet, so there is no front.")
    others = outcome_counts(record for record in stored.records if record.outcome not in ("complete", "waiting"))
    if others:
        console.print(f"Other trials: {others}")
    again = f"bsearch run {study}" if study.suffix in (".yaml", ".yml") else "the same command again"
    if result.failure:
        console.print(f"The study stopped: {result.failure}")
        failed = [record for record in stored.records if record.outcome == "error"]
        if failed:
            console.print(f"`bsearch show {_shown(study, spec)} --trial {failed[-1].number}` shows its traceback.")
    elif result.stopped:
        lower = result.stopped.startswith("budget.until_worth")
        more = "lower it, then " if lower else "raise it, then " if result.stopped.startswith("budget.") else ""
        after = f" after {seconds(result.elapsed_s)}" if result.elapsed_s else ""
        console.print(f"Stopped{after}: {result.stopped}. To resume: {more}{again}")
    elif done < spec.budget.trials:
        console.print(f"{count(done)} of {spec.budget.trials} trials are done. To resume: {again}")
    if result.gain is not None and not result.stopped.startswith("budget.until_worth"):
        sentence = gain_sentence(result.gain)
        console.print(f"{sentence[0].upper()}{sentence[1:]} (a rough guide, often too high).")
    shown = _shown(study, spec)
    following = {
        f"bsearch report {shown}": "an HTML page to explore and choose from",
        f"bsearch show {shown} --all": "every trial",
        f"bsearch train {shown} --within 1%": "train the fastest point within 1% of the best, and keep the model",
        f"bsearch export {shown} --to hf": "that point's settings for a trainer",
        f"bsearch dashboard {shown}": "in the browser",
    }
    console.print("Next:")
    for command, what in following.items():
        console.print(f"  {command:<{max(map(len, following))}}  {what}")
    if as_json:
        click.echo(json_text(document), nl=False)


def _shown(study: Path, spec: StudySpec) -> str:
    """The study as an argument for other commands."""
    return str(study) if study.suffix in (".yaml", ".yml") else masked(spec.storage or "")


# ---------------------------------------------------------------- check


@main.command(epilog=_epilog("bsearch check study.yaml"))
@click.argument("study", type=click.Path(path_type=Path), shell_complete=study_files)
@storage_option
@json_option
def check(study: Path, storage: str | None, as_json: bool) -> None:
    """Validate the study in STUDY and forecast it: a few timed steps, no training.

    Prints how a few batch sizes would be trained, the fastest and slowest trial, the duration of the study,
    the range of training times on the front, and advice.
    """
    spec = read_study(study, storage=storage)
    from .search.preview.check import check_study
    from .search.report.terminal.forecast import check_document, forecast_parts

    console = _terminal(as_json)
    with _located(study), _documents_only(as_json):
        checked = check_study(spec)
    if as_json:
        click.echo(json.dumps(check_document(spec.study, checked), indent=2))
        return
    for part in forecast_parts(str(study), spec, checked):
        console.print(part)


# ---------------------------------------------------------------- profile


@main.command(epilog=_epilog("bsearch profile study.yaml --png profile.png --out profile.json"))
@click.argument("study", type=click.Path(path_type=Path), shell_complete=study_files)
@click.option("--png", type=click.Path(path_type=Path), help="Plot memory and speed into this file.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the profile here, for `retime` and `plan`.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), help="Seconds of real steps; default: 5 for memory, budget.profile_s for speed."
)
@click.option("--device-like", metavar="CARD", help="Predict memory on a GPU that is not here, such as 'A100 80GB'.")
@click.option("--energy", is_flag=True, help="Also measure the device's power, as if energy_j were an objective.")
@click.option(
    "--power-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="WATTS",
    help="Limit each GPU's power to this while profiling, and restore its limit afterwards; usually needs root.",
)
@storage_option
@json_option
def profile(
    study: Path,
    png: Path | None,
    out: Path | None,
    seconds: float | None,
    device_like: str | None,
    energy: bool,
    power_limit: float | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Predict memory and step time of the study in STUDY, and measure as much as time allows.

    Prints peak memory by micro-batch (each size is traced, none extrapolated) and where it goes, the largest micro-batch
    under memory.limit, and the step time fitted to whole steps timed here, with the fastest accumulation for each
    effective batch. With --device-like, memory alone, traced as CUDA would run it; nothing is measured.
    """
    if device_like is not None and (energy or power_limit):
        raise click.UsageError("--device-like measures nothing; remove --energy and --power-limit")
    card = None if device_like is None else card_named(device_like)
    spec = read_study(study, storage=storage)
    from .search.preview.check import profile_study
    from .search.report.export import json_text
    from .search.report.terminal.profile import profile_document, profile_parts, profile_picture
    from .spaces.files import write_file

    console = _terminal(as_json)
    with _located(study), _documents_only(as_json):
        document = profile_document(spec, profile_study(spec, seconds, card, energy=energy, power_limit_w=power_limit))
    for path, content in ((png, lambda: profile_picture(document)), (out, lambda: json_text(document))):
        if path is not None:
            write_file(path, content())
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    for part in profile_parts(document, console.width):
        console.print(part)
    for path in (png, out):
        if path is not None:
            console.print(f"wrote {path}", style="dim")


@main.command(
    epilog=_epilog(
        "bsearch retime study.yaml --profile a100.json\n"
        "  bsearch retime study.yaml --profile a100.json --price 1.8 --profile h100.json --price 2.5"
    )
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@device_options(
    "The other device's profile, from `bsearch profile STUDY --out FILE` there; several are compared.", required=True
)
@click.option(
    "--also",
    type=click.Choice(get_args(Speed)),
    help="A second measure of speed, as a third objective; default: the study's objectives.also.",
)
@name_option
@storage_option
@json_option
def retime(
    study: str,
    profile_files: tuple[Path, ...],
    prices: tuple[float, ...],
    also: Speed | None,
    name: str | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Recompute a study's front with other devices' step times, without training.

    Accuracies stay; on a device with less memory the same effective batch accumulates more. With several profiles, or with
    prices: one front over all devices, and what its most accurate setting takes on each.
    """
    from .search.analysis.retime import retimed_summary
    from .search.report.export import json_text, study_document
    from .search.report.terminal.tables import front_plot, front_table, knee_sentence
    from .search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name, storage)
    if also == stored.spec.objectives.speed:
        raise click.UsageError(f"--also: expected another measure than the study's own, which is {also}")
    objectives = stored.spec.objectives.with_also(also)
    each = _retimed_on(stored, profile_files, prices, objectives)
    console = _terminal(as_json)
    if prices or len(each) > 1:
        _compare_devices(stored, each, objectives, console, as_json)
        return
    ((device, after),) = each.items()
    if as_json:
        document = study_document(stored.name, masked(stored.url), after.front, after.records)
        document |= {"device": device, "was": after.was, "left_out": after.left_out, "notes": after.notes}
        click.echo(json_text(document), nl=False)
        return
    trials = len(after.records) + len(after.left_out)
    console.print(
        f"Front of {stored.name} on {device}: {len(after.front.trials)} of {trials} trials",
        style="bold",
    )
    console.print(front_table(after.front))
    console.print(front_plot(after.front, after.records, console.width))
    for sentence in (knee_sentence(after.front), retimed_summary(stored.front, after), *after.notes, *after.left_out):
        console.print(sentence or "")


def _retimed_on(
    stored: StoredStudy, profile_files: tuple[Path, ...], prices: tuple[float, ...], objectives: Objectives
) -> dict[str, Retimed]:
    """A study's trials on other devices, by the devices' names."""
    from .search.analysis.retime import read_devices, retimed

    if prices and len(prices) != len(profile_files):
        raise click.UsageError(f"expected a --price for each of {len(profile_files)} profiles, got {len(prices)}")
    if any(price < 0 for price in prices):
        raise click.UsageError(f"--price: expected 0 or more, got {min(prices):g}")
    devices, attempts = read_devices(profile_files), stored.tables().attempts(stored.name)
    return {
        name: retimed(stored.spec, stored.identity["task"], stored.records, attempts, device, price, objectives=objectives)
        for (name, device), price in zip(devices.items(), prices or (None,) * len(devices), strict=True)
    }


def _compare_devices(
    stored: StoredStudy, each: Mapping[str, Retimed], objectives: Objectives, console: Console, as_json: bool
) -> None:
    """The front over several devices."""
    from .search.analysis.retime import front_over_devices, placements_over
    from .search.report.export import json_text, trial_document
    from .search.report.terminal.retime import placements_parts

    placements = placements_over(each, objectives)
    front = front_over_devices(placements, objectives)
    if as_json:
        devices = [
            {"device": name, "price": after.price, "left_out": after.left_out, "notes": after.notes}
            for name, after in each.items()
        ]
        on_front = [
            {"device": placement.device, "cost": placement.trial.taken("cost"), **trial_document(placement.trial, stored.front)}
            for placement in front
        ]
        click.echo(json_text({"study": stored.name, "devices": devices, "front": on_front}), nl=False)
        return
    for part in placements_parts(stored.name, placements, front, objectives):
        console.print(part)
    for name, after in each.items():
        for sentence in (*after.notes, *after.left_out):
            console.print(f"{name}: {sentence}")


# ---------------------------------------------------------------- bench


@main.command(
    epilog=_epilog("bsearch bench study.yaml --sizes around:128,around:512\n  bsearch bench tasks.py:Cifar --set width=32")
)
@click.argument("study", metavar="STUDY|TASK", shell_complete=study_files)
@click.option("--sizes", default="around:128", show_default=True, help="Effective batches: 100,127,128 or around:128.")
@click.option("--repeats", type=click.IntRange(min=2), default=8, show_default=True, help="Rounds; each times every size.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices that share each batch.")
@click.option("--memory", metavar="LIMIT", help="Memory of one device: 10GiB, 90% or device.")
@click.option("--precision", type=click.Choice(["fp32", "tf32", "bf16", "fp16"]))
@click.option("--channels-last", is_flag=True, help="Use the channels-last memory format.")
@click.option("--cudnn-benchmark", is_flag=True, help="Let cuDNN benchmark its kernels for every size.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile the model.")
@set_option
@json_option
def bench(
    study: str,
    sizes: str,
    repeats: int,
    devices: int | None,
    memory: str | None,
    precision: str | None,
    channels_last: bool,
    cudnn_benchmark: bool,
    compiled: bool,
    parameters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Time training and inference at many batch sizes: do powers of two pay off on your model and device?

    Sizes are timed in interleaved rounds, and only differences larger than the noise are reported. Also finds the
    largest micro-batch that fits, and tries the sizes that a rule of thumb for convolutional nets suggests.
    """
    from .search.preview.bench import run_bench, sizes_of
    from .search.report.export import json_text
    from .search.report.terminal.bench import bench_tables

    wanted = sizes_of(sizes)
    spec = _benched(study, wanted, parameters)
    training = {
        "precision": precision,
        "channels_last": channels_last or None,
        "cudnn_benchmark": cudnn_benchmark or None,
        "compile": compiled or None,
    }
    changes: dict[str, dict[str, Any]] = {
        "training": {key: value for key, value in training.items() if value is not None},
        "devices": {} if devices is None else {"per_trial": devices},
        "memory": {} if memory is None else {"limit": memory},
    }
    console = _terminal(as_json)
    with _documents_only(as_json), console.status("timing ...") as status:
        document = run_bench(spec.changed(changes), wanted, repeats, status.update)
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    for part in bench_tables(document):
        console.print(part)


def _benched(study: str, sizes: list[int], parameters: tuple[str, ...]) -> StudySpec:
    """The study file, or a study of the task with just these sizes."""
    if study.endswith(".py"):
        raise click.UsageError(f"a task is named with its file: write {study}:NAME")
    if ":" not in study or os.path.lexists(study):
        if parameters:
            raise click.UsageError(f"--set is for a task; a study file has its own setting. Edit {study}.")
        return read_study(Path(study))
    space = {"effective_batch": sizes, "reference_rate": 0.01, "rule": "constant", **_task_parameters(parameters)}
    name = re.sub(r"[^A-Za-z0-9]+", "-", study.rpartition(":")[2]) or "bench"
    return resolve_study(study_from_dict({"study": name, "task": study, "space": space}), Path.cwd())


# ---------------------------------------------------------------- plan and rules


@main.command(epilog=_epilog("bsearch plan 500 --devices 2 --cap 96 --rate 0.1 --at-batch 256 --rule linear"))
@click.argument("effective_batch", type=click.IntRange(min=1))
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Data-parallel workers.")
@click.option("--cap", type=click.IntRange(min=1), help="The largest micro-batch that fits in one device's memory.")
@click.option("--accumulation", type=click.IntRange(min=1), help="Micro-batches per step; raised where fewer do not fit.")
@click.option(
    "--smallest",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="The smallest micro-batch the model works with.",
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Reference learning rate.")
@click.option("--at-batch", type=click.IntRange(min=1), default=256, show_default=True, help="Batch of the reference rate.")
@click.option("--rule", type=click.Choice(list(RATE_RULES)), default="sqrt", show_default=True)
@click.option("--exponent", type=float, default=0.5, show_default=True, help="Exponent of the rule power.")
@click.option(
    "--noise-batch", type=click.FloatRange(min=0, min_open=True), help="For the rules saturating and surge, in samples."
)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.0, help="At the reference batch, for adamw_tau.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    help="A profile from `bsearch profile STUDY --out FILE`: its limits apply, and training time and memory are known.",
)
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="With --profile: epochs that the training time is for.",
)
@click.option(
    "--set",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="With --profile: one of its combinations of parameters that change cost.",
)
@json_option
def plan(
    effective_batch: int,
    devices: int,
    cap: int | None,
    accumulation: int | None,
    smallest: int,
    rate: float | None,
    at_batch: int,
    rule: str,
    exponent: float,
    noise_batch: float | None,
    weight_decay: float,
    profile_file: Path | None,
    epochs: float,
    parameters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print how one step of EFFECTIVE_BATCH samples is made: shares, micro-batches, weights, learning rate, known time."""
    from .search.report.terminal.plan import plan_document, plan_parts

    known = None
    if profile_file is not None:
        from .search.analysis.retime import planned_on, read_profile

        batch_plan, known = planned_on(
            read_profile(profile_file, timed=False),
            effective_batch,
            epochs,
            devices=devices,
            accumulation=accumulation,
            largest_micro_batch=cap,
            smallest_micro_batch=smallest,
            parameters=_task_parameters(parameters),
        )
    elif parameters:
        raise click.UsageError("--set chooses one of a profile's combinations; add --profile FILE")
    else:
        batch_plan = plan_batch(
            effective_batch,
            devices=devices,
            accumulation=accumulation,
            largest_micro_batch=cap,
            smallest_micro_batch=smallest,
        )
    settings = None
    if rate is not None:
        settings = scaled_settings(
            rule,
            OptimizerSettings(rate, weight_decay=weight_decay),
            reference_batch=at_batch,
            effective_batch=effective_batch,
            constants=RuleConstants.at(at_batch, exponent, noise_batch),
        )
    if as_json:
        click.echo(json.dumps(plan_document(batch_plan, rule, settings, known), indent=2))
        return
    console = _terminal()
    scaled = None if settings is None else (rule, rate, at_batch, settings)
    for part in plan_parts(batch_plan, accumulation, scaled, epochs, known):
        console.print(part)


@main.command(epilog=_epilog("bsearch rules\n  bsearch rules study.yaml"))
@click.argument("study", metavar="[STUDY|URL]", required=False, shell_complete=study_files)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Report the best rate at this batch too; may be repeated.",
)
@name_option
@storage_option
@json_option
def rules(study: str | None, batches: tuple[int, ...], name: str | None, storage: str | None, as_json: bool) -> None:
    """Print the learning-rate rules: what they do, their formulas and sources.

    kappa is effective_batch / reference batch. With STUDY: which rules its trials support, with a 90 % interval of the
    exponent, and the best rate at a few batches.
    """
    if study is not None:
        _study_rules(study, batches, name, storage, as_json)
        return
    if name is not None or batches:
        raise click.UsageError(f"--{'batch' if batches else 'name'} needs a STUDY")
    rows = [
        {"rule": name, **{fact.lower(): rule_fact(name, fact) for fact in ("Summary", "Formula", "Source")}}
        for name in RATE_RULES
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = _terminal()
    for row in rows:
        console.print(Text(row["rule"], style="bold"), f" {row['summary']}\n  {row['formula']}\n  {row['source']}\n")


@main.command("scale-up", epilog=_epilog("bsearch scale-up small.yaml medium.yaml --data 10x --model 4x"))
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True, shell_complete=study_files)
@click.option(
    "--data", type=_TIMES, default="1x", metavar="TIMES", help="Training samples, as a multiple of the largest tried."
)
@click.option(
    "--model", type=_TIMES, default="1x", metavar="TIMES", help="Model parameters, as a multiple of the largest tried."
)
@click.option(
    "--then-run",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the small study that would narrow the intervals most.",
)
@click.option("--name", "named", multiple=True, metavar="NAME", help="Which study, if the storage holds several; repeatable.")
@storage_option
@json_option
def scale_up(
    studies: tuple[str, ...],
    data: float,
    model: float,
    then_run: Path | None,
    named: tuple[str, ...],
    storage: str | None,
    as_json: bool,
) -> None:
    """Predict the best batch, learning rate and weight decay of a training that is too large to search.

    Uses the trials of one study, or of several that differ only in size (epochs, samples, width), and published scaling laws:
    where the trials say little, the interval is the laws' disagreement.
    """
    from .search.report.export import json_text
    from .search.report.terminal.scale_up import scale_up_document, scale_up_parts
    from .search.store.stored import StoredStudy
    from .search.suggest.scale_up import scale_up as predict

    if then_run is not None and then_run.exists():
        raise click.UsageError(f"--then-run: {then_run} exists already; name another")
    opened = [StoredStudy.open(study, one, storage) for study in studies for one in (named or (None,))]
    _check_alike(opened)
    names, records = ", ".join(stored.name for stored in opened), [one for stored in opened for one in stored.records]
    found = predict(names, records, data, model, opened[0].front.direction)
    if as_json:
        click.echo(json_text(scale_up_document(names, found)), nl=False)
    console = _terminal(as_json)
    if not as_json:
        for part in scale_up_parts(names, found):
            console.print(part)
    if then_run is None:
        return
    if found.next is None:
        console.print("\nWrote nothing: no study that costs up to two trainings of that size would narrow an interval by 5%.")
        return
    widest = found.next.size.parameters
    stored = next(one for one in opened if any((trial.facts.model_parameters or 1) == widest for trial in one.records))
    batch, rate = (f"{1 - one:.0%}" for one in found.next.narrows)
    console.print(
        f"\nWrote {from_here(_write_next(then_run, stored, found.next))}: {found.next.trials} trials of "
        f"{found.next.size.samples:,.0f} samples, in all {found.next.cost:.2g} trainings of the predicted size. It would "
        f"narrow the interval of the batch by {batch} and that of the rate by {rate}. Run it, then name it here too."
    )


def _check_alike(opened: Sequence[StoredStudy]) -> None:
    """Raise unless the studies are different ones of the same task and metric."""
    faults = []
    if len({(stored.url, stored.name) for stored in opened}) < len(opened):
        faults.append("each study once")
    if len(metrics := {(stored.front.metric, stored.front.direction) for stored in opened}) > 1:
        faults.append(f"one metric, got {' and '.join(sorted(name for name, _ in metrics))}")
    if len(tasks := {stored.identity["task"]["name"] for stored in opened}) > 1:
        faults.append(f"one task, got {' and '.join(sorted(tasks))}")
    if faults:
        raise StudyFileError(f"expected studies that differ in their size alone: {'; '.join(faults)}")


def _write_next(file: Path, stored: StoredStudy, found: NextStudy) -> Path:
    import yaml

    from .search.suggest.scale_up import next_study
    from .spaces.files import write_file

    return write_file(file, yaml.safe_dump(next_study(stored.spec, stored.records, found), sort_keys=False))


@main.command(
    "fit-batch", epilog=_epilog("bsearch fit-batch runs.csv --at 500 --at 3000\n  bsearch fit-batch study.yaml --target 0.95")
)
@click.argument("source", metavar="TABLE.csv|STUDY", shell_complete=study_files)
@click.option("--at", "batches", type=click.IntRange(1, 2**53), multiple=True, help="Predict this batch too; may be repeated.")
@click.option("--workload", help="Only this one of the table's workloads.")
@click.option("--target", type=_VALUE, help="Value of the study's metric to reach; default: its target.")
@name_option
@storage_option
@json_option
def fit_batch(
    source: str,
    batches: tuple[int, ...],
    workload: str | None,
    target: float | None,
    name: str | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Fit the number of samples that training needs to reach its target, as a function of the batch.

    TABLE.csv has the columns effective_batch and to_target: the samples (or epochs) that one run needed, or those of several
    runs separated by spaces. With a column workload, each workload gets its own law; with a column group (or round), each
    group gets its own level under that law.

    STUDY must have searched both effective_batch and epochs. A model of its metric then gives, for each batch, the fewest
    samples with which the best setting reaches the target.
    """
    if not source.endswith(".csv"):
        _fit_study_batches(source, batches, target, name, storage, as_json)
        return
    table = Path(source)
    from .search.analysis.samples_to_target import LEAST_BATCHES, fit_batch_law, read_runs
    from .search.report.export import json_text
    from .search.report.terminal.batch_law import law_document, law_parts

    workloads = read_runs(table)
    if workload is not None and workload not in workloads:
        raise StudyFileError(f"{table}: expected one of {', '.join(workloads)} as workload, got {cut(workload, 60)!r}")
    chosen = {name: points for name, points in workloads.items() if workload in (None, name)}
    few = [name for name, points in chosen.items() if len({point.effective_batch for point in points}) < LEAST_BATCHES]
    if len(few) == len(chosen):
        raise StudyFileError(f"{table}: expected a workload with runs at {LEAST_BATCHES} or more batches")
    laws = {name: fit_batch_law(points) for name, points in chosen.items() if name not in few}
    if as_json:
        click.echo(json_text({name: law_document(chosen[name], law, batches) for name, law in laws.items()}), nl=False)
        return
    console = _terminal()
    for name, law in laws.items():
        for part in law_parts(name, chosen[name], law, batches):
            console.print(part)
        console.print()
    if few:
        names = ", ".join(name or "the rows without a workload" for name in few)
        console.print(f"Left out, with fewer than {LEAST_BATCHES} batches: {names}")


def _fit_study_batches(
    study: str, batches: tuple[int, ...], target: float | None, name: str | None, storage: str | None, as_json: bool
) -> None:
    from .search.report.export import json_text
    from .search.report.terminal.batch_law import samples_document, samples_parts
    from .search.store.stored import StoredStudy
    from .search.suggest.samples_by_batch import study_samples

    stored = StoredStudy.open(study, name, storage)
    target = stored.spec.target if target is None else target
    if target is None:
        raise click.UsageError(f"expected --target VALUE, a value of {stored.front.metric}, since the study has none")
    with _located(None if "://" in study else Path(study)):
        found = study_samples(stored.name, stored.spec, stored.records, target, batches)
    if as_json:
        click.echo(json_text(samples_document(found)), nl=False)
        return
    for part in samples_parts(stored.name, stored.front.metric, found):
        _terminal().print(part)


def _study_rules(study: str, batches: tuple[int, ...], name: str | None, storage: str | None, as_json: bool) -> None:
    from .search.report.export import json_text
    from .search.report.terminal.tables import rates_document, rates_table, rule_verdict
    from .search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name, storage)
    with _located(None if "://" in study else Path(study)):
        found = stored.best_rates(batches)
    if as_json:
        click.echo(json_text(rates_document(stored.name, found)), nl=False)
        return
    console = _terminal()
    left_out = f"; {found.left_out} that failed to learn are left out" if found.left_out else ""
    console.print(f"Best rate against batch in {stored.name}: {found.trials} trials{left_out}", style="bold")
    console.print(rule_verdict(found))
    console.print(rates_table(found))
    console.print(
        "Intervals are 90 %. They apply only to the batches and rates tried, and to training runs of the same length.",
        style="dim",
    )


# ---------------------------------------------------------------- show, export, dashboard


@main.command(
    epilog=_epilog(
        "bsearch show study.yaml --all\n  bsearch show sqlite:///study.db --trial 7\n  bsearch show study.yaml --watch"
    )
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option("--all", "every", is_flag=True, help="Every trial, not only the front.")
@click.option("--outcome", help="Only trials with this outcome, such as complete, diverged, error or infeasible.")
@click.option("--trial", type=int, help="One trial: its settings, its learning curve, its traceback.")
@click.option("--target", type=_VALUE, metavar="VALUE", help="Settings whose metric reaches this value, fastest first.")
@click.option("--watch", is_flag=True, help="Follow a study that another process runs, until it ends.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between updates, for --watch.",
)
@storage_option
@json_option
@click.pass_context
def show(
    ctx: click.Context,
    study: str,
    name: str | None,
    every: bool,
    outcome: str | None,
    trial: int | None,
    target: float | None,
    watch: bool,
    every_s: float,
    storage: str | None,
    as_json: bool,
) -> None:
    """Print what a study has found so far: its front, its trials, one trial, or the settings that reach a target.

    With --watch, waits up to a minute for the study to begin; exits with 0 when it has met its budget, and with 1 if no driver
    runs it.
    """
    if watch:
        if as_json or every or outcome or trial is not None or target is not None:
            raise click.UsageError(
                "--watch cannot be combined with --all, --outcome, --trial, --target or --json; programs can poll `show --json`"
            )
        ctx.exit(_watch(study, name, storage, every_s))
    if trial is not None and (every or outcome or target is not None):
        raise click.UsageError("--trial shows one trial: it cannot be combined with --all, --outcome or --target")
    if target is not None and (every or outcome):
        raise click.UsageError("--target shows the settings that reach it: it cannot be combined with --all or --outcome")
    from .search.report.export import json_text, study_document, trial_document
    from .search.report.terminal.tables import trials_table
    from .search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name, storage)
    front, records = stored.front, stored.records
    console = _terminal(as_json)
    if trial is not None:
        _show_trial(stored, trial, as_json)
        return
    if target is not None:
        _show_target(stored, target, console, as_json)
        return
    chosen = [record for record in records if outcome in (None, record.outcome)]
    if as_json:
        document = study_document(stored.name, masked(stored.url), front, records)
        if every or outcome:
            document["all"] = [trial_document(record, front) for record in chosen]
        click.echo(json_text(document), nl=False)
        return
    if every or outcome:
        console.print(trials_table(chosen, front))
        return
    _print_study(stored, console)


def _show_target(stored: StoredStudy, target: float, console: Console, as_json: bool) -> None:
    from .search.analysis.choice import chance_to_reach, settings_reaching
    from .search.analysis.confirm import averaged
    from .search.report.export import json_text, trial_document
    from .search.report.terminal.tables import front_table, target_sentence

    front = stored.front
    reaching = settings_reaching(front, averaged(stored.records, stored.spec.objectives), target)
    if as_json:
        trials = [
            {**trial_document(trial, front), "chance": chance_to_reach(trial, target, front.direction)}
            for trial in reaching.trials
        ]
        click.echo(json_text({"study": stored.name, "metric": front.metric, "target": target, "trials": trials}), nl=False)
        return
    if reaching.trials:
        console.print(front_table(reaching, target=target))
    console.print(target_sentence(stored, target))


def _watch(study: str, name: str | None, storage: str | None, every_s: float) -> int:
    from .search.report.terminal.live import LiveView
    from .search.report.terminal.watch import begun_study, watch_study
    from .search.store.stored import StoredStudy

    console = _terminal()
    try:
        with LiveView(console) as view:
            begun = begun_study(lambda: StoredStudy.open(study, name, storage), view.say)
            budget = 0 if "://" in study else read_study(Path(study), storage=storage).budget.trials
            end = watch_study(begun, view, every_s, budget)
    except KeyboardInterrupt:
        console.print("stopped watching; the study keeps running", style="dim")
        return INTERRUPTED
    _print_study(StoredStudy.open(study, name, storage), console)
    console.print(end.why)
    return 0 if end.done else FAILED


def _print_front(stored: StoredStudy, trials: int, console: Console) -> None:
    """The front of so many trials as table, plot and sentences."""
    from .search.report.terminal.tables import front_plot, front_summary, front_table

    front, records = stored.front, stored.records
    console.print(f"Front of {stored.name}: {len(front.trials)} of {trials} trials", style="bold")
    console.print(front_table(front))
    plot = front_plot(front, records, console.width)
    console.print(f"\n{plot}" if plot else "")
    for sentence in front_summary(stored):
        console.print(sentence)


def _print_study(stored: StoredStudy, console: Console) -> None:
    """The front, and how many trials ended in which way."""
    from .search.report.terminal.tables import outcome_counts

    _print_front(stored, len(stored.records), console)
    console.print(f"Trials: {outcome_counts(stored.records)}")


def _show_trial(study: StoredStudy, number: int, as_json: bool) -> None:
    from .search.report.export import json_text, trial_document
    from .search.report.terminal.tables import trial_parts

    front, records = study.front, study.records
    record = next((record for record in records if record.number == number), None)
    if record is None:
        known = f"its trials are numbered 0 to {len(records) - 1}" if records else "it has no trials yet"
        raise StudyFileError(f"study {study.name}: has no trial {number}; {known}")
    tables = study.tables()
    curve = [
        {key: row[key] for key in ("attempt", "samples_seen", "elapsed_s", "accuracy", "train_loss")}
        for row in tables.curve(study.name, number)
    ]
    attempts = [
        {key: row[key] for key in ("attempt", "outcome", "message", "traceback", "started_at", "ended_at")}
        for row in tables.attempts(study.name, number)
    ]
    document = trial_document(record, front) | {"curve": curve, "attempts": attempts}
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    console = _terminal()
    for part in trial_parts(document, record, front.metric):
        console.print(part)
    for attempt in attempts:
        if attempt["traceback"]:
            console.print(attempt["traceback"])


@main.command(
    epilog=_epilog("bsearch export study.yaml --format csv --out front.csv\n  bsearch export study.yaml --to hf --within 1%")
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option("--format", "kind", type=click.Choice(["csv", "json"]), default="csv", show_default=True)
@click.option("--what", type=click.Choice(["front", "trials"]), default="front", show_default=True)
@click.option(
    "--to",
    "framework",
    type=click.Choice(["hf", "lightning", "deepspeed", "accelerate", "pytorch", "trl", "axolotl", "yaml"]),
    help="Settings of one trial of the front, to paste into code for this framework.",
)
@choice_options("With --to: ")
@click.option("--out", type=click.Path(path_type=Path), help="File to write; default: stdout.")
@storage_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    study: str,
    name: str | None,
    kind: str,
    what: str,
    framework: str | None,
    out: Path | None,
    storage: str | None,
    **choice: Any,
) -> None:
    """Print a study's front, or all its trials, as CSV or JSON; or one trial's settings for a framework.

    docs/export.md lists the columns, and what each framework can express.
    """
    from .search.report.export import csv_text, json_text, study_document, trial_document
    from .search.store.stored import StoredStudy
    from .spaces.files import write_file

    _check_export(ctx, framework)
    stored = StoredStudy.open(study, name, storage)
    front, records = stored.front, stored.records
    if framework is not None:
        text = _exported(stored, framework, choice, to_terminal=out is None and sys.stdout.isatty())
    else:
        rows = [trial_document(record, front) for record in (front.trials if what == "front" else records)]
        if kind == "csv":
            text = csv_text(rows)
        else:
            document = study_document(stored.name, masked(stored.url), front, records)
            text = json_text(document if what == "front" else document | {"all": rows})
    if out is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {write_file(out, text)}", err=True)


def _check_export(ctx: click.Context, framework: str | None) -> None:
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if framework is not None and given & {"kind", "what"}:
        raise click.UsageError("--to prints one trial's settings; --format and --what are for tables")
    if framework is None and given & {"trial", "knee", "best", "within", "target", "cheapest_to"}:
        raise click.UsageError(
            "--trial, --knee, --best, --within, --target and --cheapest-to choose a trial for --to; add --to FRAMEWORK"
        )


def _exported(stored: StoredStudy, framework: str, choice: dict[str, Any], *, to_terminal: bool) -> str:
    """One trial's settings for a framework; which trial, its result, and notes that the text lacks go to stderr."""
    from .search.analysis.choice import Choice
    from .search.report.frameworks import FRAMEWORKS
    from .search.report.frameworks.settings import settings_to_export

    chosen = settings_to_export(stored, Choice(**choice))
    exported = FRAMEWORKS[framework](chosen)
    click.echo(plain(f"study {stored.name}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"), err=True)
    seen = to_terminal and "# note: " in exported.text
    for note in () if seen else exported.notes:
        click.echo(plain(f"note: {note}"), err=True)
    return exported.text


# ---------------------------------------------------------------- track


@main.command(epilog=_epilog("bsearch track study.yaml\n  bsearch track study.yaml --to mlflow"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@click.option(
    "--to",
    "trackers",
    multiple=True,
    type=click.Choice(get_args(Tracker)),
    help="Tracker to send trials to; default: the study's `tracking`. May be repeated.",
)
@name_option
@storage_option
@json_option
@click.pass_context
def track(
    ctx: click.Context, /, study: str, trackers: tuple[Tracker, ...], name: str | None, storage: str | None, as_json: bool
) -> None:
    """Send a study's trials to MLflow, Weights & Biases or TensorBoard: a run each, with settings, curve and outcome.

    Trials that a tracker already has are not sent again. With `tracking` in the study file, `bsearch run` does this as trials
    train.
    """
    from .search.report.tracking.follow import tell
    from .search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name, storage)
    chosen = trackers or stored.spec.tracking
    if not chosen:
        raise StudyFileError(
            "tracking: expected mlflow, wandb or tensorboard, got none. Pass --to mlflow, or write "
            "tracking: mlflow in the study file."
        )
    tracked = tell(stored, chosen, _results_beside(study) / stored.name)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in tracked], indent=2))
    else:
        for one in tracked:
            click.echo(one.sentence)
    ctx.exit(FAILED if any(one.left for one in tracked) else 0)


# ---------------------------------------------------------------- train


@main.command(
    epilog=_epilog("bsearch train study.yaml --within 1% --out model\n  bsearch train study.yaml --best --epochs 50 --seeds 3")
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@choice_options()
@click.option("--epochs", type=click.FloatRange(min=0, min_open=True), help="Epochs to train for; default: the trial's.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of seeds: 1 uses the trial's own seed, more use new seeds.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to write; default: results/STUDY/trial-N.")
@click.option("--serial", is_flag=True, help="Train in this process, without Ray.")
@storage_option
@json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    study: str,
    name: str | None,
    epochs: float | None,
    seeds: int,
    out: Path | None,
    serial: bool,
    storage: str | None,
    as_json: bool,
    **choice: Any,
) -> None:
    """Train a point of the front with the study's own task, and keep the model.

    The folder gets the model's weights, the optimizer's state, a log and all settings. The task's test set, if it has one, is
    scored at the end. A training that was interrupted resumes from its checkpoint.
    """
    from .cluster.study import Study, train_point
    from .search.analysis.choice import Choice
    from .search.report.terminal.train import result_lines, train_document

    opened, console = Study.open(study, name, storage), _terminal(as_json)
    how: dict[str, Any] = {"epochs": epochs, "seeds": seeds, "out": out, "serial": serial, "say": console.print}
    with _documents_only(as_json):
        stored, record, trainings = train_point(opened, Choice(**choice), **how)
    for line in result_lines(record, trainings):
        console.print(line)
    if as_json:
        click.echo(json.dumps(train_document(stored, record, trainings), indent=2))
    ctx.exit(0 if all(one.complete for one in trainings) else FAILED)


# ---------------------------------------------------------------- report


@main.command(
    epilog=_epilog(
        "bsearch report study.yaml\n  bsearch report study.yaml --figures figures\n"
        "  bsearch report study.yaml --profile a100.json --price 1.8 --profile h100.json --price 2.5"
    )
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@click.option("--out", type=click.Path(path_type=Path), help="HTML file to write; default: results/STUDY/report.html.")
@click.option(
    "--figures", type=click.Path(path_type=Path), help="Also write every figure into this folder, as PNG, SVG and CSV."
)
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@device_options("Compare this device, by its profile from `bsearch profile STUDY --out FILE` there; several may be named.")
@name_option
@storage_option
def report(
    study: str,
    out: Path | None,
    figures: Path | None,
    opened: bool,
    profile_files: tuple[Path, ...],
    prices: tuple[float, ...],
    name: str | None,
    storage: str | None,
) -> None:
    """Write a study's results as one self-contained HTML page.

    The front with a picker for the settings of any point, batches, rates, memory, speed, learning curves, and the cost of
    training faster.
    """
    from .search.report.page.figures import StudyFigures
    from .search.report.page.page import report_page, write_figures
    from .search.store.stored import StoredStudy
    from .spaces.files import write_file

    stored = StoredStudy.open(study, name, storage).with_rates()
    drawn = StudyFigures.of(stored, _retimed_on(stored, profile_files, prices, stored.spec.objectives))
    path = write_file(out or _results_beside(study) / stored.name / "report.html", report_page(drawn))
    click.echo(f"wrote {plain(from_here(path.absolute()))}")
    for figure in write_figures(drawn.all(), figures) if figures else ():
        click.echo(f"wrote {plain(from_here(figure.absolute()))}")
    if opened:
        click.launch(str(path.absolute()))


@main.command(epilog=_epilog("bsearch dashboard study.yaml\n  bsearch dashboard sqlite:///study.db --port 0 --no-open"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for any free port.")
@click.option("--open/--no-open", "opens", default=None, help="Open the browser; default: if there is a display.")
@storage_option
def dashboard(study: str, name: str | None, port: int, opens: bool | None, storage: str | None) -> None:
    """Show a study in the browser: optuna-dashboard, with bsearch's notes on the study and on each trial.

    For this machine only, since it has no login. Ctrl-C stops it. docs/dashboard.md explains its pages, and how to view it
    from another machine.
    """
    from .search.report.dashboard import dashboard_server
    from .search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name, storage)
    with dashboard_server(stored, masked(study), _results_beside(study), port) as (address, serve), suppress(KeyboardInterrupt):
        click.echo(f"study {plain(stored.name)}: {address} (Ctrl-C stops it)")
        click.echo(f"summary: {address}/note")
        if "SSH_CONNECTION" in os.environ:
            own = address.split(":")[2].split("/")[0]
            click.echo(f"from your own machine: ssh -N -L {own}:127.0.0.1:{own} {socket.gethostname()}, then the same address")
        if _has_screen() if opens is None else opens:
            # Some browsers run in the terminal until they are closed.
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        serve()


def _has_screen() -> bool:
    """Whether a browser opened here would be seen."""
    display = sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and display and "SSH_CONNECTION" not in os.environ


# ---------------------------------------------------------------- submit and jobs


@main.command(epilog=_epilog("bsearch submit study.yaml --launcher slurm --nodes 2 --gpus-per-node 4 --hours 8 --dry-run"))
@click.argument("study", type=click.Path(path_type=Path), shell_complete=study_files)
@click.option(
    "--launcher",
    metavar="NAME",
    shell_complete=launchers,
    help="ray, slurm, kuberay or a plug-in, instead of submit.launcher.",
)
@click.option("--nodes", type=click.IntRange(min=1), help="Machines, instead of submit.nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs per machine.")
@click.option("--cpus-per-node", type=click.IntRange(min=1), help="CPU cores per machine.")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="Time limit of the job.")
@click.option("--address", metavar="URL", help="Ray's dashboard, such as http://host:8265; for ray.")
@click.option("--namespace", metavar="NAME", help="Kubernetes namespace; for kuberay.")
@click.option("--dry-run", is_flag=True, help="Print the script, manifest or request, and submit nothing.")
@storage_option
def submit(study: Path, address: str | None, namespace: str | None, dry_run: bool, storage: str | None, **common: Any) -> None:
    """Send the study in STUDY to a cluster as a batch job: `bsearch run` there, with Ray over all its machines.

    Submitting again resumes the study, however the job ended. docs/clusters.md lists what each launcher needs.
    """
    from .cluster.submit.submitter import Submission, open_submitter

    with _located(study):
        submission = Submission.read(study, storage, common, address=address, namespace=namespace)
        submitter = open_submitter(submission.settings)
        plan = submitter.plan(submission)
        for note in plan.notes:
            click.echo(note, err=True)
        if dry_run:
            click.echo(plan.text, nl=False)
            return
        job = submitter.submit(submission)
    click.echo(f"submitted study {job.study} to {job.launcher} as job {job.id}")
    where = " ".join([job.id, "--launcher", job.launcher, *submitter.place])
    click.echo(f"Next:\n  bsearch jobs status {where}\n  bsearch jobs logs {where} --follow\n  bsearch jobs stop {where}")


@main.group(
    epilog=_epilog(
        "bsearch jobs list --launcher slurm\n  bsearch jobs logs 4711 --launcher slurm --follow\n"
        "  bsearch jobs stop 4711 --study study.yaml"
    )
)
def jobs() -> None:
    """Manage the jobs that `submit` sent: list, status, logs, stop.

    The cluster is given by --launcher, or by the submit section of the study file in --study.
    """


def _launcher_options(command: Any) -> Any:
    for option in (
        click.option("--namespace", metavar="NAME", help="Kubernetes namespace; for kuberay."),
        click.option("--address", metavar="URL", help="Ray's dashboard; for ray."),
        click.option(
            "--study",
            "study_file",
            type=click.Path(path_type=Path),
            shell_complete=study_files,
            help="Study file whose submit section holds these settings.",
        ),
        click.option("--launcher", metavar="NAME", shell_complete=launchers, help="ray, slurm, kuberay or a plug-in."),
    ):
        command = option(command)
    return command


def _submitter(launcher: str | None, study_file: Path | None, address: str | None, namespace: str | None) -> Submitter:
    from .cluster.submit.submitter import open_submitter, submit_settings

    with _located(study_file):
        return open_submitter(submit_settings(study_file, {"launcher": launcher}, address=address, namespace=namespace))


def _progress(names: set[str], study_file: Path | None, storage: str | None) -> dict[str, dict[str, Any]]:
    """The progress of these studies, by name; of none where no storage is known, or it cannot be read here."""
    from .search.report.terminal.watch import progress_facts, studies_now

    if storage is None and study_file is not None:
        storage = read_study(study_file).storage
    if storage is None or not names:
        return {}
    try:
        return {name: progress_facts(view) for name, view in studies_now(storage, names).items()}
    except NoStudyError:
        return {}  # its job has not begun, or writes elsewhere
    except StorageError as error:
        click.echo(f"progress is unknown: {plain(masked(str(error)))}", err=True)
        return {}


@jobs.command("list", epilog=_epilog("bsearch jobs list --launcher slurm\n  bsearch jobs list --study study.yaml"))
@_launcher_options
@storage_option
@json_option
def list_jobs(as_json: bool, storage: str | None, **where: Any) -> None:
    """List bsearch's jobs that the cluster knows, newest first, with the progress of their studies.

    Progress is read from the storage of the study file in --study, or from --storage.
    """
    from .spaces.readable import count, number, seconds

    found = _submitter(**where).jobs()
    progress = _progress({job.study for job in found}, where["study_file"], storage)
    if as_json:
        click.echo(json.dumps([{**job.to_dict(), "progress": progress.get(job.study)} for job in found], indent=2))
        return
    if not found:
        click.echo("no bsearch jobs there")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("job", "study", "state", "submitted", "started", *(("trials", "best", "left") if progress else ())):
        table.add_column(column)
    for job in found:
        cells = [job.id, job.study, job.state, _at(job.submitted), _at(job.started)]
        if (facts := progress.get(job.study)) is not None:
            best = "" if facts["best"] is None else f"{facts['metric']} {number(facts['best'])}"
            left = "" if facts["eta_s"] is None else seconds(facts["eta_s"])
            cells += [f"{count(facts['done'])}/{facts['trials']}", best, left]
        table.add_row(*cells)
    _terminal().print(table)


def _at(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


@jobs.command("status", epilog=_epilog("bsearch jobs status 4711 --launcher slurm"))
@click.argument("id")
@_launcher_options
@storage_option
@json_option
def job_status(id: str, as_json: bool, storage: str | None, **where: Any) -> None:
    """Print the state of job ID: pending, running, succeeded, failed, stopped or unknown; and its study's progress."""
    from .spaces.readable import count, number, seconds

    job = _submitter(**where).job(id)
    facts = _progress({job.study}, where["study_file"], storage).get(job.study)
    if as_json:
        click.echo(json.dumps({**job.to_dict(), "progress": facts}, indent=2))
        return
    times = [f"{word} {_at(time)}" for word, time in (("submitted", job.submitted), ("started", job.started)) if time]
    click.echo(f"job {job.id} of study {job.study}: {', '.join([job.state, *times])}")
    if facts is not None:
        parts = [f"{count(facts['done'])} of {facts['trials']} trials are done"]
        parts += [] if facts["best"] is None else [f"the best {facts['metric']} is {number(facts['best'])}"]
        parts += [] if facts["eta_s"] is None else [f"about {seconds(facts['eta_s'])} left"]
        click.echo(", ".join(parts))


@jobs.command("logs", epilog=_epilog("bsearch jobs logs 4711 --launcher slurm --follow"))
@click.argument("id")
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@_launcher_options
def job_logs(id: str, follow: bool, **where: Any) -> None:
    """Print the output of job ID so far."""
    from .cluster.submit.submitter import followed

    submitter = _submitter(**where)
    for piece in followed(submitter, id) if follow else [submitter.logs(id)]:
        click.echo(piece, nl=False)


@jobs.command("stop", epilog=_epilog("bsearch jobs stop 4711 --launcher slurm"))
@click.argument("id")
@_launcher_options
def stop_job(id: str, **where: Any) -> None:
    """Stop job ID. Its study keeps every finished trial; submitting it again resumes it."""
    _submitter(**where).stop(id)
    click.echo(f"stopping job {id}")


# ---------------------------------------------------------------- doctor and completion


@main.command(epilog=_epilog("bsearch doctor study.yaml\n  bsearch doctor --no-ray"))
@click.argument("study", metavar="[STUDY]", required=False, type=click.Path(path_type=Path), shell_complete=study_files)
@click.option("--no-ray", is_flag=True, help="Do not start or contact Ray, which takes several seconds.")
@storage_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, study: Path | None, no_ray: bool, storage: str | None, as_json: bool) -> None:
    """Check this machine for problems that keep studies from running, and say how to fix them.

    Checks versions, cores, memory, GPUs, limits, disks, the storage, and whether Ray starts (with STUDY: whether it is
    reached at cluster.address). Changes nothing and leaves nothing running. Exit code 1 if there is a problem.
    """
    spec = None if study is None else read_study(study, storage=storage)
    from .search.preview.doctor import doctor_document, examined, finding_line, machine_checks

    checks = machine_checks(spec, storage if spec is None else spec.storage)
    if not no_ray:
        from .cluster.doctor import ray_findings
        from .spaces.study import Cluster, Devices

        cluster, devices = (Cluster(), Devices()) if spec is None else (spec.cluster, spec.devices)
        checks.append(("ray", lambda: ray_findings(cluster, devices)))
    console = _terminal(as_json)
    findings = []
    for finding in examined(checks):
        findings.append(finding)
        if not as_json:
            console.print(finding_line(finding))
    document = doctor_document(findings)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        counts = [f"{count} {state}s" for state, count in document["counts"].items() if count and state != "ok"]
        console.print(
            ", ".join(counts).replace("1 problems", "1 problem").replace("1 warnings", "1 warning")
            or "No problems found. `bsearch verify` measures what holds on this machine."
        )
    ctx.exit(FAILED if document["counts"]["problem"] else 0)


# ---------------------------------------------------------------- verify


@main.command(epilog=_epilog("bsearch verify --quick\n  bsearch verify --out verified.md"))
@click.option("--quick", is_flag=True, help="About four minutes: fewer cases, less time for each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="What to verify on; default: a GPU if any."
)
@click.option("--stage", "stages", multiple=True, metavar="NAME", help="Only this stage; may be repeated.")
@click.option("--serial", is_flag=True, help="Run the study without Ray.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the report to this file: .json or .md.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context, quick: bool, device: str, stages: tuple[str, ...], serial: bool, out: Path | None, as_json: bool
) -> None:
    """Measure on this machine what bsearch claims: memory, step times, exactness, a study that is killed and resumes.

    Ten minutes on a GPU or a CPU, alone on the machine. Prints every claim with its bound and the value measured here.
    A value that misses its bound by less than its uncertainty is reported as unclear. Exit code 1 if a claim fails or a
    stage does not finish.
    """
    if out is not None and out.suffix not in (".json", ".md"):
        raise OutputError(f"--out {out}: expected a file that ends in .json or .md")
    import torch

    from .spaces.files import write_file
    from .verify.claims import Report
    from .verify.run import Planned
    from .verify.run import verify as verified

    console = _terminal(as_json)
    kind: Literal["cpu", "gpu"] = "gpu" if device == "gpu" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "gpu" and not torch.cuda.is_available():
        raise StudyFileError("--device gpu: torch finds no GPU here; `bsearch doctor` says why")

    def show(planned: Planned, report: Report | None) -> None:
        if report is None:
            console.print(f"{planned.name:<18} {planned.about} ...", end="\r" if console.is_terminal else "\n")
            return
        stage = report.stages[-1]
        console.print(f"{planned.name:<18} {planned.about}: {stage.outcome} ({stage.seconds:.0f} s)")
        if out is not None:  # after every stage, so that an interrupted run leaves what it found
            write_file(out, report.markdown() if out.suffix == ".md" else json.dumps(report.to_dict(), indent=2) + "\n")

    report = verified(kind, stages, quick=quick, serial=serial, on_stage=show)
    document = json.dumps(report.to_dict(), indent=2)
    if as_json:
        click.echo(document)
    else:
        table = Table(
            "stage", "claim", "bound", "measured", "", box=None, pad_edge=False, title=f"\n{report.device} · {report.versions}"
        )
        for *cells, verdict in report.rows():
            table.add_row(*cells, Text(verdict, {"pass": "green", "unclear": "yellow"}.get(verdict, "bold red")))
        console.print(table)
        console.print("\n" + report.summary)
    ctx.exit(0 if report.holds else FAILED)


@main.command(
    epilog=_epilog(
        "bsearch completion bash > ~/.local/share/bash-completion/completions/bsearch\n"
        '  eval "$(bsearch completion zsh)"          # in ~/.zshrc, after compinit\n'
        "  bsearch completion fish > ~/.config/fish/completions/bsearch.fish"
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options, study files, studies and launchers."""
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(main, {}, "bsearch", "_BSEARCH_COMPLETE").source())


# ---------------------------------------------------------------- schema and init


@main.command(epilog=_epilog("bsearch schema > study.schema.json"))
def schema() -> None:
    """Print the JSON Schema of study files, for editors."""
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **StudySpec.model_json_schema()}
    click.echo(json.dumps(document, indent=2))


@main.command(epilog=_epilog("bsearch init my-study && cd my-study && bsearch run study.yaml"))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
def init(folder: Path) -> None:
    """Write a commented study.yaml and tasks.py into FOLDER, ready to run and to edit."""
    from .spaces.files import write_file

    names = ("study.yaml", "tasks.py")
    existing = [name for name in names if os.path.lexists(folder / name)]
    if existing:
        raise StudyFileError(
            f"{folder}: already contains {' and '.join(existing)}; nothing was written. Choose another folder."
        )
    for name in names:
        content = resources.files("bsearch.objectives.starter").joinpath(name).read_text(encoding="utf-8")
        click.echo(f"wrote {write_file(folder / name, content)}")
    inside = "" if folder == Path() else f"cd {folder} && "
    click.echo(f"Next: {inside}bsearch check study.yaml && bsearch run study.yaml")

"""Commands that train: a study, and a point of its front; and the first files of a new one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import say, terminal
from ..search.store.url import shown_url
from ..spaces.boundary.storage import storage_of
from ..spaces.deadline import checked_deadline, duration_of
from ..spaces.errors import StudyFileError, cut
from ..spaces.readable import from_here, shell_word
from ..spaces.study.file import read_study, resolve_study, study_from_dict
from ..spaces.study.spec import StudySpec
from .ask import OLD_RUNS, files_of_runs, source_options
from .group import FAILED, documents_only, epilog, located_faults, main
from .options import (
    json_option,
    keep_option,
    named,
    out_option,
    pick_option,
    serial_option,
    set_option,
    study_keys,
    until_option,
    with_settings,
)
from .results import print_front

if TYPE_CHECKING:
    from ..search.run.driver import StudyResult
    from ..search.run.events import Event
    from ..spaces.record import TrialRecord


@main.command(
    epilog=epilog(
        "bsearch run study.yaml\n  bsearch run tasks.py:Cifar --batches 16:4096 --rate 1e-3:1 --trials 20"
    )
)
@click.argument("study", metavar="STUDY|TASK", shell_complete=study_files)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- python SCRIPT ...]")
@click.option("--batches", metavar="LOW:HIGH", help="Effective batches to try, if STUDY is a task.")
@click.option("--rate", metavar="LOW:HIGH[@BATCH]", help="Reference rate, if STUDY is a task.")
@set_option
@click.option("--trials", type=click.IntRange(min=1), help="Trials to finish, instead of budget.trials.")
@click.option(
    "--by", metavar="TIME", help="Be done by then, with a trained model: 18:00, or 2026-11-28 09:00."
)
@click.option(
    "--within",
    metavar="DURATION",
    help="How long it may take: 2h, 90m, from the first run with this deadline.",
)
@until_option("then the study stops, and keeps the model.")
@keep_option("results/STUDY/model, with a deadline or --until")
@click.option("--new", is_flag=True, help="Create a new study beside the existing one.")
@click.option(
    "--same-experiment",
    is_flag=True,
    help="Resume even though the task's code has changed; both versions are recorded.",
)
@serial_option("trials one after the other, in this process.")
@out_option("a folder for front.csv and front.json; default: results/STUDY.")
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    study: str,
    command: tuple[str, ...],
    batches: str | None,
    rate: str | None,
    settings: tuple[str, ...],
    trials: int | None,
    by: str | None,
    within: str | None,
    until: float | None,
    keep: Path | None,
    new: bool,
    same_experiment: bool,
    serial: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the study in STUDY, or resume it, and print its front.

    STUDY is a study file, or a task as module:name or path/file.py:name with --batches and --rate.
    `bsearch run -- python train.py --epochs 3` writes a study of that script, as `init` does, and runs it.
    The same command again resumes the study.
    """
    if command:
        _check_is_script(ctx, study, command)
        with documents_only(as_json):
            study = _study_of_script((study, *command), again=True)
    file, spec = _study(study, batches, rate, trials, settings)
    spec = _with_deadline(spec, by, within, until, keep)
    out = out and out.absolute()  # a task may change the working directory
    console, stdout = terminal(as_json), sys.stdout
    with located_faults(file):
        with documents_only(as_json):
            folder = out or _results(spec, spec.study)
            how: dict[str, Any] = {"new": new, "same_experiment": same_experiment, "serial": serial}
            result = _run(spec, folder, console, stdout if as_json else None, **how)
        again = f"bsearch run {shell_word(file)}{' --serial' * serial}" if file else "the same command again"
        _print_result(
            result,
            spec,
            file or Path(study),
            again,
            out or _results(spec, result.study.name),
            console,
            as_json,
        )
    ctx.exit(FAILED if result.failure else 128 + result.interrupted if result.interrupted else 0)


def _check_is_script(ctx: click.Context, first: str, others: tuple[str, ...]) -> None:
    """Check that what comes after `--` is a command of a script; anything else is an argument too many."""
    if not (Path(first).name.startswith("python") or first.endswith(".py")):
        raise click.UsageError(
            f"Got unexpected extra argument{'s' * (len(others) > 1)} ({' '.join(others)})", ctx
        )


def _study_of_script(command: tuple[str, ...], *, again: bool) -> str:
    """The file of a script's study, written here unless it is there already and may be used `again`."""
    from ..search.preview.script import check_holds_no_secret, files_of, is_of, script_of
    from ..spaces.boundary.files import write_file

    check_holds_no_secret(command)
    existing = [name for name in ("study.yaml", "tasks.py") if os.path.lexists(name)]
    if again and len(existing) == 2 and is_of(command, Path("tasks.py").read_text(encoding="utf-8")):
        say("study.yaml is that of this script: it goes on")
        return existing[0]
    if existing:
        raise StudyFileError(
            f"this folder already contains {' and '.join(existing)}, of another command; nothing was written. `bsearch run "
            "study.yaml` runs what is there."
        )
    say(f"looking at {shlex.join(command)}: it is run with one batch of each loader ...")
    script = script_of(command, Path.cwd())
    say(script.sentence())
    for name, content in files_of(script).items():
        say(f"wrote {write_file(Path(name), content)}")
    return "study.yaml"


def _study(
    study: str, batches: str | None, rate: str | None, trials: int | None, settings: tuple[str, ...]
) -> tuple[Path | None, StudySpec]:
    """The study that a file or the options describe."""
    storage = storage_of(os.environ)
    if ":" in study and not os.path.lexists(study):
        file, spec = None, _study_of_options(study, batches, rate, storage, settings)
    else:
        for option, value in (("--batches", batches), ("--rate", rate)):
            if value is not None:
                raise click.UsageError(
                    f"{option} is for a task; a study file has its own setting. Edit {study}."
                )
        file = Path(study)
        spec = with_settings(read_study(file, storage=storage), settings)
    if trials is not None:
        spec = spec.changed({"budget": {"trials": trials}})
    return file, spec


def _with_deadline(
    spec: StudySpec, by: str | None, within: str | None, until: float | None, keep: Path | None
) -> StudySpec:
    """The study with what the options say of its end."""
    if by is not None and within is not None:
        raise click.UsageError("expected --by or --within, got both")
    for option, text, is_length in (("--by", by, False), ("--within", within, True)):
        if text is None:
            continue
        try:
            checked_deadline(text)
        except ValueError as error:
            words = (
                f"expected a duration such as 2h, 90m or 1h30m, got {cut(text, 60)!r}"
                if is_length
                else str(error)
            )
            raise click.UsageError(f"{option}: {words}") from None
        if (duration_of(text) is not None) != is_length:
            other = "--by" if is_length else "--within"
            raise click.UsageError(
                f"{option}: expected a {'duration' if is_length else 'moment'}, got {text}. Write {other}."
            )
    folder = None if keep is None else str(keep.expanduser().absolute())
    budget = {"by": by or within, "until": until, "keep": folder}
    given = {key: value for key, value in budget.items() if value is not None}
    return spec.changed({"budget": given}) if given else spec


def _study_of_options(
    task: str, batches: str | None, rate: str | None, storage: str | None, settings: tuple[str, ...]
) -> StudySpec:
    if batches is None or rate is None:
        raise click.UsageError(
            "a task needs --batches LOW:HIGH and --rate LOW:HIGH, such as --batches 16:4096 --rate 1e-3:1"
        )
    rate, _, at_batch = rate.partition("@")
    space: dict[str, Any] = {
        "effective_batch": _span("--batches", batches),
        "reference_rate": _span("--rate", rate),
    }
    if at_batch:
        reference = space["reference_rate"]
        reference = reference if isinstance(reference, dict) else {"value": reference}
        space["reference_rate"] = reference | {"at_batch": _number("--rate", at_batch)}
    keys = study_keys(settings)
    name = task.rpartition(":")[2].lower()
    data = {"study": name, "task": task, **keys, "space": {**space, **keys.get("space", {})}}
    return resolve_study(study_from_dict(data), Path.cwd(), storage)


def _span(option: str, text: str) -> Any:
    low, colon, high = text.partition(":")
    return {"low": _number(option, low), "high": _number(option, high)} if colon else _number(option, low)


def _number(option: str, text: str) -> int | float:
    try:
        return int(text) if text.strip().isdigit() else float(text)
    except ValueError:
        raise click.UsageError(
            f"{option}: expected LOW:HIGH such as 16:4096, got {cut(text, 60)!r}"
        ) from None


def _results(spec: StudySpec, name: str) -> Path:
    return spec.folder / "results" / name


def _run(spec: StudySpec, out: Path, console: Console, events: TextIO | None, **how: Any) -> StudyResult:
    """Run a study.

    Args:
        events: gets a line of JSON for each event; None: nothing does.
    """
    from ..cluster.study import run_study_here
    from ..search.report.answers import event_answer
    from ..search.report.terminal.live import LiveView

    with LiveView(console) as view:

        def notify(event: Event) -> None:
            view.notify(event)
            if events is not None:
                give_answer("event", event_answer(event, spec.objectives.metric.name), file=events)

        return run_study_here(spec, out, notify=notify, watch=view.watch, **how)


def _print_result(
    result: StudyResult, spec: StudySpec, study: Path, again: str, out: Path, console: Console, as_json: bool
) -> None:
    """The end of a run: the front, its files, and what to do next."""
    from ..search.report.answers import study_answer
    from ..search.report.export import study_document, write_front

    stored = result.study
    document = study_document(stored.name, shown_url(stored.url), stored.front, stored.records)
    document |= (
        {"model": None if result.model is None else str(result.model)} if spec.budget.keeps_model else {}
    )
    document |= {
        "stopped": result.stopped or None,
        "elapsed_s": result.elapsed_s,
        "expected_gain": result.gain,
    }
    console.print()
    if stored.front.trials:
        print_front(stored, sum(record.counts for record in stored.records), console)
        for path in write_front(out, document):
            console.print(f"wrote {from_here(path)}", style="dim")
    else:
        console.print(f"{stored.name} has no finished trial yet, so there is no front.")
    for sentence in _end_sentences(result, spec, study, again):
        console.print(sentence)
    shown = _shown(study, spec)
    following = {
        f"bsearch report {shown}": "an HTML page to explore and choose from",
        f"bsearch show {shown} --all": "every trial",
        f"bsearch train {shown} --pick within:1%": "train the fastest point within 1% of the best, and keep the model",
        **_taken_elsewhere(stored.front.trials, shown),
        f"bsearch dashboard {shown}": "in the browser",
    }
    if stored.front.trials:
        console.print("Next:")
    for command, what in following.items() if stored.front.trials else ():
        console.print(f"  {command:<{max(map(len, following))}}  {what}")
    if as_json:
        ended: dict[str, Any] = {
            name: document[name]
            for name in ("model", "stopped", "elapsed_s", "expected_gain")
            if name in document
        }
        found = {
            **study_answer(stored, None, _shown(study, spec)),
            **ended,
            "failure": result.failure or None,
        }
        give_answer("run", found, "front")


def _taken_elsewhere(members: Sequence[TrialRecord], study: str) -> dict[str, str]:
    """The command that has a front's best point without bsearch: of a script its own."""
    script = members[-1].facts.extra.get("command") if members else None
    if script:
        return {str(script): "the best point without bsearch"}
    return {f"bsearch export {study} --to hf": "that point's settings for a trainer"}


def _end_sentences(result: StudyResult, spec: StudySpec, study: Path, again: str) -> Iterator[str]:
    """How a run ended, and what resumes it."""
    from ..search.report.sentences import failed_values, outcome_counts
    from ..search.report.terminal.deadline import model_lines
    from ..search.run.study_run import gain_sentence
    from ..spaces.readable import UNLIMITED, seconds
    from ..spaces.record import counted

    records = result.study.records
    done = counted(records)
    if others := outcome_counts(record for record in records if record.outcome != "complete"):
        yield f"Other trials: {others}"
    yield from failed_values(records, spec.searched())
    if result.failure:
        yield f"The study stopped: {result.failure}"
        failed = [record for record in records if record.outcome == "error"]
        if failed:
            yield f"`bsearch show {_shown(study, spec)} --pick {failed[-1].number}` shows its traceback."
    elif result.stopped:
        more = "raise it, then " if result.stopped.startswith("budget.") else ""
        if spec.budget.keeps_model:
            more, again = "", f"{again} with another deadline or target"
        after = f" after {seconds(result.elapsed_s)}" if result.elapsed_s else ""
        yield f"Stopped{after}: {result.stopped}. To resume: {more}{again}"
    elif done < spec.budget.trials != UNLIMITED:
        yield f"{done} of {spec.budget.trials} trials are done. To resume: {again}"
    # More than a quarter is known only roughly, and is what every study begins with.
    if result.gain is not None and result.gain < 0.25:
        sentence = gain_sentence(result.gain)
        yield f"{sentence[0].upper()}{sentence[1:]}."
    yield from model_lines(result)


def _shown(study: Path, spec: StudySpec) -> str:
    """The study as an argument for other commands."""
    return shell_word(study if study.suffix in (".yaml", ".yml") else shown_url(spec.storage or ""))


@main.command(
    epilog=epilog(
        "bsearch train study.yaml --pick within:1% --keep model\n  bsearch train study.yaml --pick best --epochs 50 --seeds 3"
    )
)
@click.argument("study", metavar="STUDY|URL[#NAME]", shell_complete=study_files)
@pick_option("; default: within:1%")
@click.option(
    "--epochs", type=click.FloatRange(min=0, min_open=True), help="Epochs to train for; default: the trial's."
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of seeds: 1 uses the trial's own seed, more use new seeds.",
)
@keep_option("results/STUDY/trial-N")
@serial_option("train in this process.")
@json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    study: str,
    pick: dict[str, Any] | None,
    epochs: float | None,
    seeds: int,
    keep: Path | None,
    serial: bool,
    as_json: bool,
) -> None:
    """Train a point of the front with the study's own task, and keep the model.

    The folder gets the model's weights, the optimizer's state, a log and all settings. The task's test set, if it has one, is
    scored at the end. A training that was interrupted resumes from its checkpoint.
    """
    from ..cluster.study import Study, train_point
    from ..search.analysis.choice import Choice
    from ..search.report.terminal.train import result_lines, train_document

    study_opened, console = Study(*named(study)), terminal(as_json)
    how: dict[str, Any] = {
        "epochs": epochs,
        "seeds": seeds,
        "out": keep,
        "serial": serial,
        "say": console.print,
    }
    with documents_only(as_json):
        stored, record, trainings = train_point(study_opened, Choice(**(pick or {})), **how)
    for line in result_lines(record, trainings):
        console.print(line)
    if as_json:
        give_answer("train", train_document(stored, record, trainings), "trainings")
    ctx.exit(0 if all(training.complete for training in trainings) else FAILED)


@main.command(
    epilog=epilog(
        "bsearch init my-study && cd my-study && bsearch run study.yaml\n  bsearch init my-study --from runs.csv"
    )
)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- python SCRIPT ...]")
@click.option(
    "--from",
    "source",
    metavar="SOURCE",
    help="Make study.yaml of runs that you have, as `bsearch ask` reads them.",
)
@source_options
@click.pass_context
def init(
    ctx: click.Context,
    folder: Path,
    command: tuple[str, ...],
    source: str | None,
    mapped: tuple[str, ...],
    metric: str | None,
) -> None:
    """Write a commented study.yaml and tasks.py into FOLDER, ready to run and to edit.

    `bsearch init -- python train.py --epochs 3` writes them here, for that script as it is: it is run once with a batch of each
    of its loaders, to see what it does.

    With --from: the space, the scaling rule, your best setting and what to expect are those of your runs, and the search learns
    from them.
    """
    from ..spaces.boundary.files import write_file

    if command:
        _check_is_script(ctx, str(folder), command)
        if source or mapped or metric:
            raise click.UsageError(
                "--from is for runs that you have, and a script is another beginning: give one of them"
            )
        say(f"Next: bsearch check {_study_of_script((str(folder), *command), again=False)}, then run it")
        return
    names = ("study.yaml", "tasks.py")
    existing = [name for name in (*names, *([OLD_RUNS] if source else [])) if os.path.lexists(folder / name)]
    if existing:
        raise StudyFileError(
            f"{folder}: already contains {' and '.join(existing)}; nothing was written. Choose another folder."
        )
    starter = {
        name: resources.files("bsearch.objectives.starter").joinpath(name).read_text(encoding="utf-8")
        for name in names
    }
    written = {} if source is None else files_of_runs(source, mapped, metric)
    for name, content in {**starter, **written}.items():
        say(f"wrote {write_file(folder / name, content)}")
    if written:
        say(
            f"First fill in {shell_word(folder / 'tasks.py')}: your data and your model; `bsearch check` names what is left."
        )
    inside = "" if folder == Path() else f"cd {shell_word(folder)} && "
    say(f"{'Then' if written else 'Next'}: {inside}bsearch check study.yaml && bsearch run study.yaml")

"""What runs say that were made before: those of a source, and those of studies."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import click

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import say, terminal
from ..spaces.boundary.secrets import masked
from ..spaces.boundary.storage import is_url
from ..spaces.errors import StudyFileError, plain
from ..spaces.readable import from_here, plural, shell_word
from .group import epilog, located_faults, main
from .options import batch_option, json_option, named, opened, until_option

if TYPE_CHECKING:
    from rich.console import Console

    from ..search.sources.columns import Columns
    from ..search.sources.imported import Imported
    from ..search.store.stored import StoredStudy

# What `init --from` writes beside a study file.
OLD_RUNS = "old-runs.jsonl"
Direction = Literal["minimize", "maximize"]


metric_option = click.option(
    "--metric",
    metavar="NAME[:minimize|:maximize]",
    help="The result by which runs are compared, and whether a lower or a higher one is better.",
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How the names of a source are to be read."""
    for option in (
        metric_option,
        click.option(
            "--map",
            "mapped",
            multiple=True,
            metavar="NAME=MEANING",
            help="Read a name as learning_rate, effective_batch, seconds, parameter or nothing, or leave a run out by its "
            "place (runs.csv:7=nothing). Repeatable.",
        ),
    ):
        command = option(command)
    return command


@main.command(
    epilog=epilog(
        "bsearch ask runs.csv\n  bsearch ask runs.csv --batch 500\n  bsearch ask wandb:me/project --save old.db\n"
        "  bsearch ask study.yaml --until 0.95"
    )
)
@click.argument("source", metavar="SOURCE|STUDY", shell_complete=study_files)
@batch_option("its best rate, or the data to a target at it; may be repeated.")
@until_option("the data that a study needs until then, by batch.")
@source_options
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the runs to this new SQLite file, as studies.",
)
@json_option
def ask(
    source: str,
    batches: tuple[int, ...],
    until: float | None,
    mapped: tuple[str, ...],
    metric: str | None,
    save: Path | None,
    as_json: bool,
) -> None:
    """Say what runs that you already have can tell, without training anything.

    SOURCE is a table (CSV, TSV, JSON, JSON lines, Parquet), a folder of runs (Trainer, Lightning, Ray Tune, W&B,
    TensorBoard), or one of wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, optuna:URL#STUDY. docs/ask.md shows how names are found.
    STUDY is a study of bsearch: which scaling rules its trials support, and the rest. Nothing of your runs leaves this machine.
    """
    if save is not None and (batches or until is not None):
        raise click.UsageError("expected --batch and --until, or --save alone, got both")
    if (mapped or metric) and is_study(source):
        raise click.UsageError(f"--map and --metric are for runs of another source; {source} is a study")
    if until is not None:
        _samples_until(source, until, batches, as_json)
        return
    columns, groups = groups_of(source, mapped, metric, as_json, shown=not batches)
    if save is not None:
        _save(save, masked(source), groups)
        return
    _answer(masked(source), columns, groups, batches, as_json)


def is_study(source: str) -> bool:
    from ..search.sources.read import is_source

    return not is_source(source) or (is_url(source) and not source.startswith("optuna:"))


def groups_of(
    source: str, mapped: Sequence[str], metric: str | None, as_json: bool, *, shown: bool
) -> tuple[Columns | None, Sequence[tuple[StoredStudy, Imported | None]]]:
    """A study, or the studies that a source's runs become."""
    if is_study(source):
        return None, [(opened(source), None)]
    columns, found = _read(source, mapped, metric, None if as_json else terminal(), shown=shown, targets=True)
    return columns, [(as_study(group), group) for group in found]


def _answer(
    source: str,
    columns: Columns | None,
    groups: Sequence[tuple[StoredStudy, Imported | None]],
    batches: tuple[int, ...],
    as_json: bool,
) -> None:
    """Print what each group of runs says."""
    from ..search.laws.target_verdicts import target_verdicts
    from ..search.laws.verdicts import verdicts
    from ..search.report.terminal.ask import group_parts, verdict_document

    console, documents = terminal(as_json), []
    for study, group in groups:
        if group is not None and group.to_target:
            answers = target_verdicts(study, group.to_target, batches)
        else:
            answers = verdicts(study, timed=group is None or group.timed, batches=batches)
        documents.append(verdict_document(study, group, answers))
        for part in (
            ()
            if as_json
            else group_parts(source, study, group, answers, several=len(groups) > 1, short=bool(batches))
        ):
            console.print(part)
    if as_json:
        found = {"source": source, "columns": columns and _columns_document(columns), "groups": documents}
        give_answer("ask", found, "groups")


def _save(path: Path, source: str, groups: Sequence[tuple[StoredStudy, Imported | None]]) -> None:
    from ..search.sources.store import written

    found = [group for _, group in groups if group is not None]
    if not found:
        raise click.UsageError(f"--save: expected runs of another source, got {source}, a study")
    names = written(path, source, found)
    for group, name in zip(found, names, strict=True):
        say(f"study {name}: {plural(len(group.records), 'run')}{f', {group.name}' if group.name else ''}")
    say(f"wrote {from_here(path.absolute())}; look at it: bsearch report {shell_word(f'sqlite:///{path}')}")


def _samples_until(source: str, until: float, batches: tuple[int, ...], as_json: bool) -> None:
    """Print the samples that a study needs to reach a value of its metric, by batch."""
    from ..search.laws.samples_by_batch import study_samples
    from ..search.report.terminal.ask import samples_document, samples_parts

    if not is_study(source):
        raise click.UsageError(
            f"--until: expected a study, got {source}; a table of runs to a target says itself what it is"
        )
    study = opened(source)
    with located_faults(None if is_url(source) else Path(named(source)[0])):
        found = study_samples(study.name, study.spec, study.records, until, batches)
    if as_json:
        give_answer("samples", samples_document(found))
        return
    for part in samples_parts(study.name, study.front.metric, found):
        terminal().print(part)


def _columns_document(columns: Columns) -> list[dict[str, str]]:
    return [{"name": column.name, "meaning": column.meaning, "why": column.why} for column in columns.columns]


def _read(
    source: str,
    mapped: Sequence[str],
    metric: str | None,
    console: Console | None,
    *,
    shown: bool = True,
    targets: bool = False,
) -> tuple[Columns, list[Imported]]:
    """A source's runs, by the meaning of its names, which are shown first; what is unclear is asked for on a terminal.

    Args:
        console: None: nothing is shown and nothing asked.
        shown: also names of which all are clear.
        targets: runs to a target are read as such.
    """
    from ..search.laws.runs_table import to_target
    from ..search.report.terminal.ask import columns_table
    from ..search.sources.columns import UnclearColumnsError, columns_of
    from ..search.sources.imported import imported
    from ..search.sources.read import runs_of, without

    every = runs_of(source, lambda text: say(text, err=True))
    metric, direction = _metric(metric)
    meanings = _mapped(mapped) | ({metric: "metric"} if metric else {})
    runs, meanings = without(every, meanings)
    while True:
        try:
            if targets and (found := to_target(source, runs, meanings)) is not None:
                runs, columns = found
            else:
                columns = columns_of(source, runs, mapped=meanings, direction=direction)
            break
        except UnclearColumnsError as error:
            if console is not None:
                console.print(columns_table(error.columns))
            if console is None or not _is_asked():
                raise
            say(str(error), err=True)
            answer = click.prompt(error.meaning, type=click.Choice(error.names))
            if error.meaning == "direction":
                direction = "minimize" if answer == "minimize" else "maximize"
            else:
                meanings[answer] = error.meaning
    if console is not None and shown:
        console.print(columns_table(columns))
    return columns, imported(source, runs, columns, _study_name(source))


def _metric(written: str | None) -> tuple[str | None, Direction | None]:
    """A metric's name and its direction, as far as they are given."""
    name, colon, direction = (written or "").rpartition(":")
    if colon and direction in get_args(Direction):
        return name or None, cast(Direction, direction)
    return written, None


def _is_asked() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _mapped(written: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in written:
        name, equals, meaning = text.rpartition("=")
        if not equals or not name or not meaning:
            raise click.UsageError(f"--map: expected NAME=MEANING, got {text!r}")
        found[name] = meaning
    return found


def _study_name(source: str) -> str:
    """A name for the study of a source: its file's or its last word."""
    name = Path(source.rpartition(":")[2].rstrip("/")).stem or "runs"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "runs"


def as_study(found: Imported) -> StoredStudy:
    """A group of runs as a study that no database holds."""
    from ..search.analysis.blow_ups import told_apart
    from ..search.analysis.pareto import study_front
    from ..search.store.stored import StoredStudy, study_identity

    spec = found.spec
    # Slow ways to a target are no blow-ups.
    records = found.records if found.to_target else told_apart(found.records)
    identity = study_identity(spec, "imported")
    return StoredStudy("", spec.study, spec, identity, 0.0, records, study_front(records, spec.objectives))


def files_of_runs(source: str, mapped: Sequence[str], metric: str | None) -> dict[str, str]:
    """A study file of a source's runs, its tasks.py, and the runs in bsearch's own words: of several groups, the largest."""
    import yaml

    from ..search.laws.from_runs import run_document, study_of_runs
    from ..search.sources.task_file import task_file
    from ..spaces.study.file import parse_study

    _, groups = _read(source, mapped, metric, terminal(as_json=True))
    spec, records = groups[0].spec, groups[0].records
    keys = study_of_runs(spec, records, "tasks.py:MyTask", OLD_RUNS)
    of = f" ({groups[0].name}, the largest of {len(groups)} groups)" if len(groups) > 1 else ""
    source = masked(source)
    # A line break would end the comment.
    made_of = " ".join(f"{plural(len(records), 'run')} of {source}{of}".split())
    head = plain(f"# Made of {made_of} by `bsearch init --from`: look through it.\n")
    rows = (json.dumps(run_document(record, spec)) for record in records)
    study = head + yaml.safe_dump(keys, sort_keys=False, width=120)
    try:
        parse_study(study)
    except StudyFileError as error:
        say(f"study.yaml needs editing before it can run:\n{error}", err=True)
    return {"study.yaml": study, "tasks.py": task_file(spec, source), OLD_RUNS: "\n".join(rows) + "\n"}

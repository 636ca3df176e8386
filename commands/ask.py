"""Commands that begin with runs made elsewhere: what they say, and a study made of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import click

from ..search.report.completion import study_files
from ..search.report.stdio.console import terminal
from ..spaces.boundary.storage import is_url, sqlite_url
from ..spaces.errors import StudyFileError, plain
from ..spaces.readable import from_here, plural, shell_word
from .group import epilog, main
from .options import json_option, name_option

if TYPE_CHECKING:
    from rich.console import Console

    from ..search.sources.columns import Columns
    from ..search.sources.imported import Imported
    from ..search.store.stored import StoredStudy

# What `init --from` writes beside a study file.
OLD_RUNS = "old-runs.jsonl"
Direction = Literal["minimize", "maximize"]


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How the names of a source are to be read."""
    for option in (
        click.option("--same", is_flag=True, help="Runs of several tasks, data sets or models are one experiment."),
        click.option("--minimize/--maximize", "minimize", default=None, help="Whether a lower or a higher metric is better."),
        click.option("--metric", metavar="NAME", help="The result by which runs are compared."),
        click.option(
            "--map",
            "mapped",
            multiple=True,
            metavar="NAME=MEANING",
            help="What a name of the source means: learning_rate, effective_batch, seconds, parameter, nothing; repeatable.",
        ),
    ):
        command = option(command)
    return command


@main.command(epilog=epilog("bsearch ask runs.csv\n  bsearch ask runs.csv --batch 500\n  bsearch ask wandb:me/project"))
@click.argument("source", metavar="SOURCE|STUDY", shell_complete=study_files)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Only the best rate, or the data to a target, at this batch.",
)
@source_options
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write the HTML page of the runs.")
@name_option
@json_option
def ask(
    source: str,
    batches: tuple[int, ...],
    mapped: tuple[str, ...],
    metric: str | None,
    minimize: bool | None,
    same: bool,
    report: Path | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Say what runs that you already have can tell, without training anything.

    SOURCE is a table (CSV, TSV, JSON, JSON lines, Parquet), a folder of runs (Trainer, Lightning, Ray Tune, W&B,
    TensorBoard), or one of wandb:ENTITY/PROJECT, mlflow:EXPERIMENT, optuna:URL#STUDY. docs/ask.md shows how names are found.
    Nothing of your runs leaves this machine.
    """
    from ..search.laws.target_verdicts import target_verdicts
    from ..search.laws.verdicts import verdicts
    from ..search.report.export import json_text
    from ..search.report.terminal.laws.verdicts import group_parts, verdict_document
    from ..search.sources.read import is_source

    console = terminal(as_json)
    if not is_source(source) or (is_url(source) and not source.startswith("optuna:")):
        from ..search.store.stored import StoredStudy

        groups: Sequence[tuple[StoredStudy, Imported | None]] = [(StoredStudy.open(source, name), None)]
        columns = None
    else:
        columns, found = _read(
            source, mapped, metric, minimize, same, None if as_json else console, shown=not batches, targets=True
        )
        groups = [(as_study(one), one) for one in found]
    documents = []
    for study, one in groups:
        timed = one is None or one.timed
        if one is not None and one.to_target:
            answers = target_verdicts(study, one.to_target, batches)
        else:
            answers = verdicts(study, timed=timed, batches=batches)
        documents.append(verdict_document(study, one, answers))
        for part in () if as_json else group_parts(source, study, one, answers, several=len(groups) > 1, short=bool(batches)):
            console.print(part)
    if as_json:
        document = {"source": source, "columns": columns and _columns_document(columns), "groups": documents}
        click.echo(json_text(document), nl=False)
    if report is not None:
        if len(groups) != 1 or groups[0][1] is None or not groups[0][1].timed:
            raise click.UsageError("--report: expected one group of runs with their seconds; for a study: bsearch report")
        _write_report(report, groups[0][1])


def _columns_document(columns: Columns) -> list[dict[str, str]]:
    return [{"name": column.name, "meaning": column.meaning, "why": column.why} for column in columns.columns]


def _read(
    source: str,
    mapped: Sequence[str],
    metric: str | None,
    minimize: bool | None,
    same: bool,
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
    from ..search.report.terminal.laws.verdicts import columns_table
    from ..search.sources.columns import UnclearColumnsError, columns_of
    from ..search.sources.imported import imported
    from ..search.sources.read import runs_of

    runs = runs_of(source, lambda text: click.echo(plain(text), err=True))
    meanings = _mapped(mapped) | ({metric: "metric"} if metric else {})
    direction: Direction | None = None if minimize is None else "minimize" if minimize else "maximize"
    while True:
        try:
            if targets and (found := to_target(source, runs, meanings, same=same)) is not None:
                runs, columns = found
            else:
                columns = columns_of(source, runs, mapped=meanings, direction=direction, same=same)
            break
        except UnclearColumnsError as error:
            if console is not None:
                console.print(columns_table(error.columns))
            if console is None or not _is_asked():
                raise
            click.echo(plain(str(error)), err=True)
            answer = click.prompt(error.meaning, type=click.Choice(error.names))
            if error.meaning == "direction":
                direction = "minimize" if answer == "minimize" else "maximize"
            else:
                meanings[answer] = error.meaning
    if console is not None and shown:
        console.print(columns_table(columns))
    return columns, imported(source, runs, columns, _study_name(source))


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


def as_study(found: Imported, url: str = "") -> StoredStudy:
    """A group of runs as a study that no database holds."""
    from ..search.analysis.blow_ups import told_apart
    from ..search.analysis.pareto import study_front
    from ..search.store.stored import StoredStudy, study_identity

    spec = found.spec
    # Slow ways to a target are no blow-ups.
    records = found.records if found.to_target else told_apart(found.records)
    identity = study_identity(spec, "imported")
    return StoredStudy(url, spec.study, spec, identity, 0.0, records, study_front(records, spec.objectives))


@main.command("import", epilog=epilog("bsearch import runs.csv --study old.db\n  bsearch show sqlite:///old.db"))
@click.argument("source", metavar="SOURCE")
@click.option(
    "--study",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The database to write, a SQLite file; default: NAME.db here, by the source's name.",
)
@source_options
def import_(
    source: str, target: Path | None, mapped: tuple[str, ...], metric: str | None, minimize: bool | None, same: bool
) -> None:
    """Make a study of runs that you already have, which `show`, `report`, `rules` and `export` then read.

    Each group of runs that differ in task, data or model becomes a study of its own. A run without its seconds cannot be placed
    on a front: `bsearch ask` reads those.
    """
    from ..search.sources.store import written

    _, groups = _read(source, mapped, metric, minimize, same, terminal())
    path = target or Path(f"{_study_name(source)}.db")
    names = written(path, source, groups)
    for one, name in zip(groups, names, strict=True):
        click.echo(plain(f"study {name}: {plural(len(one.records), 'run')}{f', {one.name}' if one.name else ''}"))
    click.echo(f"wrote {from_here(path.absolute())}; look at it: bsearch report {shell_word(f'sqlite:///{path}')}")


def files_of_runs(source: str, mapped: Sequence[str], metric: str | None, minimize: bool | None, same: bool) -> dict[str, str]:
    """A study file of a source's runs, its tasks.py, and the runs in bsearch's own words: of several groups, the largest."""
    import yaml

    from ..search.laws.from_runs import run_document, study_of_runs
    from ..search.sources.task_file import task_file
    from ..spaces.study.file import parse_study

    _, groups = _read(source, mapped, metric, minimize, same, terminal(as_json=True))
    spec, records = groups[0].spec, groups[0].records
    keys = study_of_runs(spec, records, "tasks.py:MyTask", OLD_RUNS)
    of = f" ({groups[0].name}, the largest of {len(groups)} groups)" if len(groups) > 1 else ""
    head = plain(f"# Made of {plural(len(records), 'run')} of {source}{of} by `bsearch init --from`: look through it.\n")
    rows = (json.dumps(run_document(record, spec)) for record in records)
    study = head + yaml.safe_dump(keys, sort_keys=False, width=120)
    try:
        parse_study(study)
    except StudyFileError as error:
        click.echo(plain(f"study.yaml needs editing before it can run:\n{error}"), err=True)
    return {"study.yaml": study, "tasks.py": task_file(spec, source), OLD_RUNS: "\n".join(rows) + "\n"}


def _write_report(path: Path, group: Imported) -> None:
    """The page of runs, as of a study: from a database that is made for it."""
    from ..search.laws.best_rate import with_rates
    from ..search.report.page.page import report_page
    from ..search.report.page.study_data import StudyData
    from ..search.sources.store import written
    from ..search.store.stored import StoredStudy
    from ..spaces.boundary.files import write_file

    with TemporaryDirectory() as folder:
        database = Path(folder) / "runs.db"
        (name,) = written(database, "runs", [group])
        page = report_page(StudyData.of(with_rates(StoredStudy.open(sqlite_url(database), name))))
    click.echo(f"wrote {from_here(write_file(path, page).absolute())}", err=True)

"""Commands about a study's results: to look at, to export, to follow elsewhere."""

from __future__ import annotations

import json
import os
import socket
import sys
import webbrowser
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast, get_args

import click
from rich.console import Console

from ..search.report.completion import study_files
from ..search.report.stdio.console import terminal
from ..search.store.url import shown_url
from ..spaces.boundary.files import file_name
from ..spaces.boundary.storage import is_url, sqlite_url
from ..spaces.errors import StudyFileError, plain
from ..spaces.readable import from_here, shell_word
from ..spaces.study.file import read_study
from ..spaces.study.spec import Framework, Tracker
from .group import FAILED, INTERRUPTED, epilog, main, results_beside
from .options import VALUE, choice_options, json_option, name_option

if TYPE_CHECKING:
    from ..search.store.stored import StoredStudy

# What a study is exported to: tables of its trials, and settings of one for these frameworks.
_TABLES, _FRAMEWORKS = ("csv", "json"), get_args(Framework)


@main.command(
    epilog=epilog(
        "bsearch show study.yaml --all\n  bsearch show sqlite:///study.db --trial 7\n  bsearch show study.yaml --watch"
    )
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option("--all", "every", is_flag=True, help="Every trial, not only the front.")
@click.option("--outcome", help="Only trials with this outcome, such as complete, diverged, error or infeasible.")
@click.option("--trial", type=int, help="One trial: its settings, its learning curve, its traceback.")
@click.option("--target", type=VALUE, metavar="VALUE", help="Settings whose metric reaches this value, fastest first.")
@click.option("--watch", is_flag=True, help="Follow a study that another process runs, until it ends.")
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
        ctx.exit(_watch(study, name))
    if trial is not None and (every or outcome or target is not None):
        raise click.UsageError("--trial shows one trial: it cannot be combined with --all, --outcome or --target")
    if target is not None and (every or outcome):
        raise click.UsageError("--target shows the settings that reach it: it cannot be combined with --all or --outcome")
    from ..search.report.export import json_text, study_document, trial_document
    from ..search.report.terminal.tables import trials_table
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    front, records = stored.front, stored.records
    console = terminal(as_json)
    if trial is not None:
        _show_trial(stored, trial, as_json)
        return
    if target is not None:
        _show_target(stored, target, console, as_json)
        return
    chosen = [record for record in records if outcome in (None, record.outcome)]
    if as_json:
        document = study_document(stored.name, shown_url(stored.url), front, records)
        if every or outcome:
            document["all"] = [trial_document(record, front) for record in chosen]
        click.echo(json_text(document), nl=False)
        return
    if every or outcome:
        console.print(trials_table(chosen, front))
        return
    _print_study(stored, console)


def _show_target(stored: StoredStudy, target: float, console: Console, as_json: bool) -> None:
    from ..search.analysis.choice import chance_to_reach, settings_reaching
    from ..search.analysis.confirm import averaged
    from ..search.report.export import json_text, trial_document
    from ..search.report.sentences import target_sentence
    from ..search.report.terminal.tables import front_table

    front = stored.front
    reaching = settings_reaching(front, averaged(stored.records, stored.spec.objectives), target)
    if as_json:
        trials = [{**trial_document(trial, front), "chance": chance_to_reach(trial, target)} for trial in reaching.trials]
        click.echo(json_text({"study": stored.name, "metric": front.metric, "target": target, "trials": trials}), nl=False)
        return
    if reaching.trials:
        console.print(front_table(reaching, target=target))
    console.print(target_sentence(stored, target))


def _watch(study: str, name: str | None) -> int:
    from ..search.report.stdio.streams import ends_with_reader
    from ..search.report.terminal.live import LiveView
    from ..search.report.terminal.watch import begun_study, watch_study
    from ..search.store.stored import StoredStudy

    console = terminal()
    try:
        with ends_with_reader(), LiveView(console) as view:
            begun = begun_study(lambda: StoredStudy.open(study, name), view.say)
            budget = 0 if is_url(study) else read_study(Path(study)).budget.trials
            end = watch_study(begun, view, budget)
    except KeyboardInterrupt:
        console.print("stopped watching; the study keeps running", style="dim")
        return INTERRUPTED
    _print_study(StoredStudy.open(study, name), console)
    console.print(end.why)
    return 0 if end.done else FAILED


def print_front(stored: StoredStudy, trials: int, console: Console) -> None:
    """The front of so many trials as table, plot and sentences."""
    from ..search.report.sentences import front_summary
    from ..search.report.terminal.tables import front_plot, front_table

    front, records = stored.front, stored.records
    console.print(f"Front of {stored.name}: {len(front.trials)} of {trials} trials", style="bold")
    console.print(front_table(front))
    plot = front_plot(front, records, console.width)
    console.print(f"\n{plot}" if plot else "")
    for sentence in front_summary(stored):
        console.print(sentence)


def _print_study(stored: StoredStudy, console: Console) -> None:
    """The front, and how many trials ended in which way."""
    from ..search.report.sentences import outcome_counts
    from ..search.report.terminal.deadline import plan_sentence
    from ..search.report.terminal.watch import driver_sentence

    print_front(stored, len(stored.records), console)
    console.print(f"Trials: {outcome_counts(stored.records)}")
    if sentence := driver_sentence(stored):
        console.print(sentence)
    if plan := plan_sentence(stored.deadline):
        console.print(plan)


def _show_trial(study: StoredStudy, number: int, as_json: bool) -> None:
    from ..search.report.export import json_text, trial_document
    from ..search.report.terminal.tables import trial_parts

    front, records = study.front, study.records
    record = next((record for record in records if record.number == number), None)
    if record is None:
        known = f"its trials are numbered 0 to {len(records) - 1}" if records else "it has no trials yet"
        raise StudyFileError(f"study {study.name}: has no trial {number}; {known}")
    tables = study.tables()
    curve = [
        row.model_dump(include={"attempt", "samples_seen", "elapsed_s", "accuracy", "train_loss"})
        for row in tables.curve(study.name, number)
    ]
    attempts = [
        {key: getattr(row, key) for key in ("attempt", "outcome", "message", "traceback", "started_at", "ended_at")}
        for row in tables.attempts(study.name, number)
    ]
    document = trial_document(record, front) | {"curve": curve, "attempts": attempts}
    if as_json:
        click.echo(json_text(document), nl=False)
        return
    console = terminal()
    for part in trial_parts(document, record, front.metric):
        console.print(part)
    for attempt in attempts:
        if attempt["traceback"]:
            console.print(attempt["traceback"])


@main.command(epilog=epilog("bsearch export study.yaml --out front.csv\n  bsearch export study.yaml --to hf --within 1%"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option(
    "--what", type=click.Choice(["front", "trials"]), default="front", help="Rows of a table in csv or json.", show_default=True
)
@click.option(
    "--to",
    type=click.Choice([*_TABLES, *_FRAMEWORKS, "optuna"]),
    default="csv",
    show_default=True,
    help="csv or json: a table. A framework: the settings of one trial of the front, to paste into its code. optuna: all "
    "trials, for its dashboard.",
)
@choice_options("For a framework: ")
@click.option("--out", type=click.Path(path_type=Path), help="File to write; default: stdout.")
@click.pass_context
def export(
    ctx: click.Context,
    /,
    study: str,
    name: str | None,
    what: str,
    to: str,
    out: Path | None,
    **choice: Any,
) -> None:
    """Print a study's front, or all its trials, as CSV or JSON; or one trial's settings for a framework.

    docs/export.md lists the columns, and what each framework can express.
    """
    from ..search.report.export import csv_text, json_text, study_document, trial_document
    from ..search.store.stored import StoredStudy
    from ..spaces.boundary.files import write_file

    _check_export(ctx, to)
    stored = StoredStudy.open(study, name)
    if to == "optuna":
        from ..search.report.optuna_view import copy_now

        url = stored.url if out is None else sqlite_url(out.absolute())
        copy_now(stored, None if out is None else url).close()
        click.echo(
            f"{plain(stored.name)}: copied for Optuna. To see it: optuna-dashboard {shell_word(shown_url(url))}", err=True
        )
        return
    front, records = stored.front, stored.records
    if to in _FRAMEWORKS:
        text = _exported(stored, cast(Framework, to), choice, out)
    else:
        rows = [trial_document(record, front) for record in (front.trials if what == "front" else records)]
        if to == "csv":
            text = csv_text(rows)
        else:
            document = study_document(stored.name, shown_url(stored.url), front, records)
            text = json_text(document if what == "front" else document | {"all": rows})
    if out is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {write_file(out, text)}", err=True)


def _check_export(ctx: click.Context, to: str) -> None:
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    if to not in _TABLES and "what" in given:
        raise click.UsageError("--what is for tables: with --to csv or json")
    if to not in _FRAMEWORKS and given & {"trial", "within", "target", "cheapest_to"}:
        raise click.UsageError(
            "--trial, --within, --target and --cheapest-to choose a trial for a framework; add --to "
            f"{', '.join(_FRAMEWORKS[:-1])} or {_FRAMEWORKS[-1]}"
        )


def _exported(stored: StoredStudy, framework: Framework, choice: dict[str, Any], out: Path | None) -> str:
    """One trial's settings for a framework; which trial, its result, and notes that the text lacks go to stderr.

    What the text reads is written beside it.
    """
    from ..search.analysis.choice import Choice
    from ..search.report.frameworks import FRAMEWORKS
    from ..search.report.frameworks.settings import settings_to_export

    chosen = settings_to_export(stored, Choice(**choice))
    exported = FRAMEWORKS[framework](chosen)
    click.echo(plain(f"study {stored.name}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"), err=True)
    if exported.beside is not None and out is None:
        click.echo("note: with --out FILE, the token rows that it trains on are written beside it", err=True)
    elif exported.beside is not None and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        exported.beside(out.parent)
    seen = out is None and sys.stdout.isatty() and "# note: " in exported.text
    for note in () if seen else exported.notes:
        click.echo(plain(f"note: {note}"), err=True)
    return exported.text


@main.command(epilog=epilog("bsearch track study.yaml\n  bsearch track study.yaml --to mlflow"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@click.option(
    "--to",
    "trackers",
    multiple=True,
    type=click.Choice(get_args(Tracker)),
    help="Tracker to send trials to; default: the study's `tracking`. May be repeated.",
)
@name_option
@json_option
@click.pass_context
def track(ctx: click.Context, /, study: str, trackers: tuple[Tracker, ...], name: str | None, as_json: bool) -> None:
    """Send a study's trials to MLflow, Weights & Biases or TensorBoard: a run each, with settings, curve and outcome.

    Trials that a tracker already has are not sent again. With `tracking` in the study file, `bsearch run` does this as trials
    train.
    """
    from ..extras.tracking.follow import tell
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    chosen = trackers or stored.spec.tracking
    if not chosen:
        raise StudyFileError(
            "tracking: expected mlflow, wandb or tensorboard, got none. Pass --to mlflow, or write "
            "tracking: mlflow in the study file."
        )
    tracked = tell(stored, chosen, results_beside(study) / file_name(stored.name))
    if as_json:
        click.echo(json.dumps([asdict(status) for status in tracked], indent=2))
    else:
        for status in tracked:
            click.echo(status.sentence)
    ctx.exit(FAILED if any(status.left for status in tracked) else 0)


@main.command(epilog=epilog("bsearch report study.yaml\n  bsearch report study.yaml --figures figures"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@click.option("--out", type=click.Path(path_type=Path), help="HTML file to write; default: results/STUDY/report.html.")
@click.option(
    "--figures", type=click.Path(path_type=Path), help="Also write every figure into this folder, as PNG, SVG and CSV."
)
@click.option("--open", "opened", is_flag=True, help="Open the page in the browser.")
@name_option
def report(
    study: str,
    out: Path | None,
    figures: Path | None,
    opened: bool,
    name: str | None,
) -> None:
    """Write a study's results as one self-contained HTML page.

    The front with a picker for the settings of any point, rates by batch, memory, speed, and learning curves.
    """
    from ..search.laws.best_rate import with_rates
    from ..search.report.page.figures import figures_of
    from ..search.report.page.page import report_page, write_figures
    from ..search.report.page.study_data import StudyData
    from ..search.store.stored import StoredStudy
    from ..spaces.boundary.files import write_file

    stored = with_rates(StoredStudy.open(study, name))
    drawn = StudyData.of(stored)
    path = write_file(out or results_beside(study) / file_name(stored.name) / "report.html", report_page(drawn))
    click.echo(f"wrote {plain(from_here(path.absolute()))}")
    for figure in write_figures(figures_of(drawn), figures) if figures else ():
        click.echo(f"wrote {plain(from_here(figure.absolute()))}")
    if opened:
        click.launch(str(path.absolute()))


@main.command(epilog=epilog("bsearch dashboard study.yaml\n  bsearch dashboard sqlite:///study.db --port 0 --no-open"))
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@name_option
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for any free port.")
@click.option("--open/--no-open", "opens", default=None, help="Open the browser; default: if there is a display.")
def dashboard(study: str, name: str | None, port: int, opens: bool | None) -> None:
    """Show a study in the browser: optuna-dashboard, with bsearch's notes on the study and on each trial.

    For this machine only, since it has no login. Ctrl-C stops it. docs/dashboard.md explains its pages, and how to view it
    from another machine.
    """
    from ..search.report.dashboard import dashboard_server
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    with dashboard_server(stored, port) as (address, serve), suppress(KeyboardInterrupt):
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

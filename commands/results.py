"""Commands about a study's results: to look at, to export, to follow elsewhere."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast, get_args

import click
from rich.console import Console

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import give, json_text, say, terminal
from ..search.store.url import shown_url
from ..spaces.boundary.files import file_name
from ..spaces.boundary.secrets import masked
from ..spaces.boundary.storage import is_url, sqlite_url
from ..spaces.errors import StudyFileError
from ..spaces.readable import from_here, shell_word
from ..spaces.study.file import read_study
from ..spaces.study.spec import Framework, Tracker
from .group import FAILED, INTERRUPTED, epilog, main, results_beside
from .options import json_option, named, opened, out_option, pick_option

if TYPE_CHECKING:
    from ..search.store.stored import StoredStudy

# What a study is exported to: tables of its trials, settings of one for these frameworks, and runs of these trackers.
_TABLES, _FRAMEWORKS, _TRACKERS = ("csv", "json"), get_args(Framework), get_args(Tracker)
_all_option = click.option("--all", "every", is_flag=True, help="Every trial, not only the front.")


@main.command(
    epilog=epilog(
        "bsearch show study.yaml --all\n  bsearch show sqlite:///study.db --pick 7\n  bsearch show study.yaml --watch"
    )
)
@click.argument("study", metavar="STUDY|URL[#NAME]", shell_complete=study_files)
@_all_option
@pick_option(
    ": its settings, its learning curve, its traceback; with reaches:.9 every setting that does, fastest first"
)
@click.option("--watch", is_flag=True, help="Follow a study that another process runs, until it ends.")
@click.option("--record", "settled", is_flag=True, help="What was predicted of each trial beside what came.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The front in another device's step times, from `bsearch profile STUDY --out FILE` there: accuracies stay, nothing is "
    "trained.",
)
@json_option
@click.pass_context
def show(
    ctx: click.Context,
    study: str,
    every: bool,
    pick: dict[str, Any] | None,
    watch: bool,
    settled: bool,
    profile: Path | None,
    as_json: bool,
) -> None:
    """Print what a study has found so far: its front, its trials, one trial, or the settings that reach a target.

    With --watch, waits up to a minute for the study to begin; exits with 0 when it has met its budget, and with 1 if no driver
    runs it.
    """
    if watch:
        if as_json or every or settled or profile is not None or pick is not None:
            raise click.UsageError(
                "expected --watch alone, got another option too; programs can poll `show --json`"
            )
        ctx.exit(_watch(study))
    if sum((pick is not None, every, settled, profile is not None)) > 1:
        raise click.UsageError("expected --all, --pick, --record or --profile, got several")
    stored, console = opened(study), terminal(as_json)
    if pick is not None and "target" in pick:
        _show_target(stored, pick["target"], console, as_json)
    elif pick is not None:
        _show_trial(stored, _number(stored, pick), as_json)
    elif settled:
        _show_record(stored, console, as_json)
    elif profile is not None:
        _show_elsewhere(stored, profile, console, as_json)
    elif as_json and every:
        give_answer("trials", _trials_document(stored, every), whole=True)
    elif as_json:
        give_answer("show", study_answer_of(stored, study), "front")
    elif every:
        from ..search.report.terminal.tables import trials_table

        console.print(trials_table(stored.records, stored.front))
    else:
        _print_study(stored, console)


def _number(stored: StoredStudy, pick: dict[str, Any]) -> int:
    """The picked trial's number; one that is given need not be on the front."""
    from ..search.analysis.choice import Choice, chosen_trial

    if isinstance(number := pick.get("trial"), int):
        return number
    return chosen_trial(stored.name, stored.front, Choice(**pick), stored.records).number


def study_answer_of(stored: StoredStudy, study: str) -> dict[str, Any]:
    """A study's answer for programs, with who runs it now."""
    from ..search.report.answers import study_answer

    with closing(stored.tables()) as tables:
        driver = tables.lock.driver(stored.name)
    return study_answer(stored, driver, shell_word(masked(study)))


def _trials_document(stored: StoredStudy, every: bool) -> dict[str, Any]:
    """The front, and every trial where that is wanted."""
    from ..search.report.export import study_document, trial_document

    document = study_document(stored.name, shown_url(stored.url), stored.front, stored.records)
    if every:
        document |= {"all": [trial_document(record, stored.front) for record in stored.records]}
    return document


def _show_record(stored: StoredStudy, console: Console, as_json: bool) -> None:
    from ..search.report.terminal.fitted import Fitted
    from ..search.report.track_record import (
        RECORD_COLUMNS,
        record_rows,
        record_sentences,
        settled_predictions,
        track_records,
    )

    settled = settled_predictions(stored)
    if as_json:
        rows = [{**asdict(each), "within": each.is_within} for each in settled]
        found = {"study": stored.name, "record": [*map(asdict, track_records(settled))], "settled": rows}
        give_answer("record", found, "settled")
        return
    table = Fitted.of_rows(RECORD_COLUMNS, record_rows(settled), RECORD_COLUMNS, words=("what",))
    console.print(table if settled else "No prediction is settled yet.")
    for sentence in record_sentences(stored.records, settled):
        console.print(sentence)


def _show_elsewhere(stored: StoredStudy, profile: Path, console: Console, as_json: bool) -> None:
    """The front in another device's step times."""
    from ..search.analysis.retime import read_profile, retimed
    from ..search.report.terminal.retime import retimed_document, retimed_parts

    device, setups = read_profile(profile), stored.tables().setups(stored.name)
    after = retimed(stored.spec, stored.identity["task"], stored.records, setups, device)
    if as_json:
        give_answer("retime", retimed_document(stored, device.name, after), "front")
        return
    for part in retimed_parts(stored, device.name, after, console.width):
        console.print(part)


def _show_target(stored: StoredStudy, target: float, console: Console, as_json: bool) -> None:
    from ..search.analysis.choice import chance_to_reach, settings_reaching
    from ..search.analysis.confirm import averaged
    from ..search.report.answers import trial_summary
    from ..search.report.sentences import target_sentence
    from ..search.report.terminal.tables import front_table

    front = stored.front
    reaching = settings_reaching(front, averaged(stored.records, stored.spec.objectives), target)
    if as_json:
        trials = [
            {**trial_summary(trial, front), "chance": chance_to_reach(trial, target)}
            for trial in reaching.trials
        ]
        give_answer(
            "reaching",
            {"study": stored.name, "metric": front.metric, "target": target, "trials": trials},
            "trials",
        )
        return
    if reaching.trials:
        console.print(front_table(reaching, target=target))
    console.print(target_sentence(stored, target))


def _watch(study: str) -> int:
    from ..search.report.stdio.streams import ends_with_reader
    from ..search.report.terminal.live import LiveView
    from ..search.report.terminal.watch import begun_study, watch_study

    console, file = terminal(), named(study)[0]
    try:
        with ends_with_reader(), LiveView(console) as view:
            begun = begun_study(lambda: opened(study), view.say)
            budget = 0 if is_url(file) else read_study(Path(file)).budget.trials
            end = watch_study(begun, view, budget)
    except KeyboardInterrupt:
        console.print("stopped watching; the study keeps running", style="dim")
        return INTERRUPTED
    _print_study(opened(study), console)
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
    from ..search.report.terminal.deadline import deadline_sentence
    from ..search.report.terminal.watch import driver_sentence

    print_front(stored, len(stored.records), console)
    console.print(f"Trials: {outcome_counts(stored.records)}")
    if sentence := driver_sentence(stored):
        console.print(sentence)
    if plan := deadline_sentence(stored.deadline):
        console.print(plan)


def _show_trial(study: StoredStudy, number: int, as_json: bool) -> None:
    from ..search.report.export import trial_document
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
        {
            key: getattr(row, key)
            for key in ("attempt", "outcome", "message", "traceback", "started_at", "ended_at")
        }
        for row in tables.attempts(study.name, number)
    ]
    document = trial_document(record, front) | {"curve": curve, "attempts": attempts}
    if as_json:
        give_answer("trial", document, "curve", "attempts")
        return
    console = terminal()
    for part in trial_parts(document, record, front.metric):
        console.print(part)
    for attempt in attempts:
        if attempt["traceback"]:
            console.print(attempt["traceback"])


@main.command(
    epilog=epilog(
        "bsearch export study.yaml --out front.csv\n  bsearch export study.yaml --to hf --pick within:1%\n"
        "  bsearch export study.yaml --to mlflow"
    )
)
@click.argument("study", metavar="STUDY|URL[#NAME]", shell_complete=study_files)
@_all_option
@click.option(
    "--to",
    type=click.Choice([*_TABLES, *_FRAMEWORKS, *_TRACKERS, "optuna"]),
    default="csv",
    show_default=True,
    metavar="NAME",
    help=f"{', '.join(_TABLES)}: a table. {', '.join(_FRAMEWORKS)}: the settings of one trial of the front, to paste into its "
    f"code. {', '.join(_TRACKERS)}: a run for each trial, with settings, curve and outcome, unless it is there already. "
    "optuna: all trials, for its dashboard.",
)
@pick_option("; for a framework, default: within:1%")
@out_option("a file; default: stdout.")
@click.pass_context
def export(
    ctx: click.Context, /, study: str, every: bool, to: str, pick: dict[str, Any] | None, out: Path | None
) -> None:
    """Print a study's front, or all its trials, as CSV or JSON; or one trial's settings for a framework; or send its trials to
    a tracker.

    docs/export.md lists the columns, and what each framework can express. With `tracking` in the study file, `bsearch run`
    sends trials to trackers as they train.
    """
    from ..spaces.boundary.files import write_file

    if every and to not in _TABLES:
        raise click.UsageError("--all is for tables: with --to csv or json")
    if pick is not None and to not in _FRAMEWORKS:
        raise click.UsageError(f"--pick chooses a trial for a framework; add --to {', '.join(_FRAMEWORKS)}")
    if out is not None and to in _TRACKERS:
        raise click.UsageError(f"--out: expected csv, json, a framework or optuna with it, got --to {to}")
    stored = opened(study)
    if to in _TRACKERS:
        ctx.exit(_track(stored, cast(Tracker, to), results_beside(study)))
    if to == "optuna":
        _copy_for_optuna(stored, out)
        return
    if to in _FRAMEWORKS:
        text = _exported(stored, cast(Framework, to), pick or {}, out)
    else:
        text = json_text(_trials_document(stored, every)) if to == "json" else _trials_csv(stored, every)
    if out is None:
        give(text)
    else:
        say(f"wrote {write_file(out, text)}", err=True)


def _trials_csv(stored: StoredStudy, every: bool) -> str:
    from ..search.report.export import csv_text, trial_document

    return csv_text(
        [
            trial_document(record, stored.front)
            for record in (stored.records if every else stored.front.trials)
        ]
    )


def _copy_for_optuna(stored: StoredStudy, out: Path | None) -> None:
    from ..search.report.optuna_view import copy_now

    url = stored.url if out is None else sqlite_url(out.absolute())
    copy_now(stored, None if out is None else url).close()
    say(
        f"{stored.name}: copied for Optuna. To see it: optuna-dashboard {shell_word(shown_url(url))}",
        err=True,
    )


def _track(stored: StoredStudy, to: Tracker, results: Path) -> int:
    """Send a study's trials to a tracker; the exit code."""
    from ..extras.tracking.follow import tell

    tracked = tell(stored, [to], results / file_name(stored.name))
    for status in tracked:
        say(status.sentence)
    return FAILED if any(status.left for status in tracked) else 0


def _exported(stored: StoredStudy, framework: Framework, pick: dict[str, Any], out: Path | None) -> str:
    """One trial's settings for a framework; which trial, its result, and notes that the text lacks go to stderr.

    What the text reads is written beside it.
    """
    from ..search.analysis.choice import Choice
    from ..search.report.frameworks import FRAMEWORKS
    from ..search.report.frameworks.settings import settings_to_export

    chosen = settings_to_export(stored, Choice(**pick))
    exported = FRAMEWORKS[framework](chosen)
    say(f"study {stored.name}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}", err=True)
    if exported.beside is not None and out is None:
        say("note: with --out FILE, the token rows that it trains on are written beside it", err=True)
    elif exported.beside is not None and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        exported.beside(out.parent)
    seen = out is None and sys.stdout.isatty() and "# note: " in exported.text
    for note in () if seen else exported.notes:
        say(f"note: {note}", err=True)
    return exported.text


@main.command(epilog=epilog("bsearch report study.yaml"))
@click.argument("study", metavar="STUDY|URL[#NAME]", shell_complete=study_files)
@out_option("an HTML file; default: results/STUDY/report.html.")
def report(study: str, out: Path | None) -> None:
    """Write a study's results as one self-contained HTML page.

    The front with a picker for the settings of any point, rates by batch, memory, speed, and learning curves; each figure can
    be saved from there as SVG or CSV.
    """
    from ..search.report.page.page import report_page
    from ..search.report.page.study_data import StudyData
    from ..spaces.boundary.files import write_file

    stored = opened(study)
    if stored.current_rates() is None:
        from ..search.laws.best_rate import with_rates

        stored = with_rates(stored)
    drawn = StudyData.of(stored)
    path = write_file(
        out or results_beside(study) / file_name(stored.name) / "report.html", report_page(drawn)
    )
    say(f"wrote {from_here(path.absolute())}")


@main.command(
    epilog=epilog("bsearch dashboard study.yaml --open\n  bsearch dashboard sqlite:///study.db --port 0")
)
@click.argument("study", metavar="STUDY|URL[#NAME]", shell_complete=study_files)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 for any free port."
)
@click.option("--open", "opens", is_flag=True, help="Open it in the browser.")
def dashboard(study: str, port: int, opens: bool) -> None:
    """Show a study in the browser: optuna-dashboard, with bsearch's notes on the study and on each trial.

    For this machine only, since it has no login. Ctrl-C stops it. docs/dashboard.md explains its pages, and how to view it
    from another machine.
    """
    from ..search.report.dashboard import dashboard_server

    stored = opened(study)
    with dashboard_server(stored, port) as (address, serve), suppress(KeyboardInterrupt):
        say(f"study {stored.name}: {address} (Ctrl-C stops it)")
        say(f"summary: {address}/note")
        if "SSH_CONNECTION" in os.environ:
            own = address.split(":")[2].split("/")[0]
            say(
                f"from your own machine: ssh -N -L {own}:127.0.0.1:{own} {socket.gethostname()}, then the same address"
            )
        if opens:
            # Some browsers run in the terminal until they are closed.
            Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        serve()

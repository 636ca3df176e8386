"""`bsearch compare`: whether a change is better, or was luck."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..search.report.completion import study_files
from ..search.report.stdio.answer import give_answer
from ..search.report.stdio.console import terminal
from ..spaces.deadline import duration_of
from ..spaces.errors import ClusterError
from .ask import groups_of, is_study, metric_option
from .group import FAILURE, documents_only, epilog, main
from .options import json_option, serial_option, study_in

if TYPE_CHECKING:
    from rich.console import Console

    from ..search.compare.referee import Comparison
    from ..search.compare.revision import Revision
    from ..search.run.events import Event
    from ..search.run.study_run import StudyRun
    from ..search.store.stored import StoredStudy
    from ..spaces.study.spec import StudySpec

# Exit codes: better or no worse than the margin, worse, cannot tell; what could not be compared.
CODES, REFUSED = {"better": 0, "worse": 1, "cannot tell": 2}, 3


class _Gate(click.Command):
    """A command whose every failure has an exit code of its own, so that none is taken for a verdict."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[FAILURE] = REFUSED
        return super().parse_args(ctx, args)


@main.command(
    cls=_Gate,
    epilog=epilog(
        "bsearch compare main.yaml change.yaml --trials 40\n  bsearch compare study.yaml --against HEAD~1\n"
        "  bsearch compare before.csv after.csv --metric val_acc"
    ),
)
@click.argument("sides", metavar="MAIN CHANGE", nargs=-1, required=True, shell_complete=study_files)
@click.option(
    "--against", metavar="REVISION", help="Compare a study with itself as it was in git, checked out apart."
)
@click.option(
    "--trials",
    type=click.IntRange(min=12),
    help="Trials to finish, instead of budget.trials, of both sides together.",
)
@click.option("--within", metavar="DURATION", help="How long it may take: 2h, 90m, for both sides together.")
@click.option(
    "--margin", type=click.FloatRange(min=0), default=0.0, help="Count a loss of at most this as none."
)
@metric_option
@serial_option("trials one after the other, in this process.")
@json_option
@click.pass_context
def compare(
    ctx: click.Context,
    sides: tuple[str, ...],
    against: str | None,
    trials: int | None,
    within: str | None,
    margin: float,
    metric: str | None,
    serial: bool,
    as_json: bool,
) -> None:
    """Say whether CHANGE is better than MAIN, each at its own best settings.

    Both are study files: each is searched with the same budget, in turn, until it is clear which is better, or the budget is
    used up. The trials are those of both studies; the same command again resumes. Or both are runs that exist, as `bsearch ask`
    reads them, or databases: then nothing is trained.

    Exit code 0: better, or worse by no more than --margin. 1: worse. 2: cannot tell. 3: anything that failed.
    """
    if len(sides) != (1 if against else 2):
        raise click.UsageError("expected two studies or sources of runs, or one study and --against", ctx)
    if trials is not None and within is not None:
        raise click.UsageError("expected --trials or --within, got both", ctx)
    hours = None if within is None else _hours(within)
    console = terminal(as_json)
    with documents_only(as_json):
        if against is not None or all(map(_is_file, sides)):
            files = [Path(side) for side in sides]
            if metric is not None:
                raise click.UsageError("--metric is for runs of another source; a study has its own")
            specs, revision = [study_in(file) for file in files], None
            if against is not None:
                from ..search.compare.revision import Revision

                revision = Revision.of(files[0], against)
                specs.insert(0, _at(revision))
            comparison = _refereed((specs[0], specs[1]), revision, trials, hours, margin, serial, console)
        else:
            if trials is not None or within is not None:
                raise click.UsageError(
                    "--trials and --within are for two study files; runs that exist are only compared", ctx
                )
            comparison = _existing(sides, metric, margin, as_json)
    from ..search.report.terminal.compare import comparison_document, comparison_lines

    for line in comparison_lines(comparison):
        console.print(line)
    if as_json:
        give_answer("compare", comparison_document(comparison), "within")
    ctx.exit(CODES[comparison.verdict])


def _is_file(side: str) -> bool:
    return Path(side).suffix in (".yaml", ".yml")


def _hours(text: str) -> float:
    length = duration_of(text)
    if length is None:
        raise click.UsageError(f"--within: expected a duration such as 2h or 90m, got {text!r}")
    return length.total_seconds() / 3600


def _refereed(
    specs: tuple[StudySpec, StudySpec],
    revision: Revision | None,
    trials: int | None,
    hours: float | None,
    margin: float,
    serial: bool,
    console: Console,
) -> Comparison:
    """Search both studies in turn; returns the last comparison.

    Each part of a search has a Ray of its own, whose processes begin where that side's code is.
    """
    from ..cluster.study import has_changed, run_study_here
    from ..search.compare.referee import refereed
    from ..search.report.terminal.live import LiveView

    comparison, said = None, set[str]()
    with LiveView(console) as view:

        def notify(event: Event) -> None:
            if event.kind != "message" or event.text not in said:  # each look opens the study again
                said.add(event.text)
                view.notify(event)

        def watch(run: StudyRun) -> None:
            run.own_seeds = True  # one that all trials of a side share may suit it, or not
            view.watch(run)

        def trained(spec: StudySpec) -> StoredStudy:
            out = specs[1].folder / "results" / spec.study
            apart = (
                revision.entered if revision and spec.folder.is_relative_to(revision.folder) else nullcontext
            )
            with apart():
                how = {"serial": serial, "new": has_changed(spec), "same_experiment": False}
                result = run_study_here(spec, out, **how, notify=notify, watch=watch)
            if result.interrupted is not None:
                raise KeyboardInterrupt
            if result.failure:
                raise ClusterError(f"study {result.study.name}: {result.failure}")
            return result.study

        for comparison in refereed(specs, trained, trials, hours, margin):
            first, second = comparison.runs
            console.print(f"after {first} and {second} finished runs: {comparison.verdict}")
    assert comparison is not None
    return comparison


def _existing(sides: Sequence[str], metric: str | None, margin: float, as_json: bool) -> Comparison:
    """Compare runs that exist; of a source with several groups of runs, the largest."""
    from ..search.compare.referee import compared

    if metric is not None and (study := next(filter(is_study, sides), None)):
        raise click.UsageError(f"--metric is for runs of another source; {study} is a study")
    first, second = (groups_of(side, (), metric, as_json, shown=False)[1][0][0] for side in sides)
    return compared(first, second, margin)


def _at(revision: Revision) -> StudySpec:
    """A study as it was in a revision."""
    with revision.entered():
        spec = study_in(revision.file)
        revision.check_code_of(spec)
    return spec.with_top(study=f"{spec.study}-{revision.folder.name}")

"""Commands that say what trials mean elsewhere: rules of the rate, other devices, larger trainings, other batches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
from rich.console import Console
from rich.text import Text

from ..search.report.completion import study_files
from ..search.report.stdio.console import terminal
from ..search.store.url import shown_url
from ..spaces.boundary.storage import is_url
from ..spaces.errors import StudyFileError, cut
from ..spaces.learning_rate import RATE_RULES, SCALINGS, rule_fact
from ..spaces.readable import from_here
from ..spaces.study.goals import Objectives, Speed
from .group import epilog, located_faults, main
from .options import TIMES, VALUE, device_options, json_option, name_option

if TYPE_CHECKING:
    from ..search.analysis.retime import Retimed
    from ..search.laws.scaled_up import NextStudy
    from ..search.store.stored import StoredStudy


@main.command(
    epilog=epilog(
        "bsearch retime study.yaml --profile a100.json\n"
        "  bsearch retime study.yaml --profile a100.json --price 1.8 --profile h100.json --price 2.5"
    )
)
@click.argument("study", metavar="STUDY|URL", shell_complete=study_files)
@device_options(
    "The other device's profile, from `bsearch profile STUDY --out FILE` there; several are compared.", required=True
)
@click.option(
    "--second-speed",
    type=click.Choice(get_args(Speed)),
    help="A second measure of speed, as a third objective; default: the study's objectives.second_speed.",
)
@name_option
@json_option
def retime(
    study: str,
    profile_files: tuple[Path, ...],
    prices: tuple[float, ...],
    second_speed: Speed | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Recompute a study's front with other devices' step times, without training.

    Accuracies stay; on a device with less memory the same effective batch accumulates more. With several profiles, or with
    prices: one front over all devices, and what its most accurate setting takes on each.
    """
    from ..search.analysis.retime import retimed_summary
    from ..search.report.export import json_text, study_document
    from ..search.report.sentences import knee_sentence
    from ..search.report.terminal.tables import front_plot, front_table
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    if second_speed == stored.spec.objectives.speed:
        raise click.UsageError(f"--second-speed: expected another measure than the study's own, which is {second_speed}")
    objectives = stored.spec.objectives.with_second_speed(second_speed)
    each = retimed_on(stored, profile_files, prices, objectives)
    console = terminal(as_json)
    if prices or len(each) > 1:
        _compare_devices(stored, each, objectives, console, as_json)
        return
    ((device, after),) = each.items()
    if as_json:
        document = study_document(stored.name, shown_url(stored.url), after.front, after.records)
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


def retimed_on(
    stored: StoredStudy, profile_files: tuple[Path, ...], prices: tuple[float, ...], objectives: Objectives
) -> dict[str, Retimed]:
    """A study's trials on other devices, by the devices' names."""
    from ..search.analysis.retime import read_devices, retimed

    if prices and len(prices) != len(profile_files):
        raise click.UsageError(f"expected a --price for each of {len(profile_files)} profiles, got {len(prices)}")
    if any(price < 0 for price in prices):
        raise click.UsageError(f"--price: expected 0 or more, got {min(prices):g}")
    devices = read_devices(profile_files)
    setups = stored.tables().setups(stored.name) if devices else {}
    return {
        name: retimed(stored.spec, stored.identity["task"], stored.records, setups, device, price, objectives=objectives)
        for (name, device), price in zip(devices.items(), prices or (None,) * len(devices), strict=True)
    }


def _compare_devices(
    stored: StoredStudy, each: Mapping[str, Retimed], objectives: Objectives, console: Console, as_json: bool
) -> None:
    """The front over several devices."""
    from ..search.analysis.retime import front_over_devices, placements_over
    from ..search.report.export import json_text, trial_document
    from ..search.report.terminal.retime import placements_parts

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


@main.command(epilog=epilog("bsearch rules\n  bsearch rules study.yaml"))
@click.argument("study", metavar="[STUDY|URL]", required=False, shell_complete=study_files)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Report the best rate at this batch too; may be repeated.",
)
@name_option
@json_option
def rules(study: str | None, batches: tuple[int, ...], name: str | None, as_json: bool) -> None:
    """Print the learning-rate rules: what they do, their formulas and sources.

    kappa is effective_batch / reference batch. With STUDY: which rules its trials support, with a 90 % interval of the
    exponent, and the best rate at a few batches.
    """
    if study is not None:
        _study_rules(study, batches, name, as_json)
        return
    if name is not None or batches:
        raise click.UsageError(f"--{'batch' if batches else 'name'} needs a STUDY")
    rows = [
        {"rule": name, **{fact.lower(): rule_fact(name, fact) for fact in ("Summary", "Formula", "Source")}}
        for name in (*RATE_RULES, *SCALINGS)
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    console = terminal()
    for row in rows:
        console.print(Text(row["rule"], style="bold"), f" {row['summary']}\n  {row['formula']}\n  {row['source']}\n")


@main.command("scale-up", epilog=epilog("bsearch scale-up small.yaml medium.yaml --data 10x --model 4x"))
@click.argument("studies", metavar="STUDY...", nargs=-1, required=True, shell_complete=study_files)
@click.option("--data", type=TIMES, default="1x", metavar="TIMES", help="Training samples, as a multiple of the largest tried.")
@click.option(
    "--model", type=TIMES, default="1x", metavar="TIMES", help="Model parameters, as a multiple of the largest tried."
)
@click.option(
    "--then-run",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the small study that would narrow the intervals most.",
)
@click.option("--name", "named", multiple=True, metavar="NAME", help="Which study, if the storage holds several; repeatable.")
@json_option
def scale_up(
    studies: tuple[str, ...],
    data: float,
    model: float,
    then_run: Path | None,
    named: tuple[str, ...],
    as_json: bool,
) -> None:
    """Predict the best batch, learning rate and weight decay of a training that is too large to search.

    Uses the trials of one study, or of several that differ only in size (epochs, samples, width), and published scaling laws:
    where the trials say little, the interval is the laws' disagreement.
    """
    from ..search.laws.scale_up import scale_up as predict
    from ..search.report.export import json_text
    from ..search.report.terminal.laws.scale_up import scale_up_document, scale_up_parts
    from ..search.store.stored import StoredStudy

    if then_run is not None and then_run.exists():
        raise click.UsageError(f"--then-run: {then_run} exists already; name another")
    opened = [StoredStudy.open(study, name) for study in studies for name in (named or (None,))]
    _check_alike(opened)
    names, records = ", ".join(stored.name for stored in opened), [record for stored in opened for record in stored.records]
    found = predict(names, records, data, model)
    if as_json:
        click.echo(json_text(scale_up_document(names, found)), nl=False)
    console = terminal(as_json)
    if not as_json:
        for part in scale_up_parts(names, found):
            console.print(part)
    if then_run is None:
        return
    if found.next is None:
        console.print("\nWrote nothing: no study that costs up to two trainings of that size would narrow an interval by 5%.")
        return
    widest = found.next.size.parameters
    stored = next(study for study in opened if any((trial.facts.model_parameters or 1) == widest for trial in study.records))
    batch, rate = (f"{1 - factor:.0%}" for factor in found.next.narrows)
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

    from ..search.laws.next_study import next_study
    from ..spaces.boundary.files import write_file

    return write_file(file, yaml.safe_dump(next_study(stored.spec, stored.records, found), sort_keys=False))


@main.command(
    "fit-batch", epilog=epilog("bsearch fit-batch runs.csv --at 500 --at 3000\n  bsearch fit-batch study.yaml --target 0.95")
)
@click.argument("source", metavar="TABLE.csv|STUDY", shell_complete=study_files)
@click.option("--at", "batches", type=click.IntRange(1, 2**53), multiple=True, help="Predict this batch too; may be repeated.")
@click.option("--workload", help="Only this one of the table's workloads.")
@click.option("--target", type=VALUE, help="Value of the study's metric to reach; default: its target.")
@name_option
@json_option
def fit_batch(
    source: str,
    batches: tuple[int, ...],
    workload: str | None,
    target: float | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Fit the number of samples that training needs to reach its target, as a function of the batch.

    TABLE.csv has the columns effective_batch and to_target: the samples (or epochs) that one run needed, or those of several
    runs separated by spaces. With a column workload, each workload gets its own law; with a column group (or round), each
    group gets its own level under that law.

    STUDY must have searched both effective_batch and epochs. A model of its metric then gives, for each batch, the fewest
    samples with which the best setting reaches the target.
    """
    if not source.lower().endswith(".csv"):
        if workload is not None:
            raise click.UsageError("expected a table with --workload, got a study")
        _fit_study_batches(source, batches, target, name, as_json)
        return
    for option, value in (("--target", target), ("--name", name)):
        if value is not None:
            raise click.UsageError(f"expected a study with {option}, got a table, whose runs have all reached their target")
    _fit_table_batches(Path(source), batches, workload, as_json)


def _fit_table_batches(table: Path, batches: tuple[int, ...], workload: str | None, as_json: bool) -> None:
    from ..search.laws.runs_table import read_runs
    from ..search.laws.samples_to_target import LEAST_BATCHES, fit_batch_law
    from ..search.report.export import json_text
    from ..search.report.terminal.laws.batch_law import law_document, law_parts

    workloads = read_runs(table)
    if workload is not None and workload not in workloads:
        names = ", ".join(filter(None, workloads))
        known = f"one of {names}" if names else "no value, since the table names no workloads"
        raise StudyFileError(f"{table}: --workload: expected {known}; got {cut(workload, 60)!r}")
    chosen = {name: points for name, points in workloads.items() if workload in (None, name)}
    measured = {name: sorted({point.effective_batch for point in points}) for name, points in chosen.items()}
    few = "; ".join(
        (f"{name or 'no workload'}: " if len(workloads) > 1 else "") + ", ".join(map(str, found))
        for name, found in measured.items()
        if len(found) < LEAST_BATCHES
    )
    laws = {name: fit_batch_law(points) for name, points in chosen.items() if len(measured[name]) >= LEAST_BATCHES}
    if not laws:
        what = f"expected a workload with runs at {LEAST_BATCHES} or more batches, got only {few}. Measure more batches."
        raise StudyFileError(f"{table}: {what}")
    if as_json:
        click.echo(json_text({name: law_document(chosen[name], law, batches) for name, law in laws.items()}), nl=False)
    else:
        for name, law in laws.items():
            for part in law_parts(name, chosen[name], law, batches):
                terminal().print(part)
            terminal().print()
    if few:
        terminal(as_json).print(f"Left out, with fewer than {LEAST_BATCHES} batches: {few}")


def _fit_study_batches(study: str, batches: tuple[int, ...], target: float | None, name: str | None, as_json: bool) -> None:
    from ..search.laws.samples_by_batch import study_samples
    from ..search.report.export import json_text
    from ..search.report.terminal.laws.batch_law import samples_document, samples_parts
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    target = stored.spec.target if target is None else target
    if target is None:
        raise click.UsageError(f"expected --target VALUE, a value of {stored.front.metric}, since the study has none")
    with located_faults(None if is_url(study) else Path(study)):
        found = study_samples(stored.name, stored.spec, stored.records, target, batches)
    if as_json:
        click.echo(json_text(samples_document(found)), nl=False)
        return
    for part in samples_parts(stored.name, stored.front.metric, found):
        terminal().print(part)


def _study_rules(study: str, batches: tuple[int, ...], name: str | None, as_json: bool) -> None:
    from ..search.laws.best_rate import rates_of
    from ..search.report.export import json_text
    from ..search.report.sentences import rule_verdict
    from ..search.report.terminal.tables import rates_document, rates_table
    from ..search.store.stored import StoredStudy

    stored = StoredStudy.open(study, name)
    with located_faults(None if is_url(study) else Path(study)):
        found = rates_of(stored, batches)
    if as_json:
        click.echo(json_text(rates_document(stored.name, found)), nl=False)
        return
    console = terminal()
    left_out = f"; {found.left_out} that failed to learn are left out" if found.left_out else ""
    console.print(f"Best rate against batch in {stored.name}: {found.trials} trials{left_out}", style="bold")
    console.print(rule_verdict(found))
    console.print(rates_table(found))
    console.print(
        "Intervals are 90 %. They apply only to the batches and rates tried, and to training runs of the same length.",
        style="dim",
    )

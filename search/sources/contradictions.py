"""What a source says twice has to agree, whatever it is called: a batch with the samples of an epoch, seconds with a start and
an end, a row with being a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite, log2, prod
from statistics import median

from ...spaces.errors import Fault, cut
from ...spaces.names import REACHED, words_of
from .runs import Run
from .values import moment, number, seconds, unit_of

# Clocks that begin before a training or end after it may show more than its seconds, and hardly less.
_LESS = 0.95
# Lengths are rounded.
_SLACK = 1.02
# Devices and passes that no column tells are powers of two, in doublings.
_NEAR = 0.15
_SETTINGS = (
    "learning_rate",
    "effective_batch",
    "micro_batch",
    "batch",
    "accumulation",
    "devices",
    "seed",
    "size",
)
Names = Mapping[str, str | None]


def contradictions(
    where: str,
    runs: Sequence[Run],
    names: Names,
    groups: Sequence[str],
    reached: Sequence[str],
    mapped: Mapping[str, str],
) -> Iterator[Fault]:
    """Each with two cells that show it.

    Args:
        names: the one that is taken for each meaning; groups: those that tell experiments apart; reached: how far a run came.
        mapped: what the user has said, which is not questioned.
    """
    if "run" not in mapped.values() and (fault := _rows_of_epochs(where, runs, names, mapped)):
        yield fault
    if names["seconds"] not in (None, *mapped) and (fault := _seconds_against_clock(where, runs, names)):
        yield fault
    if "effective_batch" not in mapped.values() and (
        fault := _samples_of_an_epoch(where, runs, names, groups, reached)
    ):
        yield fault


def _rows_of_epochs(where: str, runs: Sequence[Run], names: Names, mapped: Mapping[str, str]) -> Fault | None:
    """Rows of which each is one epoch or step of a training rather than a training."""
    for name in ("epochs", "steps"):
        length = names[name]
        if length is None or length in mapped or words_of(length)[-1] not in ("epoch", "step", "iteration"):
            continue
        settings = [one for meaning in _SETTINGS if (one := names[meaning])]
        alike = [
            (first, second)
            for first, second in pairwise(runs)
            if all(first.held.get(one) == second.held.get(one) for one in settings)
            and (number(second.held.get(length)) or 0.0) > (number(first.held.get(length)) or 0.0) >= 0
        ]
        if names["run"] is None and len(alike) > 2 and 2 * len(alike) > len(runs) - 1:
            first, second = alike[0]
            got = f"{first.held.get(length)} and {second.held.get(length)} at {first.place} and {second.place}, otherwise alike"
            hint = f"Keep the last row of each, or write --map NAME=run for what tells runs apart, or --map {length}={name}."
            return Fault(
                length, f"expected a run in each row, got rows of one training: {got}. {hint}", where
            )
    return None


def _seconds_against_clock(where: str, runs: Sequence[Run], names: Names) -> Fault | None:
    """Seconds of a training that are more than passed between its start and its end, or all of them by a unit less."""
    name = names["seconds"] or ""
    ratios = []
    for run in runs:
        began, ended = (moment(run.held.get(names[one] or "")) for one in ("started", "ended"))
        took = seconds(run.held.get(name), unit_of(name))
        if began is not None and ended is not None and ended > began and took:
            ratios.append((took / (ended - began), run, ended - began))
    if not ratios:
        return None
    usual = median(ratio for ratio, *_ in ratios)
    by_unit = any(_LESS < usual * unit <= 1 / _LESS for unit in (60, 3600, 1e-3))
    ratio, run, passed = max(ratios, key=lambda one: one[0])
    if not by_unit and ratio * _LESS <= 1 + 60 / passed:  # starts and ends may be whole minutes
        return None
    got = f"{cut(str(run.held.get(name)), 40)} beside {passed:g} s from {names['started']} to {names['ended']} at {run.place}"
    hint = f"Call it '{name} (min)' where that is its unit, or write --map {name}=seconds, or --map {name}=nothing."
    return Fault(name, f"expected the seconds of a training, got {got}. {hint}", where)


def _samples_of_an_epoch(
    where: str, runs: Sequence[Run], names: Names, groups: Sequence[str], reached: Sequence[str]
) -> Fault | None:
    """Steps times batch over epochs: of one data set the samples that it has, unless the batch lacks a factor."""
    batch, steps, epochs = names["effective_batch"] or names["batch"], names["steps"], names["epochs"]
    if steps and epochs and words_of(steps)[-1] in REACHED and words_of(epochs)[-1] not in REACHED:
        # Of what was trained alike.
        epochs = next((name for name in reached if words_of(name)[-1].startswith("epoch")), None)
    factors = (
        [batch]
        if batch
        else [one for meaning in ("micro_batch", "accumulation", "devices") if (one := names[meaning])]
    )
    if (
        not factors
        or steps is None
        or epochs is None
        or any({"fraction", "subset"} & {*words_of(one)} for one in runs[0].held)
    ):
        return None
    alike = [run for run in runs if all(run.held.get(one) == runs[0].held.get(one) for one in groups)]
    # Of a training's last epoch either its number or how many there were.
    from_zero = int(words_of(epochs)[-1] == "epoch")
    for more in range(from_zero + 1):
        found = [known for run in alike if (known := _epoch_of(run, factors, steps, epochs, more))]
        if len(found) < 2 or max(found)[0] <= min(high for _, high, *_ in found):
            return None
        apart = (max(found), min(found, key=lambda one: one[1]))
        doublings = log2(apart[0][2] / apart[1][2])
        if not isfinite(doublings) or round(doublings) < 1 or abs(doublings - round(doublings)) > _NEAR:
            return None  # of data sets that differ, or a training that was stopped
    shown = " and ".join(f"{samples:.4g} at {place}" for _, _, samples, place in apart)
    expected = f"{' × '.join((*factors, steps))} / {epochs}, the samples of an epoch, to agree"
    hint = f"Write --map {factors[0]}=effective_batch where it is the batch of a whole step, or --map {epochs}=nothing."
    return Fault("", f"expected {expected}, got {shown}. {hint}", where)


def _epoch_of(
    run: Run, factors: Sequence[str], steps: str, epochs: str, more: int
) -> tuple[float, float, float, str] | None:
    """The least and the most samples that an epoch can have, by whether its last batch counts, and as it is written."""
    held = [number(run.held.get(one)) for one in (*factors, steps)]
    length = number(run.held.get(epochs))
    if length is None or not length + more > 0 or any(value is None or not value > 0 for value in held):
        return None
    *parts, steps_taken = (value or 1.0 for value in held)
    batch, each = prod(parts), steps_taken / (length + more)
    return (each - 1) * batch / _SLACK, (each + 1) * batch * _SLACK, each * batch, run.place

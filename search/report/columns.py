"""A front, or any trials, as the columns of a table: terminal, notes and page draw the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...spaces.front import ParetoFront
from ...spaces.readable import number
from ...spaces.record import TrialRecord
from ...spaces.study.goals import Speed
from ...spaces.study.space import LENGTHS
from ..analysis.choice import NEARLY_BEST, chance_to_reach, fastest_within


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of what training takes, as people read it: its name, its unit, and what it counts."""

    name: str
    unit: str
    counts: str


MEASURES: dict[Speed, Measure] = {
    "train_s": Measure("training time", "s", "seconds of training"),
    "device_s": Measure("device time", "s", "seconds of training × devices"),
    "cost": Measure("cost", "currency", "of a training, without evaluation"),
}

_SETTINGS = ("effective_batch", "learning_rate", "rule", "epochs")
# Searched parameters that have a column of their own kind, or follow from one.
IN_COLUMNS = frozenset({*_SETTINGS, *LENGTHS, "accumulation", "reference_rate"})


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of trials.

    Args:
        name: as in exports, such as train_s; a line break where a narrow heading needs one.
        cells: a text for each row.
        words: whether its cells are words rather than numbers.
        flows: whether they are sentences, which may take several lines, and where there is no room lines of their own.
    """

    name: str
    cells: tuple[str, ...]
    words: bool = False
    flows: bool = False


def front_columns(
    front: ParetoFront, members: Sequence[TrialRecord] | None = None, target: float | None = None
) -> list[Column]:
    """The front, fastest first: what each member takes and reaches, how sure that is, and its settings.

    Args:
        members: of the front, to be shown; None: all.
        target: show the probability that a setting reaches it instead of the probability that it is on the front.
    """
    trials = front.trials if members is None else members
    columns = _results(front, trials)
    repeated = any(trial.interval is not None for trial in trials)
    # Columns of confidence replace those that `show --pick` shows as well, so that lines fit a terminal.
    if repeated:
        columns += [
            _column("+/-", trials, lambda trial: f"{trial.half_interval or 0.0:.2g}"),
            _column("runs", trials, lambda trial: str(trial.facts.runs)),
            _column(
                "on\nfront" if target is None else "reaches",
                trials,
                lambda trial: _chance(trial, front, target),
            ),
        ]
    settings = [trial.settings for trial in trials]
    several_rules = len({values.get("rule") for values in settings}) > 1
    columns += [
        _setting(name, trials) for name in _SETTINGS if name != "rule" or several_rules or not repeated
    ]
    if not repeated:
        plans = [
            f"{values.get('micro_batch', '?')} x {values.get('accumulation', '?')}" for values in settings
        ]
        columns.append(Column("micro\nx acc.", tuple(plans)))
    return [
        *columns,
        *_others(trials),
        Column("", tuple(marks(trial, front) for trial in trials), flows=True),
    ]


def trial_columns(records: Sequence[TrialRecord], front: ParetoFront) -> list[Column]:
    """Trials in order, each with its outcome, its settings and a note."""
    trial, *results = _results(front, records)
    outcome = Column("outcome", tuple(record.outcome for record in records), words=True)
    members = {member.number for member in front.trials}

    def note(record: TrialRecord) -> str:
        notes = [record.message or "front" * (record.number in members)]
        if record.is_repeat:
            notes.append(f"repeats trial {record.facts.repeats} with seed {record.facts.seed}")
        if record.outcome == "interrupted" and not record.has_ended:
            notes.append("resumes with the next run")
        return next(iter("; ".join(filter(None, notes)).splitlines()), "")

    settings = [_setting(name, records) for name in _SETTINGS]
    return [
        trial,
        outcome,
        *results,
        *settings,
        *_others(records),
        Column("", tuple(map(note, records)), flows=True),
    ]


def marks(trial: TrialRecord, front: ParetoFront) -> str:
    """What is special about a member: the fastest near the best, the baseline, runs that failed, a faster one as good."""
    near = len(front.trials) > 1 and trial.number == fastest_within(front, NEARLY_BEST).number
    words = [f"within {NEARLY_BEST:.0%}"] if near else []
    if trial.is_baseline:
        words.append("baseline")
    if failed := trial.facts.failed_runs:
        words.append(f"{failed} failed")
    # The fastest member that it is not significantly better than.
    if ties := [other.number for other in front.trials if other.number in (trial.facts.ties or ())]:
        words.append(f"= {ties[0]}")
    return " ".join(words)


def some_members(front: ParetoFront, most: int) -> tuple[TrialRecord, ...]:
    """At most this many members: both ends, and evenly spaced ones between."""
    members, steps = front.trials, max(most - 1, 1)
    if len(members) <= most:
        return members
    return tuple(members[round(row * (len(members) - 1) / steps)] for row in range(most))


def _column(name: str, trials: Sequence[TrialRecord], cell: Callable[[TrialRecord], str]) -> Column:
    return Column(name, tuple(map(cell, trials)))


def _results(front: ParetoFront, trials: Sequence[TrialRecord]) -> list[Column]:
    """Numbers of trials, what they take, and the metric."""
    taken = _column(front.speed, trials, lambda trial: number(front.taken(trial)))
    reached = _column(front.metric, trials, lambda trial: number(trial.accuracy))
    return [_column("trial", trials, lambda trial: str(trial.number)), taken, reached]


def _chance(trial: TrialRecord, front: ParetoFront, target: float | None) -> str:
    chance = trial.facts.front_probability if target is None else chance_to_reach(trial, target)
    return f"{chance or 0.0:.0%}"


def _setting(name: str, trials: Sequence[TrialRecord]) -> Column:
    return Column(name, tuple(number(trial.settings.get(name)) for trial in trials), words=name == "rule")


def _others(trials: Sequence[TrialRecord]) -> list[Column]:
    """Searched parameters without a column of their own kind."""
    return [
        _setting(name, trials)
        for name in sorted({name for trial in trials for name in trial.parameters} - IN_COLUMNS)
    ]

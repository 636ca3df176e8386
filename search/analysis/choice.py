"""Choosing a point of a front: the knee, the best, the fastest within a tolerance of the best, or a trial by its number."""

from __future__ import annotations

from collections.abc import Iterable

from ...spaces.errors import StudyFileError
from ...spaces.trial import ParetoFront, TrialRecord


def chosen_trial(
    name: str,
    front: ParetoFront,
    records: Iterable[TrialRecord] = (),
    *,
    number: int | None = None,
    at_knee: bool = False,
    within: float | None = None,
) -> TrialRecord:
    """The chosen point of a front; by default its knee, or the best where it has none.

    Args:
        name: the study's, for messages.
        records: all its trials, for messages.
        number: of a trial on the front.
        within: choose the fastest whose metric is at most this share of the best value away from it.

    Raises:
        StudyFileError: more than one way of choosing, an empty front, no such trial on it, or no knee.
    """
    if (number is not None) + at_knee + (within is not None) > 1:
        raise StudyFileError("expected one of trial, knee and within, got several")
    if not front.trials:
        raise StudyFileError(f"study {name}: has no finished trial yet, so there is no front to choose from")
    if within is not None:
        return fastest_within(front, within)
    if number is not None:
        chosen = next((trial for trial in front.trials if trial.number == number), None)
        if chosen is None:
            members = ", ".join(str(trial.number) for trial in front.trials)
            repeats = next((one.facts.repeats for one in records if one.number == number), None)
            why = "" if repeats is None else f" (it repeats trial {repeats} and counts in its mean)"
            raise StudyFileError(f"study {name}: trial {number} is not on its front{why}; expected one of {members}")
        return chosen
    if front.knee is None:
        if at_knee:
            raise StudyFileError(f"study {name}: its front has no knee yet; choose one by trial or within")
        return front.trials[-1]
    return next(trial for trial in front.trials if trial.number == front.knee)


def choice_reason(front: ParetoFront, record: TrialRecord, *, number: int | None = None, within: float | None = None) -> str:
    """Why `chosen_trial` chose this trial, to be displayed."""
    if number is not None:
        return "as asked"
    if within is not None:
        return f"the fastest within {100 * within:.3g}% of the best"
    return "the knee" if record.number == front.knee else "the best"


def fastest_within(front: ParetoFront, share: float) -> TrialRecord:
    """The fastest member whose metric is at most a share of the best value away from it.

    >>> points = [(1.0, 0.90), (2.0, 0.991), (9.0, 1.0)]
    >>> trials = [TrialRecord(i, "complete", {}, train_s=s, accuracy=value) for i, (s, value) in enumerate(points)]
    >>> fastest_within(ParetoFront(tuple(trials)), 0.01).number
    1
    """
    best = front.trials[-1].accuracy
    assert best is not None
    return next(
        trial for trial in front.trials if trial.accuracy is not None and abs(trial.accuracy - best) <= share * abs(best)
    )

"""Every figure of a study, in reading order; those of the front are drawn here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....spaces.record import TrialRecord
from ...analysis.confirm import averaged
from ..columns import MEASURES
from .cost_figures import memory_figure, step_time_figure
from .figure import Figure, Layer, Tone
from .rates import rate_figure
from .study_data import StudyData, finite

_FAILED_TONES: dict[str, Tone] = {"diverged": "diverged", "infeasible": "infeasible", "error": "failed"}


def figures_of(data: StudyData) -> list[Figure]:
    """The figures that the study has data for, in reading order."""
    figures = (
        front_figure(data),
        rate_figure(data),
        memory_figure(data),
        step_time_figure(data),
        curves_figure(data),
    )
    return [figure for figure in figures if figure is not None and figure.layers]


def front_figure(data: StudyData) -> Figure:
    """Accuracy over seconds."""
    front, records = data.front, data.study.records
    members = {trial.number for trial in front.trials}
    # A setting that was trained several times is drawn at its mean.
    others = [r for r in averaged(records, data.study.spec.objectives) if r.number not in members]
    repeats = [r for r in records if r.outcome == "complete" and r.is_repeat]
    floor = _floor(data)

    def ended(outcome: str) -> list[TrialRecord]:
        return [r for r in records if r.outcome == outcome]

    layers = [
        data.points("other trials", "other", others),
        data.points("single runs of repeated settings", "other", repeats, shown=False),
        data.points("stopped early", "stopped", ended("stopped"), shown=False),
        data.points("paused", "paused", ended("paused"), shown=False),
        *(
            # At the bottom of the figure, where they have a time.
            data.points(f"{outcome} (no accuracy)", tone, ended(outcome), y=lambda _: floor, shown=False)
            for outcome, tone in _FAILED_TONES.items()
        ),
        data.line("front", front.trials),
        *_marked(data),
    ]
    how = (
        "predicted from the device's step times"
        if _source(data) == "known"
        else "measured as wall-clock time"
    )
    caption = (
        f"No trial is both {front.faster} and better than a trial on the front. Training time is "
        f"{how}, without evaluation."
    )
    if any(trial.interval is not None for trial in front.trials):
        caption += " Bars are 90 % intervals of the mean over runs with several seeds."
    if data.levels:
        caption += " Trials far worse than the front are outside the axis range; the CSV has them."
    return Figure(
        "front",
        f"{front.metric} against {MEASURES[front.speed].name}",
        caption,
        data.time_axis(),
        data.accuracy_axis(),
        tuple(layers),
    )


def _source(data: StudyData) -> str:
    return next(
        (str(r.facts.train_s_source) for r in data.front.trials if r.facts.train_s_source is not None),
        "measured",
    )


def _floor(data: StudyData) -> float:
    """A level worse than all that are shown, for trials without a metric."""
    best = data.front.best
    if best is None or best.accuracy is None:
        return 0.0
    reached = [
        float(r.accuracy or 0.0) for r in data.study.records if r.outcome == "complete" and finite(r.accuracy)
    ]
    top = best.accuracy
    worst = max(data.levels or reached, key=lambda level: abs(level - top))
    return worst if data.levels else worst + 0.06 * ((worst - top) or abs(worst) or 1.0)


def _marked(data: StudyData) -> Iterator[Layer]:
    """The front's trials as points, with their intervals, then the baseline."""
    front = data.front
    members = data.points("trials on the front", "front", front.trials)
    by_number = {trial.number: trial for trial in front.trials}
    placed = [by_number[number] for number in members.trials]
    intervals = [trial.interval for trial in placed if trial.interval is not None]
    if len(intervals) == len(placed):
        members = replace(
            members, low=tuple(low for low, _ in intervals), high=tuple(high for _, high in intervals)
        )
    yield members
    yield data.points("baseline", "baseline", data.baseline)


def curves_figure(data: StudyData) -> Figure:
    """Accuracy during training."""
    front, members = data.front, {trial.number for trial in data.front.trials}
    by_number = {r.number: r for r in data.study.records}
    layers: list[Layer] = []
    for on_front in (False, True):
        for trial, curve in data.curves.items():
            record = by_number.get(trial)
            if record is None or not curve or (trial in members) != on_front:
                continue
            budget, train_s = record.facts.samples_budget, front.taken(record)
            if not budget or not finite(train_s):
                continue
            ended_early: dict[str, Tone] = {"stopped": "stopped", "paused": "paused"}
            tone: Tone = "front" if on_front else ended_early.get(record.outcome, "other")
            layers.append(
                Layer(
                    f"trial {trial}",
                    "line",
                    tone,
                    tuple(seen / budget * float(train_s or 0.0) for seen, _ in curve),
                    tuple(accuracy for _, accuracy in curve),
                    trials=(trial,) * len(curve),
                    labels=(data.label(record),) * len(curve),
                )
            )
    return Figure(
        "learning-curves",
        "Learning curves",
        "Each trial's evaluations over its training time; trials on the front are highlighted.",
        data.time_axis(),
        data.accuracy_axis(),
        tuple(layers),
    )

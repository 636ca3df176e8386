"""Figures of what was searched: batches, rates and other parameters against what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ....spaces.domain import Choices
from ....spaces.learning_rate import RULE_EXPONENTS
from ....spaces.record import TrialRecord
from ..sentences import rule_verdict
from .figure import Axis, Figure, Layer
from .study_data import StudyData, finite

_BATCH = Axis("effective_batch", "effective batch (samples of one optimizer step)", log=True)
_OWN_FIGURES = frozenset({"effective_batch", "reference_rate", "accumulation", "devices"})


def batch_accuracy(data: StudyData) -> Figure | None:
    """Effective batch against accuracy."""
    if "effective_batch" not in data.study.spec.searched():
        return None
    return Figure(
        "batch-accuracy",
        f"Effective batch against {data.front.metric}",
        "All trials by batch. Other settings vary too, so the upper edge of the cloud matters."
        if data.front.direction == "maximize"
        else "All trials by batch. Other settings vary too, so the lower edge of the cloud matters.",
        _BATCH,
        data.accuracy_axis(),
        _by_batch(data, lambda r: r.accuracy),
    )


def batch_time(data: StudyData) -> Figure | None:
    """Effective batch against seconds per 1000 samples."""
    if "effective_batch" not in data.study.spec.searched():
        return None
    return Figure(
        "batch-time",
        "Effective batch against time",
        "Training time per 1000 samples, so that training runs of different lengths can be compared.",
        _BATCH,
        Axis("seconds_per_1000_samples", "seconds per 1000 samples", log=True),
        _by_batch(data, _seconds_per_thousand),
    )


def _by_batch(data: StudyData, value: Any) -> tuple[Layer, ...]:
    layers = []
    for name, tone, records in data.groups:
        chosen = [r for r in records if finite(value(r)) and "effective_batch" in r.settings]
        layers.append(
            Layer(
                name,
                "points",
                tone,
                tuple(float(r.settings["effective_batch"]) for r in chosen),
                tuple(float(value(r)) for r in chosen),
                labels=tuple(data.label(r) for r in chosen),
                trials=tuple(r.number for r in chosen),
            )
        )
    return tuple(layer for layer in layers if layer.x)


def rate_figure(data: StudyData) -> Figure | None:
    """Learning rate against batch, with the fitted best rate and the scaling rules through it."""
    chosen = [
        r for r in data.runs if r.facts.learning_rate is not None and "effective_batch" in r.settings and finite(r.accuracy)
    ]
    if len({r.facts.learning_rate for r in chosen}) < 2:
        return None
    layers = [
        Layer(
            "trials",
            "points",
            "other",
            tuple(float(r.settings["effective_batch"]) for r in chosen),
            tuple(float(r.facts.learning_rate or 0.0) for r in chosen),
            labels=tuple(data.label(r) for r in chosen),
            trials=tuple(r.number for r in chosen),
            values=tuple(float(r.accuracy or 0.0) for r in chosen),
        )
    ]
    found = data.rates
    if found is None:
        caption = "Too few trials that learned, or too little spread, to estimate the best rate at each batch."
    else:
        batches = tuple(float(rate.effective_batch) for rate in found.rates)
        fitted = tuple(rate.learning_rate.value for rate in found.rates)
        low = tuple(rate.learning_rate.low for rate in found.rates)
        high = tuple(rate.learning_rate.high for rate in found.rates)
        middle = found.rates[len(found.rates) // 2]
        layers.insert(0, Layer("90 % interval", "band", "law", batches, fitted, low=low, high=high))
        layers.append(Layer("best rate, fitted", "line", "law", batches, fitted))
        for rule in ("linear", "sqrt"):
            through = tuple(
                middle.learning_rate.value * (batch / middle.effective_batch) ** RULE_EXPONENTS[rule] for batch in batches
            )
            layers.append(Layer(f"rule {rule}", "line", "limit" if rule == "linear" else "alternative", batches, through))
        verdict = rule_verdict(found)
        caption = verdict[0].upper() + verdict[1:] + (" " if verdict.endswith(".") else ". ")
        caption += f"Fitted to {found.trials} trials" + (
            f"; {found.left_out} that failed to learn are left out." if found.left_out else "."
        )
    return Figure(
        "rate-batch",
        "Learning rate against effective batch",
        caption,
        _BATCH,
        # The fitted interval may reach far beyond the rates that were tried.
        Axis("learning_rate", "learning rate", log=True, ends=_around(float(r.facts.learning_rate or 0.0) for r in chosen)),
        tuple(layers),
        value_name=data.front.metric,
    )


def importance_figure(data: StudyData) -> Figure | None:
    """How much each searched parameter mattered."""
    from ...suggest.importance import parameter_importances

    shares = sorted(parameter_importances(data.study).items(), key=lambda item: item[1])
    if not shares:
        return None
    places = tuple(map(float, range(len(shares))))
    ends = tuple(share for _, share in shares)
    labels = tuple(f"{name}: {share:.0%}" for name, share in shares)
    bars = Layer("importance", "bars", "front", ends, places, low=(0.0,) * len(shares), high=ends, labels=labels)
    return Figure(
        "importance",
        f"What mattered to {data.front.metric}",
        f"Share of the variance of {data.front.metric} over the whole space that each parameter explains by itself "
        "(fANOVA), estimated from this study's trials. A parameter searched in a narrow range explains little.",
        Axis("share", "share of variance"),
        Axis("parameter", "", ticks=tuple((place, name) for place, (name, _) in zip(places, shares, strict=True))),
        (bars,),
    )


def parameter_figures(data: StudyData) -> Iterator[Figure]:
    """A figure for each searched parameter that has none of its own: its values against the metric."""
    searched = data.study.spec.searched()
    edge = "upper" if data.front.direction == "maximize" else "lower"
    for name, domain in searched.items():
        if name in _OWN_FIGURES:
            continue
        choices = list(domain.choices) if isinstance(domain, Choices) else []
        layers = []
        for label, tone, records in data.groups:
            chosen = [r for r in records if finite(r.accuracy) and _placed(r.parameters.get(name), choices)]
            at = [choices.index(r.parameters[name]) if choices else float(r.parameters[name]) for r in chosen]
            layers.append(
                Layer(
                    label,
                    "points",
                    tone,
                    tuple(map(float, at)),
                    tuple(float(r.accuracy or 0.0) for r in chosen),
                    labels=tuple(map(data.label, chosen)),
                    trials=tuple(r.number for r in chosen),
                )
            )
        ticks = tuple((float(place), str(choice)) for place, choice in enumerate(choices))
        yield Figure(
            f"parameter-{name}",
            f"{name} against {data.front.metric}",
            f"Other parameters vary too, so compare the best trials at each value, the {edge} edge of the cloud.",
            Axis(name, name, log=bool(getattr(domain, "log", False)), ticks=ticks),
            data.accuracy_axis(),
            tuple(layer for layer in layers if layer.x),
        )


def _around(values: Iterable[float]) -> tuple[float, float] | None:
    """Ends of a log axis that shows these values, with some room; None without any."""
    known = [value for value in values if value > 0]
    return (min(known) / 1.5, max(known) * 1.5) if known else None


def _placed(value: Any, choices: Sequence[Any]) -> bool:
    """Whether a parameter's value has a place on an axis: it is among the choices, or a number where there are none."""
    return value in choices if choices else finite(value)


def _seconds_per_thousand(record: TrialRecord) -> float | None:
    budget = record.facts.samples_budget
    return None if not budget or record.train_s is None else record.train_s / budget * 1000

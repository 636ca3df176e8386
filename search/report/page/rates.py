"""The figure of learning rates by batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ....spaces.learning_rate import RULE_EXPONENTS
from ..sentences import rule_verdict
from .figure import Axis, Figure, Layer
from .study_data import StudyData, finite


def rate_figure(data: StudyData) -> Figure | None:
    """Learning rate against batch, with the fitted best rate and the scaling rules through it."""
    chosen = [
        r
        for r in data.runs
        if finite(r.facts.learning_rate) and "effective_batch" in r.settings and finite(r.accuracy)
    ]
    if len({r.facts.learning_rate for r in chosen}) < 2:
        return None
    trials = data.points(
        "trials",
        "other",
        chosen,
        x=lambda r: r.settings["effective_batch"],
        y=lambda r: r.facts.learning_rate,
    )
    layers = [replace(trials, values=tuple(float(r.accuracy or 0.0) for r in chosen))]
    stored = data.study.current_rates()
    if stored is None or (found := stored.rates) is None:
        caption = (
            "Too few trials that learned, or too little spread, to estimate the best rate at each batch."
        )
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
                middle.learning_rate.value * (batch / middle.effective_batch) ** RULE_EXPONENTS[rule]
                for batch in batches
            )
            layers.append(
                Layer(
                    f"rule {rule}", "line", "limit" if rule == "linear" else "alternative", batches, through
                )
            )
        verdict = rule_verdict(found)
        caption = verdict[0].upper() + verdict[1:] + (" " if verdict.endswith(".") else ". ")
        caption += f"Fitted to {found.trials} trials" + (
            f"; {found.left_out} that failed to learn are left out." if found.left_out else "."
        )
    return Figure(
        "rate-batch",
        "Learning rate against effective batch",
        caption,
        Axis("effective_batch", "effective batch (samples of one optimizer step)", log=True),
        # The fitted interval may reach far beyond the rates that were tried.
        Axis(
            "learning_rate",
            "learning rate",
            log=True,
            ends=_around(float(r.facts.learning_rate or 0.0) for r in chosen),
        ),
        tuple(layers),
        value_name=data.front.metric,
    )


def _around(values: Iterable[float]) -> tuple[float, float] | None:
    """Ends of a log axis that shows these values, with some room; None without any."""
    known = [value for value in values if value > 0]
    return (min(known) / 1.5, max(known) * 1.5) if known else None

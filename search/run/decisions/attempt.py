"""One attempt at a trial on the driver: what it trains, what it has reported, and the result that comes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....objectives.machine.processor import OtherPrograms
from ....spaces.boundary.given import LARGEST
from ....spaces.learning_rate import BESIDE_RATE, RULES_FOR_ADAM
from ....spaces.plan import ActivationCheckpointing
from ....spaces.record import TrialFacts, TrialResult, reported_name, taken_per_second
from ....spaces.study.goals import Speed
from ....spaces.trial import Measurement, Outcome, Parameter, Suggestion, TrialSetup


@dataclass(slots=True)
class Attempt:
    """One running attempt: what it trains, on which kind of device, and what it has reported."""

    suggestion: Suggestion
    setup: TrialSetup
    kind: str
    known_s: float | None  # of the whole training, by the law that times the study
    host: str = ""  # the machine it runs on
    started_s: float = field(default_factory=time.monotonic)
    held_since: float | None = None  # when it got its devices
    others: OtherPrograms | None = None  # what else ran on its machine, where that is ours
    measurements: list[Measurement] = field(default_factory=list)
    devices: int = 0  # of its trial; it may have to do with fewer

    def __post_init__(self) -> None:
        self.devices = self.devices or self.setup.plan.devices

    @property
    def last(self) -> Measurement | None:
        return self.measurements[-1] if self.measurements else None


def shorten(attempt: Attempt, last: Measurement) -> None:
    """Make an attempt that ended early to be in time, or by the clock, one of the training that it was."""
    setup, share = attempt.setup, last.samples_seen / attempt.setup.samples_budget
    attempt.setup = replace(setup, samples_budget=last.samples_seen, epochs=setup.epochs * min(share, 1.0))
    attempt.known_s = None if attempt.known_s is None else attempt.known_s * share


def setup_facts(setup: TrialSetup, known_s: float | None) -> TrialFacts:
    """A setup's derived values, stored beside the searched parameters."""
    scales_adam = setup.rule in RULES_FOR_ADAM
    return TrialFacts(
        effective_batch=setup.effective_batch,
        micro_batch=setup.plan.largest_micro_batch,
        accumulation=setup.plan.accumulation,
        devices=setup.plan.devices,
        activation_checkpointing=_used(setup),
        rule=setup.rule,
        learning_rate=setup.learning_rate,
        weight_decay=setup.weight_decay,
        betas=setup.betas if scales_adam else None,
        eps=setup.eps if scales_adam else None,
        epochs=None if setup.is_timed_by_clock else setup.epochs,
        samples_budget=None if setup.is_timed_by_clock else setup.samples_budget,
        seed=setup.seed,
        train_s=known_s,
        train_s_source=None if known_s is None else "known",
    )


def _used(setup: TrialSetup) -> ActivationCheckpointing | None:
    """The activation checkpointing of its plan; None where all activations are kept, as usual."""
    mode = setup.plan.activation_checkpointing
    return None if mode == "none" else mode


def taken_by(speed: Speed, train_s: float, attempt: Attempt, price: float | None) -> float:
    """What a training of `train_s` seconds takes by a measure of speed."""
    per_second = taken_per_second(speed, attempt.devices, price)
    assert per_second is not None
    return train_s * per_second


def result_of(
    attempt: Attempt,
    outcome: Outcome,
    expected_s: float | None,
    speed: Speed,
    price: float | None,
    shared: bool,
) -> TrialResult:
    """The result of an attempt that ended its trial, with every fact that is stored.

    Args:
        expected_s: training time expected on the device it ran on.
        speed: the study's measure of it.
        shared: its device was shared on purpose, so that taking longer says nothing.
    """
    setup, known_s, last = attempt.setup, attempt.known_s, attempt.last
    others_share = attempt.others.share() if attempt.others else None
    facts = TrialFacts(
        attempts=setup.attempt + 1,
        message=outcome.message or None,
        host=attempt.host or None,
    )
    if setup.attempt:
        facts = replace(
            facts,
            micro_batch=setup.plan.largest_micro_batch,
            accumulation=setup.plan.accumulation,
            activation_checkpointing=_used(setup),
        )
    taken = value = math.nan
    if last is not None:
        # A user's own loop may have seen a few samples more or less, and a diverged trial far fewer.
        measured_s = last.elapsed_s * setup.samples_budget / last.samples_seen
        train_s = measured_s if known_s is None else known_s
        error = measured_s / expected_s - 1 if expected_s and not shared else None
        reported = TrialFacts.of({name: value for name, value in last.facts.items() if _is_told(value)})
        extra = {
            **reported.extra,
            **{name: score for name, score in last.scores.items() if name != setup.metric},
        }
        # JSON has no NaN and no infinity: what is neither finite nor the metric is named instead.
        if undefined := [name for name, value in {**last.facts, **extra}.items() if not _is_told(value)]:
            extra["undefined"] = ", ".join(undefined)
        # A parameter of that name, such as the precision, stands in the same row.
        extra = {
            reported_name(name) if name in attempt.suggestion.parameters else name: extra[name]
            for name in extra
        }
        reported = replace(reported, extra={}) | TrialFacts.of(_as_stepped(reported.groups))
        waited_s, throttled_s = (
            None if seconds is None else seconds * setup.samples_budget / last.samples_seen
            for seconds in (reported.waited_s, reported.throttled_s)
        )
        facts |= reported | TrialFacts(
            waited_s=waited_s,
            throttled_s=throttled_s,
            others_share=others_share,
            train_s=train_s,
            device_s=train_s * attempt.devices,
            measured_train_s=measured_s,
            train_s_source="measured" if known_s is None else "known",
            samples_per_s=last.samples_seen / last.elapsed_s if last.elapsed_s else None,
            train_s_error=error,
            extra={name: value for name, value in extra.items() if _is_told(value)},
        )
        taken = taken_by(speed, train_s, attempt, price)
        value = last.value(setup.metric)
    if outcome.kind in ("complete", "diverged") and abs(value) <= LARGEST:
        return TrialResult(outcome.kind, facts, (taken, value))
    return TrialResult(outcome.kind, facts, violation=float(outcome.kind == "infeasible"))


def _as_stepped(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What facts have of an optimizer, by its first group; nothing of a setting that changed in training."""
    names = (*BESIDE_RATE, "momentum", "nesterov")
    return {
        name: each
        for group in groups[:1]
        for name in names
        if not isinstance(each := group.get(name), str | None)
    }


def _is_told(value: Parameter) -> bool:
    return not isinstance(value, float) or math.isfinite(value)

"""What `bsearch check` prints: a valid study's plans, its forecast, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ....spaces.domain import values_of
from ....spaces.laws.device import DeviceProfile
from ....spaces.laws.examination import overall
from ....spaces.readable import number, readable_bytes, seconds
from ....spaces.study.spec import StudySpec
from ...preview.check import CheckedStudy
from ...preview.forecast import Forecast, PlannedBatch
from ...run.opening import feasible_batches_sentence
from ..columns import Column
from .fitted import Fitted

# What a run of one short trial takes over Ray beside timing steps, the examination included, on two idle cores (docs/log.md).
START_S = 20


def check_document(spec: StudySpec, checked: CheckedStudy) -> Mapping[str, Any]:
    """The JSON document of `bsearch check --json`; of several profiles, facts of the first."""
    profile = next(iter(checked.profiles.values()))
    forecast = {} if checked.forecast is None else checked.forecast.to_dict()
    limits = () if checked.forecast is None else checked.forecast.limits
    examination = overall(each.examination for each in checked.profiles.values())
    return {
        "study": spec.study,
        "searched": list(spec.searched()),
        "feasible_batches": list(checked.feasible),
        "device": {name: getattr(profile, name) for name in _OF_DEVICE},
        "examination": None
        if examination is None
        else {"verdict": examination.verdict, "text": examination.sentence},
        "plans": forecast.pop("plans", []),
        "limits": [limit.to_dict() for limit in limits],
        "forecast": {name: value for name, value in forecast.items() if name != "limits"} or None,
    }


# What a plan depends on.
_OF_DEVICE = (
    *(
        "kind",
        "device",
        "training_set",
        "validation_set",
        "unit",
        "units_per_sample",
        "model_parameters",
        "optimizer",
    ),
    "own_settings",
    *(
        "batch_statistics",
        "limit_bytes",
        "largest_micro_batch",
        "smallest_micro_batch",
        "evaluation_batch",
        "note",
    ),
)


def forecast_parts(study: str, spec: StudySpec, checked: CheckedStudy) -> Iterator[str | Text | Fitted]:
    """What `bsearch check` prints of a valid study, for people.

    Args:
        study: as the user named it.
    """
    profiles, forecast, slots = checked.profiles, checked.forecast, checked.slots
    if checked.notice:
        yield checked.notice
    if forecast is None:
        yield f"{study}: valid. {spec.task} is a training loop: its steps cannot be timed beforehand."
        yield from _loop_parts(next(iter(profiles.values())))
        return
    yield Text(f"{study}: valid", style="bold")
    key, profile = next(iter(profiles.items()))
    at = f" at {', '.join(f'{name} {value}' for name, value in key)}" if key else ""
    each = profile.units_per_sample
    counted = (
        ""
        if each is None or not profile.training_set
        else f" ({each * profile.training_set:,.0f} {profile.unit})"
    )
    validation = "" if profile.validation_set is None else f"{profile.validation_set:,} validation samples, "
    yield (
        f"{profile.training_set:,} training samples{counted}, {validation}"
        f"{profile.model_parameters:,} parameters{at}, {profile.optimizer}, on {profile.device}"
    )
    yield from examination_parts(profiles.values())
    smallest = f" (the model needs micro-batches of at least {profile.smallest_micro_batch} samples)"
    yield f"searched: {', '.join(spec.searched())}" + (smallest if profile.smallest_micro_batch > 1 else "")
    if "exponent" in spec.searched() and "power" in values_of(spec.space.rule):
        yield (
            f"rule: power, its exponent searched over {spec.space.exponent}; afterwards `bsearch ask {study}` says which "
            "rules hold"
        )
    yield _plans_table(forecast.plans, profile)
    yield feasible_batches_sentence(spec, checked.feasible, profiles.values())
    over = (
        f" over the {len(profiles)} choices of {', '.join(name for name, _ in key)}"
        if len(profiles) > 1
        else ""
    )
    timing_s = sum(len(timed.all_step_times) for timed in profiles.values()) * spec.budget.profile_s
    least, timing = forecast.study_s + START_S, f", timing steps up to {timing_s:.0f} s" if timing_s else ""
    total = " to ".join(seconds(round(each)) for each in sorted({least, least + timing_s}))
    total = (
        ""
        if forecast.left_s is not None
        else f". In all about {total}: starting takes about {START_S} s{timing}"
    )
    total += (
        ""
        if forecast.overhead_s
        else "; what a trial takes besides training is known once this study has run"
    )
    trains = (
        f"A trial trains for {seconds(forecast.fastest_trial_s)} to {seconds(forecast.slowest_trial_s)}{over}; the front will "
        f"span up to a factor of {forecast.span:.3g} in training time."
    )
    if spec.trains_equally_long:
        aim = f"this is a search for the best {spec.objectives.metric.name}"
        trains = f"Every trial trains for {seconds(forecast.slowest_trial_s)} by known step times, so {aim} in that time."
    yield f"{trains}\n{_duration(spec, forecast, slots)}{total}."
    if forecast.cost is not None:
        yield f"At devices.prices the trials cost about {number(forecast.cost)} on {profile.device}."
    elif spec.devices.prices:
        priced = ", ".join(spec.devices.prices)
        yield f"What they cost is not known: devices.prices has {priced}, and not the device here, {profile.device}."
    for advice in (*forecast.limits, *forecast.advice):
        yield f"- {advice}"
    yield f"Next: bsearch run {study}"


def _plans_table(plans: Sequence[PlannedBatch], profile: DeviceProfile) -> Fitted:
    """A few effective batches with their plans, times and throughput."""
    rows: dict[str, list[str]] = {
        "effective\nbatch": [str(plan.effective_batch) for plan in plans],
        "devices": [str(plan.devices) for plan in plans],
        "micro\nx acc.": [f"{plan.micro_batch} x {plan.accumulation}" for plan in plans],
        "step": [seconds(plan.step_s) for plan in plans],
        "epoch": [seconds(plan.epoch_s) for plan in plans],
    }
    if any(plan.activation_checkpointing != "none" for plan in plans):
        rows["activation\ncheckpointing"] = [plan.activation_checkpointing for plan in plans]
    rows["samples/s"] = [number(plan.effective_batch / plan.step_s) for plan in plans]
    if each := profile.units_per_sample:
        rows[f"{profile.unit}/s"] = [number(each * plan.effective_batch / plan.step_s) for plan in plans]
    worth = ("effective\nbatch", "micro\nx acc.", "epoch", "step", "devices")
    return Fitted((Column(name, tuple(cells)) for name, cells in rows.items()), worth)


def _duration(spec: StudySpec, forecast: Forecast, slots: int) -> str:
    if forecast.left_s is not None:
        return (
            f"In the {seconds(forecast.left_s)} that are left ({spec.budget.by}), about {forecast.trials} trials fit, {slots} "
            "at once; the best model of all is kept"
        )
    trials, took = f"{forecast.trials} trials", seconds(forecast.study_s)
    if forecast.overhead_s is None or forecast.slowdown is None:
        return f"{trials} train and evaluate for about {took}, {slots} at once"
    return (
        f"{trials} take about {took}, {slots} at once, judging by this study's last run: "
        f"{seconds(forecast.overhead_s)} per trial besides training, and training at {forecast.slowdown:.2g} times its "
        "predicted time"
    )


def examination_parts(profiles: Iterable[DeviceProfile]) -> Iterator[str]:
    """The examination's verdict, and each thing that it found; and who else was on the device."""
    profiles = [*profiles]
    if (examination := overall(profile.examination for profile in profiles)) is not None:
        yield from examination.lines
    yield from dict.fromkeys(
        f"{each.optimizer} has its own {each.own_settings}: what it steps with is recorded and exported"
        for each in profiles
        if each.own_settings
    )
    yield from dict.fromkeys(profile.neighbours for profile in profiles if profile.neighbours)


def _loop_parts(profile: DeviceProfile) -> Iterator[str]:
    """What is known of a training loop beforehand."""
    yield from examination_parts([profile])
    if profile.model_parameters is not None:
        yield (
            f"{profile.training_set:,} training samples, {profile.model_parameters:,} parameters, {profile.optimizer}, on "
            f"{profile.device}"
        )
    if profile.largest_micro_batch is not None and profile.limit_bytes is not None:
        yield (
            f"Micro-batches of up to {profile.largest_micro_batch} samples fit the memory limit of "
            f"{readable_bytes(profile.limit_bytes)}; larger batches accumulate."
        )
    if profile.note:
        yield f"{profile.note}. A trial that runs out of memory goes on with half its micro-batch."

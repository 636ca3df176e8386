"""TODO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from ....spaces.device import DeviceProfile
from ....spaces.domain import values_of
from ....spaces.planning import CostKey, legal_words
from ....spaces.readable import number, seconds
from ....spaces.study import StudySpec
from ...run.forecast import Forecast


def as_document(study: str, profile: DeviceProfile, told: Forecast | None) -> Mapping[str, Any]:
    """The JSON document of `bsearch check --json`."""
    return {"study": study, "device": profile.to_dict(), "forecast": told and told.to_dict()}


def forecast_parts(
    study: str,
    spec: StudySpec,
    profiles: Mapping[CostKey, DeviceProfile],
    legal: tuple[int, int],
    told: Forecast,
    slots: int,
) -> Iterator[str | Table]:
    """What `bsearch check` prints of a study that is valid, for people.

    Args:
        study: as the user named it.
        profiles: for every combination of parameters that change cost; the table is of the first.
        legal: the effective batches that can be planned.
        slots: trials that run side by side.
    """
    key, profile = next(iter(profiles.items()))
    at = f" at {', '.join(f'{name} {value}' for name, value in key)}" if key else ""
    yield (
        f"{profile.training_set:,} training samples, {profile.evaluation_set:,} to evaluate, "
        f"{profile.model_parameters:,} parameters{at}, {profile.optimizer}, on {profile.device}"
    )
    smallest = f" (the model needs at least {profile.smallest_micro_batch} samples in a pass)"
    yield f"searched: {', '.join(spec.searched())}" + (smallest if profile.smallest_micro_batch > 1 else "")
    if "exponent" in spec.searched() and "power" in values_of(spec.space.rule):
        yield (
            f"rule: power, its exponent searched over {spec.space.exponent}; afterwards `bsearch rules {study}` tells which "
            "rules hold"
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("effective\nbatch", "devices", "micro\nx acc.", "step", "epoch", "samples/s"):
        table.add_column(column, justify="right")
    for plan in told.plans:
        table.add_row(
            str(plan.effective_batch),
            str(plan.devices),
            f"{plan.micro_batch} x {plan.accumulation}",
            seconds(plan.step_s),
            seconds(plan.epoch_s),
            number(plan.effective_batch / plan.step_s),
        )
    yield table
    yield legal_words(spec, legal, profiles.values())
    over = f" over the {len(profiles)} choices of {', '.join(name for name, _ in key)}" if len(profiles) > 1 else ""
    timing_s = len(profiles) * len(profile.step_times) * spec.budget.profile_s
    before = f"; before the first, up to about {seconds(float(timing_s))} go into timing steps" if timing_s else ""
    yield (
        f"A trial trains for {seconds(told.fastest_trial_s)} to {seconds(told.slowest_trial_s)}{over}; the front will span up "
        f"to x{told.span:.3g} in time.\n{spec.budget.trials} trials take about {seconds(told.study_s)}, {slots} at once, "
        f"evaluation included{before}."
    )
    for advice in told.advice:
        yield f"- {advice}"

"""How the trials of a study are planned on each kind of its devices, and what running out of memory has taught."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from ....spaces.errors import InfeasiblePlanError
from ....spaces.laws.device import DeviceProfile
from ....spaces.plan import plan_batch
from ....spaces.planning import (
    CostKey,
    checkpoint_url,
    cost_key,
    known_train_s,
    largest_timed_micro_batch,
    plan_limits,
    trial_setup,
)
from ....spaces.study.spec import StudySpec
from ....spaces.trial import EVALUATION_BATCH, TRAINER_EVALUATION_BATCH, Outcome, Suggestion, TrialSetup
from ...suggest.pausing import RUNG
from ..finish import Finish
from .attempt import Attempt


class Planner:
    """Turns suggestions into setups, and setups that did not fit into smaller ones.

    Args:
        profiles: of every kind of device, by parameters that change cost; the first kind's laws time all trials.
        finish: how the study ends with a trained model; None: it ends with its search.

    Attributes:
        timed_on: that kind.
    """

    def __init__(
        self,
        spec: StudySpec,
        name: str,
        profiles: Mapping[str, Mapping[CostKey, DeviceProfile]],
        device: Literal["cpu", "gpu"],
        task_hash: str,
        finish: Finish | None = None,
    ) -> None:
        self._finish = finish
        self._spec, self._name, self._device, self._task_hash = spec, name, device, task_hash
        self.profiles = {kind: dict(of_kind) for kind, of_kind in profiles.items()}
        self.timed_on = next(iter(self.profiles))

    def first(self, suggestion: Suggestion, attempt: int = 0) -> Attempt:
        """An attempt at a suggestion, on the kind of device that times the study.

        Raises:
            InfeasiblePlanError: no plan, or a rule that is undefined there.
        """
        setup = replace(self.setup(suggestion, self.timed_on), attempt=attempt)
        return Attempt(suggestion, setup, self.timed_on, self._known_s(setup))

    def setup(self, suggestion: Suggestion, kind: str) -> TrialSetup:
        """A suggestion as a setup for a kind of device.

        Raises:
            InfeasiblePlanError: as `first`.
        """
        spec = self._spec
        key = cost_key(spec, suggestion.parameters)
        setup = trial_setup(spec, self._name, suggestion, self.profiles[kind][key], self._device)
        # One clock: the same samples wherever they are trained.
        if setup.train_s is not None and kind != self.timed_on:
            timed = trial_setup(spec, self._name, suggestion, self.profiles[self.timed_on][key], self._device)
            setup = replace(setup, samples_budget=timed.samples_budget, epochs=timed.epochs)
        setup = replace(
            setup,
            checkpoint=checkpoint_url(spec, self._name, self._task_hash, suggestion),
            checkpoint_every_s=float(spec.cluster.checkpoint_every_s),
            pauses_at=RUNG if spec.pauses else None,
        )
        return setup if self._finish is None else self._finish.setup(setup)

    def everywhere(self, attempt: Attempt) -> dict[str, TrialSetup]:
        """An attempt as every kind of device would train it: the same batch, its own micro-batches."""
        setups = {attempt.kind: attempt.setup}
        if attempt.setup.plan.devices == attempt.devices:
            for kind in self.profiles:
                if kind != attempt.kind:
                    with contextlib.suppress(InfeasiblePlanError):
                        setups[kind] = replace(
                            self.setup(attempt.suggestion, kind), attempt=attempt.setup.attempt
                        )
        return setups

    def on_fewer(self, attempt: Attempt, devices: int) -> TrialSetup | None:
        """An attempt's setup for fewer devices than its trial has: each step is that of the same samples.

        None if its trial's time is not known, because it could then not be timed as on its full number of devices, or if
        memory or the training itself depends on the number of devices.
        """
        setup, profile = attempt.setup, self._profile(attempt.setup, attempt.kind)
        if attempt.known_s is None or setup.sharding != "ddp" or profile.batch_statistics:
            return None
        limits = plan_limits(self._spec, profile.under(setup.plan), devices, setup.effective_batch)
        try:
            plan = plan_batch(setup.effective_batch, devices=devices, **limits)
        except InfeasiblePlanError:
            return None
        return replace(setup, plan=plan, largest_micro_batch=limits["largest_micro_batch"])

    def whole(self, attempt: Attempt, setup: TrialSetup) -> TrialSetup:
        """A setup of an attempt planned for all devices of its trial, where it was planned for fewer."""
        if setup.plan.devices != attempt.devices:
            with contextlib.suppress(InfeasiblePlanError):
                whole = self.setup(attempt.suggestion, attempt.kind)
                return replace(whole, attempt=setup.attempt, evaluation_batch=setup.evaluation_batch)
        return setup

    def again(self, attempt: Attempt, setup: TrialSetup) -> Attempt:
        """The next attempt at the same trial, with this setup."""
        known_s = attempt.known_s
        if attempt.kind == self.timed_on:
            if setup.plan.devices != attempt.devices:
                setup = self.whole(attempt, setup)
                known_s = self._known_s(setup)
            elif setup.plan != attempt.setup.plan:
                known_s = self._known_s(setup)
        else:
            setup = self.whole(attempt, setup)
        return Attempt(attempt.suggestion, setup, attempt.kind, known_s)

    def expected_s(self, attempt: Attempt) -> float | None:
        """Expected seconds of its training on the devices it runs on; None where that is not known."""
        if attempt.setup.plan.devices != attempt.devices:
            return None
        if attempt.kind == self.timed_on and attempt.setup.train_s is None:
            return attempt.known_s
        return known_train_s(self._profile(attempt.setup, attempt.kind), attempt.setup)

    def smaller(self, attempt: Attempt, outcome: Outcome) -> TrialSetup | None:
        """The setup of the same experiment that needs less memory than the one that ran out of it; None where there is none.

        Batch and rate stay, only micro-batches shrink. No later trial gets as large a micro-batch.
        """
        setup = attempt.setup
        if outcome.micro_batch is None:
            return self._smaller_evaluation(setup)
        of_kind, key = self.profiles[attempt.kind], self._key(setup)
        failed, profile = setup.plan.largest_micro_batch, of_kind[key]
        now = profile.under(setup.plan).after_out_of_memory(failed)
        of_kind[key] = profile = profile.updated(now)
        devices = setup.plan.devices
        # First with the same activation checkpointing, then with more.
        kinds = [variant.recomputes for variant in profile.each]
        for variant in profile.each[kinds.index(now.recomputes) :]:
            cap = largest_timed_micro_batch(self._spec, variant, devices, setup.effective_batch)
            if variant.recomputes == now.recomputes and (failed == 1 or not cap):
                continue  # one sample has run out of memory: nothing smaller is left to try
            with contextlib.suppress(InfeasiblePlanError):
                limits = {
                    **plan_limits(self._spec, variant, devices, setup.effective_batch),
                    "largest_micro_batch": cap or 1,
                }
                plan = plan_batch(setup.effective_batch, devices=devices, **limits)
                largest = limits["largest_micro_batch"]
                smaller = replace(setup, plan=plan, largest_micro_batch=largest, embedding=variant.embedding)
                smaller.steps()
                return smaller
        return None

    def _smaller_evaluation(self, setup: TrialSetup) -> TrialSetup | None:
        """The setup with half the evaluation batch, as no micro-batch failed; None if that is 1 or a score depends on it."""
        everywhere = [profile for of_kind in self.profiles.values() for profile in of_kind.values()]
        is_loop = any(profile.validation_set is None for profile in everywhere)
        batch = setup.evaluation_batch or (TRAINER_EVALUATION_BATCH if is_loop else EVALUATION_BATCH)
        found = [
            finding
            for profile in everywhere
            if profile.examination
            for finding in profile.examination.refusals
        ]
        if batch == 1 or any(finding.kind == "score" for finding in found):
            return None
        return replace(setup, evaluation_batch=batch // 2)

    def learn_memory(self, attempt: Attempt) -> None:
        """Let a measured peak correct the memory law of the kind of device it was measured on, in either direction."""
        # What a GPU's limit applies to, and a virtual device's.
        name = "peak_reserved_bytes" if self._device == "gpu" else "peak_bytes"
        peak_bytes = attempt.last.facts.get(name) if attempt.last else None
        if not isinstance(peak_bytes, int | float):
            return
        plan, of_kind, key = attempt.setup.plan, self.profiles[attempt.kind], self._key(attempt.setup)
        now = (
            of_kind[key]
            .under(plan)
            .after_measurement(
                plan.largest_micro_batch,
                peak_bytes,
                plan.devices,
                plan.effective_batch,
            )
        )
        of_kind[key] = of_kind[key].updated(now)

    def untrained(self, attempt: Attempt) -> float | None:
        """The metric of an attempt's model before training, as far as that is known."""
        value = self._profile(attempt.setup, attempt.kind).untrained
        return value if value is not None and math.isfinite(value) else None

    def _key(self, setup: TrialSetup) -> CostKey:
        return cost_key(self._spec, {**self._spec.fixed(), **setup.cost_parameters})

    def _profile(self, setup: TrialSetup, kind: str) -> DeviceProfile:
        return self.profiles[kind][self._key(setup)]

    def _known_s(self, setup: TrialSetup) -> float | None:
        """Seconds of a setup's training by the law that times the study; None where trials are timed by the clock."""
        known_s = known_train_s(self._profile(setup, self.timed_on), setup)
        # Whole steps take up to one less than the seconds given, for which all trainings are equally long.
        return known_s if known_s is None or setup.train_s is None else max(known_s, setup.train_s)

"""Settings of made-up trials, and the programs that exports make of them, for several tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.report.frameworks.settings import ChosenSettings, settings_of
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.schedule import rate_factor
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import TrialSetup
from conftest import small_study


def chosen(
    plan: BatchPlan | int = 32,
    cap: int | None = None,
    budget: int = 256,
    epochs: float = 2,
    facts: dict[str, Any] | None = None,
    study: dict[str, Any] | None = None,
    parameters: dict[str, Any] | None = None,
    **training: Any,
) -> ChosenSettings:
    """Settings of a made-up trial of a made-up study: two epochs of 128 samples unless told otherwise."""
    plan = BatchPlan(plan) if isinstance(plan, int) else plan
    spec = study_from_dict(small_study(**{"memory": {"largest_micro_batch": cap}, **(study or {})}))
    setup = TrialSetup(
        study="small",
        number=3,
        attempt=0,
        plan=plan,
        optimizer=OptimizerSettings(0.1 * plan.effective_batch / 64, weight_decay=0.0),
        samples_budget=budget,
        training=Training.model_validate(training),
        epochs=epochs,
        rule="linear",
        reference_rate=0.1,
        reference_batch=64,
        largest_micro_batch=cap,
        parameters=parameters or {},
    )
    known = {"optimizer": "SGD", "momentum": 0.9, "nesterov": True, **(facts or {})}
    values = {"effective_batch": plan.effective_batch, "reference_rate": 0.1, "rule": "linear"}
    record = TrialRecord(3, "complete", values, TrialFacts.of(known), 12.5, 0.875)
    stored = StoredStudy("sqlite://", spec.study, spec, {}, 0.0, (record,), ParetoFront((record,)))
    # Nothing known of the training code: what programs say then, they say of any.
    return replace(settings_of(stored, record, setup, "the best"), kind=None)


def rates(settings: ChosenSettings, sizes: list[int], peak: float) -> list[float]:
    """The learning rate of each step, as the training loop of bsearch sets it."""
    training, seen, found = settings.setup.training, 0, []
    for size in sizes:
        found.append(peak * rate_factor(training.schedule, training.warmup, (seen + size / 2) / sum(sizes)))
        seen += size
    return found


def program(settings: ChosenSettings, framework: str) -> dict[str, Any]:
    """The names that a pasted program defines."""
    names: dict[str, Any] = {"__name__": "pasted", "__file__": "pasted.py"}
    exec(compile(FRAMEWORKS[framework](settings).text, "pasted.py", "exec"), names)  # noqa: S102
    return names

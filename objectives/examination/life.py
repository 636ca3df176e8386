"""A short life of a training, told twice: straight, and evaluated, saved and resumed on the way. Both have to end alike.

It is the user's own training for a few small steps, by the code of a trial. What counts steps in an attribute, evaluates with
side effects, or keeps weights that no checkpoint holds, ends with other weights, whatever it is called.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...spaces.errors import BsearchError
from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import BatchPlan
from ...spaces.trial import Measurement, TrialSetup
from ..data.batches import Fetcher, SampleKeys
from ..loading import error_line, load_anew
from ..machine.device_memory import release_memory
from ..machine.torch_settings import seed_everything
from ..training import TrainingRun
from .copies import numbers_of
from .scores import few_samples
from .step import differing

# Steps of a life: evaluated after each third of them, saved after the first.
_STEPS = 6
# Samples of a step, at least.
_BATCH = 4
# Processor seconds that making a model and a first step may take, with what they import, and those of a straight life: they do
# not depend on how busy the machine is.
_FIRST_S, _STRAIGHT_S = 20.0, 8.0
# Relative difference of weights up to which two lives are one, and how many times that of a life from itself.
_SAME, _REPEATS = 1e-6, 10.0
# The second life evaluates so many samples at a time, where the first took at most these seconds; and the relative difference
# of the metric from which it depends on that.
_EVALUATED, _QUICK_S, _METRIC = 5, 2.0, 1e-3


@dataclass(frozen=True, slots=True)
class Life:
    """A training that has begun.

    Args:
        measurements: trains as they are asked for.
        weights: of what has trained so far.
        numbers: the plain numbers that the user's code keeps, by name.
    """

    measurements: Generator[Measurement]
    weights: Callable[[], Sequence[Tensor]]
    numbers: Callable[[], dict[str, Any]] = dict


Begin = Callable[[TrialSetup], Life]


def with_life(
    examination: Examination, where: str, begin: Begin, setup: TrialSetup, samples: int, first_s: float
) -> Examination:
    """The examination with what differs between two lives, where nothing is refused so far.

    Args:
        where: the user's training, for messages.
        samples: of the training set.
        first_s: processor seconds that a first step took, with making the model.
    """
    if examination.refusals:
        return examination
    started = time.perf_counter()
    batch = max(_BATCH, 2 * setup.smallest_micro_batch)
    found: Finding | str
    if samples < 2 * batch:
        found = f"the training set has only {samples} samples"
    elif first_s > _FIRST_S:
        found = f"making the model and a first step take {first_s:.0f} s of processor time"
    else:
        found = _compared(where, begin, setup, batch)
    if found and isinstance(found, str):
        found = Finding("unexamined", where, f"resuming was not examined: {found}")
    findings = (*examination.findings, *([found] if isinstance(found, Finding) else []))
    return replace(
        examination, findings=findings, seconds=examination.seconds + time.perf_counter() - started
    )


def _compared(where: str, begin: Begin, setup: TrialSetup, batch: int) -> Finding | str:
    """What differs between two lives in steps of `batch` samples, or why they were not compared; empty if they are alike."""
    short = replace(
        setup,
        plan=replace(BatchPlan(batch), activation_checkpointing=setup.plan.activation_checkpointing),
        samples_budget=_STEPS * batch,
        epochs=_STEPS // 2,
        largest_micro_batch=None,
        checkpoint_every_s=0.0,
        pauses_at=None,
        ends_by=None,
        model_folder=None,
        training=setup.training.model_copy(update={"compile": False, "evaluations": 3, "workers": 0}),
    )
    straight = replace(short, training=short.training.model_copy(update={"evaluations": 1}), checkpoint=None)
    try:
        started = time.process_time()
        whole, reached = _lived(begin, straight)
        if not whole:
            return "it has no weights when it ends"
        if not all(bool(weight.isfinite().all()) for weight in whole):
            return f"its weights are not finite after {_STEPS} steps"
        if (took_s := time.process_time() - started) > _STRAIGHT_S:
            return f"{_STEPS} steps of {batch} samples take {took_s:.0f} s of processor time"
        few = _EVALUATED if took_s < _QUICK_S else setup.evaluation_batch
        with tempfile.TemporaryDirectory(prefix="bsearch-") as folder:
            kept = replace(short, checkpoint=str(Path(folder) / "checkpoint"), evaluation_batch=few)
            resumed, reached_again, hint = _resumed(begin, kept)
        if not resumed:
            return "it began anew"
        off = differing(resumed, whole)
        if off <= _SAME or off <= _REPEATS * differing(_lived(begin, straight)[0], whole):
            return _averaged(where, setup.metric, reached, reached_again)
        evaluated = differing(_lived(begin, replace(short, checkpoint=None))[0], whole)
    except BsearchError:
        raise
    except Exception as error:  # of a training so short
        release_memory(setup.device)
        return error_line(error)
    if evaluated > _SAME:
        message = (
            f"expected a training that does not depend on when it is evaluated, got weights that differ by {evaluated:.2g} "
            f"(relative) after {_STEPS} steps with evaluations in between. Leave out what the evaluation changes, such as an "
            "attribute."
        )
        return Finding("evaluation", where, message, evaluated)
    message = (
        f"expected a training that ends alike where it is saved and resumed, got weights that differ by {off:.2g} (relative) "
        f"after {_STEPS} steps, resumed after two: a checkpoint holds models, optimizers, and the generators of torch, "
        f"NumPy and Python, but no attributes and no variables of modules{hint}. Keep it as a buffer of the model; with a "
        "Loop, pass it in state={...}."
    )
    return Finding("resumed", where, message, off)


def _averaged(where: str, metric: str, reached: float, again: float) -> Finding | str:
    """A metric that depends on how many samples are evaluated at a time; empty where it does not, or the same number was."""
    off = abs(again - reached) / max(abs(reached), abs(again), 1e-12)
    if not off > _METRIC:
        return ""
    message = (
        f"{metric} depends on how many samples are evaluated at a time: {reached:.4g}, and {again:.4g} in batches of "
        f"{_EVALUATED}, of the same weights. What averages it over batches does not give that of the whole set: compute it in "
        "compute_metrics, from all predictions."
    )
    return Finding("averaged", where, message, off)


class _Brief(TrainingRun):
    """A task's training that is evaluated with a few samples."""

    def evaluate(
        self, keys: Sequence[SampleKeys] | None = None, fetcher: Fetcher | None = None
    ) -> dict[str, float]:
        return super().evaluate(keys or few_samples(self), fetcher)


def life_of_task(reference: str) -> Begin:
    """Begins a task's training."""

    def begin(setup: TrialSetup) -> Life:
        task: Any = load_anew(reference)
        run = _Brief(task, setup)
        return Life(run.measurements(), lambda: run.parameters, lambda: numbers_of(task))

    return begin


def life_of_loop(reference: str, parameters: Callable[[], Sequence[Tensor]]) -> Begin:
    """Begins a user's own loop; `parameters` are those of the one that has begun last, asked for while it lives."""

    def begin(setup: TrialSetup) -> Life:
        seed_everything(setup.seed)
        weights: list[Tensor] = []
        function: Any = load_anew(reference)

        def measurements() -> Generator[Measurement]:
            for measurement in function(setup):
                weights[:] = parameters()
                yield measurement

        return Life(measurements(), lambda: weights)

    return begin


def _lived(begin: Begin, setup: TrialSetup) -> tuple[list[Tensor], float]:
    """A life's weights and metric."""
    life = begin(setup)
    *_, last = life.measurements
    return _copied(life), last.value(setup.metric)


def _resumed(begin: Begin, setup: TrialSetup) -> tuple[list[Tensor], float, str]:
    """The weights of a life that was saved in the middle, none if it began anew; its metric; which numbers of the user did."""
    life = begin(setup)
    next(life.measurements)
    before = life.numbers()
    life.measurements.close()
    del life
    second = begin(setup)
    anew = second.numbers()
    *_, last = second.measurements
    if "resumed_at" not in last.facts:
        return [], math.nan, ""
    moved = [
        f"self.{name}, which was {value} and is {anew[name]} again"
        for name, value in before.items()
        if anew.get(name, value) != value
    ]
    return _copied(second), last.value(setup.metric), f": not {moved[0]}" if moved else ""


def _copied(life: Life) -> list[Tensor]:
    return [weight.detach().to("cpu", copy=True) for weight in life.weights()]

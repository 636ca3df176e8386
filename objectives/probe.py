"""What a device tells about a task before the first trial: what works, and how long a step takes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..spaces.device import DeviceProfile
from ..spaces.errors import BsearchError, ObjectiveError
from ..spaces.plan import BatchPlan
from ..spaces.step_time import TimedStep
from ..spaces.trial import Parameter, TrialSetup
from .batches import in_order
from .loading import load_objective
from .task import Task
from .training import TrainingRun, batch_norms


class _ReadParameters(dict[str, Parameter]):
    """The study's further parameters, remembering which of them the task asked for."""

    def __init__(self, values: Mapping[str, Parameter]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Parameter:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self.keys())
        return super().__iter__()


def profile_objective(reference: str, setup: TrialSetup) -> DeviceProfile:
    """Try the training code on its smallest micro-batch: a step and an evaluation of a few samples.

    Args:
        setup: any setup of the study; its plan and budget are not used.

    Raises:
        ObjectiveError: the code cannot be loaded, breaks its contract, raises, or its loss is not finite.
    """
    objective = load_objective(reference)
    kind = setup.device
    name = torch.cuda.get_device_name() if kind == "gpu" else _cpu_name()
    if not isinstance(objective, Task):
        return DeviceProfile(kind, name, training_set=setup.training.samples)
    parameters = _ReadParameters(setup.parameters)
    setup = replace(setup, parameters=parameters, plan=BatchPlan(1))
    try:
        smallest, run = _smallest_workable(objective, setup)
        scores = run.evaluate(in_order(min(4, len(run.data.evaluation)), 4, setup.seed))  # type: ignore[arg-type]
    except BsearchError:
        raise
    except Exception as error:
        raise ObjectiveError(f"task {reference}: its first step failed: {type(error).__name__}: {error}") from error
    if setup.metric not in scores:
        raise ObjectiveError(
            f"objectives.accuracy: expected a metric that {type(objective).__name__}.score gives "
            f"({', '.join(scores)}), got {setup.metric!r}"
        )
    return DeviceProfile(
        kind=kind,
        device=name,
        training_set=len(run.data.train),  # type: ignore[arg-type]
        evaluation_set=len(run.data.evaluation),  # type: ignore[arg-type]
        smallest_micro_batch=smallest,
        optimizer=type(run.optimizer).__name__,
        adaptive=any("betas" in group for group in run.optimizer.param_groups),
        batch_statistics=any(True for _ in batch_norms(run.model)),
        model_parameters=sum(parameter.numel() for parameter in run.parameters),
        unused_parameters=tuple(sorted(set(parameters.keys()) - parameters.read)),
    )


def _smallest_workable(task: Task, setup: TrialSetup) -> tuple[int, TrainingRun]:
    """1, or 2 where the model refuses a single sample (batch statistics need two values)."""
    first: Exception | None = None
    for samples in (1, 2):
        run = TrainingRun(task, setup)
        if samples > len(run.data.train):  # type: ignore[arg-type]
            break
        run.model.train()
        try:
            batch = run.train_fetcher.fetch(run.stream.take(0, samples))
            loss = run.step([(samples, batch)], samples)
        except (ValueError, RuntimeError) as error:
            first = first or error
            continue
        if not math.isfinite(float(loss)):
            raise ObjectiveError(
                f"{type(task).__name__}.loss: expected a finite loss from the new model's first batch, got {float(loss)}. "
                "Look at the data's values and at the loss."
            )
        return samples, run
    assert first is not None
    raise first


def timed_steps(reference: str, setup: TrialSetup, plans: list[BatchPlan], limit_s: float) -> tuple[list[TimedStep], float]:
    """Time whole optimizer steps of a few plans, smallest first, until the time limit.

    The first step of each shape is dropped (it is up to 1.45 times slower); the median of the next three counts.

    Returns:
        The timed steps, and the seconds of evaluating one sample.
    """
    task = load_objective(reference)
    assert isinstance(task, Task)
    run = TrainingRun(task, setup)
    run.model.train()
    begun = time.perf_counter()
    timed: list[TimedStep] = []
    for plan in sorted(plans, key=lambda plan: plan.effective_batch):
        if timed and time.perf_counter() - begun > limit_s:
            break
        seconds = sorted(_step_s(run, plan) for _ in range(4))[:3] if not timed else [_step_s(run, plan) for _ in range(4)][1:]
        timed.append(TimedStep(plan, sorted(seconds)[1]))
    evaluation = min(512, len(run.data.evaluation))  # type: ignore[arg-type]
    keys = in_order(evaluation, evaluation, setup.seed)
    run.evaluate(keys)
    begun = time.perf_counter()
    run.evaluate(keys)
    return timed, (time.perf_counter() - begun) / evaluation


def _step_s(run: TrainingRun, plan: BatchPlan) -> float:
    begun = time.perf_counter()
    position = 0
    passes = []
    for samples in plan.passes():
        if samples:
            passes.append((samples, run.train_fetcher.fetch(run.stream.take(position, samples))))
            position += samples
    float(run.step(passes, plan.effective_batch))  # reading the loss waits for a GPU
    return time.perf_counter() - begun


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "CPU"

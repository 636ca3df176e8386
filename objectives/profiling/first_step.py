"""A task's first step: whether its code works, keeps its contract, and with how few samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...spaces.errors import BsearchError, TaskError
from ...spaces.trial import Parameter, TrialSetup
from ..batches import SampleKeys, to_device
from ..loading import user_code_location
from ..task import Loss, Score, Task, named_scores
from ..training import TrainingRun


class ParameterNotFound(KeyError):
    """A task reads a parameter that its study does not define."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        super().__init__(name)
        self.known = sorted(known)

    def __str__(self) -> str:
        defined = ", ".join(self.known) or "none"
        expected = f"expected a parameter of the study ({defined})"
        return f"setup.parameters: {expected}, got {self.args[0]!r}. Add it under space: in study.yaml."


class ReadParameters(dict[str, Parameter]):
    """The study's own parameters, which records the ones that the task reads."""

    def __init__(self, values: Mapping[str, Parameter]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __missing__(self, name: str) -> Parameter:
        raise ParameterNotFound(name, self.keys())

    def __getitem__(self, name: str) -> Parameter:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self.keys())
        return super().__iter__()


@contextmanager
def user_code_errors(reference: str, activity: str) -> Iterator[None]:
    """Turn any error from the user's code into a TaskError that names its line."""
    try:
        yield
    except BsearchError:
        raise
    except (Exception, SystemExit) as error:
        message = f"{activity} failed: {type(error).__name__}: {error}{user_code_location(error)}"
        raise TaskError(f"task {reference}: {message}") from error


def on_cpu(setup: TrialSetup) -> TrialSetup:
    """The setup on a CPU, without a limit: with the precision of as many bytes, where a CPU does not have its own."""
    precision = "fp32" if setup.training.precision == "tf32" else setup.training.precision
    training = setup.training.model_copy(update={"precision": precision})
    return replace(setup, device="cpu", training=training, memory_limit_bytes=None)


def smallest_workable(task: Task, setup: TrialSetup) -> tuple[int, TrainingRun]:
    """The smallest micro-batch: 1, or 2 where the model rejects a single sample (batch statistics need two values)."""
    first_error: Exception | None = None
    for samples in (1, 2):
        run = TrainingRun(task, setup)
        if samples > len(run.data.train):  # type: ignore[arg-type]
            break
        run.model.train()
        try:
            batch = run.train_fetcher.fetch(run.stream.take(0, samples))
            loss = run.step([(samples, batch)], samples)
        except (ValueError, RuntimeError) as error:
            first_error = first_error or error
            continue
        if not math.isfinite(float(loss)):
            raise TaskError(
                f"{type(task).__name__}.loss: expected a finite loss from the new model's first batch, got {float(loss)}. "
                "Check the data's values and the loss."
            )
        return samples, run
    assert first_error is not None
    raise first_error


def check_sums(run: TrainingRun) -> None:
    """Compare eight samples' loss and scores with those of their halves: a mean instead of a sum silently changes the training.

    Raises:
        TaskError: totals that are means, or grow with the square of the batch.
    """
    task, setup = run.task, run.setup

    def loss(batch: Any) -> dict[str, Loss | Score]:
        return {"loss": task.loss(run.model, batch, setup)}

    def score(batch: Any) -> dict[str, Loss | Score]:
        scores = named_scores(task, task.score(run.model, batch, setup))
        return {f"score{f' {name!r}' * (len(scores) > 1)}": value for name, value in scores.items()}

    faults = []
    run.model.eval()
    for fetcher, function in ((run.train_fetcher, loss), (run.validation_fetcher, score)):
        half = min(4, len(fetcher.dataset) // 2)  # type: ignore[arg-type]
        if not half:
            continue
        index = np.arange(2 * half)
        keys = [SampleKeys(part, np.zeros_like(part), setup.seed) for part in (index, index[:half], index[half:])]
        # Errors are ignored: some models return a loss only in training mode, and some devices hold fewer samples.
        with suppress(Exception), torch.no_grad():
            results = [function(to_device(fetcher.fetch(part), run.device)) for part in keys]
            sums = {name: [(float(one[name].total), float(one[name].denominator)) for one in results] for name in results[0]}
            faults += [f"{type(task).__name__}.{name}: {fault}" for name in sums for fault in _sum_faults(2 * half, sums[name])]
    run.model.train()
    if faults:
        raise TaskError("\n".join(faults))


def _sum_faults(samples: int, sums: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Faults of (total, denominator) of samples compared with those of their halves, where they are clear.

    >>> list(_sum_faults(8, [(9.2, 8), (4.7, 4), (4.5, 4)])), len(list(_sum_faults(8, [(1.15, 8), (1.2, 4), (1.1, 4)])))
    ([], 1)
    """
    if not all(math.isfinite(value) for pair in sums for value in pair):
        return
    (whole, denominator), *halves = sums
    parts, parts_denominator = sum(total for total, _ in halves), sum(each for _, each in halves)
    # Inconclusive: the denominator differs, or a count changed by one answer.
    differs = abs(denominator - parts_denominator) > 1e-3 * abs(parts_denominator)
    if not parts or differs or (whole.is_integer() and abs(whole - parts) < 1.5):
        return
    evidence = f"{samples} samples together give {whole:.4g}, their halves {halves[0][0]:.4g} and {halves[1][0]:.4g}"
    if abs(whole / parts - 0.5) < 1e-3:
        yield f"expected the sum over the batch's samples, got what looks like their mean ({evidence}). Use reduction='sum'."
    elif 1.6 < whole / parts < 2.4:
        yield (
            f"expected the sum over the batch's samples, got a total that grows with the square of the batch ({evidence}): "
            "shapes are broadcast, such as (N, 1) against (N,). Check the shapes of outputs and labels."
        )

"""The examination of a training before its first trial: its step, its scores and its data.

A step of B samples must not depend on how it is split. One real step of the user's training is computed unsplit and in random
uneven splits, with dropout off and weights and random draws held fixed, in double precision if the model allows it. A task's
scores over validation data are compared in the same way. Each finding names its cause and the fix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...spaces.errors import BsearchError
from ...spaces.laws.examination import Examination, Finding
from ...spaces.trial import TrialSetup
from ..batches import Fetcher, SampleKeys, SampleStream, to_device
from ..machine.device_memory import is_out_of_memory, release_memory
from ..training import TrainingRun
from .causes import LOOP_REMEDIES, TASK_REMEDIES, Cause, Remedies, cause_of
from .copies import ATTEMPTS, copied, error_line, location_of
from .fixed_noise import fixed_noise, seed_draws
from .reading import reading_findings, subset_fetcher
from .scores import score_findings
from .step import (
    Indices,
    Step,
    affordable,
    attribute_tensors,
    batch_norm_findings,
    compared,
    coupling_layer,
    frozen_norms,
    in_precision,
    is_padded,
    perturb,
    restored,
    state_findings,
)

# Samples of the step that is compared.
_SAMPLES = 24

# Total and denominator of the loss of some of a step's samples.
Values = Callable[[Step, Indices], tuple[float, float]]


def examined(run: TrainingRun, smallest: int) -> Examination:
    """Examine a task's training.

    Args:
        run: of the task; its own model is not changed.
        smallest: the fewest samples that the model works with.
    """
    started, task, keys = time.perf_counter(), run.task, _first_samples(run.stream)

    def opened(samples: int, dtype: torch.dtype | None, perturbed: bool) -> AbstractContextManager[Step]:
        return nullcontext(_step_of(run, dtype, _first_samples(run.stream, samples), perturbed=perturbed))

    def values(step: Step, index: Indices) -> tuple[float, float]:
        with restored(step.model), frozen_norms(step.model), fixed_noise("rows", step.model):
            batch = step.batch(index)
            seed_draws(0)
            loss = task.loss(step.model, batch, run.setup)
        return float(loss.total.detach()), float(loss.denominator)

    where = location_of(run, "loss", "training data")
    examination = _examined_step(
        opened, values, len(keys), smallest, run.setup, where, TASK_REMEDIES, couples_samples=task.couples_samples
    )
    findings = [
        *reading_findings(run.train_fetcher, keys, run.validation_fetcher, lambda split: location_of(run, "data", split)),
        *_mode_findings(run),
        *examination.findings,
    ]
    if not any(finding.kind == "layer" for finding in findings):  # scores depend on it too
        findings += score_findings(run)
    return replace(examination, findings=tuple(findings), seconds=time.perf_counter() - started)


class LoopParts(Protocol):
    """What is examined of a third-party loop; see `adapters.loop_task.TrainingParts`."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def data(self) -> Fetcher: ...

    @property
    def couples_samples(self) -> bool: ...

    @property
    def accumulate(self) -> Callable[[Sequence[tuple[int, Any]]], Tensor]: ...


def examined_loop(where: str, parts: LoopParts, setup: TrialSetup) -> Examination:
    """Examine the step of a running third-party loop; restores its model.

    Args:
        where: the loop, for messages.
    """
    started, stream = time.perf_counter(), SampleStream(len(parts.data.dataset), setup.seed)  # type: ignore[arg-type]
    device = next(parts.model.parameters()).device

    def accumulate(micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        return parts.accumulate([(size, batch()) for size, batch in micro_batches])

    @contextmanager
    def opened(samples: int, dtype: torch.dtype | None, perturbed: bool) -> Iterator[Step]:
        fetch = subset_fetcher(parts.data, _first_samples(stream, samples))

        def batch(index: Indices) -> Any:
            return in_precision(to_device(fetch(index), device), dtype)

        with _live_precision(parts.model, dtype, perturbed=perturbed):
            # Libraries put a model of single precision under autocast, whatever runs it.
            under_autocast = dtype == torch.float32 and setup.training.precision in ("bf16", "fp16")
            yield Step(parts.model, batch, accumulate, None if under_autocast else dtype)

    def values(step: Step, index: Indices) -> tuple[float, float]:
        return len(index) * step.gradient([index], "rows")[1], float(len(index))

    samples = len(_first_samples(stream))
    for smallest in (1, 2):  # two where a model does not work with one sample
        examination = _examined_step(
            opened, values, samples, smallest, setup, where, LOOP_REMEDIES, couples_samples=parts.couples_samples
        )
        if not examination.note:
            break
    return replace(examination, seconds=time.perf_counter() - started)


def _first_samples(stream: SampleStream, samples: int = _SAMPLES) -> SampleKeys:
    return stream.take(0, min(samples, stream.samples))


def _examined_step(
    opened: Callable[[int, torch.dtype | None, bool], AbstractContextManager[Step]],
    values: Values,
    most: int,
    smallest: int,
    setup: TrialSetup,
    where: str,
    remedies: Remedies,
    *,
    couples_samples: bool,
) -> Examination:
    """The examination with a step compared, in the highest precision that the model allows.

    Args:
        opened: the step over the stream's first samples, in a precision, with perturbed parameters or not.
        most: samples of the step, fewer where a step takes long.
    """
    examination, note = Examination(couples_samples=couples_samples), ""
    if couples_samples:
        return examination
    while most >= max(2 * smallest, 2):
        for dtype, perturbed in ATTEMPTS:
            try:
                with opened(most, dtype, perturbed) as step:
                    samples, splits = affordable(step, most, smallest)
                    found = compared(step, samples, smallest, setup.seed, splits)
                    findings: list[Finding] = []
                    if found.random and found.equal:
                        text = "draws random numbers; with the draws held fixed, a split step has the same gradient"
                        findings.append(Finding("random", where, text))
                    if not found.equal:
                        cause = _cause(step, partial(values, step), samples, smallest, remedies)
                        message = f"{cause.message} The gradient of a split step differs by {found.difference:.2g} (relative)."
                        findings.append(Finding(cause.kind, where, message, found.difference))
                    findings += batch_norm_findings(step, samples, smallest, setup.seed)
                    findings += state_findings(step, 2 * smallest, where)
            except BsearchError:
                raise
            except Exception as error:
                release_memory(setup.device)
                note = (
                    f"a step of {most} samples does not fit in memory" if is_out_of_memory(error) else note or error_line(error)
                )
                continue
            return replace(
                examination,
                samples=samples,
                splits=splits,
                precision=str(dtype or setup.training.precision).removeprefix("torch."),
                difference=found.difference,
                tolerance=found.tolerance,
                findings=tuple(findings),
            )
        most //= 2
    return replace(examination, note=note or f"the training set has only {most} samples")


def _cause(
    step: Step, values: Callable[[Indices], tuple[float, float]], samples: int, smallest: int, remedies: Remedies
) -> Cause:
    try:
        layer, padded = coupling_layer(step, samples), is_padded(step, samples)
        return cause_of(values, samples, smallest, remedies, layer=layer, padded=padded)
    except Exception as error:  # the step differs all the same
        text = f"expected a loss that adds up over samples, got another; finding the cause failed: {error_line(error)}."
        return Cause("coupled", text)


def _step_of(run: TrainingRun, dtype: torch.dtype | None, keys: SampleKeys, *, perturbed: bool) -> Step:
    other = copied(run, dtype, perturbed=perturbed)
    fetch = subset_fetcher(run.train_fetcher, keys)

    def accumulate(micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        return other.accumulate(micro_batches, sum(size for size, _ in micro_batches))[0]

    def batch(index: Indices) -> Any:
        return in_precision(other.on_device(fetch(index)), dtype)

    return Step(other.model, batch, accumulate, dtype, lambda: attribute_tensors(run.task))


@contextmanager
def _live_precision(model: nn.Module, dtype: torch.dtype | None, *, perturbed: bool) -> Iterator[None]:
    """Cast the model's own parameters and buffers to a precision; on exit they hold their original storages again."""
    before = [(tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype) if dtype is not None and data.is_floating_point() else data.clone()
        if perturbed:
            perturb(model)
        yield
    finally:
        for tensor, data in before:
            tensor.grad = None
            tensor.data = data


def _mode_findings(run: TrainingRun) -> Iterator[Finding]:
    if names := run.modes.outermost:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        yield Finding(
            "eval_mode",
            location_of(run, "model"),
            f"returned in evaluation mode, and kept in it: {shown}. Call .train() on modules that should train.",
        )


__all__ = ["examined", "examined_loop"]

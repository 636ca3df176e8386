"""The examination of a training before its first trial: its step, its scores and its data.

A step of B samples must not depend on how it is split. One real step of the user's training is computed unsplit and in random
uneven splits, with dropout off and weights and random draws held fixed, in double precision if the model allows it. A task's
scores over validation data are compared in the same way. Each finding names its cause and the fix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...spaces.errors import BsearchError
from ...spaces.laws.examination import Examination, Finding
from ...spaces.plan import ActivationCheckpointing, BatchPlan
from ...spaces.trial import TrialSetup
from ..data.batches import Fetcher, SampleKeys, SampleStream, to_device
from ..loading import error_line
from ..machine.device_memory import is_out_of_memory, release_memory
from ..model.activation_checkpointing import checkpoint_activations
from ..task import Task, embeds
from ..training import TrainingRun
from .causes import LOOP_REMEDIES, TASK_REMEDIES, Cause, Remedies, cause_of, embedding_cause
from .census import census, check_no_living_scheduler, learning
from .copies import ATTEMPTS, copied, location_of, needs_its_own_model, numbers_of, unchanged
from .fixed_noise import fixed_noise, seed_draws
from .reading import POOL, data_of_model, reading_findings, subset_fetchers, varied
from .scores import score_findings
from .step import (
    AUTOCAST_TOLERANCE,
    Indices,
    NothingToCompare,
    Step,
    affordable,
    attribute_tensors,
    batch_norm_findings,
    compared,
    coupling_layer,
    differing,
    frozen_norms,
    in_precision,
    is_padded,
    listed,
    perturb,
    restored,
    state_findings,
    state_message,
    sums,
)

# Samples of the step that is compared, and of one whose blocks are recomputed.
_SAMPLES, _RECOMPUTED = 24, 2

# Total and denominator of the loss of some of a step's samples.
Values = Callable[[Step, Indices], tuple[float, float]]


def examined(
    run: TrainingRun, smallest: int, checkpointing: Sequence[ActivationCheckpointing] = ()
) -> Examination:
    """Examine a task's training.

    Args:
        run: of the task; its own model is not changed.
        smallest: the fewest samples that the model works with.
        checkpointing: modes of activation checkpointing that plans may choose.
    """
    started, task = time.perf_counter(), run.task
    keys = varied(run.train_fetcher, run.stream.take(0, min(run.stream.samples, POOL)), _SAMPLES)

    live = needs_its_own_model(run)
    # What such a model may do, a copy does not.
    modes = [] if live else [mode for mode in checkpointing if mode != "none"]

    @contextmanager
    def opened(samples: int, dtype: torch.dtype | None, perturbed: bool) -> Iterator[Step]:
        with _live_precision(run.model, dtype, perturbed=perturbed) if live else nullcontext():
            yield _step_of(run, dtype, _subset(keys, samples), perturbed=perturbed, live=live)

    def values(step: Step, index: Indices) -> tuple[float, float]:
        with restored(step.model), frozen_norms(step.model), fixed_noise("rows", step.model):
            batch = step.batch(index)
            seed_draws(0)
            loss = task.loss(step.model, batch, run.setup)
        return float(loss.total.detach()), float(loss.denominator)

    embedded = embeds(task)
    where = location_of(run, "embed" if embedded else "loss", "training data")
    with unchanged(task):
        device, place = run.setup.device, location_of(run, "loss")
        learns = found_in_memory("what learns", place, device, partial(_census_of_task, run, smallest))
        if task.couples_samples:
            examination = Examination(couples_samples=True)
        else:
            compare = partial(
                _compared_step,
                values=values,
                smallest=smallest,
                seed=run.setup.seed,
                where=where,
                remedies=embedding_cause if embedded else TASK_REMEDIES,
                task=task,
            )
            examination = _examined_step(opened, compare, len(keys), smallest, device)
        findings = [
            *reading_findings(
                run.train_fetcher, keys, run.validation_fetcher, lambda split: location_of(run, "data", split)
            ),
            *_mode_findings(run),
            *data_of_model(run.train_fetcher, keys, run.model, location_of(run, "data", "training data")),
            *learns,
            *found_in_memory("a second model", place, device, partial(_shared, run)),
            *found_in_memory("recomputing blocks", place, device, partial(_recomputed, run, keys, modes)),
            *task.examine(run.model, run.data, run.setup),
            *examination.findings,
        ]
        if not any(finding.kind == "layer" for finding in findings):  # scores depend on it too
            findings += score_findings(run)
    return replace(examination, findings=tuple(findings), seconds=time.perf_counter() - started)


def examined_loop(
    where: str,
    parts: Any,
    setup: TrialSetup,
    remedies: Remedies | Callable[[str], Cause] = LOOP_REMEDIES,
    *,
    takes_steps: bool = False,
) -> Examination:
    """Examine the step of a running loop that is not ours; restores its model.

    Args:
        where: the loop, for messages.
        parts: its model, its data, and what back-propagates a step's micro-batches: `TrainingParts`, or an `ExaminedLoop`.
        remedies, takes_steps: as for `_compared_step`.
    """
    place, where, started = where, f"{where}, on training data", time.perf_counter()
    stream = SampleStream(len(parts.data.dataset), setup.seed, parts.weights)
    device = next(parts.model.parameters()).device

    back_propagate: Callable[[Sequence[tuple[int, Any]]], Tensor] = parts.accumulate

    step = partial(_first_samples, back_propagate, parts.data, stream, device)
    found = partial(_census, place, parts.model, parts.optimizers, step, schedules=parts.schedules)
    learns = found_in_memory("what learns", place, setup.device, found)
    keys = varied(parts.data, stream.take(0, min(stream.samples, POOL)), _SAMPLES)
    learns = (*data_of_model(parts.data, keys, parts.model, where), *learns)
    if parts.couples_samples:
        return Examination(couples_samples=True, findings=learns)

    def accumulate(micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        return back_propagate([(size, batch()) for size, batch in micro_batches])

    @contextmanager
    def opened(samples: int, dtype: torch.dtype | None, perturbed: bool) -> Iterator[Step]:
        def prepare(batch: Any) -> Any:
            return in_precision(to_device(batch, device), dtype)

        fetch, sliced = subset_fetchers(parts.data, _subset(keys, samples), prepare)
        with _live_precision(parts.model, dtype, perturbed=perturbed):
            # Libraries run a model of single precision under autocast, here too.
            under_autocast = dtype == torch.float32 and setup.training.precision in ("bf16", "fp16")
            yield Step(parts.model, fetch, accumulate, None if under_autocast else dtype, sliced=sliced)

    def values(step: Step, index: Indices) -> tuple[float, float]:
        return len(index) * step.gradient([index], "rows")[1], float(len(index))

    for smallest in (1, 2):  # two where a model does not work with one sample
        compare = partial(
            _compared_step,
            values=values,
            smallest=smallest,
            seed=setup.seed,
            where=where,
            remedies=remedies,
            takes_steps=takes_steps,
        )
        examination = _examined_step(opened, compare, len(keys), smallest, setup.device)
        if not examination.note:
            break
    return replace(
        examination, findings=(*learns, *examination.findings), seconds=time.perf_counter() - started
    )


def found_in_memory(
    what: str, where: str, device: str, find: Callable[[], Iterable[Finding]]
) -> tuple[Finding, ...]:
    """What is found, or that memory does not do for finding it: a training may fit that a comparison of two does not."""
    try:
        return tuple(find())
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release_memory(device)
        return (Finding("unexamined", where, f"{what} could not be examined: memory ran out"),)


def _shared(run: TrainingRun) -> Iterator[Finding]:
    """Whether weights that have changed come back from the task as if they were new."""
    with restored(run.model), torch.no_grad():
        changed = {id(one): sums(one.add_(1)) for one in run.model.parameters() if one.requires_grad}
        again = run.task.model(run.setup)
        count = sum(id(one) in changed and changed[id(one)] == sums(one) for one in again.parameters())
    if count:
        message = (
            f"expected a new model from each call, got {count} of {len(changed)} weights that an earlier call returned, with "
            "what had changed since: each trial would go on from the last one's. Make the model inside model()."
        )
        yield Finding("shared", location_of(run, "model"), message)


def _census_of_task(run: TrainingRun, smallest: int) -> Iterator[Finding]:
    def step() -> None:
        plan = BatchPlan(min(max(smallest, 2), run.data.training_set))  # one sample has no batch statistics
        run.accumulate(run.micro_batches(plan, run.loader([plan])), plan.effective_batch)

    return _census(location_of(run, "loss"), run.model, [run.optimizer], step, run.task)


def _census(
    where: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    step: Callable[[], object],
    owner: Any = None,
    *,
    schedules: bool = True,
) -> Iterator[Finding]:
    """What learns in two steps of a training and is not carried by a trial.

    Raises:
        TaskError: a scheduler sets the rates, where the study `schedules` them.
    """

    def of_the_same_weights() -> None:
        with restored(model):
            step()

    learns = learning(of_the_same_weights)
    for parameter in model.parameters():
        parameter.grad = None
    if schedules:
        check_no_living_scheduler(where, optimizers)
    return census(where, learns, model, optimizers, owner)


def _first_samples(
    back_propagate: Callable[[Sequence[tuple[int, Any]]], Tensor],
    data: Fetcher,
    stream: SampleStream,
    device: torch.device,
) -> None:
    size = min(2, stream.samples)  # one sample has no batch statistics
    back_propagate([(size, to_device(data.fetch(stream.take(0, size)), device))])


def _subset(keys: SampleKeys, samples: int) -> SampleKeys:
    return replace(keys, index=keys.index[:samples], epoch=keys.epoch[:samples])


def _examined_step(
    opened: Callable[[int, torch.dtype | None, bool], AbstractContextManager[Step]],
    compared_step: Callable[[Step, int], Examination],
    most: int,
    smallest: int,
    device: str,
) -> Examination:
    """The examination with a step compared, in the highest precision that the model allows.

    Args:
        opened: the step over the stream's first samples, in a precision, with perturbed parameters or not.
        compared_step: the examination of such a step, given its most samples.
        most: samples of the step, fewer where they do not fit.
        device: of the step, "cpu" or "gpu".
    """
    note = ""
    while most >= max(2 * smallest, 2):
        for dtype, perturbed in ATTEMPTS:
            try:
                with opened(most, dtype, perturbed) as step:
                    return compared_step(step, most)
            except BsearchError:
                raise
            except NothingToCompare as error:
                note = str(error)
            except Exception as error:
                release_memory(device)
                memory = is_out_of_memory(error)
                if dtype is None and not memory and smallest > 1:
                    with opened(most, dtype, perturbed) as step:  # as in a trial: an error here is one there
                        step.gradient([np.arange(most)], None)
                failed = f"a step of {most} samples failed: {error_line(error)}"
                note = f"a step of {most} samples does not fit in memory" if memory else note or failed
        most //= 2
    few = f"the training set has only {most} sample{'s' * (most != 1)}, for parts of at least {smallest}"
    return Examination(note=note or few)


def _compared_step(
    step: Step,
    most: int,
    *,
    values: Values,
    smallest: int,
    seed: int,
    where: str,
    remedies: Remedies | Callable[[str], Cause],
    task: Task | None = None,
    takes_steps: bool = False,
) -> Examination:
    """The examination of one step of at most `most` samples.

    Args:
        remedies: what to write; or the cause, given the layer that mixes samples, where losses do not add up.
        task: whose attributes may be what a loss changes.
        takes_steps: the step's optimizers step too, so it may change state.
    """
    effort, before = affordable(step, most, smallest), numbers_of(task)
    found = compared(step, smallest, seed, effort)
    findings: list[Finding] = []
    if found.random and found.equal:
        text = "draws random numbers; with the draws held fixed, and permutations left out, a split step has the same gradient"
        findings.append(Finding("random", where, text))
    elif not found.equal and not found.repeats:
        changed = [f"self.{name}" for name, value in numbers_of(task).items() if before.get(name) != value]
        what = changed[0] if changed else "something (the same step, repeated, has another gradient)"
        message = state_message(what, of_loop=takes_steps)
        findings.append(Finding("state", where, message, found.difference))
    elif not found.equal and not found.fixed:
        return Examination(note=f"{where}: draws random numbers in a way that cannot be held fixed")
    elif not found.equal:
        cause = _cause(step, partial(values, step), effort.samples, smallest, remedies)
        message = (
            f"{cause.message} The gradient of a split step differs by {found.difference:.2g} (relative)."
        )
        findings.append(Finding(cause.kind, where, message, found.difference))
    findings += batch_norm_findings(step, effort.samples, smallest, seed)
    if not effort.brief and not takes_steps:
        findings += state_findings(step, 2 * smallest, where)
    precision = str(step.dtype or next(step.model.parameters()).dtype).removeprefix("torch.")
    return Examination(effort.samples, effort.splits, precision, found.difference, findings=tuple(findings))


def _cause(
    step: Step,
    values: Callable[[Indices], tuple[float, float]],
    samples: int,
    smallest: int,
    remedies: Remedies | Callable[[str], Cause],
) -> Cause:
    try:
        if not isinstance(remedies, Remedies):
            return remedies(coupling_layer(step, samples))
        layer, padded = coupling_layer(step, samples), is_padded(step, samples)
        return cause_of(values, samples, smallest, remedies, layer=layer, padded=padded)
    except Exception as error:  # the step differs nevertheless
        text = f"expected a loss that adds up over samples, got another; finding the cause failed: {error_line(error)}."
        return Cause("coupled", text)


def _step_of(
    run: TrainingRun, dtype: torch.dtype | None, keys: SampleKeys, *, perturbed: bool, live: bool
) -> Step:
    other = copied(run, dtype, perturbed=perturbed, live=live)

    def accumulate(micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        return other.accumulate(micro_batches, sum(size for size, _ in micro_batches))

    def prepare(batch: Any) -> Any:
        return in_precision(other.on_device(batch), dtype)

    fetch, sliced = subset_fetchers(run.train_fetcher, keys, prepare)
    return Step(other.model, fetch, accumulate, dtype, partial(attribute_tensors, run.task), sliced)


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


def _recomputed(
    run: TrainingRun, keys: SampleKeys, modes: Sequence[ActivationCheckpointing]
) -> Iterator[Finding]:
    """Blocks whose gradient is another where they are computed again in the backward pass."""
    most = min(len(keys), _RECOMPUTED)

    def gradient(mode: ActivationCheckpointing) -> list[Tensor]:
        other, batch = copied(run, None, perturbed=False), run.train_fetcher.fetch(_subset(keys, most))
        checkpoint_activations(run.task.checkpoint_blocks(other.model), mode)
        seed_draws(0)
        other.accumulate([(most, batch)], most)
        gradients = (
            torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in other.parameters
        )
        return [one.detach().cpu() for one in gradients]

    if not modes or not most or not run.task.checkpoint_blocks(run.model):
        return
    kept = gradient("none")
    for mode in modes:
        try:
            again = gradient(mode)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue  # a mode that does not work is left out where memory is traced
        if (off := differing(again, kept)) > AUTOCAST_TOLERANCE:
            message = (
                f"expected blocks with the same gradient where they are computed again in the backward pass, got one that "
                f"differs by {off:.2g} (relative) with {mode} activation checkpointing: a block draws from a generator of its "
                "own, or counts its calls. Draw from torch's generators, or write memory: {activation_checkpointing: none}."
            )
            yield Finding("recomputed", location_of(run, "checkpoint_blocks"), message, off)
            return


def _mode_findings(run: TrainingRun) -> Iterator[Finding]:
    if names := run.modes.outermost:
        yield Finding(
            "eval_mode",
            location_of(run, "model"),
            f"returned in evaluation mode, and kept in it: {listed(names)}. Call .train() on modules that should train.",
        )

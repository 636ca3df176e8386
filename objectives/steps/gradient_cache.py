"""A loss that compares the samples of a batch, split exactly: gradient caching.

The embeddings of all micro-batches are computed without a graph. The loss over the whole batch gives their gradients, and each
micro-batch is run again, with the same random numbers, to back-propagate its rows of them. By the chain rule that is the
gradient of the unsplit batch, for the memory of one micro-batch and a second forward pass.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", arXiv 2101.06983.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from ...spaces.errors import TaskError
from ...spaces.trial import TrialSetup
from ..data.batches import RandomState
from ..model.batch_norm import once_per_step
from ..model.buffers import KeptBuffers
from ..profiling.memory.live_bytes import LiveBytes
from ..task import name_of
from .two_passes import fresh, held

if TYPE_CHECKING:
    from ..adapters.coupled_loss import CoupledLoss
    from ..task import Task

    # What has the two functions that make such a loss.
    Embeds: TypeAlias = "Task | CoupledLoss"


# A training with such a loss: a `TrainingRun`, or `CoupledSteps` of a library's loop.
CachedTraining: TypeAlias = Any


class EmbeddingsOf(nn.Module):
    """A micro-batch's embeddings as a module, so that DistributedDataParallel can wrap any use a task makes of its model."""

    def __init__(self, task: Embeds, model: nn.Module, setup: TrialSetup) -> None:
        super().__init__()
        self.task, self.model, self.setup = task, model, setup
        # Of what `embed` returns; its tensors are passed around as a list.
        self.structure: TreeSpec | None = None
        # On several devices, places of tensors that the loss does not use: DistributedDataParallel would wait for gradients.
        self.unused: set[int] | None = None

    def forward(self, batch: Any, samples: int) -> list[Tensor]:
        embedded = self.task.embed(self.model, batch, self.setup)
        found, self.structure = tree_flatten(embedded)
        check_embeddings(self.task, embedded, samples)
        return [
            tensor.detach() if place in (self.unused or ()) else tensor for place, tensor in enumerate(found)
        ]


@dataclass
class GradientCache:
    """What a training keeps from one step of such a loss to the next.

    Args:
        absent: rows of embeddings that stand for samples which are not run, where memory is probed.
        checked: the loss is known to draw no random numbers.
    """

    absent: int = 0
    checked: bool = False

    def accumulate(self, run: CachedTraining, micro_batches: Sequence[tuple[int, Any]], size: int) -> Tensor:
        """The gradient of the loss of a whole batch of `size` samples, in the parameters' `grad`: see
        `TrainingRun.accumulate`.

        A device with a single micro-batch keeps its graph and needs no second forward pass.
        """
        module = _unwrapped(run.loss)
        if len(micro_batches) == 1 and (run.ranks.count == 1 or module.unused is not None):
            ((samples, batch),) = micro_batches
            batch = LiveBytes.fetched(batch) if callable(batch) else batch
            with run.autocast():
                outputs = run.loss(run.on_device(batch), samples)
            del batch
            expected = module.unused
            loss, own, of_loss = self._loss(run, [[output.detach() for output in outputs]], size)
            if module.unused != expected:
                raise TaskError(
                    f"{name_of(run.task)}.batch_loss: expected a loss that uses the same embeddings in every step, on several "
                    "devices; got one that uses others now"
                )
            _back_propagate(run.task, outputs, own[0])
        else:
            resident = run.resident_bytes > 0
            waiting = [(samples, held(batch, on_device=resident)) for samples, batch in micro_batches]
            states, parts = self._embedded(run, waiting)
            loss, own, of_loss = self._loss(run, parts, size)
            del parts
            while waiting:
                samples, batch = waiting.pop(0)
                states.pop(0).restore()
                with run.ranks.sync_context(run.loss, not waiting):
                    with run.autocast():
                        outputs = run.loss(run.on_device(fresh(batch, run.device)), samples)
                    del batch
                    _back_propagate(run.task, outputs, own.pop(0))
        # Every device has the whole loss, so these gradients are the same on all, and are not summed over them.
        for parameter, gradient in zip(run.parameters, of_loss, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return loss

    def _embedded(
        self, run: CachedTraining, waiting: Sequence[tuple[int, Any]]
    ) -> tuple[list[RandomState], list[list[Tensor]]]:
        """Each micro-batch's embeddings without a graph, and the random state before it; buffers stay as they were."""
        module = _unwrapped(run.loss)
        buffers = KeptBuffers(run.model)
        states, parts = [], []
        for samples, batch in waiting:
            states.append(RandomState.now(run.device))
            with torch.no_grad(), run.autocast():
                parts.append(module(run.on_device(fresh(batch, run.device)), samples))
        buffers.put_back()  # the second pass moves them as one pass would
        return states, parts

    def _loss(
        self, run: CachedTraining, parts: list[list[Tensor]], size: int
    ) -> tuple[Tensor, list[Rows], Sequence[Tensor | None]]:
        """The whole batch's loss.

        Args:
            parts: the embeddings of each of this device's micro-batches.
            size: samples of the whole batch.

        Returns:
            The loss, detached; for each micro-batch the gradients of its embeddings; and the gradients of parameters that the
            loss uses itself, such as a temperature.
        """
        sizes = [len(part[0]) for part in parts]
        local = [_concatenated(run.task, tensors) for tensors in zip(*parts, strict=True)]
        parts.clear()
        if self.absent:
            local = [
                torch.cat([tensor, tensor.new_zeros((self.absent, *tensor.shape[1:]))]) for tensor in local
            ]
        start, local = run.ranks.gathered_rows(local, size)
        whole = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in local]
        del local
        module = _unwrapped(run.loss)
        assert module.structure is not None
        state = None if self.checked else RandomState.now(run.device)
        with run.autocast(), once_per_step(run.model):
            loss = run.task.batch_loss(run.model, tree_unflatten(whole, module.structure), run.setup)
        check_batch_loss(run.task, loss, drew=state is not None and not state.unchanged())
        self.checked = True
        wanted = [tensor for tensor in whole if tensor.requires_grad]
        found = torch.autograd.grad(run.scaler.scale(loss), [*wanted, *run.parameters], allow_unused=True)
        gradients = iter(found[: len(wanted)])
        own = slice(start, start + sum(sizes))
        if run.ranks.count > 1:
            used = iter(found[: len(wanted)])
            module.unused = {
                place for place, tensor in enumerate(whole) if not tensor.requires_grad or next(used) is None
            }
        by_tensor = [
            _split(next(gradients) if tensor.requires_grad else None, own, sizes) for tensor in whole
        ]
        return loss.detach(), [list(rows) for rows in zip(*by_tensor, strict=True)], found[len(wanted) :]


# The gradients of a micro-batch's embeddings, None for a tensor that has none.
Rows = list[Tensor | None]


def _split(gradient: Tensor | None, own: slice, sizes: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if gradient is None else torch.split(gradient[own], list(sizes))


def _back_propagate(task: Embeds, outputs: Sequence[Tensor], gradients: Rows) -> None:
    """Back-propagate the gradients of a micro-batch's embeddings.

    Raises:
        TaskError: no embedding depends on the model's parameters.
    """
    pairs = zip(outputs, gradients, strict=True)
    used = [(output * rows).sum() for output, rows in pairs if output.requires_grad and rows is not None]
    if not used:
        raise TaskError(
            f"{name_of(task)}.embed: expected embeddings that depend on the model's parameters and that batch_loss uses, got "
            "none with a graph"
        )
    # Its gradient with respect to each embedding is that embedding's own.
    torch.stack([product.float() for product in used]).sum().backward()  # type: ignore[no-untyped-call]


def _concatenated(task: Embeds, tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of embeddings from those of the micro-batches."""
    if len(tensors) == 1:
        return tensors[0]
    try:
        return torch.cat(list(tensors))
    except RuntimeError:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors[:2])
        raise TaskError(
            f"{name_of(task)}.embed: expected rows of one shape, got {shapes} in two micro-batches. Pool or pad them to one "
            "shape; the length of padding must not depend on the micro-batch."
        ) from None


def _unwrapped(module: Any) -> EmbeddingsOf:
    found: EmbeddingsOf = module.module if isinstance(module, DistributedDataParallel) else module
    return found


_EXPECTED_EMBEDDINGS = "expected a tensor of shape (samples, ...), or a tuple, list or dict of such tensors"


def check_embeddings(task: Embeds, embedded: Any, samples: int) -> None:
    """Check what `embed` returned: tensors in containers.

    Raises:
        TaskError: something else than tensors, none, or tensors of another number of rows.
    """
    where = f"{name_of(task)}.embed"
    found, _ = tree_flatten_with_path(embedded)
    if not found:
        raise TaskError(f"{where}: {_EXPECTED_EMBEDDINGS}, got nothing")
    for path, value in found:
        place = f" at {keystr(path)}" if path else ""
        if not isinstance(value, Tensor):
            got = "None" if value is None else type(value).__name__
            raise TaskError(f"{where}: {_EXPECTED_EMBEDDINGS}, got {got}{place}")
        if value.dim() == 0 or len(value) != samples:
            raise TaskError(
                f"{where}: expected one row for each of {samples} samples, got shape {tuple(value.shape)}{place}. Return "
                "several views of a sample as several tensors, such as (first, second), or as (samples, views, ...)."
            )


def check_batch_loss(task: Embeds, loss: Any, *, drew: bool = False) -> None:
    """Check what `batch_loss` returned.

    Args:
        drew: it has drawn random numbers.

    Raises:
        TaskError: no scalar with a graph, or drawn numbers.
    """
    where = f"{name_of(task)}.batch_loss"
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TaskError(
            f"{where}: expected the whole batch's loss, a scalar tensor, got {got}. Return the mean over its samples."
        )
    if not loss.requires_grad:
        raise TaskError(f"{where}: expected a loss that depends on the embeddings, got one without a graph")
    if drew:
        raise TaskError(
            f"{where}: expected a loss without random numbers, because every device computes it; got one that draws some. Draw "
            "them in embed, and return them as a tensor with a row per sample."
        )

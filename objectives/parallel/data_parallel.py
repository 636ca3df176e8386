"""Several devices in one trial: what their ranks send one another.

Every rank runs the same code on its share of each step. Ranks communicate in three places: gradients are all-reduced after
the last micro-batch, losses are summed once per step, and evaluation gathers its sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...spaces.errors import TaskError
from ...spaces.plan import even_parts
from ..machine.accelerator import device_of, is_gpu, widest_float

_NO_CONTEXT = nullcontext()


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of its trial's ranks. With a single rank, every operation is local."""

    rank: int = 0
    count: int = 1

    @classmethod
    def of(cls, devices: int) -> Ranks:
        """The group of `devices` ranks that this process belongs to.

        Raises:
            TaskError: this process does not belong to such a group.
        """
        if devices == 1:
            return cls()
        if not dist.is_initialized() or dist.get_world_size() != devices:
            raise TaskError(f"expected to run as one of {devices} ranks, got a single process")
        return cls(dist.get_rank(), devices)

    def distributed_loss(self, loss: nn.Module, device: torch.device) -> nn.Module:
        """The loss in DistributedDataParallel, its gradients summed over ranks."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            parallel = DistributedDataParallel(
                loss,
                device_ids=[device] if is_gpu(device) else None,
                # Running statistics are synchronised before evaluation: `sync_batch_norm_statistics`.
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                # Models may use some parameters in some micro-batches only; finding them costs 35 us a step (docs/log.md).
                find_unused_parameters=True,
            )
        # The default hook averages, but a step's gradient is a sum.
        parallel.register_comm_hook(None, lambda _, bucket: _sum_hook(bucket))
        return parallel

    def mean(self, local: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.count == 1:
            return local
        dist.all_reduce(local)
        return local / self.count

    def sync_context(self, loss: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward pass: gradients are all-reduced in the last one only."""
        if last or not isinstance(loss, DistributedDataParallel):
            return _NO_CONTEXT
        return loss.no_sync()

    def begin_sum(self, totals: list[Tensor], denominator: Tensor | float) -> Any:
        """Start summing a step's loss over micro-batches and ranks, overlapping with the last backward pass.

        Args:
            totals: the micro-batches' summed losses, scalars; several are summed in double precision.
        """
        if len(totals) == 1 and self.count == 1:
            return totals[0], denominator
        total = torch.stack(totals).sum(dtype=widest_float(totals[0].device))
        if self.count == 1:
            return total, denominator
        if isinstance(denominator, Tensor):
            denominator = denominator.detach().to(total.device, total.dtype)
        else:
            denominator = torch.full((), denominator, dtype=total.dtype, device=total.device)
        both = torch.stack([total, denominator])
        return both, dist.all_reduce(both, async_op=True)

    def end_sum(self, pending: Any) -> tuple[Tensor, Tensor | float]:
        """Wait for `begin_sum`; returns the sums of losses and of denominators over all ranks."""
        if self.count == 1:
            total, denominator = pending
            return total, denominator
        both, work = pending
        work.wait()
        return both[0], both[1]

    def sync_batch_norm_statistics(self, norms: Iterable[nn.modules.batchnorm._BatchNorm]) -> None:
        """Average running statistics over ranks, which is equivalent to averaging after every micro-batch."""
        if self.count == 1:
            return
        running = [
            buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None
        ]
        if not running:
            return
        with torch.no_grad():
            flat = torch.cat([buffer.flatten().to(widest_float(buffer.device)) for buffer in running])
            means = torch.split(self.mean(flat), [buffer.numel() for buffer in running])
            for buffer, mean in zip(running, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def broadcast(self, buffers: Iterable[Tensor]) -> None:
        """Broadcast rank 0's values of these tensors to all ranks, in place."""
        if self.count > 1:
            for buffer in buffers:
                dist.broadcast(buffer, 0)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters over ranks; one that some rank has, all have afterwards."""
        if self.count == 1:
            return
        has = torch.tensor(
            [float(parameter.grad is not None) for parameter in parameters], device=parameters[0].device
        )
        dist.all_reduce(has, dist.ReduceOp.MAX)
        for parameter, any_has in zip(parameters, has.tolist(), strict=True):
            if any_has:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)

    def gathered_rows(self, local: Sequence[Tensor], size: int) -> tuple[int, list[Tensor]]:
        """The rows of all ranks' tensors, in the order of ranks.

        Args:
            local: tensors with a row for each sample of this rank's share.
            size: samples of the whole step.

        Returns:
            Where this rank's rows begin, and the whole tensors.
        """
        if self.count == 1:
            return 0, list(local)
        shares = even_parts(size, self.count)
        whole = []
        for tensor in local:
            sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor  # gloo sends no booleans
            # Shares differ by a row at most: padded, all ranks send as much.
            padded = torch.cat([sent, sent.new_zeros((max(shares) - len(sent), *sent.shape[1:]))])
            ranks = [torch.empty_like(padded) for _ in shares]
            dist.all_gather(ranks, padded)
            rows = torch.cat([rank[:share] for rank, share in zip(ranks, shares, strict=True)])
            whole.append(rows.to(tensor.dtype))
        return sum(shares[: self.rank]), whole

    def max_over_ranks(self, seconds: float) -> float:
        """The maximum over ranks, so that all of them take the same decision."""
        if self.count == 1:
            return seconds
        device = device_of("cpu" if dist.get_backend() == "gloo" else "gpu")
        longest = torch.tensor(seconds, dtype=widest_float(device), device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return float(longest)

    def all_gathered(self, local: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The lists of all ranks, concatenated by name."""
        if self.count == 1:
            return dict(local)
        ranks: list[Any] = [None] * self.count
        dist.all_gather_object(ranks, dict(local))
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: [value for rank in ranks for value in rank.get(name, [])] for name in names}


def _sum_hook(bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])

"""Overrides of Hugging Face's `transformers.Trainer`, with which it trains on the steps of a trial.

Accumulation is exact for a loss that divides by the step's number of items, which the Trainer passes to it, for a mean over the
micro-batch's labels or samples, and for a sum of both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ..data.batches import leaves, to_device
from ..machine.accelerator import widest_float
from ..task import check_no_scheduler
from .coupled_loss import CoupledSteps
from .driven_loop import DrivenLoop, zero_gradients


class _Step:
    """One batch to the Trainer: all micro-batches of a step, each with its number of samples."""

    def __init__(self, micro_batches: list[tuple[int, Any]]) -> None:
        self.micro_batches = micro_batches


class _Steps:
    """The loader to the Trainer: one batch per step."""

    def __init__(self, driven: DrivenLoop, loader: Any) -> None:
        self.driven, self.dataset = driven, loader.dataset
        driven.source = loader
        self._steps = len(driven.plans) - driven.number

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        while self.driven.number < len(self.driven.plans) and not self.driven.diverged:
            yield from self.driven.batches()


class _ConstantRate(torch.optim.lr_scheduler.LRScheduler):
    """Leaves the rate unchanged: the study's schedule sets it, by samples seen rather than steps."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        for group in optimizer.param_groups:
            del group["initial_lr"]  # which would say that the user has a scheduler
        self._groups, self.optimizer = optimizer.param_groups, None  # type: ignore[assignment]  # for a census it is none

    def step(self, *_: Any, **others: Any) -> None:
        pass

    def get_last_lr(self) -> list[Any]:
        return [group["lr"] for group in self._groups]


class DrivenTrainer:
    """Overrides of a Trainer in a trial; mixed into the user's class, whose methods it calls."""

    driven: DrivenLoop
    user_denominator: Callable[[Any], Tensor | float] | None
    step_loss: Tensor  # the last step's mean loss
    counts_items: bool  # whether the Trainer passes the step's number of items to the loss
    _share: float | None = None  # of the micro-batch in its step, while it is trained
    # What the mean loss of the evaluated batch divides by, while it is evaluated.
    _evaluated_denominator: Tensor | None = None
    # Of the evaluation so far: summed loss and its denominator, (2,); None: no loss.
    _evaluation_sums: Tensor | None = None

    def get_train_dataloader(self) -> Any:
        return _Steps(self.driven, super().get_train_dataloader())  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *device: Any) -> Any:
        sizes = self.driven.plan.micro_batches()
        micro_batches, items = super().get_batch_samples(epoch_iterator, len(sizes), *device)  # type: ignore[misc]
        self.counts_items = items is not None
        return [_Step(list(zip(sizes, micro_batches, strict=True)))], items

    def number_of_items(self, batches: list[Any]) -> Any:
        """The number of items that the Trainer passes to the loss in a step with these micro-batches."""
        return super().get_batch_samples(iter(batches), len(batches), self.args.device)[1]  # type: ignore[misc, attr-defined]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = optimizer or self.optimizer  # type: ignore[attr-defined]
        check_no_scheduler("transformers.Trainer: the optimizer", optimizer)
        self.lr_scheduler = _ConstantRate(optimizer)
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: _Step, num_items_in_batch: Any = None) -> Tensor:
        micro_batches, inputs.micro_batches = inputs.micro_batches, []
        self.step_loss = self.accumulate_step(model, micro_batches, num_items_in_batch)
        return self.step_loss

    def _wide(self, count: Any) -> Tensor:
        """A count, a number or a tensor, on the device, in what it computes sums in."""
        return torch.as_tensor(count, device=self.driven.device).to(widest_float(self.driven.device))

    def accumulate_step(self, model: nn.Module, micro_batches: list[tuple[int, Any]], items: Any) -> Tensor:
        """Back-propagate a step's micro-batches, so that their gradients add up to that of the one large batch.

        The loss gets the micro-batch's share of `items`, the step's number of items, and is weighted by that share. So
        sum / items and a mean over the micro-batch both give the micro-batch's part of the step's loss.

        Args:
            micro_batches: pairs of samples and batch; taken out of the list, so that each is freed after its pass.

        Returns:
            The step's mean loss, detached.
        """
        if self.driven.coupled_loss is not None:
            return self._accumulate_coupled(model, micro_batches)
        counts = [float(self._batch_denominator(batch, samples)) for samples, batch in micro_batches]
        total = math.fsum(counts)
        loss = torch.zeros((), device=self.driven.device)
        for count in counts:
            _, batch = micro_batches.pop(0)
            if not count:
                continue  # its mean is 0/0, and NaN times a weight of 0 is NaN
            self._share = count / total
            part = items
            if items is not None and len(counts) > 1:
                dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
                part = (self._wide(items) * self._share).to(dtype)
            loss = loss + super().training_step(model, batch, part)  # type: ignore[misc]
        self._share = None
        if not total:
            zero_gradients(model.parameters())
        return loss

    def _accumulate_coupled(self, model: nn.Module, micro_batches: list[tuple[int, Any]]) -> Tensor:
        """The same for a loss over the step's embeddings."""
        model.train()
        waiting = [*micro_batches]
        micro_batches.clear()
        return self._coupled_steps.accumulate(waiting)

    @cached_property
    def _coupled_steps(self) -> CoupledSteps:
        trainer: Any = self
        return CoupledSteps(
            trainer.driven.coupled_loss,
            trainer.model_wrapped,
            trainer.driven.setup,
            scaler=getattr(trainer.accelerator, "scaler", None),
            autocast=trainer.compute_loss_context_manager,
            on_device=trainer._prepare_inputs,
        )

    def _batch_denominator(self, batch: Any, samples: int) -> Tensor | float:
        """What the mean loss of a batch divides by: the user's, its labels that count, or its samples if it has no labels."""
        if self.user_denominator is not None:
            count = float(self.user_denominator(to_device(batch, torch.device("cpu"))))
            if not (math.isfinite(count) and count >= 0):
                raise TaskError(
                    f"train_with: denominator: expected a number >= 0 that the batch's mean loss divides by, got {count}"
                )
            return count
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor):
            return samples
        if labels.is_floating_point():
            return labels.numel()  # values, of which none is ignored
        if "shift_labels" in batch:
            labels = batch["shift_labels"]
        elif self._shifts_labels:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    @cached_property
    def _shifts_labels(self) -> bool:
        """Whether the loss compares each position with the next label, so that the first label of a text does not count.

        The library's models do by the function that is looked for here. The Trainer itself goes by their names, by which
        GPT2LMHeadModel would not shift, and BartForCausalLM would.
        """
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        if hasattr(model, "get_base_model"):  # PEFT's
            model = model.get_base_model()
        forward: Any = inspect.unwrap(type(model).forward)
        if not forward.__module__.startswith("transformers."):
            return bool(getattr(self, "_loss_shifts_labels", False))
        shifts = (
            "loss_function" in forward.__code__.co_names and model.loss_function.__name__ == "ForCausalLMLoss"
        )
        return shifts and not getattr(model.config, "is_encoder_decoder", False)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        if self._evaluated_denominator is not None and more.get("num_items_in_batch") is not None:
            more["num_items_in_batch"] = self._evaluated_denominator
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **more)  # type: ignore[misc]
        if self._share is None:
            return result
        return (result[0] * self._share, *result[1:]) if return_outputs else result * self._share

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **more: Any) -> Any:
        """The Trainer's, with the mean loss of the whole set instead of a mean of the batches' means."""
        self._evaluation_sums = None
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **more)  # type: ignore[misc]
        if self._evaluation_sums is not None:
            total, count = self._evaluation_sums.tolist()
            name = f"{metric_key_prefix}_loss"
            if name not in output.metrics or self._passes_losses:  # otherwise it is one of `compute_metrics`
                output.metrics[name] = total / count if count else math.nan
        return output

    @property
    def _passes_losses(self) -> bool:
        """Whether `compute_metrics` gets the batches' losses; otherwise the Trainer sees none, and adds no mean of them."""
        return "loss" in self.args.include_for_metrics  # type: ignore[attr-defined]

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        if self.driven.coupled_loss is not None:
            return self._prediction_of_coupled(model, inputs, *args, **more)
        count = self._wide(self._batch_denominator(inputs, _samples_in(inputs)))
        self._evaluated_denominator = count
        loss, *others = super().prediction_step(model, inputs, *args, **more)  # type: ignore[misc]
        self._evaluated_denominator = None
        if loss is not None:
            # Where no label counts, the loss is 0/0.
            batch = torch.stack([torch.where(count > 0, loss.to(count.dtype) * count, 0.0), count])
            self._evaluation_sums = batch if self._evaluation_sums is None else self._evaluation_sums + batch
        return (loss if self._passes_losses else None, *others)

    def _prediction_of_coupled(self, model: nn.Module, inputs: Any, *args: Any, **more: Any) -> Any:
        """The same without a loss, which would be that of the evaluation batches; where nobody wants outputs, nothing runs."""
        if self.compute_metrics is None:  # type: ignore[attr-defined]
            return None, None, None
        return (None, *super().prediction_step(model, inputs, *args, **more)[1:])  # type: ignore[misc]

    def floating_point_ops(self, inputs: _Step) -> int:
        return 0  # only used in the Trainer's logs, and the micro-batches are freed by then


def _samples_in(batch: Any) -> int:
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)

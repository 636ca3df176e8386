"""Metrics over a whole data set: sums that add up over batches and ranks, and metrics that need the whole set at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..spaces.boundary.given import LARGEST, number_of, shown
from ..spaces.errors import TaskError
from .loading import user_code_location
from .task import Score, Task, checked_score, name_of, named_scores


class Evaluation:
    """The metrics of one evaluation, batch by batch.

    Totals of batches are added exactly, so the order of batches and devices does not matter.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._sums: dict[str, list[tuple[Any, Any]]] = {}
        self._functions: dict[str, Callable[[float], float] | None] = {}
        self._whole: dict[str, Any] = {}  # by name: a torchmetrics.Metric, or the arguments of each batch
        self._metrics: dict[str, Callable[..., Any]] = {}  # by name: the function of all arguments

    def add(self, scores: Any) -> None:
        """Add what the task's `score` returned for a batch.

        Raises:
            TaskError: it is no score.
        """
        for name, score in named_scores(self.task, scores).items():
            if isinstance(score, Score):
                score = checked_score(f"{name_of(self.task)}.score: {name}", score)
                self._sums.setdefault(name, []).append((score.total, score.denominator))
                self._functions[name] = score.of
            elif hasattr(score.metric, "merge_state"):
                if name not in self._whole:
                    self._whole[name] = copy.deepcopy(score.metric)  # a task may return the same one again
                    self._whole[name].reset()
                    self._whole[name].sync_on_compute = False  # ranks are merged below
                    self._whole[name].compute_with_cache = False  # merging does not clear it
                self._whole[name].to(_device_of(score.arguments)).update(*score.arguments)
            elif callable(score.metric):
                arguments = tree_map_only(Tensor, _on_cpu, tuple(score.arguments))
                self._whole.setdefault(name, []).append(arguments)
                self._metrics[name] = score.metric
            else:
                raise TaskError(
                    f"{name_of(self.task)}.score: {name}: expected WholeSet(metric, ...) with a torchmetrics.Metric or a "
                    f"function, got {type(score.metric).__name__}"
                )

    @property
    def sums(self) -> set[str]:
        """The names of the metrics that are ratios of sums."""
        return set(self._sums)

    def values(
        self, gather: Callable[[Mapping[str, list[Any]]], dict[str, list[Any]]] = dict
    ) -> dict[str, float]:
        """Every metric by name, NaN where it is undefined, as a mean over nothing is.

        Args:
            gather: concatenates the lists of all ranks by name.

        Raises:
            TaskError: a metric that is not one number, or cannot be concatenated over batches or merged over devices; an
                accuracy above 1.
        """
        # Read at the end: each read synchronises with the GPU.
        sums = {
            name: [(float(number_of(name, total)), float(number_of(name, count))) for total, count in pairs]
            for name, pairs in self._sums.items()
        }
        found = {}
        for name, pairs in gather(sums).items():
            value = _ratio(_fsum(total for total, _ in pairs), _fsum(count for _, count in pairs))
            # Rank 0, whose scores are reported, has the first batch; a rank without batches knows no function.
            if (of := self._functions.get(name)) is not None:
                value = _applied(of, value, f"{name_of(self.task)}.score: {name}: of")
            found[name] = value
        whole = {
            name: batches if isinstance(batches, list) else [copy.deepcopy(batches).cpu()]
            for name, batches in self._whole.items()
        }
        for name, parts in gather(whole).items():
            found[name] = self._of_whole_set(name, parts)
        if found.get("accuracy", 0.0) > 1 + 1e-6:
            raise TaskError(
                f"{name_of(self.task)}.score: expected an accuracy, correct answers over all answers, of at most 1, got "
                f"{found['accuracy']:.4g}. Check the shapes: (N, 1) == (N,) broadcasts to (N, N). A score that is no accuracy "
                "needs a name: {'val_loss': Score(...)}."
            )
        return found

    def _of_whole_set(self, name: str, parts: Sequence[Any]) -> float:
        """A metric of all batches: merged states, or a function of all arguments."""
        where = f"{name_of(self.task)}.score: {name}"
        if isinstance(parts[0], tuple):
            if name not in self._metrics:  # a rank without batches, whose result nobody reads
                return math.nan
            arguments = [_joined(where, values) for values in zip(*parts, strict=True)]
            try:
                value = self._metrics[name](*arguments)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}{user_code_location(error)}"
                raise TaskError(f"{where}: the metric failed: {failed}") from error
        else:
            first, *others = parts
            try:
                for other in others:
                    first.merge_state(other)
            except RuntimeError as error:
                raise TaskError(
                    f"{where}: expected a metric whose state can be merged over devices, got {type(first).__name__}. Write "
                    f"devices: {{per_trial: 1}}, or use a function of all outputs. Torchmetrics says: {error}"
                ) from error
            value = first.compute()
        try:
            return float(number_of(where, value))
        except TaskError:
            raise TaskError(
                f"{where}: expected a metric that is one number, got {shown(value)}. Average it over classes, or name each: "
                "{'precision': WholeSet(...), 'recall': WholeSet(...)}."
            ) from None


def _device_of(arguments: Iterable[Any]) -> torch.device:
    return next(
        (argument.device for argument in arguments if isinstance(argument, Tensor)), torch.device("cpu")
    )


def _on_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).cpu()


def _joined(where: str, values: Sequence[Any]) -> Any:
    """One argument of all batches: tensors concatenated, lists joined."""
    if isinstance(values[0], np.ndarray):
        return np.concatenate([np.atleast_1d(value) for value in values])
    if isinstance(values[0], Mapping):
        got = type(values[0]).__name__
        raise TaskError(
            f"{where}: expected arguments that are tensors, arrays or lists, got {got}. Pass its parts."
        )
    if not isinstance(values[0], Tensor):
        return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    try:
        return torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values])
    except RuntimeError:
        shapes = " and ".join(str(tuple(value.shape)) for value in values[:2])
        raise TaskError(
            f"{where}: expected arguments of all batches that can be concatenated, got shapes {shapes}. Pad them to "
            "one shape, or pass lists with one tensor per sample."
        ) from None


def _ratio(total: float, denominator: float) -> float:
    return total / denominator if denominator else math.nan


def _applied(of: Callable[[float], float], value: float, where: str) -> float:
    """The function's value; `LARGEST` where that of a finite mean is beyond, as `math.exp` is above 230: a large loss is one,
    and not a training that diverged.
    """
    try:
        found = float(number_of(where, of(value)))
    except OverflowError:
        found = math.inf
    return (
        math.copysign(min(abs(found), LARGEST), found)
        if math.isfinite(value) and not math.isnan(found)
        else found
    )


def _fsum(numbers: Iterable[float]) -> float:
    """The exact sum; non-finite values propagate instead of raising."""
    values = list(numbers)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)

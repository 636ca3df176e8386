"""How often each training sample is drawn: `Data(weights=...)`, or as a loader of the user's own does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from ...spaces.errors import TaskError


def balanced(labels: Sequence[int] | Sequence[str] | np.ndarray | Tensor) -> np.ndarray:
    """Weights for `Data(weights=...)` by which every class is drawn equally often: 1 / the number of samples of its class.

    Args:
        labels: the class of each training sample, (n,): integers or strings.

    Returns:
        (n,) float64; those of each class sum to 1.

    Raises:
        TaskError: labels that are not classes.

    >>> balanced(["cat", "dog", "cat", "cat", "cat"]).tolist()
    [0.25, 1.0, 0.25, 0.25, 0.25]
    """
    where = "balanced: labels"
    try:
        array = _array(labels)
    except ValueError:
        raise TaskError(
            f"{where}: expected one for each training sample, got a {type(labels).__name__} of sequences"
        ) from None
    if array.ndim != 1 or not len(array):
        raise TaskError(
            f"{where}: expected one for each training sample, got shape {array.shape}. Of one-hot labels, write "
            "labels.argmax(1)."
        )
    # NumPy has turned integers beside strings into strings, so that the labels themselves are asked.
    if array.dtype.kind not in "biu" and not all(isinstance(label, str) for label in labels):
        kinds = sorted({type(label).__name__ for label in labels})
        raise TaskError(f"{where}: expected integers or strings, got {' and '.join(kinds)}")
    _, place, counts = np.unique(array, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / counts[place])


def checked_weights(where: str, weights: Any, samples: int) -> np.ndarray:
    """The weights of the training samples, (samples,) float64, a copy.

    Args:
        where: names the weights, for messages.

    Raises:
        TaskError: they are no weights of these samples.
    """
    try:
        array = np.array(_array(weights), dtype=np.float64)
    except (TypeError, ValueError):
        got = type(weights).__name__
        raise TaskError(
            f"{where}: expected one number for each of the {samples} training samples, got {got}"
        ) from None
    if array.shape != (samples,):
        got = f"shape {array.shape}" if array.ndim != 1 else str(len(array))
        raise TaskError(
            f"{where}: expected one for each of the {samples} training samples, got {got}. Of weights by class, write "
            "class_weights[labels]."
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise TaskError(f"{where}: expected finite numbers >= 0, got {array[wrong[0]]} at index {wrong[0]}")
    if not array.any():
        raise TaskError(f"{where}: expected at least one above 0, got {samples} zeros")
    return array


# The random sampler that accelerate puts in the place of torch's.
_ACCELERATES_SAMPLER = "accelerate.data_loader", "SeedableRandomSampler"


def loader_order(where: str, loader: Any) -> tuple[np.ndarray | None, bool]:
    """The weights by which a training loader's sampler draws, (samples,) float64, or None; and whether it shuffles.

    Raises:
        TaskError: a sampler of the user's own, or weights that are none.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batch_sampler, "sampler", None)
    size, kind = len(loader.dataset) if hasattr(loader.dataset, "__len__") else -1, type(sampler)
    random = kind is RandomSampler or (kind.__module__, kind.__qualname__) == _ACCELERATES_SAMPLER
    weighted = kind is WeightedRandomSampler
    if batch_sampler is None:
        got = "batch_size=None"
    elif type(batch_sampler).__iter__ is not BatchSampler.__iter__:
        got = f"batch_sampler {type(batch_sampler).__name__}"
    elif not (random or weighted or kind is SequentialSampler):
        got = f"sampler {kind.__name__}"
    elif len(sampler) != size:
        got = f"{kind.__name__} with num_samples={len(sampler)} for a dataset of {size}"
    elif not weighted and len(sampler.data_source) != size:
        got = f"{kind.__name__} over {len(sampler.data_source)} samples for a dataset of {size}"
    elif not weighted:
        return np.ones(size) if random and sampler.replacement else None, random
    else:
        weights = checked_weights(f"{where}: WeightedRandomSampler: weights", sampler.weights, size)
        if sampler.replacement:
            return weights, True
        if weights.min() == weights.max():
            return None, True
        got = "WeightedRandomSampler(replacement=False) with unequal weights"
    raise TaskError(
        f"{where}: expected a training loader with torch's RandomSampler, SequentialSampler or WeightedRandomSampler, "
        f"because a trial draws as many samples an epoch as there are, in its own order; got {got}. Remove it, or "
        "pass sampler=WeightedRandomSampler(weights, len(weights))."
    )


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # NumPy has no bfloat16
    return np.asarray(values)

"""How often each training sample is drawn: `Data(weights=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

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
        raise TaskError(f"{where}: expected one for each training sample, got a {type(labels).__name__} of sequences") from None
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
        raise TaskError(f"{where}: expected one number for each of the {samples} training samples, got {got}") from None
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


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values  # NumPy has no bfloat16
    return np.asarray(values)

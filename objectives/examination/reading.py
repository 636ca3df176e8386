"""How samples are read: alike when read twice, and mixed at random or not when they are collated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...spaces.laws.examination import Finding
from ..batches import Fetcher, SampleKeys, leaves, with_tensors
from .fixed_noise import seed_draws
from .step import Indices

# Samples that are read twice.
_REREAD = 4


def subset_fetcher(fetcher: Fetcher, keys: SampleKeys) -> Callable[[Indices], Any]:
    """A function that fetches some of the samples. Where reading or collating them is random, parts are slices of one batch."""
    whole = fetcher.fetch(keys)
    if differ(whole, fetcher.fetch(keys)) or _draws_while_collating(fetcher, keys):
        return lambda index: _sliced(whole, index, len(keys))
    return lambda index: fetcher.fetch(replace(keys, index=keys.index[index], epoch=keys.epoch[index]))


def reading_findings(train: Fetcher, keys: SampleKeys, validation: Fetcher, where: Callable[[str], str]) -> Iterator[Finding]:
    """Samples that differ when they are read again.

    Args:
        keys: of training samples.
        where: names the data of a split.
    """
    keys = replace(keys, index=keys.index[:_REREAD], epoch=keys.epoch[:_REREAD])
    if not train.indexed and differ(train.fetch(keys), train.fetch(keys)):
        yield Finding(
            "generator",
            where("training data"),
            "expected the same sample for the same seed, epoch and index, got another on the second read: the data have their "
            "own random generator, so results would depend on loader workers and on resuming. Draw from torch, np.random or "
            "Python's random, which are seeded for each sample.",
        )
    if _draws_while_collating(train, keys):
        text = "collating draws random numbers anew for each micro-batch; the comparison of the step holds them fixed"
        yield Finding("random", where("training data"), text)
    if validation.indexed:
        return
    index = np.arange(min(_REREAD, len(validation.dataset)))  # type: ignore[arg-type]
    first, again = (SampleKeys(index, np.zeros_like(index), seed) for seed in (1, 2))
    if differ(validation.fetch(first), validation.fetch(again)):
        advice = (
            "Data.collate draws random numbers: pass it as train_collate=, for training alone."
            if _draws_while_collating(validation, first)
            else "Leave out random transforms there."
        )
        message = f"samples change when they are read again with another seed, as in another trial. {advice}"
        yield Finding("unstable_validation", where("validation data"), message)


def differ(one: Any, other: Any) -> bool:
    """Whether two batches certainly differ."""
    first, second = list(leaves(one)), list(leaves(other))
    return len(first) != len(second) or any(map(_certainly_unequal, first, second))


def _draws_while_collating(fetcher: Fetcher, keys: SampleKeys) -> bool:
    """Whether collating the same samples depends on the random state."""
    if fetcher.indexed:
        return False
    samples = [fetcher.dataset[index] for index in keys.index[:_REREAD].tolist()]
    collated = []
    for seed in (1, 2):
        seed_draws(seed)
        collated.append(fetcher.collate(copy.deepcopy(samples)))
    return differ(*collated)


def _sliced(batch: Any, index: Indices, samples: int) -> Any:
    """Some samples of a collated batch: of tensors with a row for each; anything else belongs to all samples."""
    chosen = torch.from_numpy(index)

    def rows(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() > 0 and len(tensor) == samples
        return tensor.index_select(0, chosen.to(tensor.device)) if has_rows else tensor

    return with_tensors(batch, rows)


def _certainly_unequal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or not torch.equal(*(torch.nan_to_num(tensor.to_dense()) for tensor in (one, other)))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape != other.shape or not np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, int | float | str | bytes) and isinstance(other, int | float | str | bytes):
        return one != other and not (one != one and other != other)
    return False

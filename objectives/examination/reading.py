"""How samples are read: alike when read twice, and mixed at random or not when they are collated."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from ...spaces.laws.examination import Finding
from ..data.batches import Fetcher, SampleKeys, leaves, with_tensors
from ..data.stream import FirstSamples
from .fixed_noise import seed_draws
from .step import Indices

# Samples that are read twice.
_REREAD = 4
# Samples to choose from.
POOL = 512
# Seconds that reading them may take.
_READING_S = 0.5


def varied(fetcher: Fetcher, keys: SampleKeys, count: int) -> SampleKeys:
    """Some of the samples, of as many kinds as there are: of labels, lengths and numbers of ignored places; else the first."""
    kinds: dict[Any, list[int]] = {}
    # Drawn by weights, a sample may come several times: the others tell more.
    _, first = np.unique(keys.index, return_index=True)
    if len(first) >= count:
        first.sort()
        keys = replace(keys, index=keys.index[first], epoch=keys.epoch[first])
    if fetcher.indexed and not isinstance(fetcher.dataset, TensorDataset | Subset):
        kinds[None] = list(range(len(keys)))
    else:
        started = time.perf_counter()
        for place, index in enumerate(keys.index.tolist()):
            if place >= count and time.perf_counter() - started > _READING_S:
                break
            kinds.setdefault(_kind_of(fetcher.dataset[index]), []).append(place)
    # Round by round one of each kind, kinds in the order in which they were met.
    rounds = zip_longest(*kinds.values())
    chosen = [place for each in rounds for place in each if place is not None][:count]
    return replace(keys, index=keys.index[chosen], epoch=keys.epoch[chosen])


def _kind_of(sample: Any) -> tuple[Any, ...]:
    """What tells kinds of samples apart without looking at their content."""
    kind: list[Any] = []
    for leaf in leaves(sample):
        if isinstance(leaf, np.ndarray | np.generic):
            leaf = torch.as_tensor(leaf) if leaf.dtype.kind in "biuf" else None
        if isinstance(leaf, bool | int):
            kind.append(leaf)
        elif isinstance(leaf, Tensor) and not leaf.is_nested:
            whole_number = leaf.dim() == 0 and not leaf.is_floating_point()
            kind.append(int(leaf) if whole_number else (tuple(leaf.shape), _ignored(leaf)))
    return tuple(kind)


def _ignored(tensor: Tensor) -> int:
    return 0 if tensor.is_floating_point() or tensor.is_complex() else int((tensor == -100).sum())


def subset_fetchers(
    fetcher: Fetcher, keys: SampleKeys, prepare: Callable[[Any], Any]
) -> tuple[Callable[[Indices], Any], Callable[[Indices], Any] | None]:
    """Two functions that return the batch of some of the samples: one collates them, the other slices one batch of them all.

    The second is None where reading and collating draw no random numbers. Before collating, generators are seeded alike.

    Args:
        prepare: what is done to each batch, such as moving it to a device.
    """
    seeded = copy.copy(fetcher)
    seeded.collate = partial(_collated_alike, fetcher.collate)

    def collated(index: Indices) -> Any:
        return seeded.fetch(replace(keys, index=keys.index[index], epoch=keys.epoch[index]))

    def fetch(index: Indices) -> Any:
        return prepare(collated(index))

    everything = np.arange(len(keys))
    if fetcher.indexed or not (
        differ(collated(everything), collated(everything)) or _draws_while_collating(fetcher, keys)
    ):
        return fetch, None
    whole = collated(everything)
    if not any(_has_rows(leaf, len(keys)) for leaf in _outer_leaves(whole, len(keys))):
        return fetch, None
    return fetch, lambda index: prepare(_sliced(whole, index, len(keys)))


def _collated_alike(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    seed_draws(0)
    return collate(samples)


def reading_findings(
    train: Fetcher, keys: SampleKeys, validation: Fetcher, where: Callable[[str], str]
) -> Iterator[Finding]:
    """Samples that differ when they are read again.

    Args:
        keys: of training samples.
        where: names the data of a split.
    """
    keys, reread = _few(keys), _read_again(train)
    if not train.indexed and differ(train.fetch(keys), reread.fetch(keys)):
        what = "position in the stream" if isinstance(train.dataset, FirstSamples) else "index"
        seeded = "each pass" if what.startswith("position") else "each sample"
        yield Finding(
            "generator",
            where("training data"),
            f"expected the same sample for the same seed, epoch and {what}, got another on the second read: the data have "
            "their own random generator, so results would depend on loader workers and on resuming. Draw from torch, np.random "
            f"or Python's random, which are seeded for {seeded}.",
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


def data_of_model(train: Fetcher, keys: SampleKeys, model: nn.Module, where: str) -> Iterator[Finding]:
    """Training data made by the model that is being trained, or by a copy of it, which its hooks go with."""
    called: list[str] = []

    def note(module: nn.Module, _: Any) -> None:
        called.append(type(module).__name__)

    learning = [module for module in model.modules() if any(one.requires_grad for one in module.parameters())]
    hooks = [module.register_forward_pre_hook(note) for module in learning]
    try:
        _read_again(train).fetch(_few(keys))
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        message = (
            f"expected data that do not depend on the weights, got some that a {called[0]} of the model makes: samples are "
            "read ahead, and a stream from a copy, so they would come from earlier weights. Give a Loop what they are made "
            "from, such as seeds or prompts, as data, and make them in its body."
        )
        yield Finding("made_by_model", where, message)


def _few(keys: SampleKeys) -> SampleKeys:
    return replace(keys, index=keys.index[:_REREAD], epoch=keys.epoch[:_REREAD])


def _read_again(fetcher: Fetcher) -> Fetcher:
    """One that reads a stream once more."""
    again = copy.copy(fetcher)
    if isinstance(fetcher.dataset, FirstSamples):
        again.dataset = fetcher.dataset.read_again()
    return again


def differ(batch: Any, other: Any) -> bool:
    """Whether two batches certainly differ."""
    first, second = list(leaves(batch)), list(leaves(other))
    return len(first) != len(second) or any(map(_certainly_unequal, first, second))


def _draws_while_collating(fetcher: Fetcher, keys: SampleKeys) -> bool:
    """Whether collating the same samples depends on the random state."""
    if fetcher.indexed:
        return False
    collated = []
    for seed in (1, 2):
        seed_draws(0)
        # Collating may change them.
        samples = [fetcher.dataset[index] for index in keys.index[:_REREAD].tolist()]
        seed_draws(seed)
        collated.append(fetcher.collate(samples))
    return differ(*collated)


def _sliced(batch: Any, index: Indices, samples: int) -> Any:
    """Some samples of a collated batch: of what has a row for each; anything else belongs to all samples."""
    if isinstance(batch, list) and len(batch) == samples:
        return [batch[place] for place in index]
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(_sliced(part, index, samples) for part in batch)
    if isinstance(batch, dict):
        return {key: _sliced(value, index, samples) for key, value in batch.items()}
    if isinstance(batch, np.ndarray):
        return batch[index] if _has_rows(batch, samples) else batch
    chosen = torch.from_numpy(index)
    return with_tensors(
        batch,
        lambda tensor: (
            tensor.index_select(0, chosen.to(tensor.device)) if _has_rows(tensor, samples) else tensor
        ),
    )


def _outer_leaves(batch: Any, samples: int) -> Iterator[Any]:
    """The leaves of a batch, and lists with an element for each sample as a whole."""
    if isinstance(batch, list) and len(batch) == samples:
        yield np.empty(samples)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _outer_leaves(part, samples)
    else:
        yield from leaves(batch)


def _has_rows(leaf: Any, samples: int) -> bool:
    """Whether a leaf of a batch has a row for each sample."""
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and len(leaf) == samples


def _certainly_unequal(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        if leaf.is_nested or other.is_nested:
            return False  # their shapes are symbols, which always differ
        return leaf.shape != other.shape or not torch.equal(
            *(torch.nan_to_num(tensor.to_dense()) for tensor in (leaf, other))
        )
    if isinstance(leaf, np.ndarray) and isinstance(other, np.ndarray):
        return leaf.shape != other.shape or not np.array_equal(leaf, other, equal_nan=leaf.dtype.kind == "f")
    if isinstance(leaf, int | float | str | bytes) and isinstance(other, int | float | str | bytes):
        return leaf != other and not (leaf != leaf and other != other)
    return False

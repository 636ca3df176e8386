"""How a family of models keeps the documents of a packed row apart, and the mask of each of its layers where it can."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# By this name `transformers` knows torch's attention with the masks below.
KERNEL = "bsearch_sdpa"
# Layers that see earlier tokens through a mask alone; others carry a state from one token to the next.
_MASKED = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Layers with learned or compressed sparse attention, which choose their keys themselves.
_CHOOSING = frozenset({"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"})
# Document index of each token in the current batch of rows, (n, length); None: rows are not divided.
_segments: ContextVar[Tensor | None] = ContextVar("segments", default=None)


@dataclass(frozen=True, slots=True)
class Family:
    """What models of a configuration do with packed rows.

    Args:
        kernel: the attention that they are given, `KERNEL` or their own, "eager".
        reason: why documents are not packed by default; empty: they are.
        leaks: whether documents of a row would mix, so that `packing: true` is refused.
    """

    kernel: str
    reason: str = ""
    leaks: bool = False


def family_of(transformers: Any, config: Any) -> Family:
    """What is known of a configuration's models without their weights; `CausalLM.examine` measures the rest."""
    unmasked = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ()) - _MASKED
    kernel = "eager" if unmasked & _CHOOSING else KERNEL
    try:
        model = _described(transformers, config, kernel)
    except Exception:  # its attention is its own: soft-capped, with sinks, or by other means
        kernel = "eager"
        try:
            model = _described(transformers, config, kernel)
        except Exception as error:  # of its own code, which may need weights
            return Family(
                kernel,
                f"{config.model_type} cannot be described without its weights ({type(error).__name__})",
            )
    name = type(model).__name__
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if unmasked or getattr(type(model), "_is_stateful", False):
        reason = f"{name} has layers ({', '.join(sorted(unmasked)) or 'recurrent'}) that see earlier documents of a row"
    elif not takes_positions:
        reason = f"{name} takes no position_ids, so positions cannot restart at each document"
    elif kernel == "eager":
        return Family(
            kernel, f"{name} has an attention of its own, which is not known to keep documents apart"
        )
    else:
        return Family(kernel)
    return Family(kernel, reason, leaks=True)


def _described(transformers: Any, config: Any, kernel: str) -> Any:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel)


def register(transformers: Any) -> None:
    """Make `KERNEL` known to `transformers`: torch's attention, with masks that follow from the rows' shape alone.

    The library's own masks depend on the tokens' positions and on whether a step is traced: a trace would take another kernel
    than the step that it stands for.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register(KERNEL, sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(KERNEL, _mask)


@contextmanager
def documents(segments: Tensor | None) -> Iterator[None]:
    """Context in which attention stays within the documents of a batch of rows."""
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)


def _within(segments: Tensor) -> Callable[..., Tensor]:
    def same_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return segments[row, query] == segments[row, key]

    return same_document


def _mask(
    *,
    mask_function: Any,
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **rest: Any,
) -> Tensor | None:
    """A layer's own mask, such as a sliding window's, within documents; None: causal, which the kernel does by itself."""
    from transformers import masking_utils

    masks: Any = masking_utils
    segments = _segments.get()
    if segments is not None:
        mask_function = masks.and_masks(mask_function, _within(segments))
    else:
        plain = not (use_vmap or attention_mask is not None or "allow_is_bidirectional_skip" in rest)
        if plain and (local_size is None or kv_length <= local_size):
            return None
    mask: Tensor | None = masks.sdpa_mask(
        mask_function=mask_function,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **{**rest, "allow_is_causal_skip": False},
    )
    return mask


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Context in which a model, also under adapters, computes with the eager attention of `transformers`."""
    whole: Any = model
    inner = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    before = inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    try:
        yield
    finally:
        inner.set_attn_implementation(before)

"""Families of language models: a row is trained as its documents are alone, by the model's own attention, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason=".[language] is not installed")
import transformers
from bsearch.objectives.language.attention import KERNEL, documents, family_of, register
from bsearch.objectives.language.comparison import logits_of
from bsearch.objectives.language.packing import IGNORED
from objectives.families import WINDOW, model_of, rows, tiny, tried
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# With sliding windows, chunks, latent attention, experts, and plain.
PACKED = [
    "llama",
    "gpt2",
    "mistral",
    "qwen2",
    "gemma3_text",
    "olmo3",
    "phi3",
    "llama4_text",
    "deepseek_v3",
    "gemma3n_text",
]
# With convolutions, recurrence, caps, sinks, ALiBi, and positions over the row.
ALONE = ["lfm2", "qwen3_next", "mamba", "gemma2", "gpt_oss", "bloom", "falcon", "bart"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    register(transformers)
    yield
    transformers.utils.logging.set_verbosity_warning()


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_row_is_its_documents_alone(kind: str) -> None:
    found = tried(kind)
    assert found.verdict == "packed", found.why
    assert found.off < 2e-5


@pytest.mark.parametrize("kind", ALONE)
def test_a_family_that_would_mix_documents_gets_one_a_row(kind: str) -> None:
    found = tried(kind)
    assert found.verdict == "one document a row", found.why
    assert found.off < 2e-5


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "mamba", "bart"])
def test_packing_such_a_family_would_be_seen(kind: str) -> None:
    assert tried(kind, packed=True).off > 1e-3


@pytest.mark.parametrize("kind", ["gemma2", "vaultgemma", "granite_swa"])
def test_a_family_with_an_attention_of_its_own_may_be_packed_where_it_is_found_exact(kind: str) -> None:
    assert tried(kind, packed=True).off < 2e-5


def test_a_model_that_is_not_causal_is_seen() -> None:
    assert tried("bert").ahead > 1e-3


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama4_text"])
def test_a_window_is_kept_within_documents(kind: str) -> None:
    """Against the slow twin: the loss of each document alone, with the mask that the configuration describes."""
    config = tiny(kind)
    model = model_of(config, family_of(transformers, config).kernel).eval()
    made = rows(alone=False)
    with torch.no_grad():
        packed = loss_of(logits_of(model, made.tokens, made.segments), made.labels)
        unlimited = model_of(without_windows(config), KERNEL).eval()
        with documents(made.segments):
            dropped = loss_of(logits_of(unlimited, made.tokens, made.segments), made.labels)
        model.set_attn_implementation("eager")
        alone = 0.0
        for tokens, labels, segments in zip(made.tokens, made.labels, made.segments, strict=True):
            begins = [0, *(segments.diff().nonzero().flatten() + 1).tolist(), len(segments)]
            assert max(end - begin for begin, end in pairwise(begins)) > WINDOW
            for begin, end in pairwise(begins):
                alone += loss_of(
                    model(input_ids=tokens[None, begin:end].long()).logits, labels[None, begin:end]
                )
    assert packed == pytest.approx(alone, rel=1e-6)
    assert abs(dropped / alone - 1) > 1e-3


def without_windows(config: Any) -> Any:
    return type(config)(**{**config.to_dict(), "sliding_window": 4096, "attention_chunk_size": 4096})


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float(
        F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED, reduction="sum")
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_is_exact_or_refused(kind: str) -> None:
    found = tried(kind)
    if found.family is None:
        pytest.skip(found.why)
    if found.verdict != "refused":
        assert found.off < 2e-5
        assert found.ahead < 2e-5


def test_a_mask_beyond_the_causal_one_is_the_librarys() -> None:
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    def near(row: Any, head: Any, query: Any, key: Any) -> Any:
        return query - key < WINDOW

    padded = torch.arange(9).expand(2, 9) < torch.tensor([[9], [5]])
    for create, attention_mask, how in (
        (create_causal_mask, None, {"cache": None, "and_mask_function": near}),
        (create_causal_mask, padded, {"cache": None}),
        (create_bidirectional_mask, None, {"allow_is_bidirectional_skip": False}),
    ):
        masks = []
        for kernel in (KERNEL, "sdpa"):
            config = tiny("llama")
            config._attn_implementation = kernel
            masks.append(create(config, torch.zeros(2, 9, 32), attention_mask, **how))
        assert torch.equal(*masks)


def test_masks_do_not_depend_on_what_is_in_the_rows() -> None:
    """A trace has to take the kernel of the step that it stands for."""
    config = tiny("mistral")
    config._attn_implementation = KERNEL
    made = rows(alone=False)
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    embedded = torch.zeros(*made.tokens.shape, 32)
    for create, undivided in ((create_causal_mask, None), (create_sliding_window_causal_mask, 2)):
        for segments in (made.segments, torch.zeros_like(made.segments)):
            with documents(segments):
                assert create(config, embedded, None, None).shape == (
                    len(segments),
                    1,
                    *made.tokens.shape[1:] * 2,
                )
        mask = create(config, embedded, None, None)
        assert (None if mask is None else mask.dim() // 2) == undivided

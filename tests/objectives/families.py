"""Every family of causal language models that `transformers` has, as a model of some thousand weights.

python -m objectives.families         # in tests/: the table of docs/finetuning.md
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bsearch.objectives.language.attention import Family, family_of, register
from bsearch.objectives.language.comparison import compared
from bsearch.objectives.language.packing import Document, Rows, pack
from bsearch.objectives.task import Data
from torch.utils.data import TensorDataset
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LENGTH, WINDOW = 99, 48, 5
# A model of more weights is not made.
_LARGEST = 20_000_000
# Sizes by the names that families have for them; where a configuration has none of a name, it is left out.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "lru_width", "embedding_size"), 32
    ),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 32),
    **dict.fromkeys(
        (
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            "dim_ff",
            "d_ff",
            "mlp_ffn_hidden_size",
        ),
        48,
    ),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(
        ("encoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "d_kv", "head_size", "global_head_dim", "linear_key_head_dim"), 8
    ),
    **dict.fromkeys(("linear_value_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16
    ),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_window", "window_size"), WINDOW),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(
        (
            "rotary_dim",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "time_step_rank",
            "conv_kernel",
            "adapter_size",
        ),
        4,
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(
        ("mamba_n_groups", "n_groups", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
        1,
    ),
    **dict.fromkeys(("num_global_layers", "num_mem_blocks", "num_memory_blocks"), 1),
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
    ),
    **dict.fromkeys(
        ("activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0
    ),
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "qk_head_dim": 8,
        "hidden_size_per_layer_input": 8,
    },
}
# Where these are not set by default, they stay so.
_OPTIONAL = ("head_dim", "sliding_window", "attention_chunk_size", "n_inner", "q_lora_rank")
# What some families need beside.
_ALSO: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "gemma3_text": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma2": {"layer_types": ["full_attention", "sliding_attention"]},
    "cohere2": {"layer_types": ["full_attention", "sliding_attention"]},
    "olmo3": {"layer_types": ["full_attention", "sliding_attention"]},
    "llama4_text": {"layer_types": ["full_attention", "chunked_attention"]},
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "gemma3n_text": {"layer_types": ["full_attention", "sliding_attention"], "num_kv_shared_layers": 0},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "falcon_h1": {"mamba_d_ssm": 64},
    "zamba": {"layer_types": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
}


def tiny(kind: str) -> Any:
    """A small configuration, of the part that makes text."""
    config = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    config.allow_global_per_layer_attribute_access = True
    names = (
        set(inspect.signature(type(config).__init__).parameters)
        | set(vars(config))
        | set(type(config).attribute_map)
    )
    sizes = {
        name: size
        for name, size in _SMALL.items()
        if name in names and not (name in _OPTIONAL and getattr(config, name, None) is None)
    }
    # Latent attention: rotary positions turn a part of each head, and none share keys.
    if "qk_rope_head_dim" in names:
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": sizes["qk_rope_head_dim"]}
    return type(config)(**{**sizes, **_ALSO.get(kind, {})})


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a family.

    Args:
        off, ahead: as `CausalLM.examine` measures them, packed as by default.
    """

    kind: str
    family: Family | None = None
    off: float = 0.0
    ahead: float = 0.0
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.family is None:
            return "not tried"
        if self.ahead > 1e-4 or self.off > 1e-4:
            return "refused"
        return "one document a row" if self.family.reason else "packed"


def rows(*, alone: bool) -> Rows:
    generator = torch.Generator().manual_seed(0)
    lengths = (13, 20, 9)
    return pack(
        [Document(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths],
        LENGTH,
        alone=alone,
    )


def as_data(made: Rows) -> Data:
    data = TensorDataset(made.tokens, made.labels, made.segments)
    return Data(data, data, lengths=made.lengths)


def model_of(config: Any, kernel: str) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).float()
    with torch.no_grad():
        for parameter in model.parameters():  # some begin with zeros, behind which nothing shows
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tried(kind: str, *, packed: bool | None = None) -> Tried:
    try:
        config = tiny(kind)
        with torch.device("meta"):
            weights = sum(
                one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters()
            )
        if weights > _LARGEST:
            return Tried(kind, why=f"the smallest has {weights / 1e6:.0f} M weights")
        family = family_of(transformers, config)
        packs = not family.reason if packed is None else packed
        model = model_of(config, family.kernel)
        off, ahead = compared(model, as_data(rows(alone=not packs)), divided=packs)
    except Exception as error:
        return Tried(kind, why=f"no small configuration: {type(error).__name__}")
    why = family.reason
    if ahead > 1e-4:
        why = f"not causal by default (logits change by {ahead:.1g} with later tokens)"
    elif off > 1e-4:
        why = f"logits differ by {off:.1g}"
    return Tried(kind, family, off, ahead, why)


def all_tried() -> Iterator[Tried]:
    transformers.utils.logging.set_verbosity_error()
    register(transformers)
    torch.set_num_threads(1)
    yield from map(tried, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def table(found: list[Tried]) -> str:
    """One row for each verdict and reason."""
    lines = [f"With transformers {transformers.__version__}:", "", "| rows | families |", "|---|---|"]
    for verdict in ("packed", "one document a row", "refused", "not tried"):
        members = [one for one in found if one.verdict == verdict]
        names = ", ".join(f"`{one.kind}`" for one in members)
        worst = max((one.off for one in members), default=0.0)
        off = f" (at most {worst:.0e} off)" if verdict in ("packed", "one document a row") else ""
        lines.append(f"| **{verdict}**, {len(members)}{off} | {names} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    everything = list(all_tried())
    for one in everything:
        if one.verdict != "packed":
            print(
                f"{one.kind:<28}{one.verdict:<20}{one.off:<9.1g}{one.ahead:<9.1g}{one.why}", file=sys.stderr
            )
    page = Path(__file__).parents[2] / "docs" / "finetuning.md"
    begin, end = "<!-- families -->\n", "<!-- /families -->\n"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + table(everything) + end + rest.partition(end)[2])

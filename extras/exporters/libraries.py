"""The libraries that fine-tune language models: their keys for our settings, which exports write and `port` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...search.report.frameworks.library import TRAINER, Library, Name, Setting, is_on, names, switch


def _flag(key: str, value: Any) -> Name:
    """A key that is true for one value of a setting."""
    return Name(key, lambda ours: ours == value or None, lambda on: value if is_on(on) else None)


def _layers(value: Any) -> list[str]:
    """Names of layers, from a list or from text with commas; none for a word that stands for all linear layers."""
    found = [str(name).strip() for name in (value if isinstance(value, list) else str(value).split(","))]
    return [name for name in found if name not in ("", "all", "all-linear")]


_LAYERS = Name("lora_target_modules", lambda layers: layers or None, _layers)
_TRAINED = (Name("lora_modules_to_save", lambda layers: layers or None, _layers),)
_BITS = _flag("load_in_4bit", 4), _flag("load_in_8bit", 8)
_WITH_ADAPTERS: Mapping[Setting, tuple[Name, ...]] = {
    **TRAINER.table,
    "model": names("model_name_or_path", "model_name", "model_id"),
    "length": names("max_length", "max_seq_length", "model_max_length", "block_size"),
    "packing": switch("packing"),
    "adapter": (_flag("use_peft", "lora"),),
    "rank": names("lora_r"),
    "targets": (_LAYERS,),
    "trained": _TRAINED,
    "variant": (_flag("use_dora", "dora"), replace(_flag("use_rslora", "rslora"), read=None)),
    "bits": _BITS,
}

TRL = replace(TRAINER, table={**_WITH_ADAPTERS, "dtype": names("dtype", "torch_dtype")})
AXOLOTL = Library(
    "Axolotl 0.19",
    {
        **_WITH_ADAPTERS,
        "model": names("base_model"),
        "length": names("sequence_len"),
        "micro_batch": names("micro_batch_size"),
        "total_batch": names("batch_size"),
        "optimizer": names("optimizer"),
        "schedule": (Name("lr_scheduler", read=None),),
        "dtype": names("torch_dtype"),
        "packing": switch("sample_packing"),
        "adapter": (Name("adapter", lambda kind: kind or None, lambda kind: kind if kind in ("lora", "qlora") else ""),),
        "targets": (_LAYERS, Name("lora_target_linear", lambda layers: not layers or None, None)),
        "variant": (_flag("peft_use_dora", "dora"), replace(_flag("peft_use_rslora", "rslora"), read=None)),
        "bits": (*_BITS[:1], Name("adapter", None, lambda kind: 4 if kind == "qlora" else None), *_BITS[1:]),
    },
    {"micro_batch": 1},
    whole_mean=False,
    half_weights="always",
)
LLAMA_FACTORY = Library(
    "LLaMA-Factory 0.9",
    {
        **_WITH_ADAPTERS,
        "length": names("cutoff_len"),
        "pure_bf16": switch("pure_bf16"),
        "checkpointing": (Name("disable_gradient_checkpointing", lambda on: not on, lambda off: not is_on(off)),),
        "packing": (Name("packing", None, is_on), *switch("neat_packing")),
        "adapter": (
            Name("finetuning_type", lambda kind: "lora" if kind else "full", lambda kind: "lora" if kind == "lora" else ""),
        ),
        "rank": names("lora_rank"),
        "targets": (Name("lora_target", lambda layers: ",".join(layers) or "all", _layers),),
        "trained": (Name("additional_target", lambda layers: ",".join(layers) or None, _layers),),
        "bits": (Name("quantization_bit", lambda bits: bits or None),),
    },
    {"micro_batch": 8, "checkpointing": True, "adapter": "lora"},
    half_weights="with adapters",
)
# The arguments of `LoraConfig`, which are only written.
PEFT = Library(
    "PEFT",
    {
        "rank": names("r"),
        "targets": (Name("target_modules", lambda layers: layers or "all-linear"),),
        "trained": (Name("modules_to_save", lambda layers: layers or None),),
        "variant": _WITH_ADAPTERS["variant"],
    },
)

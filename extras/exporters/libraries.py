"""The libraries that fine-tune language models: their keys for our settings."""

from __future__ import annotations

from typing import Any

from ...search.report.frameworks.library import TRAINER, Library, Name


def _flag(key: str, value: Any) -> Name:
    """A key that is true for one value of a setting."""
    return Name(key, lambda ours: ours == value or None)


# Axolotl 0.19.
AXOLOTL: Library = {
    **TRAINER,
    "model": (Name("base_model"),),
    "length": (Name("sequence_len"),),
    "micro_batch": (Name("micro_batch_size"),),
    "optimizer": (Name("optimizer"),),
    "schedule": (Name("lr_scheduler"),),
    "packing": (Name("sample_packing"),),
    "adapter": (Name("adapter", lambda kind: kind or None),),
    "rank": (Name("lora_r"),),
    "targets": (
        Name("lora_target_modules", lambda layers: layers or None),
        Name("lora_target_linear", lambda layers: not layers or None),
    ),
    "trained": (Name("lora_modules_to_save", lambda layers: layers or None),),
    "variant": (_flag("peft_use_dora", "dora"), _flag("peft_use_rslora", "rslora")),
    "bits": (_flag("load_in_4bit", 4), _flag("load_in_8bit", 8)),
}
_VARIANTS = _flag("use_dora", "dora"), _flag("use_rslora", "rslora")
# LLaMA-Factory 0.9.
LLAMA_FACTORY: Library = {
    **TRAINER,
    "model": (Name("model_name_or_path"),),
    "length": (Name("cutoff_len"),),
    "checkpointing": (Name("disable_gradient_checkpointing", lambda on: not on),),
    "packing": (Name("neat_packing"),),
    "adapter": (Name("finetuning_type", lambda kind: "lora" if kind else "full"),),
    "rank": (Name("lora_rank"),),
    "targets": (Name("lora_target", lambda layers: ",".join(layers) or "all"),),
    "trained": (Name("additional_target", lambda layers: ",".join(layers) or None),),
    "variant": _VARIANTS,
    "bits": (Name("quantization_bit", lambda bits: bits or None),),
}
# The arguments of `LoraConfig`.
PEFT: Library = {
    "rank": (Name("r"),),
    "targets": (Name("target_modules", lambda layers: layers or "all-linear"),),
    "trained": (Name("modules_to_save", lambda layers: layers or None),),
    "variant": _VARIANTS,
}

"""The forms of recipes: which of their keys `port` reads, and which say nothing that depends on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Meaning = Literal[
    "model",
    "length",
    "micro_batch",
    "accumulation",
    "total_batch",
    "rate",
    "decay",
    "optimizer",
    "steps",
    "warmup_steps",
    "bf16",
    "fp16",
    "dtype",
    "pure_bf16",
    "checkpointing",
    "no_checkpointing",
    "adapter",
    "use_adapter",
    "rank",
    "targets",
    "trained",
    "dora",
    "4bit",
    "8bit",
    "bits",
    "packing",
]

# Keys that mean the same for the same batch on any devices: data, the loss, the optimizer's settings, files, logs.
_INDIFFERENT = """
logging_* log_* save_* eval_* evaluation_* evals_* report_to run_name wandb_* mlflow_* comet_* swanlab_* trackio_* metrics_*
use_tensorboard hub_* push_to_hub* output_dir overwrite_* resume_* auto_resume_* early_stopping_* load_best_* metric_for_*
greater_is_better plot_loss disable_tqdm debug strict cache_dir local_rank ddp_timeout ddp_find_unused_parameters do_train
do_eval do_predict per_device_eval_batch_size prediction_loss_only bf16_full_eval include_num_input_tokens_seen seed data_seed
num_epochs num_train_epochs lr_scheduler* cosine_* warmup_ratio max_grad_norm adam_* optim_args optim_target_modules
weight_decay_* label_smoothing_factor stage lora_alpha lora_dropout lora_path lora_model_dir lora_fan_in_fan_out lora_on_cpu
use_rslora peft_use_rslora llm_int8_* bnb_4bit_* use_bnb_nested_quant double_quantization dataset* data_path data_files
data_dir data_collator test_datasets template chat_template* train_on_* mask_history val_* max_samples shuffle_*
curriculum_sampling preprocessing_* completion_only_loss assistant_only_loss ignore_pad_token_for_loss dataloader_num_workers
dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor pad_to_sequence_len pad_to_multiple_of
sample_packing_* total_num_tokens packing_strategy remove_unused_columns model_type tokenizer_* is_*_derived_model
trust_remote_code model_revision special_tokens tokens add_*_token flash_attention flash_attn attn_implementation
sdp_attention xformers_attention tf32 use_cpu no_cuda low_cpu_mem_usage gradient_checkpointing_kwargs use_reentrant_gc
lora_target_linear saves_per_epoch evals_per_epoch hf_use_auth_token
"""
INDIFFERENT = tuple(_INDIFFERENT.split())


@dataclass(frozen=True, slots=True)
class Form:
    """A library's recipes.

    Args:
        library: with the version that was read.
        keys: by which names a meaning goes; the first is written where the recipe has none.
        whole_mean: the loss is the mean over the tokens of the whole step, however it is split.
        dtype: precision of weights in memory where the recipe does not say it.
    """

    library: str
    keys: Mapping[Meaning, tuple[str, ...]]
    whole_mean: bool = True
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"

    @property
    def meanings(self) -> dict[str, Meaning]:
        return {key: meaning for meaning, keys in self.keys.items() for key in keys}


_COMMON: dict[Meaning, tuple[str, ...]] = {
    "accumulation": ("gradient_accumulation_steps",),
    "rate": ("learning_rate",),
    "decay": ("weight_decay",),
    "steps": ("max_steps",),
    "warmup_steps": ("warmup_steps",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
}
_TRAINER: dict[Meaning, tuple[str, ...]] = {
    **_COMMON,
    "micro_batch": ("per_device_train_batch_size", "per_gpu_train_batch_size"),
    "optimizer": ("optim",),
    "model": ("model_name_or_path", "model_name", "model_id"),
}

AXOLOTL = Form(
    "Axolotl 0.19",
    {
        **_COMMON,
        "model": ("base_model",),
        "length": ("sequence_len",),
        "micro_batch": ("micro_batch_size",),
        "total_batch": ("batch_size",),
        "optimizer": ("optimizer",),
        "dtype": ("torch_dtype",),
        "checkpointing": ("gradient_checkpointing",),
        "adapter": ("adapter",),
        "rank": ("lora_r",),
        "targets": ("lora_target_modules",),
        "trained": ("lora_modules_to_save",),
        "dora": ("peft_use_dora",),
        "4bit": ("load_in_4bit",),
        "8bit": ("load_in_8bit",),
        "packing": ("sample_packing",),
    },
    whole_mean=False,
)
LLAMA_FACTORY = Form(
    "LLaMA-Factory 0.9",
    {
        **_TRAINER,
        "length": ("cutoff_len",),
        "no_checkpointing": ("disable_gradient_checkpointing",),
        "adapter": ("finetuning_type",),
        "rank": ("lora_rank",),
        "targets": ("lora_target",),
        "trained": ("additional_target",),
        "dora": ("use_dora",),
        "bits": ("quantization_bit",),
        "pure_bf16": ("pure_bf16",),
        "packing": ("packing", "neat_packing"),
    },
)
TRAINER = Form(
    "transformers' Trainer",
    {
        **_TRAINER,
        "length": ("max_length", "max_seq_length", "model_max_length", "block_size"),
        "checkpointing": ("gradient_checkpointing",),
        "dtype": ("dtype", "torch_dtype"),
        "use_adapter": ("use_peft",),
        "rank": ("lora_r",),
        "targets": ("lora_target_modules",),
        "trained": ("lora_modules_to_save",),
        "dora": ("use_dora",),
        "4bit": ("load_in_4bit",),
        "8bit": ("load_in_8bit",),
        "packing": ("packing",),
    },
)


def form_of(keys: frozenset[str]) -> Form | None:
    """The form of a recipe with these keys; None: none that is known."""
    if "base_model" in keys:
        return AXOLOTL
    if keys & {"cutoff_len", "finetuning_type"} and "model_name_or_path" in keys:
        return LLAMA_FACTORY
    if keys & {*TRAINER.keys["micro_batch"], "gradient_accumulation_steps"}:
        return TRAINER
    return None


__all__ = ["AXOLOTL", "INDIFFERENT", "LLAMA_FACTORY", "TRAINER", "Form", "Meaning", "form_of"]

"""Of which library a recipe is, and which keys of its say nothing that depends on devices."""

from __future__ import annotations

from ...search.report.frameworks.library import Library
from ..exporters.libraries import AXOLOTL, LLAMA_FACTORY, TRL

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


def library_of(keys: frozenset[str]) -> Library | None:
    """The library of a recipe with these keys; None: none that is known."""
    if "base_model" in keys:
        return AXOLOTL
    if keys & {"cutoff_len", "finetuning_type"} and "model_name_or_path" in keys:
        return LLAMA_FACTORY
    if keys & {name.key for setting in ("micro_batch", "accumulation") for name in TRL.table[setting]}:
        return TRL
    return None

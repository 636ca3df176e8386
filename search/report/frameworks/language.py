"""A language model's settings for the libraries that fine-tune them: TRL, Axolotl and LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ....spaces.errors import StudyFileError, TaskError
from ....spaces.learning_rate import LION_BETAS
from ....spaces.readable import readable_bytes
from ....spaces.study.spec import Framework
from .rows import Records, documents, lone_documents, numbered_rows, padded_rows, whole_rows, write_rows
from .settings import ChosenSettings
from .texts import (
    BITSANDBYTES,
    OPTIMIZERS,
    Exported,
    average_notes,
    commented,
    huggingface_arguments,
    mean_notes,
    optimizer_notes,
    own_schedule_notes,
    program,
    torch_optimizer,
    trainers_decay,
    trainers_schedule,
    yaml_text,
)

_TASK = "bsearch.objectives.language:"
_OPTIMIZERS = {"Adafactor": "adafactor", "SGD": "sgd", **BITSANDBYTES}  # by Axolotl's names; else AdamW
_LONGEST = 1024  # tokens of a row, where the study does not say
# What a logit takes more where the loss is not computed in chunks (docs/log.md), and from which bytes on that is said.
_LOGIT_BYTES, _WORTH_SAYING = 8, 1 << 28


def trl(chosen: ChosenSettings) -> Exported:
    """A program with `SFTConfig`, the trial's optimizer, schedule and adapters, and its rows for `SFTTrainer`.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, chosen = _options(chosen, "trl"), replace(chosen, in_order=True)
    arguments, optimizer, notes = huggingface_arguments(chosen, own_schedule=True)
    known = chosen.optimizer in OPTIMIZERS
    arguments |= {"max_length": _length(chosen), "packing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    arguments |= {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    arguments |= {"gradient_checkpointing": chosen.plan.activation_checkpointing != "none"}  # true unless said
    made = program(
        "trl",
        chosen,
        [*notes, *_row_notes(chosen)],
        arguments=arguments,
        optimizer=torch_optimizer(chosen, chosen.even_settings) if known else optimizer,
        options=options,
        rows=_rows(chosen, "trl"),
        has_tokenizer=options.get("tokenizer") != "bytes",
        dtype=_dtype(options),
        adapters=_adapters(options),
        quantized=options.get("quantize"),
    )
    return replace(made, beside=partial(_write, chosen, "trl", whole_rows if _packs(chosen) else padded_rows))


def axolotl(chosen: ChosenSettings) -> Exported:
    """Axolotl's YAML, on the trial's documents in such an order that it packs the same rows.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, chosen = _options(chosen, "axolotl"), replace(chosen, in_order=True)
    rows, packs, devices = _rows(chosen, "axolotl"), _packs(chosen), chosen.even.devices
    notes = [*_yaml_notes(chosen, "Axolotl"), *_row_notes(chosen), *mean_notes(chosen, "Axolotl 0.19")]
    if packs and chosen.setup.samples_budget % chosen.even.effective_batch:
        notes.append("Axolotl drops the last, smaller step of packed rows")
    document: dict[str, Any] = {
        "base_model": str(options["model"]),
        **({"reinit_weights": True} if options.get("from_scratch") else {}),
        **({"tokenizer_config": str(options["tokenizer"])} if options.get("tokenizer", "bytes") != "bytes" else {}),
        "attn_implementation": "sdpa",
        "datasets": [{"path": f"{rows}/train", "type": None}],
        "test_datasets": [{"path": f"{rows}/validation", "type": None, "split": "train"}],
        "val_set_size": 0.0,
        "curriculum_sampling": True,  # the order of the rows
        "sequence_len": _length(chosen),
        "sample_packing": packs,
        **({"sample_packing_sequentially": True} if packs else {}),
        "eval_sample_packing": False,
        "pad_to_sequence_len": False,
        "num_epochs": 1,
        "micro_batch_size": chosen.even.micro_batch,
        "eval_batch_size": chosen.even.micro_batch,
        "lr_scheduler": trainers_schedule(chosen),
        "optimizer": _OPTIMIZERS.get(str(chosen.optimizer), "adamw_torch"),
        **_arguments(chosen),
        "tf32": chosen.setup.training.precision == "tf32",
        "gradient_checkpointing": chosen.plan.activation_checkpointing != "none",
    }
    if adapters := _adapters(options):
        targets = adapters["target_modules"]
        document |= {
            "adapter": "qlora" if options.get("quantize") == "4bit" else "lora",
            "lora_r": adapters["r"],
            "lora_alpha": adapters["lora_alpha"],
            "lora_dropout": adapters["lora_dropout"],
            **({"lora_target_linear": True} if targets == "all-linear" else {"lora_target_modules": targets}),
            **({"lora_modules_to_save": adapters["modules_to_save"]} if "modules_to_save" in adapters else {}),
            **{f"peft_{name}": True for name in ("use_dora", "use_rslora") if name in adapters},
        }
        if chosen.setup.device == "cpu":  # its own kernels know CUDA alone
            document |= {f"lora_{layers}_kernel": False for layers in ("mlp", "qkv", "o")}
    if options.get("quantize"):
        document[f"load_in_{options['quantize']}"] = True
    launch = "axolotl train config.yaml" + (f" --launcher torchrun -- --nproc_per_node={devices}" if devices > 1 else "")
    return _yaml(chosen, "axolotl", document, notes, launch, documents if packs else lone_documents)


def llamafactory(chosen: ChosenSettings) -> Exported:
    """LLaMA-Factory's YAML, on the trial's rows.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, chosen = _options(chosen, "llamafactory"), replace(chosen, in_order=True)
    rows, packs = _rows(chosen, "llamafactory"), _packs(chosen)
    notes = [*_yaml_notes(chosen, "LLaMA-Factory"), *_row_notes(chosen)]
    document: dict[str, Any] = {
        "model_name_or_path": str(options["model"]),
        **({"train_from_scratch": True} if options.get("from_scratch") else {}),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "empty",
        "dataset": rows,  # a name has to be there
        "tokenized_path": rows,
        "disable_shuffling": True,  # the order of the rows
        "cutoff_len": _length(chosen),
        "neat_packing": packs,
        "flash_attn": "sdpa",
        "num_train_epochs": 1,
        "per_device_train_batch_size": chosen.even.micro_batch,
        "per_device_eval_batch_size": chosen.even.micro_batch,
        "lr_scheduler_type": trainers_schedule(chosen),
        "optim": _OPTIMIZERS.get(str(chosen.optimizer), "adamw_torch"),
        **_arguments(chosen),
        "disable_gradient_checkpointing": chosen.plan.activation_checkpointing == "none",
        "report_to": "none",
    }
    if adapters := _adapters(options):
        targets = adapters["target_modules"]
        document |= {
            "finetuning_type": "lora",
            "lora_rank": adapters["r"],
            "lora_alpha": adapters["lora_alpha"],
            "lora_dropout": adapters["lora_dropout"],
            "lora_target": "all" if targets == "all-linear" else ",".join(targets),
            **({"additional_target": ",".join(adapters["modules_to_save"])} if "modules_to_save" in adapters else {}),
        }
        document |= {name: True for name in ("use_dora", "use_rslora") if name in adapters}
    if options.get("quantize"):
        document["quantization_bit"] = int(str(options["quantize"])[0])
    records = numbered_rows if packs else lone_documents
    return _yaml(chosen, "llamafactory", document, notes, "llamafactory-cli train config.yaml", records)


def _arguments(chosen: ChosenSettings) -> dict[str, Any]:
    """What Axolotl and LLaMA-Factory have by the names of `TrainingArguments`."""
    training, settings = chosen.setup.training, chosen.even_settings
    betas = LION_BETAS if str(chosen.optimizer).startswith("Lion") else settings.betas
    return {
        "gradient_accumulation_steps": chosen.even.accumulation,
        "max_steps": chosen.even_steps,
        "learning_rate": settings.learning_rate,
        **trainers_decay(chosen),
        "warmup_steps": chosen.warmup_steps(chosen.even_steps),
        "weight_decay": settings.weight_decay,
        **({"optim_args": _sgd_arguments(chosen)} if chosen.optimizer == "SGD" else {}),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_epsilon": settings.eps,
        "max_grad_norm": training.clip_norm or 0.0,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "torch_compile": training.compile,
        "seed": training.seed % 2**32,
        "output_dir": "output",
    }


LANGUAGE: dict[Framework, Callable[[ChosenSettings], Exported]] = {"trl": trl, "axolotl": axolotl, "llamafactory": llamafactory}


def _options(chosen: ChosenSettings, framework: str) -> Mapping[str, Any]:
    """The task's parameters.

    Raises:
        StudyFileError: it does not train a language model.
    """
    if not chosen.task.startswith(_TASK):
        raise StudyFileError(
            f"--to {framework}: expected a study of {_TASK}CausalLM, since {framework} trains language models; got "
            f"{chosen.task}. Write --to hf for a Trainer's arguments."
        )
    return chosen.parameters


def _length(chosen: ChosenSettings) -> int:
    """Tokens of a row: the study's, or what its model takes, up to 1024, as the task does."""
    if "length" in chosen.parameters:
        return int(chosen.parameters["length"])
    config = _config(chosen)
    return min(config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST, _LONGEST)


def _config(chosen: ChosenSettings) -> dict[str, Any]:
    """The model's configuration; empty where it is elsewhere."""
    path = chosen.setup.path(str(chosen.parameters["model"])) / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _packs(chosen: ChosenSettings) -> bool:
    """Whether the trial's rows held several documents."""
    if "packing" in chosen.parameters:
        return bool(chosen.parameters["packing"])
    try:
        from ....objectives.language.pretrained import packs

        return packs(chosen.setup)
    except (TaskError, ImportError):  # the model is elsewhere, or `transformers` is not here
        return True


def _dtype(options: Mapping[str, Any]) -> str:
    return str(options.get("dtype", "auto" if "lora_rank" in options else "float32"))


def _adapters(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `LoraConfig`; None where all weights are trained."""
    if "lora_rank" not in options:
        return None
    lists = (str(options.get(key, "")).split(",") for key in ("lora_targets", "lora_trained"))
    targets, trained = ([name.strip() for name in names if name.strip()] for names in lists)
    variant = str(options.get("lora_variant", "lora"))
    return {
        "r": options["lora_rank"],
        "lora_alpha": options.get("lora_alpha", 2 * options["lora_rank"]),
        "lora_dropout": float(options.get("lora_dropout", 0.0)),
        "target_modules": targets or "all-linear",
        **({"modules_to_save": trained} if trained else {}),
        **({f"use_{variant}": True} if variant != "lora" else {}),
        "task_type": "CAUSAL_LM",
    }


def _rows(chosen: ChosenSettings, framework: str) -> str:
    """The folder of the trial's rows, beside the text; each library has records of its own."""
    return f"rows-trial{chosen.trial}-{framework}"


def _write(chosen: ChosenSettings, framework: str, records: Records, folder: Path) -> None:
    write_rows(chosen, records, folder / _rows(chosen, framework))


def _row_notes(chosen: ChosenSettings) -> Iterator[str]:
    if chosen.parameters.get("attention") == "rows":
        yield "the trial's tokens attended across the documents of a row (attention: rows); here they do not"
    rates = {"lora_dropout": chosen.parameters.get("lora_dropout"), **_config(chosen)}
    if drawn := [name for name, rate in rates.items() if "drop" in name and isinstance(rate, float) and rate > 0]:
        yield f"dropout ({', '.join(drawn)}) draws other random numbers than the trial's"
    words = _config(chosen).get("vocab_size")
    more = _LOGIT_BYTES * chosen.even.micro_batch * _length(chosen) * (words if isinstance(words, int) else 0)
    if more > _WORTH_SAYING:
        yield (
            f"the trial's loss is computed in chunks; float32 logits of whole micro-batches take about {readable_bytes(more)} "
            "more: if memory runs out, divide the micro-batch and multiply the accumulation"
        )


def _yaml_notes(chosen: ChosenSettings, library: str) -> Iterator[str]:
    yield from chosen.even_notes
    yield from optimizer_notes(chosen, known=_OPTIMIZERS)
    yield from average_notes(chosen)
    yield from own_schedule_notes(chosen)
    if chosen.setup.training.schedule != "constant" or chosen.setup.training.warmup:
        yield f"{library}'s schedule lags the trial's by half a step, and its warm-up starts with a step at learning rate 0"
    if chosen.even_settings.weight_decay:
        yield f"{library} applies no weight decay to biases and norm layers; the trial decayed all parameters"
    if "lora_rank" in chosen.parameters or chosen.parameters.get("from_scratch"):
        yield f"{library} initializes new weights from the same seed, but not necessarily as the trial did"


def _sgd_arguments(chosen: ChosenSettings) -> str:
    _, keywords = torch_optimizer(chosen, chosen.even_settings)
    return f"momentum={keywords['momentum']},nesterov={keywords['nesterov']}"


def _yaml(
    chosen: ChosenSettings, framework: str, document: Mapping[str, Any], notes: list[str], launch: str, records: Records
) -> Exported:
    head = [f"bsearch study {chosen.study}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"]
    head += [f"note: {note}" for note in notes]
    head += [f"launch in the study's folder, with {_rows(chosen, framework)} there: {launch}"]
    comments = "\n".join(commented(line) for line in head)
    text = f"{comments}\n\n{yaml_text(document)}"
    return Exported(text, tuple(notes), partial(_write, chosen, framework, records))


__all__ = ["LANGUAGE", "axolotl", "llamafactory", "trl"]

"""A language model's settings for the libraries that fine-tune them: TRL, Axolotl and LLaMA-Factory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...search.report.frameworks.differences import (
    BITSANDBYTES,
    OPTIMIZERS,
    average_notes,
    mean_notes,
    optimizer_notes,
    own_schedule_notes,
    torch_optimizer,
)
from ...search.report.frameworks.library import Library, Setting, written
from ...search.report.frameworks.settings import ChosenSettings
from ...search.report.frameworks.texts import (
    Exported,
    adam_arguments,
    commented,
    huggingface_arguments,
    program,
    trainers_arguments,
    yaml_text,
)
from ...spaces.errors import StudyFileError, TaskError
from ...spaces.readable import readable_bytes
from .libraries import AXOLOTL, LLAMA_FACTORY, PEFT
from .rows import Records, documents, lone_documents, numbered_rows, padded_rows, whole_rows, write_rows

_TASK = "bsearch.objectives.language:"
_TEMPLATES = Path(__file__).parent / "templates"
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
    recomputes = chosen.plan.activation_checkpointing != "none"  # TRL's default is true
    arguments |= {"max_length": _length(chosen), "packing": False, "gradient_checkpointing": recomputes}
    arguments |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    arguments["train_sampling_strategy"] = "sequential"
    rows, records = _rows(chosen, "trl"), whole_rows if _packs(chosen) else padded_rows
    made = program(
        _TEMPLATES / "trl.py.jinja",
        chosen,
        [*notes, *_row_notes(chosen)],
        arguments=arguments,
        optimizer=torch_optimizer(chosen, chosen.even_settings) if known else optimizer,
        options=options,
        rows=rows,
        has_tokenizer=options.get("tokenizer") != "bytes",
        dtype=str(options.get("dtype", "auto" if "lora_rank" in options else "float32")),
        adapters=_adapters(options, PEFT) | {"task_type": "CAUSAL_LM"} if "lora_rank" in options else None,
        quantized=options.get("quantize"),
    )
    return replace(made, beside=lambda folder: write_rows(chosen, records, folder / rows))


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
        **_model_and_steps(chosen, AXOLOTL),
        **({"reinit_weights": True} if options.get("from_scratch") else {}),
        **(
            {"tokenizer_config": str(options["tokenizer"])}
            if options.get("tokenizer", "bytes") != "bytes"
            else {}
        ),
        "attn_implementation": "sdpa",
        "datasets": [{"path": f"{rows}/train", "type": None}],
        "test_datasets": [{"path": f"{rows}/validation", "type": None, "split": "train"}],
        "val_set_size": 0.0,
        "curriculum_sampling": True,  # the order of the rows
        **({"sample_packing_sequentially": True} if packs else {}),
        "eval_sample_packing": False,
        "pad_to_sequence_len": False,
        "num_epochs": 1,
        "eval_batch_size": chosen.even.micro_batch,
        "tf32": chosen.setup.training.precision == "tf32",
    }
    if "lora_rank" in options and chosen.setup.device == "cpu":  # its own kernels know CUDA alone
        document |= {f"lora_{layers}_kernel": False for layers in ("mlp", "qkv", "o")}
    launch = "axolotl train config.yaml" + (
        f" --launcher torchrun -- --nproc_per_node={devices}" if devices > 1 else ""
    )
    return _yaml(chosen, rows, document, notes, launch, documents if packs else lone_documents)


def llamafactory(chosen: ChosenSettings) -> Exported:
    """LLaMA-Factory's YAML, on the trial's rows.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, chosen = _options(chosen, "llamafactory"), replace(chosen, in_order=True)
    rows, packs = _rows(chosen, "llamafactory"), _packs(chosen)
    document: dict[str, Any] = {
        **_model_and_steps(chosen, LLAMA_FACTORY),
        **({"train_from_scratch": True} if options.get("from_scratch") else {}),
        "stage": "sft",
        "do_train": True,
        "template": "empty",
        "dataset": rows,  # a name has to be there
        "tokenized_path": rows,
        "disable_shuffling": True,  # the order of the rows
        "flash_attn": "sdpa",
        "num_train_epochs": 1,
        "per_device_eval_batch_size": chosen.even.micro_batch,
        "report_to": "none",
    }
    notes = [*_yaml_notes(chosen, "LLaMA-Factory"), *_row_notes(chosen)]
    records = numbered_rows if packs else lone_documents
    return _yaml(chosen, rows, document, notes, "llamafactory-cli train config.yaml", records)


def _model_and_steps(chosen: ChosenSettings, library: Library) -> dict[str, Any]:
    """Model, rows, steps, optimizer and adapters by a library's names."""
    options = chosen.parameters
    bits = int(str(options.get("quantize") or 0)[0])
    settings: dict[Setting, Any] = {
        "model": str(options["model"]),
        "length": _length(chosen),
        "packing": _packs(chosen),
        "checkpointing": chosen.plan.activation_checkpointing != "none",
        "optimizer": _OPTIMIZERS.get(str(chosen.optimizer), "adamw_torch"),
        "adapter": "" if "lora_rank" not in options else "qlora" if bits == 4 else "lora",
        "bits": bits,
    }
    momentum = torch_optimizer(chosen, chosen.even_settings)[1] if chosen.optimizer == "SGD" else {}
    return {
        **written(library, settings),
        **trainers_arguments(chosen, library),
        **({"optim_args": "momentum={momentum},nesterov={nesterov}".format(**momentum)} if momentum else {}),
        **adam_arguments(chosen),
        **(_adapters(options, library) if "lora_rank" in options else {}),
    }


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
        from ...objectives.language.pretrained import packs

        return packs(chosen.setup)
    except (TaskError, ImportError):  # the model is elsewhere, or `transformers` is not here
        return True


def _adapters(options: Mapping[str, Any], library: Library) -> dict[str, Any]:
    """The LoRA of the trial, by a library's names."""
    targets, trained = (
        [name.strip() for name in str(options.get(key, "")).split(",") if name.strip()]
        for key in ("lora_targets", "lora_trained")
    )
    variant = str(options.get("lora_variant", "lora"))
    return {
        **written(
            library,
            {"rank": options["lora_rank"], "targets": targets, "trained": trained, "variant": variant},
        ),
        "lora_alpha": options.get("lora_alpha", 2 * options["lora_rank"]),
        "lora_dropout": float(options.get("lora_dropout", 0.0)),
    }


def _rows(chosen: ChosenSettings, framework: str) -> str:
    """The folder of the trial's rows, beside the text; each library has records of its own."""
    return f"rows-trial{chosen.trial}-{framework}"


def _row_notes(chosen: ChosenSettings) -> Iterator[str]:
    if chosen.parameters.get("attention") == "rows":
        yield "the trial's tokens attended across the documents of a row (attention: rows); here they do not"
    rates = {"lora_dropout": chosen.parameters.get("lora_dropout"), **_config(chosen)}
    if drawn := [
        name for name, rate in rates.items() if "drop" in name and isinstance(rate, float) and rate > 0
    ]:
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


def _yaml(
    chosen: ChosenSettings,
    rows: str,
    document: Mapping[str, Any],
    notes: list[str],
    launch: str,
    records: Records,
) -> Exported:
    head = [f"bsearch study {chosen.study}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"]
    head += [f"note: {note}" for note in notes]
    head += [f"launch in the study's folder, with {rows} there: {launch}"]
    comments = "\n".join(commented(line) for line in head)
    text = f"{comments}\n\n{yaml_text(document)}"
    return Exported(text, tuple(notes), lambda folder: write_rows(chosen, records, folder / rows))

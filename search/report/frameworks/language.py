"""A language model's settings for the libraries that fine-tune them: TRL, Axolotl and torchtune."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from ....objectives.task import beside_study
from ....spaces.errors import StudyFileError
from .settings import ChosenSettings
from .texts import Exported, commented, huggingface_arguments, program, torch_optimizer

_TASK = "bsearch.objectives.language:"
_LONGEST = 1024  # tokens of a row, where the study does not say


def trl(chosen: ChosenSettings) -> Exported:
    """A program with `SFTConfig`, `LoraConfig` and the study's own documents for `SFTTrainer`.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options = _options(chosen, "trl")
    arguments, optimizer, notes = huggingface_arguments(chosen)
    arguments |= {"max_length": _length(options), "packing": True, "packing_strategy": "bfd_split"}
    arguments |= {"gradient_checkpointing": chosen.plan.activation_checkpointing != "none"}  # true unless said
    if _prompted(options):
        arguments["completion_only_loss"] = not options.get("train_on_prompt", False)
    notes += [*_row_notes(options, "TRL"), *_text_notes(options)]
    documents = [str(options["text"]), *([str(options["validation_text"])] if "validation_text" in options else [])]
    return program(
        "trl",
        chosen,
        notes,
        arguments=arguments,
        optimizer=optimizer,
        options=options,
        documents=documents,
        prompted=_prompted(options),
        adapters=_adapters(options),
        quantized=options.get("quantize"),
    )


def axolotl(chosen: ChosenSettings) -> Exported:
    """Axolotl's YAML.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, training, settings = _options(chosen, "axolotl"), chosen.setup.training, chosen.even_settings
    prompt, completion = str(options.get("prompt", "")), str(options.get("completion", "{text}"))
    fields = _fields(completion)
    notes = [*chosen.even_notes, *_row_notes(options, "Axolotl"), *_text_notes(options)]
    if "validation_text" not in options:
        notes.append(_held_out("a random 90 %"))
    kind: Any = "completion"
    dataset: dict[str, Any] = {"path": str(options["text"]), "ds_type": "json"}
    if prompt:
        # Its templates know an instruction and an input, and fields of other names may take these places.
        places = dict(zip(_fields(prompt), ("instruction", "input"), strict=False))
        template = prompt
        for field, place in places.items():
            template = template.replace(f"{{{field}}}", f"{{{place}}}")
        kind = {"system_prompt": "", **{f"field_{place}": field for field, place in places.items()}}
        kind |= {"field_output": fields[0], "format": template, "no_input_format": template}
        if len(_fields(prompt)) > len(places) or completion != f"{{{fields[0]}}}":
            notes.append(
                f"Axolotl's templates take two fields for the prompt and one for the answer: put {prompt!r} and {completion!r} "
                "together in the data"
            )
    else:
        dataset["field"] = fields[0]
        if completion != f"{{{fields[0]}}}":
            notes.append(f"Axolotl reads the field {fields[0]!r} as it is: put {completion!r} together in the data")
    document: dict[str, Any] = {
        "base_model": str(options["model"]),
        **({"reinit_weights": True} if options.get("from_scratch") else {}),
        **({"tokenizer_config": str(options["tokenizer"])} if "tokenizer" in options else {}),
        "datasets": [{**dataset, "type": kind}],
        "train_on_inputs": bool(options.get("train_on_prompt", False)),
        "val_set_size": 0.0 if "validation_text" in options else 0.1,
        "sequence_len": _length(options),
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "micro_batch_size": chosen.even.micro_batch,
        "eval_batch_size": chosen.even.micro_batch,
        "gradient_accumulation_steps": chosen.even.accumulation,
        "max_steps": chosen.even_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler": "constant_with_warmup" if training.schedule == "constant" else training.schedule,
        "warmup_steps": chosen.warmup_steps(chosen.even_steps),
        "weight_decay": settings.weight_decay,
        "optimizer": {"Adafactor": "adafactor", "SGD": "sgd"}.get(str(chosen.optimizer), "adamw_torch"),
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_epsilon": settings.eps,
        "max_grad_norm": training.clip_norm or 0.0,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "tf32": training.precision == "tf32",
        "torch_compile": training.compile,
        "gradient_checkpointing": chosen.plan.activation_checkpointing != "none",
        "seed": training.seed % 2**32,
        "output_dir": "output",
    }
    if "validation_text" in options:
        document["test_datasets"] = [{**dataset, "path": str(options["validation_text"]), "type": kind, "split": "train"}]
    if adapters := _adapters(options):
        targets = adapters["target_modules"]
        document |= {
            "adapter": "qlora" if options.get("quantize") == "4bit" else "lora",
            "lora_r": adapters["r"],
            "lora_alpha": adapters["lora_alpha"],
            "lora_dropout": adapters["lora_dropout"],
            **({"lora_target_linear": True} if targets == "all-linear" else {"lora_target_modules": targets}),
        }
    if options.get("quantize"):
        document[f"load_in_{options['quantize']}"] = True
    launch = (
        "axolotl train config.yaml"
        if chosen.even.devices == 1
        else (f"axolotl train config.yaml --launcher torchrun -- --nproc_per_node={chosen.even.devices}")
    )
    return _yaml(chosen, document, notes, launch)


def torchtune(chosen: ChosenSettings) -> Exported:
    """torchtune's YAML for a model of the LLaMA family, whose configuration lies beside the study.

    Raises:
        StudyFileError: the study does not train such a model.
    """
    options, training, settings = _options(chosen, "torchtune"), chosen.setup.training, chosen.even_settings
    if training.precision == "fp16":
        raise StudyFileError("--to torchtune: training.precision: expected fp32, tf32 or bf16, got fp16. Write --to trl.")
    notes = [*chosen.even_notes, *_row_notes(options, "torchtune"), *_text_notes(options)]
    if "validation_text" not in options:
        notes.append(_held_out("the first 90 %"))
    model = _torchtune_model(chosen, options, notes)
    folder = str(options["model"])
    if _prompted(options) and not options.get("train_on_prompt", False):
        raise StudyFileError(
            "--to torchtune: expected a study without a prompt, or with train_on_prompt: true, since torchtune masks prompts "
            "only for tokenizers of its own models. Write --to trl."
        )
    column, template = _fields(str(options.get("completion", "{text}")))[0], str(options.get("prompt", ""))
    template += str(options.get("completion", "{text}"))
    if template != f"{{{column}}}":
        notes.append(f"torchtune reads the field {column!r} as it is: put {template!r} together in the data")
    if training.precision == "bf16":
        notes.append("torchtune trains bf16 weights; the trial's were fp32, and bf16 in products alone (autocast)")
    name, keywords = torch_optimizer(chosen, settings)
    scheduler: dict[str, Any] = {}
    if training.schedule == "cosine":
        component = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        scheduler = {"lr_scheduler": {"_component_": component, "num_warmup_steps": chosen.warmup_steps(chosen.even_steps)}}
    elif training.schedule != "constant" or training.warmup:
        notes.append(
            f"torchtune has one schedule, cosine; the trial's was {training.schedule} with warm-up {training.warmup:g}"
        )
    # It counts whole epochs, each of so many steps.
    epochs = math.ceil(chosen.setup.epochs)
    steps = max(round(chosen.even_steps / epochs), 1)
    if epochs * steps != chosen.even_steps:
        notes.append(f"{epochs} x {steps} steps for the trial's {chosen.even_steps}, since torchtune counts whole epochs")
    notes.append("torchtune wants bos_token and eos_token in tokenizer_config.json")
    lora = "lora_rank" in options
    document: dict[str, Any] = {
        "output_dir": "output",
        "model": model,
        "tokenizer": {
            "_component_": "torchtune.modules.transforms.tokenizers.HuggingFaceBaseTokenizer",
            "tokenizer_json_path": f"{folder}/tokenizer.json",
            "tokenizer_config_json_path": f"{folder}/tokenizer_config.json",
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": folder,
            "checkpoint_files": ["model.safetensors"],
            "output_dir": "output",
            "model_type": "LLAMA2",
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "column": column,
            "source": "json",
            "data_files": str(options["text"]),
            "packed": True,
            "split": "train" if "validation_text" in options else "train[:90%]",
        },
        "optimizer": {"_component_": f"torch.optim.{name}", **_listed(keywords)},
        **scheduler,
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "batch_size": chosen.even.micro_batch,
        "gradient_accumulation_steps": chosen.even.accumulation,
        "epochs": epochs,
        "max_steps_per_epoch": steps,
        "clip_grad_norm": training.clip_norm,
        "enable_activation_checkpointing": chosen.plan.activation_checkpointing != "none",
        "enable_activation_offloading": False,
        "compile": training.compile,
        "dtype": "bf16" if training.precision == "bf16" else "fp32",
        "device": "cpu" if chosen.setup.device == "cpu" else "cuda",
        "seed": training.seed % 2**32,
        "shuffle": True,
        "resume_from_checkpoint": False,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "output/logs"},
        "log_every_n_steps": 1,
    }
    devices = chosen.even.devices
    where = "single_device" if devices == 1 else "distributed"
    recipe = f"{'lora' if lora else 'full'}_finetune_{where}"
    launch = (
        f"tune run {recipe} --config config.yaml"
        if devices == 1
        else (f"tune run --nproc_per_node {devices} {recipe} --config config.yaml")
    )
    return _yaml(chosen, document, notes, launch)


LANGUAGE: dict[str, Callable[[ChosenSettings], Exported]] = {"trl": trl, "axolotl": axolotl, "torchtune": torchtune}


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


def _length(options: Mapping[str, Any]) -> int:
    return int(options.get("length", _LONGEST))


def _prompted(options: Mapping[str, Any]) -> bool:
    return bool(options.get("prompt"))


def _fields(template: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(template) if field] or ["text"]


def _adapters(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `LoraConfig`; None where all weights are trained."""
    if "lora_rank" not in options:
        return None
    targets = [name.strip() for name in str(options.get("lora_targets", "")).split(",") if name.strip()]
    return {
        "r": options["lora_rank"],
        "lora_alpha": options.get("lora_alpha", 2 * options["lora_rank"]),
        "lora_dropout": float(options.get("lora_dropout", 0.0)),
        "target_modules": targets or "all-linear",
        "task_type": "CAUSAL_LM",
    }


def _row_notes(options: Mapping[str, Any], library: str) -> Iterator[str]:
    yield (
        f"{library} packs documents differently, so the number of rows of {_length(options)} tokens and the documents in each "
        "batch differ from the trial's"
    )
    if options.get("attention") == "rows":
        yield "the trial's tokens attended across the documents of a row (attention: rows)"


def _held_out(share: str) -> str:
    return f"training takes {share} of the text; the trial's took all but every tenth document"


def _text_notes(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("tokenizer") == "bytes":
        yield "the trial's tokens were bytes, which the library cannot read: name a tokenizer"
    if not str(options["text"]).endswith((".json", ".jsonl")):
        yield f"space.text: a .jsonl file is read here, not {options['text']!r}: write a JSON object per line"


def _torchtune_model(chosen: ChosenSettings, options: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """A builder of the LLaMA family with the sizes in the model's configuration.

    Raises:
        StudyFileError: the configuration is not here, or of another family.
    """
    path = Path(beside_study(chosen.setup, str(options["model"]))) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if config.get("model_type") not in ("llama", "mistral"):
        got = config.get("model_type", f"no configuration at {path}")
        raise StudyFileError(
            f"--to torchtune: space.model: expected a folder whose config.json has model_type llama or mistral, got {got}. "
            "Write --to trl."
        )
    other = [name for name in ("rope_scaling", "sliding_window") if config.get(name)]
    if config.get("rope_theta", 10000.0) != 10000.0:
        other.append("rope_theta")
    if other:
        raise StudyFileError(f"--to torchtune: space.model: expected a model without {' and '.join(other)}. Write --to trl.")
    if "lora_targets" in options:
        notes.append("torchtune names layers in its own way: LoRA is on all linear ones here, not on lora_targets")
    if config.get("tie_word_embeddings"):
        notes.append("torchtune's output layer has weights of its own; the trial's were those of the embedding")
    if options.get("from_scratch"):
        notes.append("torchtune loads the folder's weights; the trial began with new ones")
    sizes = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": _length(options),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    adapters = _adapters(options)
    if adapters is None:
        return {"_component_": "torchtune.models.llama2.llama2", **sizes}
    if options.get("quantize") == "8bit":
        raise StudyFileError("--to torchtune: space.quantize: expected 4bit or none, got 8bit. Write --to trl.")
    return {
        "_component_": "torchtune.models.llama2.lora_llama2",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        **sizes,
        "lora_rank": adapters["r"],
        "lora_alpha": adapters["lora_alpha"],
        "lora_dropout": adapters["lora_dropout"],
        "quantize_base": options.get("quantize") == "4bit",
    }


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _yaml(chosen: ChosenSettings, document: Mapping[str, Any], notes: list[str], launch: str) -> Exported:
    head = [f"bsearch study {chosen.study}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"]
    head += [f"note: {note}" for note in notes] + [f"launch: {launch}"]
    comments = "\n".join(commented(line) for line in head)
    return Exported(f"{comments}\n\n{yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)}", tuple(notes))


__all__ = ["LANGUAGE", "axolotl", "torchtune", "trl"]

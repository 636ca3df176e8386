"""A language model's settings for the libraries that fine-tune them: TRL and Axolotl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any

import yaml

from ....spaces.errors import StudyFileError
from ....spaces.learning_rate import LION_BETAS
from .settings import ChosenSettings
from .texts import (
    BITSANDBYTES,
    Exported,
    average_notes,
    commented,
    huggingface_arguments,
    optimizer_notes,
    own_schedule_notes,
    program,
    torch_optimizer,
    trainers_decay,
    trainers_schedule,
)

_TASK = "bsearch.objectives.language:"
_OPTIMIZERS = {"Adafactor": "adafactor", "SGD": "sgd", **BITSANDBYTES}  # by Axolotl's names; else AdamW
_LONGEST = 1024  # tokens of a row, where the study does not say


def trl(chosen: ChosenSettings) -> Exported:
    """A program with `SFTConfig`, `LoraConfig` and the study's own documents for `SFTTrainer`.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options = _options(chosen, "trl")
    arguments, optimizer, notes = huggingface_arguments(chosen)
    arguments |= {"max_length": _length(chosen), "packing": True, "packing_strategy": "bfd_split"}
    arguments |= {"gradient_checkpointing": chosen.plan.activation_checkpointing != "none"}  # true unless said
    if _prompted(options):
        arguments["completion_only_loss"] = not options.get("train_on_prompt", False)
    notes += [*_row_notes(chosen, options, "TRL"), *_text_notes(options)]
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
    betas = LION_BETAS if str(chosen.optimizer).startswith("Lion") else settings.betas
    notes = [
        *chosen.even_notes,
        *optimizer_notes(chosen, known=_OPTIMIZERS),
        *average_notes(chosen),
        *own_schedule_notes(chosen),
        *_row_notes(chosen, options, "Axolotl"),
        *_text_notes(options),
    ]
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
        "sequence_len": _length(chosen),
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "micro_batch_size": chosen.even.micro_batch,
        "eval_batch_size": chosen.even.micro_batch,
        "gradient_accumulation_steps": chosen.even.accumulation,
        "max_steps": chosen.even_steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler": trainers_schedule(chosen),
        **trainers_decay(chosen),
        "warmup_steps": chosen.warmup_steps(chosen.even_steps),
        "weight_decay": settings.weight_decay,
        "optimizer": _OPTIMIZERS.get(str(chosen.optimizer), "adamw_torch"),
        **({"optim_args": _sgd_arguments(chosen)} if chosen.optimizer == "SGD" else {}),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
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


LANGUAGE: dict[str, Callable[[ChosenSettings], Exported]] = {"trl": trl, "axolotl": axolotl}


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
    path = chosen.setup.path(str(chosen.parameters["model"])) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return _LONGEST
    return min(config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST, _LONGEST)


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


def _row_notes(chosen: ChosenSettings, options: Mapping[str, Any], library: str) -> Iterator[str]:
    yield (
        f"{library} packs documents differently, so the number of rows of {_length(chosen)} tokens and the documents in each "
        "batch differ from the trial's"
    )
    if options.get("attention") == "rows":
        yield "the trial's tokens attended across the documents of a row (attention: rows)"


def _sgd_arguments(chosen: ChosenSettings) -> str:
    _, keywords = torch_optimizer(chosen, chosen.even_settings)
    return f"momentum={keywords['momentum']},nesterov={keywords['nesterov']}"


def _held_out(share: str) -> str:
    return f"training takes {share} of the text; the trial's took all but every tenth document"


def _text_notes(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("tokenizer") == "bytes":
        yield "the trial's tokens were bytes, which the library cannot read: name a tokenizer"
    if not str(options["text"]).endswith((".json", ".jsonl")):
        yield f"space.text: a .jsonl file is read here, not {options['text']!r}: write a JSON object per line"


def _yaml(chosen: ChosenSettings, document: Mapping[str, Any], notes: list[str], launch: str) -> Exported:
    head = [f"bsearch study {chosen.study}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"]
    head += [f"note: {note}" for note in notes] + [f"launch: {launch}"]
    comments = "\n".join(commented(line) for line in head)
    return Exported(f"{comments}\n\n{yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)}", tuple(notes))


__all__ = ["LANGUAGE", "axolotl", "trl"]

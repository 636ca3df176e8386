"""A language model's settings for the libraries that fine-tune them: TRL and Axolotl."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from string import Formatter
from typing import Any, Literal

import yaml

from ....spaces.errors import StudyFileError, TaskError
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
    form = _form(chosen)
    arguments |= {"max_length": _length(chosen)}
    arguments |= {"packing": True, "packing_strategy": "bfd_split"} if _packs(chosen) else {"packing": False}
    arguments |= {"gradient_checkpointing": chosen.plan.activation_checkpointing != "none"}  # true unless said
    if form == "pairs":
        arguments["completion_only_loss"] = not options.get("train_on_prompt", False)
    if form == "chat":
        arguments["assistant_only_loss"] = not options.get("train_on_prompt", False)
        if "chat_template" in options:
            arguments["chat_template_path"] = str(options["chat_template"])
        notes += [
            "TRL finds the assistant's turns by marks in the chat template; where it has none and TRL knows none, it says so",
            "a record's `system` and `chat_template_kwargs`, and a message's `weight` and `train`, are read by the trial alone",
        ]
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
        form=form,
        file_kind=_FILE_KINDS.get(PurePath(str(options["text"])).suffix, "json"),
        templates="prompt" in options or "completion" in options,
        dtype=_dtype(options),
        adapters=_adapters(options),
        quantized=options.get("quantize"),
    )


def axolotl(chosen: ChosenSettings) -> Exported:
    """Axolotl's YAML.

    Raises:
        StudyFileError: the study does not train a language model.
    """
    options, training, settings = _options(chosen, "axolotl"), chosen.setup.training, chosen.even_settings
    form = _form(chosen)
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
    file_kind = _FILE_KINDS.get(PurePath(str(options["text"])).suffix, "json")
    dataset: dict[str, Any] = {"path": str(options["text"]), "ds_type": file_kind}
    if form == "chat":
        kind = "chat_template"
        dataset |= {"field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn"}
        if "chat_template" in options:
            dataset |= {"chat_template": "jinja", "chat_template_jinja": _file(chosen, "chat_template")}
        notes.append("rename conversations, from and value to messages, role and content, where the data has them")
    elif form == "pairs" and not prompt:
        kind = {"field_instruction": "prompt", "field_output": "completion", "format": "{instruction}"}
        kind |= {"no_input_format": "{instruction}", "system_prompt": ""}
    elif prompt:
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
        "sample_packing": _packs(chosen),
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
            **({"lora_modules_to_save": adapters["modules_to_save"]} if "modules_to_save" in adapters else {}),
            **{f"peft_{name}": True for name in ("use_dora", "use_rslora") if name in adapters},
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


# By the ending of a file, what `datasets` calls its kind.
_FILE_KINDS = {".csv": "csv", ".parquet": "parquet"}
_Form = Literal["text", "pairs", "chat"]


def _form(chosen: ChosenSettings) -> _Form:
    """Whether records are texts, prompts with completions, or conversations; read from the first where no template says it."""
    options = chosen.parameters
    if options.get("prompt"):
        return "pairs"
    if "completion" in options:
        return "text"
    from ....objectives.language.records import fields_of, records  # which imports torch
    from ....objectives.language.text import fields_read

    try:
        record, where = next(records(chosen.setup.path(str(options["text"])), str(options.get("files", "")), "text"))
        found = fields_read(fields_of(record, where), where)
    except (TaskError, StopIteration):  # it is no longer there, for one
        return "text"
    if found == ("prompt", "completion") and isinstance(record["prompt"], str):
        return "pairs"
    return "text" if found == ("text",) else "chat"


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


def _file(chosen: ChosenSettings, key: str) -> str:
    try:
        return chosen.setup.path(str(chosen.parameters[key])).read_text(encoding="utf-8")
    except OSError:
        return f"(the content of {chosen.parameters[key]})"


def _fields(template: str) -> list[str]:
    return [field for _, field, _, _ in Formatter().parse(template) if field] or ["text"]


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


def _row_notes(chosen: ChosenSettings, options: Mapping[str, Any], library: str) -> Iterator[str]:
    yield (
        f"{library} packs documents differently, so the number of rows of {_length(chosen)} tokens and the documents in each "
        "batch differ from the trial's"
    )
    if options.get("attention") == "rows":
        yield "the trial's tokens attended across the documents of a row (attention: rows)"
    if options.get("turns") == "last":
        yield f"the trial counted the last of the assistant's turns alone (turns: last), {library} counts all: cut the data"
    if (too_long := options.get("too_long", "split")) != "split":
        yield f"documents longer than a row are treated otherwise (too_long: {too_long}): prepare the data"
    if "validation_share" in options:
        yield "the trial's validation documents were drawn by a digest (validation_share): write them to a file of their own"


def _sgd_arguments(chosen: ChosenSettings) -> str:
    _, keywords = torch_optimizer(chosen, chosen.even_settings)
    return f"momentum={keywords['momentum']},nesterov={keywords['nesterov']}"


def _held_out(share: str) -> str:
    return f"training takes {share} of the text; the trial's took all but every tenth document"


def _text_notes(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("tokenizer") == "bytes":
        yield "the trial's tokens were bytes, which the library cannot read: name a tokenizer"
    if not str(options["text"]).endswith((".json", ".jsonl", ".ndjson", *_FILE_KINDS)):
        yield f"space.text: a .jsonl file is read here, not {options['text']!r}: write a JSON object per line"


def _yaml(chosen: ChosenSettings, document: Mapping[str, Any], notes: list[str], launch: str) -> Exported:
    head = [f"bsearch study {chosen.study}, trial {chosen.trial} ({chosen.chosen}): {chosen.result}"]
    head += [f"note: {note}" for note in notes] + [f"launch: {launch}"]
    comments = "\n".join(commented(line) for line in head)
    return Exported(f"{comments}\n\n{yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)}", tuple(notes))


__all__ = ["LANGUAGE", "axolotl", "trl"]

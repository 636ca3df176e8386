"""A fine-tuning recipe as its library reads it: a YAML or JSON file of settings, or a command line in a file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from ....spaces.errors import Fault, StudyFileError
from ....spaces.files import text_of
from .forms import INDIFFERENT, Form, Meaning, form_of

_MOST_BYTES = 1 << 20
# What starts a training on several devices, and its arguments that say on how many.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "llamafactory-cli", "trl", "axolotl", "srun")
PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_processes", "--num_gpus")
_MACHINES = ("--nnodes", "--num_machines", "--num_nodes")
# Ways to split one sample's work over devices.
_NOT_DATA_PARALLEL = (
    *(
        "sequence_parallel_degree",
        "context_parallel_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "expert_parallel_size",
    ),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe.

    Args:
        settings: by the library's names.
        devices: that the recipe itself tells; None: it does not.
        line: it is a command line.
    """

    path: Path
    text: str
    form: Form
    settings: Mapping[str, Any]
    devices: int | None = None
    line: bool = False

    def get(self, meaning: Meaning) -> Any:
        """A setting by what it means; None: the recipe does not have it."""
        found = [self.settings[key] for key in self.form.keys.get(meaning, ()) if self.settings.get(key) is not None]
        return found[0] if found else None

    def key(self, meaning: Meaning) -> str:
        """The name of a setting, as the recipe has it, or as its library does."""
        names = self.form.keys[meaning]
        return next((name for name in names if name in self.settings), names[0])

    def number(self, meaning: Meaning) -> float | None:
        """A setting that is a number; None: the recipe does not have it.

        Raises:
            StudyFileError: it is something else, such as `auto`.
        """
        value = self.get(meaning)
        try:
            return None if value is None else float(value)  # YAML reads 2e-5 as text
        except (TypeError, ValueError):
            raise self.fault(self.key(meaning), f"expected a number, got {value!r}") from None

    def count(self, meaning: Meaning, default: int) -> int:
        """A setting that is an integer >= 1."""
        value = self.number(meaning)
        if value is None:
            return default
        if value < 1 or value != int(value):
            raise self.fault(self.key(meaning), f"expected an integer >= 1, got {self.get(meaning)!r}")
        return int(value)

    def is_on(self, meaning: Meaning) -> bool:
        """A setting that is true, also as text, or `auto`."""
        return str(self.get(meaning)).lower() in ("true", "auto", "1", "yes", "unsloth", "offload")

    @property
    def read(self) -> list[str]:
        """Keys that `port` uses."""
        return [key for key in self.settings if key in self.form.meanings]

    @property
    def kept(self) -> list[str]:
        """Keys that mean the same on any devices."""
        return [key for key in self.settings if key not in self.form.meanings and _is_indifferent(key)]

    @property
    def unknown(self) -> list[str]:
        return [key for key in self.settings if key not in self.form.meanings and not _is_indifferent(key)]

    def fault(self, key: str, message: str) -> StudyFileError:
        return StudyFileError(Fault(key, message, str(self.path)))


def _is_indifferent(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in INDIFFERENT)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        StudyFileError: it cannot be read, or is of no known form.
    """
    text = text_of(path, "a recipe", _MOST_BYTES)
    settings, devices, line = _settings(path, text)
    form = form_of(frozenset(settings))
    if form is None:
        raise StudyFileError(
            Fault(
                "",
                "expected the settings of Axolotl (base_model), LLaMA-Factory (finetuning_type) or transformers' Trainer "
                f"(per_device_train_batch_size), got {', '.join(list(settings)[:8]) or 'none'}",
                str(path),
            )
        )
    recipe = Recipe(path, text, form, settings, devices, line)
    for key in _NOT_DATA_PARALLEL:
        if str(settings.get(key, 1)) not in ("1", "None", "null"):
            raise recipe.fault(
                key, f"expected 1, since port knows recipes whose devices share the batch alone; got {settings[key]}"
            )
    return recipe


def _settings(path: Path, text: str) -> tuple[dict[str, Any], int | None, bool]:
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        try:
            found = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise StudyFileError(Fault("", f"cannot be read: {str(error).splitlines()[0]}", str(path))) from None
        if not isinstance(found, dict):
            raise StudyFileError(Fault("", f"expected a mapping of settings, got {type(found).__name__}", str(path)))
        return {str(key): value for key, value in found.items()}, None, False
    words = _command(path, text)
    return *_arguments(words), True


def _command(path: Path, text: str) -> list[str]:
    """The words of the line that trains, with the file's own variables."""
    joined = re.sub(r"\\\r?\n", " ", text)
    variables: dict[str, str] = {}
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise StudyFileError(Fault("", f"cannot be read as a command line: {error}", str(path))) from None
        words = [_expanded(word, variables) for word in words]
        while words and (set_here := re.fullmatch(r"(?:export\s+)?(\w+)=(.*)", words[0], re.S)):
            variables[set_here[1]] = set_here[2]
            words = words[1:]
        if words and words[0] == "export":
            variables |= dict(word.split("=", 1) for word in words[1:] if "=" in word)
        elif words and words[0].rpartition("/")[2] in _LAUNCHERS and any(word.startswith("--") for word in words):
            return words
    raise StudyFileError(
        Fault(
            "",
            f"expected a file that ends in .yaml or .json, or a command that starts with {', '.join(_LAUNCHERS[:4])}",
            str(path),
        )
    )


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)


def _arguments(words: list[str]) -> tuple[dict[str, Any], int | None]:
    """A command's settings, and its devices."""
    given: dict[str, Any] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else list(takewhile(lambda one: not one.startswith("--"), words[number + 1 :]))
        given[name] = True if not values else values[0] if len(values) == 1 else values
    devices = None
    processes, machines = (next((str(given[name]) for name in names if name in given), "1") for names in (PROCESSES, _MACHINES))
    if any(name in given for name in PROCESSES) and processes.isdigit():
        devices = int(processes) * (int(machines) if machines.isdigit() else 1)
    launch = {*PROCESSES, *_MACHINES, "--master_port", "--master_addr", "--node_rank", "--rdzv_backend", "--rdzv_endpoint"}
    launch |= {"--config_file", "--standalone", "--machine_rank", "--main_process_port", "--main_process_ip", "--rdzv_id"}
    return {name[2:]: value for name, value in given.items() if name not in launch}, devices


__all__ = ["PROCESSES", "Recipe", "read_recipe"]

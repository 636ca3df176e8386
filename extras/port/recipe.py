"""A fine-tuning recipe as its library reads it: a YAML or JSON file of settings, or a command line in a file."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from ...search.report.frameworks.library import Library, Setting
from ...spaces.boundary.files import foreign, text_of
from ...spaces.errors import Fault, StudyFileError, cut
from ...spaces.study.file import LimitedLoader
from .forms import INDIFFERENT, library_of

_MOST_BYTES, _MOST_ROWS, _LONGEST_LINE, _LONGEST_WORD = 1 << 17, 1 << 22, 1 << 16, 1 << 14
# What starts a training on several devices.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "llamafactory-cli", "trl", "axolotl", "srun")
# Its arguments that say on how many: of each machine, in all, and machines.
PER_MACHINE, IN_ALL = ("--nproc_per_node", "--nproc-per-node", "--num_gpus"), ("--num_processes",)
MACHINES = ("--nnodes", "--num_machines", "--num_nodes")
# Further ones of launchers, with one value each or none; they say nothing of a step.
_LAUNCH = (
    *("--master_port", "--master-port", "--master_addr", "--master-addr", "--node_rank", "--node-rank", "--rdzv_backend"),
    *("--rdzv-backend", "--rdzv_endpoint", "--rdzv-endpoint", "--rdzv_id", "--rdzv-id", "--machine_rank"),
    *("--main_process_port", "--main_process_ip"),
)
_LAUNCH_FLAGS = ("--standalone", "--multi_gpu", "--use_deepspeed", "--use_fsdp")
# Ways to split one sample's work over devices.
_OTHER_PARALLELISM = (
    "sequence_parallel_degree",
    *(f"{what}_parallel_size" for what in ("context", "tensor", "pipeline", "expert")),
)
# Trainings whose steps are not of one row a sample.
_OTHER_STAGES = {"stage": ("sft", "pt", "None"), "rl": ("None",)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe.

    Args:
        settings: by the library's names.
        devices: as the recipe states it; None: it does not.
        line: it is a command line.
    """

    path: Path
    text: str
    library: Library
    settings: Mapping[str, Any]
    devices: int | None = None
    line: bool = False

    def get(self, setting: Setting) -> Any:
        """A setting, with our meaning of its value, or the library's default; None: neither is known."""
        for name in self.library.table.get(setting, ()):
            given = self.settings.get(name.key)
            if name.read is not None and given is not None and (value := name.read(given)) is not None:
                return value
        return self.library.defaults.get(setting)

    def has(self, setting: Setting) -> bool:
        """Whether the recipe itself has it."""
        return any(self.settings.get(name.key) is not None for name in self.library.table.get(setting, ()) if name.read)

    def key(self, setting: Setting) -> str:
        """The name of a setting, as the recipe has it, or as its library does."""
        known = [name.key for name in self.library.table[setting] if name.read]
        return next((key for key in known if key in self.settings), known[0])

    def number(self, setting: Setting) -> float | None:
        """A setting that is a number; None: the recipe does not have it.

        Raises:
            StudyFileError: it is something else, such as `auto`.
        """
        value = self.get(setting)
        try:
            if isinstance(value, bool):
                raise TypeError
            return None if value is None else float(value)  # YAML reads 2e-5 as text
        except (TypeError, ValueError, OverflowError):
            raise self.fault(
                self.key(setting), f"expected a number, got {value!r}. Write the number that it stands for."
            ) from None

    def count(self, setting: Setting, default: int) -> int:
        """A setting that is an integer >= 1."""
        value = self.number(setting)
        if value is None:
            return default
        if not 1 <= value <= _MOST_ROWS or value != int(value):
            raise self.fault(self.key(setting), f"expected an integer from 1 to {_MOST_ROWS}, got {self.get(setting)!r}")
        return int(value)

    @property
    def read(self) -> list[str]:
        """Keys that `port` uses."""
        return [key for key in self.settings if key in self.library.read]

    @property
    def kept(self) -> list[str]:
        """Keys that mean the same on any devices."""
        return [key for key in self.settings if key not in self.library.read and _is_indifferent(key)]

    @property
    def unknown(self) -> list[str]:
        return [key for key in self.settings if key not in self.library.read and not _is_indifferent(key)]

    def fault(self, key: str, message: str) -> StudyFileError:
        return _fault(self.path, message, key)


def _fault(path: Path, message: str, key: str = "") -> StudyFileError:
    return StudyFileError(Fault(key, message, str(path)))


def reread(recipe: Recipe, text: str) -> Recipe:
    """The same file with another text."""
    return _recipe(recipe.path, text)


def _is_indifferent(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in INDIFFERENT)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        StudyFileError: it cannot be read, or is of no known form.
    """
    return _recipe(path, text_of(path, "a recipe", _MOST_BYTES))


def _recipe(path: Path, text: str) -> Recipe:
    settings, devices, line = _settings(path, text)
    library = library_of(frozenset(settings))
    if library is None:
        raise _fault(
            path,
            "expected the settings of Axolotl (base_model), LLaMA-Factory (finetuning_type) or transformers' Trainer "
            f"(per_device_train_batch_size), got {', '.join(list(settings)[:8]) or 'none'}",
        )
    recipe = Recipe(path, text, library, settings, devices, line)
    for key in _OTHER_PARALLELISM:
        if str(settings.get(key, 1)) not in ("1", "None"):
            raise recipe.fault(
                key, f"expected 1, since port knows recipes whose devices share the batch alone; got {settings[key]}"
            )
    for key, known in _OTHER_STAGES.items():
        if str(settings.get(key)) not in known:
            raise recipe.fault(key, f"expected supervised fine-tuning, whose steps port knows; got {settings[key]}")
    for outer, value in settings.items():
        if isinstance(value, dict) and (inner := [key for key in value if key in library.read and value[key] != "auto"]):
            raise recipe.fault(
                outer, f"expected settings of the batch outside of it, where port reads them; got {', '.join(inner)}"
            )
    return recipe


def _settings(path: Path, text: str) -> tuple[dict[str, Any], int | None, bool]:
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        with foreign(str(path), "a recipe"):
            try:
                is_json = path.suffix.lower() == ".json"
                found = json.loads(text, object_pairs_hook=_once) if is_json else _Once(text).get_single_data()
            except yaml.MarkedYAMLError as error:
                at = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
                raise _fault(path, f"{at}cannot be read as YAML: {error.problem or error.context}") from None
        if not isinstance(found, dict):
            raise _fault(path, f"expected a mapping of settings, got {type(found).__name__}")
        return {str(key): value for key, value in found.items()}, None, False
    return *_command(path, text), True


class _Once(LimitedLoader):
    """Refuses a key that a mapping has twice, of which libraries read one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = next((key for key, times in Counter(map(str, keys)).items() if times > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"expected {twice} once, got it twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key, times in Counter(keys).items() if times > 1), None)
    if twice is not None:
        raise ValueError(f"expected {twice} once, got it twice")
    return dict(pairs)


def _command(path: Path, text: str) -> tuple[dict[str, Any], int | None]:
    """The settings and devices of the one command that trains, with the file's own variables.

    Raises:
        StudyFileError: there is none, or several.
    """
    found: list[tuple[dict[str, Any], int | None]] = []
    variables: dict[str, str] = {}
    other: list[str] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if len(line) > _LONGEST_LINE:
            raise _fault(path, f"expected lines of at most {_LONGEST_LINE} characters, got one of {len(line)}")
        for words in _commands(line, path):
            words = [_expanded(word, variables) for word in words]
            while words and (set_here := re.fullmatch(r"(\w+)=(.*)", words[0], re.S)):
                variables[set_here[1]] = set_here[2]
                words = words[1:]
            if words and words[0] == "export":
                variables |= dict(word.split("=", 1) for word in words[1:] if "=" in word)
            elif words and words[0].rpartition("/")[2] in _LAUNCHERS and any(word.startswith("--") for word in words):
                settings, devices = _arguments(words, path)
                if library_of(frozenset(settings)) is not None:
                    found.append((settings, devices))
                else:
                    other += list(settings)
    if len(found) > 1:
        raise _fault(path, f"expected one command that trains, got {len(found)}")
    if not found:
        got = f"; got arguments {', '.join(other[:6])}" if other else ""
        launchers = ", ".join(_LAUNCHERS[:4])
        message = f"expected a file that ends in .yaml or .json, or a command of {launchers} with a batch{got}"
        raise _fault(path, message)
    return found[0]


def _commands(line: str, path: Path) -> list[list[str]]:
    """The words of each command of a line, up to what redirects or follows it."""
    try:
        # Without the number of the stream that is redirected, as in 2>&1.
        lexer = shlex.shlex(re.sub(r"(?<=\s)\d+(?=[<>])", "", line), posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError as error:
        raise _fault(path, f"cannot be read as a command line: {error}") from None
    commands: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("();<>|&"):
            commands.append(["#"] if set(word) & set("<>") else [])  # where output goes is no command
        else:
            commands[-1].append(word)
    return [command for command in commands if command and command[0] != "#"]


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    found = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)
    if len(found) > _LONGEST_WORD:  # variables that double each other
        raise StudyFileError(f"expected words of at most {_LONGEST_WORD} characters, got {cut(word, 60)}")
    return found


def _arguments(words: list[str], path: Path) -> tuple[dict[str, Any], int | None]:
    """A command's settings, and its devices.

    Raises:
        StudyFileError: it says on how many devices in a way that is not known.
    """
    launch = (*PER_MACHINE, *IN_ALL, *MACHINES, *_LAUNCH, "--include")
    one_value = (*launch, "--config_file", "--mixed_precision", "--dynamo_backend")  # which may say something of a step
    given: dict[str, Any] = {}
    for number, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        values = (
            [value]
            if equals
            else list(takewhile(lambda argument: not argument.startswith("-") or _is_number(argument), words[number + 1 :]))
        )
        values = values[:0] if name in _LAUNCH_FLAGS else values[:1] if name in one_value else values
        given[name] = True if not values else values[0] if len(values) == 1 else values
    if "--include" in given:
        value = str(given.pop("--include"))
        given["--num_gpus"] = str(value.count(",") + 1) if re.fullmatch(r"[\w.-]+:[\d,]+", value) else value

    def count(names: tuple[str, ...]) -> int | None:
        found = next((str(given[name]) for name in names if name in given), None)
        if found is not None and not re.fullmatch(r"[0-9]{1,6}", found):
            raise _fault(path, f"expected a number of processes or machines, got {found}. Write it out.", names[0])
        return None if found is None else int(found)

    in_all, each, machines = count(IN_ALL), count(PER_MACHINE), count(MACHINES)
    devices = in_all if in_all is not None else None if each is None else each * (machines or 1)
    return {name[2:]: value for name, value in given.items() if name not in (*launch, *_LAUNCH_FLAGS)}, devices


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", word) is not None

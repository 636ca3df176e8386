"""The reference page of the public Python interface, as Markdown from signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import bsearch

# The page's sections, and where their names live.
SECTIONS = {
    "Run and open studies": (
        "bsearch.cluster.study:run",
        "bsearch.cluster.study:Study",
        "bsearch.cluster.study:Trials",
        "bsearch.cluster.study:ExportedText",
    ),
    "Write a task": (
        "bsearch.objectives.task:Task",
        "bsearch.objectives.task:Data",
        "bsearch.objectives.task:Loss",
        "bsearch.objectives.task:Score",
        "bsearch.objectives.task:WholeSet",
        "bsearch.objectives.data.sample_weights:balanced",
    ),
    "Setup and measurements": (
        "bsearch.spaces.trial:TrialSetup",
        "bsearch.spaces.trial:Measurement",
        "bsearch.objectives.state.checkpoint:Checkpoint",
    ),
    "Trials of a study": ("bsearch.spaces.record:TrialRecord",),
    "The search alone": (
        "bsearch.search.suggest.ask_tell:Search",
        "bsearch.search.suggest.optuna.sampler:FrontSampler",
    ),
    "Plan a step": (
        "bsearch.spaces.plan:plan_batch",
        "bsearch.spaces.plan:BatchPlan",
        "bsearch.spaces.learning_rate:scaled_settings",
        "bsearch.spaces.learning_rate:OptimizerSettings",
    ),
    "Trainers": (
        "bsearch.objectives.adapters.huggingface:train_with",
        "bsearch.objectives.adapters.lightning:train_with",
    ),
    "Errors": tuple(
        f"bsearch.spaces.errors:{name}"
        for name in (
            "BsearchError",
            "StudyFileError",
            "TaskError",
            "ProfilingError",
            "InfeasiblePlanError",
            "LeftOutWarning",
            "StorageError",
            "NoStudyError",
            "ClusterError",
            "OutputError",
        )
    ),
}
# Parts of a docstring that list names, each with what it means.
LISTS = ("Args", "Attributes", "Raises", "Returns", "Yields")
_LINE = 100


def python_interface() -> Iterator[str]:
    """Every public name by section: where to import it from, its signature, its docstring, and its members."""
    for title, places in SECTIONS.items():
        yield f"## {title}\n"
        for place in places:
            module, _, name = place.partition(":")
            yield from _named(getattr(importlib.import_module(module), name), module, name)


def _named(thing: Any, module: str, name: str) -> Iterator[str]:
    top = name in bsearch.__all__
    yield f"### {name if top else f'{module}.{name}'}\n"
    yield f"```python\n{'from bsearch' if top else f'from {module}'} import {name}\n```\n"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        yield from _docstring(thing)
        return
    yield f"```python\n{_signature(thing, name)}\n```\n"
    yield from _docstring(thing)
    if not inspect.isclass(thing):
        return
    for own, member in vars(thing).items():
        if own.startswith("_") or not inspect.getdoc(member):
            continue
        inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if isinstance(member, property):
            yield f"#### {name}.{own}\n"
            yield f"```python\n{own}: {_annotation(inspect.signature(inner).return_annotation)}\n```\n"
        elif inspect.isfunction(inner):
            yield f"#### {name}.{own}()\n"
            yield f"```python\n{_signature(inner, own, bound=not isinstance(member, staticmethod))}\n```\n"
        else:
            continue
        yield from _docstring(inner)


def _signature(thing: Any, name: str, *, bound: bool = False) -> str:
    """A signature on one line, or with a line for each argument."""
    signature = inspect.signature(thing)
    parameters = list(signature.parameters.values())[bound:]
    texts, after_star = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not after_star:
            texts.append("*")
        after_star = after_star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        prefix = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        typed = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_default(one.default)}"
        texts.append(f"{prefix}{one.name}{typed}{default}")
    returned = signature.return_annotation
    result = "" if inspect.isclass(thing) or returned is signature.empty else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(texts)}){result}"
    return line if len(line) <= _LINE else f"{name}(\n    " + ",\n    ".join(texts) + f",\n){result}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: Any) -> str:
    # A dataclass's own sign for a default that is made each time.
    made = getattr(dataclasses, "_HAS_DEFAULT_FACTORY", None)
    if value is made:
        return "..."
    whole = dataclasses.is_dataclass(value) and not isinstance(value, type) and value == type(value)()
    return f"{type(value).__name__}()" if whole else repr(value)


def _docstring(thing: Any) -> Iterator[str]:
    """A docstring as Markdown: its sections as lists, its examples as code."""
    text = inspect.getdoc(thing) or ""
    for block in re.split(r"\n\s*\n", text):
        head, _, body = block.partition("\n")
        if head.rstrip(":") in LISTS and head.endswith(":"):
            yield f"*{head.rstrip(':')}*\n"
            yield from _items(inspect.cleandoc("\n" + body))
            yield ""
        elif head.startswith(">>>"):
            yield f"```python\n{block}\n```\n"
        else:
            yield f"{' '.join(line.strip() for line in block.splitlines())}\n"


def _items(text: str) -> Iterator[str]:
    """Entries such as `name: meaning`, with their continuation lines."""
    for entry in re.split(r"\n(?=\S)", text):
        words = " ".join(line.strip() for line in entry.splitlines())
        match = re.match(r"([\w*][\w*, ]*): (.*)", words)
        if match:
            names = ", ".join(f"`{one}`" for one in match[1].split(", "))
            yield f"- {names}: {match[2]}"
        else:
            yield f"- {words}"

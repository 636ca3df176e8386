"""A recipe with other values, in its own form: only what changes is touched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .recipe import PROCESSES, Recipe


def rewritten(recipe: Recipe, changes: Mapping[str, Any], devices: int) -> str:
    """The recipe's text with these settings; comments, order and all others stay.

    Args:
        devices: written into a command line that says how many there are.
    """
    text = recipe.text
    for key, value in changes.items():
        text = (_in_line if recipe.line else _in_json if recipe.path.suffix.lower() == ".json" else _in_yaml)(text, key, value)
    if recipe.line and recipe.devices is not None:
        for name in PROCESSES:
            text = re.sub(rf"({re.escape(name)}[ =]+)\S+", rf"\g<1>{devices}", text)
    return text


def _in_yaml(text: str, key: str, value: Any) -> str:
    found, count = re.subn(
        rf"(?m)^({re.escape(key)}[ \t]*:[ \t]*)[^#\r\n]*?([ \t]*(?:#.*)?)$", rf"\g<1>{_scalar(value)}\g<2>", text, count=1
    )
    if count:
        return found
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{key}: {_scalar(value)}\n"


def _in_json(text: str, key: str, value: Any) -> str:
    found, count = re.subn(
        rf'("{re.escape(key)}"\s*:\s*)("(?:[^"\\]|\\.)*"|[^,\s}}\]]+)', lambda one: one[1] + json.dumps(value), text, count=1
    )
    if count:
        return found
    return json.dumps({**json.loads(text), key: value}, indent=2) + "\n"


def _in_line(text: str, key: str, value: Any) -> str:
    found, count = re.subn(rf"(--{re.escape(key)}(?:=|\s+))[^\s\\]+", rf"\g<1>{value}", text, count=1)
    if count:
        return found
    return f"{text.rstrip()} --{key} {value}\n"


def _scalar(value: Any) -> str:
    return json.dumps(value)


__all__ = ["rewritten"]

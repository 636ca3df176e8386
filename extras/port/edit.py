"""A recipe with other values: only what changes is touched, and the result is read again to check it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...spaces.errors import StudyFileError
from .recipe import IN_ALL, MACHINES, PER_MACHINE, Recipe, reread

_BATCH = "per_device_train_batch_size"


def rewritten(recipe: Recipe, changes: Mapping[str, Any], devices: int) -> str:
    """The recipe's text with these settings; comments, order and all other settings stay.

    Args:
        devices: written into a command line that states their number.

    Raises:
        StudyFileError: the text cannot be edited so, as with anchors or settings in one line.
    """
    text = _edited(recipe, changes, devices)
    if _says(recipe, text, changes, devices):
        return text
    by_hand = ", ".join(f"{key}: {value}" for key, value in changes.items()) or "nothing else"
    processes = f", on {devices} processes" if recipe.line else ""
    raise recipe.fault("--out", f"cannot be rewritten automatically; change by hand: {by_hand}{processes}")


def _says(recipe: Recipe, text: str, changes: Mapping[str, Any], devices: int) -> bool:
    """Whether a text has the recipe's settings with these changed, read as its library reads it."""
    try:
        again = reread(recipe, text)
    except StudyFileError:
        return False
    expected = {key: str(value) for key, value in {**recipe.settings, **changes}.items()}
    return {key: str(value) for key, value in again.settings.items()} == expected and again.devices in (
        None if recipe.devices is None else devices,
    )


def _edited(recipe: Recipe, changes: Mapping[str, Any], devices: int) -> str:
    if recipe.path.suffix.lower() == ".json":  # which has no comments
        return json.dumps({**json.loads(recipe.text), **changes}, indent=2) + "\n"
    text, edit = recipe.text, _in_line if recipe.line else _in_yaml
    for key, value in changes.items():
        text = edit(text, key, value)
    if recipe.line and recipe.devices is not None:
        for names, count in ((PER_MACHINE, devices), (IN_ALL, devices), (MACHINES, 1)):
            for name in names:
                text = re.sub(rf"({re.escape(name)}[ =]+)\S+", rf"\g<1>{count}", text)
    return text


def _in_yaml(text: str, key: str, value: Any) -> str:
    quoted = rf"[\"']?{re.escape(key)}[\"']?"
    found, count = re.subn(
        rf"(?m)^({quoted}[ \t]*:[ \t]+)[^#\r\n]*?([ \t]*(?:#[^\r\n]*)?)(\r?)$",
        rf"\g<1>{_scalar(value)}\g<2>\g<3>",
        text,
        count=1,
    )
    if count:
        return found
    line = "\r\n" if "\r\n" in text else "\n"
    return f"{text}{'' if not text or text.endswith(line) else line}{key}: {_scalar(value)}{line}"


def _scalar(value: Any) -> str:
    """A value in YAML; with a point in a number like 2.0e-05, which is text to many readers without it."""
    return re.sub(r"^(-?\d+)e", r"\1.0e", json.dumps(value))


def _in_line(text: str, key: str, value: Any) -> str:
    """The argument where a line that is no comment has it, or beside the batch, which every command has."""

    def argument(name: str) -> str:
        return rf"(?m)^((?![ \t]*#).*?--{re.escape(name)}(?:=|[ \t]+))([^\s\\]+)"

    found, count = re.subn(argument(key), rf"\g<1>{value}", text, count=1)
    return found if count else re.sub(argument(_BATCH), rf"\g<1>\g<2> --{key} {value}", text, count=1)

"""What programs read: each command's answer as one line of JSON of a published schema (`answers.schema.json`), errors alike.

Schemas only grow: what an answer has, it keeps. An answer to a question has about `MOST` characters at most: lists are thinned
out, and `thinned` says by how many. Files, and what is asked for as a whole (`show --all`), are whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, TextIO

import click

from ....spaces.boundary.secrets import masked
from ....spaces.errors import StudyFileError, cut, cut_middle, plain
from .console import give, json_text

VERSION = 1
# Characters of an answer, and of a text in one that is too long.
MOST, _MOST_OF_TEXT = 4000, 800
# Digits of a number in an answer that is not whole.
_DIGITS = 6

# By their classes' names; an error of any other class has the kind of the first class above it that is here.
KINDS = {
    "StudyFileError": "study",
    "NoStudyError": "no_study",
    "UsageError": "usage",
    "KeyboardInterrupt": "interrupted",
}
KINDS |= {
    f"{kind.title()}Error": kind for kind in ("task", "profiling", "storage", "cluster", "output", "bsearch")
}
# How messages are written: where, what was expected, what came, what to do.
_MESSAGE = re.compile(
    r"(?s)(?:(?P<where>.{1,400}?): )?expected (?P<expected>.+?)(?:[,;:] (?:but )?got (?P<got>.+?))?"
    r"(?:\. (?P<do>[A-Z`].+)|\.?\s*)$"
)


def schemas() -> dict[str, Any]:
    """The JSON Schema of all answers: one of its `$defs` for each, by name."""
    text = resources.files(__package__).joinpath("answers.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def answer(name: str, document: Mapping[str, Any], *lists: str, whole: bool = False) -> str:
    """An answer as a line of JSON.

    Args:
        name: of its schema.
        lists: keys of lists that may be thinned out, the first of them first.
        whole: as long as it is, with every digit.
    """
    found = {"answer": name, "version": VERSION, **document}
    return json_text(found if whole else _short(_rounded(found), lists), indent=None)


def give_answer(
    name: str, document: Mapping[str, Any], *lists: str, whole: bool = False, file: TextIO | None = None
) -> None:
    """Print an answer; see `answer`."""
    give(answer(name, document, *lists, whole=whole), file)


def error_answer(error: BaseException, message: str = "") -> str:
    """An error as a line of JSON: its kind, where it is, what was expected, what came, and what to do.

    >>> told = json.loads(error_answer(StudyFileError("space.rule: expected linear or sqrt, got 'sqr'. Write sqrt.")))["error"]
    >>> [told[name] for name in ("kind", "where", "expected", "got", "do")]
    ['study', 'space.rule', 'linear or sqrt', "'sqr'", 'Write sqrt.']
    """
    kind = next((KINDS[one.__name__] for one in type(error).__mro__ if one.__name__ in KINDS), "internal")
    message = message or (error.message if isinstance(error, click.ClickException) else str(error))
    faults = [str(fault) for fault in error.faults] if isinstance(error, StudyFileError) else [message]
    first, *others = [_parts(plain(masked(fault))) for fault in faults]
    document: dict[str, Any] = {"error": {"kind": kind, **first}, **({"others": others} if others else {})}
    return answer("error", document, "others")


def _parts(message: str) -> dict[str, str]:
    """A message whole, and taken apart where it is written as messages are."""
    found = _MESSAGE.match(message)
    parts = {name: text for name, text in found.groupdict().items() if text} if found else {}
    return {"message": cut(message), **{name: cut(text, 400) for name, text in parts.items()}}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def _short(document: dict[str, Any], lists: Sequence[str]) -> dict[str, Any]:
    """A document of about `MOST` characters: long texts are cut, lists have both ends and evenly spaced ones between."""
    for name in lists:
        every = document.get(name) or []
        count = len(every)
        while count > 2 and len(json_text(document, indent=None)) > MOST:
            count = max(count * 3 // 4, 2)
            document = {
                **document,
                name: [every[round(row * (len(every) - 1) / (count - 1))] for row in range(count)],
            }
            document["thinned"] = {**document.get("thinned", {}), name: len(every) - count}
    return document if len(json_text(document, indent=None)) <= MOST else _cut_texts(document)


def _cut_texts(value: Any) -> Any:
    if isinstance(value, str):
        return cut_middle(value, _MOST_OF_TEXT)
    if isinstance(value, Mapping):
        return {name: _cut_texts(each) for name, each in value.items()}
    return [_cut_texts(each) for each in value] if isinstance(value, list) else value

"""The product's size has upper bounds, `[tool.bsearch.bounds]` in pyproject.toml, which only go down: whoever adds, deletes.

They count what is read, tokens, and not how it is set: lines got fewer and longer (docs/decisions/0073-a-bound.md).
"""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from bsearch.cli import main
from bsearch.commands.group import SECTIONS
from bsearch.spaces.record import TrialFacts
from bsearch.spaces.study.spec import StudySpec
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BOUNDS: dict[str, int] = PYPROJECT["tool"]["bsearch"]["bounds"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> Iterator[Path]:
    """Every module of the wheel."""
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        yield from (ROOT / Path(*package.split(".")[1:])).glob("*.py")


def tokens(paths: Iterable[Path]) -> int:
    """Python tokens without comments, docstrings and line ends: what is read, however it is set."""
    return sum(tokens_of(path.read_text(encoding="utf-8")) for path in paths)


@cache
def tokens_of(text: str) -> int:
    documented = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
    )
    docstrings = {node.body[0].lineno for node in documented if ast.get_docstring(node) is not None}
    read = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        not (each.type in UNREAD or (each.type == tokenize.STRING and each.start[0] in docstrings))
        for each in read
    )


UNREAD = {
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}


def of_core() -> Iterator[Path]:
    return (path for path in modules() if path.relative_to(ROOT).parts[0] != "extras")


def bytes_beside() -> int:
    """What else the wheel holds: templates, scripts, styles, schemas, data."""
    data: dict[str, list[str]] = PYPROJECT["tool"]["setuptools"]["package-data"]
    folders = ((ROOT / Path(*package.split(".")[1:]), patterns) for package, patterns in data.items())
    return sum(
        path.stat().st_size
        for folder, patterns in folders
        for pattern in patterns
        for path in folder.glob(pattern)
    )


def nodes(kind: Any) -> Iterator[tuple[str, Any]]:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kind):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def longest_function() -> tuple[int, str]:
    """Tokens, without decorators, signature and docstring."""
    return max(
        (sum(map(tokens_of, map(ast.unparse, statements(node)))), name) for name, node in nodes(FUNCTIONS)
    )


def statements(function: Any) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def largest_class() -> tuple[int, str]:
    return max(
        (sum(isinstance(part, FUNCTIONS) for part in node.body), name) for name, node in nodes(ast.ClassDef)
    )


def commands(group: click.Command = main) -> Iterator[click.Command]:
    if isinstance(group, click.Group):
        context = click.Context(group)  # a command is imported when it is asked for
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from commands(command)
    else:
        yield group


def options() -> int:
    """Options over all commands; one that several share counts with each."""
    return sum(isinstance(parameter, click.Option) for command in commands() for parameter in command.params)


def study_keys() -> int:
    """Keys of a study file, each section once; the keys of a range, which all parameters share, are left out."""
    found: set[type[BaseModel]] = set()

    def visit(model: type[BaseModel]) -> None:
        if model not in found:
            found.add(model)
            for field in model.model_fields.values():
                for section in sections(field.annotation):
                    visit(section)

    visit(StudySpec)
    return sum(len(section.model_fields) for section in found if section.__name__ not in RANGES)


RANGES = {"Range", "ReferenceRate", "Fixed"}


def sections(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return {section for argument in getattr(annotation, "__args__", ()) for section in sections(argument)}


def words(pages: Iterable[Path], without: str = "") -> int:
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.parent.name != without)


MEASURED = {
    "tokens": lambda: (tokens(modules()), ""),
    "tokens_of_core": lambda: (tokens(of_core()), ""),
    "tokens_of_tests": lambda: (tokens((ROOT / "tests").rglob("*.py")), ""),
    "bytes_beside": lambda: (bytes_beside(), ""),
    # A group of them, `jobs`, is one.
    "commands": lambda: (
        sum(map(len, SECTIONS.values())),
        ", ".join(name for some in SECTIONS.values() for name in some),
    ),
    "options": lambda: (options(), ""),
    "study_keys": lambda: (study_keys(), ""),
    "facts": lambda: (len(TrialFacts.__slots__) - 1, ""),  # without `extra`, the user's own
    "methods_of_a_class": largest_class,
    "tokens_of_a_function": longest_function,
    "words_of_readme": lambda: (words([ROOT / "README.md"]), ""),
    "words_of_docs": lambda: (words((ROOT / "docs").glob("**/*.md"), without="decisions"), ""),
    # The limit that every test has; `--durations` in the log of .ci/run shows the slowest.
    "seconds_of_a_test": lambda: (
        int(PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"].partition("--timeout=")[2].split()[0]),
        "",
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_product_keeps_within_its_bounds(name: str) -> None:
    measured, where = MEASURED[name]()
    assert measured <= BOUNDS[name], (
        f"{name}: {measured}, more than the bound of {BOUNDS[name]}. {where} Delete something."
    )


def test_every_bound_is_measured() -> None:
    assert set(BOUNDS) == set(MEASURED)


def test_a_token_is_what_is_read() -> None:
    assert tokens_of('"""A module."""\nx = f(1)  # a comment\n\n\n') == 6  # x = f ( 1 )

"""The identity of a task: a hash of what its code does, without importing it.

Comments, docstrings and layout do not change what trials measure, so they are not part of it: the hash is of the syntax tree,
and the same for every version of Python that parses the code to that tree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ..spaces.errors import TaskError, near_miss, plain

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def check_task_file(path: Path) -> None:
    if os.path.isfile(path):  # noqa: PTH113  # a name that is too long raises nothing here
        return
    siblings = [file.name for file in path.parent.glob("*.py")] if len(path.name) <= 100 else []
    raise TaskError(f"task file {plain(str(path))}: no such file.{near_miss(path.name, siblings)}")


def task_kind(reference: str) -> Literal["task", "huggingface", "lightning", "loop"] | None:
    """What a reference names, by its source alone: a Task, an adapter's loop, or a loop of one's own; None if unclear."""
    place, _, name = reference.rpartition(":")
    try:
        source = Path(place) if place.endswith(".py") else Path(importlib.util.find_spec(place).origin)  # type: ignore[union-attr, arg-type]
        defined, text = _definition(source, name)
    except Exception:  # finding a module imports its package, whose code may raise anything
        return None
    if isinstance(defined, ast.ClassDef):
        return "task"
    if isinstance(defined, ast.FunctionDef):
        adapters: tuple[Literal["huggingface", "lightning"], ...] = ("huggingface", "lightning")
        return next((adapter for adapter in adapters if f"bsearch.objectives.adapters.{adapter}" in text), "loop")
    return None


def _definition(source: Path, name: str) -> tuple[ast.stmt, str]:
    """A name's definition and its file's text, also where a package imports it from a module of its own.

    Raises:
        OSError, SyntaxError, LookupError: it cannot be read or found.
    """
    text = source.read_text(encoding="utf-8")
    for statement in ast.parse(text).body:
        if getattr(statement, "name", None) == name:
            return statement, text
        if isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.module:
            original = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), None)
            if original is not None:
                return _definition(source.parent / f"{statement.module.replace('.', '/')}.py", original)
    raise LookupError(name)


def task_code_hash(reference: str) -> str:
    """A hash of the code in the task's file and in the modules next to it that it imports: its identity, 16 hex digits.

    Raises:
        TaskError: the file cannot be found.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        source = Path(place)
    else:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError) as error:
            raise TaskError(f"task {reference}: no module {place!r}: {error}") from error
        if spec is None or spec.origin is None:
            raise TaskError(f"task {reference}: no module named {place!r}. Refer to a file as path/file.py:name.")
        source = Path(spec.origin)
    digest = hashlib.sha256(name.encode())
    for path in sorted(set(_with_neighbours(source, set())), key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + _code(path.read_bytes()))
    return digest.hexdigest()[:16]


def schedule_reference(schedule: str, folder: str | Path) -> str:
    """A schedule of one's own with its file's path made absolute, relative to the study file's folder."""
    place, _, name = schedule.rpartition(":")
    return f"{(Path(folder) / Path(place).expanduser()).resolve()}:{name}" if place.endswith(".py") else schedule


def schedule_code_hash(schedule: str, folder: str | Path) -> str:
    """The identity of a schedule of one's own, as a task's.

    Raises:
        TaskError: the file cannot be found.
    """
    try:
        return task_code_hash(schedule_reference(schedule, folder))
    except TaskError as error:
        raise TaskError(f"training.schedule: {schedule}: {str(error).removeprefix('task ')}") from None


@lru_cache(maxsize=256)
def _code(source: bytes) -> bytes:
    """The syntax tree without docstrings as text; code that cannot be parsed as it stands.

    >>> _code(b"def f(x):\\n    'Twice.'\\n    return (2 * x)  # quick") == _code(b"def f(x): return 2*x")
    True
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source
    parts: list[str] = []

    def write(value: Any) -> None:
        if isinstance(value, ast.AST):
            parts.append(f"({type(value).__name__}")
            for name, field in ast.iter_fields(value):
                if name == "body" and isinstance(value, _WITH_DOCSTRING) and ast.get_docstring(value, clean=False) is not None:
                    field = field[1:]
                if field not in (None, []):  # optional fields differ between versions of Python
                    parts.append(f" {name}=")
                    write(field)
            parts.append(")")
        elif isinstance(value, list):
            for element in value:
                write(element)
        else:
            parts.append(repr(value))

    write(tree)
    return "".join(parts).encode("utf-8", "surrogatepass")


def _with_neighbours(path: Path, seen: set[Path]) -> Iterator[Path]:
    """The file and all files next to it that it imports, directly or indirectly."""
    if path in seen:
        return
    check_task_file(path)
    seen.add(path)
    yield path
    for name in _imported(path.read_bytes()):
        neighbour = path.parent / f"{name}.py"
        if neighbour.is_file():
            yield from _with_neighbours(neighbour, seen)


@lru_cache(maxsize=256)
def _imported(source: bytes) -> tuple[str, ...]:
    """The first parts of the names that code imports; none of code that cannot be parsed."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += (alias.name for alias in node.names)
    return tuple(dict.fromkeys(name.split(".")[0] for name in names))

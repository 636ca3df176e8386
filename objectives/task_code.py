"""The identity of a task: a hash of what its code does, without importing it.

Comments, docstrings and layout do not change what trials measure, so they are not part of it: the hash is of the syntax tree,
and the same for every version of Python that parses the code to that tree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ..spaces.errors import TaskError, near_miss, plain

# Names of the folder of installed packages.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
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
        return next(
            (adapter for adapter in adapters if f"bsearch.objectives.adapters.{adapter}" in text), "loop"
        )
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
            original = next(
                (alias.name for alias in statement.names if (alias.asname or alias.name) == name), None
            )
            if original is not None:
                return _definition(source.parent / f"{statement.module.replace('.', '/')}.py", original)
    raise LookupError(name)


def task_code_hash(reference: str) -> str:
    """A hash of the code in the task's file and in all its own modules that it imports: its identity, 16 hex digits.

    Raises:
        TaskError: the file cannot be found.
    """
    place, _, name = reference.rpartition(":")
    source = _source(reference, place)
    digest = hashlib.sha256(name.encode())
    folders = sorted({source.parent, import_root(source)}, key=lambda folder: -len(folder.parts))
    labels = {path: _label(path, folders) for path in task_sources(source)}
    for path, label in sorted(labels.items(), key=lambda found: found[1]):
        digest.update(label.encode() + b"\0" + _code(path.read_bytes()))
    return digest.hexdigest()[:16]


def task_packages(reference: str) -> dict[str, str]:
    """The versions of the installed packages that a task's own modules import, by name: its code, without what they do.

    Raises:
        TaskError: the file cannot be found.
    """
    names = {
        name.partition(".")[0] for path in sources_of(reference) for _, name in _imported(path.read_bytes())
    }
    found: dict[str, str] = {}
    for name in sorted(names - sys.stdlib_module_names - {"bsearch", ""}):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def task_libraries(reference: str) -> list[str]:
    """What a task's own modules import from installed packages, as dotted names of modules or of what is in them.

    Raises:
        TaskError: the file cannot be found.
    """
    names = {
        name for path in sources_of(reference) for level, name in _imported(path.read_bytes()) if not level
    }
    return sorted(name for name in names if _is_installed(name.partition(".")[0]))


def _is_installed(name: str) -> bool:
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name)
        return spec is not None and bool(_INSTALLED.intersection(Path(spec.origin or "").parts))
    return False


def sources_of(reference: str) -> tuple[Path, ...]:
    """The files of a task's own modules; a TaskError if its own cannot be found."""
    return task_sources(_source(reference, reference.rpartition(":")[0]))


def _source(reference: str, place: str) -> Path:
    if place.endswith(".py"):
        check_task_file(Path(place))
        return Path(place).resolve()
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError) as error:
        raise TaskError(f"task {reference}: no module {place!r}: {error}") from error
    if spec is None or spec.origin is None:
        raise TaskError(f"task {reference}: no module named {place!r}. Refer to a file as path/file.py:name.")
    return Path(spec.origin)


def _label(path: Path, folders: Sequence[Path]) -> str:
    """A file's name in the identity, the same wherever the task's folder lies."""
    for folder in folders:
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def import_root(path: Path) -> Path:
    """The folder from which a file is imported by its full name: the one above its top package, or its own.

    >>> import_root(Path("/nowhere/tasks.py")).as_posix()
    '/nowhere'
    """
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    return folder


def schedule_reference(schedule: str, folder: str | Path) -> str:
    """A schedule of one's own with its file's path made absolute, relative to the study file's folder."""
    place, _, name = schedule.rpartition(":")
    return (
        f"{(Path(folder) / Path(place).expanduser()).resolve()}:{name}" if place.endswith(".py") else schedule
    )


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
                if (
                    name == "body"
                    and isinstance(value, _WITH_DOCSTRING)
                    and ast.get_docstring(value, clean=False) is not None
                ):
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


def task_sources(source: Path) -> tuple[Path, ...]:
    """A task's file and all files that it imports, directly or indirectly, but for installed packages and Python's own.

    Files are looked for beside each file, above the task's package, and where Python finds modules that are not installed, such
    as those of an editable installation. Only statements count: what is imported by a computed name is not seen.
    """
    own, root = source.parent, import_root(source)
    found: dict[Path, None] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        if (package := path.parent / "__init__.py").is_file():
            waiting.append(package)  # it runs before its modules
        if path.is_relative_to(Path(__file__).parent):
            continue  # a task of bsearch's, whose version says what it does
        for level, name in _imported(path.read_bytes()):
            if level:
                places = [path.parents[level - 1]] if level <= len(path.parents) else []
            else:
                places = [*dict.fromkeys((own, root, path.parent)), *_outside(name.partition(".")[0])]
            waiting += next(filter(None, (_files(place, name) for place in places)), [])
    return tuple(found)


def _files(folder: Path, name: str) -> list[Path]:
    """The files that importing a dotted name from a folder runs; none where it is not there."""
    found, here = list[Path](), folder
    for number, part in enumerate(filter(None, name.split("."))):
        package, module = here / part / "__init__.py", here / f"{part}.py"
        if package.is_file():
            found.append(package.resolve())
        elif module.is_file():
            return [*found, module.resolve()]
        elif not (here / part).is_dir():
            return found if number else []  # a name that the module before it defines
        here /= part
    return found


def _outside(name: str) -> Iterator[Path]:
    """The folder of a top-level module that is neither installed nor Python's own."""
    if name in sys.stdlib_module_names or name in ("bsearch", ""):
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return
    for place in [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else ():
        path = Path(place or "")
        if path.is_absolute() and not _INSTALLED.intersection(path.parts):
            yield path.parent.parent if path.name == "__init__.py" else path.parent
            return


@lru_cache(maxsize=1024)
def _imported(source: bytes) -> tuple[tuple[int, str], ...]:
    """What code imports, or runs as a script: levels (dots of a relative import) and dotted names; none of what is no code."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    names: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= dict.fromkeys((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            names |= dict.fromkeys(
                (node.level, f"{start}{alias.name}".removesuffix(".*")) for alias in node.names
            )
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run_script":
            paths = [
                one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            names |= dict.fromkeys((0, path[:-3].replace("/", ".")) for path in paths if path.endswith(".py"))
            names |= dict.fromkeys((0, path[3:]) for path in paths if path.startswith("-m "))
    return tuple(names)

"""Finding the user's training code by name, and telling whether it is still the same code."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..spaces.errors import ObjectiveError
from ..spaces.study import near_miss
from .task import Task, TrainFunction


def load_objective(reference: str) -> Task | TrainFunction:
    """The task or generator function that `module:name` or `path/file.py:name` names.

    Raises:
        ObjectiveError: no such file, module or name; code that does not import; neither task nor generator.
    """
    place, _, name = reference.rpartition(":")
    module = _module(place, reference)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ObjectiveError(f"task {reference}: expected {name!r} in {place}, got no such name.{near_miss(name, known)}")
    found: Any = getattr(module, name)
    if isinstance(found, type) and issubclass(found, Task):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ObjectiveError(f"task {reference}: expected the methods data and model, got no {', '.join(missing)}")
        try:
            return found()
        except Exception as error:
            raise ObjectiveError(f"task {reference}: {name}() failed: {type(error).__name__}: {error}") from error
    if isinstance(found, Task):
        return found
    if inspect.isgeneratorfunction(found):
        return found  # type: ignore[no-any-return]
    kind = "a function that yields nothing" if inspect.isfunction(found) else f"a {type(found).__name__}"
    raise ObjectiveError(
        f"task {reference}: expected a Task or a generator function `def train(setup): ... yield Measurement(...)`, got {kind}"
    )


def _module(place: str, reference: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        return importlib.import_module(place)
    except ObjectiveError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}" if error.filename else place
        raise ObjectiveError(f"task {reference}: {where}: syntax error: {error.msg}") from error
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            hint = " Name a file as path/file.py:name." if not place.endswith(".py") else ""
            raise ObjectiveError(f"task {reference}: no module named {error.name!r}.{hint}") from error
        raise ObjectiveError(f"task {reference}: it imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ObjectiveError(
            f"task {reference}: importing it failed at {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
        ) from error


def _check_file(path: Path) -> None:
    if os.path.isfile(path):  # noqa: PTH113  # a name too long is no file, and no error
        return
    beside = [one.name for one in path.parent.glob("*.py")] if len(path.name) <= 100 else []
    raise ObjectiveError(f"task file {path}: no such file.{near_miss(path.name, beside)}")


def _module_of_file(path: Path) -> ModuleType:
    _check_file(path)
    path = path.resolve()
    name = f"bsearch_task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    # The file's neighbours are importable from it, as they are when it is run as a script.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def objective_hash(reference: str) -> str:
    """A hash of the code's file and of the neighbours it imports: the task's identity, 16 hex digits.

    Raises:
        ObjectiveError: the file cannot be found.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        source = Path(place)
    else:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError) as error:
            raise ObjectiveError(f"task {reference}: no module {place!r}: {error}") from error
        if spec is None or spec.origin is None:
            raise ObjectiveError(f"task {reference}: no module named {place!r}. Name a file as path/file.py:name.")
        source = Path(spec.origin)
    digest = hashlib.sha256(name.encode())
    for path in sorted(set(_with_neighbours(source, set())), key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _with_neighbours(path: Path, seen: set[Path]) -> Iterator[Path]:
    """The file and every file beside it that it imports, and those they import."""
    if path in seen:
        return
    _check_file(path)
    seen.add(path)
    yield path
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *names]
        for name in names:
            neighbour = path.parent / (name.split(".")[0] + ".py")
            if neighbour.is_file():
                yield from _with_neighbours(neighbour, seen)


def users_line(error: BaseException) -> str:
    """` (file:line)` of the innermost line of the user's own code that an error went through, or nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    ours = str(Path(__file__).parent)
    users = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f" ({users[-1].filename}:{users[-1].lineno})" if users else ""

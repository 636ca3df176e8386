"""Loading the user's training code by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..spaces.errors import TaskError, near_miss
from ..spaces.given import number_of
from ..spaces.schedule import Schedule, is_own
from ..spaces.trial import TrialSetup
from .machine.process_state import is_users
from .task import Task, TrainFunction
from .task_code import check_task_file, schedule_reference


def load_task(reference: str) -> Task | TrainFunction:
    """Load the task or generator function named by `module:name` or `path/file.py:name`.

    Raises:
        TaskError: no such file, module or name; the import failed; or neither a task nor a generator.
    """
    place, _, name = reference.rpartition(":")
    found = _defined(f"task {reference}", place, name)
    if isinstance(found, type) and issubclass(found, Task):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise TaskError(f"task {reference}: expected the methods data and model, missing {', '.join(missing)}")
        try:
            with contained():
                return found()
        except (Exception, SystemExit) as error:
            raise TaskError(f"task {reference}: {name}() failed: {described(error)}") from error
    if isinstance(found, Task):
        return found
    if inspect.isgeneratorfunction(found):
        return found  # type: ignore[no-any-return]
    kind = "a function that yields nothing" if inspect.isfunction(found) else f"a {type(found).__name__}"
    raise TaskError(
        f"task {reference}: expected a Task or a generator function `def train(setup): ... yield Measurement(...)`, got {kind}"
    )


# Fractions of the budget, in equal steps, at which a schedule of one's own is looked at before it is used.
_LOOKS = 100


def schedule_of(setup: TrialSetup) -> Schedule:
    """The name of the study's schedule, or the function of one's own that it names.

    Raises:
        TaskError: no such file, module or function; the import failed; it raises, or does not return finite numbers >= 0.
    """
    reference = setup.training.schedule
    if not is_own(reference):
        return reference
    where = f"training.schedule: {reference}"
    place, _, name = schedule_reference(reference, setup.folder).rpartition(":")
    try:
        found = _defined(where, place, name)
    except TaskError as error:
        raise TaskError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    if not callable(found):
        raise TaskError(f"{where}: expected a function of the fraction of the budget, got {type(found).__name__}")
    for fraction in (look / _LOOKS for look in range(_LOOKS + 1)):
        try:
            with contained():
                share = number_of(f"{where}: at {fraction:g} of the budget", found(fraction))
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"{where}: it failed at {fraction:g} of the budget: {described(error)}") from error
        if not 0 <= share < math.inf:
            raise TaskError(
                f"{where}: expected a finite share of the peak rate >= 0 at {fraction:g} of the budget, got {share:g}"
            )
    return found  # type: ignore[no-any-return]


def _defined(where: str, place: str, name: str) -> Any:
    """What a file or a module defines by a name."""
    module = _module(place, where)
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise TaskError(f"{where}: expected {place} to define {name!r}, but it does not.{near_miss(name, known)}")
    return getattr(module, name)


def _module(place: str, where: str) -> ModuleType:
    try:
        with contained():
            return _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except TaskError:
        raise
    except SyntaxError as error:
        line = f"{error.filename}:{error.lineno}" if error.filename else place
        raise TaskError(f"{where}: {line}: syntax error: {error.msg}") from error
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            hint = " Refer to a file as path/file.py:name." if not place.endswith(".py") else ""
            raise TaskError(f"{where}: no module named {error.name!r}.{hint}") from error
        raise TaskError(f"{where}: it imports {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raised = error.__cause__ if isinstance(error, NoException) and error.__cause__ is not None else error
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        words = described(raised).removesuffix(user_code_location(raised))
        raise TaskError(f"{where}: importing it failed at {frame.filename}:{frame.lineno}: {words}") from error


class _Uncached(SourceFileLoader):
    """Compiles the file as it is now: cached bytecode of the same second and length could be of an older text."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _module_of_file(path: Path) -> ModuleType:
    check_task_file(path)
    path = path.resolve()
    name = f"bsearch_task_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    # Modules next to the file can be imported, as when it is run as a script.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def user_code_location(error: BaseException) -> str:
    """` (file:line)` of the innermost frame of the user's code in an error's traceback, or an empty string."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
            place = f" ({frame.f_code.co_filename}:{line})"
    return place


class NoException(Exception):
    """What user code raised that is no `Exception`, such as a panic of a library in Rust; raised from it."""


@contextmanager
def contained() -> Iterator[None]:
    """Context of user code in which nothing is raised but an `Exception`, a `SystemExit` or Ctrl-C.

    Raises:
        NoException: from anything else.
    """
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise NoException from error


def described(error: BaseException) -> str:
    """An error of user code as `Type: message (file:line)`."""
    raised = error.__cause__ if isinstance(error, NoException) and error.__cause__ is not None else error
    try:
        text = str(raised)
    except Exception as failed:
        text = f"its message cannot be read: {type(failed).__name__}"
    return f"{type(raised).__name__}: {text}{user_code_location(raised)}"

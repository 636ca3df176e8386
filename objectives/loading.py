"""Loading the user's training code by name."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ..spaces.boundary.given import number_of
from ..spaces.errors import TaskError, near_miss
from ..spaces.schedule import Schedule, is_own
from ..spaces.trial import TrialSetup
from .task import Task, TrainFunction
from .task_code import check_task_file, import_root, schedule_reference, sources_of
from .task_modules import is_users, module_name


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
            raise TaskError(
                f"task {reference}: expected the methods data and model, missing {', '.join(missing)}"
            )
        try:
            with contained():
                return found()
        except (Exception, SystemExit) as error:
            raise TaskError(f"task {reference}: {name}() failed: {described(error)}") from error
    if isinstance(found, Task):
        return found
    # What a lambda returns is looked at when it is called.
    if callable(found) and (
        inspect.isgeneratorfunction(inspect.unwrap(found)) or getattr(found, "__name__", "") == "<lambda>"
    ):
        return found  # type: ignore[no-any-return]
    kind = "a function that yields nothing" if inspect.isfunction(found) else f"a {type(found).__name__}"
    raise TaskError(
        f"task {reference}: expected a Task or a generator function `def train(setup): ... yield Measurement(...)`, got {kind}"
        f"{'. A decorated one needs functools.wraps' * inspect.isfunction(found)}"
    )


def load_anew(reference: str) -> Task | TrainFunction:
    """The same from modules that are imported once more, as in a new process; where they cannot be, from those there are."""
    sources = set(map(str, sources_of(reference)))
    kept = {
        name: module for name, module in sys.modules.items() if getattr(module, "__file__", None) in sources
    }
    kept = {name: module for name, module in kept.items() if is_users(str(module.__file__), name)}
    # A package's attribute may be something else of the same name, such as a function.
    packages = {name: (sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in kept}
    held = [
        (package, own, vars(package)[own])
        for package, own in packages.values()
        if package and own in vars(package)
    ]
    try:
        with suppress(TaskError):
            for name in kept:
                del sys.modules[name]
            return load_task(reference)
    finally:
        sys.modules.update(kept)
        for package, own, value in held:
            setattr(package, own, value)
    return load_task(reference)


# Fractions of the budget, in equal steps, at which a user's schedule is checked before it is used.
_LOOKS = 100


def schedule_of(setup: TrialSetup) -> Schedule:
    """The name of the study's schedule, or the user's function that it names.

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
        raise TaskError(
            f"{where}: expected a function of the fraction of the budget, got {type(found).__name__}"
        )
    for fraction in (look / _LOOKS for look in range(_LOOKS + 1)):
        try:
            with contained():
                share = number_of(f"{where}: at {fraction:g} of the budget", found(fraction))
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(
                f"{where}: it failed at {fraction:g} of the budget: {described(error)}"
            ) from error
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
        raise TaskError(
            f"{where}: expected {place} to define {name!r}, but it does not.{near_miss(name, known)}"
        )
    return getattr(module, name)


def _beside(place: str, name: str | None) -> str:
    """What helps where a missing package is a folder above the task's own."""
    top = (name or "").partition(".")[0]
    if not place.endswith(".py") or top not in Path(place).resolve().parent.parts:
        return ""
    return f". The folder {top!r} is not a package: add an __init__.py to it and to the folders between it and the task's file"


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
        raise TaskError(
            f"{where}: it imports {error.name!r}, which is not installed{_beside(place, error.name)}"
        ) from error
    except (Exception, SystemExit) as error:
        line, advice = user_code_line(_raised(error)), ""
        if isinstance(error, SystemExit):
            advice = (
                ". What a script does when it is run, such as parsing arguments, belongs under `if "
                "__name__ == '__main__':`"
            )
        at = f" at {line}" if line else ""
        raise TaskError(f"{where}: importing it failed{at}: {_words(error)}{advice}") from error


def _module_of_file(path: Path) -> ModuleType:
    check_task_file(path)
    path = path.resolve()
    # What lies beside a file can be imported, as when it is run as a script: by the processes that it starts too.
    if (root := str(import_root(path))) not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(_name_of(path))


def _name_of(path: Path) -> str:
    """The name under which a file is imported: its own in its package, unless another package has it; else one for its path."""
    root = import_root(path)
    parts = path.relative_to(root).with_suffix("").parts
    taken = sys.modules.get(parts[0])
    if root == path.parent or (
        taken is not None and str(root / parts[0]) not in getattr(taken, "__path__", ())
    ):
        return module_name(path)
    return (
        ".".join(parts).removesuffix(".__init__") if all(map(str.isidentifier, parts)) else module_name(path)
    )


def user_code_location(error: BaseException) -> str:
    """` (file:line)` of the user's code where an error arose, or an empty string."""
    line = user_code_line(error)
    return f" ({line})" if line else ""


def user_code_line(error: BaseException) -> str:
    """The file and line of the innermost frame of the user's code in an error's traceback, or an empty string."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
            place = f"{frame.f_code.co_filename}:{line}"
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
    return f"{_words(error)}{user_code_location(_raised(error))}"


def error_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


def _words(error: BaseException) -> str:
    """An error of user code as `Type: message`."""
    raised = _raised(error)
    try:
        text = str(raised)
    except Exception as failed:
        text = f"its message cannot be read: {type(failed).__name__}"
    return f"{type(raised).__name__}: {text}"


def _raised(error: BaseException) -> BaseException:
    """What user code raised, of what `contained` made of it."""
    return error.__cause__ if isinstance(error, NoException) and error.__cause__ is not None else error


def line_of(function: Any, folder: str) -> str:
    """`file:line: ` of a function, relative to a folder where it lies there; empty where it is not known."""
    with suppress(OSError, TypeError):
        function, inside = inspect.unwrap(function), Path(folder).resolve()
        file = Path(inspect.getsourcefile(function) or "")
        name = file.relative_to(inside) if file.is_relative_to(inside) else file.name
        return f"{name}:{inspect.getsourcelines(function)[1]}: "
    return ""

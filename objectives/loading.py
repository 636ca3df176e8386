"""Loading the user's training code by name."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..spaces.errors import TaskError, near_miss
from ..spaces.schedule import Schedule, is_own
from ..spaces.trial import TrialSetup
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
            return found()
        except Exception as error:
            raise TaskError(f"task {reference}: {name}() failed: {type(error).__name__}: {error}") from error
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
            share = float(found(fraction))
        except Exception as error:
            raise TaskError(f"{where}: it failed at {fraction:g} of the budget: {type(error).__name__}: {error}") from error
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
        if place.endswith(".py"):
            return _module_of_file(Path(place))
        return importlib.import_module(place)
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
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            f"{where}: importing it failed at {frame.filename}:{frame.lineno}: {type(error).__name__}: {error}"
        ) from error


class _Uncached(SourceFileLoader):
    """Compiles the file as it is now: cached bytecode of the same second and length could be of an older text."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _module_of_file(path: Path) -> ModuleType:
    check_task_file(path)
    path = path.resolve()
    name = f"bsearch_task_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}_{path.stem}"
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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    package = str(Path(__file__).parent)
    user_frames = [frame for frame in frames if not frame.filename.startswith(package)]
    return f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""

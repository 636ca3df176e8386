"""What a training may change in its process for the next one there: kept as it was before each.

A default dtype, an environment variable or a working directory that one trial sets would silently be those of the next trial in
its process, and not of one in another process: the same setting would have two results. So each is read before an attempt, and
set back after it. What cannot be set back, such as a thread that runs on, is named: such a process trains nothing else, where
there can be another. Random numbers need not be kept, since every attempt seeds them; nor can it be seen that code has
replaced a function, or what a library keeps in variables of its own.
"""

from __future__ import annotations

import decimal
import gc
import locale
import multiprocessing
import os
import resource
import signal
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_modules
from torch.optim import Optimizer

from .. import task_modules
from .environment import enter_folder_or_above, working_folder

# Variables that libraries set for themselves when they are imported, which may be in the midst of an attempt.
_OF_LIBRARIES = ("KMP_", "TORCHINDUCTOR_", "TRITON_", "MLFLOW_")
# The most names of variables or threads in a message.
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class _Setting:
    """Something that a process keeps: how it is read, and how it is set back. `name` is for messages."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


@dataclass(slots=True)
class Changes:
    """What a training has changed in its process, in words: what was set back, and what could not be."""

    restored: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = []
        if self.restored:
            parts.append(f"changed {', '.join(self.restored)}; restored afterwards")
        if self.left:
            parts.append(f"left behind {', '.join(self.left)}: Ray replaces the process, --serial keeps it")
        return "; ".join(parts)


@contextmanager
def kept_process() -> Iterator[Changes]:
    """Context of a training after which its process is as it was before; yields what had changed, known at its end."""
    global _current
    changes, settings = Changes(), [*_settings()]
    threads = set(threading.enumerate())
    before = _current = {setting.name: setting.read() for setting in settings}
    _collect_once()
    gc.collect(1)  # what was made since
    if freezes := not gc.get_freeze_count():
        gc.freeze()
    try:
        yield changes
    finally:
        if freezes:
            gc.unfreeze()
        _current = {}
        for setting in settings:
            _set_back(setting, before[setting.name], changes)
        if threads_left := [
            thread for thread in threading.enumerate() if thread not in threads and _runs_users_code(thread)
        ]:
            changes.left.append(f"threads still running ({_listed(thread.name for thread in threads_left)})")
        _left.extend(changes.left)


@cache
def _collect_once() -> None:
    """Every training collects the garbage it has made, and torch alone is a million objects: what is older is left out of that.

    So garbage that imports left is collected before the first.
    """
    gc.collect()


def left_behind() -> str:
    """What earlier trainings in this process have left behind that could not be set back, in words; empty where nothing."""
    return _listed(_left)


# Also of trainings that were stopped before they could say so.
_left: list[str] = []


def adopt(*names: str) -> None:
    """Take settings as they are now for those before the training: bsearch itself has set them for it."""
    settings = {setting.name: setting for setting in _settings()} if _current else {}
    for name in names:
        if name in _current:
            _current[name] = settings[name].read()


# Settings by name as they were before the attempt that runs now; empty between attempts.
_current: dict[str, Any] = {}


def _set_back(setting: _Setting, was: Any, changes: Changes) -> None:
    try:
        now = setting.read()
        if now == was:
            return
        if isinstance(now, dict) and isinstance(was, dict):
            different = sorted(str(name) for name in {*now, *was} if now.get(name) != was.get(name))
            words = f"{setting.name} {_listed(different)}"
        else:
            words = setting.name
        setting.write(was)
        (changes.restored if setting.read() == was else changes.left).append(words)
    except Exception as error:  # each library raises its own
        changes.left.append(f"{setting.name} ({type(error).__name__}: {error})")


def _listed(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:_MOST_NAMES]) + (
        f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    )


# What is kept


@cache
def _settings() -> tuple[_Setting, ...]:
    return (*_of_torch(), *_of_python(), *_of_system())


def _attribute(name: str, owner: Any, attribute: str) -> Iterator[_Setting]:
    """An attribute of a module or object; none where this version does not have it."""
    try:
        getattr(owner, attribute)
    except (AttributeError, RuntimeError):
        return
    yield _Setting(name, lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value))


def _of_torch() -> Iterator[_Setting]:
    backends, cuda = torch.backends, torch.backends.cuda
    yield _Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield _Setting("torch's default device", torch.get_default_device, _set_default_device)
    yield _Setting("torch's deterministic algorithms", _determinism, lambda was: _set_determinism(*was))
    yield from _attribute(
        "torch.utils.deterministic.fill_uninitialized_memory",
        torch.utils.deterministic,
        "fill_uninitialized_memory",
    )
    yield _Setting(PRECISIONS, _precisions, _set_precisions)
    yield _Setting(THREADS, torch.get_num_threads, torch.set_num_threads)
    yield _Setting("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled)
    yield _Setting("torch's anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
    yield _Setting("denormal numbers", _flushes_denormals, torch.set_flush_denormal)
    yield _Setting(
        "torch.multiprocessing's sharing strategy",
        torch.multiprocessing.get_sharing_strategy,
        torch.multiprocessing.set_sharing_strategy,
    )
    for kind in ("cpu", "cuda"):
        yield _Setting(
            f"autocast on {kind}",
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        yield _Setting(
            f"autocast's dtype on {kind}",
            partial(torch.get_autocast_dtype, kind),
            partial(torch.set_autocast_dtype, kind),
        )
    for name in ("enabled", "deterministic", "benchmark_limit"):
        yield from _attribute(f"cudnn.{name}", backends.cudnn, name)
    yield from _attribute(BENCHMARK, backends.cudnn, "benchmark")
    yield from _attribute("mkldnn.enabled", backends.mkldnn, "enabled")
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        yield from _attribute(f"cuda.matmul.{name}", cuda.matmul, name)
    for name in ("flash", "math", "mem_efficient", "cudnn"):
        read, write = getattr(cuda, f"{name}_sdp_enabled", None), getattr(cuda, f"enable_{name}_sdp", None)
        if read is not None and write is not None:
            yield _Setting(f"cuda.{name}_sdp", read, write)
    for hooks in (
        name for name in vars(torch_modules) if name.startswith("_global") and name.endswith("_hooks")
    ):
        yield from _contents(f"torch.nn.modules.module.{hooks}", getattr(torch_modules, hooks))
    optimizers = sys.modules[Optimizer.__module__]
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        if isinstance(registered := getattr(optimizers, hooks, None), dict):
            yield from _contents(f"torch.optim.optimizer.{hooks}", registered)


# Settings that bsearch itself makes for a training (`torch_settings`).
PRECISIONS, THREADS, BENCHMARK = "precision of matrix products", "torch's threads", "cudnn.benchmark"


def _contents(name: str, kept: dict[Any, Any]) -> Iterator[_Setting]:
    """What a dictionary holds; it stays the same object."""

    def write(was: tuple[Any, ...]) -> None:
        kept.clear()
        kept.update(was)

    yield _Setting(name, lambda: tuple(kept.items()), write)


def _set_default_device(device: torch.device) -> None:
    # Without one, torch says CPU; set explicitly, every call would take a slower path.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(enabled: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _precision_owners() -> Iterator[tuple[Any, str]]:
    # The general ones first: setting those sets the others too.
    yield torch.backends, "fp32_precision"
    for library, operations in (
        ("cuda", ("matmul",)),
        ("cudnn", ("conv", "rnn")),
        ("mkldnn", ("matmul", "conv", "rnn")),
    ):
        owner = getattr(torch.backends, library)
        if library != "cuda":
            yield owner, "fp32_precision"
        for operation in operations:
            yield getattr(owner, operation, None), "fp32_precision"


def _precisions() -> tuple[Any, ...]:
    """The precision of each kind of product, by torch's older names, None where code has mixed them with the newer ones, which
    lets reading them raise; and by the newer ones, of 2.9 and later. `none` is what `ieee` is.
    """
    try:
        older: tuple[Any, ...] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        older = None, None
    newer = [getattr(owner, name, None) for owner, name in _precision_owners()]
    return *older, *("ieee" if value == "none" else value for value in newer)


def _set_precisions(was: tuple[Any, ...]) -> None:
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]  # with another, setting the older names raises
    if was[0] is not None:
        torch.set_float32_matmul_precision(was[0])
        torch.backends.cudnn.allow_tf32 = was[1]
    for (owner, name), value in zip(_precision_owners(), was[2:], strict=True):
        now = getattr(owner, name, None)
        if value is not None and value != ("ieee" if now == "none" else now):
            setattr(owner, name, value)


_SMALLEST = [sys.float_info.min]  # in a list, so that no product of it is computed beforehand


def _flushes_denormals() -> bool:
    return _SMALLEST[0] * 0.5 == 0.0


def _of_python() -> Iterator[_Setting]:
    yield _Setting("environment variables", _variables, _set_variables)
    yield _Setting("sys.path", lambda: [*sys.path], lambda was: sys.path.__setitem__(slice(None), was))
    yield _Setting("warnings raised as errors", _raised_warnings, _set_raised_warnings)
    yield _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Setting("the trace function", sys.gettrace, sys.settrace)
    yield _Setting("the profile function", sys.getprofile, sys.setprofile)
    yield _Setting("garbage collection", lambda: (gc.isenabled(), gc.get_threshold()), _set_collection)
    yield _Setting(
        "the locale", lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)
    )
    yield _Setting("the decimal context", _decimal_context, _set_decimal_context)
    yield _Setting("NumPy's errors", np.geterr, lambda was: np.seterr(**was))
    yield _Setting("the default timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout)
    yield _Setting(
        "the start method of multiprocessing",
        # Not yet chosen, it is the first, and loaders choose it.
        lambda: (
            multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        ),
        partial(multiprocessing.set_start_method, force=True),
    )


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_LIBRARIES)}


def _set_variables(was: dict[str, str]) -> None:
    for name in _variables().keys() - was.keys():
        del os.environ[name]
    os.environ.update(was)


def _raised_warnings() -> list[Any]:
    return [entry for entry in warnings.filters if entry[0] == "error"]


def _set_raised_warnings(was: list[Any]) -> None:
    others = [entry for entry in warnings.filters if entry[0] != "error"]
    # Where errors stood among the others is of no use to what ran in between.
    warnings.resetwarnings()
    for entry in reversed([*was, *others]):
        warnings.filters.insert(0, entry)  # type: ignore[attr-defined]


def _set_collection(was: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if was[0] else gc.disable)()
    gc.set_threshold(*was[1])


def _decimal_context() -> tuple[Any, ...]:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax, tuple(context.traps.items())


def _set_decimal_context(was: tuple[Any, ...]) -> None:
    context = decimal.getcontext()
    context.prec, context.rounding, context.Emin, context.Emax = was[:4]
    context.traps.update(was[4])


def _of_system() -> Iterator[_Setting]:
    yield _Setting("the working directory", working_folder, enter_folder_or_above)
    if Path(
        "/proc/self/status"
    ).exists():  # asking the system otherwise would change it for a moment, for all threads
        yield _Setting("the umask", _umask, os.umask)
    yield _Setting("signal handlers", _handlers, _set_handlers)
    yield _Setting("an alarm", lambda: signal.getitimer(signal.ITIMER_REAL) == (0, 0), _stop_alarm)
    yield _Setting("limits", _limits, _set_limits)
    if hasattr(os, "sched_getaffinity"):
        yield _Setting(
            "the cores it may use", partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
        )
    yield _Setting(
        "the priority",
        partial(os.getpriority, os.PRIO_PROCESS, 0),
        partial(os.setpriority, os.PRIO_PROCESS, 0),
    )


def _stop_alarm(was_off: bool) -> None:
    if was_off:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _umask() -> int:
    for line in Path("/proc/self/status").read_bytes().split(b"\n"):
        if line.startswith(b"Umask:"):
            return int(line.split()[1], 8)
    return 0o022


@cache
def _signals() -> tuple[signal.Signals, ...]:
    return tuple(number for number in signal.Signals if number not in (signal.SIGKILL, signal.SIGSTOP))


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in _signals()}


def _set_handlers(was: dict[str, Any]) -> None:
    for name, handler in was.items():
        number = signal.Signals[name]
        if handler is not None and signal.getsignal(number) is not handler:  # None: not of Python
            signal.signal(number, handler)


_LIMITS = {
    name: getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _set_limits(was: dict[str, tuple[int, int]]) -> None:
    for name, limits in was.items():
        if resource.getrlimit(_LIMITS[name]) != limits:
            resource.setrlimit(_LIMITS[name], limits)


def _runs_users_code(thread: threading.Thread) -> bool:
    """Whether a thread runs code that is neither Python's, nor an installed library's, nor bsearch's."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if is_users(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
            return True
        frame = frame.f_back
    return False


_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(file: str, module: str) -> bool:
    """Whether code of this file and module is the user's.

    >>> is_users("/home/ann/tasks.py", "tasks"), is_users("<frozen importlib._bootstrap>", "importlib._bootstrap")
    (True, False)
    """
    ours = module.partition(".")[0] == __name__.partition(".")[0] and not module.startswith(
        f"{task_modules.__name__}."
    )
    return not (ours or file.startswith(("<", *_LIBRARIES)) or "site-packages" in file)

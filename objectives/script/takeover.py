"""What a script calls of torch, taken over while it runs: batches come in parts; what is done once a step waits for the last.

A step that is one part is untouched: the script then does what it does without us.
"""

from __future__ import annotations

import builtins
import bz2
import glob
import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial, wraps
from itertools import chain
from types import MethodType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ...spaces.errors import TaskError
from .files import FilesApart


class Driver(Protocol):
    """What decides which batches a script gets."""

    @property
    def files(self) -> FilesApart:
        """Where its files go."""

    @property
    def share(self) -> float:
        """What the loss of the current part counts in its step; 1 between steps."""

    @property
    def is_last(self) -> bool:
        """Whether the current part is its step's last; true between steps."""

    @property
    def has_gradients(self) -> bool:
        """Whether earlier parts of the current step have left gradients that have not been stepped with."""

    @property
    def skips(self) -> bool:
        """Whether the script passes over what an earlier attempt has trained."""

    def loader_made(self, loader: DataLoader[Any]) -> None:
        """The script has made a loader."""

    def trains(self, loader: DataLoader[Any]) -> bool:
        """Whether a loader is iterated to train, and not to evaluate."""

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The parts of a pass over a loader that trains."""

    def back_propagates(self, loss: Tensor) -> None:
        """A part is about to add gradients, of this loss."""

    def back_propagated(self) -> None:
        """It has."""

    def stepped(self) -> None:
        """An optimizer has stepped."""

    def wrote(self, text: str) -> None:
        """The script has written to its output, or reported a metric."""

    def told_length(self) -> None:
        """The script has asked a loader for its number of batches."""

    def schedules(self, scheduler: Any, step: Any) -> None:
        """A scheduler is to take a step; None where it is told to which."""


class Made:
    """What a script has made so far, in order; held weakly, as the script may drop it."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Any]] = []
        self.in_backward, self.process = False, os.getpid()

    def add(self, one: Any) -> None:
        self._all.append(weakref.ref(one))

    def of(self, kind: type) -> list[Any]:
        return [one for ref in self._all if isinstance(one := ref(), kind)]

    def models(self) -> list[nn.Module]:
        """The modules with parameters or buffers that no other module contains."""
        modules = self.of(nn.Module)
        inner = {id(child) for module in modules for child in module.modules() if child is not module}
        return [
            one
            for one in modules
            if id(one) not in inner and any(True for _ in chain(one.parameters(), one.buffers()))
        ]


# The scripts that run now, by their threads; what they call of torch and Python is taken over while there is one.
_running: dict[int, tuple[Driver, Made]] = {}
# Threads that scripts have started, such as a logger's: their files are the script's.
_started: dict[int, tuple[Any, Made]] = {}
_lock, _replaced, _here = threading.Lock(), ExitStack(), threading.local()


@contextmanager
def aside() -> Iterator[None]:
    """Context in which it is not the script that runs in this thread, but what gives it its batches and files."""
    before, _here.aside = getattr(_here, "aside", False), True
    try:
        yield
    finally:
        _here.aside = before


def running_script(*, of_files: bool = False) -> tuple[Any, Made] | None:
    """The script that runs in this thread; None where there is none, or it is not it that runs."""
    if getattr(_here, "aside", False):
        return None
    thread = threading.get_ident()
    return _running.get(thread) or (_started.get(thread) if of_files else None)


@contextmanager
def taken_over(driver: Driver, made: Made) -> Iterator[None]:
    """Context in which this thread's script runs."""
    thread = threading.get_ident()
    with _lock:
        if not _running:
            _take_over()
        _running[thread] = driver, made
    try:
        yield
    finally:
        with _lock:
            del _running[thread]
            if not _running:
                _replaced.close()


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Call `ours(original, driver, made, ...)` in the original's place, where a script does so."""
    original = getattr(owner, name)

    @wraps(original)
    def chosen(*arguments: Any, **named: Any) -> Any:
        if (script := running_script(of_files=ours in _OF_FILES)) is None:
            return original(*arguments, **named)
        return ours(original, *script, *arguments, **named)

    own = name in vars(owner)
    setattr(owner, name, chosen)
    _replaced.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def _take_over() -> None:
    for kind in (nn.Module, LRScheduler, GradScaler, DataLoader):
        _replace(kind, "__init__", _noted)
    _replace(nn.Module, "__setstate__", _noted)  # of a copy
    _replace(Optimizer, "__init__", _optimizer_made)
    _replace(DataLoader, "__iter__", _iterated)
    _replace(DataLoader, "__len__", _length)
    _replace(Tensor, "backward", _back_propagated)
    _replace(Optimizer, "zero_grad", _cleared)
    _replace(nn.Module, "zero_grad", _cleared)
    for kind in _schedulers():
        _replace(kind, "step", _scheduled)
    for name in ("step", "update", "unscale_"):
        _replace(GradScaler, name, _at_last)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for owner in (nn.utils, nn.utils.clip_grad):
            _replace(owner, name, _at_last)
    _audit()
    for owner, name in ((builtins, "open"), (io, "open"), (tarfile, "bltn_open"), (bz2, "_builtin_open")):
        _replace(owner, name, _opened)
    # C++ writes and reads these, which no audit hook sees.
    for module in (torch, torch.export, torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):  # type: ignore[attr-defined]
        _replace(module, "save", _saved)
    for owner in (torch, torch.export, torch.jit):
        _replace(owner, "load", _loaded)
    with suppress(ImportError):
        import safetensors.torch

        for owner in (safetensors, safetensors.torch):
            _replace(owner, "serialize_file", _saved)
            _replace(owner, "safe_open", _of_safetensors)
    _replace(os, "mkdir", _folder_made)
    _replace(os, "open", _opened_by_flags)
    for name in ("stat", "lstat", "access", "chmod", "utime"):
        _replace(os, name, _looked_up)
    for name in ("listdir", "scandir"):
        _replace(os, name, _listed)
    for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
        _replace(owner, name, _removed)
    for name in ("rename", "replace", "link"):
        _replace(os, name, _renamed)
    _replace(os, "symlink", _linked)
    _replace(threading.Thread, "start", _thread_begun)
    _replace(os, "_exit", _exited)
    for owner, name in ((torch, "set_num_interop_threads"), (signal, "signal")):
        _replace(owner, name, _left_out)
    for owner in (multiprocessing, torch.multiprocessing):
        _replace(owner, "set_start_method", _left_out)
    if torch.distributed.is_available():
        _replace(torch.distributed, "init_process_group", _several_processes)
    for name in ("stdout", "stderr"):
        _replaced.callback(setattr, sys, name, getattr(sys, name))
        setattr(sys, name, _Written(getattr(sys, name), passes_on=name == "stderr"))


def _left_out(original: Any, driver: Driver, made: Made, *arguments: Any, **named: Any) -> None:
    """What a process does once, or in its main thread: the process is not the script's."""


def _exited(original: Any, driver: Driver, made: Made, status: int) -> None:
    """It would end the trial's process too, and the whole run without a word where that is one; its children may."""
    if os.getpid() != made.process:
        original(status)
    raise SystemExit(status)


def _several_processes(original: Any, driver: Driver, made: Made, *arguments: Any, **named: Any) -> None:
    raise TaskError(
        "expected a script of one process, got one that joins others by torch.distributed.init_process_group"
    )


def _noted(original: Any, driver: Driver, made: Made, self: Any, *arguments: Any, **named: Any) -> None:
    made.add(self)
    original(self, *arguments, **named)
    if isinstance(self, DataLoader):
        with aside():
            driver.loader_made(self)


def _length(original: Any, driver: Driver, made: Made, self: Any) -> Any:
    driver.told_length()
    return original(self)


def _optimizer_made(
    original: Any, driver: Driver, made: Made, self: Optimizer, *arguments: Any, **named: Any
) -> None:
    original(self, *arguments, **named)
    made.add(self)
    _take_over_loaded()
    # On the instance, since subclasses have their own; a method, since schedulers wrap it.
    own = type(self).step

    @wraps(own)
    def step(self: Optimizer, *arguments: Any, **named: Any) -> Any:
        if not driver.is_last:
            return arguments[0]() if arguments and callable(arguments[0]) else None
        loss = own(self, *arguments, **named)
        driver.stepped()
        return loss

    self.step = MethodType(step, self)  # type: ignore[method-assign]


def _iterated(original: Any, driver: Driver, made: Made, loader: DataLoader[Any]) -> Any:
    return driver.batches(loader) if driver.trains(loader) else original(loader)


def _back_propagated(
    original: Any,
    driver: Driver,
    made: Made,
    self: Tensor,
    gradient: Tensor | None = None,
    *arguments: Any,
    **named: Any,
) -> None:
    """Of a part's share of its step's loss."""
    if made.in_backward:  # torch calls it by its name again where a function mode is active
        original(self, gradient, *arguments, **named)
        return
    if driver.share != 1.0:
        gradient = driver.share * (torch.ones_like(self) if gradient is None else gradient)
    driver.back_propagates(self)
    made.in_backward = True
    try:
        original(self, gradient, *arguments, **named)
    finally:
        made.in_backward = False
    driver.back_propagated()


def _cleared(original: Any, driver: Driver, made: Made, *arguments: Any, **named: Any) -> None:
    if not driver.has_gradients:
        original(*arguments, **named)


def _at_last(original: Any, driver: Driver, made: Made, *arguments: Any, **named: Any) -> Any:
    """What is done once a step, after its last part; and not while passing over what was trained before."""
    return original(*arguments, **named) if driver.is_last and not driver.skips else torch.zeros(())


def _scheduled(original: Any, driver: Driver, made: Made, self: Any, *arguments: Any, **named: Any) -> None:
    if driver.is_last and not driver.skips:
        with aside():  # those that it steps itself are its own affair
            driver.schedules(
                None if arguments or named else self, partial(original, self, *arguments, **named)
            )


# Events of Python that change files, or hand them to other programs, with how many of their arguments name these.
_CHANGES = {
    "open": 1,
    "os.truncate": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.chmod": 1,
    "sqlite3.connect": 1,
    "os.system": 1,
    "subprocess.Popen": 2,
    "os.posix_spawn": 2,
    "os.exec": 2,
}
_PROGRAMS = ("os.system", "subprocess.Popen", "os.posix_spawn", "os.exec")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@cache
def _audit() -> None:
    """Refuse by name, from now on, what would change a file of the user's in a way that is not taken over."""
    sys.addaudithook(_audited)


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if (
        event not in _CHANGES
        or (event == "open" and not arguments[2] & _WRITES)
        or (script := running_script(of_files=True)) is None
    ):
        return
    files = arguments[: _CHANGES[event]]
    with aside():
        if event in _PROGRAMS:
            words = [
                os.fsdecode(word)
                for word in (files[-1] if isinstance(files[-1], list | tuple) else files[-1:])
            ]
            # The first is the program.
            first, *found = re.findall(r"[^\s=;|&<>'\"]+", " ".join(words)) or [""]
            named = [] if first == "mkdir" and not found[2:] else [*words[1:], *found]
            files = (*named, *chain.from_iterable(map(glob.glob, named)))
        for file in files:
            script[0].files.check(file)


@aside()
def _place(
    driver: Driver,
    file: Any,
    *,
    writes: bool,
    removes: bool = False,
    keeps: bool = False,
    dir_fd: int | None = None,
) -> Any:
    if dir_fd is not None:
        file = f"/proc/self/fd/{dir_fd}/{os.fsdecode(file)}"
    return driver.files.place_of(file, writes=writes, removes=removes, keeps=keeps)


def _opened(
    original: Any, driver: Driver, made: Made, file: Any, mode: str = "r", *arguments: Any, **named: Any
) -> Any:
    writes = any(letter in mode for letter in "wax+")
    place = _place(driver, file, writes=writes, keeps=not any(letter in mode for letter in "wx"))
    opened = original(place, mode, *arguments, **named)
    with aside():
        return driver.files.opened(opened, file, writes=writes)


def _opened_by_flags(
    original: Any, driver: Driver, made: Made, path: Any, flags: int, *arguments: Any, **named: Any
) -> int:
    place = _place(driver, path, writes=bool(flags & _WRITES), keeps=True, dir_fd=named.get("dir_fd"))
    return int(original(place, flags, *arguments, **named))


def _listed(original: Any, driver: Driver, made: Made, path: Any = ".") -> Any:
    with aside():
        beside = driver.files.beside(path)
    found = original(_place(driver, path, writes=False))
    if beside is None:
        return found
    if isinstance(found, list):
        return sorted({*found, *original(beside)})
    return _Scanned({entry.name: entry for entry in chain(found, original(beside))}.values())


class _Scanned(chain[Any]):
    """Entries of folders, as `os.scandir` gives them."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to close."""

    close = __exit__


_OF_FILES: list[Any] = [_opened, _opened_by_flags, _listed]


def _with_files(**ways: str) -> Callable[..., Any]:
    """Call a function with its first arguments in place; of what deletes, all that it calls is ours.

    Args:
        ways: by name, whether the function reads, writes or deletes the file: "r", "w" or "d"; empty for what is no file.
    """

    def ours(original: Any, driver: Driver, made: Made, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(ways, arguments, strict=False)) | named
        for name, way in ways.items():
            if way and name in given:
                given[name] = _place(
                    driver, given[name], writes=way == "w", removes=way == "d", dir_fd=named.get("dir_fd")
                )
        first = [given.pop(name) for name in ways if name in given]
        with aside() if "d" in ways.values() else nullcontext():
            return original(*first, *arguments[len(ways) :], **given)

    _OF_FILES.append(ours)
    return ours


_saved, _loaded, _looked_up = _with_files(obj="", f="w"), _with_files(f="r"), _with_files(path="r")
_folder_made, _of_safetensors = _with_files(path="w"), _with_files(filename="r")
_removed = _with_files(path="d")
_renamed = _with_files(src="d", dst="w")
_linked = _with_files(src="", dst="w")


def _thread_begun(original: Any, driver: Driver, made: Made, self: threading.Thread) -> None:
    run, files = self.run, SimpleNamespace(files=driver.files)

    def inherited() -> None:
        _started[threading.get_ident()] = files, made
        try:
            run()
        finally:
            del _started[threading.get_ident()]

    self.run = inherited  # type: ignore[method-assign]
    original(self)


def _schedulers() -> list[Any]:
    """Torch's schedulers that have a step of their own."""
    kinds: list[Any] = [LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in dict.fromkeys(kinds) if "step" in vars(kind)]


class _Written:
    """An output that gives a script's text to its driver, and all else to where it went before; warnings go there too."""

    def __init__(self, before: Any, *, passes_on: bool) -> None:
        self._before, self._passes_on = before, passes_on

    def write(self, text: str) -> int:
        if (script := running_script()) is not None:
            script[0].wrote(text)
        if self._passes_on or script is None:
            self._before.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


def report(**metrics: Any) -> None:
    """Report metrics of a script, after a pass over its training data: `bsearch.report(accuracy=0.9)`.

    Has no effect when the script runs by itself.
    """
    if (script := running_script()) is not None:
        for name, value in metrics.items():
            with suppress(TypeError, ValueError):  # images and texts are for a tracker
                script[0].wrote(f"\n{name}: {float(value)!r}\n")


def _take_over_loaded() -> None:
    """Of what the script has loaded: Accelerate's loader, which fetches a batch ahead."""
    loaders = sys.modules.get("accelerate.data_loader")
    with _lock:
        if loaders is not None and not hasattr(loaders.DataLoaderShard.__iter__, "__wrapped__"):
            _replace(loaders.DataLoaderShard, "__iter__", _shard_iterated)


def _shard_iterated(original: Any, driver: Driver, made: Made, loader: Any) -> Iterator[Any]:
    if not driver.trains(loader):
        yield from original(loader)
        return
    from accelerate.utils import send_to_device

    loader.begin()
    for batch in driver.batches(loader.base_dataloader):
        yield batch if loader.device is None else send_to_device(batch, loader.device)
    loader.end()

"""What scripts log to W&B, MLflow and TensorBoard, taken instead of sent: stand-ins for these modules while a script runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.utils

from .takeover import report, running_script

_NAMES = ("wandb", "mlflow", "tensorboardX", "torch.utils.tensorboard")


@contextmanager
def trackers_replaced() -> Iterator[None]:
    """Context in which this thread's script imports stand-ins for those of these modules that are installed."""
    ours, missing = _Finder([name for name in _NAMES if _is_installed(name)]), object()
    before = {name: module for name, module in list(sys.modules.items()) if ours.has(name)}
    attribute = vars(torch.utils).pop("tensorboard", missing)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, ours)
    try:
        yield
    finally:
        sys.meta_path.remove(ours)
        for name in [name for name in list(sys.modules) if ours.has(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        vars(torch.utils).pop("tensorboard", None)
        vars(torch.utils).update({} if attribute is missing else {"tensorboard": attribute})


@cache
def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for each of these modules and those within them."""

    def __init__(self, names: list[str]) -> None:
        self._names, self._tracker = names, {name: _Tracker() for name in names}

    def has(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{one}.") for one in self._names)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True) if self.has(fullname) and running_script() else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(
            spec.name,
            next(self._tracker[one] for one in self._names if f"{spec.name}.".startswith(f"{one}.")),
        )

    def exec_module(self, module: ModuleType) -> None:
        """It has no code."""


class _Silent:
    """It has every attribute, can be called, entered and indexed, and does nothing; a function that it decorates stays."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Whatever it is made of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else _Silent()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: object) -> Any:
        return _Silent()

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _Config(dict[str, Any]):
    """W&B's: a mapping whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def as_dict(self) -> dict[str, Any]:
        return dict(self)

    def update(self, given: Any = None, **named: Any) -> None:  # type: ignore[override]
        named.pop("allow_val_change", None)
        super().update(given if isinstance(given, Mapping) else getattr(given, "__dict__", {}), **named)


class _Tracker(_Silent):
    """A run, a logger or a writer: the numbers that it is given are reported."""

    resumed = disabled = False
    id = name = "bsearch"
    dir, log_dir, logdir = "wandb", "runs", "runs"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.config = _Config()

    def log(self, data: Any = None, *arguments: Any, **named: Any) -> None:
        data = named.get("metrics") if data is None else data
        if isinstance(data, Mapping):
            report(**{name: value for name, value in data.items() if isinstance(name, str)})

    log_metrics = log

    def log_metric(self, key: str = "", value: Any = None, *arguments: Any, **named: Any) -> None:
        report(**{named.get("tag", key): named.get("scalar_value", value)})

    add_scalar = log_metric

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: Mapping[str, Any], *arguments: Any, **named: Any
    ) -> None:
        report(**{f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()})


class _Module(ModuleType):
    """The module of a tracker, or one within it, whose functions are those of its one run."""

    def __init__(self, name: str, tracker: _Tracker) -> None:
        super().__init__(name)
        self.run, self._tracker = None, tracker
        self.SummaryWriter = _Tracker

    def init(self, *arguments: Any, **named: Any) -> Any:
        self._tracker.config.update(named.get("config"))
        self.run = self._tracker  # type: ignore[assignment]
        return self._tracker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent if name[0].isupper() else getattr(self._tracker, name)

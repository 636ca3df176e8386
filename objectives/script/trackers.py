"""What scripts log to W&B, MLflow and TensorBoard, taken instead of sent: stand-ins for these modules while a script runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .takeover import report

_NAMES = ("wandb", "mlflow", "tensorboardX", "torch.utils.tensorboard")


def stand_ins(script: Path) -> dict[str, ModuleType]:
    """Modules in the place of those that a script, or a module beside it, imports."""
    return {name: _Module(name) for name in _NAMES if imports(script, name)}


def imports(script: Path, module: str) -> bool:
    """Whether a script, or a module beside it, imports this one."""
    imported = re.compile(rf"^\s*(?:import|from)\s[^#\n]*(?<![\w.]){re.escape(module)}\b", re.MULTILINE)
    return any(imported.search(path.read_text("utf-8", "replace")) for path in script.parent.glob("*.py"))


class _Silent:
    """It has every attribute, can be called, entered and indexed, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _Silent()

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

    def update(self, *given: Any, **named: Any) -> None:
        named.pop("allow_val_change", None)
        super().update(
            *(vars(one) if hasattr(one, "__dict__") and not isinstance(one, dict) else one for one in given), **named
        )


class _Tracker(_Silent):
    """A run, a logger or a writer: the numbers that it is given are reported."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.config = _Config()
        self.config.update(named.get("config") or {})

    def log(self, data: Any = None, *arguments: Any, **named: Any) -> None:
        if isinstance(data, Mapping):
            report(**{name: value for name, value in data.items() if isinstance(name, str)})

    log_metrics = log

    def log_metric(self, key: str = "", value: Any = None, *arguments: Any, **named: Any) -> None:
        report(**{key: value})

    add_scalar = log_metric

    def add_scalars(self, tag: str, values: Mapping[str, Any], *arguments: Any, **named: Any) -> None:
        report(**{f"{tag}/{name}": value for name, value in values.items()})


class _Module(ModuleType):
    """The module of a tracker, whose functions are those of its one run."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []
        self._tracker = _Tracker()
        self.SummaryWriter = _Tracker

    def init(self, *arguments: Any, **named: Any) -> Any:
        self._tracker.config.update(named.get("config") or {})
        return self._tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

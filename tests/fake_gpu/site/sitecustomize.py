"""Read by every Python process whose path holds this folder: gives it the cards that the environment names.

They are installed as soon as torch has been imported, in processes that a test's process starts, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class _AfterTorch:
    """Finds torch as ever, and installs the cards once it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            # Which installs them, where it does not wait for torch itself.
            importlib.import_module("fake_gpu.device")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("FAKE_GPU"):
    sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]

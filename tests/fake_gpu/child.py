"""Run a function in a process of its own, in which the cards of `device.py` are installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


def environment(cards: Any, **variables: str) -> dict[str, str]:
    """The environment of a process, and of all that it starts, with these `Cards`."""
    # The first folder holds what each process reads when it starts.
    places = [str(TESTS / "fake_gpu" / "site"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        **({"FAKE_GPU": cards.to_variable()} if cards.count else {}),  # without a card nothing is installed
        "PYTHONDONTWRITEBYTECODE": "",  # torch compiled anew takes as long as most of these tests
        **variables,
    }


def in_child(
    function: Callable[..., Mapping[str, Any]], cards: Any = None, *args: Any, **variables: str
) -> dict[str, Any]:
    """What `function(*args)` returns in a process with these cards; as JSON, in which tuples are lists.

    Raises:
        AssertionError: the process failed; the message is what it printed.
    """
    if cards is None:
        from fake_gpu.device import Cards

        cards = Cards()
    return returned(function, environment(cards, **variables), *args)


def returned(
    function: Callable[..., Mapping[str, Any]], variables: Mapping[str, str], *args: Any
) -> dict[str, Any]:
    """The same in a process with this environment."""
    with tempfile.TemporaryDirectory(prefix="fake-gpu-") as folder:
        out = Path(folder) / "out.json"
        told = [f"{function.__module__}:{function.__qualname__}", json.dumps(args), str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "fake_gpu.child", *told],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (
            f"{told[0]} ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> None:
    where, args, out = sys.argv[1:4]
    module, _, name = where.partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(args))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

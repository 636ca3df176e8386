"""One stage: its parameters, and the process that it runs in."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .claims import Claim, Data, Fact

Found = Claim | Data | Fact

# A stage's time includes what its process imports.
_BEGUN = time.monotonic()


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage may do.

    Args:
        seconds: after which it begins nothing new.
        quick: fewer cases.
        serial: studies run without Ray.
    """

    device: Literal["cpu", "gpu"]
    seconds: float
    quick: bool = False
    serial: bool = True
    started: float = field(default_factory=time.monotonic)  # of time.monotonic

    @property
    def expired(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least none."""
        return max(self.seconds - (time.monotonic() - self.started), 0.0)


def main() -> None:
    """Run the function `module:name` of this package, and write what it finds to a file, a line of JSON each."""
    function, values, path = sys.argv[1:4]
    module, _, name = function.partition(":")
    with open(path, "w", encoding="utf-8", buffering=1) as out:

        def write(kind: str, content: Any) -> None:
            out.write(json.dumps({kind: content}) + "\n")

        try:
            stage: Callable[[Stage], Iterator[Found]] = getattr(
                importlib.import_module(module, __package__), name
            )
            for found in stage(Stage(**json.loads(values), started=_BEGUN)):
                write(type(found).__name__, asdict(found))
        except Exception as error:
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            lines = str(error).strip().splitlines() or [""]
            write(
                "problem",
                f"{type(error).__name__}: {lines[0]} ({where.filename.rpartition('/')[2]}:{where.lineno})",
            )
        else:
            write("done", True)


if __name__ == "__main__":
    main()

"""What a script does, seen by running it with one batch of each loader: `python -m bsearch.objectives.script.look SCRIPT ...`.

Prints one JSON document: its flags and constants, and what it does with them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..loading import error_line
from .files import FilesApart
from .script import as_main, rate_of, trains
from .takeover import Made, taken_over

# The longest that a script is looked at, and the most lines that are kept of what it writes after each pass.
_LOOKS_S, _LINES = 60.0, 200


@dataclass
class Looked:
    """What was seen of a script.

    Args:
        values: its flags with numbers, and its numeric constants, by how a trial would set them.
        batch: of the loader that it trains on; `samples` of its data.
        rates: of its optimizers' groups; `optimizer`, the first's name.
        passes, steps: over the training data, and optimizer steps a pass had of one batch each.
        seed: that it gave to torch; None where it gave none.
        lines: that it wrote after a pass.
        counts: lines at which its training loop uses a count of batches for more than printing.
        whole: it came to its end.
        error: that it ended with.
    """

    values: dict[str, float] = field(default_factory=dict)
    batch: int = 0
    samples: int = 0
    rates: list[float] = field(default_factory=list)
    optimizer: str = ""
    passes: int = 0
    seed: int | None = None
    lines: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    whole: bool = False
    error: str = ""


class _Enough(BaseException):
    """It was looked at for long enough."""


class _Look:
    """The `Driver` of a script that is looked at: one batch a pass, of every loader."""

    share, is_last, has_gradients, skips, is_script = 1.0, True, False, False, True

    def __init__(self, looked: Looked, made: Made) -> None:
        self.looked, self._made, self._line, self._trains, self._ends = looked, made, "", False, time.monotonic() + _LOOKS_S

    def trains(self, loader: DataLoader[Any]) -> bool:
        return True  # every loader has one batch

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._trains = trains(self._made)
        if self._trains:
            if time.monotonic() > self._ends:
                raise _Enough
            if not self.looked.passes:
                self._note(loader)
            self.looked.passes += 1
        yield from islice(self.iterate(loader), 1)
        self._trains = False

    iterate: Any = None
    files: FilesApart

    def _note(self, loader: DataLoader[Any]) -> None:
        """What there is before the first step."""
        first = self._made.of(Optimizer)[0]
        self.looked.batch, self.looked.optimizer = loader.batch_size or 0, type(first).__name__
        self.looked.rates = [rate_of(group) for group in first.param_groups]
        with suppress(TypeError):
            self.looked.samples = len(loader.dataset)  # type: ignore[arg-type]

    def place_of(self, file: Any, *, writes: bool, removes: bool = False) -> Any:
        self.is_script = False
        try:
            return self.files.place_of(file, writes=writes, removes=removes)
        finally:
            self.is_script = True

    def scheduled(self) -> None:
        """Of no interest."""

    def back_propagates(self) -> None:
        """Of no interest."""

    def back_propagated(self) -> None:
        """Of no interest."""

    def stepped(self) -> None:
        """Of no interest."""

    def wrote(self, text: str) -> None:
        first, *others = text.split("\n")
        self._line += first
        for line in others:
            if self._line.strip() and not self._trains and self.looked.passes and len(self.looked.lines) < _LINES:
                self.looked.lines.append(self._line)
            self._line = line


def looked_at(path: Path, arguments: list[str]) -> Looked:
    """Run a script here and see what it does."""
    looked, made = Looked(values=_constants(path), counts=counting_lines(path.read_text(encoding="utf-8"))), Made()
    look = _Look(looked, made)
    look.iterate, here = DataLoader.__iter__, Path.cwd()
    parse, seed = argparse.ArgumentParser.parse_known_args, torch.manual_seed

    def parsed(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        namespace, rest = parse(parser, *given, **named)
        for action in parser._actions:
            value, flags = getattr(namespace, action.dest, None), [one for one in action.option_strings if one.startswith("--")]
            if flags and isinstance(value, int | float) and not isinstance(value, bool):
                looked.values[flags[0]] = value
        return namespace, rest

    def seeded(number: Any) -> Any:
        looked.seed = int(number) if looked.seed is None else looked.seed
        return seed(number)

    argparse.ArgumentParser.parse_known_args, torch.manual_seed = parsed, seeded  # type: ignore[method-assign, assignment]
    try:
        with tempfile.TemporaryDirectory() as apart:
            look.files = FilesApart(here, Path(apart))
            with taken_over(look, made), as_main(path, arguments, {}, here):
                looked.whole = True
    except _Enough:
        pass
    except SystemExit as end:
        looked.whole, looked.error = (
            end.code in (None, 0),
            "" if end.code in (None, 0) else f"it ended with exit code {end.code}",
        )
    except Exception as error:
        looked.error = error_line(error)
    return looked


def _constants(path: Path) -> dict[str, float]:
    """Numbers that a script's module assigns to names."""
    found: dict[str, float] = {}
    for node in ast.parse(path.read_bytes()).body:
        value = node.value.value if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) else None
        if isinstance(node, ast.Assign) and isinstance(value, int | float) and not isinstance(value, bool):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= dict.fromkeys(names, float(value))
    return found


# Calls that show something.
_SHOWS = re.compile(r"print|log|write|info|debug|set_|add_|append|update|report")


def counting_lines(source: str) -> list[int]:
    """Lines of loops with a backward pass at which a count of batches is used, but to print something.

    >>> counting_lines("for i, x in enumerate(loader):\\n  loss(x).backward()\\n  if i % 9 == 0: print(i)\\n  if i > 9: f()")
    [4]
    """
    lines = set[int]()
    for loop in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)):
        inside = [node for part in loop.body for node in ast.walk(part)]
        if not any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in inside):
            continue
        counted = {
            node.target.id
            for node in inside
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Constant)
        }
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) and "enumerate" in ast.unparse(loop.iter):
            counted |= {one.id for one in loop.target.elts[:1] if isinstance(one, ast.Name)}
        waiting = list[ast.AST](loop.body)
        while waiting:
            node = waiting.pop()
            if _only_shows(node):
                continue
            if isinstance(node, ast.Name) and node.id in counted and isinstance(node.ctx, ast.Load):
                lines.add(node.lineno)
            waiting += ast.iter_child_nodes(node)
    return sorted(lines)


def _only_shows(node: ast.AST) -> bool:
    """Whether a statement does no more than show something."""
    if isinstance(node, ast.If):
        return all(map(_only_shows, (*node.body, *node.orelse)))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and bool(_SHOWS.search(ast.unparse(node.value.func)))


if __name__ == "__main__":
    looked = looked_at(Path(sys.argv[1]).resolve(), sys.argv[2:])
    print(json.dumps(asdict(looked)))
    sys.stdout.flush()
    os._exit(0)  # whatever the script has left running

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ...spaces.domain import is_number
from ..loading import error_line
from .files import FilesApart
from .metric import Output
from .script import Seen, batch_of, rate_of, seen_of, trains
from .takeover import Made, aside, taken_over
from .told import SETTINGS, as_main, entries, number_in, numbers_in, script_file, settings_in

# The longest that a script is looked at, and the most lines that are kept of what it writes after each pass.
_LOOKS_S, _LINES = 60.0, 200
# How near to two the loss has to grow to where each sample comes twice.
_NEAR_TWO = 0.3


@dataclass
class Looked:
    """What was seen of a script.

    Args:
        values: its numbers, by how a trial would set them: of flags first.
        batch: of the loader that it trains on; `samples` of its data.
        rates: of all its optimizers' groups; `optimizer`, the first's name.
        passes: over the training data.
        seed: that it gave to torch; None where it gave none.
        lines: that it wrote after a pass; `early`, those of them before the pass's first evaluation.
        evaluates: it iterates a loader after a pass without training.
        sums: its loss grows with the batch.
        loaders: that it made, as `seen_of` says; those that it trained on once more with zeros.
        counts: lines at which its training loops use a count of batches for more than printing: `train.py:12`.
        whole: it came to its end; `cut`: it was stopped after a minute.
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
    early: list[str] = field(default_factory=list)
    evaluates: bool = False
    sums: bool = False
    loaders: list[Seen] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    whole: bool = False
    cut: bool = False
    error: str = ""


class _Enough(BaseException):
    """It was looked at for long enough."""


class _Look:
    """The `Driver` of a script that is looked at: one batch a pass, of every loader.

    The first pass of training has that batch once, and once with each sample twice, both without a step: a mean stays the same.
    """

    share, is_last, has_gradients, skips = 1.0, True, False, False

    def __init__(self, looked: Looked, made: Made, path: Path, here: Path, *, weighs: bool) -> None:
        self._weighs, self._here, self._before = weighs, here, frozenset(sys.modules)
        # Its files and those of modules that it has imported, with the lines at which it was when the first pass began.
        self.texts: dict[Path, set[int]] = {path: set()}
        self.looked, self._made, self._output, self._trains = looked, made, Output(), False
        self._ends, self._loss = time.monotonic() + _LOOKS_S, 0.0

    def loader_made(self, loader: DataLoader[Any]) -> None:
        self.looked.loaders.append(seen_of(loader))

    def trains(self, loader: DataLoader[Any]) -> bool:
        return True  # every loader has one batch

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._trains = trains(self._made)
        if self._trains:
            if time.monotonic() > self._ends:
                raise _Enough
            self.rows()
            if not self._evaluates:
                self._unsure = [*self._unsure, *self.looked.lines[self._after :]]
            self._begins, self._evaluates = True, False
            self.looked.loaders.append((seen_of(loader)[0], 0, 0))
            if not self.looked.passes:
                self._note(loader)
                yield from self._weighed(loader)
        elif not self._evaluates:
            self.rows()
            # What passes without an evaluation write is of their training data too.
            early = [*self._unsure, *self.looked.lines[self._after :]]
            self._evaluates = self.looked.evaluates = True
            self.looked.early = [*self.looked.early, *early]
            self.looked.lines = [line for line in self.looked.lines if line not in early]
            self._after, self._unsure = len(self.looked.lines), []
        yield from islice(self.iterate(loader), 1)
        if self._trains:
            with aside():
                self.files.new_rows()  # of within the pass
            self._after = len(self.looked.lines)
        self._trains = False

    _begins, _evaluates, _after = False, True, 0
    _unsure: Sequence[str] = ()

    def _weighed(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Two batches that tell a mean from a sum."""
        if not self._weighs or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return
        indices, losses = next(iter(loader.batch_sampler), None), list[float]()
        if indices is None:
            return
        self.is_last = False
        try:
            for times in (1, 2):
                self._loss = 0.0
                yield loader.collate_fn([loader.dataset[index] for index in [*indices] * times])
                losses.append(self._loss)
        finally:
            self.is_last = True
        self.looked.sums = bool(losses[0]) and abs(losses[1] / losses[0] - 2) < _NEAR_TWO

    def rows(self) -> None:
        """What it has written to files since the last pass."""
        trained, self._trains = self._trains, False
        with aside():
            self.wrote("".join(["\n", *self.files.new_rows()]))
        self._trains = trained

    iterate: Any = None
    files: FilesApart

    def _note(self, loader: DataLoader[Any]) -> None:
        """What there is before the first step."""
        files = (
            str(getattr(one, "__file__", ""))
            for name, one in list(sys.modules.items())
            if name not in self._before
        )
        own = (Path(file) for file in files if file.endswith(".py") and "site-packages" not in file)
        self.texts |= {path: set() for path in own if path.is_relative_to(self._here)}
        frame = sys._getframe()
        while (outer := frame.f_back) is not None:
            frame = outer
            if (lines := self.texts.get(Path(frame.f_code.co_filename))) is not None:
                lines.add(frame.f_lineno)
        first = self._made.of(Optimizer)[0]
        self.looked.batch, self.looked.optimizer = batch_of(loader) or 0, type(first).__name__
        self.looked.rates = [rate_of(group) for one in self._made.of(Optimizer) for group in one.param_groups]
        with suppress(TypeError):
            self.looked.samples = len(loader.dataset)  # type: ignore[arg-type]

    def told_length(self) -> None:
        """Of no interest."""

    def schedules(self, scheduler: Any, step: Any) -> None:
        step()

    def back_propagates(self, loss: torch.Tensor) -> None:
        self._loss += float(loss.detach().sum())

    def back_propagated(self) -> None:
        """Of no interest."""

    def stepped(self) -> None:
        """A pass counts from its first step on; a look at a batch beforehand is none."""
        self.looked.passes += self._begins
        self._begins = False

    def wrote(self, text: str) -> None:
        lines = [
            line
            for line in self._output.ended(text, in_pass=self._trains)
            if line.strip() and self.looked.passes
        ]
        self.looked.lines += lines[: _LINES - len(self.looked.lines)]


def looked_at(script: str, arguments: list[str]) -> Looked:
    """Run a script here and see what it does; once more without batches of its own, where it does not work with them."""
    looked = _looked_at(script, arguments, weighs=True)
    return looked if looked.passes and not looked.error else _looked_at(script, arguments, weighs=False)


def _looked_at(script: str, arguments: list[str], *, weighs: bool) -> Looked:
    looked, made, flags, here = Looked(), Made(), dict[str, float](), Path.cwd()
    path, _ = script_file(script, here)
    look = _Look(looked, made, path, here, weighs=weighs)
    look.iterate, seed = DataLoader.__iter__, torch.manual_seed

    def seeded(number: Any) -> Any:
        looked.seed = int(number) if looked.seed is None else looked.seed
        return seed(number)

    torch.manual_seed = seeded  # type: ignore[assignment]
    try:
        with tempfile.TemporaryDirectory() as apart, _noted_flags(flags):
            look.files = FilesApart(here, Path(apart))
            try:
                with taken_over(look, made), as_main(script, arguments, {}, here, look.files):
                    looked.whole = True
            finally:
                look.rows()
    except _Enough:
        looked.cut = True
    except SystemExit as end:
        looked.whole = end.code in (None, 0)
        looked.error = "" if looked.whole else f"it ended with exit code {end.code}"
    except Exception as error:
        looked.error = error_line(error)
    finally:
        torch.manual_seed = seed
    looked.values = flags | _told_by(arguments)
    for text, lines in look.texts.items():
        name = "" if text == path else f"{text.relative_to(here)}:"
        looked.values |= {f"{name}{number}": value for number, value in _in_text(text, lines).items()}
        looked.counts += [
            f"{text.relative_to(here)}:{line}" for line in counting_lines(text.read_text(encoding="utf-8"))
        ]
    looked.values |= _in_files(look.files.read, here)
    return looked


@contextmanager
def _noted_flags(flags: dict[str, float]) -> Iterator[None]:
    """Context in which the numbers of flags are noted, of argparse and of Click."""
    parse, parse_of_click = argparse.ArgumentParser.parse_known_args, click.Command.parse_args

    def note(names: Sequence[str], value: Any) -> None:
        if is_number(value) and names:
            flags[next((one for one in names if one.startswith("--")), names[0])] = value

    def parsed(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> Any:
        namespace, rest = parse(parser, *given, **named)
        for action in parser._actions:
            note(action.option_strings, getattr(namespace, action.dest, None))
        return namespace, rest

    def parsed_by_click(command: click.Command, context: click.Context, given: list[str]) -> list[str]:
        rest = parse_of_click(command, context, given)
        for parameter in command.params:
            note(
                [one for one in parameter.opts if one.startswith("--")],
                context.params.get(parameter.name or ""),
            )
        return rest

    argparse.ArgumentParser.parse_known_args = parsed  # type: ignore[method-assign, assignment]
    click.Command.parse_args = parsed_by_click  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
        click.Command.parse_args = parse_of_click  # type: ignore[method-assign]


def _told_by(arguments: Sequence[str]) -> dict[str, float]:
    """Numbers on a command line: `--lr=0.1`, `--lr 0.1`, and `lr=0.1`, whatever reads them."""
    words, found = " ".join(arguments), dict[str, float]()
    for flag, key, value in re.findall(
        r"(?:^|\s)(?:(--[\w.-]+)[=\s]|([\w.]+=))([-+]?[\d.]+(?:[eE][-+]?\d+)?)(?=\s|$)", words
    ):
        with suppress(ValueError):
            found[flag or key] = float(value)
    return found


def _in_text(path: Path, lines: Collection[int]) -> dict[str, float]:
    """The numbers in a script's text; of ends of loops those of loops that it was in at these lines."""
    tree, found = ast.parse(path.read_bytes()), dict[str, float]()
    loops = {
        node.lineno: node.end_lineno or node.lineno for node in ast.walk(tree) if isinstance(node, ast.For)
    }
    for name, place, offset in numbers_in(tree):
        is_around = " in range(" not in name or any(
            place.lineno <= line <= loops.get(place.lineno, 0) for line in lines
        )
        if is_around and is_number(place.value):
            found[name] = place.value - offset  # type: ignore[operator, assignment]
    return found


def _in_files(paths: Iterable[Path], here: Path) -> dict[str, float]:
    """The numbers in files of settings that it has read."""
    below = [path for path in paths if path.suffix in SETTINGS and path.is_relative_to(here)]
    found = (
        (f"{path.relative_to(here)}:{name}", setting)
        for path in below
        for name, setting in entries(settings_in(path))
    )
    return {name: value for name, setting in found if (value := number_in(setting)) is not None}


# Calls that show something.
_SHOWS = re.compile(r"print|log|write|info|debug|set_|add_|append|update|report|display|show")


def counting_lines(source: str) -> list[int]:
    r"""Lines of loops with a backward pass at which a count of batches is used, but to print something or to leave the loop.

    >>> counting_lines("for i, x in enumerate(loader):\n  loss(x).backward()\n  if i % 9 == 0: print(i)\n  if i > 9: f()")
    [4]
    >>> counting_lines("for i, x in enumerate(data):\n  l = f(x)\n  l.backward()\n  if i % 9 == 0:\n    l = i\n    print(l)")
    []
    """
    lines = set[int]()
    for loop in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)):
        inside = [node for part in loop.body for node in ast.walk(part)]
        if not any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in inside):
            continue
        counted = {
            node.target.id
            for node in inside
            if isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        if (
            isinstance(loop, ast.For)
            and isinstance(loop.target, ast.Tuple)
            and "enumerate" in ast.unparse(loop.iter)
        ):
            counted |= {one.id for one in loop.target.elts[:1] if isinstance(one, ast.Name)}
        waiting = list[ast.AST](loop.body)
        while waiting:
            node = waiting.pop()
            if _only_shows(node, loop):
                continue
            if isinstance(node, ast.Name) and node.id in counted and isinstance(node.ctx, ast.Load):
                lines.add(node.lineno)
            waiting += ast.iter_child_nodes(node)
    return sorted(lines)


def _only_shows(node: ast.AST, loop: ast.For | ast.While) -> bool:
    """Whether a statement of a loop does no more than show something, or make what is only shown."""
    if isinstance(node, ast.If):
        return all(_only_shows(one, loop) for one in (*node.body, *node.orelse))
    if isinstance(node, ast.Break):
        return node in _breaks(loop)  # a trial ends in an error where a pass ends early
    if isinstance(node, ast.Assign):
        made = {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        return bool(made) and all(_is_local(name, node, loop) for name in made)
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and bool(_SHOWS.search(ast.unparse(node.value.func)))
    )


def _breaks(loop: ast.For | ast.While) -> list[ast.AST]:
    """The `break` statements of a loop, without those of loops in it."""
    found, waiting = list[ast.AST](), list[ast.AST](loop.body)
    while waiting:
        node = waiting.pop()
        found += [node] * isinstance(node, ast.Break)
        waiting += [] if isinstance(node, ast.For | ast.While) else ast.iter_child_nodes(node)
    return found


def _is_local(name: str, made: ast.Assign, loop: ast.For | ast.While) -> bool:
    """Whether only what is shown reads a name after it was made here: nothing else does before it is made anew."""
    uses = [
        (one.lineno, type(one.ctx)) for one in ast.walk(loop) if isinstance(one, ast.Name) and one.id == name
    ]
    shown = {
        line
        for one in ast.walk(loop)
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Call)
        and _SHOWS.search(ast.unparse(one.value.func))
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }
    later = [line for line, kind in uses if kind is ast.Load and line > made.lineno and line not in shown]
    first = min(line for line, _ in uses)
    made_first = first == made.lineno or not any(line == first and kind is ast.Load for line, kind in uses)
    return not later and made_first


if __name__ == "__main__":
    looked = looked_at(sys.argv[1], sys.argv[2:])
    print(json.dumps(asdict(looked)))
    sys.stdout.flush()
    os._exit(0)  # whatever the script has left running

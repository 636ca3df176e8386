"""Mutation tests of all rooms: which small faults would no test notice?

In a copy of the working tree, uncommitted changes included, the quick tests run once, and each line is recorded with the tests
that execute it. Then one place at a time is changed, and the tests that execute its line run, those of its room and the most
specific first. A mutant that passes them all is alive: it is equivalent to the original, or no test states the law it breaks.

    make mutants
    .venv/bin/python benchmarks/mutants.py --count 60 --seed 1 --only spaces/laws/ search/store/lock.py
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
from test_size import modules, tokens  # noqa: E402

QUICK = (
    "not (slow or ray or packaging or cluster or browser or frameworks or docs or long or faults or rough)"
)
# Not `-m pytest`, which would look for modules in this folder first.
PYTEST = [
    f"{sys.prefix}/bin/pytest",
    *shlex.split("-q -p no:cacheprovider --hypothesis-seed=0 --hypothesis-profile=mutants"),
]
RECORD = [
    *shlex.split("-m coverage run"),
    *PYTEST,
    *shlex.split("-p bsearch.benchmarks.mutants --ignore=tests/test_size.py -m"),
    QUICK,
]
# Seconds of the tests that a mutant has to pass, as they took while they were recorded.
_TESTS_S = 20.0
# How a mutant ends: of the last, no quick test executes the line, or only in another process.
_ENDS = "killed", "alive", "unrun"
# A mutant could end a process or delete a folder that is not its own.
_UNSAFE = ("os.kill", "killpg", "rmtree", "terminate", "unlink")
# Types, decorators and messages, of which no law speaks.
_SILENT = {"annotation", "returns", "decorator_list", "exc", "msg"}
# What has no two arguments of one kind.
_UNLIKE = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "cast",
    "partial",
    "map",
    "filter",
    "enumerate",
}
# An operator is replaced by its nearest neighbour alone: that `+` is not `<<` is no law.
_PAIRS = shlex.split(
    "Add Sub Mult Div Lt LtE Gt GtE Eq NotEq Is IsNot In NotIn And Or BitAnd BitOr FloorDiv Mod"
)
_NEIGHBOURS = {getattr(ast, name): getattr(ast, _PAIRS[place ^ 1])() for place, name in enumerate(_PAIRS)} | {
    ast.Pow: ast.Mult()
}


class Mutant(NamedTuple):
    """A module with one change: the text between two of its bytes is another."""

    module: str
    lines: set[int]  # its own, and its statement's first
    begin: int
    end: int
    text: str


def changed(node: Any, **fields: Any) -> Any:
    return type(node)(**{name: getattr(node, name, None) for name in node._fields} | fields)


def changes(node: Any, alike: dict[str, str]) -> Iterator[ast.AST]:
    """What may stand in a node's place: the faults that are made here.

    Args:
        alike: by each argument of the function, another of its type.
    """
    match node:
        case ast.Name(id=name, ctx=ast.Load()) if name in alike:
            yield ast.Name(alike[name])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _NEIGHBOURS:
            yield changed(node, op=_NEIGHBOURS[type(op)])
        case ast.Compare(ops=[op]):
            yield changed(node, ops=[_NEIGHBOURS[type(op)]])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.IfExp():
            yield changed(node, body=node.orelse, orelse=node.body)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case (
            ast.Call(func=ast.Name(id="abs"), args=[_])
            | ast.Call(func=ast.Name(id="max" | "min"), args=[_, _])
        ):
            yield from node.args
        case (
            ast.Expr(value=ast.Call())
            | ast.Assign()
            | ast.AugAssign()
            | ast.Raise()
            | ast.Break()
            | ast.Continue()
        ):
            yield ast.Pass()
        case ast.If(body=[ast.Return() | ast.Raise() | ast.Continue()], orelse=[]):
            yield ast.Pass()
    if isinstance(node, ast.BoolOp):
        yield from node.values
    if isinstance(node, ast.Call):
        for keyword in node.keywords:  # only a named argument may have a default
            yield changed(node, keywords=[one for one in node.keywords if one is not keyword])
        given = [*(changed(ast.keyword(), value=one) for one in node.args), *node.keywords]
        for place, (a, b) in enumerate(pairwise(given)):
            kinds = {type(a.value), type(b.value)} <= {ast.Name, ast.Attribute}
            if (
                kinds
                and ast.dump(a.value) != ast.dump(b.value)
                and getattr(node.func, "id", "") not in _UNLIKE
            ):
                swapped = [
                    *given[:place],
                    changed(a, value=b.value),
                    changed(b, value=a.value),
                    *given[place + 2 :],
                ]
                split = len(node.args)
                yield changed(node, args=[one.value for one in swapped[:split]], keywords=swapped[split:])


def alike(arguments: ast.arguments) -> dict[str, str]:
    of_type = defaultdict[str, list[str]](list)
    for one in (*arguments.args, *arguments.kwonlyargs):
        if one.annotation:
            of_type[ast.unparse(one.annotation)].append(one.arg)
    return {
        one: other
        for names in of_type.values()
        for one, other in pairwise([*names, names[0]])
        if one != other
    }


def mutants_of(module: str) -> list[Mutant]:
    """Every change of a module."""
    source = Path(module).read_bytes()
    lines, found = source.splitlines(keepends=True), list[Mutant]()

    def visit(node: Any, statement: int, function: dict[str, str] | None) -> None:
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        if isinstance(node, ast.FunctionDef):
            function = alike(node.args)
        if isinstance(node, ast.JoinedStr | ast.Assert) or (
            function and any(word in ast.unparse(node) for word in _UNSAFE)
        ):
            return
        for change in changes(node, function or {}):
            if function is not None or not isinstance(node, ast.stmt):
                ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
                places = (sum(map(len, lines[: line - 1])) + column for line, column in ends)
                text = ast.unparse(ast.fix_missing_locations(change))
                found.append(
                    Mutant(
                        module,
                        {node.lineno, statement},
                        *places,
                        f"({text})" if isinstance(node, ast.expr) else text,
                    )
                )
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in _SILENT:
                    visit(child, statement, function)

    visit(ast.parse(source), 0, None)
    return found


# While they are recorded, this is a plug-in of pytest.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    Coverage.current().switch_context(item.nodeid)  # type: ignore[union-attr]
    return (yield)


_took_s = Counter[str]()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _took_s[report.nodeid] += report.duration if report.passed else inf  # type: ignore[assignment]


def pytest_sessionfinish() -> None:
    took_file().write_text(json.dumps(_took_s))


def took_file() -> Path:
    return Path(os.environ["COVERAGE_FILE"]).with_suffix(".json")


class Recorded:
    """Which tests execute a line, and what they took."""

    def __init__(self) -> None:
        self._took_s: dict[str, float] = json.loads(took_file().read_text())
        self._data = CoverageData(os.environ["COVERAGE_FILE"])
        self._data.read()
        self._lines = Counter(
            test
            for name in self._data.measured_files()
            for some in self.tests(name).values()
            for test in some
        )

    @cache  # noqa: B019
    def tests(self, module: str) -> dict[int, list[str]]:
        """By line; of all together at 0."""
        by_line = self._data.contexts_by_lineno(module)
        return by_line | {0: [*{test for some in by_line.values() for test in some}]}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The room's and the most specific first; where a line runs as the module is imported, all the module's."""
        by_line, room, left_s = self.tests(mutant.module), Path(mutant.module).parent, _TESTS_S
        found, chosen = {test for line in mutant.lines for test in by_line.get(line, ())}, []
        found = found if found != {""} else {*by_line[0]}
        for test in sorted(
            found, key=lambda test: (not test.startswith(f"tests/{room}/"), self._lines[test])
        ):
            if self._took_s.get(test, inf) <= left_s:
                left_s -= self._took_s[test]
                chosen.append(test)
        return chosen


def drawn(only: list[str], count: int, seed: int) -> list[Mutant]:
    """So many mutants of all rooms: each has its share by its tokens, and one at least."""
    rooms, rng = defaultdict[str, list[Path]](list), random.Random(seed)
    for path in sorted(modules()):
        if str(module := path.relative_to(ROOT)).startswith(tuple(only)):
            rooms[str(module.parent)].append(module)
    every = {
        room: [one for module in some for one in mutants_of(str(module))] for room, some in rooms.items()
    }
    shares = Counter({room: 1 for room, some in every.items() if some})
    while shares.total() < count and (open_ := [room for room in shares if shares[room] < len(every[room])]):
        shares[max(open_, key=lambda room: tokens(rooms[room]) / shares[room])] += 1
    return [mutant for room, share in shares.items() for mutant in rng.sample(every[room], share)]


def is_killed(mutant: Mutant, tests: list[str]) -> bool:
    """Whether a test fails; a mutant that takes much longer has been noticed too."""
    path = Path(mutant.module)
    source = path.read_bytes()
    path.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
    process = subprocess.Popen([*PYTEST, "-x", *tests], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(60 + 4 * _TESTS_S) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_bytes(source)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        metavar="PATH",
        help="of modules whose paths begin so; default: all",
    )
    parser.add_argument("--count", type=int, default=120, metavar="N", help="of mutants; default: 120")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; default: 0")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keeps which test executes what, or reads it there"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bsearch-mutants-") as folder:
        record = (options.record or Path(folder, "record")).absolute()
        os.environ |= {
            "PYTHONPATH": f"{folder}:{folder}/bsearch/tests",
            "OMP_NUM_THREADS": "1",
            "COVERAGE_FILE": str(record),
        }
        # What git knows or would add, as it is now.
        Path(folder, "bsearch").mkdir()
        copy = f"git ls-files -coz --exclude-standard | xargs -0 cp --parents -t {folder}/bsearch"
        subprocess.run(["sh", "-c", copy], cwd=ROOT)  # noqa: S607
        os.chdir(f"{folder}/bsearch")
        # Bytecode is checked by its source's hash: two mutants may have one size and be written in the same second.
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."], check=True
        )
        if not took_file().exists():
            subprocess.run([sys.executable, *RECORD])
        recorded, counts, survivors = Recorded(), defaultdict[str, list[int]](lambda: [0, 0, 0]), []
        for mutant in drawn(options.only, options.count, options.seed):
            tests = recorded.tests_of(mutant)
            end = 2 if not tests else 0 if is_killed(mutant, tests) else 1
            before = Path(mutant.module).read_bytes()[mutant.begin : mutant.end].decode()
            before, where = " ".join(before.split())[:100], f"{mutant.module}:{max(mutant.lines)}"
            said = f"{where}  {before} -> {mutant.text[:100]}  ({len(tests)} tests)"
            print(_ENDS[end], said, flush=True)
            for room in (str(Path(mutant.module).parent), "all"):
                counts[room][end] += 1
            if end:
                survivors.append(f"{_ENDS[end]} {said}")
    print(f"\n{'room':<32}", *(f"{name:>8}" for name in _ENDS))
    for room, each in sorted(counts.items()):
        print(f"{room:<32}", *(f"{number:>8}" for number in each))
    print("", *sorted(survivors), sep="\n")


if __name__ == "__main__":
    main()

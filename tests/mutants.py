"""Mutation tests of the modules that hold the laws: which small faults in them would no test notice?

In a copy of the working tree, uncommitted changes included, one place at a time is changed by the operators of Cosmic Ray and
one of our own, and the tests that speak about the module run. A mutant that passes them all has survived: it is equivalent to
the original, or no test states the law that it breaks.

    make mutants
    .venv/bin/python tests/mutants.py spaces/plan.py objectives/training.py --sample 60 --seed 1
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from parso.python.tree import Name
from parso.tree import search_ancestor

ROOT = Path(__file__).parent.parent
QUICK = "not (slow or ray or packaging or cluster or browser or frameworks or docs or long or faults)"
# The tests that speak about each module; its docstrings' examples run too.
TABLES = "tests/search/store/test_tables.py::test_"
MODULES = {
    "spaces/plan.py": "tests/spaces/test_plan.py",
    "spaces/domain.py": "tests/spaces/test_domain.py tests/spaces/test_study_file.py tests/spaces/test_recipe.py",
    "spaces/learning_rate.py": "tests/spaces/test_learning_rate.py",
    "spaces/boundary/storage.py": "tests/spaces/test_storage.py",
    "objectives/data/batches.py": "tests/objectives/test_batches.py tests/objectives/test_sample_weights.py "
    "tests/objectives/test_modes.py",
    "objectives/steps/stepping.py": "tests/objectives/test_training.py tests/objectives/test_units.py "
    "tests/objectives/test_whole_run.py",
    "objectives/training.py": "tests/objectives/test_training.py tests/objectives/test_checkpoint.py "
    "tests/objectives/test_whole_run.py tests/objectives/test_evaluation.py",
    "search/run/decisions/after.py": "tests/search/run/test_after.py",
    "search/analysis/pareto.py": "tests/search/analysis/test_pareto.py "
    "tests/search/analysis/test_confirm.py::test_a_lucky_run_loses_its_place",
    "search/store/lock.py": f"{TABLES}one_driver_holds_a_study "
    f"{TABLES}a_drivers_own_clock_neither_steals_a_lock_nor_keeps_it "
    f"{TABLES}a_dead_holder_is_followed_at_once_here_and_after_its_lock_expires_elsewhere "
    f"{TABLES}a_holder_whose_process_cannot_be_checked_from_here_holds_until_its_lock_expires "
    f"{TABLES}who_drives_a_study_is_asked_of_any_name {TABLES}the_lock_is_asked_for_again_until_the_database_answers "
    f"{TABLES}of_many_drivers_at_once_exactly_one_wins {TABLES}a_holder_that_comes_to_life_keeps_its_study "
    "tests/search/preview/test_doctor.py::test_a_holder_is_named_and_a_dead_one_too",
}
# Where a module holds more than laws, the functions that do.
FUNCTIONS = {
    "objectives/steps/stepping.py": {"step", "accumulate", "_weight", "rescale_gradients", "micro_batches"},
    "objectives/training.py": {"evaluate", "measurements", "_step", "_measured"},
}
# An operator is replaced by its nearest neighbour alone: that `+` is not `<<` is no law.
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul|LShift_RShift|RShift_LShift"
    r"|BitAnd_BitOr|BitXor_BitOr)|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|ReplaceUnaryOperator_Delete_(USub|Not)|AddNot|Replace(True|False|And|Or|Break|Continue)With[A-Z][a-z]+"
    r"|NumberReplacer|ExceptionReplacer|RemoveDecorator|ZeroIterationForLoop)"
)


class Remove(Operator):
    """`a or b` becomes `a`, `f(a, b=1)` becomes `f(a)`, and a call, an assignment or a `raise` becomes `pass`."""

    examples = classmethod(lambda cls: ())

    def places(self, node: Any) -> list[int]:
        """Which of a node's children may be removed, one at a time."""
        if node.type in ("and_test", "or_test"):
            return list(range(0, len(node.children), 2))
        if node.type == "arglist":  # only a named argument may have a default
            return [place for place, child in enumerate(node.children) if child.type == "argument" and child.children[0] != "*"]
        statement = node.type == "simple_stmt" and node.children[0].type in ("expr_stmt", "atom_expr", "raise_stmt")
        return [0] if statement and search_ancestor(node, "funcdef") else []

    def mutation_positions(self, node: Any) -> list[tuple[Any, Any]]:
        return [(node.children[place].start_pos, node.children[place].end_pos) for place in self.places(node)]

    def mutate(self, node: Any, index: int) -> Any:
        if node.type == "simple_stmt":
            node.children[0] = Name("pass", (0, 0), prefix=node.get_first_leaf().prefix)
        else:
            first = max(self.places(node)[index] - 1, 0)
            del node.children[first : first + 2]  # with the comma or the word before it, or behind the first
        return node


class Mutant(NamedTuple):
    """A module with one change."""

    line: int
    operator: str
    text: str


def says_nothing(node: Any) -> bool:
    """Whether a node is part of a type, a decorator's arguments or a message, of which no law speaks."""
    while node.parent is not None:
        before, inner, node = node.get_previous_sibling(), node, node.parent
        in_type = node.type in ("tfpdef", "annassign", "funcdef") and getattr(before, "value", "") in (":", "->")
        if node.type in ("decorator", "fstring") or (in_type and inner.type != "suite"):
            return True
    return False


def compiles(text: str) -> bool:
    with suppress(SyntaxError):
        return bool(compile(text, "mutant", "exec"))
    return False


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every change of a module once, in the order of its lines."""
    functions, nodes = FUNCTIONS.get(module), list(ast_nodes(get_ast(source)))
    lines, found = source.splitlines(), dict[str, Mutant]()
    for operator in [*(get_operator(name)() for name in filter(OPERATORS.fullmatch, operator_names())), Remove()]:
        places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, (line, _)) in enumerate(places):
            function = search_ancestor(node, "funcdef")
            if "os.kill(" in lines[line - 1]:  # with a signal other than 0 it would end a process that is not ours
                continue
            if says_nothing(node) or (functions and (function is None or function.name.value not in functions)):
                continue
            text = mutate_code(source, operator, occurrence)
            if compiles(text):
                found.setdefault(text, Mutant(line, type(operator).__name__, text))
    return sorted(found.values())


def difference(before: str, after: str) -> str:
    """The lines that changed, in one."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    return "  ".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-" and line[1:].strip())


def copy_tree(package: Path) -> None:
    """Copy the working tree: what git knows or would add, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, package / name)


def survivors_of(module: str, sample: int | None, seed: int) -> list[str]:
    """Try a module's mutants and print their row of the table; returns a line for each that survived."""
    command = [str(Path(sys.executable).with_name("pytest")), "-x", "-q", "-p", "no:cacheprovider", "-m", QUICK]
    command += ["--hypothesis-seed=0", "--hypothesis-profile=mutants", "--doctest-modules", module, *MODULES[module].split()]
    began = time.monotonic()
    clean = subprocess.run(command, capture_output=True, text=True)
    if clean.returncode:
        sys.exit(f"{module}: expected tests that pass before any change, got:\n{clean.stdout[-3000:]}")
    limit_s = 20 + 4 * (time.monotonic() - began)  # a mutant that takes longer has been noticed
    source = Path(module).read_text()
    mutants = mutants_of(module, source)
    chosen = mutants if sample is None else sorted(random.Random(seed).sample(mutants, min(sample, len(mutants))))
    survivors, began = [], time.monotonic()
    for mutant in chosen:
        Path(module).write_text(mutant.text)
        outcome, output = run_tests(shlex.join(command), limit_s)
        assert outcome != TestOutcome.INCOMPETENT, output
        if outcome == TestOutcome.SURVIVED:
            survivors.append(f"{module}:{mutant.line}  {mutant.operator}  {difference(source, mutant.text)}")
    Path(module).write_text(source)
    counts = f"{len(chosen)} of {len(mutants)}", len(chosen) - len(survivors), len(survivors), round(time.monotonic() - began)
    print("{:<28}{:>12}{:>8}{:>10}{:>9}".format(module, *counts), flush=True)
    return survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"some of {', '.join(MODULES)}; default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each module, at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample; default: 0")
    options = parser.parse_args()
    if unknown := [module for module in options.modules if module not in MODULES]:
        parser.error(f"expected some of {', '.join(MODULES)}; got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory(prefix="bsearch-mutants-") as folder:
        copy_tree(Path(folder, "bsearch"))
        os.chdir(Path(folder, "bsearch"))
        os.environ |= {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        # Bytecode is checked by its source's hash: two mutants may have one size and be written in the same second.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."], check=True)
        print("{:<28}{:>12}{:>8}{:>10}{:>9}".format("module", "mutants", "killed", "survived", "seconds"), flush=True)
        rows = [survivors_of(module, options.sample, options.seed) for module in options.modules or MODULES]
        print("", *chain.from_iterable(rows), sep="\n")


if __name__ == "__main__":
    main()

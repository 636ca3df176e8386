"""How many of an agent's keeps are true: by `bsearch compare`, and by keeping whatever scores higher once.

    .venv/bin/python benchmarks/agent_loop.py [--orders 4] [--trials 24]

The loop of `examples/agent` over shuffled orders of its candidates, each with a seed of its own. Keeping what is higher is one
training of each side at a fixed setting: the study's baseline, which is the best of the first code, and one that is guessed.
The truth of a keep or a reset is of the code as it stood by then, with and without the edit: of a grid of batches and rates,
the best four are trained with three more seeds, and the best of them with sixteen new ones, which score it. An edit is better,
or worse, where the difference is more than two standard errors.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import torch
from bsearch.objectives.attempts import start_attempt
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.training import Training
from bsearch.spaces.trial import Measurement, TrialSetup

EXAMPLE = Path(__file__).parents[1] / "examples" / "agent"
sys.path.insert(0, str(EXAMPLE))
from candidates import CANDIDATES  # noqa: E402

AT_BATCH, SAMPLES = 16, 1800
BATCHES, RATES = (4, 8), np.geomspace(0.05, 8, 7)
# Of the grid, each trained once: how many are trained again how often, and the best of them how often to be scored.
FINALISTS, AGAIN, NEW_SEEDS = 4, 3, 16
# Settings at which one training of each side decides: the best of the first code, and what one may guess.
SETTINGS = {"higher once": (4, 4.0), "higher once, guessed": (16, 0.5)}
EDITS = {name: edit for name, *edit in CANDIDATES}
Spot = tuple[int, float]


class Truth:
    """Best scores of codes by brute force, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[float, float]] = {}
        self._files: dict[str, Path] = {}

    def score(self, code: str, spot: Spot, seed: int) -> float:
        """Accuracy of one training; 0 where it diverged."""
        if code not in self._files:
            self._files[code] = self._folder / f"code{len(self._files)}" / "tasks.py"
            self._files[code].parent.mkdir()
            self._files[code].write_text(code)
        setup = TrialSetup(
            study="truth",
            number=0,
            attempt=0,
            plan=BatchPlan(spot[0]),
            optimizer=OptimizerSettings(spot[1] * math.sqrt(spot[0] / AT_BATCH)),
            samples_budget=SAMPLES,
            training=Training(evaluations=1, seed=seed),
            epochs=SAMPLES / 897,
            folder=str(self._files[code].parent),
        )
        *measured, _ = start_attempt(f"{self._files[code]}:Digits", setup)
        return next((one.accuracy or 0.0 for one in reversed(measured) if isinstance(one, Measurement)), 0.0)

    def best(self, code: str) -> tuple[float, float]:
        """Mean accuracy at the best setting, and its standard error."""
        if code not in self._known:
            grid = [(batch, float(rate)) for batch, rate in product(BATCHES, RATES)]
            first = {spot: self.score(code, spot, 100) for spot in grid}
            again = {
                spot: first[spot] + sum(self.score(code, spot, 101 + seed) for seed in range(AGAIN))
                for spot in sorted(grid, key=lambda spot: -first[spot])[:FINALISTS]
            }
            best = max(again, key=lambda spot: again[spot])
            chosen = np.array([self.score(code, best, 200 + seed) for seed in range(NEW_SEEDS)])
            self._known[code] = float(chosen.mean()), float(chosen.std(ddof=1)) / math.sqrt(len(chosen))
        return self._known[code]

    def difference(self, before: str, after: str) -> tuple[float, float]:
        (first, first_error), (second, second_error) = self.best(before), self.best(after)
        return second - first, math.hypot(first_error, second_error)


def edited(code: str, name: str) -> str:
    pattern, replacement = EDITS[name]
    return re.sub(pattern, replacement, code)


def by_compare(order: list[str], seed: int, trials: int) -> tuple[list[tuple[str, bool]], float]:
    """The example's own loop, with another seed; returns which edits it kept, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as place:
        example = Path(place, "example")
        shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("__pycache__"))
        study = example / "study.yaml"
        study.write_text(study.read_text().replace("evaluations: 1}", f"evaluations: 1, seed: {seed}}}"))
        begun = time.perf_counter()
        command = [
            sys.executable,
            example / "loop.py",
            f"{place}/work",
            "--trials",
            str(trials),
            "--candidates",
            *order,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(done.stdout, flush=True)
        lines = [line.split() for line in done.stdout.splitlines()[:-1]]
        return [(words[0], words[-1] == "kept") for words in lines], time.perf_counter() - begun


def by_one_run(truth: Truth, order: list[str], seed: int, spot: Spot) -> tuple[list[tuple[str, bool]], float]:
    code, decided, begun = (EXAMPLE / "tasks.py").read_text(), [], time.perf_counter()
    for place, name in enumerate(order):
        change = edited(code, name)
        before, after = (
            truth.score(each, spot, 1000 * seed + 2 * place + side)
            for side, each in enumerate((code, change))
        )
        decided.append((name, after > before))
        code = change if after > before else code
    return decided, time.perf_counter() - begun


def judged(truth: Truth, decided: list[tuple[str, bool]]) -> tuple[Counter[str], float]:
    """Keeps by what they were in truth, and what better edits were missed; and the last code's accuracy less the first's."""
    code = first = (EXAMPLE / "tasks.py").read_text()
    counts: Counter[str] = Counter()
    for name, kept in decided:
        change = edited(code, name)
        gap, error = truth.difference(code, change)
        real = "better" if gap > 2 * error else "worse" if gap < -2 * error else "equal"
        counts[f"{'kept' if kept else 'reset'} {real}"] += 1
        print(f"  {name:10s} {'kept' if kept else 'reset':5s} {gap:+.4f} ± {error:.4f} {real}", flush=True)
        code = change if kept else code
    return counts, truth.difference(first, code)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--trials", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    totals: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as place:
        truth = Truth(Path(place))
        code = (EXAMPLE / "tasks.py").read_text()
        print("truth of each edit of the first code, whose best is {:.4f} ± {:.4f}".format(*truth.best(code)))
        for name in EDITS:
            print(
                "  {:10s} {:+.4f} ± {:.4f}".format(name, *truth.difference(code, edited(code, name))),
                flush=True,
            )
        for seed in range(1, options.orders + 1):
            order = random.Random(seed).sample(list(EDITS), len(EDITS))
            ways = {"compare": by_compare(order, seed, options.trials)}
            ways |= {way: by_one_run(truth, order, seed, spot) for way, spot in SETTINGS.items()}
            for way, (decided, seconds) in ways.items():
                print(f"{way}, order {seed}, {seconds:.1f} s")
                counts, gain = judged(truth, decided)
                totals.setdefault(way, Counter()).update({**counts, "seconds": seconds, "gain": gain})
                show(way, totals[way], seed)


def show(way: str, total: Counter[str], orders: int) -> None:
    keeps = [total[f"kept {real}"] for real in ("better", "equal", "worse")]
    print(
        f"| {way}, {orders} orders | keeps {sum(keeps)} | true {keeps[0]} | false {keeps[1] + keeps[2]}, worse {keeps[2]} | "
        f"missed {total['reset better']} | gain {total['gain'] / orders:+.4f} | {total['seconds'] / orders:.1f} s |",
        flush=True,
    )


if __name__ == "__main__":
    main()

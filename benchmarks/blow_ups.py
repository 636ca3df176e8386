"""What blow-ups with a finite loss do to `rules` and the best rate, on ladders whose truth is known.

    .venv/bin/python benchmarks/blow_ups.py [--studies 12] [--trials 40] [--shares 0 .05 .1 .2]

Each study has so many random trials at each small size of a ladder of one-pass trainings:

    loss = 1.7 + .8 N^-.2 + .7 D^-.2 + .02 u^2 + c v^2,   u = ln batch / best batch,  v = ln rate / best rate there

with c = .04 below the best rate and .08 above, and noise of .005. The best batch and rate follow powers of D and N that differ
from study to study as published ones do. Above a cliff, which differs too, trials blow up and end at a loss of 5.8 to 7.2;
rates are searched up to where the given share of trials lies beyond it. Printed: the loss at the predicted setting beyond the
best of the large size, its mean and the worst (beyond the cliff, a setting counts as a loss of 6.5), and how often 90 %
intervals hold the truth; the same of the best trial of the largest small size, carried over unchanged; and of `rules` at that
size (its exponent, in place of the batch, and its rate).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from bsearch.search.laws.best_rate import best_rates
from bsearch.spaces.record import TrialFacts, TrialRecord

BLOWN = 6.5
# Samples and parameters of the small sizes and of the large one.
LADDERS = {
    "1, 3 and 10 to 30": ([(1e8, 1e7), (3e8, 3e7), (1e9, 1e8)], (3e9, 3e8)),
    "1 and 1.25 to 10": ([(1e8, 1e7), (1.25e8, 1.25e7)], (1e9, 1e8)),
    "1 to 10": ([(1e8, 1e7)], (1e9, 1e8)),
}
LOW = -2.5  # of the rates searched, relative to the best on a log scale


@dataclass(frozen=True)
class Truth:
    """One study's ladder.

    Args:
        exponents: of the best batch by samples and by parameters, and of the best rate at the best batch by both.
        cliff, turned: above v = cliff + turned · u, trials blow up.
        high: the highest v searched.
    """

    exponents: tuple[float, float, float, float]
    cliff: float
    turned: float
    high: float

    @classmethod
    def drawn(cls, rng: np.random.Generator, share: float) -> Truth:
        a, b, c, d = rng.normal([0.45, 0.0, 0.22, -0.4], [0.08, 0.05, 0.08, 0.12])
        cliff, turned = rng.uniform(0.3, 1.0), rng.uniform(-0.2, 0.2)
        return cls(
            (a, b, c, d), cliff if share else math.inf, turned, cliff + share / (1 - share) * (cliff - LOW)
        )

    def best(self, samples: float, parameters: float) -> tuple[float, float]:
        """Logarithms of the best batch and rate."""
        a, b, c, d = self.exponents
        more, larger = math.log(samples / 1e8), math.log(parameters / 1e7)
        return math.log(128) + a * more + b * larger, math.log(3e-3) + c * more + d * larger

    def excess(self, log_batch: float, log_rate: float, size: tuple[float, float]) -> tuple[float, float]:
        """Loss beyond the best of a size, and how far beyond the cliff."""
        batch, rate = self.best(*size)
        u = log_batch - batch
        v = log_rate - rate - 0.5 * u
        return 0.02 * u**2 + (0.08 if v > 0 else 0.04) * v**2, v - self.cliff - self.turned * u

    def lost(self, batch: float, rate: float, size: tuple[float, float]) -> float:
        """Loss of a setting beyond the best of a size; beyond the cliff it blows up."""
        excess, beyond = self.excess(math.log(batch), math.log(rate), size)
        return BLOWN - self.floor(size) if beyond > 0 else excess

    def floor(self, size: tuple[float, float]) -> float:
        return 1.7 + 0.8 * (size[1] / 1e7) ** -0.2 + 0.7 * (size[0] / 1e8) ** -0.2


def study(
    truth: Truth, sizes: Sequence[tuple[float, float]], trials: int, rng: np.random.Generator
) -> list[TrialRecord]:
    """Random trials of each size."""
    made = []
    for size in sizes:
        batch, rate = truth.best(*size)
        for _ in range(trials):
            u, v = rng.uniform(-2.0, 2.0), rng.uniform(LOW, truth.high)
            size_of_step = round(math.exp(batch + u))
            log_batch = math.log(size_of_step)
            log_rate = rate + v + 0.5 * (log_batch - batch)
            excess, beyond = truth.excess(log_batch, log_rate, size)
            blew = beyond + rng.logistic(0, 0.05) > 0
            loss = rng.uniform(5.8, 7.2) if blew else truth.floor(size) + excess + rng.normal(0, 0.005)
            facts = TrialFacts(
                epochs=1.0,
                effective_batch=size_of_step,
                learning_rate=math.exp(log_rate),
                samples_budget=int(size[0]),
                optimizer="AdamW",
                model_parameters=int(size[1]),
            )
            values = {"effective_batch": size_of_step, "reference_rate": math.exp(log_rate)}
            made.append(TrialRecord(len(made), "complete", values, facts, 1.0, loss, direction="minimize"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=12)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.05, 0.1, 0.2])
    parser.add_argument("--ladders", nargs="*", default=list(LADDERS))
    given = parser.parse_args()
    print(f"{'ladder':<20}{'share':>6}  {'way':<12}{'excess':>8}{'worst':>8}{'batch':>7}{'rate':>6}")
    for name in given.ladders:
        for share in given.shares:
            found: dict[str, list[Judged]] = {}
            for seed in range(given.studies):
                for way, judged in judged_ways(*LADDERS[name], share, given.trials, seed):
                    found.setdefault(way, []).append(judged)
            for way, rows in found.items():
                excesses, batch, rate = (np.array(column) for column in zip(*rows, strict=True))
                held = f"{batch.mean():>7.2f}{rate.mean():>6.2f}"
                print(
                    f"{name:<20}{share:>6.2f}  {way:<12}{excesses.mean():>8.4f}{excesses.max():>8.4f}{held}",
                    flush=True,
                )


Judged = tuple[float, float, float]  # excess loss; whether the intervals of batch and rate hold the truth


def judged_ways(
    sizes: Sequence[tuple[float, float]], large: tuple[float, float], share: float, trials: int, seed: int
) -> Iterator[tuple[str, Judged]]:
    """How far from the best each way's setting is, for one study."""
    rng = np.random.default_rng([seed, 7])
    truth = Truth.drawn(rng, share)
    records = study(truth, sizes, trials, rng)
    of_last = [record for record in records if record.facts.samples_budget == sizes[-1][0]]
    best = min(of_last, key=lambda record: record.accuracy or 0.0).facts
    yield (
        "unchanged",
        (truth.lost(best.effective_batch or 1, best.learning_rate or 1.0, large), math.nan, math.nan),
    )
    at_best, best_rate = truth.best(*sizes[-1])
    fitted = best_rates("made up", of_last, [round(math.exp(at_best))])
    of_batch = min(fitted.rates, key=lambda one: abs(math.log(one.effective_batch) - at_best))
    there = math.exp(best_rate + 0.5 * (math.log(of_batch.effective_batch) - at_best))
    exponent = float(fitted.exponent.low <= 0.5 <= fitted.exponent.high)
    holds = exponent, float(of_batch.learning_rate.low <= there <= of_batch.learning_rate.high)
    yield "best rate", (truth.lost(of_batch.effective_batch, of_batch.learning_rate.value, sizes[-1]), *holds)


if __name__ == "__main__":
    main()

"""Can trials discriminate learning-rate rules? The fitted exponent of the best rate against the true one.

    .venv/bin/python benchmarks/rules.py [--problems 32] [--samplers random tpe front]

The tasks are the synthetic laws of benchmarks/problems.py: best rate = rate x (batch / 256) ** exponent, at most 0.5, exponent
from 0.4 to 1; accuracy has noise of 1 %. With one study per task, `covered` is the share of 90 % intervals that contain the
truth, `width` their median width, `error` the median of |fitted - true|. The truth is the slope of the best rate over all
batches searched, including the cap.
`rates` are the same for the best rate at batches 16, 128 and 1024: share covered, median error as a factor. `rules` is the
share of studies that reject `constant`, which never holds. `bends` is the share that report a falling slope, where the cap is
within the batches searched and where it is not.

Digits: draws from the 720 trainings of benchmarks/data. Their best rate (mean of the best three of 12) has slopes of 0.67,
0.53, 0.37 and 0.32 after 2, 4, 8 and 16 epochs. Printed are the median and quartiles of the fitted exponent over draws, the
median width of its interval, and the share of intervals that contain 0.35, 0.5 and 0.65.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from typing import Any

import numpy as np
import optuna
from bsearch.search.analysis.rates import BestRates
from bsearch.search.laws.best_rate import best_rates
from bsearch.spaces.record import TrialFacts, TrialRecord
from problems import Laws, Table

from search import search_of

AFTER = (30, 60, 100)
BATCHES = (16, 128, 1024)


def best_log_rate(problem: Laws, batches: Any) -> Any:
    return np.log(np.minimum(problem.rate * (np.asarray(batches) / 256) ** problem.exponent, 0.5))


def true_exponent(problem: Laws) -> float:
    """Slope of the best rate over the batches searched."""
    batches = np.geomspace(8, 2048, 200)
    return float(np.polyfit(np.log(batches), best_log_rate(problem, batches), 1)[0])


def trials(problem: Laws, kind: str, count: int, seed: int) -> list[TrialRecord]:
    search = search_of(kind, problem, seed)
    rng = np.random.default_rng(seed)
    records = []
    for number in range(count):
        parameters = search.ask().parameters
        seconds, accuracy = (
            problem.seconds(parameters),
            problem.accuracy(parameters) + 0.01 * rng.standard_normal(),
        )
        search.tell(number, seconds, accuracy)
        batch = parameters["effective_batch"]
        rate = parameters["reference_rate"] * math.sqrt(batch / 256)
        facts = TrialFacts(effective_batch=batch, learning_rate=rate, rule="sqrt")
        records.append(TrialRecord(number, "complete", parameters, facts, seconds, accuracy))
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samplers", nargs="+", default=["random", "tpe", "front", "digits"])
    parser.add_argument("--problems", type=int, default=32)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(
        f"{'':14}  covered  width  error   bias   rates: covered  error   rules   bends (capped, not)   fit s"
    )
    for kind in [one for one in options.samplers if one != "digits"]:
        problems = [Laws(seed) for seed in range(options.problems)]
        every = [trials(problem, kind, max(AFTER), seed) for seed, problem in enumerate(problems)]
        for count in AFTER:
            started = time.perf_counter()
            found = [best_rates("laws", records[:count], BATCHES) for records in every]
            fit_s = (time.perf_counter() - started) / len(found)
            print(f"{kind:>7}, {count:>3}    {figures(problems, found)}   {fit_s:5.2f}", flush=True)
    if "digits" in options.samplers:
        for count in (40, 80, 150):
            print(f" digits, {count:>3}    {digits(count)}", flush=True)


def digits(count: int, draws: int = 12) -> str:
    rows = [(key, curves[0][-1]) for key, curves in Table("digits", 0.5).curves.items()]
    exponents = []
    for seed in range(draws):
        records = []
        for number in np.random.default_rng(seed).choice(len(rows), count, replace=False).tolist():
            (batch, reference_rate, epochs), accuracy = rows[number]
            parameters = {"effective_batch": int(batch), "reference_rate": reference_rate, "epochs": epochs}
            facts = TrialFacts(
                effective_batch=int(batch), learning_rate=reference_rate * math.sqrt(batch / 64)
            )
            records.append(TrialRecord(number, "complete", parameters, facts, 1.0, accuracy))
        exponents.append(best_rates("digits", records).exponent)
    low, middle, high = np.quantile([one.value for one in exponents], [0.25, 0.5, 0.75])
    held = " ".join(f"{np.mean([one.holds(slope) for one in exponents]):.2f}" for slope in (0.35, 0.5, 0.65))
    width = np.median([one.high - one.low for one in exponents])
    return (
        f"exponent {middle:.2f} ({low:.2f} to {high:.2f}), width {width:.2f}, holds 0.35, 0.5, 0.65: {held}"
    )


def figures(problems: list[Laws], found: list[BestRates]) -> str:
    true = np.array([true_exponent(problem) for problem in problems])
    covered = np.mean([one.exponent.holds(value) for one, value in zip(found, true, strict=True)])
    width = np.median([one.exponent.high - one.exponent.low for one in found])
    errors = np.array([one.exponent.value for one in found]) - true
    rates = [
        (at.learning_rate.low <= rate <= at.learning_rate.high, abs(math.log(at.learning_rate.value / rate)))
        for problem, one in zip(problems, found, strict=True)
        for at in one.rates
        if at.effective_batch in BATCHES and not at.edge
        for rate in [float(np.exp(best_log_rate(problem, at.effective_batch)))]
    ]
    rates_covered = np.mean([held for held, _ in rates])
    rates_error = math.exp(float(np.median([error for _, error in rates])))
    rules = np.mean([not one.holds["constant"] for one in found])
    capped = np.array([float(best_log_rate(problem, 2048)) > math.log(0.5) - 1e-9 for problem in problems])
    bends = np.array([one.bend is not None for one in found])
    bending, straight = bends[capped].mean(), bends[~capped].mean()
    return (
        f"{covered:7.2f}  {width:5.2f}  {np.median(abs(errors)):5.2f}  {errors.mean():+5.2f}   "
        f"{rates_covered:14.2f}  x{rates_error:4.2f}   {rules:5.2f}   {bending:13.2f}, {straight:4.2f}"
    )


if __name__ == "__main__":
    main()

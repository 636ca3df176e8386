"""How well the law of samples to a target predicts batches that it has not seen, one batch left out at a time.

    BSEARCH_DATA=... .venv/bin/python benchmarks/batch_law.py [--synthetic 30]

Relative errors of the predicted medians (median and 90th percentile), and how often 90 % intervals hold, of three laws: with
the 24 free shapes used until 2026-11-27 (and today's other priors), as it is now, and the plainest, a (1 + B / c),
fitted by least squares of logarithms to the rows of the same group where that has three batches. Grounds:

- MLPerf's eight workloads. "Chosen on the others": for each workload, the prior probability of the plain law is the one of
  `CHOICES` with the smallest error on the other seven (mean of the logarithms' absolute errors, each workload counts once).
- Zeus's six workloads at the paper's targets, batches where most runs reached it. Their figures were in view when
  the shapes and the range of knees were settled, so they are no untouched ground.
- Synthetic tables: ten runs a batch, 10 % apart by their seeds and 5 % by their setting; n batches are fitted, one is left out.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from bsearch.search.laws.runs_table import RunsToTarget
from bsearch.search.laws.samples_to_target import SHAPES, Shape, fit_batch_law, shapes_with
from problems import ZEUS_TARGETS

DATA = Path(os.environ.get("BSEARCH_DATA", ""))
CHOICES = (1 / 6, 0.3, 0.5, 0.7, 0.9)
BEFORE = [
    Shape(k, q, float(np.exp(-0.5 * (np.log(k) / 0.7) ** 2 - 0.5 * ((q - 0.9) / 0.25) ** 2)))
    for k in (0.5, 1.0, 2.0, 4.0)
    for q in (0.35, 0.5, 0.7, 0.85, 1.0, 1.15)
]
# Sharpness and growth of synthetic laws.
TRUTHS = {
    "plain": (1.0, 1.0),
    "flat": (1.0, 0.0),
    "sharp": (4.0, 1.0),
    "slow": (1.0, 0.5),
    "sharp and slow": (2.0, 0.7),
}

# Of each point: predicted over measured, and whether the interval holds (NaN where there is none).
Row = tuple[float, float]
Predict = Callable[[Sequence[RunsToTarget], RunsToTarget], Row]


def plainest(points: Sequence[RunsToTarget], point: RunsToTarget) -> Row:
    """Prediction of a (1 + B / c)."""
    own = [one for one in points if one.group == point.group]
    points = own if len({one.effective_batch for one in own}) >= 3 else points
    batches, logs = np.array([one.effective_batch for one in points]), np.log([one.median for one in points])
    found = []
    for knee in np.geomspace(batches.min() / 20, batches.max() * 400, 400):
        level = float(np.mean(logs - np.log1p(batches / knee)))
        error = float(np.sum((logs - level - np.log1p(batches / knee)) ** 2))
        found.append((error, level + float(np.log1p(point.effective_batch / knee))))
    return float(np.exp(min(found)[1])) / point.median, np.nan


def of_shapes(shapes: Sequence[Shape]) -> Predict:
    def predict(points: Sequence[RunsToTarget], point: RunsToTarget) -> Row:
        law = fit_batch_law(points, shapes)
        found = law.samples_at(point.effective_batch, point.group if point.group in law.levels else None)
        return found.value / point.median, float(found.holds(point.median))

    return predict


LAWS: dict[str, Predict] = {"before": of_shapes(BEFORE), "now": of_shapes(SHAPES), "plainest": plainest}


def left_out(points: Sequence[RunsToTarget], predict: Predict) -> list[Row]:
    return [
        predict([one for one in points if one.effective_batch != point.effective_batch], point)
        for point in points
    ]


def mean_error(rows: Sequence[Row]) -> float:
    return float(np.mean(np.abs(np.log([times for times, _ in rows]))))


def chosen_on_others(workloads: Mapping[str, Sequence[RunsToTarget]]) -> tuple[list[Row], list[float]]:
    """Rows of each workload by the prior that does best on the others, and the priors."""
    rows = {
        plain: {name: left_out(points, of_shapes(shapes_with(plain))) for name, points in workloads.items()}
        for plain in CHOICES
    }
    found, chosen = [], []
    for name in workloads:
        best = min(
            CHOICES,
            key=lambda plain: sum(mean_error(own) for other, own in rows[plain].items() if other != name),
        )
        found += rows[best][name]
        chosen.append(best)
    return found, chosen


def mlperf_runs(path: Path) -> dict[str, list[RunsToTarget]]:
    """What the runs of each of MLPerf's workloads needed to reach its target, by batch and round."""
    points: dict[str, list[RunsToTarget]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            samples = tuple(map(float, row["to_target"].split()))
            points.setdefault(row["workload"], []).append(
                RunsToTarget(int(row["effective_batch"]), samples, row["round"])
            )
    return points


def zeus(path: Path) -> dict[str, list[RunsToTarget]]:
    """Epochs to the paper's target, by workload; a batch counts where most of its runs reached it."""
    found: dict[str, dict[int, list[float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            if float(row["target_metric"]) == ZEUS_TARGETS[row["dataset"]]:
                found.setdefault(row["dataset"], {}).setdefault(int(row["batch_size"]), []).append(
                    float(row["target_epoch"])
                )
    return {
        name: [
            RunsToTarget(batch, tuple(reached))
            for batch, runs in sorted(batches.items())
            if len(reached := [value for value in runs if not np.isnan(value)]) * 2 > len(runs)
        ]
        for name, batches in found.items()
    }


def synthetic(shape: tuple[float, float], batches: int, rng: np.random.Generator) -> list[RunsToTarget]:
    """Over 3 to 7 doublings of the batch, with the knee among them."""
    (sharpness, growth), lowest = shape, 2.0 ** rng.integers(3, 9)
    measured = np.round(lowest * 2 ** np.linspace(0, rng.uniform(3, 7), batches))
    knee = np.exp(rng.uniform(np.log(measured[0]) + 0.5, np.log(measured[-1]) + 0.5))
    medians = (1 + (measured / knee) ** sharpness) ** (growth / sharpness) * np.exp(
        0.05 * rng.standard_normal(batches)
    )
    runs = 1e5 * medians[:, None] * np.exp(0.1 * rng.standard_normal((batches, 10)))
    return [
        RunsToTarget(int(batch), tuple(map(float, row))) for batch, row in zip(measured, runs, strict=True)
    ]


def figures(rows: Sequence[Row]) -> str:
    errors, held = (
        np.abs(np.array([times for times, _ in rows]) - 1),
        [holds for _, holds in rows if not np.isnan(holds)],
    )
    interval = f"{np.mean(held):>6.0%}" if held else ""
    return f"{np.median(errors):>8.1%}{np.quantile(errors, 0.9):>7.1%}{interval}"


def line(ground: str, tables: Sequence[Sequence[RunsToTarget]]) -> None:
    rows = [[row for points in tables for row in left_out(points, predict)] for predict in LAWS.values()]
    print(f"{ground:<32}{len(rows[0]):>7}" + "".join(map(figures, rows)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", type=int, default=30, help="tables of each kind")
    options = parser.parse_args()
    print(f"{'':<32}{'points':>7}{'before, 90th, held':>21}{'now, 90th, held':>21}{'plainest, 90th':>15}")
    if not (DATA / "mlperf").is_dir():
        print("skipped: mlperf and zeus are not in BSEARCH_DATA")
    else:
        mlperf = mlperf_runs(DATA / "mlperf" / "samples_to_target.csv")
        for name, points in mlperf.items():
            line(f"  {name}", [points])
        line("MLPerf's eight", list(mlperf.values()))
        rows, chosen = chosen_on_others(mlperf)
        print(
            f"{'  chosen on the others':<39}{'':<21}{figures(rows)}   {', '.join(f'{plain:.2g}' for plain in chosen)}",
            flush=True,
        )
        others = zeus(DATA / "zeus" / "summary_train.csv")
        for name, points in others.items():
            line(f"  {name}", [points])
        line("Zeus's six", list(others.values()))
    for truth, shape in TRUTHS.items():
        for batches in (3, 5, 8):
            rng = np.random.default_rng(batches)
            line(
                f"synthetic, {truth}, {batches}",
                [synthetic(shape, batches + 1, rng) for _ in range(options.synthetic)],
            )


if __name__ == "__main__":
    main()

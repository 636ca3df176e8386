"""How well the law of samples to a target predicts batches that it has not seen: MLPerf's measured runs, one batch left out.

    BSEARCH_DATA=... .venv/bin/python benchmarks/batch_law.py

For each workload the relative errors of the predicted medians, and how often their 90 % intervals hold; the same for the
plainest law, a (1 + B / c), fitted by least squares of logarithms to the rows of the same group where that has three batches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bsearch.search.laws.samples_to_target import RunsToTarget, fit_batch_law, read_runs

TABLE = Path(os.environ.get("BSEARCH_DATA", "")) / "mlperf" / "samples_to_target.csv"


def plainest(points: Sequence[RunsToTarget], point: RunsToTarget) -> float:
    """Prediction of a (1 + B / c)."""
    own = [one for one in points if one.group == point.group]
    points = own if len({one.effective_batch for one in own}) >= 3 else points
    batches, logs = np.array([one.effective_batch for one in points]), np.log([one.median for one in points])
    found = []
    for knee in np.geomspace(batches.min() / 20, batches.max() * 400, 400):
        level = float(np.mean(logs - np.log1p(batches / knee)))
        error = float(np.sum((logs - level - np.log1p(batches / knee)) ** 2))
        found.append((error, level + float(np.log1p(point.effective_batch / knee))))
    return float(np.exp(min(found)[1]))


def left_out(points: Sequence[RunsToTarget]) -> list[tuple[float, bool, float]]:
    """For each point, the relative error of its prediction, whether its interval holds, and the plainest law's error."""
    rows = []
    for batch in sorted({point.effective_batch for point in points}):
        rest = [point for point in points if point.effective_batch != batch]
        law = fit_batch_law(rest)
        for point in points:
            if point.effective_batch == batch:
                found = law.samples_at(batch, point.group if point.group in law.levels else None)
                holds = found.low <= point.median <= found.high
                rows.append((abs(found.value / point.median - 1), holds, abs(plainest(rest, point) / point.median - 1)))
    return rows


def line(name: str, rows: Sequence[tuple[float, bool, float]]) -> str:
    errors, holds, plain = (np.array(column) for column in zip(*rows, strict=True))
    figures = "".join(f"{np.median(one):>10.1%}{np.quantile(one, 0.9):>10.1%}" for one in (errors, plain))
    return f"{name:<18}{len(rows):>8}{figures}{holds.mean():>10.0%}"


def main() -> None:
    if not TABLE.is_file():
        print("skipped: mlperf/samples_to_target.csv is not in BSEARCH_DATA")
        return
    print(f"{'workload':<18}{'points':>8}{'law':>10}{'90th':>10}{'plainest':>10}{'90th':>10}{'interval':>10}")
    every: list[tuple[float, bool, float]] = []
    for workload, points in read_runs(TABLE).items():
        rows = left_out(points)
        every += rows
        print(line(workload, rows), flush=True)
    print(line("all", every))


if __name__ == "__main__":
    main()

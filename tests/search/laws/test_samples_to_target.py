"""The law of samples to a target: it finds laws it is given, its intervals hold as often as they say, units do not matter."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from bsearch.search.laws.runs_table import RunsToTarget
from bsearch.search.laws.samples_to_target import SHAPES, _errors, fit_batch_law, shapes_with
from hypothesis import given, settings
from hypothesis import strategies as st

BATCHES = (32, 64, 128, 256, 512, 1024, 2048)


def simulated(
    rng: np.random.Generator, batches: tuple[int, ...] = BATCHES, spread: float = 0.05
) -> tuple[list[RunsToTarget], dict[str, float]]:
    """Runs of a law whose constants are drawn, and those."""
    truth = {
        "floor": float(np.exp(rng.uniform(6, 14))),
        "knee": float(np.exp(rng.uniform(np.log(64), np.log(1024)))),
        "sharpness": float(rng.choice([0.7, 1.0, 2.0, 3.0])),
        "growth": float(rng.uniform(0.6, 1.1)),
    }
    points = []
    for batch in batches:
        runs = at(truth, batch) * np.exp(spread * rng.standard_normal() + 0.05 * rng.standard_normal(10))
        points.append(RunsToTarget(batch, tuple(float(one) for one in runs)))
    return points, truth


def at(truth: dict[str, float], batch: float) -> float:
    k, q = truth["sharpness"], truth["growth"]
    return float(truth["floor"] * (1 + (batch / truth["knee"]) ** k) ** (q / k))


def test_intervals_hold_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held, critical = [], []
    for _ in range(60):
        points, truth = simulated(rng)
        left = int(rng.integers(1, len(points) - 1))
        law = fit_batch_law([point for place, point in enumerate(points) if place != left])
        found = law.samples_at(points[left].effective_batch)
        held.append(found.low <= points[left].median <= found.high)
        of_law = law.critical_batch()
        k, q = truth["sharpness"], truth["growth"]
        critical.append(of_law.low <= truth["knee"] * (2 ** (k / q) - 1) ** (1 / k) <= of_law.high)
    for shares in (held, critical):
        assert 0.8 <= np.mean(shares) <= 1.0


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 1e6), st.integers(2, 9))
def test_units_of_data_and_of_batches_do_not_matter(seed: int, unit: float, times: int) -> None:
    points, _ = simulated(np.random.default_rng(seed), BATCHES[:4])
    law = fit_batch_law(points)
    other = fit_batch_law(
        [
            RunsToTarget(times * one.effective_batch, tuple(unit * run for run in one.samples))
            for one in points
        ]
    )
    assert other.critical_batch().value == pytest.approx(times * law.critical_batch().value, rel=1e-6)
    assert other.samples_at(300 * times).high == pytest.approx(unit * law.samples_at(300).high, rel=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.floats(0.2, 0.5), st.integers(1, 6))
def test_what_is_counted_in_epochs_is_known_to_an_epoch(seed: int, epoch: float, runs: int) -> None:
    """All runs of a setting may take as many, and the law allows what was rounded away all the same."""
    exact = np.random.default_rng(seed).uniform(2, 20, 40)
    counted = np.ceil(exact / epoch) * epoch
    errors = _errors([RunsToTarget(8, (float(one),) * runs) for one in counted])
    away = np.log((counted - epoch / 2) / exact) / errors
    assert 0.6 < np.sqrt(np.mean(away**2)) < 1.4
    assert _errors([RunsToTarget(8, (float(one),) * runs) for one in exact]).max() < 1e-12


def test_groups_share_the_law_but_not_its_level() -> None:
    points, truth = simulated(np.random.default_rng(1), spread=0.01)
    half = [
        RunsToTarget(one.effective_batch, tuple(run / 7 for run in one.samples), "new") for one in points[::3]
    ]
    law = fit_batch_law([*points, *half])
    assert law.samples_at(512, "new").value == pytest.approx(at(truth, 512) / 7, rel=0.1)
    assert law.samples_at(512, "").value == pytest.approx(at(truth, 512), rel=0.1)
    # What was never measured may have any level.
    unknown = law.samples_at(512)
    assert unknown.low < law.samples_at(512, "new").low
    assert unknown.high > law.samples_at(512, "").high


def test_more_runs_say_more_and_far_batches_say_less() -> None:
    points, _ = simulated(np.random.default_rng(2))

    def width(law: object, batch: int) -> float:
        found = law.samples_at(batch)  # type: ignore[attr-defined]
        return float(np.log(found.high / found.low))

    law, few = fit_batch_law(points), fit_batch_law(points[::3])
    assert width(law, 256) < width(few, 256)
    assert width(law, 256) < width(law, 65536)
    assert law.covers(256)
    assert not law.covers(65536)


def test_where_the_plain_law_holds_nothing_is_lost_by_the_other_shapes() -> None:
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {"plain": [], "now": []}
    for _ in range(15):
        knee = float(np.exp(rng.uniform(np.log(64), np.log(1024))))
        medians = [1e5 * (1 + batch / knee) for batch in BATCHES[::2]]
        runs = [tuple(float(run) for run in one * np.exp(0.05 * rng.standard_normal(10))) for one in medians]
        points = [RunsToTarget(batch, one) for batch, one in zip(BATCHES[::2], runs, strict=True)]
        for name, prior in (("plain", shapes_with(1.0)[:1]), ("now", SHAPES)):
            errors[name] += [
                abs(np.log(fit_batch_law(points, prior).samples_at(batch).value / 1e5 / (1 + batch / knee)))
                for batch in BATCHES[1::2]
            ]
    assert np.mean(errors["now"]) < 1.1 * np.mean(errors["plain"])


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


@pytest.mark.slow
def test_it_predicts_mlperfs_batches_that_it_has_not_seen() -> None:
    path = Path(os.environ.get("BSEARCH_DATA", "")) / "mlperf" / "samples_to_target.csv"
    if not path.is_file():
        pytest.skip("mlperf/samples_to_target.csv is not in BSEARCH_DATA")
    errors, held = [], []
    for points in mlperf_runs(path).values():
        for batch in {point.effective_batch for point in points}:
            law = fit_batch_law([point for point in points if point.effective_batch != batch])
            for point in (one for one in points if one.effective_batch == batch):
                found = law.samples_at(batch, point.group if point.group in law.levels else None)
                errors.append(abs(found.value / point.median - 1))
                held.append(found.low <= point.median <= found.high)
    assert np.median(errors) < 0.06
    assert np.quantile(errors, 0.9) < 0.2
    assert 0.82 < np.mean(held) < 0.97


def test_too_few_batches_make_no_law() -> None:
    with pytest.raises(ValueError, match="at least 3 different batches, got 2"):
        fit_batch_law([RunsToTarget(8, (1.0,)), RunsToTarget(16, (2.0,)), RunsToTarget(16, (3.0,), "other")])

"""Laws of the gradient noise scale: its parts are unbiased, its interval holds what it should, and looking changes nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.digits import Digits
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.steps.noise_scale import NoiseScale
from bsearch.objectives.task import Loss
from bsearch.objectives.task_code import task_code_hash
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.search.report.sentences import noise_scale_sentence
from bsearch.search.run.driver import run_study
from bsearch.search.run.serial import SerialRunner
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import read_study
from bsearch.spaces.trial import TrialSetup
from conftest import TASKS
from helpers import Net, setup
from rank_jobs import noise_pairs, trained
from tasks_for_tests import NeedsTwo, WideNet

WIDE = f"{TASKS}:WideNet"


def estimates(noise: NoiseScale) -> np.ndarray:
    """Of tr(Sigma) and |G|^2, a row a step."""
    return np.array(noise._pairs)


def square(gradients: np.ndarray) -> float:
    return float((gradients.mean(axis=0) ** 2).sum())


@pytest.mark.parametrize(("small", "big"), [(1, 2), (1, 3), (2, 4), (2, 3)])
@pytest.mark.parametrize("nested", [True, False])
def test_over_all_batches_that_could_be_drawn_the_estimates_are_right_on_average(small: int, big: int, nested: bool) -> None:
    population = np.random.default_rng(1).normal(size=(3, 4)) + 0.5
    noise = NoiseScale()
    for drawn in itertools.product(population, repeat=big if nested else small + big):
        noise.add(small, square(np.array(drawn[:small])), big, square(np.array(drawn[-big:])))
    assert estimates(noise).mean(axis=0) == pytest.approx([population.var(axis=0).sum(), square(population)], rel=1e-12)


@pytest.mark.parametrize(("small", "big"), [(1, 2), (2, 4), (3, 5), (2, 6)])
def test_without_replacement_it_is_the_gradient_beyond_the_training_set(small: int, big: int) -> None:
    population = np.random.default_rng(2).normal(size=(6, 4)) + 0.5
    noise = NoiseScale()
    for drawn in itertools.permutations(population, big):
        noise.add(small, square(np.array(drawn[:small])), big, square(np.array(drawn)))
    variance = population.var(axis=0, ddof=1).sum()
    assert estimates(noise).mean(axis=0) == pytest.approx([variance, square(population) - variance / 6], rel=1e-9)


def gaussian(signal: float, steps: int, seed: int, small: int = 8, big: int = 32) -> NoiseScale:
    """Gradients of 20 dimensions with |G|^2 = `signal` and tr(Sigma) = 20."""
    draw = np.random.default_rng(seed)
    noise = NoiseScale()
    for first, rest in zip(
        draw.normal(size=(steps, 20)) / small**0.5, draw.normal(size=(steps, 20)) / (big - small) ** 0.5, strict=True
    ):
        first, rest = first + (signal / 20) ** 0.5, rest + (signal / 20) ** 0.5
        noise.add(small, float(first @ first), big, float((((small * first + (big - small) * rest) / big) ** 2).sum()))
    return noise


@pytest.mark.parametrize(("signal", "steps"), [(0.5, 300), (5.0, 40), (5.0, 14), (20.0, 14)])
def test_the_interval_holds_the_truth_as_often_as_it_says(signal: float, steps: int) -> None:
    facts = [gaussian(signal, steps, seed).facts() for seed in range(200)]
    assert sum(map(bool, facts)) > 190
    held = [f["noise_scale_low"] <= 20 / signal <= f["noise_scale_high"] for f in facts if f]
    # 95 % of 200 with four standard errors of leeway.
    assert sum(held) / len(held) > 0.95 - 4 * (0.95 * 0.05 / len(held)) ** 0.5
    assert all(f["noise_scale_low"] <= f["noise_scale"] <= f["noise_scale_high"] for f in facts if f)


def test_nothing_is_told_of_noise_alone_or_of_few_steps() -> None:
    # One side of a 95 % interval: 2.5 % of 200, with four standard errors of leeway.
    assert sum(bool(gaussian(0.0, 300, seed).facts()) for seed in range(200)) <= 5 + 4 * 5**0.5
    assert gaussian(20.0, 13, 0).facts() == {}
    assert gaussian(20.0, 14, 0).facts() != {}
    assert NoiseScale().facts() == {}


def mean_gradient(run: TrainingRun, batch: Any) -> torch.Tensor:
    loss = run.task.loss(run.model, batch, run.setup)
    made = torch.autograd.grad(loss.total / loss.denominator, run.parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in made if g is not None])


def twin(run: TrainingRun, plan: BatchPlan, steps: int) -> Iterator[tuple[float, float]]:
    """Obvious and slow: mean gradients of whole parts, one backward each, at the weights that the run has by then."""
    size = plan.effective_batch
    loader = run.loader([replace(plan, devices=1)] * steps)
    for step in range(steps):
        first = size * step
        starts = list(itertools.accumulate(plan.shares, initial=first))
        if plan.devices == 1:
            parts = [(first, next(samples for samples in plan.micro_batches() if samples))]
        else:
            parts = list(zip(starts[:-1], plan.shares, strict=True))
        fetched = [run.train_fetcher.fetch(run.stream.take(at, samples)) for at, samples in parts]
        small = float(np.mean([float(mean_gradient(run, batch).square().sum()) for batch in fetched]))
        big = float(mean_gradient(run, run.train_fetcher.fetch(run.stream.take(first, size))).square().sum())
        b = len(parts) / sum(1 / samples for _, samples in parts)
        yield (small - big) / (1 / b - 1 / size), (size * big - b * small) / (size - b)
        run.step(run.micro_batches(replace(plan, devices=1), loader), size)


@pytest.mark.parametrize("kind", ["samples", "weights", "ignored", "tokens"])
@pytest.mark.parametrize(("batch", "accumulation", "clip"), [(64, 2, None), (101, 3, 0.01), (33, 33, None)])
def test_a_step_shows_what_gradients_of_its_parts_do(kind: str, batch: int, accumulation: int, clip: float | None) -> None:
    made = setup(batch, accumulation, parameters={"kind": kind}, training={"clip_norm": clip})
    (ours,) = noise_pairs(WIDE, made.to_dict(), 4)
    theirs = list(twin(TrainingRun(WideNet(), made), made.plan, 4))
    if kind == "ignored":
        theirs = [pair for pair in theirs if all(map(math.isfinite, pair))]  # micro-batches of one sample that is ignored
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-8, abs=1e-12)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    started = RankProcesses(2, "cpu", 1)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", "weights", "tokens"])
@pytest.mark.parametrize(("batch", "accumulation"), [(64, 1), (101, 3), (3, 1)])
def test_two_ranks_show_what_gradients_of_their_shares_do(
    ranks: RankProcesses, kind: str, batch: int, accumulation: int
) -> None:
    made = setup(batch, plan=BatchPlan(batch, accumulation, 2), parameters={"kind": kind, "unused": True})
    (ours,) = ranks.run(noise_pairs, WIDE, made.to_dict(), 4)
    alone = replace(made, plan=BatchPlan(batch))
    theirs = list(twin(TrainingRun(WideNet(), alone), made.plan, 4))
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-8, abs=1e-12)


@pytest.mark.slow
def test_two_ranks_train_alike_whether_looked_at_or_not(ranks: RankProcesses) -> None:
    made = setup(101, plan=BatchPlan(101, 2, 2), training={"clip_norm": 0.05}).to_dict()
    (plain,) = ranks.run(trained, WIDE, made, 5)
    (seen,) = ranks.run(trained, WIDE, made, 5, True)
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bsearch.objectives.digits:Digits", WIDE, f"{TASKS}:NeedsTwo"])
def test_looking_changes_no_bit(name: str, precision: str) -> None:
    made = setup(65, 3, training={"precision": precision if name != WIDE else "fp32", "clip_norm": 0.5}).to_dict()
    (plain,), (seen,) = trained(name, made, 8), trained(name, made, 8, True)
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def last_facts(made: TrialSetup, task: Any = None) -> dict[str, Any]:
    *_, last = train_task(task or Digits(), made)
    clocks = ("waited_s", "throttled_s", "stolen_share")  # never twice the same
    return {name: fact for name, fact in last.facts.items() if name not in clocks}


@pytest.mark.long
def test_a_trial_in_passes_tells_and_one_whole_does_not() -> None:
    facts = last_facts(setup(64, 8, 64 * 200, 0.01))
    assert 0 <= facts["noise_scale_low"] < facts["noise_scale"] < facts["noise_scale_high"] < math.inf
    assert last_facts(setup(64, 8, 64 * 200, 0.01)) == facts
    assert "noise_scale" not in last_facts(setup(64, 1, 64 * 200))
    assert "noise_scale" not in last_facts(setup(64, 8, 64 * 50))


def test_batch_statistics_and_remainders_are_no_hindrance() -> None:
    run = TrainingRun(NeedsTwo(), setup(64, 4, 64 * 12 + 9))
    for _ in run.measurements():
        pass
    assert len(estimates(run.noise)) == 3  # steps 4, 8 and 12, not the remainder


def test_labels_that_are_all_ignored_tell_nothing() -> None:
    class Ignored(Net):
        kind = "ignored"

        def loss(self, model: torch.nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            return Loss(super().loss(model, [batch[0], torch.full_like(batch[1], -100)], setup).total, 0.0)

    assert "noise_scale" not in last_facts(setup(16, 2, 640), Ignored())


def test_memory_is_traced_and_counted_as_before() -> None:
    counted = {looks: last_facts(setup(64, 2, 64 * looks))["peak_bytes"] for looks in (8, 64)}
    assert counted[8] == counted[64]


def records(*facts: dict[str, float]) -> list[TrialRecord]:
    return [TrialRecord(number, "complete", {}, TrialFacts.of(each)) for number, each in enumerate(facts)]


def test_the_words() -> None:
    def three(scale: float, low: float, high: float) -> dict[str, float]:
        return {"noise_scale": scale, "noise_scale_low": low, "noise_scale_high": high}

    assert noise_scale_sentence(records({}, {})) is None
    assert noise_scale_sentence([replace(records(three(1, 1, 1))[0], outcome="error")]) is None
    assert noise_scale_sentence(records(three(182.3, 70.6, 418.4), {})) == (
        "Gradient noise scale: about 182 samples (71 to 418 in 1 trial): batches far above it learn little more per step. "
        "A hint for effective_batch.high, not a law."
    )
    assert noise_scale_sentence(records(three(100, 50, 300), three(12345, 2000, 99999), three(200, 20, 800))) == (
        "Gradient noise scale: about 200 samples (50 to 800 in a trial, the median of 3): batches far above it learn little "
        "more per step. A hint for effective_batch.high, not a law."
    )


def test_a_study_keeps_it_and_says_it(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(
        "study: noisy\ntask: bsearch.objectives.digits:Digits\n"
        "space:\n  effective_batch: 128\n  accumulation: 8\n  reference_rate: {value: 0.1, at_batch: 128}\n  epochs: 12\n"
        "budget: {trials: 1, profile_s: 0}\n"
    )
    spec = read_study(tmp_path / "study.yaml")
    result = run_study(spec, SerialRunner(spec.devices), task_code_hash(spec.task))
    assert result.study.records[0].facts.noise_scale > 0
    assert "Gradient noise scale" in (noise_scale_sentence(result.study.records) or "")

"""Every step of whole runs with unlike steps, against a plain torch loop: what a first step alone would not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.schedule import rate_factor
from bsearch.spaces.trial import Outcome, TrialSetup
from helpers import Net, setup
from torch import nn
from whole_run_task import KINDS, WEIGHTS, Recorded, data, drawn_by, model

Steps = list[tuple[float, list[float]]]  # of each step: the norm of its gradient, and the parameters after it


def plain(made: TrialSetup, kind: str, dtype: torch.dtype = torch.float64) -> Steps:
    """The obvious twin: each step's whole batch at once, torch's own mean, torch's own optimizer."""
    net, (inputs, labels), steps, seen = model(made).to(dtype), data(kind), list[Any](), 0
    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(made.training.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=lower == torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), lr=made.learning_rate, momentum=0.9, nesterov=True)
    weight = WEIGHTS if kind == "weights" else None
    sizes = [run.plan.effective_batch for run in made.steps() for _ in range(run.count)]
    for size in sizes:
        index = torch.from_numpy(SampleStream(len(inputs), made.seed, drawn_by(kind)).take(seen, size).index)
        at = (seen + size / 2) / made.samples_budget
        optimizer.param_groups[0]["lr"] = made.learning_rate * rate_factor("cosine", 0.05, at)
        optimizer.zero_grad()
        counted = bool((labels[index] != -100).any())
        with torch.autocast("cpu", lower, enabled=lower is not None):
            logits = net(inputs[index].to(dtype)).flatten(0, -2)
            loss = nn.functional.cross_entropy(logits, labels[index].flatten(), weight)
        scaler.scale(loss if counted else sum(one.sum() for one in net.parameters()) * 0.0).backward()
        scaler.unscale_(optimizer)
        if made.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), made.training.clip_norm)
        norm = float(torch.cat([one.grad.flatten() for one in net.parameters()]).norm())
        scaler.step(optimizer)
        scaler.update()
        steps.append((norm, torch.cat([one.detach().flatten() for one in net.parameters()]).tolist()))
        seen += size
    return steps


def ours(made: TrialSetup, kind: str) -> Steps:
    task = Recorded()
    task.kind = kind
    list(TrainingRun(task, made).measurements())
    return task.steps


def assert_equal(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for number, ((norm, parameters), (right, values)) in enumerate(zip(found, expected, strict=True)):
        assert norm == pytest.approx(right, rel=tolerance, abs=1e-12), f"step {number}"
        assert parameters == pytest.approx(values, rel=tolerance, abs=1e-12), f"step {number}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_every_step_of_a_run_is_plain_torchs(kind: str, accumulation: int, clip_norm: float | None) -> None:
    # 600 samples, so steps of 70 cross an epoch's end, and 1,000 are 14 steps and a remainder of 20.
    made = setup(
        70, accumulation, budget=1000, rate=0.05, training={"clip_norm": clip_norm, "evaluations": 3}
    )
    assert_equal(ours(made, kind), plain(made, kind))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_step_in_every_precision_is_plain_torchs(
    precision: str, tolerance: float, accumulation: int
) -> None:
    made = setup(70, accumulation, budget=700, rate=0.05, training={"precision": precision, "evaluations": 1})
    task = Recorded()
    task.kind, task.dtype = "tokens", torch.float32
    list(TrainingRun(task, made).measurements())
    found, right = (
        [norm for norm, _ in steps] for steps in (task.steps, plain(made, "tokens", torch.float32))
    )
    assert found == pytest.approx(right, rel=tolerance)


def test_the_weight_of_a_step_is_its_own() -> None:
    # A kept weight that is not renewed for the remainder would scale its gradient.
    made = setup(100, 2, budget=250, training={"schedule": "constant", "warmup": 0, "evaluations": 1})
    task = Net()
    run = TrainingRun(task, made)
    norms: list[float] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: norms.append(float(torch.cat([p.grad.flatten() for p in run.parameters]).norm()))
    )
    list(run.measurements())
    assert 0.7 < norms[2] / norms[1] < 1.5, "a mean over 50 samples is about as large as one over 100"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_on_two_devices_is_plain_torchs(kind: str) -> None:
    made = setup(
        71,
        2,
        budget=1000,
        rate=0.05,
        parameters={"kind": kind},
        training={"evaluations": 2, "clip_norm": 0.5},
    )
    made = replace(made, plan=BatchPlan(71, 2, devices=2))
    *measurements, outcome = start_attempt("whole_run_task:Reported", made)
    assert outcome == Outcome("complete"), outcome
    values = plain(made, kind)[-1][1]
    assert measurements[-1].scores["norm"] == pytest.approx(
        sum(value * value for value in values) ** 0.5, rel=1e-9
    )

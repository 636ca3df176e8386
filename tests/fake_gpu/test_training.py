"""Real training on the fake GPU: the CPU's numbers to the last bit, no waits in a step, and no memory left behind."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.trial import leave, start_attempt
from bsearch.spaces.trial import Measurement, Outcome
from helpers import setup
from torch.optim.optimizer import register_optimizer_step_post_hook

from fake_gpu import device as fake
from fake_gpu.child import in_child
from fake_gpu.device import MIB, Cards

pytestmark = pytest.mark.slow

DIGITS = "bsearch.objectives.digits:Digits"
CONVNET, COPIED, LOOP = (f"fake_gpu.tasks:{name}" for name in ("ConvNet", "Copied", "classifier"))


def curve(reference: str, **options: Any) -> list[Any]:
    """The losses and scores of an attempt, and how it ended where it did not complete."""
    *measured, outcome = start_attempt(reference, setup(**options))
    numbers = [[one.train_loss, sorted(one.scores.items())] for one in measured if isinstance(one, Measurement)]
    assert isinstance(outcome, Outcome)
    return numbers if outcome.kind == "complete" else [*numbers, f"{outcome.kind}: {outcome.message}"]


# Name, task and options of trainings that have to be the CPU's to the last bit: each of their kernels is the same.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": (DIGITS, {}),
    "accumulation": (DIGITS, {"accumulation": 3, "budget": 384}),
    "weight average": (DIGITS, {"training": {"ema": 0.9}}),
    "clipped": (DIGITS, {"training": {"clip_norm": 0.5}}),
    "convolutions": (CONVNET, {"budget": 300}),
    "copied batches": (COPIED, {"budget": 300}),
    "copied without pinning": (COPIED, {"budget": 300, "training": {"pin_memory": False}}),
    "gradient caching": ("embedding_tasks:SimCLR", {"batch": 60, "accumulation": 3, "budget": 240}),
    "two towers": ("embedding_tasks:CLIP", {"batch": 60, "accumulation": 3, "budget": 240}),
    "own loop": (LOOP, {"budget": 300}),
}
# Those that the CPU rounds elsewhere: other autocast rules, fused kernels.
SIMILAR: dict[str, tuple[str, dict[str, Any], float]] = {
    "bf16": (DIGITS, {"training": {"precision": "bf16"}}, 1e-2),
    "fp16, scaled": (DIGITS, {"training": {"precision": "fp16"}}, 1e-2),
    "channels last": (CONVNET, {"budget": 300, "training": {"channels_last": True}}, 1e-5),
    "fused AdamW": (DIGITS, {"rate": 0.01, "parameters": {"optimizer": "adamw"}}, 1e-5),
    "own loop, bf16": (LOOP, {"budget": 300, "training": {"precision": "bf16"}}, 1e-2),
}


def trainings() -> dict[str, Any]:
    found: dict[str, Any] = {"same": {}, "similar": {}, "reserved": {}}
    cases = [("same", name, *case) for name, case in SAME.items()]
    cases += [("similar", name, *case[:2]) for name, case in SIMILAR.items()]
    for group, name, reference, options in cases:
        on_cpu = curve(reference, **options)
        found[group][name] = [on_cpu, curve(reference, device="gpu", **options)]
        found["reserved"][name] = [fake.card().allocator.live_bytes, fake.card().allocator.reserved_bytes]
    found["resumed"] = {"convnet": resumed(CONVNET), "own loop": resumed(LOOP)}
    found["steps"] = {name: steps(reference) for name, reference in (("resident", CONVNET), ("copied", COPIED), ("loop", LOOP))}
    found["steps"]["fp16"] = steps(CONVNET, training={"precision": "fp16"})
    found["facts"] = facts()
    found["cap"] = cap()
    found["two cards"] = second_card()
    return found


def resumed(reference: str) -> dict[str, Any]:
    """A training with random numbers of the card, whole, and interrupted and resumed from its checkpoint."""
    options: dict[str, Any] = {"device": "gpu", "budget": 320, "parameters": {"dropout": 0.5}}
    whole = curve(reference, **options)
    with tempfile.TemporaryDirectory() as folder:
        options |= {"checkpoint": f"{folder}/trial.pt", "checkpoint_every_s": 0.0}
        attempt = start_attempt(reference, setup(**options))
        first = next(attempt)
        leave()
        outcome = list(attempt)[-1]
        assert isinstance(first, Measurement)
        assert isinstance(outcome, Outcome)
        fake.card().set_random_state(torch.Generator().manual_seed(99).get_state())  # as in another process
        torch.manual_seed(99)
        again = list(start_attempt(reference, setup(**options)))
        file = Path(folder) / "trial.pt"
        saved = torch.load(file, weights_only=True)
        tensors = torch.utils._pytree.tree_leaves(saved["state"])
        devices = sorted({str(one.device) for one in tensors if isinstance(one, torch.Tensor)})
    numbers = [[one.train_loss, sorted(one.scores.items())] for one in again if isinstance(one, Measurement)]
    resumed_at = [one.facts.get("resumed_at") for one in again if isinstance(one, Measurement)]
    return {"left": outcome.kind, "whole": whole, "again": numbers, "resumed_at": resumed_at, "devices": devices}


@contextmanager
def counted() -> Iterator[list[dict[str, int]]]:
    """What the host waited for in each optimizer step, by number from 1, and before it since the last one."""
    found: list[dict[str, int]] = []
    before = Counter(fake.card().counts)

    def after(*_: Any) -> None:
        nonlocal before
        now = Counter(fake.card().counts)
        found.append({what: count for what, count in (now - before).items() if what != "operations"})
        before = now

    hook = register_optimizer_step_post_hook(after)
    try:
        yield found
    finally:
        hook.remove()


def steps(reference: str, **options: Any) -> list[dict[str, int]]:
    training = {"evaluations": 1, **options.pop("training", {})}
    with counted() as found:
        curve(reference, device="gpu", batch=20, budget=400, training=training, **options)
    return found


def facts() -> dict[str, Any]:
    *_, last, _ = start_attempt(CONVNET, setup(device="gpu"))
    assert isinstance(last, Measurement)
    return {name: last.facts[name] for name in ("peak_bytes", "peak_reserved_bytes")}


def cap() -> dict[str, Any]:
    """A trial under a limit that is too small, then one without a limit that needs more than that limit."""
    large: dict[str, Any] = {"device": "gpu", "batch": 400, "budget": 800, "parameters": {"width": 64}}
    capped = curve(CONVNET, **large, memory_limit_bytes=25 * MIB)
    between = [fake.card().allocator.live_bytes, fake.card().allocator.reserved_bytes]
    return {"capped": capped, "between": between, "then": curve(CONVNET, **large), "limit": fake.card().limit_bytes}


def second_card() -> dict[str, Any]:
    first, second = fake.cards
    before = first.counts["operations"]
    first.reset_peaks()
    torch.cuda.set_device(1)
    try:
        trained = curve(CONVNET, device="gpu", memory_limit_bytes=200 * MIB)
    finally:
        torch.cuda.set_device(0)
    return {
        "trained": len(trained),
        "operations": [first.counts["operations"] - before, second.counts["operations"]],
        "peaks": [first.peak_live_bytes, second.peak_live_bytes],
        "limit": second.limit_bytes,
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return in_child(trainings, Cards(count=2))


@pytest.mark.parametrize("name", SAME)
def test_losses_and_scores_are_the_cpus_to_the_last_bit(found: dict[str, Any], name: str) -> None:
    on_cpu, on_gpu = found["same"][name]
    assert len(on_cpu) == 2
    assert on_gpu == on_cpu


@pytest.mark.parametrize("name", SIMILAR)
def test_losses_in_other_precisions_and_kernels_are_close_to_the_cpus(found: dict[str, Any], name: str) -> None:
    on_cpu, on_gpu = ([dict([*scores, ["loss", loss or 0.0]]) for loss, scores in run] for run in found["similar"][name])
    for one, other in zip(on_cpu, on_gpu, strict=True):
        for metric in one.keys() - {"accuracy"}:
            assert other[metric] == pytest.approx(one[metric], rel=SIMILAR[name][2])
        assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0.02)


@pytest.mark.parametrize("name", [*SAME, *SIMILAR])
def test_a_trial_leaves_no_memory_reserved(found: dict[str, Any], name: str) -> None:
    assert found["reserved"][name] == [0, 0]


@pytest.mark.parametrize("name", ["convnet", "own loop"])
def test_a_training_resumes_from_its_checkpoint_to_the_same_bits(found: dict[str, Any], name: str) -> None:
    case = found["resumed"][name]
    assert case["left"] == "interrupted"
    assert case["again"] == case["whole"]
    assert case["resumed_at"][-1]
    assert case["devices"] == ["cpu"]


@pytest.mark.parametrize("name", ["resident", "copied", "loop"])
def test_an_ordinary_step_neither_waits_nor_copies_from_pageable_memory(found: dict[str, Any], name: str) -> None:
    steps = found["steps"][name]
    assert len(steps) == 20
    # The loss is read after steps 1, 2, 4, 8 and 16, and a size's first step is timed by itself.
    ordinary = [step for number, step in enumerate(steps, start=1) if number - 1 not in (0, 1, 2, 4, 8, 16)]
    assert not [step for step in ordinary if any(what.startswith("wait") for what in step)]
    assert not [step for step in ordinary if "copies to the card from pageable memory" in step]


def test_a_loss_scaler_waits_once_a_step(found: dict[str, Any]) -> None:
    waits = [sum(count for what, count in step.items() if what.startswith("wait")) for step in found["steps"]["fp16"]]
    assert [waits[number] for number in (3, 5, 6, 7, 9, 10)] == [1] * 6


def test_peaks_are_of_the_training(found: dict[str, Any]) -> None:
    facts = found["facts"]
    assert 0 < facts["peak_bytes"] < facts["peak_reserved_bytes"] <= 64 * MIB


def test_a_limit_refuses_what_is_over_it_and_leaves_nothing_behind(found: dict[str, Any]) -> None:
    (refused,) = found["cap"]["capped"]
    assert refused.startswith("out_of_memory: CUDA out of memory.")
    assert found["cap"]["between"] == [0, 0]


def test_a_limit_ends_with_its_trial(found: dict[str, Any]) -> None:
    assert len(found["cap"]["then"]) == 2
    assert not isinstance(found["cap"]["then"][-1], str)


def test_a_trial_on_the_second_card_leaves_the_first_alone(found: dict[str, Any]) -> None:
    case = found["two cards"]
    assert case["trained"] == 2
    assert case["operations"][0] == 0
    assert case["operations"][1] > 100
    assert case["peaks"][0] == 0
    assert case["peaks"][1] > 0
    assert case["limit"] == 200 * MIB

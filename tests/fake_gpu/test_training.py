"""Real training on the fake GPU: the CPU's numbers to the last bit, no waits in a step, and no memory left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bsearch.objectives import trial
from bsearch.spaces.trial import Measurement
from device_trainings import (
    CONVNET,
    CONVOLVED,
    COPIED,
    LOOP,
    SAME,
    SIMILAR,
    check_similar,
    curve,
    flat,
    resumed,
)
from helpers import setup
from torch.optim.optimizer import register_optimizer_step_post_hook

from fake_gpu import device as fake
from fake_gpu.child import in_child
from fake_gpu.device import MIB, Cards

pytestmark = pytest.mark.long


def trainings() -> dict[str, Any]:
    found: dict[str, Any] = {"same": {}, "similar": {}, "reserved": {}}
    cases = [("same", name, *case) for name, case in SAME.items()]
    cases += [("similar", name, *case[:2]) for name, case in SIMILAR.items()]
    for group, name, reference, options in cases:
        on_cpu = curve(reference, **options)
        found[group][name] = [on_cpu, curve(reference, device="gpu", **options)]
        found["reserved"][name] = [fake.card().allocator.live_bytes, fake.card().allocator.reserved_bytes]
    found["resumed"] = {"convnet": resumed(CONVNET), "own loop": resumed(LOOP)}
    found["steps"] = {
        name: steps(reference)
        for name, reference in (("resident", CONVNET), ("copied", COPIED), ("loop", LOOP))
    }
    found["steps"]["fp16"] = steps(CONVNET, training={"precision": "fp16"})
    found["facts"] = facts()
    found["cap"] = cap()
    found["two cards"] = second_card()
    return found


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
    *_, last, _ = trial.attempt(CONVNET, setup(device="gpu"))
    assert isinstance(last, Measurement)
    return {name: last.facts[name] for name in ("peak_bytes", "peak_reserved_bytes")}


def cap() -> dict[str, Any]:
    """A trial under a limit that is too small, then one without a limit that needs more than that limit."""
    large: dict[str, Any] = {"device": "gpu", "batch": 400, "budget": 800, "parameters": {"width": 64}}
    capped = curve(CONVNET, **large, memory_limit_bytes=25 * MIB)
    between = [fake.card().allocator.live_bytes, fake.card().allocator.reserved_bytes]
    return {
        "capped": capped,
        "between": between,
        "then": curve(CONVNET, **large),
        "limit": fake.card().limit_bytes,
    }


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
    if name in CONVOLVED:
        assert flat(on_gpu) == pytest.approx(flat(on_cpu), rel=1e-6)
    else:
        assert on_gpu == on_cpu


@pytest.mark.parametrize("name", SIMILAR)
def test_losses_in_other_precisions_and_kernels_are_close_to_the_cpus(
    found: dict[str, Any], name: str
) -> None:
    check_similar(*found["similar"][name], SIMILAR[name][2])


@pytest.mark.parametrize("name", [*SAME, *SIMILAR])
def test_a_trial_leaves_no_memory_reserved(found: dict[str, Any], name: str) -> None:
    assert found["reserved"][name] == [0, 0]


@pytest.mark.parametrize("name", ["convnet", "own loop"])
def test_a_training_resumes_from_its_checkpoint_to_the_same_bits(found: dict[str, Any], name: str) -> None:
    case = found["resumed"][name]
    assert case["left"] == "interrupted"
    assert case["again"] == case["whole"]
    assert case["resumed_at"][-1]


@pytest.mark.parametrize("name", ["resident", "copied", "loop"])
def test_an_ordinary_step_neither_waits_nor_copies_from_pageable_memory(
    found: dict[str, Any], name: str
) -> None:
    steps = found["steps"][name]
    assert len(steps) == 20
    # The loss is read after steps 1, 2, 4, 8 and 16, and a size's first step is timed by itself.
    ordinary = [step for number, step in enumerate(steps, start=1) if number - 1 not in (0, 1, 2, 4, 8, 16)]
    assert not [step for step in ordinary if any(what.startswith("wait") for what in step)]
    assert not [step for step in ordinary if "copies to the card from pageable memory" in step]


def test_a_loss_scaler_waits_once_a_step(found: dict[str, Any]) -> None:
    waits = [
        sum(count for what, count in step.items() if what.startswith("wait"))
        for step in found["steps"]["fp16"]
    ]
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

"""What a profile finds on the fake GPU: its memory law against what a step really reserves, limits, shares, and neighbours."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from bsearch.benchmarks.verify.claims import Fact
from bsearch.benchmarks.verify.machine import facts
from bsearch.benchmarks.verify.stage import Stage
from bsearch.objectives import trial
from bsearch.objectives.loading import load_task
from bsearch.objectives.machine import device
from bsearch.objectives.machine.device import usable_bytes
from bsearch.objectives.profiling.memory.tracing import MemoryProbe
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import Measurement, Outcome
from helpers import setup

from fake_gpu import device as fake
from fake_gpu.child import in_child
from fake_gpu.device import CONTEXT_BYTES, MIB

CONVNET, LOOP, PAIRS = "fake_gpu.tasks:ConvNet", "fake_gpu.tasks:classifier", "embedding_tasks:SimCLR"
WIDE = {"width": 64}


def profiled(
    reference: str, memory: Memory | None = None, *, highest: int = 400, timing_s: float = 0.0, **options: Any
) -> Any:
    """What a profile says, as JSON can hold it; the error's text where there is none."""
    share = options.pop("share", 1.0)
    request = ProfileRequest(
        setup(device="gpu", **options), memory or Memory(), highest=highest, timing_s=timing_s, share=share
    )
    try:
        profile = profile_task(reference, request)
    except BsearchError as error:
        return {"error": str(error)}
    finally:
        torch.cuda.empty_cache()
    law = profile.memory
    return {
        "kind": profile.kind,
        "device": profile.device,
        "device_bytes": profile.device_bytes,
        "largest": profile.largest_micro_batch,
        "usable": profile.usable_bytes(1),
        "evaluation": profile.evaluation_batch,
        "source": law and law.source,
        "note": law and law.note,
        "held": law and law.held_bytes,
        "peak at the largest": law and law.peak_bytes(profile.largest_micro_batch or 1),
        "timed": len(profile.step_times),
        "exact": profile.examination is not None and profile.examination.verdict,
        "neighbours": profile.neighbours,
        "left": fake.card().allocator.live_bytes,
    }


def profiles() -> dict[str, Any]:
    card = fake.card()
    found: dict[str, Any] = {
        "convnet": profiled(CONVNET, parameters=WIDE),
        "bf16": profiled(CONVNET, parameters=WIDE, training={"precision": "bf16"}),
        "limited": profiled(CONVNET, Memory(limit=24 * MIB), parameters=WIDE),
        "too small": profiled(CONVNET, Memory(limit=1 * MIB), parameters=WIDE),
        "timed": profiled(CONVNET, timing_s=0.5, highest=64),
        "pairs": profiled(PAIRS, Memory(limit=64 * MIB)),
        "loop": profiled(LOOP, Memory(limit=64 * MIB)),
    }
    found["peaks"] = peaks()
    stage = Stage("gpu", 12.0)
    found["verified"] = {fact.name: fact.value for fact in facts(stage) if isinstance(fact, Fact)}
    found["limited trains"] = trained(found["limited"]["largest"], memory_limit_bytes=24 * MIB)
    card.neighbour_bytes = 400 * MIB
    # What the driver says of them: this process's context, and the neighbour's.
    mine = CONTEXT_BYTES + card.allocator.reserved_bytes
    device.gpu_processes = lambda uuid: [(os.getpid(), mine), (1, 400 * MIB)]  # type: ignore[assignment]
    found["neighbour"] = profiled(CONVNET, parameters=WIDE)
    found["neighbour, share"] = profiled(CONVNET, share=0.25, parameters=WIDE)
    card.neighbour_bytes = 0
    found["shrinking"] = shrinking()
    return found


def peaks() -> list[list[int]]:
    """Predicted and real bytes of a step, both live and reserved, at several micro-batches, less a fixed part."""
    task = load_task(CONVNET)
    memory = MemoryProbe(task, setup(device="gpu", parameters=WIDE))  # type: ignore[arg-type]
    found = []
    for size in (40, 200, 400):
        predicted, real = memory.train_peak(size), memory.counted("train", size)
        found.append([predicted.live, real.live, predicted.total, real.total])
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return in_child(profiles)


@pytest.mark.long
def test_a_profile_is_of_the_card(found: dict[str, Any]) -> None:
    profile = found["convnet"]
    assert (profile["kind"], profile["device"]) == ("gpu", "Fake GPU")
    assert profile["device_bytes"] == 512 * MIB - CONTEXT_BYTES
    assert (profile["largest"], profile["source"], profile["exact"], profile["note"]) == (
        400,
        "traced",
        "exact",
        "",
    )
    assert profile["left"] == 0


@pytest.mark.long
def test_a_traced_step_takes_the_bytes_that_it_really_takes(found: dict[str, Any]) -> None:
    for live, real_live, reserved, real_reserved in found["peaks"]:
        # The kernels' temporary memory differs between CUDA, which is traced, and the CPU, which runs here.
        assert live == pytest.approx(real_live, rel=0.1)
        assert abs(reserved - real_reserved) <= 20 * MIB


@pytest.mark.long
def test_bf16_takes_less(found: dict[str, Any]) -> None:
    assert found["bf16"]["peak at the largest"] < found["convnet"]["peak at the largest"]


@pytest.mark.long
def test_the_largest_micro_batch_under_a_limit_trains(found: dict[str, Any]) -> None:
    assert 1 < found["limited"]["largest"] < 400
    assert found["limited"]["peak at the largest"] <= found["limited"]["usable"]
    assert found["limited trains"] == ["complete", ""]


@pytest.mark.long
def test_a_limit_below_one_sample_is_refused(found: dict[str, Any]) -> None:
    assert "memory.limit" in found["too small"]["error"]
    assert "micro-batch of 1 sample" in found["too small"]["error"]


@pytest.mark.long
def test_the_card_is_described(found: dict[str, Any]) -> None:
    facts = found["verified"]
    assert facts["device"] == "Fake GPU"
    assert facts["memory"] == "512 MiB, 4 multiprocessors"
    assert facts["CUDA's context, and other processes"] == "24 MiB"


@pytest.mark.long
def test_steps_are_timed(found: dict[str, Any]) -> None:
    assert found["timed"]["timed"] == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["pairs", "loop"])
def test_losses_over_pairs_and_loops_of_ones_own_are_profiled(found: dict[str, Any], name: str) -> None:
    assert found[name]["largest"] == 400
    assert found[name]["exact"] == "exact"


@pytest.mark.long
def test_what_a_neighbour_takes_is_not_planned_with(found: dict[str, Any]) -> None:
    assert found["neighbour"]["device_bytes"] == 112 * MIB - CONTEXT_BYTES
    assert found["neighbour"]["largest"] == 400
    assert found["neighbour"]["neighbours"].startswith("another program holds 400 MiB of the GPU")
    assert found["convnet"]["neighbours"] == ""


@pytest.mark.long
def test_a_card_that_shrinks_while_it_is_profiled_ends_in_a_smaller_plan(found: dict[str, Any]) -> None:
    assert 1 <= found["shrinking"]["largest"] < 400
    assert found["shrinking"]["trained"] == ["complete", ""]


@pytest.mark.long
def test_a_share_of_a_card_beside_a_neighbour_is_a_share_of_what_is_left(found: dict[str, Any]) -> None:
    assert found["neighbour, share"].get("device_bytes", 0) > 0


@pytest.mark.parametrize("share", [0.5, 0.25, 0.125])
def test_shares_beside_a_neighbour_are_fair(share: float) -> None:
    """(usable + context) × share − context, for a card of 8 GiB beside a desktop."""
    total, context, desktop = 8192 * MIB, 410 * MIB, 1536 * MIB
    usable = total - context - desktop
    assert usable_bytes(total, usable, share, context) == pytest.approx(
        (usable + context) * share - context, rel=0.01
    )


@pytest.mark.long
def test_the_time_of_a_loop_of_ones_own_is_that_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: the clock is the same."""
    honest = torch.nn.Flatten.forward

    def slow(module: torch.nn.Flatten, inputs: torch.Tensor) -> torch.Tensor:
        if module.training:
            time.sleep(0.02)
        return honest(module, inputs)

    monkeypatch.setattr(torch.nn.Flatten, "forward", slow)
    *_, last, _ = trial.attempt(LOOP, setup(batch=20, budget=400))
    assert isinstance(last, Measurement)
    assert last.elapsed_s >= 20 * 0.02


def shrinking() -> dict[str, Any]:
    """Another program takes most of the card after the limit was read, before the first real step."""
    card, honest = fake.card(), MemoryProbe.counted

    def taken(self: MemoryProbe, kind: str, size: int, limit_bytes: int | None = None) -> Any:
        card.neighbour_bytes = card.total_bytes - CONTEXT_BYTES - 30 * MIB
        return honest(self, kind, size, limit_bytes)

    MemoryProbe.counted = taken  # type: ignore[method-assign]
    profile = profiled(CONVNET, parameters=WIDE)
    MemoryProbe.counted = honest  # type: ignore[method-assign]
    found = {"largest": profile["largest"], "trained": trained(profile["largest"])}
    card.neighbour_bytes = 0
    return found


def trained(largest: int, **options: Any) -> list[str]:
    """How a training in micro-batches of this size ends."""
    plan = BatchPlan(2 * largest, 2)
    options |= {"device": "gpu", "plan": plan, "budget": 2 * plan.effective_batch, "parameters": WIDE}
    *_, outcome = trial.attempt(CONVNET, setup(**options, largest_micro_batch=largest))
    assert isinstance(outcome, Outcome)
    return [outcome.kind, outcome.message]

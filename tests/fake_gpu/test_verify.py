"""`benchmarks/verify` on the fake GPU, stage by stage; those of large models and of time need a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bsearch.benchmarks.verify.__main__ import PROGRAM, program
from bsearch.benchmarks.verify.claims import Claim, Fact
from bsearch.benchmarks.verify.report import Report
from bsearch.benchmarks.verify.stage import Stage
from bsearch.benchmarks.verify.stages import memory
from bsearch.benchmarks.verify.stages import smoke as smoke_stage
from bsearch.objectives.profiling.memory.allocator import CachingAllocator
from click.testing import CliRunner

from fake_gpu import device as fake
from fake_gpu.child import in_child
from fake_gpu.device import MIB, Cards

ECC = "CUDA error: uncorrectable ECC error encountered"


def verified(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(program, [PROGRAM, *arguments])
    (file,) = Path().glob("*.md")
    return {"code": result.exit_code, "printed": result.output, "file": file.name, "found": file.read_text()}


# Smoke


@pytest.mark.long
def test_a_card_that_works_is_told_so() -> None:
    found = in_child(verified, Cards(mib=2000), "--stage", "smoke")
    assert found["code"] == 0, found["printed"]
    assert "\nThis card works with bsearch.\n" in found["printed"]
    assert found["file"].startswith("bsearch-verify-Fake-GPU-20")
    assert f"Written to {found['file']}: attach it to an issue" in found["printed"]
    report = Report.read(found["found"])
    assert (report.kind, report.device, report.holds) == ("gpu", "Fake GPU", True)
    facts = {fact.name: fact.value for fact in report.stages[0].facts}
    assert facts["GPUs"] == "1 usable: Fake GPU"
    assert facts["expandable segments"] == "on"
    assert facts["memory cap"] == "128 MiB refused under 64, and allocated after it"
    assert facts["training step in fp16"].endswith("scaled by 65536")
    (segments,) = (data.values["segments"] for data in report.stages[0].data)
    assert all(total == sum(abs(size) for size in blocks) for _, total, _, blocks in segments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cards", "why"),
    [
        (Cards(broken=ECC), f"GPUs: GPU 0 (Fake GPU): a tensor failed: {ECC}"),
        pytest.param(
            Cards(caps=False), "memory cap: 128 MiB were allocated under a cap of 64", marks=pytest.mark.long
        ),
    ],
    ids=["broken", "no cap"],
)
def test_a_card_that_does_not_work_ends_the_run_with_one_sentence(cards: Cards, why: str) -> None:
    found = in_child(verified, cards)
    assert found["code"] == 1
    assert f"\nThis card does not work with bsearch: {why}.\n" in found["printed"]
    report = Report.read(found["found"])
    assert [stage.stage for stage in report.stages] == ["smoke"]
    assert "Traceback" in report.stages[0].printed
    # A broken card refuses all else; beside a missing cap the rest is still told.
    assert ("page-locked copy" in {fact.name for fact in report.stages[0].facts}) == (not cards.broken)


def smoked(simulated: str) -> dict[str, Any]:
    """The stage in this process."""
    if simulated == "default allocator":
        fake.card()._allocator = CachingAllocator(expandable=False)
    if simulated == "two ranks":
        losses = iter([2.5, 2.5])
        smoke_stage.train_loss = lambda reference, setup: next(losses)  # NCCL has no stand-in
    found = list(smoke_stage.smoke(Stage("gpu", 30)))
    (claim,) = (one for one in found if isinstance(one, Claim))
    facts = {one.name: one.value for one in found if isinstance(one, Fact)}
    return {"verdict": claim.verdict, "note": claim.note, "cases": claim.cases, "facts": facts}


@pytest.mark.long
@pytest.mark.long
def test_two_cards_train_together() -> None:
    found = in_child(smoked, Cards(count=2), "two ranks")
    assert (found["verdict"], found["cases"]) == ("pass", 8)
    assert found["facts"]["GPUs"] == "2 usable: Fake GPU"
    assert found["facts"]["training on two GPUs"] == "loss 2.500, the same as on one"


@pytest.mark.long
@pytest.mark.long
def test_two_cards_that_cannot_train_together_are_told() -> None:
    """NCCL finds no card here."""
    found = in_child(smoked, Cards(count=2), "")
    assert found["verdict"] == "FAIL"
    assert found["note"].startswith("training on two GPUs: rank ")


@pytest.mark.long
@pytest.mark.long
def test_segments_that_do_not_grow_are_told_and_no_failure() -> None:
    found = in_child(smoked, Cards(), "default allocator")
    assert found["verdict"] == "pass"
    assert found["facts"]["expandable segments"] == "asked for, but off: steps reserve 5 to 20 % more"


# Other stages


def limits() -> dict[str, Any]:
    asked: list[int] = []

    def profile(reference: str, setup: Any, limit: int) -> Any:
        asked.append(limit)
        return type("Profile", (), {"largest_micro_batch": None})

    memory._profile = profile  # type: ignore[assignment]
    found = list(memory.largest(Stage("gpu", 60)))
    return {
        "asked": asked,
        "told": [one.value for one in found if isinstance(one, Fact)],
        "count": len(found),
    }


@pytest.mark.long
@pytest.mark.long
def test_no_more_memory_is_asked_for_than_the_card_has_free() -> None:
    found = in_child(limits, Cards(mib=6000, neighbour_mib=1976))
    free = (6000 - 1976 - 24) * MIB
    assert found["asked"] == [2048 * MIB, int(0.9 * free), int(0.9 * free)]
    assert found["told"] == ["not measured: one sample does not fit"] * found["count"]


def facts_and_exactness() -> dict[str, Any]:
    stages = [word for name in ("machine", "exactness") for word in ("--stage", name)]
    return verified("--device", "gpu", "--serial", *stages)


@pytest.mark.long
def test_the_stages_of_facts_and_exactness_hold() -> None:
    found = in_child(facts_and_exactness, Cards(mib=2000))
    assert found["code"] == 0, found["printed"]
    report = Report.read(found["found"])
    assert report.holds, report.markdown()
    assert report.device == "Fake GPU"
    facts = {fact.name: fact.value for stage in report.stages for fact in stage.facts}
    assert facts["memory"] == "2000 MiB, 4 multiprocessors"
    assert facts["CUDA's context, and other processes"] == "24 MiB"
    assert facts["training loss of two runs of one seed"].endswith("0 apart")

"""A script's schedule ends where its training ends, and its record says what was trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from bsearch.objectives.script.script import run_script
from bsearch.spaces.trial import Measurement
from helpers import setup

SCRIPT = """
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

BATCH = 16
LR = 0.1
EPOCHS = 2
torch.manual_seed(0)
data = TensorDataset(torch.randn(512, 3), torch.randint(2, (512,)))
loader = DataLoader(data, BATCH, shuffle=True, drop_last=DROPS)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
total = EPOCHS * len(loader)
count = 0
scheduler = SCHEDULER
for epoch in range(EPOCHS):
    for index, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        EACH_BATCH
    EACH_EPOCH
    print("accuracy:", scheduler.last_epoch)
"""
SCHEDULERS = {
    "OneCycleLR": "lr_scheduler.OneCycleLR(optimizer, LR, epochs=EPOCHS, steps_per_epoch=len(loader))",
    "CosineAnnealingLR": "lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)",
    "LambdaLR": "lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * max(0.0, 1 - step / total))",
    "SequentialLR": "lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), "
    "lr_scheduler.CosineAnnealingLR(optimizer, total - 1)], milestones=[1])",
}
# Batches of 512 samples, with the length of a pass that the script sees.
LENGTHS = {
    (400, False): 2,
    (511, False): 2,
    (100, False): 6,
    (64, False): 8,
    (300, True): 1,
    (100, True): 5,
    (200, True): 2,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(
    scheduler: str, *, drops: bool, each_batch: str = "scheduler.step()", each_epoch: str = "pass"
) -> None:
    text = SCRIPT.replace("DROPS", str(drops)).replace("SCHEDULER", scheduler)
    Path("train.py").write_text(text.replace("EACH_BATCH", each_batch).replace("EACH_EPOCH", each_epoch))


def trained(batch: int, epochs: float, parts: int = 1, most: int = 99, **changes: Any) -> list[Measurement]:
    own = {"schedule": "constant", "warmup": 0.0}
    made = setup(batch, parts, round(512 * epochs), 0.1, training=own, folder=".", **changes)
    made = replace(made, epochs=epochs, largest_micro_batch=-(-batch // parts) if parts > 1 else None)
    told = {"batch": "BATCH", "rate": "LR", "epochs": "EPOCHS", "metric": "accuracy:"}
    return list(islice(run_script(made, "train.py", **told), most))


@pytest.mark.parametrize("parts", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("batch", "drops"), LENGTHS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_schedule_of_batches_ends_with_the_training(
    scheduler: str, batch: int, drops: bool, parts: int
) -> None:
    written(SCHEDULERS[scheduler], drops=drops)
    assert trained(batch, 10, parts)[-1].accuracy == 10 * LENGTHS[batch, drops]


@pytest.mark.parametrize(
    "scheduler", ["OneCycleLR(optimizer, LR, total_steps=total)", "CosineAnnealingLR(optimizer, total)"]
)
@pytest.mark.parametrize(("batch", "steps"), [(400, 12), (64, 80)])
def test_a_schedule_of_the_scripts_own_arithmetic_stays(scheduler: str, batch: int, steps: int) -> None:
    """It knows that steps go over the ends of epochs, or rounds down; a step more than it has is not taken."""
    written(f"lr_scheduler.{scheduler}", drops=False)
    text = Path("train.py").read_text().replace("EPOCHS * len(loader)", "512 * EPOCHS // BATCH")
    Path("train.py").write_text(text)
    assert 512 * 10 // batch == steps
    assert trained(batch, 10)[-1].accuracy in (steps, steps + 1)


def test_one_that_is_interrupted_goes_on_with_its_schedule(tmp_path: Path) -> None:
    written(SCHEDULERS["OneCycleLR"], drops=False)
    whole = [one.accuracy for one in trained(400, 10)]
    assert whole == [int(20 * -(-512 * passes // 400) * 400 / 5120) for passes in range(1, 10)] + [20]
    kept = {"checkpoint": f"file://{tmp_path}/kept/checkpoint.pt", "checkpoint_every_s": 0.0}
    first = trained(400, 10, most=3, **kept)
    assert [one.accuracy for one in (*first, *trained(400, 10, **kept))] == whole


def test_half_an_epoch_is_half_of_the_schedules(tmp_path: Path) -> None:
    written(SCHEDULERS["CosineAnnealingLR"], drops=False)
    assert trained(100, 2.5)[-1].accuracy == 3 * 6  # the script is told three epochs


@pytest.mark.parametrize(
    "each_batch",
    ["pass", "if index == len(loader) - 1: scheduler.step()", "scheduler.step(epoch + index / total)"],
)
def test_a_schedule_of_passes_stays_one(each_batch: str) -> None:
    """Also where its step is within the loop, or says where it is."""
    each_epoch = "scheduler.step()" if each_batch == "pass" else "pass"
    kind = "lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)"
    written(kind, drops=False, each_batch=each_batch, each_epoch=each_epoch)
    by_itself = 9 if "epoch" in each_batch else 10
    assert trained(64, 10)[-1].accuracy == by_itself
    if each_batch == "pass":
        assert trained(400, 10, 2)[-1].accuracy == by_itself


def test_a_schedule_of_parts_ends_with_the_training() -> None:
    each_batch = "scheduler.step(); count += 1"
    written("lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)", drops=False, each_batch=each_batch)
    Path("train.py").write_text(
        Path("train.py").read_text().replace("for epoch in range(EPOCHS)", "while count < EPOCHS")
    )
    made = setup(128, 4, 1024, 0.1, training={"schedule": "constant", "warmup": 0.0}, folder=".")
    made = replace(made, epochs=2, largest_micro_batch=32)
    *_, last = run_script(made, "train.py", batch="BATCH", rate="LR", steps="EPOCHS", metric="accuracy:")
    assert last.accuracy == 1024 // 32


def test_a_schedule_of_its_own_that_may_not_end_is_told() -> None:
    by_hand = "count += 1; optimizer.param_groups[0]['lr'] = LR * (1 - count / total)"
    written("lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)", drops=False, each_batch=by_hand)
    assert trained(400, 10)[-1].facts["own_schedule"] == "of 20 batches, where its training has 13"
    assert "own_schedule" not in trained(64, 10)[-1].facts


@pytest.mark.parametrize(("epochs", "samples"), [(1, 300), (2, 900), (75, 38400)])
def test_what_a_loader_that_drops_the_rest_leaves_out_is_not_recorded_as_trained(
    epochs: int, samples: int
) -> None:
    written(SCHEDULERS["LambdaLR"], drops=True)
    *_, last = trained(300, epochs)
    assert last.samples_seen == samples
    assert last.facts.get("shortened_to", 1.0) == samples / (512 * epochs)

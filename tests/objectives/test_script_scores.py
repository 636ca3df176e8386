"""What a script's trials are compared by: one model has one score, whatever batch the script is told."""

from __future__ import annotations

import io
import re
import runpy
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bsearch.objectives.profiling.loop_probes import examined_session
from bsearch.objectives.script.look import looked_at
from bsearch.objectives.script.script import run_script
from bsearch.search.preview.script import found_in
from bsearch.spaces.errors import StudyFileError, TaskError
from helpers import setup

# A model whose weights a rate this small leaves as they are.
RATE, BATCHES = 1e-30, (8, 24, 64, 200)
SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-30)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(3)
x = torch.randn(570, 4)
y = x.sum(1, keepdim=True).exp()
data, rest = TensorDataset(x[:500], y[:500]), TensorDataset(x[500:], y[500:])
size = args.batch_size


class Precomputed(Sampler):
    def __init__(self, samples, batch):
        self.batches = [list(range(one, min(one + batch, samples))) for one in range(0, samples, batch)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def held_out():
    LOADER


train, kept = DataLoader(data, size, shuffle=True), held_out()
model, loss = nn.Linear(4, 1), nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    model.train()
    for inputs, targets in train:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    val, total = EACH, 0.0
    batches = len(val)
    model.eval()
    with torch.no_grad():
        for inputs, targets in val:
            total += loss(model(inputs), targets).item() / batches
    print(f"val loss: {total:.6f}")
"""
# Loaders that evaluate, by what of them would depend on the batch. All average over batches.
LOADERS = {
    "the training batch, drop_last": "return DataLoader(rest, size, drop_last=True)",
    "twice the training batch": "return DataLoader(rest, 2 * size)",
    "its own batch": "return DataLoader(rest, 32, shuffle=True, generator=torch.Generator().manual_seed(1))",
    "a sixteenth of the training batch": "return DataLoader(rest, max(size // 16, 1))",
    "one of its own batches after another": "DataLoader(rest, 16); return DataLoader(rest, 32)",
    "a batch_sampler": "return DataLoader(rest, batch_sampler=BatchSampler(SequentialSampler(rest), size, False))",
    "a Subset, made anew each epoch": "return DataLoader(Subset(rest, range(5, 66)), size, drop_last=True)",
    "as many samples as it trains on": "return DataLoader(data, size, drop_last=True)",
}
TOLD = {"batch": "--batch-size", "rate": "--lr", "epochs": "--epochs", "metric": "val loss:"}


def written(loader: str, each: str = "kept") -> None:
    Path("train.py").write_text(SCRIPT.replace("LOADER", loader).replace("EACH", each))


def trained(batch: int, **told: Any) -> list[float]:
    made = setup(
        batch, 1, 1000, RATE, training={"schedule": "constant", "warmup": 0.0}, folder=".", metric="val_loss"
    )
    return [
        one.scores["val_loss"] for one in run_script(replace(made, epochs=2), "train.py", **{**TOLD, **told})
    ]


def by_itself(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path("train.py", run_name="__main__")
    return [float(one) for one in re.findall("val loss: (.*)", said.getvalue())]


@pytest.mark.parametrize("kind", LOADERS)
def test_one_model_has_the_score_that_it_has_by_itself_at_every_batch(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(LOADERS[kind], "held_out()" if "anew" in kind else "kept")
    expected = by_itself(monkeypatch)
    evaluation = found_in("train.py", [], asdict(looked_at("train.py", []))).loaders
    got = {batch: trained(batch, evaluation=evaluation) for batch in BATCHES}
    print(
        f"\n{kind:32}",
        *(f"{batch}: {one[-1]:.6f}" for batch, one in got.items()),
        f"by itself: {expected[-1]:.6f}",
    )
    assert got == dict.fromkeys(BATCHES, expected)


def test_an_evaluation_that_follows_the_batch_keeps_the_one_that_it_was_seen_with(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written(LOADERS["the training batch, drop_last"])
    evaluation = looked_at("train.py", []).loaders
    trains = "RandomSampler of 500"
    assert {*evaluation} == {(trains, 16, 32), ("SequentialSampler of 70", 16, 4), (trains, 0, 0)}
    first = trained(16, evaluation=evaluation)
    assert trained(200, evaluation=evaluation) == first
    # Written by hand, without what is of no interest of the one that it trains on.
    assert (
        trained(200, evaluation=[("RandomSampler of 500", 0, 0), ("SequentialSampler of 70", 16, 4)]) == first
    )


SAYS = 'print("val loss: 9.5")'
# After the 25th batch, which is a pass's last.
LEAVES = """        optimizer.step()
        model.steps = getattr(model, "steps", 0) + 1
        if model.steps % 25 == 0:
            break"""


@pytest.mark.parametrize(
    ("each", "line", "instead"),
    [
        ("[rest.tensors]", "for epoch in", f"{SAYS}\nfor epoch in"),
        ("kept", "    val, ", f"    {SAYS}\n    val, "),
        ("kept", "        optimizer.step()", LEAVES),
    ],
    ids=["before it trains", "of its training data", "as it leaves a pass"],
)
def test_a_score_is_what_it_writes_after_a_pass(
    tmp_path: Path, monkeypatch: Any, each: str, line: str, instead: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written("return DataLoader(rest, 32)", each)
    evaluation = looked_at("train.py", []).loaders
    scores = trained(20, evaluation=evaluation)
    Path("train.py").write_text(Path("train.py").read_text().replace(line, instead))
    assert trained(20, evaluation=evaluation) == scores


@pytest.mark.parametrize("batch", [20, 200])
def test_an_evaluation_whose_batches_stay_the_trials_is_refused_by_name(
    tmp_path: Path, monkeypatch: Any, batch: int
) -> None:
    monkeypatch.chdir(tmp_path)
    written("return DataLoader(rest, batch_sampler=Precomputed(len(rest), size))")
    evaluation = looked_at("train.py", []).loaders
    batches = -(-70 // batch)
    with pytest.raises(
        TaskError, match=rf"among those of evaluation=, got \('SequentialSampler of 70', -1, {batches}\)"
    ):
        trained(batch, evaluation=evaluation)


def test_an_evaluation_that_nobody_has_seen_is_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    written("return DataLoader(rest, 32)")
    with pytest.raises(TaskError, match=r"got \('SequentialSampler of 70', 32, 3\)"):
        trained(16)


def test_an_evaluation_of_no_batch_is_refused_before_the_first_trial(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    written("return DataLoader(rest, 71, drop_last=True)")
    with pytest.raises(StudyFileError, match=r"got none of 71 \(SequentialSampler of 70\)"):
        found_in("train.py", [], asdict(looked_at("train.py", [])))


def test_what_is_trained_on_may_be_looked_at_before_and_evaluated(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    written("return DataLoader(data, size, shuffle=True)", "train")
    text = (
        Path("train.py")
        .read_text()
        .replace("train, kept = DataLoader(data, size, shuffle=True), held_out()", "train = held_out()")
    )
    Path("train.py").write_text(text.replace("\nmodel, loss =", "\nnext(iter(train))\nmodel, loss ="))
    assert len(trained(20, evaluation=looked_at("train.py", []).loaders)) == 2


@pytest.mark.parametrize(("divisor", "told"), [("size * len(val)", True), ("len(rest)", False)])
def test_a_score_that_is_divided_by_the_batch_it_is_told_is_told(
    tmp_path: Path, monkeypatch: Any, divisor: str, told: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    written(LOADERS["the training batch, drop_last"])
    text = Path("train.py").read_text()
    Path("train.py").write_text(text.replace(".item() / batches", f".item() * len(inputs) / ({divisor})"))
    function = partial(run_script, script="train.py", evaluation=looked_at("train.py", []).loaders, **TOLD)
    function.__name__ = "train"  # type: ignore[attr-defined]
    made = setup(
        24, 1, 1000, 0.1, training={"schedule": "constant", "warmup": 0.0}, folder=".", metric="val_loss"
    )
    examination = examined_session(function, replace(made, epochs=2, smallest_micro_batch=2))
    findings = [
        one.message
        for one in examination.findings
        if "val_loss depends on the batch that it is told" in one.message
    ]
    assert len(findings) == told, examination.findings

"""Trainings that every device has to run with the CPU's numbers, and one that is interrupted and resumed on it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from bsearch.objectives.machine import accelerator
from bsearch.objectives.state.leaving import ask_to_leave, stay
from bsearch.objectives.trial import attempt
from bsearch.spaces.trial import Measurement, Outcome
from helpers import setup

DIGITS = "bsearch.objectives.digits:Digits"
CONVNET, COPIED, LOOP = (f"fake_gpu.tasks:{name}" for name in ("ConvNet", "Copied", "classifier"))


def curve(reference: str, **options: Any) -> list[Any]:
    """The losses and scores of an attempt, and how it ended where it did not complete."""
    *measured, outcome = attempt(reference, setup(**options))
    numbers = [
        [one.train_loss, sorted(one.scores.items())] for one in measured if isinstance(one, Measurement)
    ]
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
    "gradient caching": ("embedding_tasks:SimCLR", {"batch": 60, "accumulation": 3, "budget": 240}),
    "two towers": ("embedding_tasks:CLIP", {"batch": 60, "accumulation": 3, "budget": 240}),
    "own loop": (LOOP, {"budget": 300}),
}
# Of those, the ones whose convolutions some processors compute by another kernel where memory is aligned otherwise.
CONVOLVED = ("convolutions", "copied batches")
# Those that the CPU rounds elsewhere: other autocast rules, fused kernels.
SIMILAR: dict[str, tuple[str, dict[str, Any], float]] = {
    "bf16": (DIGITS, {"training": {"precision": "bf16"}}, 1e-2),
    "fp16, scaled": (DIGITS, {"training": {"precision": "fp16"}}, 1e-2),
    "fused AdamW": (DIGITS, {"rate": 0.01, "parameters": {"optimizer": "adamw"}}, 1e-5),
    "own loop, bf16": (LOOP, {"budget": 300, "training": {"precision": "bf16"}}, 1e-2),
}


def flat(run: list[Any]) -> list[float]:
    return [value for loss, scores in run for value in (loss or 0.0, *(score for _, score in scores))]


def resumed(reference: str) -> dict[str, Any]:
    """A training with random numbers of the card, whole, and interrupted and resumed from its checkpoint."""
    options: dict[str, Any] = {"device": "gpu", "budget": 320, "parameters": {"dropout": 0.5}}
    whole = curve(reference, **options)
    with tempfile.TemporaryDirectory() as folder:
        options |= {"checkpoint": f"{folder}/trial.pt", "checkpoint_every_s": 0.0}
        reports = attempt(reference, setup(**options))
        first = next(reports)
        ask_to_leave()
        *_, outcome = reports
        stay()
        assert isinstance(first, Measurement)
        assert isinstance(outcome, Outcome)
        accelerator.set_random_state(torch.Generator().manual_seed(99).get_state())  # as in another process
        torch.manual_seed(99)
        again = list(attempt(reference, setup(**options)))
    numbers = [[one.train_loss, sorted(one.scores.items())] for one in again if isinstance(one, Measurement)]
    resumed_at = [one.facts.get("resumed_at") for one in again if isinstance(one, Measurement)]
    return {"left": outcome.kind, "whole": whole, "again": numbers, "resumed_at": resumed_at}


def check_similar(on_cpu: list[Any], on_device: list[Any], tolerance: float) -> None:
    """Two curves that differ by rounding."""
    one_by_one = (
        [dict([*scores, ["loss", loss or 0.0]]) for loss, scores in run] for run in (on_cpu, on_device)
    )
    for expected, got in zip(*one_by_one, strict=True):
        for metric in expected.keys() - {"accuracy"}:
            assert got[metric] == pytest.approx(expected[metric], rel=tolerance), metric
        assert got["accuracy"] == pytest.approx(expected["accuracy"], abs=0.02)

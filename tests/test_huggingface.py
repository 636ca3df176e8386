"""The contract of trainers over the real transformers.Trainer, and what is its own."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="bsearch[huggingface] is not installed")

from test_training import setup
from trainer_contract import LOG, TrainerContract

pytestmark = pytest.mark.frameworks


class TestHuggingFace(TrainerContract):
    tasks = "huggingface_tasks"

    def tasks_of_gradients(self, ignores: bool) -> list[str]:
        return ["train", "deaf", "dividing", "own_loss", *([] if ignores else ["loss_function"])]

    def test_arguments_that_the_study_says_are_refused_all_at_once(self) -> None:
        message = self.ending("arguments", setup(50, budget=100)).message
        assert message.splitlines() == [
            "arguments: learning_rate: the study says it; write space.reference_rate in study.yaml",
            "arguments: num_train_epochs: the study says it; write space.epochs in study.yaml",
            "arguments: output_dir: a trial has no use for it; leave it out",
        ]

    def test_memory_that_runs_out_in_evaluation_shrinks_evaluation(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, parameters={"trouble": "memory"}))
        assert (outcome.kind, outcome.micro_batch) == ("out_of_memory", None)
        assert len(LOG.steps) == 1

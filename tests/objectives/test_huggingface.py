"""The contract of trainers over the real transformers.Trainer, and what is its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("transformers", reason="bsearch[huggingface] is not installed")

from helpers import setup
from trainer_contract import LOG, TrainerContract, ends_with_a_front, predicted_and_measured

pytestmark = pytest.mark.frameworks


class TestHuggingFace(TrainerContract):
    tasks = "huggingface_tasks"
    example = "huggingface"
    kept_model: ClassVar = {"model.safetensors", "training_args.bin"}

    def tasks_of_gradients(self, ignores: bool) -> list[str]:
        return ["train", "deaf", "dividing", "own_loss", *([] if ignores else ["loss_function"])]

    def test_arguments_that_the_study_says_are_refused_all_at_once(self) -> None:
        message = self.ending("arguments", setup(50, budget=100)).message
        assert message.splitlines() == [
            "arguments: learning_rate: set by the study; write space.reference_rate in study.yaml",
            "arguments: num_train_epochs: set by the study; write space.epochs in study.yaml",
            "arguments: output_dir: not supported in a trial; remove it",
        ]

    def test_memory_that_runs_out_in_evaluation_shrinks_evaluation(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, parameters={"trouble": "memory"}))
        assert (outcome.kind, outcome.micro_batch) == ("out_of_memory", None)
        assert len(LOG.steps) == 1

    @pytest.mark.parametrize("task", ["pixels", "words", "numbers"])
    def test_the_librarys_own_models_see_the_one_large_batch(self, task: str) -> None:
        def gradient(micro_batches: int) -> torch.Tensor:
            made = setup(500, micro_batches, budget=500, metric="loss", training={"evaluations": 1})
            self.trained(task, made)
            assert len(LOG.gradients) == 1
            return LOG.gradients[0].double()

        whole = gradient(1)
        assert float((gradient(3) - whole).norm() / whole.norm()) < 1e-6

    def test_tokens_are_counted(self) -> None:
        made = setup(50, 2, budget=230, metric="loss", training={"evaluations": 2})
        first, last = self.trained("words", made)
        assert (first.facts["tokens"], last.facts["tokens"]) == (150 * 8, 230 * 8)
        assert last.facts["tokens_per_s"] == pytest.approx(last.facts["tokens"] / last.elapsed_s)

    def test_a_losss_own_code_is_not_under_the_models_autocast(self) -> None:
        made = setup(1, budget=1, metric="loss", training={"precision": "bf16"})
        predicted_and_measured(f"{self.tasks}:taught", made, (50, 500))

    def test_the_environment_does_not_change_the_precision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        self.test_the_librarys_own_models_see_the_one_large_batch("pixels")
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_the_example_runs_from_the_command_line_to_a_front(tmp_path: Path) -> None:
    ends_with_a_front("huggingface", tmp_path)

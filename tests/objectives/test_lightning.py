"""The contract of trainers over the real lightning.Trainer, and what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("lightning", reason="bsearch[lightning] is not installed")

from helpers import setup
from trainer_contract import LOG, TrainerContract, ends_with_a_front, predicted_and_measured

pytestmark = pytest.mark.frameworks


class TestLightning(TrainerContract):
    tasks = "lightning_tasks"
    example = "lightning"
    kept_model: ClassVar = {"model.ckpt"}

    def tasks_of_gradients(self, ignores: bool) -> list[str]:
        return ["train"]

    @pytest.mark.parametrize("task", ["data_module", "whole_module"])
    def test_data_come_from_wherever_lightning_takes_them(self, task: str) -> None:
        self.trained("train", setup(50, 4, budget=620))
        expected = LOG.steps
        self.trained(task, setup(50, 4, budget=620))
        assert LOG.steps == expected
        assert [len(one) for one in LOG.steps[0]] == [13, 13, 12, 12]

    def test_arguments_that_the_study_says_are_refused_all_at_once(self) -> None:
        made = setup(50, budget=100, training={"compile": True})
        assert self.ending("arguments", made).message.splitlines() == [
            "train_with: max_epochs: set by the study; write space.epochs in study.yaml",
            "train_with: accumulate_grad_batches: set by the study; write space.accumulation in study.yaml",
            "training.compile: expected false, because lightning.Trainer does not compile; got true. Compile in the module.",
        ]

    @pytest.mark.parametrize(
        ("task", "message"),
        [
            ("own_schedule", "Module.configure_optimizers: expected one optimizer and no scheduler"),
            ("own_clipping", "OwnClipping.configure_gradient_clipping: expected Lightning's default"),
            ("own_rate", "expected a group at setup.learning_rate = 0.1, got 0.125"),
            ("unvalidated", "Module: expected a validation_step that logs 'accuracy', and validation data"),
        ],
    )
    def test_a_module_that_goes_its_own_way_is_told_what_to_change(self, task: str, message: str) -> None:
        outcome = self.ending(task, setup(50, budget=100))
        assert outcome.kind == "error"
        assert message in outcome.message

    def test_memory_is_that_of_a_step_as_hooks_and_callbacks_have_prepared_it(self) -> None:
        predicted_and_measured(f"{self.tasks}:thawing", setup(1, budget=1), (8, 200))

    def test_memory_that_runs_out_in_validation_is_the_loaders_to_mend(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, parameters={"trouble": "memory"}))
        assert outcome.kind == "error"
        assert "make the validation loader's batches smaller" in outcome.message


@pytest.mark.long
def test_the_example_runs_from_the_command_line_to_a_front(tmp_path: Path) -> None:
    ends_with_a_front("lightning", tmp_path)

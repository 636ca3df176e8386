"""The contract of trainers over the real lightning.Trainer, and what is its own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("lightning", reason=".[lightning] is not installed")

from bsearch.objectives import trial
from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import plan_batch
from bsearch.spaces.schedule import evaluation_points, rate_factor
from bsearch.spaces.study.devices import Memory
from helpers import setup
from trainer_contract import LOG, TrainerContract, ends_with_a_front, predicted_and_measured

pytestmark = pytest.mark.frameworks


class TestLightning(TrainerContract):
    tasks = "lightning_tasks"
    example = "lightning"
    kept_model: ClassVar = {"model.ckpt"}
    leaves_between = False
    weighted_tasks: ClassVar = ["weighted"]
    sampling_tasks: ClassVar = ["sampled_loader", "sampled_data_module", "sampled_module"]

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

    @pytest.mark.parametrize("skips", ["batch", "epoch", "negative"])
    def test_a_step_of_which_something_is_left_out_is_refused(self, skips: str) -> None:
        outcome = self.ending("skipping", setup(50, 2, budget=1000, parameters={"skips": skips}))
        assert outcome.kind == "error"
        assert outcome.message.startswith(
            {
                "batch": "Skipping.training_step: expected the batch's mean loss, got None, which would make Lightning skip "
                'the micro-batch. If nothing in it counts, return {"loss": loss, "denominator": 0}',
                "epoch": "lightning.Trainer: expected to train on 1000 samples; training ended after 150, because "
                "on_train_batch_start returned -1",
                "negative": "Skipping.training_step: expected a denominator >= 0 that the mean divides by, got -2.0",
            }[skips]
        )
        assert LOG.evaluations == 0

    def test_callbacks_that_change_what_a_trial_is_are_refused_all_at_once(self) -> None:
        lines = self.ending("own_callbacks", setup(50, budget=100)).message.splitlines()
        assert [line.split(", because")[0] for line in lines] == [
            f"train_with: callbacks: expected no {name}"
            for name in (
                "EarlyStopping",
                "StochasticWeightAveraging",
                "GradientAccumulationScheduler",
                "BatchSizeFinder",
                "LearningRateFinder",
                "BaseFinetuning",
            )
        ]
        assert self.ending("callbacks_of_the_module", setup(50, budget=100)).message.startswith(
            "BringsCallbacks.configure_callbacks: expected no EarlyStopping, because the study stops trials, by `stopping:` in "
            "study.yaml"
        )

    @pytest.mark.parametrize("task", ["reading", "reading_with_data_module"])
    @pytest.mark.parametrize("evaluations", [1, 2, 15])
    def test_epochs_are_those_of_the_data_and_steps_those_of_the_budget(
        self, task: str, evaluations: int
    ) -> None:
        made = setup(50, 2, budget=1500, epochs=2.5, training={"evaluations": evaluations})
        measurements = self.trained(task, made)
        assert [one.samples_seen for one in measurements] == list(evaluation_points(1500, evaluations))
        steps = [("step", step, 50 * step // 600, 3, 30) for step in range(30) for _ in range(2)]
        assert LOG.read[0] == ("optimizer", 0, 0, 3, 30)
        assert [one for one in LOG.read if one[0] == "step"] == steps
        validations = [
            ("validation", seen // 50, (seen - 1) // 600, 3, 30)
            for seen in evaluation_points(1500, evaluations)
        ]
        assert [one for one in LOG.read if one[0] == "validation"] == validations
        seen = [index for step in LOG.steps for one in step for index in one]
        assert seen == SampleStream(600, made.seed).take(0, 1500).index.tolist()

    def test_a_resumed_attempt_goes_on_counting(self, tmp_path: Path) -> None:
        made = setup(50, budget=1500, epochs=2.5, training={"evaluations": 5})
        kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt", checkpoint_every_s=0.0)
        with closing(trial.attempt(f"{self.tasks}:reading", kept)) as attempt:  # type: ignore[type-var]
            seen = [next(attempt).samples_seen for _ in range(3)]  # type: ignore[union-attr]
        assert (
            [one.samples_seen for one in self.trained("reading", replace(kept, attempt=1))][:3]
            == seen
            == [300, 600, 900]
        )
        first, *_ = (one for one in LOG.read if one[0] == "step")
        assert first in (("step", 12, 1, 3, 30), ("step", 18, 1, 3, 30))
        assert LOG.read[-1] == ("validation", 30, 2, 3, 30)

    def test_manual_optimization_gets_whole_steps_and_the_rates_of_the_schedule(self, tmp_path: Path) -> None:
        made = setup(50, budget=620, rate=0.2, training={"evaluations": 4})
        measurements = self.trained("adversaries", made)
        assert LOG.sizes == [[50]] * 12 + [[20]]
        assert [index for [step] in LOG.steps for index in step] == SampleStream(600, made.seed).take(
            0, 620
        ).index.tolist()
        assert LOG.rates == pytest.approx(
            [0.2 * rate_factor("cosine", 0.05, (50 * n + 25) / 620) for n in range(12)] + LOG.rates[12:]
        )
        assert (
            measurements[-1].facts["optimizer"] == "Remembering, Adam" and measurements[-1].train_loss is None
        )
        kept = replace(made, checkpoint=f"file://{tmp_path}/kept/checkpoint.pt", checkpoint_every_s=0.0)
        with closing(trial.attempt(f"{self.tasks}:adversaries", kept)) as attempt:  # type: ignore[type-var]
            for _ in range(2):
                next(attempt)
        again = self.trained("adversaries", replace(kept, attempt=1))
        assert again[-1].facts["resumed_at"] and [one.scores for one in again] == [
            one.scores for one in measurements
        ]

    def test_what_manual_optimization_leaves_out_is_said(self) -> None:
        for changes, message in (
            (
                {"parameters": {"forgets": True}},
                "Adversaries.training_step: expected a step of an optimizer for every batch",
            ),
            (
                {"training": {"clip_norm": 1.0}},
                "training.clip_norm: expected null, because Adversaries takes its own",
            ),
            (
                {"plan": plan_batch(50, largest_micro_batch=25)},
                "manual optimization: expected steps of one micro-batch",
            ),
        ):
            outcome = self.ending("adversaries", setup(50, budget=100, **changes))
            assert outcome.kind == "error" and message in outcome.message

    def test_memory_of_manual_optimization_is_known_before_the_first_trial(self) -> None:
        made = setup(1, budget=1)
        profile = profile_task(
            f"{self.tasks}:wide_adversaries", ProfileRequest(made, Memory(), highest=200, traces=True)
        )
        assert profile.couples_samples and profile.examination is not None and profile.examination.takes_steps
        assert profile.memory is not None and profile.memory.source == "traced", (
            profile.note or profile.memory
        )
        for size in (10, 200):
            *_, last = self.trained(
                "wide_adversaries", setup(size, budget=4 * size, memory_limit_bytes=10**9)
            )
            assert last.facts["peak_bytes"] == pytest.approx(profile.memory.peak_bytes(size), rel=0.02)

    def test_memory_is_that_of_a_step_as_hooks_and_callbacks_have_prepared_it(self) -> None:
        predicted_and_measured(f"{self.tasks}:thawing", setup(1, budget=1), (8, 200))

    def test_memory_that_runs_out_in_validation_is_the_loaders_to_mend(self) -> None:
        outcome = self.ending("train", setup(50, budget=100, parameters={"trouble": "memory"}))
        assert outcome.kind == "error"
        assert "make the validation loader's batches smaller" in outcome.message


@pytest.mark.long
def test_the_example_runs_from_the_command_line_to_a_front(tmp_path: Path) -> None:
    ends_with_a_front("lightning", tmp_path)

"""The contract of trainers over the real transformers.Trainer, and what is its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("transformers", reason=".[huggingface] is not installed")

from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.study.devices import Memory
from helpers import setup
from torch import nn
from trainer_contract import (
    LOG,
    Net,
    Points,
    TrainerContract,
    ends_with_a_front,
    one_large_batch,
    predicted_and_measured,
    relative,
    weighted_cross_entropy,
)

pytestmark = pytest.mark.frameworks


class TestHuggingFace(TrainerContract):
    tasks = "huggingface_tasks"
    example = "huggingface"
    kept_model: ClassVar = {"model.safetensors", "training_args.bin"}
    weighted_tasks: ClassVar = ["weighted", "weighted_function"]
    sampling_tasks: ClassVar = ["sampled_by_loader", "sampled_by_prepared_loader"]

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

    def test_parameters_that_no_model_holds_are_refused_since_they_would_be_lost(self) -> None:
        outcome = self.ending("learning_loss", setup(50, budget=100))
        assert outcome.kind == "error" and not LOG.steps
        assert (
            "expected parameters of the model alone, which are saved and resumed; got 1 of something else"
            in outcome.message
        )

    def test_a_librarys_own_arguments_and_batch_sampler_are_taken(self) -> None:
        self.trained("train", setup(50, 2, budget=150))
        expected = LOG.steps
        self.trained("librarys", setup(50, 2, budget=150))
        assert LOG.steps == expected

    @pytest.mark.parametrize("task", ["pixels", "words", "own_words", "numbers"])
    def test_the_librarys_own_models_see_the_one_large_batch(self, task: str) -> None:
        def gradient(micro_batches: int) -> torch.Tensor:
            made = setup(500, micro_batches, budget=500, metric="loss", training={"evaluations": 1})
            self.trained(task, made)
            assert len(LOG.gradients) == 1
            return LOG.gradients[0].double()

        whole = gradient(1)
        assert float((gradient(3) - whole).norm() / whole.norm()) < 1e-6

    def test_a_mean_over_shifted_labels_is_that_of_the_one_large_batch(self) -> None:
        from huggingface_tasks import Texts, language_model

        made = setup(60, 5, budget=60, metric="loss", training={"evaluations": 1})
        self.trained("own_words", made)
        torch.manual_seed(made.seed)
        model, data = language_model(), Texts()
        model(
            **torch.utils.data.default_collate(
                [data[i] for i in SampleStream(600, made.seed).take(0, 60).index]
            )
        ).loss.backward()
        expected = torch.cat([one.grad.flatten() for one in model.parameters()])
        assert relative(LOG.gradients[0], expected) < 1e-6

    def test_terms_that_know_the_step_and_terms_that_do_not_are_each_weighted_rightly(self) -> None:
        made = setup(100, 7, budget=100)
        self.trained("mixed", made)

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(logits, labels) + 0.3 * logits.square().mean()

        assert relative(LOG.gradients[0], one_large_batch(made, Points(), loss)[1]) < 1e-12

    def test_a_denominator_that_is_none_is_refused(self) -> None:
        outcome = self.ending("negative", setup(50, 2, budget=100))
        assert outcome.message.startswith(
            "train_with: denominator: expected a number >= 0 that the batch's mean loss divides by, got -1.0"
        )

    @pytest.mark.parametrize("kind", ["plain", "dividing", "weighted", "words", "own_words"])
    def test_the_loss_of_the_validation_data_is_their_mean_whatever_the_batch(self, kind: str) -> None:
        from huggingface_tasks import Texts, language_model

        made = setup(
            50,
            2,
            budget=50,
            rate=1e-12,
            metric="loss",
            parameters={"kind": kind},
            training={"evaluations": 1},
        )
        torch.manual_seed(made.seed)
        if kind.endswith("words"):
            model, data = language_model(), Texts()
            expected = model(**torch.utils.data.default_collate([data[index] for index in range(50)])).loss
        else:
            points, loss = Points(100, ignores=True, silent=8), nn.functional.cross_entropy
            expected = (weighted_cross_entropy if kind == "weighted" else loss)(
                Net().layers(points.x), points.labels
            )
        for size in (4, 16, 64, 512):
            sized = replace(made, parameters={"kind": kind, "per_device_eval_batch_size": size})
            [measurement] = self.trained(kind if kind.endswith("words") else "evaluated", sized)
            assert measurement.value("loss") == pytest.approx(float(expected.detach()), rel=1e-6), size

    def test_the_evaluation_batch_never_follows_the_micro_batch(self) -> None:
        def sizes(micro_batches: int, **changes: object) -> list[int]:
            made = setup(
                60,
                micro_batches,
                budget=60,
                metric="loss",
                training={"evaluations": 1},
                parameters={"kind": "plain"},
            )
            self.trained(
                "evaluated",
                replace(
                    made, **{**changes, "parameters": {"kind": "plain", **changes.get("parameters", {})}}
                ),
            )
            return list(LOG.read)

        user = {"parameters": {"per_device_eval_batch_size": 32}}
        assert sizes(1) == sizes(20) == [64]
        assert sizes(20, evaluation_batch=200) == [200]
        assert sizes(20, **user) == sizes(20, **user, evaluation_batch=200) == [32]
        assert sizes(20, **user, evaluation_batch=16) == [16]  # where 32 ran out of memory

    def test_metrics_of_the_users_own_stay_as_they_are(self) -> None:
        def last(kind: str) -> dict[str, float]:
            return dict(
                self.trained("own_evaluation", setup(50, budget=50, parameters={"kind": kind}))[-1].scores
            )

        assert last("loss") == {"accuracy": 0.5, "loss": 7.0}
        batches, losses = last("batches"), last("losses")
        assert batches["seen"] == losses["seen"] == 100
        assert batches["loss"] == losses["loss"]

    def test_a_metric_that_is_averaged_over_batches_is_named_before_the_first_trial(self) -> None:
        def said(metric: str) -> list[tuple[str, str]]:
            request = ProfileRequest(setup(1, budget=1, metric=metric), Memory(), highest=100)
            examined = profile_task(f"{self.tasks}:averaging", request).examination
            assert examined is not None and examined.verdict == "exact"
            return [(one.kind, one.message.partition(":")[0]) for one in examined.findings]

        assert said("squared") == [
            ("averaged", "squared depends on how many samples are evaluated at a time")
        ]
        assert said("accuracy") == said("loss") == []

    @pytest.mark.parametrize("kind", ["user", "tokenizer"])
    @pytest.mark.parametrize("divides", [False, True])
    def test_a_batch_may_be_any_mapping(self, kind: str, divides: bool) -> None:
        parameters = {"kind": kind, "divides": divides, "ignores": True, "silent": 167}
        made = setup(500, 3, budget=500, parameters=parameters)
        self.trained("encoded", made)
        points = Points(ignores=True, silent=167, seed=made.seed)
        assert (
            relative(LOG.gradients[0], one_large_batch(made, points, nn.functional.cross_entropy)[1]) < 1e-12
        )

    @pytest.mark.parametrize("sampling", ["weighted", "replacement", "random"])
    def test_a_sampler_of_the_trainers_class_is_honoured(self, sampling: str) -> None:
        made = setup(50, 2, budget=620, parameters={"sampling": sampling})
        self.trained("sampled_by_loader", made)
        expected = LOG.steps
        self.trained("sampled_by_trainer", made)
        assert LOG.steps == expected

    def test_another_sampler_of_the_trainers_class_is_refused_before_the_first_step(self) -> None:
        outcome = self.ending("sampled_by_trainer", setup(50, budget=100, parameters={"sampling": "subset"}))
        assert outcome.kind == "error" and LOG.steps == []
        assert "got sampler SubsetRandomSampler" in outcome.message

    def test_everything_that_belongs_to_the_study_is_refused_at_once(self) -> None:
        lines = self.ending("many_faults", setup(50, budget=100)).message.splitlines()
        assert [line.split(": expected")[0] for line in lines] == [
            "arguments: seed: set by the study; write training.seed in study.yaml",
            "train_with: optimizers",
            "train_with: callbacks",
        ]
        assert (
            "expected no EarlyStoppingCallback, since the study stops trials; write `stopping:`" in lines[2]
        )

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


@pytest.mark.long
def test_the_example_runs_from_the_command_line_to_a_front(tmp_path: Path) -> None:
    ends_with_a_front("huggingface", tmp_path)

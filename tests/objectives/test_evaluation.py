"""Metrics of a whole data set: the same over any batches and devices, undefined where they have no value."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.data.batches import in_order
from bsearch.objectives.evaluation import Evaluation
from bsearch.objectives.task import Data, Score, Task, WholeSet
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.search.analysis.score_scale import ScoreScale
from bsearch.spaces.boundary.given import LARGEST
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from tasks_for_tests import Points, Ranked, points
from torch import Tensor, nn


def right(run: TrainingRun) -> dict[str, float]:
    """The same by scikit-learn, of all outputs at once."""
    inputs, labels = run.data.validation.tensors
    with torch.no_grad():
        logits = run.model(inputs)
    margin = logits[:, 1] - logits[:, 0]
    return {
        "accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "auroc": float(roc_auc_score(labels, margin)),
        "f1": float(f1_score(labels, logits.argmax(-1), average="macro")),
        "precision": float(average_precision_score(labels, margin)),
    }


@pytest.mark.parametrize("batch", [1, 4, 16, 64, 512])
def test_a_metric_of_the_whole_set_is_one_value_at_any_evaluation_batch(batch: int) -> None:
    run = TrainingRun(Ranked(), setup(evaluation_batch=batch))
    assert run.evaluate() == pytest.approx(right(run), rel=1e-6)


@pytest.mark.parametrize("micro_batch", [3, 600])
def test_the_evaluation_batch_never_follows_the_trials(micro_batch: int) -> None:
    sizes = []

    class Counts(Points):
        def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
            sizes.append(len(batch[1]))
            return super().score(model, batch, setup)

        def data(self, setup: TrialSetup) -> Data:
            return Data(points(600, 0), points(1000, 1))

    list(train_task(Counts(), setup(micro_batch, budget=600, training={"evaluations": 1})))
    assert sizes == [512, 488]


def test_states_of_several_devices_are_merged_as_if_one_had_evaluated() -> None:
    run = TrainingRun(Ranked(), setup())
    parts = in_order(101, 13, 0)
    evaluations = [Evaluation(run.task) for _ in range(3)]
    with torch.no_grad():
        for number, keys in enumerate(parts):
            evaluations[number % 3].add(run.scores(run.validation_fetcher.fetch(keys)))
    gathered: dict[str, list[Any]] = {}

    def gather(local: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        for name, values in local.items():
            gathered[name] = [*gathered.get(name, []), *values]
        return dict(local)

    for evaluation in evaluations:  # what each rank gives to the gathering
        evaluation.values(gather)
    merged = evaluations[0].values(lambda local: {name: gathered[name] for name in local})
    assert merged == pytest.approx(right(run), rel=1e-6)


def test_a_quotient_of_nothing_is_not_a_number_and_named() -> None:
    class Recall(Points):
        def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Mapping[str, Score]:
            scores = super().score(model, batch, setup)
            return {**scores, "recall": Score(0, 0)}

    last = list(train_task(Recall(), setup(50, budget=400)))[-1]
    assert math.isnan(last.scores["recall"])
    assert last.facts["undefined"] == "recall"
    assert math.isfinite(last.scores["accuracy"])


@pytest.mark.parametrize(
    "of", [math.exp, lambda mean: math.inf if mean > 709 else mean, lambda mean: mean * 1e98]
)
def test_a_function_of_a_finite_mean_that_overflows_is_the_largest_number(
    of: Callable[[float], float],
) -> None:
    evaluation = Evaluation(Points())
    evaluation.add(
        {
            "perplexity": Score(7100.0, 10, of=of),
            "worse": Score(math.inf, 10, of=of),
            "fine": Score(7.1, 10, of=of),
        }
    )
    values = evaluation.values()
    assert values["perplexity"] == LARGEST
    assert values["worse"] == math.inf
    assert values["fine"] == of(0.71)


@pytest.mark.filterwarnings("error")
def test_a_search_goes_on_beside_a_metric_that_overflowed() -> None:
    values = -np.array([1.5, 1.4, 1.3, 7e4, sys.float_info.max])
    scaled = ScoreScale(values).of(values)
    assert np.isfinite(scaled).all()
    assert (np.diff(scaled[[4, 3, 0, 1, 2]]) > 0).all()


def test_half_precisions_come_to_a_function_as_single() -> None:
    seen: list[Tensor] = []
    evaluation = Evaluation(Points())
    for count in (2, 3):
        evaluation.add(
            {
                "m": WholeSet(
                    lambda x, names: seen.append(x) or len(names), torch.ones(count).bfloat16(), ["a"] * count
                )
            }
        )
    assert evaluation.values() == {"m": 5.0}
    assert seen[0].dtype == torch.float32 and seen[0].shape == (5,)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            {"m": WholeSet(3, torch.ones(2))},
            "m: expected WholeSet.* with a torchmetrics.Metric or a function, got int",
        ),
        (
            {"m": WholeSet(lambda x: x, torch.ones(2))},
            r"m: expected a metric that is one number, got a Tensor of shape \(4,\)",
        ),
        (
            0.5,
            r"expected Score\(total, denominator\), WholeSet\(metric, outputs, targets\) or a dict of them, got float",
        ),
    ],
)
def test_what_is_no_metric_is_told(scores: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        for evaluation in [Evaluation(Points())]:
            evaluation.add(scores)
            evaluation.add(scores)
            evaluation.values()


def test_arguments_that_cannot_be_concatenated_are_told_with_their_shapes() -> None:
    evaluation = Evaluation(Points())
    for width in (2, 3):
        evaluation.add({"m": WholeSet(float, torch.ones(4, width))})
    with pytest.raises(
        TaskError, match=r"m: expected arguments .* can be concatenated, got shapes \(4, 2\) and \(4, 3\)"
    ):
        evaluation.values()


def test_each_split_has_its_own_road() -> None:
    def twice(samples: list[Any]) -> Any:
        inputs, labels = zip(*samples, strict=True)
        return [torch.stack(inputs) * 2, torch.stack(labels)]

    class Doubles(Task):
        def data(self, setup: TrialSetup) -> Data:
            return Data(points(50, 0), points(20, 1), train_collate=twice)

        def model(self, setup: TrialSetup) -> nn.Module:
            return nn.Linear(2, 2)

    run = TrainingRun(Doubles(), setup(10))
    keys = in_order(10, 10, 0)[0]
    assert torch.equal(run.train_fetcher.fetch(keys)[0], 2 * points(50, 0).tensors[0][:10])
    assert torch.equal(run.validation_fetcher.fetch(keys)[0], points(20, 1).tensors[0][:10])


def test_where_scores_may_follow_the_batch_it_is_the_same_on_any_number_of_devices() -> None:
    made = setup(10, evaluation_batch=40, training={"accept_inexact": True})
    run = TrainingRun(Points(), made)
    assert run.evaluation_batch == 40 == TrainingRun(Points(), replace(made, plan=made.plan)).evaluation_batch

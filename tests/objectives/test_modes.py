"""What the user set is kept: modes, buffers, containers, sparse gradients."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bsearch.objectives.data.batches import leaves, to_device, with_tensors
from bsearch.objectives.steps.rescale import rescale_gradients
from bsearch.objectives.task import Data, Loss
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.spaces.errors import TaskError
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from tasks_for_tests import NoDecay, Points
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset


class Frozen(Points):
    """A pretrained backbone in evaluation mode, and a head."""

    def model(self, setup: TrialSetup) -> nn.Module:
        backbone = (
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(False).eval()
        )
        return nn.Sequential(backbone, nn.Linear(4, 2))


def test_a_frozen_backbone_stays_in_evaluation_mode_and_its_statistics_stay() -> None:
    run = TrainingRun(Frozen(), setup(20, 2, budget=400, training={"evaluations": 3}))
    before = run.model[0][1].running_mean.clone()
    list(run.measurements())
    assert torch.equal(run.model[0][1].running_mean, before)
    assert [module.training for module in run.model.modules()] == [True, False, False, False, False, True]


def test_a_model_that_comes_in_evaluation_mode_as_a_whole_is_trained() -> None:
    class Pretrained(Points):
        def model(self, setup: TrialSetup) -> nn.Module:
            return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()

    run = TrainingRun(Pretrained(), setup(20))
    next(run.measurements())
    assert all(module.training for module in run.model.modules())


@dataclass
class Graph:
    x: torch.Tensor
    names: list[str]


@dataclass(frozen=True)
class FrozenGraph:
    x: torch.Tensor


Pair = namedtuple("Pair", "x y")
ONE = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        ONE,
        [ONE, (ONE, 3)],
        {"x": ONE},
        OrderedDict(x=ONE),
        defaultdict(list, x=[ONE]),
        UserDict(x=ONE),
        SimpleNamespace(x=ONE, inner=SimpleNamespace(y=ONE)),
        Graph(ONE, ["a"]),
        FrozenGraph(ONE),
        Pair(ONE, 1),
        pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.Size([1, 2]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_tensors_in_any_container_are_moved_and_the_container_stays(batch: Any) -> None:
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is type(batch)
    tensors = [one for one in leaves(moved) if isinstance(one, torch.Tensor)]
    on_host = [moved.batch_sizes] if isinstance(moved, PackedSequence) else []
    assert all(one.is_meta or any(one is other for other in on_host) for one in tensors)
    assert not any(one.is_meta for one in leaves(batch) if isinstance(one, torch.Tensor)), (
        "the batch itself is as it was"
    )


def test_a_class_in_a_batch_is_a_leaf() -> None:
    assert list(leaves([Graph, SimpleNamespace, 3])) == [Graph, SimpleNamespace, 3]
    assert with_tensors([Graph], lambda tensor: tensor) == [Graph]


def test_a_defaultdict_keeps_its_factory() -> None:
    moved = with_tensors(defaultdict(list, x=ONE), lambda one: one + 1)
    assert torch.equal(moved["x"], ONE + 1) and moved["absent"] == []


class SparseWords(Points):
    def data(self, setup: TrialSetup) -> Data:
        words = torch.randint(0, 50, (400, 3), generator=torch.Generator().manual_seed(0))
        return Data(TensorDataset(words, words[:, 0] % 2), TensorDataset(words, words[:, 0] % 2))

    sparse = True

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(50, 6, sparse=self.sparse), nn.Linear(6, 2))

    optimizer = NoDecay.optimizer

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        # Halved samples, so that gradients are rescaled too.
        loss = super().loss(model, batch, setup)
        return Loss(loss.total / 2, loss.denominator / 2)


@pytest.mark.parametrize("limit", [None, 10**9])
@pytest.mark.parametrize("batch", [10, 100])
def test_sparse_gradients_train_as_dense_ones(batch: int, limit: int | None) -> None:
    losses = []
    for sparse in (True, False):
        task = SparseWords()
        task.sparse = sparse
        made = setup(batch, 3, budget=1000, memory_limit_bytes=limit)
        losses.append([one.train_loss for one in train_task(task, made)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_ratio_is_not_rounded_to_the_first_gradients_type() -> None:
    gradients = [torch.ones(3, dtype=torch.bfloat16), torch.ones(3), torch.ones(3, dtype=torch.float64)]
    rescale_gradients(gradients, 257, 256)
    assert float(gradients[1][0]) == pytest.approx(256 / 257, rel=1e-7)
    assert float(gradients[2][0]) == pytest.approx(256 / 257, rel=1e-15)
    assert float(gradients[0][0]) == pytest.approx(256 / 257, rel=4e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "optimizer": lambda self, model, setup: torch.optim.LBFGS(
                    model.parameters(), lr=setup.learning_rate
                )
            },
            r"optimizer: expected an optimizer that steps with the gradient that is there.* got LBFGS with a closure",
        ),
        ({"optimizer": "scheduled"}, r"expected no scheduler, because training.schedule"),
        (
            {"model": lambda self, setup: Mapped()},
            r"loss: the default expects a model that returns a tensor .* got dict",
        ),
        ({"loss": "shape"}, r"loss: expected a denominator for the whole batch, .* got shape \(1,\)"),
        (
            {"data": lambda self, setup: Data(Ragged(), Ragged())},
            r"Task.data: expected samples that .* Pass Data\(collate=...\)",
        ),
    ],
)
def test_what_would_have_no_effect_or_fail_in_torchs_words_is_refused_in_ours(
    changes: dict[str, Any], message: str
) -> None:
    def scheduled(self: Any, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return optimizer

    def shape(self: Any, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return Loss(model(batch[0]).sum(), torch.tensor([len(batch[1])]))

    own = {"scheduled": scheduled, "shape": shape}
    methods = {name: own[value] if isinstance(value, str) else value for name, value in changes.items()}
    task = type("Own", (Points,), methods)
    with pytest.raises(TaskError, match=message):
        list(train_task(task(), setup(10, budget=100)))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


class Ragged(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2 + index % 3), index % 2

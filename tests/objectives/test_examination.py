"""Laws of the examination: what is exact passes whatever it draws and keeps, what is not is named, nothing stays changed."""

from __future__ import annotations

import copy
import functools
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.examination.examine import examined
from bsearch.objectives.examination.fixed_noise import fixed_noise
from bsearch.objectives.examination.step import Effort, Step, compared, uneven_parts
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.laws.examination import Examination
from bsearch.spaces.trial import TrialSetup
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, LABELS = torch.randn(400, 8, generator=GENERATOR), torch.randint(0, 3, (400,), generator=GENERATOR)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many samples are compared does not depend on how busy this machine is."""
    monkeypatch.setattr("bsearch.objectives.examination.step._BUDGET_S", 60.0)
    monkeypatch.setattr("bsearch.objectives.examination.scores._BUDGET_S", 60.0)


class Base(Task):
    def data(self, setup: TrialSetup) -> Data:
        return Data(TensorDataset(INPUTS, LABELS), TensorDataset(INPUTS[:90], LABELS[:90]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return Loss(self.losses(model, batch).sum(), len(batch[1]))


def examination(task: Task, **changes: Any) -> Examination:
    return examined(TrainingRun(task, setup(1, **changes)), 1)


@given(st.integers(2, 60), st.integers(1, 4), st.integers(0, 1000))
def test_uneven_parts_hold_every_sample_once_and_none_is_too_small(
    samples: int, smallest: int, seed: int
) -> None:
    if samples < 2 * smallest:
        return
    parts = uneven_parts(samples, smallest, seed)
    assert np.concatenate(parts).tolist() == list(range(samples))
    assert 2 <= len(parts) <= 5 and min(map(len, parts)) >= smallest


DRAWS = {
    "rand": lambda n: torch.rand(n, 3),
    "randn_like": lambda n: torch.randn_like(torch.zeros(n, 3)),
    "randint": lambda n: torch.randint(2, 9, (n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.3)),
    "bernoulli, by name": lambda n: torch.bernoulli(input=torch.full((n, 3), 0.3)),
    "multinomial, by name": lambda n: torch.multinomial(input=torch.rand(n, 5), num_samples=3),
    "normal": lambda n: torch.normal(torch.zeros(n, 3), torch.ones(n, 3)),
    "distribution": lambda n: torch.distributions.Normal(0.0, 2.0).rsample((n, 3)),
    "in place": lambda n: torch.empty(n, 3).uniform_(-1, 1),
    "exponential": lambda n: torch.empty(n, 3).exponential_(),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("noise", ["rows", "constant"])
def test_fixed_draws_do_not_depend_on_the_place_in_the_batch(name: str, noise: Any) -> None:
    with fixed_noise(noise, nn.Linear(1, 1)):
        torch.rand(5)
        many = DRAWS[name](7)
        few = DRAWS[name](2)
    assert torch.equal(many[:1].expand_as(many), many) and torch.equal(few, many[:2])
    assert torch.isfinite(many.double()).all()


VALUES = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
HEADS = nn.MultiheadAttention(4, 2, batch_first=True)
SWITCHED = {
    "causal, by position": lambda p: nn.functional.scaled_dot_product_attention(
        VALUES, VALUES, VALUES, None, p, True
    ),
    "causal, by name": lambda p: nn.functional.scaled_dot_product_attention(
        VALUES, VALUES, VALUES, dropout_p=p, is_causal=True
    ),
    "heads, by name": lambda p: nn.functional.multi_head_attention_forward(
        **dict.fromkeys(("query", "key", "value"), VALUES[0].transpose(0, 1)),
        **dict.fromkeys(("bias_k", "bias_v")),
        **{name: getattr(HEADS, name) for name in ("in_proj_weight", "in_proj_bias")},
        **{"out_proj_weight": HEADS.out_proj.weight, "out_proj_bias": HEADS.out_proj.bias},
        **{"embed_dim_to_check": 4, "num_heads": 2, "add_zero_attn": False, "dropout_p": p},
    )[0],
    "heads, by position": lambda p: nn.MultiheadAttention.forward(
        HEADS, *[VALUES[0]] * 3, attn_mask=torch.triu(torch.full((5, 5), -torch.inf), 1)
    )[0],
    "rrelu in place": lambda p: nn.functional.rrelu(made := VALUES.clone(), 0.25, 0.25, p > 0, True) + made,
}


@pytest.mark.parametrize("name", SWITCHED)
def test_dropout_is_off_and_no_other_argument_is_touched(name: str) -> None:
    """However the arguments are passed."""
    expected = SWITCHED[name](0.0)
    HEADS.dropout = 0.5
    with fixed_noise(None, nn.Linear(1, 1)):
        found = SWITCHED[name](0.5)
    HEADS.dropout = 0.0
    assert torch.equal(found, expected)


class Off(Step):
    """A step whose gradient is off by so much in other orders, and by so much in parts."""

    offs = 0.0, 0.0

    def gradient(self, parts: Any, *_: Any, **__: Any) -> tuple[Tensor, float]:
        reordered, split = self.offs
        off = split if len(parts) > 1 else reordered if parts[0][0] else 0.0
        return torch.tensor([1.0, off], dtype=torch.float64), 1.0


LOGARITHMS = st.floats(-9.0, 0.0)


@given(LOGARITHMS, LOGARITHMS, st.sampled_from([torch.float64, torch.float32, None]), st.booleans())
def test_what_differs_by_more_than_a_hundred_roundings_is_told(
    reordered: float, split: float, dtype: torch.dtype | None, brief: bool
) -> None:
    """Between 2e-5 and 1e-3, where rounding is not measured 1e-3; 3e-2 under autocast."""
    step = Off(nn.Linear(1, 1), lambda _: None, lambda _: torch.zeros(()), dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Off, "offs", (10**reordered, 10**split))
        found = compared(step, 1, 0, Effort(24, 1, brief))
    tolerance = 3e-2 if dtype is None else 1e-3 if brief else min(max(100 * 10**reordered, 2e-5), 1e-3)
    assert found.tolerance == pytest.approx(tolerance)
    assert found.difference == pytest.approx(10**split)


class Attention(Base):
    """torch's own encoder layer, with its dropout of a tenth."""

    def model(self, setup: TrialSetup) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(8, 3)
        )


class FromMemory(Base):
    """Uses a function that remembers what it made, in the precision of the moment."""

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return super().losses(model, (batch[0] + positions(8, batch[0].dtype is torch.float64), batch[1]))


@functools.cache
def positions(size: int, double: bool) -> Tensor:
    return torch.linspace(0, 1, size, dtype=torch.float64 if double else torch.float32)


class Smoothed(Base):
    """Keeps a running loss for its log."""

    def __init__(self) -> None:
        self.running = torch.zeros(())

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        made = super().loss(model, batch, setup)
        self.running = 0.9 * self.running + 0.1 * made.total.detach()
        return made


class LocksItsSamples(Base):
    def data(self, setup: TrialSetup) -> Data:
        class Locked(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return 90

            def __getitem__(self, index: int) -> Any:
                return INPUTS[index], LABELS[index], threading.Lock()  # which cannot be copied

        def collate(samples: list[Any]) -> Any:
            return torch.stack([x for x, *_ in samples]), torch.stack([y for _, y, _ in samples])

        return Data(Locked(), Locked(), collate=collate)


@pytest.mark.parametrize("task", [Base, Attention, FromMemory, Smoothed, LocksItsSamples])
@pytest.mark.parametrize("training", [{}, {"precision": "bf16"}])
def test_what_is_exact_is_found_exact(task: type[Task], training: dict[str, Any]) -> None:
    found = examination(task(), training=training)
    assert found.verdict == "exact", found
    assert found.difference < 1e-10


class Noisy(Base):
    """Label noise by NumPy, drawn for each sample: it cannot be held fixed."""

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        weights = torch.from_numpy(np.random.rand(len(batch[1]))).to(batch[0])
        return super().losses(model, batch) * weights * random.uniform(0.5, 1)


class Ramps(Base):
    """The weight of its penalty grows with the number of calls, as in a warm-up of a KL term."""

    def __init__(self) -> None:
        self.step = 0

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        self.step += 1
        made = super().loss(model, batch, setup)
        return Loss(made.total * min(self.step / 1000, 1), made.denominator)


class ClipsInHooks(Base):
    """Clips each parameter's gradient wherever it is accumulated, so in every micro-batch."""

    def model(self, setup: TrialSetup) -> nn.Module:
        net = super().model(setup)
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))
        return net


class UsesAnotherModel(Base):
    def __init__(self) -> None:
        self.net = nn.Linear(8, 3)

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        return super().losses(self.net, batch) + 0.0 * model(batch[0]).sum(1)


class MixesRandomly(Base):
    """Detection-like lists, collated at random, with a mean for a sum."""

    def data(self, setup: TrialSetup) -> Data:
        class Lists(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return 90

            def __getitem__(self, index: int) -> Any:
                return INPUTS[index], LABELS[index]

        def noisy(samples: list[Any]) -> Any:
            return [x + 0.01 * torch.randn(8) for x, _ in samples], [y for _, y in samples]

        return Data(Lists(), Lists(), collate=noisy)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return Loss(
            nn.functional.cross_entropy(model(torch.stack(batch[0])), torch.stack(batch[1])), len(batch[1])
        )

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        return Score((model(torch.stack(batch[0])).argmax(-1) == torch.stack(batch[1])).sum(), len(batch[1]))


class RarelyWeighted(Base):
    """A class-weighted mean times n, with one sample in forty of the weighted class."""

    labels = (torch.arange(400) % 40 == 39).long()

    def data(self, setup: TrialSetup) -> Data:
        data = TensorDataset(INPUTS, self.labels)
        return Data(data, data)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        weights = torch.tensor([1.0, 20.0, 1.0]).to(inputs)
        return Loss(nn.functional.cross_entropy(model(inputs), labels, weights) * len(labels), len(labels))


class WeightedMeanOverCount(RarelyWeighted):
    """The same without the factor."""

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        made = super().loss(model, batch, setup)
        return Loss(made.total / made.denominator, made.denominator)


class Penalised(Base):
    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        made = super().loss(model, batch, setup)
        return Loss(
            made.total + 0.05 * sum(parameter.square().sum() for parameter in model.parameters()),
            made.denominator,
        )


class TwoMeans(Base):
    """The mean over samples, and a mean over counts that they bring, as DPO's loss and the chosen answer's tokens are."""

    counts = torch.arange(400.0) % 7 + 1

    def data(self, setup: TrialSetup) -> Data:
        data = TensorDataset(INPUTS, LABELS, self.counts)
        return Data(data, data)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels, counts = batch
        each = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        second = nn.functional.cross_entropy(model(inputs.flip(1)), labels, reduction="none")
        return Loss((each.mean() + (counts * second).sum() / counts.sum()) * len(labels), len(labels))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        return super().score(model, batch[:2], setup)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("task", "kind", "says"),
    [
        (Ramps, "state", "changes self.step"),
        (ClipsInHooks, "coupled", "gradient of a split step differs"),
        (MixesRandomly, "mean", "got their mean"),
        (RarelyWeighted, "weights", "weighted mean, such as by class weights"),
        (WeightedMeanOverCount, "weights", "weighted mean, such as by class weights"),
        (Penalised, "mean", "constant term"),
        (TwoMeans, "denominator", "the sum of means over different ones"),
    ],
)
def test_what_is_inexact_is_named_at_any_seed(task: type[Task], kind: str, says: str, seed: int) -> None:
    found = examination(task(), training={"seed": seed})
    assert found.verdict == "inexact", found
    assert kind in {finding.kind for finding in found.refusals}
    assert any(says in finding.message for finding in found.refusals), found.refusals


def test_what_cannot_be_compared_is_said_to_be_so() -> None:
    found = examination(Noisy())
    assert found.verdict == "not examined" and "cannot be held fixed" in found.note, found


def test_a_loss_of_another_model_is_refused() -> None:
    found = examination(UsesAnotherModel())
    assert "does not use its `model`" in found.note
    assert [finding.kind for finding in found.refusals] == ["beside"] and "self.net.weight" in found.refusals[
        0
    ].message


@pytest.mark.parametrize("task", [Base, Attention, FromMemory, Smoothed, ClipsInHooks])
def test_nothing_is_changed_by_it(task: type[Task]) -> None:
    own = task()
    before = copy.deepcopy(vars(own))
    run = TrainingRun(own, setup(20, 2, 200))
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    examined(run, 1)
    assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
    assert all(value.dtype == state[name].dtype for name, value in run.model.state_dict().items())
    assert all(parameter.grad is None for parameter in run.model.parameters())
    assert str(vars(own)) == str(before)
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, grad)
    losses = [m.train_loss for m in TrainingRun(own, setup(20, 2, 200)).measurements()]
    assert losses == [m.train_loss for m in TrainingRun(task(), setup(20, 2, 200)).measurements()]


def test_a_slow_step_is_compared_in_a_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    class Slow(Base):
        def losses(self, model: nn.Module, batch: Any) -> Tensor:
            passes.append(len(batch[1]))
            return super().losses(model, batch)

    monkeypatch.setattr("bsearch.objectives.examination.step._BUDGET_S", 1e-9)
    found = examination(Slow())
    assert found.verdict == "exact" and (found.samples, found.splits) == (2, 1)
    assert sum(passes) <= 16  # the census has 4 of them, two plans 6

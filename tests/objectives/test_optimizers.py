"""Optimizers by name: what each is given, and Muon beside AdamW as one optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.objectives.optimizers import OPTIMIZERS, MuonAdamW, hidden_matrices, named_optimizer
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.steps.rates import Stepped
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.record import TrialFacts
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import TrialSetup
from helpers import Net, setup
from torch import nn

DIGITS = "bsearch.objectives.digits:Digits"


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 9))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = torch.randint(0, 9, (5, 3), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sgd_is_fused_on_a_gpu_but_not_under_a_loss_scaler(precision: str) -> None:
    """Fused, an overflow in the first step leaves its momentum unwritten."""
    of_gpu = replace(setup(training={"precision": precision}), device="gpu")
    expected = None if precision == "fp16" else True
    assert named_optimizer(words(), of_gpu).param_groups[0]["fused"] is expected
    assert Net().optimizer(words(), of_gpu).param_groups[0]["fused"] is expected
    assert named_optimizer(words(), replace(of_gpu, device="cpu")).param_groups[0]["fused"] is None
    adam = replace(of_gpu, parameters={"optimizer": "adamw"})
    assert named_optimizer(words(), adam).param_groups[0]["fused"] is True


def test_a_skipped_first_step_spoils_no_momentum() -> None:
    """What the study trains with in fp16: the buffer of an overflowing first step is not read by the next."""
    model = words()
    optimizer = named_optimizer(model, replace(setup(training={"precision": "fp16"}), device="gpu"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for gradient in (math.inf, 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        scaler.step(optimizer)
        scaler.update()
    momentum = optimizer.state[next(model.parameters())]["momentum_buffer"]
    assert torch.equal(momentum, torch.full_like(momentum, 1 / 65536 * 2))


def test_muon_takes_hidden_matrices_alone() -> None:
    model = words()
    assert [tuple(one.shape) for one in hidden_matrices(model)] == [(16, 24)]
    model[2].weight.requires_grad_(False)
    assert hidden_matrices(model) == []


def test_muon_and_adamw_step_as_they_would_alone() -> None:
    made = setup(rate=0.01, parameters={"optimizer": "muon"})
    one, other = words(), words()
    both = named_optimizer(one, made)
    assert isinstance(both, MuonAdamW)
    matrix = hidden_matrices(other)
    rest = [parameter for parameter in other.parameters() if parameter is not matrix[0]]
    alone = [
        torch.optim.Muon(matrix, lr=0.01, weight_decay=made.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=made.weight_decay, betas=made.betas, eps=made.eps),
    ]
    for step in range(4):
        tokens = torch.randint(0, 9, (5, 3), generator=torch.Generator().manual_seed(step))
        for model, optimizers in ((one, [both]), (other, alone)):
            nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_state_of_both_goes_on_and_rates_reach_both() -> None:
    made = setup(rate=0.01, parameters={"optimizer": "muon"})
    through, cut = words(), words()
    first = named_optimizer(through, made)
    stepped(through, first, 2)
    second = named_optimizer(cut, made)
    cut.load_state_dict(through.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["lr"] = 0.005
    stepped(through, first, 2)
    stepped(cut, second, 2)
    assert all(torch.equal(a, b) for a, b in zip(through.parameters(), cut.parameters(), strict=True))
    still = [parameter.clone() for parameter in cut.parameters()]
    for group in second.param_groups:
        group["lr"] = 0.0
    stepped(cut, second, 1)
    assert all(torch.equal(a, b) for a, b in zip(still, cut.parameters(), strict=True))


def profile(optimizer: str) -> DeviceProfile:
    made = setup(1, parameters={"optimizer": optimizer})
    return profile_task(DIGITS, ProfileRequest(made, Memory(), highest=64))


@pytest.mark.parametrize(
    ("optimizer", "adaptive", "decoupled"),
    [
        ("sgd", False, False),
        ("adam", True, False),
        ("adamw", True, True),
        ("muon", False, True),
        ("adafactor", False, True),
    ],
)
def test_rules_know_what_an_optimizer_has(optimizer: str, adaptive: bool, decoupled: bool) -> None:
    known = profile(optimizer)
    assert (known.adaptive, known.decoupled_decay) == (adaptive, decoupled)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion", "lion_8bit"])
def test_those_of_bitsandbytes_too(optimizer: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    known = profile(optimizer)
    assert known.decoupled_decay
    assert known.adaptive == (optimizer == "adamw_8bit")


class Coupled(Net):
    dtype = torch.float32

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(
            model.parameters(), lr=setup.learning_rate, weight_decay=setup.weight_decay
        )


def test_decay_that_is_part_of_the_gradient_is_known() -> None:
    assert not profile_task(
        f"{__file__}:Coupled", ProfileRequest(setup(1), Memory(), highest=64)
    ).decoupled_decay


def test_eight_bits_are_a_quarter_of_the_state() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = {}
    for name in ("adamw", "adamw_8bit"):
        model = nn.Linear(256, 256, bias=False)
        optimizer = OPTIMIZERS[name](model, setup())
        model(torch.randn(2, 256)).sum().backward()
        optimizer.step()
        kept = [
            value for state in optimizer.state.values() for key, value in state.items() if "qmap" not in key
        ]
        sizes[name] = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    assert sizes["adamw_8bit"] == pytest.approx(sizes["adamw"] / 4, rel=0.05)


class Frozen(Net):
    dtype = torch.float32

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        return model

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)


def test_frozen_parameters_are_left_out_and_keep_their_values() -> None:
    run = TrainingRun(Frozen(), setup())
    frozen = run.model[0].weight  # type: ignore[index]
    before = frozen.clone()
    for _ in run.measurements():
        pass
    assert torch.equal(before, frozen)
    assert frozen.grad is None
    assert frozen not in run.optimizer.state
    assert len(run.optimizer.state) == 3


def test_a_model_without_hidden_matrices_is_told() -> None:
    with pytest.raises(
        TaskError, match=r"expected a model with matrices in hidden layers for muon, got Linear"
    ):
        named_optimizer(nn.Linear(3, 4), setup(parameters={"optimizer": "muon"}))


def recorded(
    optimizers: list[torch.optim.Optimizer], rates: list[list[float]]
) -> tuple[Mapping[str, Any], ...]:
    """What is recorded of optimizers after some steps."""
    seen = Stepped(optimizers, rates)
    for _ in range(3):
        seen.check()
    return TrialFacts(extra=seen.facts(0.0)).groups


def parameter(size: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size))]


def test_a_group_that_is_added_later_is_read_with_the_rate_it_came_with() -> None:
    optimizer = torch.optim.SGD(parameter(5), lr=0.1, momentum=0.9)
    seen = Stepped([optimizer], [[0.1]])
    seen.check()
    optimizer.add_param_group({"params": parameter(2), "lr": 0.01})
    first, second = TrialFacts(extra=seen.facts(0.0)).groups
    assert (first["lr"], first["parameters"], second["lr"], second["parameters"]) == (0.1, 5, 0.01, 2)


def test_a_group_of_another_optimizer_has_its_own_settings_alone() -> None:
    adam, sgd = torch.optim.AdamW(parameter(5), lr=0.1), torch.optim.SGD(parameter(), lr=0.1, momentum=0.8)
    first, second = recorded([adam, sgd], [[0.1], [0.1]])
    assert (first["optimizer"], second["optimizer"], second["momentum"]) == ("AdamW", "SGD", 0.8)
    assert first["lr"] == second["lr"] == 0.1
    assert "betas" in first and "betas" not in second


def test_settings_of_numpy_and_tensors_are_numbers() -> None:
    optimizer = torch.optim.AdamW(
        parameter(), lr=torch.tensor(0.1), weight_decay=np.float32(0.25), foreach=False
    )
    (group,) = recorded([optimizer], [[0.1]])
    assert group["weight_decay"] == 0.25


def test_a_setting_that_a_schedule_turns_back_is_a_range() -> None:
    optimizer = torch.optim.SGD(parameter(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    seen = Stepped([optimizer], [[0.1]])
    for step in range(20):
        seen.check()
        optimizer.step()
        if step < 19:
            schedule.step()
    assert TrialFacts(extra=seen.facts(0.0)).groups[0]["momentum"].startswith("0.8")

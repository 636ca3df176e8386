"""Optimizers by name, for the ready tasks; and what rules and sharding have to know of any optimizer."""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from numbers import Real
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ..spaces.errors import TaskError, near_miss
from ..spaces.learning_rate import LION_BETAS
from ..spaces.trial import TrialSetup


def named_optimizer(model: nn.Module, setup: TrialSetup, default: str = "sgd") -> Optimizer:
    """The optimizer named by the parameter `optimizer`, with the settings of the rule; on a GPU one fused kernel.

    Raises:
        TaskError: an unknown name, or a package that is not installed.
    """
    name = str(setup.parameters.get("optimizer", default))
    if name not in OPTIMIZERS:
        raise TaskError(
            f"space.optimizer: expected one of {', '.join(OPTIMIZERS)}; got {name!r}.{near_miss(name, OPTIMIZERS)}"
        )
    return OPTIMIZERS[name](model, setup)


def _of_all_parameters(
    kind: Callable[..., Any] | str, *settings: Callable[[TrialSetup], dict[str, Any]]
) -> Callable[[nn.Module, TrialSetup], Optimizer]:
    """A function that makes an optimizer, of torch or by its name of bitsandbytes, with rate, decay and these settings."""

    def made(model: nn.Module, setup: TrialSetup) -> Optimizer:
        options = {
            name: value for part in (_rate_and_decay, *settings) for name, value in part(setup).items()
        }
        optimizer: Optimizer = (_bitsandbytes(kind) if isinstance(kind, str) else kind)(
            model.parameters(), **options
        )
        return optimizer

    return made


def _muon(model: nn.Module, setup: TrialSetup) -> Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise TaskError(f"space.optimizer: muon needs torch 2.9 or newer, got {torch.__version__}")
    matrices = hidden_matrices(model)
    if not matrices:
        raise TaskError(
            f"space.optimizer: expected a model with matrices in hidden layers for muon, got {type(model).__name__}. Use adamw."
        )
    of_muon = {id(matrix) for matrix in matrices}
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and id(parameter) not in of_muon
    ]
    # With this factor a matrix's update is as large as AdamW's, so that both share one rate: Liu et al. 2025, arXiv 2502.16982.
    parts: list[Optimizer] = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **_rate_and_decay(setup))
    ]
    if others:
        parts.append(torch.optim.AdamW(others, **_betas(setup), **_fused(setup), **_rate_and_decay(setup)))
    return MuonAdamW(parts)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable weights of two dimensions that are neither of an embedding nor of the last linear layer: Muon's parameters.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    left_out = embeddings | {id(weight) for weight in linear[-1:]}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in left_out
    ]


class Joined(Optimizer):
    """Several optimizers, each with its own parameters, as one: their groups and their state are this one's."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self._parts = list(parts)
        self._sizes = [len(part.param_groups) for part in parts]
        super().__init__(list(chain.from_iterable(part.param_groups for part in parts)), {})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)([copy.deepcopy(part, memo) for part in self._parts])

    @property
    def parts(self) -> Sequence[Optimizer]:
        """The joined optimizers."""
        return self._parts

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part, size in zip(self._parts, self._sizes, strict=True):
            part.param_groups = [next(groups) for _ in range(size)]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; closures are not supported."""
        for part in self._parts:
            part.step()


class MuonAdamW(Joined):
    """Muon for hidden matrices, AdamW for what is left."""


def shown_kind(*optimizers: Optimizer) -> str:
    """The names of optimizers' classes; of joined ones, their parts'."""
    parts = [part for each in optimizers for part in (each.parts if type(each) is Joined else [each])]
    return ", ".join(dict.fromkeys(map(_kind, parts)))


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What each group steps with: its optimizer's class, its number of parameters, and all numbers, flags and pairs."""
    parts = optimizer.parts if isinstance(optimizer, Joined) else [optimizer]
    return [
        {
            "optimizer": _kind(part),
            "parameters": sum(parameter.numel() for parameter in group["params"]),
            **{name: plain for name, value in group.items() if (plain := _plain(value)) is not None},
        }
        for part in parts
        for group in part.param_groups
    ]


def main_first(groups: Sequence[Mapping[str, Any]], decay: float) -> list[Mapping[str, Any]]:
    """Groups with the one first that speaks for all: the largest with the study's weight decay, if it has one, else of all."""
    return sorted(
        groups, key=lambda group: (decay == 0 or group.get("weight_decay") != decay, -group["parameters"])
    )


def _plain(value: Any) -> Any:
    """A setting as JSON has it; None where it is no number, no flag and no sequence of them."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        with suppress(RuntimeError):  # one that is traced has no value
            return value.item()
    if isinstance(value, Real) and not isinstance(value, int):
        return float(value)  # NumPy's too
    if isinstance(value, tuple | list):
        each = [_plain(part) for part in value]
        return each if each and all(isinstance(part, int | float) for part in each) else None
    return value if isinstance(value, int) else None


# What rules and sharding have to know of any optimizer

# Their weight decay is part of the gradient.
_COUPLED = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "ASGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Rprop", "LBFGS")
)
# Their update reads a whole parameter, or DTensor cannot do it in place.
_OF_WHOLE_PARAMETERS = ("Adafactor", "Muon", "MuonAdamW", "AdamW8bit", "Lion", "Lion8bit")


def has_adams_betas(optimizer: Optimizer) -> bool:
    """Whether it has betas that rules may scale: Lion's are of another kind, and Muon has a momentum beside AdamW's."""
    return any("betas" in group for group in optimizer.param_groups) and not _kind(optimizer).startswith(
        ("Lion", "Muon")
    )


def decouples_decay(optimizer: Optimizer) -> bool:
    """Whether weight decay is decoupled from the gradient, in some group: torch's optimizers that do not say add it to it."""
    default = not isinstance(optimizer, _COUPLED)
    return any(group.get("decoupled_weight_decay", default) for group in optimizer.param_groups)


def takes_shards(optimizer: Optimizer) -> bool:
    """Whether it can update shards of parameters."""
    return _kind(optimizer) not in _OF_WHOLE_PARAMETERS


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` requires a closure that re-evaluates the loss: one without a default, or asserted not to be None."""
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and (closure.default is inspect.Parameter.empty or _asserts_closure(step))


def _asserts_closure(step: Callable[..., Any]) -> bool:
    """Whether it says `assert closure is not None`, as the best-known implementation of sharpness-aware minimisation does."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(
        isinstance(node, ast.Assert) and ast.unparse(node.test) == "closure is not None"
        for node in ast.walk(tree)
    )


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that an optimizer keeps as attributes, such as the base of sharpness-aware minimisation, by name."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state with that of optimizers inside it, which `state_dict` leaves out."""
    inside = {name: inner.state_dict() for name, inner in inner_optimizers(optimizer).items()}
    return {**optimizer.state_dict(), **({"inside": inside} if inside else {})}


def load_whole_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `whole_state` returned; optimizers inside it share its groups, and its state, as before."""
    places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
    shared = {
        name: ([places[id(group)] for group in inner.param_groups], inner.state is optimizer.state)
        for name, inner in inner_optimizers(optimizer).items()
    }
    optimizer.load_state_dict({name: value for name, value in state.items() if name != "inside"})
    for name, inner in inner_optimizers(optimizer).items():
        groups, state_too = shared[name]
        inner.load_state_dict(state["inside"][name])
        inner.param_groups = [optimizer.param_groups[place] for place in groups]
        if state_too:
            inner.state = optimizer.state


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


# The settings of each


def _rate_and_decay(setup: TrialSetup) -> dict[str, Any]:
    return {"lr": setup.learning_rate, "weight_decay": setup.weight_decay}


def _betas(setup: TrialSetup) -> dict[str, Any]:
    return {"betas": setup.betas, "eps": setup.eps}


def _lion_betas(setup: TrialSetup) -> dict[str, Any]:
    return {"betas": LION_BETAS}


def _momentum(setup: TrialSetup) -> dict[str, Any]:
    return {"momentum": 0.9, "nesterov": True, "fused": fuses_sgd(setup)}


def _fused(setup: TrialSetup) -> dict[str, Any]:
    return {"fused": setup.device == "gpu" or None}


def fuses_sgd(setup: TrialSetup) -> bool | None:
    """Whether SGD with momentum is one fused kernel; None: torch decides.

    Not in fp16: where the loss scaler finds an overflow in the first step, the fused kernel leaves the momentum that torch has
    just allocated unwritten, and the next step reads it (torch 2.11 and 2.14).
    """
    return (setup.device == "gpu" and setup.training.precision != "fp16") or None


# Classes of bitsandbytes by the study's names.
_OF_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "lion": "Lion", "lion_8bit": "Lion8bit"}


def _bitsandbytes(name: str) -> Any:
    # It warns of kernels that these optimizers do not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        from bitsandbytes import optim
    except ImportError:
        raise TaskError(f"space.optimizer: {name} needs bitsandbytes: pip install bitsandbytes") from None
    return getattr(optim, _OF_BITSANDBYTES[name])


OPTIMIZERS: dict[str, Callable[[nn.Module, TrialSetup], Optimizer]] = {
    "sgd": _of_all_parameters(torch.optim.SGD, _momentum),
    "adam": _of_all_parameters(torch.optim.Adam, _betas, _fused),
    "adamw": _of_all_parameters(torch.optim.AdamW, _betas, _fused),
    "adamw_8bit": _of_all_parameters("adamw_8bit", _betas),
    "adafactor": _of_all_parameters(torch.optim.Adafactor),
    "lion": _of_all_parameters("lion", _lion_betas),
    "lion_8bit": _of_all_parameters("lion_8bit", _lion_betas),
    "muon": _muon,
}

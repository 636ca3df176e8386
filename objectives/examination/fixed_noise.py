"""Random draws held fixed, the same for every sample, so that a step can be compared with its splits.

A loss that draws random numbers, as dropout, variational autoencoders and diffusion do, differs between a batch and its parts
by what was drawn. With draws that do not depend on a sample's place in its batch, only the arithmetic is left.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..machine.accelerator import widest_float

# `rows`: a number depends on its place within its sample (dimensions after the first); `constant`: all are the same.
NoisePattern = Literal["rows", "constant"]

_DROPOUT = frozenset(
    name + suffix
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
) | {"dropout1d", "dropout2d", "dropout3d"}
# Functions with an argument that turns on dropout or the like: its position, its name and the value that turns it off.
_SWITCHES: dict[str, tuple[int, str, Any]] = {
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
    # A function of Python, whose own calls do not come by here.
    "multi_head_attention_forward": (
        10,
        "dropout_p",
        0.0,
    ),
    "rrelu": (3, "training", False),
}
_SHAPED = ("rand", "randn", "randint", "normal")
_IN_PLACE = (
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "cauchy_",
    "log_normal_",
    "geometric_",
)


class FixedNoise(TorchFunctionMode):
    """Inside, dropout is off and torch's random draws are fixed.

    Args:
        noise: how draws depend on their place; None: they are drawn as usual, and only dropout is off.
    """

    def __init__(self, noise: NoisePattern | None) -> None:
        super().__init__()
        self.noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if name in _SWITCHES:
            place, keyword, off = _SWITCHES[name]
            if len(args) > place:
                args = (*args[:place], off, *args[place + 1 :])
            else:
                kwargs = {**kwargs, keyword: off}
        if self.noise is None:
            return func(*args, **kwargs)
        if name == "randperm":
            return torch.arange(args[0] if args else kwargs["n"], device=kwargs.get("device"))
        if name == "multinomial":
            weights, count = _first_two(args, kwargs, ("input", "num_samples"), (None, None))
            return func(*args, **kwargs) if count > weights.shape[-1] else weights.topk(count).indices
        if (
            name in _IN_PLACE
            or name == "bernoulli"
            or name in _SHAPED
            or name.removesuffix("_like") in _SHAPED
        ):
            with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]):
                # Drawn with a fixed seed, so that integers stay in the requested range.
                _seed_torch(0)
                drawn = func(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
                return self._given(name, drawn, args, kwargs)
        return func(*args, **kwargs)

    def _given(self, name: str, drawn: Tensor, args: Any, kwargs: Any) -> Tensor:
        """The drawn tensor, overwritten with fixed numbers.

        Uniform, normal and Bernoulli keep their parameters; exponential and log-normal are standard; others are uniform in
        (0, 1). Integers keep their range.
        """
        with torch.no_grad():
            uniform = self._uniform(drawn)
            match name.removesuffix("_like").removesuffix("_"):
                case "rand":
                    values = uniform
                case "uniform":
                    low, high = _first_two(args[1:], kwargs, ("from", "to"), (0.0, 1.0))
                    values = low + (high - low) * uniform
                case "randn":
                    values = _normal(uniform)
                case "normal":
                    mean, std = _first_two(args[name == "normal_" :], kwargs, ("mean", "std"), (0.0, 1.0))
                    values = mean + std * _normal(uniform)
                case "log_normal":
                    values = torch.exp(_normal(uniform))
                case "bernoulli":
                    given, probability = _first_two(args, kwargs, ("input", "p"), (None, None))
                    if probability is None:
                        probability = given if name == "bernoulli" else 0.5
                    values = (uniform < probability).to(drawn.dtype)
                case "exponential":
                    values = -torch.log1p(-uniform)
                case "randint" | "random":
                    values = drawn  # below, every sample gets the first one's
                case _:
                    values = uniform
            if name.startswith(("randint", "random")) and drawn.dim():
                rows = self.noise == "rows" and drawn.dim() > 1
                values = (
                    (drawn[:1] if rows else drawn.flatten()[:1].reshape([1] * drawn.dim()))
                    .expand_as(drawn)
                    .clone()
                )
            drawn.copy_(values)
        return drawn

    def _uniform(self, like: Tensor) -> Tensor:
        """Numbers in (0, 1) of a tensor's shape, the same for every index of the first dimension."""
        size = math.prod(like.shape[1:]) if self.noise == "rows" else 1
        # Multiples of the golden ratio, modulo 1: evenly spread for any number of them.
        row = (torch.arange(1, size + 1, dtype=torch.float64) * 0.6180339887498949) % 1.0
        row = row.to(like.device, widest_float(like.device))
        return (
            row.view(1, *like.shape[1:])
            if self.noise == "rows" and like.dim()
            else row.view([1] * like.dim())
        ).expand(like.shape)


def _normal(uniform: Tensor) -> Tensor:
    return math.sqrt(2) * torch.erfinv(2 * uniform.clamp(1e-6, 1 - 1e-6) - 1)


def _first_two(args: Any, kwargs: Any, names: tuple[str, str], usual: tuple[Any, Any]) -> tuple[Any, Any]:
    """The first two arguments, by position or by name."""
    first = args[0] if args else kwargs.get(names[0], usual[0])
    second = args[1] if len(args) > 1 else kwargs.get(names[1], usual[1])
    return first, second


@contextmanager
def fixed_noise(noise: NoisePattern | None, model: nn.Module) -> Iterator[None]:
    """Disable torch's dropout and fix its random draws; compiled code runs eagerly meanwhile."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase) and module.dropout]
    dropouts = [module.dropout for module in recurrent]
    with ExitStack() as stack:
        stack.enter_context(FixedNoise(noise))
        if "torch._dynamo" in sys.modules:  # importing it takes seconds, and nothing is compiled without
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if noise is not None:
            stack.enter_context(patch("numpy.random.permutation", _unshuffled))
            stack.enter_context(patch("numpy.random.shuffle", lambda values: None))
            stack.enter_context(patch("random.shuffle", lambda values: None))
        for module in recurrent:
            module.dropout = 0.0
        try:
            yield
        finally:
            for module, dropout in zip(recurrent, dropouts, strict=True):
                module.dropout = dropout


def _unshuffled(values: Any) -> np.ndarray:
    return np.arange(values) if isinstance(values, int | np.integer) else np.array(values)


def seed_draws(seed: int) -> None:
    """Seed the generators that a loss may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    _seed_torch(seed)


def _seed_torch(seed: int) -> None:
    """Seed the generators that are in use: the CPU's, and those of accelerators.

    `torch.manual_seed` also queues a seed, with a formatted stack, for every kind of device that torch knows and that is not
    in use yet: 0.1 to 0.3 ms a call, and an examination makes hundreds. Whatever draws on a GPU here has put its model there.
    """
    built_for = torch.accelerator.current_accelerator()  # asks no driver
    if built_for is None or (built_for.type == "cuda" and not torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)

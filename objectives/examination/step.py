"""One real training step, unsplit and in random uneven splits: the gradients must agree up to rounding."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...spaces.laws.examination import Finding
from ..data.batches import leaves, with_tensors
from ..model.batch_norm import batch_norms
from ..model.buffers import KeptBuffers
from .fixed_noise import NoisePattern, fixed_noise, seed_draws

# Ways to split the step that is compared.
SPLITS = 3
# Target time of the comparison, in seconds.
_BUDGET_S = 2.0
# Passes over all of its samples.
_PASSES = 10
# Samples that tell most causes apart.
_TELLING = 8
# Tolerance relative to the gradient: the measured rounding (the same step, samples reordered) times this factor, within these
# bounds, because double-precision models may have single-precision layers. Real faults differ by percents.
_ROUNDING = 100.0
_BOUNDS = (2e-5, 1e-3)
# The same under autocast, whose gradients are rounded to eight bits in every micro-batch.
AUTOCAST_TOLERANCE = 3e-2
# Numbers that are compared at once, since a model's gradient may take gigabytes.
_CHUNK = 2**22
# A change of the gradient by buffers that a forward pass moves, as spectral norm's are, from which on it is another training.
_MOST_MOVED = 2e-2
# Trainable parameters are perturbed by this share of their size, since zeros, as in a new adapter, have gradients of zero.
_PERTURBATION = 0.02

Indices = np.ndarray  # of samples among those that are compared, (n,) int64


@dataclass(frozen=True, slots=True)
class Step:
    """The training step that is compared, whichever loop runs it.

    Args:
        model: whose parameters may be changed.
        batch: the collated batch of some of the samples, on the model's device.
        accumulate: back-propagates micro-batches of (samples, batch), as a trial does; returns the step's mean loss.
        dtype: of parameters and inputs; None: as they are, under the study's autocast.
        held: tensors that the user's code keeps beside the model, by name.
        sliced: the same as `batch`, but a slice of one collated batch; None where collating draws no random numbers.
    """

    model: nn.Module
    batch: Callable[[Indices], Any]
    accumulate: Callable[[Sequence[tuple[int, Any]]], Tensor]
    dtype: torch.dtype | None
    held: Callable[[], dict[str, Tensor]] = dict
    sliced: Callable[[Indices], Any] | None = None

    def gradient(
        self,
        parts: Sequence[Indices],
        noise: NoisePattern | None,
        seed: int = 0,
        *,
        moves_buffers: bool = False,
    ) -> tuple[Tensor, float]:
        """The step's gradient over these micro-batches as one vector, and its mean loss; restores the model's state.

        Args:
            moves_buffers: each micro-batch finds the buffers as the one before left them, as in a trial.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.grad = None
        with restored(self.model), fixed_noise(noise, self.model):
            buffers = None if moves_buffers else KeptBuffers(self.model)
            micro_batches = [(len(part), _seeded(partial(self.batch, part), seed, buffers)) for part in parts]
            loss = float(self.accumulate(micro_batches))
        # Several of these are kept in host memory: no wider than the gradient, and filled in place.
        dtype = (
            torch.float64
            if any(parameter.dtype == torch.float64 for parameter in parameters)
            else torch.float32
        )
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), dtype=dtype)
        for parameter, place in zip(parameters, torch.split(flat, sizes), strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                place.copy_(gradient.detach().flatten())
            parameter.grad = None
        return flat, loss


class NothingToCompare(Exception):
    """The samples that were chosen give no gradient."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the gradients of split steps compare with that of the unsplit step.

    Args:
        difference: the largest relative difference.
        tolerance: the largest difference that counts as rounding.
        random: whether the loss draws random numbers.
        repeats: whether the unsplit step gives the same gradient again, from the same state and seed.
        fixed: whether its gradient is the same from another seed, with the draws held fixed as far as they can be.
    """

    difference: float
    tolerance: float
    random: bool = False
    repeats: bool = True
    fixed: bool = True

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class Effort:
    """What can be compared in a second or two.

    Args:
        samples: in the step.
        splits: ways to split it.
        brief: a step takes so long that rounding is not measured, nor looked for what else the loss does.
    """

    samples: int
    splits: int
    brief: bool


def affordable(step: Step, most: int, smallest: int) -> Effort:
    """How much can be compared in a second or two: at least one split of two of the smallest micro-batches."""
    fewest = 2 * smallest
    took: list[float] = []
    with frozen_norms(step.model):
        while len(took) < 2 and sum(took) < _BUDGET_S:  # the first may be slow
            started = time.perf_counter()
            step.gradient([np.arange(fewest)], "rows")
            took.append(time.perf_counter() - started)
    took_s = min(took)
    # Of samples that take little, some more are worth a wait: a cause shows in no two of them.
    least = fewest if took_s * _TELLING > fewest * _BUDGET_S else max(fewest, _TELLING)
    samples = min(max(int(fewest * _BUDGET_S / (_PASSES * took_s)), least), most)
    slow = _PASSES * took_s > 2 * _BUDGET_S
    return Effort(samples, 1 if slow else SPLITS, brief=slow)


def compared(step: Step, smallest: int, seed: int, effort: Effort) -> Comparison:
    """Compare the step with random uneven splits into micro-batches of at least `smallest`.

    BatchNorm normalises by its running statistics meanwhile.

    Raises:
        FloatingPointError: the loss or its gradient is not finite.
        NothingToCompare: the gradient is zero.
    """
    everything = np.arange(effort.samples)
    splits = [uneven_parts(effort.samples, smallest, seed + number) for number in range(effort.splits)]
    with frozen_norms(step.model):
        whole, loss = step.gradient([everything], "rows")
        if not (math.isfinite(loss) and bool(torch.isfinite(whole).all())):
            raise FloatingPointError("the loss or its gradient is not finite")
        if not whole.any():
            raise NothingToCompare(
                "the samples that were compared have no gradient, or the loss does not use its `model`"
            )
        rounding = (
            1.0
            if effort.brief
            else relative_difference(step.gradient([everything[::-1].copy()], "rows")[0], whole)
        )
        tolerance = _tolerance(step.dtype, rounding)
        difference = _largest_difference(step, splits, "rows", whole)
        if difference <= tolerance:
            drawn = (
                [] if effort.brief else [step.gradient([everything], None, seed=each)[0] for each in (0, 1)]
            )
            return Comparison(difference, tolerance, random=bool(drawn) and not torch.equal(*drawn))
        if step.sliced is not None:
            alike = _largest_difference(replace(step, batch=step.sliced), splits, "rows")
            if alike <= tolerance:
                return Comparison(alike, tolerance)
        constant = _largest_difference(step, splits, "constant")
        if constant <= tolerance:
            return Comparison(constant, tolerance, random=True)
        again, elsewhere = (step.gradient([everything], "rows", seed=each)[0] for each in (0, 1))
    repeats = relative_difference(again, whole) <= tolerance
    return Comparison(
        difference, tolerance, repeats=repeats, fixed=relative_difference(elsewhere, whole) <= tolerance
    )


def _largest_difference(
    step: Step, splits: Sequence[Sequence[Indices]], noise: NoisePattern, whole: Tensor | None = None
) -> float:
    """Of the gradients of split steps from that of the unsplit one, which is computed if it is not given."""
    if whole is None:
        whole, _ = step.gradient([np.concatenate(splits[0])], noise)
    return max(relative_difference(step.gradient(parts, noise)[0], whole) for parts in splits)


def batch_norm_findings(step: Step, samples: int, smallest: int, seed: int) -> Iterator[Finding]:
    """How far BatchNorm in training mode makes a split step differ."""
    smallest = max(smallest, 2)
    if samples < 2 * smallest or not any(norm.training for norm in batch_norms(step.model)):
        return
    whole, _ = step.gradient([np.arange(samples)], "rows")
    parts = uneven_parts(samples, smallest, seed)
    off = relative_difference(step.gradient(parts, "rows")[0], whole)
    sizes = " + ".join(str(len(part)) for part in parts)
    text = f"normalises over the micro-batch, not the step: splitting {samples} samples as {sizes} changes the gradient by "
    text += f"{off:.2g} (relative)"
    yield Finding("batch_norm", "BatchNorm", text, off)


def coupling_layer(step: Step, samples: int) -> str:
    """The first layer whose output for a sample depends on the others, by name and class; empty where there is none."""
    half = samples // 2
    with frozen_norms(step.model):
        whole, part = (_outputs(step, np.arange(count)) for count in (samples, half))
    for (name, output), (other, alone) in zip(whole, part, strict=False):
        if name != other:
            break
        if len(output) == samples and len(alone) == half and output.shape[1:] == alone.shape[1:]:
            scale = float(output.abs().max()) or 1.0
            if float((output[:half] - alone).abs().max()) > 1e-4 * scale:
                return name
    return ""


def is_padded(step: Step, samples: int) -> bool:
    """Whether batches are padded: tensors of other shapes, samples aside, for fewer samples."""
    whole, *others = (
        [leaf.shape[1:] for leaf in leaves(step.batch(index)) if isinstance(leaf, Tensor) and leaf.dim() > 1]
        for index in (np.arange(samples), *np.array_split(np.arange(samples), min(samples, 6)))
    )
    return any(other != whole for other in others)


def _outputs(step: Step, index: Indices) -> list[tuple[str, Tensor]]:
    """What each layer returned for these samples, in order; layers that return no tensor are left out."""
    outputs: list[tuple[str, Tensor]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() and output.is_floating_point():
                outputs.append((f"{name!r} ({type(module).__name__})", output.detach().clone()))

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in step.model.named_modules() if name]
    try:
        step.gradient([index], "rows")
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def state_findings(step: Step, samples: int, where: str) -> Iterator[Finding]:
    """State other than gradients that the loss changes, once per micro-batch.

    Refused are changes of parameters, and of tensors that the user's code keeps in modules or in a parameter's shape, such as
    averaged weights. Others, such as a running loss for a log, change no training by themselves.
    """
    norms = {id(buffer) for norm in batch_norms(step.model) for buffer in norm.buffers()}
    everything = np.arange(samples)
    shapes = {parameter.shape for parameter in step.model.parameters() if parameter.numel() > 1}
    with restored(step.model):
        versions = {name: parameter._version for name, parameter in step.model.named_parameters()}
        buffers = {
            name: value.clone() for name, value in step.model.named_buffers() if id(value) not in norms
        }
        with fixed_noise("rows", step.model):
            step.accumulate([(samples, _seeded(partial(step.batch, everything), 0))])
            held = {name: tensor.detach().clone() for name, tensor in step.held().items()}
            step.accumulate([(samples, _seeded(partial(step.batch, everything), 0))])
        changed = [
            name for name, parameter in step.model.named_parameters() if parameter._version != versions[name]
        ]
        now = dict(step.model.named_buffers())
        updated = [name for name, value in buffers.items() if name not in now or not _same(now[name], value)]
        for name, tensor in step.held().items():
            if name in held and not _same(tensor, held[name]):
                (changed if "." in name.removeprefix("self.") or tensor.shape in shapes else updated).append(
                    name
                )
    for parameter in step.model.parameters():
        parameter.grad = None
    if changed:
        yield Finding("state", where, state_message(changed[0]))
    if updated:
        parts = [everything[: samples // 2], everything[samples // 2 :]]
        whole, split = (step.gradient(each, "rows", moves_buffers=True)[0] for each in ([everything], parts))
        off = relative_difference(split, whole)
        text = f"the forward pass updates tensors once per micro-batch: {listed(updated)}. Splitting {samples} samples in "
        text += f"halves changes the gradient by {off:.2g} (relative)"
        if off > _MOST_MOVED:
            text += ". What counts steps belongs in after_step(self, model, setup)."
        yield Finding("state" if off > _MOST_MOVED else "buffers", where, text, off)


def listed(names: Sequence[str]) -> str:
    """The first few names, in a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def state_message(name: str, *, of_loop: bool = False) -> str:
    """The message on what a loss changes that it should not, or the body of a loop."""
    if of_loop:
        return (
            f"expected a step that is the same where it is taken again, got one that changes {name}. What counts steps is "
            "step.number, or step.fraction of the training; other state belongs in a buffer of a model, or in state={...}."
        )
    return (
        f"expected a loss without side effects, got one that changes {name}: it runs once per micro-batch, so the number of "
        "updates depends on the split. To average weights, write training: {ema: 0.999}; what else happens once per step "
        "belongs in after_step(self, model, setup)."
    )


def uneven_parts(samples: int, smallest: int, seed: int) -> list[Indices]:
    """Random consecutive parts, two to five of them, of different sizes where possible, none below `smallest`.

    >>> [len(part) for part in uneven_parts(24, 2, 0)]
    [6, 2, 5, 4, 7]
    """
    generator = np.random.default_rng(seed)
    count = min(2 + int(generator.integers(0, 4)), samples // max(smallest, 1))
    spare = samples - count * smallest
    # Cuts of the spare samples; one sample moves where all parts came out alike.
    extra = np.diff(np.concatenate([[0], np.sort(generator.integers(0, spare + 1, count - 1)), [spare]]))
    if count > 1 and len(set(extra)) == 1 and extra[0]:
        extra[0], extra[-1] = extra[0] + 1, extra[-1] - 1
    ends = np.cumsum(extra + smallest)
    return np.split(np.arange(samples), ends[:-1])


def perturb(model: nn.Module) -> None:
    """Perturb trainable parameters slightly and reproducibly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                scale = float(parameter.double().pow(2).mean().sqrt()) if parameter.numel() else 0.0
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((noise * _PERTURBATION * (scale or 1.0)).to(parameter))


def in_precision(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating-point tensors in a precision; None: as they are."""
    if dtype is None:
        return batch
    return with_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore parameters, buffers and training modes on exit.

    Frozen parameters, which a loop may move as a teacher's, are kept where they are no more than the trained ones.
    """
    kept = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if sum(parameter.numel() for parameter in frozen) <= sum(parameter.numel() for parameter in kept):
        kept += frozen
    before, buffers = [(tensor, tensor.detach().clone()) for tensor in kept], KeptBuffers(model)
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                if not _same(tensor, value):
                    tensor.copy_(value)
        buffers.put_back()
        for module, mode in modes:
            module.training = mode


@contextmanager
def frozen_norms(model: nn.Module) -> Iterator[None]:
    """BatchNorm normalises by its running statistics, where it keeps them."""
    norms = [norm for norm in batch_norms(model) if norm.training and norm.running_mean is not None]
    try:
        for norm in norms:
            norm.training = False
        yield
    finally:
        for norm in norms:
            norm.training = True


def attribute_tensors(owner: Any) -> dict[str, Tensor]:
    """All tensors among an object's attributes, in containers and modules, by name."""
    found: dict[str, Tensor] = {}
    for name, value in vars(owner).items():
        for number, leaf in enumerate(leaves(value)):
            if isinstance(leaf, nn.Module):
                found |= {
                    f"self.{name}.{inner}": tensor
                    for inner, tensor in (*leaf.named_parameters(), *leaf.named_buffers())
                }
            elif isinstance(leaf, Tensor):
                found[f"self.{name}" if leaf is value else f"self.{name}[{number}]"] = leaf
    return found


def _seeded(batch: Callable[[], Any], seed: int, buffers: KeptBuffers | None = None) -> Callable[[], Any]:
    """Fetches the batch, puts buffers back, and seeds what collating and the loss may draw."""

    def fetched() -> Any:
        seed_draws(seed)  # of collating
        made = batch()
        if buffers is not None:
            buffers.put_back()
        seed_draws(seed)
        return made

    return fetched


def sums(tensor: Tensor) -> tuple[float, float]:
    """What tells a tensor's values from others: an optimizer may move them without their version."""
    with torch.no_grad():
        values = tensor.detach().to(torch.float64) if tensor.device.type != "mps" else tensor.detach().float()
        return float(values.sum()), float(values.square().sum())


def relative_difference(gradient: Tensor, other: Tensor) -> float:
    """Relative to the second's norm; 0 where both vanish."""
    return differing([gradient], [other])


def differing(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The norm of the difference of all tensors, relative to that of the others; 0 where both vanish."""
    off = scale = 0.0
    for tensor, other in zip(tensors, others, strict=True):
        for part, of_other in zip(
            torch.split(tensor.flatten(), _CHUNK), torch.split(other.flatten(), _CHUNK), strict=True
        ):
            off = math.hypot(off, float((part.double() - of_other.double()).norm()))
            scale = math.hypot(scale, float(of_other.double().norm()))
    return off / scale if scale else float(off > 0)


def _tolerance(dtype: torch.dtype | None, rounding: float) -> float:
    if dtype is None:
        return AUTOCAST_TOLERANCE
    low, high = _BOUNDS
    return min(max(_ROUNDING * rounding, low), high)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(
        torch.nan_to_num(tensor.detach()), torch.nan_to_num(other)
    )

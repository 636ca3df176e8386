"""The memory law: peak bytes of a step as a function of the micro-batch, and the largest micro-batch under a limit.

The peak is the maximum over the phases of a step, each linear in the micro-batch, so the curve is convex and piecewise
linear. Interpolating between two known sizes therefore never underestimates the peak, but extrapolating beyond the largest
does. So sizes are looked up or interpolated, never extrapolated.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from ..errors import ProfilingError, cut

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": int(base**power)
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

# Where memory hardly grows with the size, measurements say nothing of the slope.
_LEAST_SCALE = 0.01

# The parts of a training step's memory; the last is what a GPU's allocator holds beside them. Evaluation has no gradients, and
# is measured separately.
PARTS = (
    "parameters",
    "gradients",
    "optimizer state",
    "weight average",
    "batch",
    "resident data",
    "activations",
    "workspace",
    "reserved but unused",
)


def bytes_of(text: str) -> int:
    """Parse a number of bytes in decimal or binary units.

    Raises:
        ValueError: not a number of bytes.

    >>> bytes_of("10GiB"), bytes_of("1.5 GB"), bytes_of("512")
    (10737418240, 1500000000, 512)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or len(match[1]) > 20:
        raise ValueError(text)
    return round(float(match[1]) * _UNITS[match[2].lower()])


def check_points(name: str, points: Sequence[tuple[int, float]]) -> None:
    """Check that a law has at least one point, ascending sizes >= 1, and finite values >= 0.

    Raises:
        ProfilingError: it does not, so it cannot be interpolated.
    """
    sizes = [0, *(size for size, _ in points)]
    if len(sizes) == 1 or any(low >= high for low, high in pairwise(sizes)):
        raise ProfilingError(
            f"{name}: expected points at ascending sizes >= 1, got {cut(str(sizes[1:]), 100)}"
        )
    if wrong := [value for _, value in points if not 0 <= value < math.inf]:
        raise ProfilingError(f"{name}: expected finite numbers >= 0, got {wrong[0]}")


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Peak bytes of training by micro-batch, predicted at some sizes and calibrated by measurements.

    Args:
        points: predicted peak bytes by micro-batch, ascending.
        source: "traced" without running anything, or "counted" on real tensors where tracing was not possible.
        scale, fixed_bytes: calibration by measurements: peak = predicted x scale + fixed. It covers what a trace cannot see,
            such as the workspaces of kernels.
        failed: the smallest micro-batch that ran out of memory.
        held_bytes: what a step holds beside its micro-batch for each sample of the whole batch, where embeddings are cached.
        breakdown: bytes of each part at the largest point's peak.
        evaluation_points: peak bytes of a forward pass of evaluation, by batch.
        note: why real tensors were counted, if they were.
    """

    points: tuple[tuple[int, int], ...]
    source: str = "traced"
    scale: float = 1.0
    fixed_bytes: float = 0.0
    breakdown: Mapping[str, int] = field(default_factory=dict)
    evaluation_points: tuple[tuple[int, int], ...] = ()
    note: str = ""
    failed: int | None = None
    held_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_points("memory", self.points)

    def predicted_bytes(self, micro_batch: int) -> float:
        """Peak bytes before calibration: exact at a point, interpolated between two.

        Raises:
            ProfilingError: beyond the largest known size.

        >>> MemoryLaw(((1, 100), (11, 300))).predicted_bytes(6)
        200.0
        """
        return _interpolated(self.points, micro_batch)

    def peak_bytes(self, micro_batch: int) -> float:
        """Peak bytes on this device, after calibration."""
        return self.predicted_bytes(micro_batch) * self.scale + self.fixed_bytes

    def largest_micro_batch(self, limit_bytes: float) -> int | None:
        """The largest size known to fit the limit; None if not even the smallest fits.

        >>> MemoryLaw(((1, 100), (11, 300), (21, 900))).largest_micro_batch(600)
        16
        """
        fits = None
        for size, _ in self.points:
            if self.peak_bytes(size) <= limit_bytes and (self.failed is None or size < self.failed):
                fits = size
        if fits is None or fits == self.points[-1][0]:
            return fits
        beyond = next(size for size, _ in self.points if size > fits)
        if self.failed is not None:
            beyond = min(beyond, self.failed)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.peak_bytes(middle) <= limit_bytes else (fits, middle)
        return fits

    def measured_at(self, micro_batch: int, peak_bytes: float) -> Self:
        """The law through a measurement, which replaces the prediction whether it is larger or smaller.

        The smallest size sets the fixed part. Another one sets the slope, and the smallest keeps its peak.

        >>> law = MemoryLaw(((1, 100), (11, 1100))).measured_at(1, 300).measured_at(11, 800)
        >>> law.scale, law.fixed_bytes, law.peak_bytes(1), law.peak_bytes(11)
        (0.5, 250.0, 300.0, 800.0)
        """
        smallest, base = self.points[0]
        predicted = self.predicted_bytes(micro_batch)
        if micro_batch <= smallest or predicted <= base:
            return replace(self, fixed_bytes=peak_bytes - predicted * self.scale)
        base_bytes = self.peak_bytes(smallest)
        scale = max((peak_bytes - base_bytes) / (predicted - base), _LEAST_SCALE)
        return replace(self, scale=scale, fixed_bytes=base_bytes - scale * base)

    def failed_at(self, micro_batch: int) -> Self:
        """The law after a micro-batch ran out of memory: neither it nor a larger one is allowed again."""
        return replace(self, failed=micro_batch if self.failed is None else min(self.failed, micro_batch))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        points = tuple((int(size), int(peak)) for size, peak in values["points"])
        evaluation = tuple((int(size), int(peak)) for size, peak in values["evaluation_points"])
        return cls(**{**values, "points": points, "evaluation_points": evaluation})


def _interpolated(points: tuple[tuple[int, int], ...], size: int) -> float:
    sizes = [known for known, _ in points]
    place = bisect_left(sizes, size)
    if place < len(sizes) and sizes[place] == size:
        return float(points[place][1])
    if place == len(sizes):
        raise ProfilingError(f"micro-batch {size}: memory is known only up to {sizes[-1]} samples")
    if place == 0:
        return float(points[0][1])
    (low, low_bytes), (high, high_bytes) = points[place - 1], points[place]
    return low_bytes + (high_bytes - low_bytes) * (size - low) / (high - low)


def largest_fitting(peak: Callable[[int], float], limit: float, low: int, high: int) -> int | None:
    """The largest size from `low` to `high` whose peak fits the limit, found exactly in few evaluations of a convex peak.

    The chord between a size that fits and one that does not meets the limit at a size that fits. The line through the two
    largest sizes that fit meets it at an upper bound. Bisection takes over where these converge slowly.

    Args:
        peak: bytes at a size; non-decreasing.

    Returns:
        None if not even `low` fits.

    >>> largest_fitting(lambda m: max(1000 + 3 * m, 500 + 10 * m), 2000, 1, 4096)
    150
    """
    known: dict[int, float] = {}

    def measured(size: int) -> float:
        if size not in known:
            known[size] = peak(size)
        return known[size]

    if measured(low) > limit:
        return None
    if low == high or measured(high) <= limit:
        return high
    fits, over = low, high
    before: int | None = None  # the largest that fitted before the last step
    slow_steps = 0
    while over - fits > 1:
        width = over - fits
        guess = fits + width * (limit - measured(fits)) / (measured(over) - measured(fits))
        if before is not None and measured(fits) > measured(before):
            slope = (measured(fits) - measured(before)) / (fits - before)
            guess = fits + (limit - measured(fits)) / slope
        size = (fits + over) // 2 if slow_steps >= 4 else min(max(int(guess), fits + 1), over - 1)
        if measured(size) <= limit:
            before, fits = fits, size
        else:
            over = size
        slow_steps += over - fits > width / 2
    return fits

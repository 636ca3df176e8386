"""The memory law: bytes at a step's peak against the micro-batch, and the largest micro-batch under a limit.

The peak is the maximum over the phases of a step, each linear in the micro-batch, so the curve is convex and piecewise
linear. Two consequences carry everything here: a chord between two known sizes never promises too little memory, and a
line drawn beyond the last known size always does. So sizes are looked up or interpolated, and never extrapolated.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from .errors import ProfilingError, cut

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": int(base**power)
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}

# Where the bytes of a step go; evaluation keeps no gradients and is looked at apart.
PARTS = ("parameters", "gradients", "optimizer state", "batch", "activations", "workspace")


def bytes_of(text: str) -> int:
    """A number of bytes as people write it, in decimal or binary units.

    Raises:
        ValueError: no number with a unit of bytes.

    >>> bytes_of("10GiB"), bytes_of("1.5 GB"), bytes_of("512")
    (10737418240, 1500000000, 512)
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS or len(found[1]) > 20:
        raise ValueError(text)
    return round(float(found[1]) * _UNITS[found[2].lower()])


def check_points(name: str, points: Sequence[tuple[int, float]]) -> None:
    """A law's points are at least one, sizes ascending from 1, values finite and never below 0.

    Raises:
        ProfilingError: they are not; nothing may be looked up between them.
    """
    sizes = [0, *(size for size, _ in points)]
    if len(sizes) == 1 or any(low >= high for low, high in pairwise(sizes)):
        raise ProfilingError(f"{name}: expected points at sizes that rise from 1, got {cut(str(sizes[1:]), 100)}")
    if wrong := [value for _, value in points if not 0 <= value < math.inf]:
        raise ProfilingError(f"{name}: expected finite numbers >= 0, got {wrong[0]}")


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Peak bytes of training at the micro-batches that were looked at, and what a measurement made of them.

    Args:
        points: predicted peak bytes by micro-batch, ascending.
        source: "traced" without running anything, or "counted" on real tensors where tracing was not possible.
        scale, fixed_bytes: what measurements made of the prediction: peak = predicted x scale + fixed. What no trace sees
            (scratch inside kernels, an allocator's fragments) is in them; they only grow.
        breakdown: bytes of each part at the largest point's peak.
        evaluation_points: peak bytes of an evaluation pass by batch.
        note: why real tensors were counted, where they were.
    """

    points: tuple[tuple[int, int], ...]
    source: str = "traced"
    scale: float = 1.0
    fixed_bytes: float = 0.0
    breakdown: Mapping[str, int] = field(default_factory=dict)
    evaluation_points: tuple[tuple[int, int], ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_points("memory", self.points)

    def predicted_bytes(self, micro_batch: int) -> float:
        """Peak bytes before calibration: exact at a point, on the chord between two.

        Raises:
            ProfilingError: beyond the largest size looked at, where no line can be trusted.

        >>> MemoryLaw(((1, 100), (11, 300))).predicted_bytes(6)
        200.0
        """
        return _on_chord(self.points, micro_batch)

    def peak_bytes(self, micro_batch: int) -> float:
        """Peak bytes as this device will have them."""
        return self.predicted_bytes(micro_batch) * self.scale + self.fixed_bytes

    def largest_micro_batch(self, limit_bytes: float) -> int | None:
        """The largest size known to fit the limit; None where not even the smallest does.

        >>> MemoryLaw(((1, 100), (11, 300), (21, 900))).largest_micro_batch(600)
        16
        """
        fits = None
        for size, peak in self.points:
            if peak * self.scale + self.fixed_bytes <= limit_bytes:
                fits = size
        if fits is None or fits == self.points[-1][0]:
            return fits
        beyond = next(size for size, _ in self.points if size > fits)
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (middle, beyond) if self.peak_bytes(middle) <= limit_bytes else (fits, middle)
        return fits

    def raised_by(self, micro_batch: int, limit_bytes: float) -> Self:
        """The law after a micro-batch it allowed ran out of memory: its scale puts that size over the limit."""
        size = min(micro_batch, self.points[-1][0])
        least = (1.001 * limit_bytes - self.fixed_bytes) / self.predicted_bytes(size)
        return replace(self, scale=max(self.scale, least))

    def measured_at(self, micro_batch: int, peak_bytes: float) -> Self:
        """The law after a measurement: at the smallest size it sets what is fixed, elsewhere what grows.

        >>> law = MemoryLaw(((1, 100), (11, 1100))).measured_at(1, 300).measured_at(11, 1410)
        >>> law.fixed_bytes, round(law.scale, 3), round(law.peak_bytes(11))
        (200.0, 1.1, 1410)
        """
        predicted = self.predicted_bytes(micro_batch)
        if micro_batch == self.points[0][0]:
            return replace(self, fixed_bytes=max(self.fixed_bytes, peak_bytes - predicted * self.scale))
        return replace(self, scale=max(self.scale, (peak_bytes - self.fixed_bytes) / predicted))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        points = tuple((int(size), int(peak)) for size, peak in values["points"])
        evaluation = tuple((int(size), int(peak)) for size, peak in values["evaluation_points"])
        return cls(**{**values, "points": points, "evaluation_points": evaluation})


def _on_chord(points: tuple[tuple[int, int], ...], size: int) -> float:
    sizes = [known for known, _ in points]
    place = bisect_left(sizes, size)
    if place < len(sizes) and sizes[place] == size:
        return float(points[place][1])
    if place == len(sizes):
        raise ProfilingError(f"micro-batch {size}: memory is known up to {sizes[-1]} samples, and no line beyond that holds")
    if place == 0:
        return float(points[0][1])
    (low, low_bytes), (high, high_bytes) = points[place - 1], points[place]
    return low_bytes + (high_bytes - low_bytes) * (size - low) / (high - low)


def largest_fitting(peak: Callable[[int], float], limit: float, low: int, high: int) -> int | None:
    """The largest size from `low` to `high` whose peak fits the limit, exactly, in few looks at a convex peak.

    A chord's crossing is a size that fits; the line through the two largest that fit crosses at a size that no larger one
    fits beyond. Halving takes over where the curve is not so kind.

    Args:
        peak: bytes at a size; never falls.

    Returns:
        None where not even `low` fits.

    >>> largest_fitting(lambda m: max(1000 + 3 * m, 500 + 10 * m), 2000, 1, 4096)
    150
    """
    known: dict[int, float] = {}

    def look(size: int) -> float:
        if size not in known:
            known[size] = peak(size)
        return known[size]

    if look(low) > limit:
        return None
    if low == high or look(high) <= limit:
        return high
    fits, over = low, high
    before: int | None = None  # the largest that fitted until the last step
    shrunk_badly = 0
    while over - fits > 1:
        width = over - fits
        guess = fits + width * (limit - look(fits)) / (look(over) - look(fits))
        if before is not None and look(fits) > look(before):
            slope = (look(fits) - look(before)) / (fits - before)
            guess = fits + (limit - look(fits)) / slope
        size = (fits + over) // 2 if shrunk_badly >= 4 else min(max(int(guess), fits + 1), over - 1)
        if look(size) <= limit:
            before, fits = fits, size
        else:
            over = size
        shrunk_badly += over - fits > width / 2
    return fits

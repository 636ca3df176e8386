"""A figure as plain data: axes and layers, from which a page and a CSV file are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

# What a layer represents; each tone has one colour and marker in all drawings.
Tone = Literal[
    "front",
    "baseline",
    "other",
    "stopped",
    "paused",
    "diverged",
    "infeasible",
    "failed",
    "law",
    "measured",
    "limit",
    "alternative",
]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis, with the name of its quantity.

    Args:
        ends: what is shown, where not all of it is.
    """

    name: str
    title: str
    log: bool = False
    ends: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a figure: points, a line through them, steps, or a band from `low` to `high`.

    Args:
        low, high: each point's interval, or the band's edges.
        labels: hover text of each point.
        trials: trial number of each point.
        shown: whether it is visible initially, or only when selected in the legend.
        values: colour value of each point.
    """

    name: str
    kind: Literal["points", "line", "steps", "band"]
    tone: Tone
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    trials: tuple[int, ...] = ()
    shown: bool = True
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: its file name, title, caption, axes, and layers from back to front, without empty ones."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    layers: tuple[Layer, ...]
    value_name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(layer for layer in self.layers if layer.x))

    def log_ticks(self, axis: Literal["x", "y"]) -> list[float]:
        """Round numbers along a log axis, about four to ten of them; none if there are no values above 0."""
        values = [
            value
            for layer in self.layers
            for value in (*getattr(layer, axis), *((layer.low + layer.high) * (axis == "y")))
        ]
        values = [value for value in values if value > 0 and math.isfinite(value)]
        if not values:
            return []
        low, high = min(values), max(values)
        decades = math.log10(high / low) if high > low else 0.0
        parts = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [
            float(f"{part}e{power}")
            for power in powers
            for part in parts
            if low / 1.3 <= float(f"{part}e{power}") <= high * 1.3
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Its data, one row per point: the content of `NAME.csv`."""
        rows = []
        for layer in self.layers:
            for index in range(len(layer.x)):
                row: dict[str, Any] = {
                    "layer": layer.name,
                    self.x.name: layer.x[index],
                    self.y.name: layer.y[index],
                }
                if layer.trials:
                    row["trial"] = layer.trials[index]
                if layer.low:
                    row |= {"low": layer.low[index], "high": layer.high[index]}
                if layer.values:
                    row[self.value_name] = layer.values[index]
                rows.append(row)
        return rows

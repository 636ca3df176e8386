"""A run as its source holds it, before anything is made of its names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...spaces.errors import StudyFileError
from .names import meaning_of

Scalar = bool | int | float | str
# Settings are not nested deeper; of what is, as where a file refers to itself, nothing is a setting.
_DEEPEST, _MOST_NAMES = 6, 20_000
Status = Literal["finished", "failed", "running", ""]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Args:
        place: where its user finds it, for messages: `runs.csv:7`, a run's id, a folder.
        settings: what it was given, by the source's own names; nested ones are joined by dots, such as `optimizer.lr`.
        results: what came out at its end, likewise; of a curve as `curve_results` gives it.
        values: those of which the source does not say whether they are settings or results, such as the columns of a table.
        status: empty where the source does not say.
        no_run: what it is instead of a run, such as a mean of others; empty of a run.
        told: what its reader has to say of it, as far as other runs share it.
    """

    place: str
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    results: Mapping[str, Scalar] = field(default_factory=dict)
    values: Mapping[str, Scalar] = field(default_factory=dict)
    status: Status = ""
    no_run: str = ""
    told: str = ""

    @property
    def held(self) -> dict[str, Scalar]:
        """All that it holds, by name; a setting comes before what else has its name."""
        return {**self.results, **self.values, **self.settings}


def curve_results(name: str, values: Iterable[float]) -> dict[str, float]:
    """The end of a curve under its own name, and its lowest and highest values; NaN counts as an end alone.

    >>> curve_results("val_loss", [2.0, 1.0, 1.5])
    {'val_loss': 1.5, 'val_loss (lowest)': 1.0, 'val_loss (highest)': 2.0}
    """
    last, low, high = math.nan, math.inf, -math.inf
    some = False
    for value in values:
        last, some = value, True
        low, high = min(low, value), max(high, value)  # of NaN neither
    if not some:
        return {}
    return {name: last} if low > high else {name: last, f"{name} (lowest)": low, f"{name} (highest)": high}


def curves_results(curves: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """The same of several curves, by their names."""
    return {
        end: value for name, values in curves.items() for end, value in curve_results(name, values).items()
    }


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Scalar]]:
    """Nested settings by dotted names; what is neither number, text nor truth is left out.

    Raises:
        StudyFileError: there are more than 20,000: an alias may stand for what holds more of itself.

    >>> dict(flat({"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "seed": 1, "data": None}))
    {'optimizer.lr': 0.1, 'optimizer.betas.0': 0.9, 'optimizer.betas.1': 0.99, 'seed': 1}
    """
    return _flat(values, before, iter(range(_MOST_NAMES)))


def _flat(values: Mapping[str, Any], before: str, left: Iterator[int]) -> Iterator[tuple[str, Scalar]]:
    for key, value in values.items():
        name = str(key)
        if next(left, None) is None:
            raise StudyFileError(
                f"expected at most {_MOST_NAMES:,} settings and results of a run, got more of them"
            )
        if isinstance(value, Mapping | list | tuple) and before.count(".") > _DEEPEST:
            continue
        if isinstance(value, Mapping) and "value" in value and value.keys() <= {"value", "desc"}:
            value = value["value"]  # as W&B's config.yaml has it
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.", left)
        elif isinstance(value, list | tuple) and meaning_of(name) == "devices":
            yield f"{before}{name}", len(value)
        elif isinstance(value, list | tuple):
            yield from _flat(
                {str(place): each for place, each in enumerate(value[:8])}, f"{before}{name}.", left
            )
        elif isinstance(value, int) and abs(value) >= 1 << 63:
            yield f"{before}{name}", math.copysign(math.inf, value)
        elif isinstance(value, bool | int | float | str):
            yield f"{before}{name}", value

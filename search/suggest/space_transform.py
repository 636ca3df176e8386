"""The searched space: Optuna's distributions of a study's domains, and parameters as points of the unit cube."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ...spaces.domain import Choices, Domain, Range, applies, applying, searched_of, values_of
from ...spaces.record import TrialRecord
from ..analysis.gaussian_process import Array

# Settings of a space in which those that were not tried can be told.
_ENUMERATED = 10_000
# Whole numbers, and others, whose upper end is so many times the lower one are on a log scale.
_WIDE_WHOLE, _WIDE = 10.0, 100.0


@dataclass(frozen=True)
class SearchSpace:
    """What of a study's parameters is searched.

    Args:
        domains: of every parameter.
        fixed: values of those that are not searched.
        searched: distributions of the others; those that others depend on come first.
        conditions: by searched parameter, the values of other searched ones with which it applies.
        expected: by searched parameter with a prior, its best value and the upper end of where that lies nine times in ten.
    """

    domains: Mapping[str, Domain]
    fixed: Mapping[str, Any]
    searched: Mapping[str, BaseDistribution]
    conditions: Mapping[str, Mapping[str, Sequence[Any]]]
    expected: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, domains: Mapping[str, Domain], feasible: tuple[int, int] | None = None) -> SearchSpace:
        """The space of these domains.

        Args:
            feasible: the effective batches that can be planned, lowest and highest: no others are searched.
        """
        several = searched_of(domains)
        fixed = {key: next(values_of(domain)) for key, domain in domains.items() if key not in several}
        conditions: dict[str, Mapping[str, Sequence[Any]]] = {}
        for name, domain in list(several.items()):
            if any(key in fixed and fixed[key] not in values for key, values in (domain.when or {}).items()):
                del several[name]  # it never applies
            elif when := {key: values for key, values in (domain.when or {}).items() if key not in fixed}:
                conditions[name] = when
        searched = {key: distribution(several[key]) for key in sorted(several, key=conditions.__contains__)}
        batches = searched.get("effective_batch")
        if feasible is not None and isinstance(batches, IntDistribution):
            low, high = (
                batches.low + batches.step * round_to((end - batches.low) / batches.step)
                for end, round_to in zip(feasible, (math.ceil, math.floor), strict=True)
            )
            searched["effective_batch"] = IntDistribution(
                low, max(low, high), log=batches.log, step=batches.step
            )
        expected = {name: each for name in searched if (each := getattr(domains[name], "expected", None))}
        return cls(dict(domains), fixed, searched, conditions, expected)

    def whole(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Searched parameters with the fixed ones, without those that do not apply beside the others."""
        return applying(self.domains, {**self.fixed, **parameters})

    def chosen(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the parameters that are searched."""
        return {name: value for name, value in parameters.items() if name in self.searched}

    def untried(self, wanted: Mapping[str, Any], trials: Iterable[TrialRecord]) -> Mapping[str, Any] | None:
        """The wanted setting, or where trials have trained the same, the nearest that none has; None where all were tried.

        In a space with real numbers, or of very many settings, it is always the wanted one.
        """
        values = {name: _values(domain) for name, domain in self.searched.items()}
        if not 0 < math.prod(map(len, values.values())) <= _ENUMERATED:
            return wanted
        tried = {
            frozenset(self.whole(trial.parameters).items())
            for trial in trials
            if trial.outcome != "interrupted"
        }
        if frozenset(self.whole(wanted).items()) not in tried:
            return wanted
        every = (self.whole(dict(zip(values, each, strict=True))) for each in product(*values.values()))
        left = [setting for setting in every if frozenset(setting.items()) not in tried]
        if not left:
            return None
        places = {name: {value: place for place, value in enumerate(each)} for name, each in values.items()}

        def distance(setting: Mapping[str, Any]) -> float:
            apart = 0.0
            for name, of in places.items():
                one, other = of.get(setting.get(name)), of.get(wanted.get(name))
                if one != other:
                    ordered = isinstance(self.searched[name], IntDistribution) and None not in (one, other)
                    apart += abs(one - other) / len(of) if ordered else 1.0  # type: ignore[operator]
            return apart

        return self.chosen(min(left, key=distance))


def distribution(domain: Domain) -> BaseDistribution:
    """Optuna's distribution for a domain of more than one value."""
    match domain:
        case Range() if domain.whole:
            return IntDistribution(
                int(domain.low), int(domain.high), log=bool(domain.log), step=int(domain.step or 1)
            )
        case Range():
            return FloatDistribution(
                float(domain.low), float(domain.high), log=bool(domain.log), step=domain.step
            )
        case Choices():
            return CategoricalDistribution(domain.choices)
    raise AssertionError(domain)


def _values(distribution: BaseDistribution) -> Sequence[Any]:
    """Every value of a category or of a whole number's range; none of real numbers."""
    if isinstance(distribution, IntDistribution):
        return range(distribution.low, distribution.high + 1, distribution.step)
    return getattr(distribution, "choices", ())


class SpaceTransform:
    """Encodes parameters as points of the unit cube: numbers on a linear or log scale, categories one-hot.

    Numbers of a wide range are on a log scale, also where they are searched evenly: doubling the epochs does as much at 2 as at
    20, and on a linear scale the models saw nothing of the lower end (docs/log.md). Wide is a factor of ten for whole numbers,
    and of a hundred for others: of a momentum from .05 to .99 the upper end matters.

    A parameter that does not apply given the others is at the middle of its coordinates, so that points that differ in nothing
    else are the same.

    Args:
        space: Optuna's distribution of each parameter.
        conditions: by parameter, the values of others with which it applies.

    Attributes:
        width: coordinates of a point; a category takes one for each of its choices.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        conditions: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    ) -> None:
        self.space = dict(space)
        self.conditions = {name: when for name, when in (conditions or {}).items() if name in self.space}
        self.parameters = len(space)
        # Name, distribution, first coordinate, lower end and width of the scale.
        self._parts: list[tuple[str, BaseDistribution, int, float, float]] = []
        self.width = 0
        for name, distribution in space.items():
            low, scale = 0.0, 1.0
            if not isinstance(distribution, CategoricalDistribution):
                low, high = _bounds(distribution)
                scale = high - low
            self._parts.append((name, distribution, self.width, low, scale))
            self.width += (
                len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1
            )

    def log_coordinates(self) -> dict[str, tuple[int, float]]:
        """The coordinate of each number on a log scale, and the natural logarithm of its upper over its lower end."""
        return {
            name: (place, scale)
            for name, distribution, place, _, scale in self._parts
            if not isinstance(distribution, CategoricalDistribution) and _is_log(distribution)
        }

    def encode(self, parameters: Mapping[str, Any]) -> Array:
        """A point (width,) of the cube."""
        point = np.zeros(self.width)
        for name, distribution, place, low, scale in self._parts:
            if name not in parameters:
                point[_coordinates(distribution, place)] = _middle(distribution)
                continue
            value = parameters[name]
            if isinstance(distribution, CategoricalDistribution):
                point[place : place + len(distribution.choices)] = [
                    choice == value for choice in distribution.choices
                ]
            else:
                point[place] = (_scaled(distribution, value) - low) / scale
        return point

    def decode(self, point: Array) -> dict[str, Any]:
        """The parameters nearest to a point (width,)."""
        values: dict[str, Any] = {}
        for name, distribution, place, low, scale in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                count = len(distribution.choices)
                values[name] = distribution.choices[int(np.argmax(point[place : place + count]))]
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            number = low + float(point[place]) * scale
            number = math.exp(number) if _is_log(distribution) else number
            if distribution.step is not None:
                number = distribution.low + distribution.step * round(
                    (number - distribution.low) / distribution.step
                )
            number = min(max(number, distribution.low), distribution.high)
            values[name] = int(number) if isinstance(distribution, IntDistribution) else float(number)
        return self._applying(values)

    def is_whole(self, parameters: Mapping[str, Any]) -> bool:
        """Whether every parameter that applies has a value, and on its scale: others may have written it."""
        return all(
            _is_on(distribution, parameters[name])
            if name in parameters
            else not applies(self.conditions.get(name, {}), parameters)
            for name, distribution in self.space.items()
        )

    def _applying(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, when in self.conditions.items():
            if not applies(when, values):
                del values[name]
        return values

    def decode_many(self, points: Array) -> list[dict[str, Any]]:
        """The parameters nearest to each of many points (n, width), vectorised over points."""
        columns: list[list[Any]] = []
        for _, distribution, place, low, scale in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                best = np.argmax(points[:, place : place + len(distribution.choices)], axis=1)
                columns.append([distribution.choices[index] for index in best])
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            numbers = low + points[:, place] * scale
            numbers = np.exp(numbers) if _is_log(distribution) else numbers
            if distribution.step is not None:
                numbers = distribution.low + distribution.step * np.round(
                    (numbers - distribution.low) / distribution.step
                )
            numbers = np.clip(numbers, distribution.low, distribution.high)
            columns.append(
                (numbers.astype(int) if isinstance(distribution, IntDistribution) else numbers).tolist()
            )
        return [
            self._applying(dict(zip(self.space, values, strict=True)))
            for values in zip(*columns, strict=True)
        ]

    def with_numbers(self, points: Array, name: str, values: Array) -> Array:
        """The points (n, width) with other values (n,) of a number."""
        _, distribution, place, low, scale = self._part(name)
        assert isinstance(distribution, IntDistribution | FloatDistribution)
        moved = points.copy()
        moved[:, place] = ((np.log(values) if _is_log(distribution) else values) - low) / scale
        return moved

    def place(self, name: str) -> int:
        """A parameter's first coordinate."""
        return self._part(name)[2]

    def coordinate(self, name: str, value: float) -> float:
        """A number's coordinate; beyond the ends of its range it lies outside the cube."""
        _, distribution, _, low, scale = self._part(name)
        return (_scaled(distribution, value) - low) / scale

    def _part(self, name: str) -> tuple[str, BaseDistribution, int, float, float]:
        return next(part for part in self._parts if part[0] == name)

    def round_to_feasible(self, points: Array) -> Array:
        """Points (n, width) moved to the parameters they decode to: whole numbers, single choices."""
        rounded = np.clip(points, 0.0, 1.0)
        for _, distribution, place, low, scale in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                choices = slice(place, place + len(distribution.choices))
                rounded[:, choices] = np.eye(len(distribution.choices))[np.argmax(points[:, choices], axis=1)]
            elif (
                isinstance(distribution, IntDistribution | FloatDistribution)
                and distribution.step is not None
            ):
                numbers = low + rounded[:, place] * scale
                numbers = np.exp(numbers) if _is_log(distribution) else numbers
                steps = np.round((numbers - distribution.low) / distribution.step)
                numbers = np.clip(
                    distribution.low + distribution.step * steps, distribution.low, distribution.high
                )
                rounded[:, place] = ((np.log(numbers) if _is_log(distribution) else numbers) - low) / scale
        if self.conditions:
            decoded = self.decode_many(rounded)
            for name, distribution, place, _, _ in self._parts:
                if name in self.conditions:
                    without = [name not in values for values in decoded]
                    rounded[without, _coordinates(distribution, place)] = _middle(distribution)
        return rounded


def _coordinates(distribution: BaseDistribution, place: int) -> slice:
    return slice(
        place, place + (len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1)
    )


def _is_on(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a value has a coordinate; it may lie beyond the ends."""
    if isinstance(distribution, CategoricalDistribution):
        return True
    return isinstance(value, int | float) and (value > 0 or not _is_log(distribution))


def _middle(distribution: BaseDistribution) -> float:
    return 1 / len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 0.5


def _is_log(distribution: BaseDistribution) -> bool:
    """Whether a number's coordinate is its logarithm."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    wide = _WIDE_WHOLE if isinstance(distribution, IntDistribution) else _WIDE
    return distribution.log or (distribution.low > 0 and distribution.high >= wide * distribution.low)


def _scaled(distribution: BaseDistribution, value: float) -> float:
    """A number on its coordinate's scale."""
    return math.log(value) if _is_log(distribution) else value


def _bounds(distribution: BaseDistribution) -> tuple[float, float]:
    """Lower and upper end on the coordinate's scale."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return _scaled(distribution, distribution.low), _scaled(distribution, distribution.high)

"""TODO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from ..analysis.gaussian_process import Array


class Coding:
    """Parameters as points of a cube: numbers on their own scale, categories as corners."""

    def __init__(self, space: Mapping[str, BaseDistribution]) -> None:
        self.space = dict(space)
        self.parameters = len(space)
        # Of each parameter: its name, its distribution, its first coordinate, and where its scale begins and how wide it is.
        self._parts: list[tuple[str, BaseDistribution, int, float, float]] = []
        self.width = 0
        for name, distribution in space.items():
            low, wide = 0.0, 1.0
            if not isinstance(distribution, CategoricalDistribution):
                low, high = _ends(distribution)
                wide = high - low
            self._parts.append((name, distribution, self.width, low, wide))
            self.width += len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1

    def encode(self, parameters: Mapping[str, Any]) -> Array:
        point = np.zeros(self.width)
        for name, distribution, place, low, wide in self._parts:
            value = parameters[name]
            if isinstance(distribution, CategoricalDistribution):
                point[place : place + len(distribution.choices)] = [choice == value for choice in distribution.choices]
            else:
                at = math.log(value) if distribution.log else value  # type: ignore[attr-defined]
                point[place] = (at - low) / wide
        return point

    def decode(self, point: Array) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                count = len(distribution.choices)
                values[name] = distribution.choices[int(np.argmax(point[place : place + count]))]
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            number = low + float(point[place]) * wide
            number = math.exp(number) if distribution.log else number
            if isinstance(distribution, IntDistribution):
                step = distribution.step
                number = distribution.low + step * round((number - distribution.low) / step)
                values[name] = int(min(max(number, distribution.low), distribution.high))
            else:
                values[name] = float(min(max(number, distribution.low), distribution.high))
        return values

    def decoded(self, points: Array) -> list[dict[str, Any]]:
        """Parameters of many points, a parameter at a time."""
        columns: list[list[Any]] = []
        for _, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                best = np.argmax(points[:, place : place + len(distribution.choices)], axis=1)
                columns.append([distribution.choices[index] for index in best])
                continue
            assert isinstance(distribution, IntDistribution | FloatDistribution)
            numbers = low + points[:, place] * wide
            numbers = np.exp(numbers) if distribution.log else numbers
            if isinstance(distribution, IntDistribution):
                numbers = distribution.low + distribution.step * np.round((numbers - distribution.low) / distribution.step)
            numbers = np.clip(numbers, distribution.low, distribution.high)
            columns.append((numbers.astype(int) if isinstance(distribution, IntDistribution) else numbers).tolist())
        return [dict(zip(self.space, values, strict=True)) for values in zip(*columns, strict=True)]

    def settled(self, points: Array) -> Array:
        """Points (n, width) moved to where their parameters really are: whole numbers, single choices."""
        settled = np.clip(points, 0.0, 1.0)
        for _, distribution, place, low, wide in self._parts:
            if isinstance(distribution, CategoricalDistribution):
                corners = slice(place, place + len(distribution.choices))
                settled[:, corners] = np.eye(len(distribution.choices))[np.argmax(points[:, corners], axis=1)]
            elif isinstance(distribution, IntDistribution):
                numbers = low + settled[:, place] * wide
                numbers = np.exp(numbers) if distribution.log else numbers
                steps = np.round((numbers - distribution.low) / distribution.step)
                numbers = np.clip(distribution.low + distribution.step * steps, distribution.low, distribution.high)
                settled[:, place] = ((np.log(numbers) if distribution.log else numbers) - low) / wide
        return settled


def _ends(distribution: BaseDistribution) -> tuple[float, float]:
    """Of a number's own scale."""
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return (
        (math.log(distribution.low), math.log(distribution.high)) if distribution.log else (distribution.low, distribution.high)
    )

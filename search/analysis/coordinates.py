"""What trials differ in beside batch and rate, as coordinates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...spaces.learning_rate import RULES_FOR_ADAM
from ...spaces.record import TrialRecord

if TYPE_CHECKING:
    from .gaussian_process import Array

# Parameters that act only through the rate, or do not affect what is learned.
_NOT_OTHERS = frozenset({"effective_batch", "reference_rate", "rule", "exponent", "noise_batch", "devices"})


def other_coordinates(records: Sequence[TrialRecord], without: Collection[str] = ()) -> Array:
    """Every other searched parameter, numbers scaled to unit range and categories one-hot: (trials, columns)."""
    columns: list[Any] = []
    names = {name for record in records for name in record.parameters} - _NOT_OTHERS - set(without)
    if RULES_FOR_ADAM & {str(record.facts.rule) for record in records}:
        names.add("rule")  # these change more than the rate
    for name in sorted(names):
        values = [record.parameters.get(name, record.settings.get(name)) for record in records]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = np.array(values, dtype=np.float64)
            if numbers.min() > 0 and numbers.max() > 10 * numbers.min():
                numbers = np.log(numbers)
            if np.ptp(numbers) > 0:
                columns.append((numbers - numbers.min()) / np.ptp(numbers))
        elif len(categories := sorted(set(map(str, values)))) > 1:
            columns += [
                np.array([float(str(value) == category) for value in values]) for category in categories
            ]
    return np.column_stack(columns) if columns else np.zeros((len(records), 0))

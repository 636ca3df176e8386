"""What training code hands in is a number of Python's own, or refused."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.spaces.boundary.given import number_of, scalar_of
from bsearch.spaces.errors import TaskError
from bsearch.spaces.record import name_fault, type_fault
from bsearch.spaces.trial import Measurement
from hypothesis import given
from hypothesis import strategies as st


@given(st.one_of(st.integers(-(1 << 53), 1 << 53), st.floats(allow_nan=False, width=32)))
def test_a_number_is_the_same_from_every_library(number: float) -> None:
    kinds: list[Any] = [
        number,
        np.asarray(number),
        np.asarray([number]),
        torch.tensor(number, dtype=torch.float64),
    ]
    kinds += [Fraction(number), Decimal(number)] if np.isfinite(number) else []
    for value in kinds:
        found = number_of("it", value)
        assert type(found) in (int, float)
        assert found == number


@pytest.mark.parametrize(
    "value",
    ["0.5", None, True, np.bool_(True), np.ones(2), torch.ones(2), 1j, {}, [1.0], b"1", object(), 10**400],
)
def test_what_is_no_number_is_refused_where_it_enters(value: Any) -> None:
    with pytest.raises(TaskError, match="it: expected a number"):
        number_of("it", value)
    for name in ("samples_seen", "elapsed_s"):
        with pytest.raises(TaskError, match=f"Measurement.{name}: expected"):
            Measurement(**{"samples_seen": 1, "elapsed_s": 1.0, "accuracy": 0.5, name: value})


def test_facts_may_be_text_and_truth() -> None:
    assert [scalar_of("it", value) for value in ("a", np.str_("b"), np.bool_(True), 3)] == ["a", "b", True, 3]


def test_names_of_ours_are_not_the_users() -> None:
    assert "got learning_rate, train_s" in name_fault("scores", ["train_s", "learning_rate", "recall"])
    assert name_fault("scores", ["accuracy", "val_loss", "precision", "f1"]) == ""
    assert "outcome" in name_fault("facts", ["outcome"])
    assert name_fault("facts", ["peak_bytes", "branch"]) == ""
    assert type_fault({"peak_bytes": 3.5, "optimizer": "SGD", "branch": "x"}) == ""
    assert type_fault({"nesterov": 1}) == "facts: nesterov: expected true or false, got 1"

"""Runs to a target."""

from __future__ import annotations

import numpy as np
import pytest
from bsearch.search.laws.runs_table import RunsToTarget
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=8), st.integers(0, 7))
def test_runs_that_never_reached_the_target_are_slower_than_all_others(
    samples: list[float], never: int
) -> None:
    if never < len(samples):
        found = RunsToTarget(8, tuple(samples), never=never).median
        assert found == pytest.approx(float(np.median([*samples, *[1e9] * never])))

"""Claims, their verdicts, and the report that holds them."""

from __future__ import annotations

import math

import pytest
from bsearch.benchmarks.verify.claims import Claim, of_repeats, worst
from hypothesis import example, given
from hypothesis import strategies as st

numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers, st.floats(0, 1e6))
@example(0.05, 0.95, 0.88)
def test_a_verdict_is_the_position_of_the_bound_in_the_interval(
    bound: float, measured: float, uncertainty: float
) -> None:
    verdict = Claim("", bound, measured, uncertainty).verdict
    assert (verdict == "pass") == (measured <= bound and uncertainty <= max(bound, 0))
    assert (verdict == "FAIL") == (measured - uncertainty > bound and uncertainty <= max(bound, 0))


def test_what_is_not_a_number_holds_nowhere() -> None:
    assert Claim("", 0.02, math.nan).verdict == "FAIL"
    assert Claim("", 0.02, math.inf).verdict == "FAIL"
    assert Claim("", 0.02, 0.01, math.nan).verdict == "unclear"
    (claim,) = worst("text", 0.1, [("a", 0.2), ("b", math.nan)])
    assert (claim.verdict, claim.note, claim.cases) == ("FAIL", "b", 2)


def test_the_worst_of_no_case_claims_nothing() -> None:
    assert list(worst("text", 0.1, [])) == []


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(-1, 1))
def test_repeats_shifted_shift_their_median_and_keep_its_uncertainty(
    values: list[float], shift: float
) -> None:
    one, other = of_repeats("", 0, values), of_repeats("", 0, [value + shift for value in values])
    assert other.measured == pytest.approx(one.measured + shift, abs=1e-9)
    assert other.uncertainty == pytest.approx(one.uncertainty, abs=1e-9)
    assert min(values) - 1e-9 <= one.measured <= max(values) + 1e-9

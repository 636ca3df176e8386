"""Claims, their verdicts, and the report that holds them."""

from __future__ import annotations

import json
import math

import pytest
from bsearch.verify.claims import Claim, Fact, Report, StageReport, of_repeats, worst
from hypothesis import given
from hypothesis import strategies as st

numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers, st.floats(0, 1e6))
def test_a_verdict_is_the_position_of_the_bound_in_the_interval(bound: float, measured: float, uncertainty: float) -> None:
    verdict = Claim("", bound, measured, uncertainty).verdict
    assert (verdict == "pass") == (measured <= bound and uncertainty <= max(bound, 0))
    assert (verdict == "FAIL") == (measured - uncertainty > bound)


def test_what_is_not_a_number_holds_nowhere() -> None:
    assert Claim("", 0.02, math.nan).verdict == "FAIL"
    assert Claim("", 0.02, math.inf).verdict == "FAIL"
    (claim,) = worst("text", 0.1, [("a", 0.2), ("b", math.nan)])
    assert (claim.verdict, claim.note, claim.cases) == ("FAIL", "b", 2)


def test_the_worst_of_no_case_claims_nothing() -> None:
    assert list(worst("text", 0.1, [])) == []


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(-1, 1))
def test_repeats_shifted_shift_their_median_and_keep_its_uncertainty(values: list[float], shift: float) -> None:
    one, other = of_repeats("", 0, values), of_repeats("", 0, [value + shift for value in values])
    assert other.measured == pytest.approx(one.measured + shift, abs=1e-9)
    assert other.uncertainty == pytest.approx(one.uncertainty, abs=1e-9)
    assert min(values) - 1e-9 <= one.measured <= max(values) + 1e-9


def report() -> Report:
    memory = StageReport("memory", 3.0, claims=[Claim("live", 0.02, 0.01, cases=4, note="a | b"), Claim("off", 0.02, 0.05)])
    loop = StageReport("loop", 1.0, "killed after 3 s", [Claim("slow", 0.02, 0.03, 0.02)], [Fact("clock", "1980 MHz")])
    return Report("a device", "2026-01-01", "torch 2", [memory, loop])


def test_a_report_counts_its_verdicts_and_says_what_did_not_end() -> None:
    assert report().summary == "1 of 3 claims hold, 1 fails, 1 is too noisy here to tell; not finished: loop."
    assert not report().holds
    assert Report("", "", "", [StageReport("a", claims=[Claim("", 1, 0), Claim("", 1, 2, 2)])]).holds


def test_a_report_comes_back_from_json() -> None:
    back = Report.from_dict(json.loads(json.dumps(report().to_dict())))
    assert back == report()


def test_a_report_is_a_table_of_markdown() -> None:
    text = report().markdown()
    assert "| memory | live (4 cases) | ≤ 2 % | 1 % (a / b) | pass |" in text
    assert "| loop | clock | 1980 MHz |" in text
    assert "- loop: killed after 3 s" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.count("|") in (4, 6) for line in rows)

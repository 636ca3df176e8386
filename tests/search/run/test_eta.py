"""The time that is left, against a slow twin: a simulated study whose slots and times are known."""

from __future__ import annotations

import heapq
import math
from itertools import pairwise

import pytest
from bsearch.search.run.decisions.eta import ClockFactors, Span, at_once, eta_s
from hypothesis import given, settings
from hypothesis import strategies as st

SECONDS = st.floats(0.1, 100.0)


def schedule(takes_s: list[float], slots: int) -> list[tuple[float, float]]:
    """When each trial begins and ends where the next one takes the slot that is free first."""
    free_at, planned = [0.0] * slots, []
    for take_s in takes_s:
        started_s = heapq.heappop(free_at)
        planned.append((started_s, started_s + take_s))
        heapq.heappush(free_at, started_s + take_s)
    return planned


def running(started_s: float, known_s: float | None) -> Span:
    return Span(started_s, None, known_s, 0.0, 0.0, 1.0, 1)


def spans_at(
    now_s: float, planned: list[tuple[float, float]], slowdown: float, overhead_s: float
) -> list[Span]:
    """What is known at a moment: those that began, with their known seconds; neighbours and overhead stretch them."""
    spans = []
    for started_s, ended_s in planned:
        if started_s > now_s:
            continue
        trained_s = ended_s - started_s - overhead_s
        known_s = trained_s / slowdown
        if ended_s <= now_s:
            spans.append(Span(started_s, ended_s, known_s, trained_s, 1.0, 1.0, 1))
        else:
            spans.append(running(started_s, known_s))
    return spans


def estimated_s(
    now_s: float, planned: list[tuple[float, float]], slowdown: float, overhead_s: float
) -> float:
    spans = spans_at(now_s, planned, slowdown, overhead_s)
    left_s = eta_s(spans, now_s, len(planned) - len(spans))
    assert left_s is not None
    return left_s


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("trials", [1, 2, 7, 8, 9, 20])
def test_equal_trials_are_told_to_the_second_at_every_moment(slots: int, trials: int) -> None:
    planned = schedule([10.0] * trials, slots)
    end_s = math.ceil(trials / slots) * 10.0
    assert max(ended_s for _, ended_s in planned) == end_s
    moments = [0.25 * step for step in range(int(end_s * 4) + 1)]
    lefts = [estimated_s(now_s, planned, 1.0, 0.0) for now_s in moments]
    assert lefts == pytest.approx([end_s - now_s for now_s in moments], abs=1e-6)
    assert all(later <= earlier for earlier, later in pairwise(lefts))


@given(
    st.lists(SECONDS, min_size=1, max_size=30),
    st.integers(1, 6),
    st.floats(0, 1),
    st.floats(0.3, 3),
    st.floats(0, 0.1),
)
@settings(deadline=None, max_examples=200)
def test_what_is_left_is_never_negative_and_right_once_the_last_trial_runs(
    takes_s: list[float], slots: int, moment: float, slowdown: float, overhead_s: float
) -> None:
    planned = schedule(takes_s, slots)
    end_s = max(ended_s for _, ended_s in planned)
    assert estimated_s(moment * end_s, planned, 1.0, 0.0) >= 0
    last_started_s = max(started_s for started_s, _ in planned)
    now_s = last_started_s + moment * (end_s - last_started_s)
    factors, spans = ClockFactors(slowdown, overhead_s), spans_at(now_s, planned, slowdown, overhead_s)
    left = [factors.left_s(span, now_s) for span in spans if span.ended_s is None]
    assert max(left, default=0.0) == pytest.approx(end_s - now_s, abs=1e-6)


@given(st.lists(st.floats(5.0, 10.0), min_size=12, max_size=40), st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_trials_of_several_lengths_are_as_good_as_their_mean(takes_s: list[float], slots: int) -> None:
    planned = schedule(takes_s, slots)
    now_s = sorted(started_s for started_s, _ in planned)[len(planned) // 2]
    spans = spans_at(now_s, planned, 1.0, 0.0)
    # The twin deals out trials of the mean that was seen: times lie within a factor of two, so does what is left.
    true_s = max(ended_s for _, ended_s in planned) - now_s
    assert true_s / 2 - 10 <= estimated_s(now_s, planned, 1.0, 0.0) <= true_s * 2 + 10
    assert at_once(spans) <= slots


def test_neighbours_and_overhead_are_learned_from_trials_that_ended() -> None:
    # Known are 4 s; beside neighbours they are 8, and starting and evaluating take 2 more.
    planned = schedule([10.0] * 8, 2)
    early, late = (estimated_s(now_s, planned, slowdown=2.0, overhead_s=2.0) for now_s in (0.0, 10.0))
    assert early == pytest.approx(16.0)  # nothing ended yet: four rounds of what is known
    assert late == pytest.approx(30.0)


def test_quick_trials_that_end_first_do_not_make_the_study_look_short() -> None:
    # Of two slots one had five trials of a second, the other still runs one of a hundred.
    spans = [Span(second, second + 1.0, 1.0, 1.0, 1.0, 1.0, 1) for second in range(5)] + [running(0.0, 100.0)]
    left_s = eta_s(spans, 5.0, 10)
    mean_s = (5 * 1.0 + 100.0) / 6
    assert left_s is not None
    assert left_s >= 5 * mean_s


def test_slots_that_rest_between_trials_rest_on() -> None:
    spans = [Span(12.0 * round_, 12.0 * round_ + 10, 10.0, 10.0, 1.0, 1.0, 1) for round_ in range(3)]
    assert eta_s([*spans, running(36.0, 10.0)], 36.0, 2) == pytest.approx(10 + 2 * 12.0)


def test_without_known_times_a_trial_goes_by_its_own_speed() -> None:
    assert eta_s([running(0.0, None)], 5.0, 3) is None
    assert eta_s([Span(0.0, None, None, 4.0, 0.25, 1.0, 1)], 5.0, 0) == pytest.approx(15.0)
    # Over its known time it goes on at the speed that it had.
    assert eta_s([Span(0.0, None, 4.0, 4.0, 0.5, 1.0, 1)], 8.0, 0) == pytest.approx(8.0)


def test_a_lost_attempt_costs_time_and_counts_for_nothing() -> None:
    clean = [Span(0.0, 10.0, 10.0, 10.0, 1.0, 1.0, 1), running(10.0, 10.0)]
    lost = [
        Span(0.0, 10.0, 10.0, 10.0, 1.0, 1.0, 1),
        Span(10.0, 20.0, 10.0, 10.0, 1.0, 0.0, 1),
        running(20.0, 10.0),
    ]
    assert (eta_s(lost, 20.0, 4) or 0) > (eta_s(clean, 10.0, 4) or 0)

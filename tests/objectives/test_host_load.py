"""Who had the cores: counters are read or not known, never guessed; known times say what was taken while steps were timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bsearch.objectives.machine.host import cgroup_limit
from bsearch.objectives.machine.processor import HostLoad, busy_and_stolen_s, throttled_s
from bsearch.objectives.profiling.fit import FEWEST_ROUNDS, with_uncertainty
from bsearch.objectives.profiling.step_time import Round, calm, disturbed, fitted, measured_step_time
from bsearch.spaces.laws.step_time import StepTime, timing_plans
from hypothesis import given
from hypothesis import strategies as st

# Linux 6.18 in a virtual machine, one with guests of its own, Linux before 2.6.11, and a sandbox that counts nothing.
STATS = {
    "cpu  10465472 436511 1193603 4395781 51088 0 16624 7313 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n": (
        121122.10,
        73.13,
    ),
    "cpu  1000 0 500 9000 0 0 0 200 800 0\nctxt 5\n": (15.0, 2.0),
    "cpu 100 200 300 400 500 600 700\n": (19.0, None),
    "cpu  0 0 0 0 0 0 0 0 0 0\n": (0.0, 0.0),
}
GROUPS = {
    # Version 2 with a limit, version 2 without the controller, version 1, and a group inside another.
    "usage_usec 10\nuser_usec 6\nsystem_usec 4\nnr_periods 42\nnr_throttled 40\nthrottled_usec 1976971\n": 1.976971,
    "usage_usec 119279997329\nuser_usec 107240987825\nsystem_usec 12039009504\nnice_usec 4225875896\n": None,
    "nr_periods 42\nnr_throttled 40\nthrottled_time 1976971334\nnr_bursts 0\nburst_time 0\n": 1.976971334,
    "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n": 0.0,
}


@pytest.mark.parametrize(("text", "seconds"), STATS.items())
def test_the_machines_counters_are_read(
    text: str, seconds: tuple[float, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    assert busy_and_stolen_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "\n", "cpu", "cpu 1 2 3", "cpu a b c d e f g h", "cpu 1 2 3 4 5 6 -7 8", "intr 1 2 3 4 5 6 7"],
)
def test_what_is_no_counter_is_not_known(text: str) -> None:
    assert busy_and_stolen_s(text) == (None, None)
    assert throttled_s([text.split()]) is None


@pytest.mark.parametrize(("text", "seconds"), GROUPS.items())
def test_a_groups_counters_are_read(text: str, seconds: float | None) -> None:
    assert throttled_s([text.split()]) == seconds
    # An outer group without a limit hides nothing.
    assert throttled_s([text.split(), ["usage_usec", "9"]]) == seconds


@pytest.mark.parametrize(
    ("own", "folder"),
    [("0::/a/b\n", "a"), ("4:memory:/\n2:acct,cpu:/a/b\n0::/\n", "acct,cpu/a"), ("1:cpu:/a\n", "cpu/a")],
)
def test_an_outer_groups_limit_counts_in_both_versions(own: str, folder: str, tmp_path: Path) -> None:
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text("throttled_usec 5000000\n")
    mine = tmp_path / "mine"
    mine.write_text(own)
    assert throttled_s(cgroup_limit("cpu.stat", tmp_path / "groups", mine)) == 5.0
    assert throttled_s(cgroup_limit("cpu.stat", tmp_path / "groups", tmp_path / "nowhere")) is None


seconds = st.none() | st.integers(0, 1000).map(float)
loads = st.builds(HostLoad, st.integers(1, 1000).map(float), seconds, seconds, seconds, seconds)


@given(loads, loads)
def test_a_load_is_a_difference_and_what_is_not_known_stays_so(first: HostLoad, then: HostLoad) -> None:
    total = first + then
    for name in HostLoad.__slots__:
        parts = getattr(first, name), getattr(then, name)
        assert getattr(total, name) == (None if None in parts else sum(parts))
        if None not in parts:
            assert getattr(total - then, name) == parts[0]
    assert (first.stolen_share is None) == (first.stolen_s is None or first.busy_s is None)
    assert (first.held_back_share is None) == (first.waited_s is None or first.throttled_s is None)


PLANS = timing_plans(2, 256)
TRUTH = StepTime(((2, 0.01), (256, 0.2)), update_s=0.005)


def a_round(stolen: float | None, factor: float = 1.0, held_back: float = 0.0) -> Round:
    """Steps of the true law, in one second in which programs could use one core and were held back for a share of it."""
    load = HostLoad(1.0, None if stolen is None else 1.0 - stolen, stolen, held_back, held_back)
    return Round(tuple((TRUTH.seconds_of(plan) * factor, 0.0) for plan in PLANS), (), load)


@given(st.lists(st.sampled_from([None, 0.0, 0.01, 0.03, 0.2, 0.6]), min_size=1, max_size=12))
def test_a_stolen_round_is_not_used_where_enough_calm_ones_exist(stolen: list[float | None]) -> None:
    rounds = [a_round(share, 1 / (1 - (share or 0.0))) for share in stolen]
    quiet = [timed_round for timed_round, share in zip(rounds, stolen, strict=True) if (share or 0.0) < 0.02]
    assert calm(rounds) == (quiet if len(quiet) >= FEWEST_ROUNDS else rounds)


def test_timing_goes_on_until_enough_rounds_were_calm() -> None:
    """The host takes three tenths for ten rounds; the clock of the limit is real, and is not reached."""
    rounds = [a_round(0.3, 1 / 0.7)] * 10 + [a_round(0.0)] * 10
    law = measured_step_time(iter(rounds), PLANS, 60.0, on_cpu=False)
    assert law.stolen == 0.0
    assert law.interval is not None
    assert law.interval < 0.02
    for plan in PLANS:
        assert law.step_s(plan) == pytest.approx(TRUTH.step_s(plan), rel=1e-6)
    said = measured_step_time(iter(rounds[:10]), PLANS, 60.0)
    assert said.stolen == pytest.approx(0.3)
    assert said.interval is not None
    assert said.interval >= 0.3


shares = st.floats(0.0, 0.9)


@pytest.mark.slow
@given(shares, shares, shares, st.lists(st.floats(0.8, 1.3), min_size=4, max_size=8))
def test_no_interval_narrows_when_more_is_stolen(
    others: float, less: float, more: float, factors: list[float]
) -> None:
    law = with_uncertainty(fitted([a_round(None)] + [a_round(None, factor) for factor in factors], PLANS))
    less, more = sorted((less, more))
    narrow, wide = disturbed(law, others, less).interval, disturbed(law, others, more).interval
    assert law.interval is not None
    assert narrow is not None
    assert wide is not None
    assert law.interval <= narrow <= wide
    assert disturbed(replace(law, interval=None), others, more).interval is None


@pytest.mark.parametrize("held_back", [0.0, 0.3, 0.5])
def test_what_a_limit_costs_is_in_every_known_time(held_back: float) -> None:
    """A training of long steps waits for the same share of its time; small steps may have had the core throughout."""
    law = fitted([a_round(0.0, held_back=held_back)] * 6, PLANS)
    assert law.held_back == pytest.approx(held_back)
    for plan in PLANS:
        assert law.step_s(plan) == pytest.approx(TRUTH.step_s(plan) / (1 - held_back))

"""What was predicted beside what came: every settled prediction is in the record; an interval is as wide as it has to be."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.report.track_record import Settled, TrackRecord, track_records
from bsearch.search.run.opening import feasible_batches_sentence, quantile, widened
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.memory import MemoryLaw
from bsearch.spaces.study.file import study_from_dict
from conftest import TASKS, small_study
from helpers import SPACE, bsearch
from hypothesis import given
from hypothesis import strategies as st

ERRORS = st.lists(st.floats(-0.9, 5), min_size=1, max_size=60)


@given(ERRORS, st.floats(0.001, 1))
def test_a_widened_interval_holds_nine_in_ten_and_never_is_narrower(
    errors: list[float], stated: float
) -> None:
    wide = widened(stated, errors)
    assert wide is not None
    assert wide >= stated
    held = sum(abs(error) <= wide for error in errors) / len(errors)
    assert held >= 0.9 or len(errors) < 5
    if sum(abs(error) <= stated for error in errors) >= 0.9 * len(errors):
        assert wide == stated


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = quantile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    below = [value for value in values if value < found]
    assert len(below) < max(share * len(values), 1)


@given(ERRORS, st.floats(0.001, 1))
def test_a_record_counts_what_came_within(errors: list[float], stated: float) -> None:
    settled = [Settled(n, "training time", 2.0, 2.0 * (1 + error), stated) for n, error in enumerate(errors)]
    (record,) = track_records(settled)
    assert record.trials == len(errors)
    assert record.within == sum(one.is_within for one in settled)
    assert record.ratio[0] <= record.ratio[1] <= record.ratio[2]


def test_memory_that_was_not_used_is_no_fault() -> None:
    settled = [
        Settled(n, "peak memory", 100.0, came, 0.05)
        for n, came in enumerate((40.0, 100.0, 104.0, 106.0, 90.0, 95.0))
    ]
    record = TrackRecord.of(settled)
    assert (record.within, record.trials) == (5, 6)


@pytest.mark.slow
@pytest.mark.long
def test_a_study_shows_its_record_and_a_later_run_states_what_it_holds(
    study_file: Callable[..., Path],
) -> None:
    """Slower sleeps while it trains and not while it is timed, so that no prediction comes within."""
    path = study_file(
        task=f"{TASKS}:Slower",
        space=SPACE,
        budget={"trials": 5, "profile_s": 0.4},
    )
    ran = bsearch("run", path, "--serial")
    assert ran.exit_code == 0, ran.output
    document = json.loads(bsearch("show", path, "--record", "--json").output)
    times = [one for one in document["settled"] if one["what"] == "training time"]
    trials = json.loads(bsearch("export", path, "--to", "json", "--all").output)["all"]
    for one, trial in zip(times, trials, strict=True):
        assert one["predicted"] == pytest.approx(trial["train_s"], rel=1e-5)
        assert one["came"] == pytest.approx(trial["measured_train_s"], rel=1e-5)
        assert not one["within"]
    record = document["record"][0]
    assert record["within"] == 0
    assert record["interval"] >= record["ratio"][1] - 1 - 1e-5 > 3
    shown = bsearch("show", path, "--record").output
    assert "Training times were predicted to" in shown
    assert sum("training time" in line for line in shown.splitlines()) == 5
    again = bsearch("run", path, "--serial", "--trials", "6")
    (said,) = re.findall(r"to ±([\d.]+)%, in nine of ten of the 5 trials so far", again.output)
    assert float(said) / 100 == pytest.approx(record["interval"], rel=1e-4)


@pytest.mark.slow
def test_a_damaged_trial_and_a_cost_of_one_value_hide_nothing(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(
        task=f"{TASKS}:Points",
        space={
            **SPACE,
            "precision": ["fp32"],
        },
        budget={"trials": 3, "profile_s": 0.1},
    )
    ran = bsearch("run", path, "--serial")
    assert ran.exit_code == 0, ran.output
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection, connection:
        connection.execute("UPDATE bsearch_trial SET parameters = 'x' WHERE number = 1")
    for options in ([], ["--all"], ["--record"]):
        shown = bsearch("show", path, *options)
        assert shown.exit_code == 0, shown.output
        assert "trial" in shown.output


@pytest.mark.parametrize(("counts", "caps"), [(1, "10"), (2, "8"), ([1, 2], "8 or 10")])
def test_the_micro_batches_that_are_told_fit_on_as_many_devices_as_trials_have(
    counts: Any, caps: str
) -> None:
    spec = study_from_dict(small_study(devices={"per_trial": counts}))
    law = MemoryLaw(((1, 100), (11, 1100)))
    known = DeviceProfile(
        "cpu", "", 9, limit_bytes=1060, largest_micro_batch=10, memory=law, gradient_bytes=200
    )
    assert f"of at most {caps} samples" in feasible_batches_sentence(spec, (2, 9), [known])

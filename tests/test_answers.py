"""What programs read: every answer has a published schema, is short, and keeps what it had; errors are taken apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bsearch.search.report.stdio.answer import KINDS, MOST, answer, error_answer, schemas
from bsearch.spaces.errors import Fault, StudyFileError
from bsearch.spaces.laws.bottlenecks import bottlenecks
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime, TimedPlan
from bsearch.spaces.plan import BatchPlan
from click.testing import Result
from conftest import TASKS
from helpers import bsearch, validated
from hypothesis import given
from hypothesis import strategies as st

GOLDEN = Path(__file__).parent / "golden" / "answers-1.json"
SCHEMAS = schemas()


def asked(*arguments: object) -> Result:
    return bsearch(*arguments, "--json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    {
        "show": ["show", "{study}"],
        "trials": ["show", "{study}", "--all"],
        "trial": ["show", "{study}", "--pick", "0"],
        "reaching": ["show", "{study}", "--pick", "reaches:0.1"],
        "record": ["show", "{study}", "--record"],
        "ask": ["ask", "{study}"],
        "check": ["check", "{study}"],
        "machine": ["check", "--machine", "--serial"],
        "profile": ["profile", "{study}"],
        "run": ["run", "{study}", "--serial", "--trials", "6", "--out", "{folder}"],
        "train": ["train", "{study}", "--pick", "best", "--serial", "--keep", "{folder}/kept"],
    }.items(),
)
def test_each_answer_is_as_published(
    name: str, arguments: list[str], finished_study: Path, tmp_path: Path
) -> None:
    done = asked(*(part.format(study=finished_study, folder=tmp_path) for part in arguments))
    *events, last = done.stdout.splitlines()
    assert validated(last)["answer"] == name, done.output
    assert {validated(event)["answer"] for event in events} <= {"event"}


@pytest.mark.slow
def test_a_run_says_each_event_and_its_end(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points")
    done = asked("run", path, "--serial")
    *events, last = map(validated, done.stdout.splitlines())
    kinds = [event["event"] for event in events]
    assert (kinds.count("started"), kinds.count("ended")) == (4, 4)
    measured = [event for event in events if event["event"] == "measured"]
    assert all(event["metric"] == "accuracy" and 0 <= event["value"] <= 1 for event in measured)
    shares = [event["share"] for event in measured]
    assert (len(shares), shares.count(1.0)) == (8, 4)
    assert last["budget"] == {"trials": 4, "done": 4}
    assert last["best"] in [trial["trial"] for trial in last["front"]]
    assert last["next"]["keep_model"].endswith(f"study.yaml --pick {last['best']}")
    assert last["failure"] is None


def test_what_is_said_of_a_script_is_not_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bsearch("run", "--json", "--", "python", "none.py")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "looking at python none.py" in done.stderr
    assert validated(done.stderr.splitlines()[-1])["error"]["kind"] == "study"


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["show", "nothing.yaml"], 2, "study"),
        (["show", "sqlite:///nothing.db"], 1, "no_study"),
        (["show", "{study}", "--pick", "99"], 2, "study"),
        (["show", "{study}", "--nonsense"], 2, "usage"),
        (["run", "{wrong}"], 2, "study"),
        (["compare", "{study}"], 3, "usage"),
        (["compare", "{wrong}", "{wrong}"], 3, "study"),
    ],
)
def test_errors_are_answers_too(
    arguments: list[str], code: int, kind: str, finished_study: Path, study_file: Callable[..., Path]
) -> None:
    wrong = study_file(sampler="nonsense", space={"effective_batch": 16, "reference_rate": 0.1, "epocs": 3})
    done = asked(*(part.format(study=finished_study, wrong=wrong) for part in arguments))
    told = validated(done.stderr.splitlines()[-1])
    assert (done.exit_code, done.stdout, told["error"]["kind"]) == (code, "", kind)
    assert kind in SCHEMAS["$defs"]["error"]["properties"]["error"]["properties"]["kind"]["enum"]
    if "{wrong}" in arguments:
        assert len(told["others"]) == 1
        faults = {fault.get("got"): fault.get("expected") for fault in (told["error"], *told["others"])}
        assert faults["'nonsense'"] == "one of front, tpe, gp, nsga2, qmc, random, or module:attr"


def test_every_kind_of_error_is_published() -> None:
    published = SCHEMAS["$defs"]["error"]["properties"]["error"]["properties"]["kind"]["enum"]
    assert sorted({*KINDS.values(), "internal"}) == sorted(published)


@given(where=st.sampled_from(["space.rule", "study.yaml:4: space", ""]), got=st.text(max_size=30))
def test_a_message_is_taken_apart_or_left_whole(where: str, got: str) -> None:
    message = f"expected one of linear, sqrt; got {got!r}. Write sqrt."
    told = json.loads(error_answer(StudyFileError([Fault(where, message), Fault("b", "no words")])))
    assert told["error"].get("where", "") == where
    assert told["error"]["expected"] == "one of linear, sqrt"
    assert told["error"]["do"].endswith("Write sqrt.")
    assert told["others"] == [{"message": "b: no words"}]


@given(st.lists(st.text(min_size=1, max_size=400), max_size=60), st.text(max_size=9000))
def test_an_answer_is_short_and_says_what_it_left_out(entries: list[str], text: str) -> None:
    told = json.loads(line := answer("ask", {"groups": entries, "text": text}, "groups"))
    assert len(told["groups"]) + told.get("thinned", {}).get("groups", 0) == len(entries)
    assert len(line.encode("utf-8", "replace")) <= 3 * MOST  # what is not ASCII is escaped
    if entries and "thinned" in told:
        assert (told["groups"][0][:20], told["groups"][-1][:20]) == (entries[0][:20], entries[-1][:20])


def test_a_list_is_thinned_evenly_and_no_more_than_it_has_to_be() -> None:
    told = json.loads(line := answer("ask", {"groups": [f"{place:0100}" for place in range(60)]}, "groups"))
    assert MOST / 2 < len(line) <= MOST
    assert {*np.diff([int(entry) for entry in told["groups"]])} == {1, 2}


def test_schemas_only_grow() -> None:
    """A copy of version 1 as it was published: what it has is there, and required."""

    def grown(before: Any, now: Any, where: str) -> None:
        if isinstance(before, dict):
            for key, value in before.items():
                if key not in ("description", "title"):
                    assert key in now, f"{where}.{key}"
                    grown(value, now[key], f"{where}.{key}")
        elif isinstance(before, list):
            assert all(entry in now for entry in before), where
        else:
            assert before == now, where

    grown(json.loads(GOLDEN.read_text(encoding="utf-8")), SCHEMAS, "answers")


def law(fixed_s: float, per_sample_s: float, input_s: float) -> DeviceProfile:
    """A pass takes a fixed time and some for each sample; its loader some for each sample too."""
    sizes = (1, 4, 16, 64, 256)
    timed = tuple(
        TimedPlan(BatchPlan(size), (fixed_s + size * (per_sample_s + input_s),) * 3, input_s * size)
        for size in sizes
    )
    points = tuple((size, fixed_s + size * (per_sample_s + input_s)) for size in sizes)
    return DeviceProfile(
        "cpu", "none", 1000, step_times=(StepTime(points, 0.0, timed=timed),), largest_micro_batch=64
    )


@given(fixed_ms=st.floats(10, 400), per_sample_ms=st.floats(0.1, 3), slower=st.floats(1.2, 5))
def test_a_loader_limits_from_where_it_takes_half_of_a_step(
    fixed_ms: float, per_sample_ms: float, slower: float
) -> None:
    input_ms = per_sample_ms * slower
    found = {
        one.by: one for one in bottlenecks(law(fixed_ms / 1e3, per_sample_ms / 1e3, input_ms / 1e3), 256, 0.2)
    }
    crossing = fixed_ms / (input_ms - per_sample_ms)
    if crossing < 1 or crossing > 256:
        assert ("loader" in found) == (crossing < 1)
    else:
        low = found["loader"].low or 1
        assert low == pytest.approx(crossing, abs=1.01)
        assert "loader-bound from batch" in str(found["loader"])
    assert found["memory"].high == 64
    assert "evaluation" not in found
    launched = fixed_ms * 0.5 / (per_sample_ms + input_ms)
    assert ("launch" in found) == (launched >= 2) or 1.9 < launched < 2.1


@pytest.mark.parametrize(("devices", "limits"), [(1, ["memory"]), (2, [])])
def test_memory_limits_where_the_devices_together_hold_no_batch(devices: int, limits: list[str]) -> None:
    law = StepTime(((8, 0.01), (300, 0.4)), update_s=0.001, devices=devices)
    profile = DeviceProfile("gpu", "none", 1000, largest_micro_batch=300, step_times=(law,))
    assert [limit.by for limit in bottlenecks(profile, 512, 0.0)] == limits

"""A study that ends with a trained model: its decisions, the model that it keeps, and real runs, also killed ones."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bsearch.search.report.terminal.deadline import plan_line
from bsearch.search.run.decisions.deadline import decide
from bsearch.search.run.decisions.eta import Span
from bsearch.search.run.decisions.final import Final, Pace
from bsearch.search.run.decisions.final_planner import FinalPlanner
from bsearch.search.run.decisions.target import reach
from bsearch.search.run.decisions.wall_time import WallTime
from bsearch.search.run.finish import Finish, Limit
from bsearch.search.run.kept_model import KeptModel
from bsearch.search.run.study_run import StudyRun
from bsearch.search.run.training import RESULT, Training, kept
from bsearch.search.store.stored import StoredStudy
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.search.suggest.outlook import Outlook
from bsearch.search.suggest.space_transform import SpaceTransform
from bsearch.search.suggest.suggester import Suggester
from bsearch.spaces.deadline import Plan, StoredDeadline, moment_of
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.readable import UNLIMITED
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import changed_study, parse_study
from bsearch.spaces.study.goals import Budget, Metric
from bsearch.spaces.trial import Measurement, TrialSetup
from click.testing import CliRunner, Result
from conftest import BSEARCH, TASKS
from helpers import as_optuna, finished, run, setup
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import IntDistribution

# How long trainings take by the clock


def spans(*slowdowns: float) -> list[Span]:
    return [Span(10.0 * number, 10.0 * number + 2 * each + 0.5, 2.0, 2 * each, 1.0) for number, each in enumerate(slowdowns)]


@given(st.lists(st.floats(0.5, 3.0), max_size=30), st.floats(0.1, 1000.0), st.floats(0.6, 0.99))
def test_more_certainty_takes_more_time(slowdowns: list[float], known_s: float, sure: float) -> None:
    wall = WallTime.of(spans(*slowdowns), whole_s=1000.0)
    at_most_s = wall.at_most_s(known_s, sure)
    assert wall.at_most_s(known_s, 0.5) < at_most_s < wall.at_most_s(known_s, sure + 0.005)
    assert float(wall.probability(known_s, at_most_s)) == pytest.approx(sure, abs=1e-6)
    assert float(wall.probability(wall.longest_s(at_most_s, sure), at_most_s)) == pytest.approx(sure, abs=1e-6)


def test_trials_that_take_twice_as_long_as_known_are_believed() -> None:
    assert float(WallTime.of(spans(*[2.0] * 20)).expected_s(10.0)) == pytest.approx(20.5, rel=0.05)


def test_a_machine_that_became_slower_is_believed_to_stay_so() -> None:
    steady, slower = (WallTime.of(spans(*[1.0] * 10, *last), whole_s=400.0) for last in ([1.0] * 4, [1.6] * 4))
    assert slower.slowdown == pytest.approx(1.6, rel=0.1)
    # And may do so again: the same margin is worth less.
    assert float(slower.probability(100.0, 1.2 * float(slower.expected_s(100.0)))) < float(steady.probability(100.0, 120.6))


def test_over_a_longer_time_the_machine_may_change_more() -> None:
    wall = replace(WallTime.of(spans(*[1.0] * 20), whole_s=1000.0), overhead_s=0.0)
    margins = [wall.at_most_s(known_s, 0.95) / known_s for known_s in (1.0, 100.0, 500.0)]
    assert margins == sorted(margins)
    assert margins[0] < 1.05 < margins[-1]


@pytest.mark.parametrize(("drift", "noise"), [(0.0, 0.03), (0.15, 0.03), (0.3, 0.1)])
def test_what_is_said_of_a_time_comes_true_as_often(drift: float, noise: float) -> None:
    """Machines whose speed moves as the model has it: a training is done in time in the share that was said."""
    rng, said, came = np.random.default_rng(0), [], []
    for _ in range(400):
        steps = rng.normal(0.0, drift * math.sqrt(10.0 / 400.0), 40)
        level = rng.normal(0.0, 0.2) + np.cumsum(steps)
        wall = WallTime.of(spans(*np.exp(level[:20] + rng.normal(0, noise, 20))), whole_s=400.0)
        known_s = 180.0
        took_s = known_s * float(np.exp(level[20:38]).mean()) * math.exp(rng.normal(0, noise)) + wall.overhead_s
        within_s = known_s * math.exp(level[19] + rng.normal(0.1, 0.15))
        said.append(float(wall.probability(known_s, within_s)))
        came.append(took_s <= within_s)
    assert np.mean(came) == pytest.approx(np.mean(said), abs=0.06)
    sure = np.array(said) > 0.9
    assert np.mean(np.array(came)[sure]) > 0.87


# What to do with a free device


def outlook(lengths: int = 8, settings: int = 3, slope: float = 0.1, spread: float = 0.05) -> Outlook:
    """Settings at lengths that double; each is better by `slope` than the one before, and settings differ by `spread`."""
    transform, rng = SpaceTransform({"epochs": IntDistribution(1, 2 ** (lengths - 1), log=True)}), np.random.default_rng(0)
    tried = np.repeat([0, *[-1] * settings], lengths)
    length = np.tile(np.arange(lengths), settings + 1)
    known = np.where(tried >= 0, 0.0, rng.normal(0, spread, (200, settings + 1))[:, np.repeat(range(settings + 1), lengths)])
    reached = 0.5 + slope * length + known
    points = np.array([transform.encode({"epochs": 2**each}) for each in length])
    setting = np.repeat(np.arange(settings + 1), lengths)
    done = np.arange(len(tried)) == 0
    seconds, devices = 2.0**length, np.ones(len(tried), dtype=np.int64)
    return Outlook(transform, {}, points, setting, tried, done, seconds, devices, reached, reached, reached[:, 0], 0.1)


def pace(left_s: float, trial_s: float = 1.0, free_in_s: tuple[float, ...] = (0.0,), wall: WallTime | None = None) -> Pace:
    return Pace(wall or WallTime(), left_s, trial_s, free_in_s)


def test_while_a_search_costs_the_final_training_nothing_it_goes_on() -> None:
    decision = decide(outlook(), pace(10_000.0), sure=0.95)
    assert decision.trials > 0
    assert decision.final is not None
    assert decision.final.parameters == {"epochs": 128}


def test_when_the_time_is_short_the_longest_training_that_fits_begins() -> None:
    decision = decide(outlook(spread=0.01), pace(100.0, 40.0), sure=0.95)
    assert decision.trials == 0
    assert decision.final is not None
    assert decision.final.parameters == {"epochs": 64}


@given(st.floats(0.5, 300.0), st.floats(0.1, 50.0), st.floats(0.6, 0.99), st.floats(0.0, 0.3), st.floats(0.001, 0.3))
def test_what_is_planned_fits(left_s: float, trial_s: float, sure: float, slope: float, spread: float) -> None:
    wall = WallTime.of(spans(1.3, 1.4, 1.2, 1.5), whole_s=400.0)
    decision = decide(outlook(slope=slope, spread=spread), pace(left_s, trial_s, wall=wall), sure)
    if decision.final is not None:
        taken_s = wall.at_most_s(decision.final.known_s, sure)
        assert taken_s + decision.trials * trial_s <= left_s + 1e-6


def test_a_training_on_several_devices_begins_when_they_are_free() -> None:
    several = replace(outlook(spread=0.01), devices=np.full(32, 4))
    (early, late) = (decide(several, pace(100.0, 90.0, free), sure=0.95).final for free in ((0.0,), (0.0, 20.0, 30.0, 60.0)))
    assert early is not None
    assert late is not None
    assert (early.devices, early.wait_s, early.parameters) == (4, 0.0, {"epochs": 64})
    assert (late.wait_s, late.parameters) == (60.0, {"epochs": 16})


# How a target is reached


def chances(probabilities: Sequence[float], seconds: Sequence[float], draws: int = 4000) -> Outlook:
    """Trainings that reach 1 with these probabilities, each by itself, and 0 otherwise."""
    others = [0.0] * (8 - len(seconds))
    measured = (np.random.default_rng(1).random((draws, 8)) < [*probabilities, *others]).astype(float)
    takes_s = np.array([*seconds, *(1.0 + each for each in others)])
    return replace(
        outlook(settings=0),
        done=np.zeros(8, bool),
        seconds=takes_s,
        reached=measured,
        measured=measured,
        best_so_far=np.zeros(draws),
    )


@given(st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0.5, 50.0)), min_size=1, max_size=6), st.integers(1, 4))
def test_the_way_to_a_target_begins_with_the_most_chances_a_second(each: list[tuple[float, float]], devices: int) -> None:
    probabilities, takes_s = zip(*each, strict=True)
    seen = reach(chances(probabilities, takes_s), 1.0, pace(math.inf, free_in_s=(0.0,) * devices), 0.95)
    assert seen.first is not None
    worth = np.array(probabilities) / takes_s
    assert worth[seen.first] >= 0.8 * worth.max()
    assert seen.first_chance == pytest.approx(probabilities[seen.first], abs=0.04)
    # Each is independent of the others: one of them reaches it, unless all fall short.
    assert seen.chance == pytest.approx(1 - np.prod(1 - np.array(probabilities)), abs=0.04)
    assert devices > 1 or takes_s[seen.first] <= seen.earliest_s + 1e-9
    assert seen.earliest_s <= seen.expected_s


def test_of_independent_chances_the_expected_time_is_that_of_a_simulation() -> None:
    probabilities, takes_s = [0.3, 0.5, 0.2], [1.0, 4.0, 1.0]  # in the order 0, 2, 1
    seen = reach(chances(probabilities, takes_s), 1.0, pace(math.inf), 0.95)
    assert seen.earliest_s == 1.0
    assert seen.expected_s == 6.0  # after the first two, .56 of the draws are short
    assert seen.chance == pytest.approx(0.72, abs=0.03)


def test_a_target_out_of_reach_is_said_to_be() -> None:
    seen = reach(outlook(), 5.0, pace(math.inf), 0.95)
    assert (seen.first, seen.chance, seen.earliest_s) == (None, 0.0, math.inf)


def test_by_a_deadline_only_what_fits_counts() -> None:
    seen = reach(chances([0.9, 0.9], [10.0, 200.0]), 1.0, pace(50.0), 0.95)
    assert (seen.first, round(seen.chance, 1)) == (0, 0.9)


# The model that is kept


def keeper(folder: Path, study: str = "small", trials: Sequence[TrialRecord] = (), sign: float = 1.0) -> KeptModel:
    def keep(training: Training) -> Training:
        return kept(study, {"task": {"code": "x"}}, f"{TASKS}:Points", "x", training)

    return KeptModel(folder, study, sign, keep, trials)


def ended(number: int, accuracy: float) -> TrialRecord:
    return TrialRecord.of(number, "complete", {}, TrialFacts(), (1.0, accuracy), ended_at="2026-11-27T00:00:00+00:00")


def offered(model: KeptModel, number: int, accuracy: float) -> bool:
    made = replace(setup(), number=number, model_folder=model.folder_of(number))
    own = Path(model.folder_of(number))
    own.mkdir(parents=True)
    (own / "model.pt").write_text(str(number))
    return model.offer(made, [Measurement(400, 1.0, accuracy=accuracy)])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_it_is_the_best_of_those_so_far(tmp_path_factory: pytest.TempPathFactory, hundredths: list[int]) -> None:
    folder = tmp_path_factory.mktemp("kept") / "model"
    model = keeper(folder)
    for number, each in enumerate(hundredths):
        taken = offered(model, number, each / 100)
        best = hundredths.index(max(hundredths[: number + 1]))
        assert taken == (best == number)
        assert (folder / "model.pt").read_text() == str(best)
        again = keeper(folder, trials=[ended(number, each / 100) for number, each in enumerate(hundredths)])
        assert (again.trial, again.score) == (best, hundredths[best] / 100)
    model.clean()
    assert [path.name for path in folder.parent.iterdir() if any(path.iterdir())] == ["model"]


def test_what_was_being_replaced_when_the_driver_died_is_there_again(tmp_path: Path) -> None:
    assert offered(keeper(tmp_path / "model"), 3, 0.5)
    (tmp_path / "model").rename(tmp_path / ".model.bsearch-before")
    assert keeper(tmp_path / "model", trials=[ended(3, 0.5)]).trial == 3
    assert (tmp_path / "model" / RESULT).exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thesis.tex").write_text("x")
    with pytest.raises(StudyFileError, match=r"budget\.keep: expected an empty folder"):
        keeper(tmp_path / "model")
    offered(keeper(tmp_path / "other", "another"), 1, 0.5)
    for study, trials in (("small", [ended(1, 0.5)]), ("another", []), ("another", [ended(1, 0.6)])):
        with pytest.raises(StudyFileError, match=r"budget\.keep"):
            keeper(tmp_path / "other", study, trials)


def test_folders_beside_it_are_left_alone_and_a_link_is_followed(tmp_path: Path) -> None:
    for name in ("model.before", "model.trials", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "model").symlink_to("target")
    model = keeper(tmp_path / "model")
    assert offered(model, 0, 0.5)
    assert offered(model, 1, 0.6)
    model.clean()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.before", "model.trials", "target"}
    assert (tmp_path / "target" / "model.pt").read_text() == "1"


def test_a_folder_that_cannot_be_written_is_told_at_once() -> None:
    with pytest.raises(StudyFileError, match=r"budget\.keep: expected a folder that can be written"):
        keeper(Path("/proc/nomodel"))


# What cannot be


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("{by: '25:00'}", "budget.by: expected a time of day"),
        ("{by: soon}", "budget.by: expected a time of day"),
        ("{by: 2h, hours: 2}", "budget.hours: expected it or budget.by"),
        ("{keep: model}", "budget.keep: expected budget.by, cost or until"),
        ("{by: 2h, sure: 1.5}", "budget.sure"),
        ("{by: 400d}", "budget.by: expected at most a year"),
        ("{until: 0.9, hours: 2}", "budget.hours: expected budget.by with until, got hours. Write by: 2h."),
    ],
)
def test_a_study_file_is_refused_by_its_line(budget: str, words: str) -> None:
    text = f"study: x\ntask: tasks.py:X\nspace: {{effective_batch: 32, reference_rate: 0.1}}\nbudget: {budget}\n"
    with pytest.raises(StudyFileError) as refused:
        parse_study(text)
    assert words in str(refused.value)
    assert "study.yaml:4" in str(refused.value)


def test_a_deadline_given_in_python_limits_the_study_instead_of_its_trials() -> None:
    study = parse_study("study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\n")
    assert (study.budget.trials, changed_study(study, {"budget": {"by": "2h"}}).budget.trials) == (20, UNLIMITED)


@pytest.mark.parametrize(
    ("now", "text", "moment"),
    [
        ("2026-01-10T12:00-05:00", "2026-07-28 09:00", "2026-07-28T09:00:00-04:00"),
        ("2026-03-08T01:00-05:00", "18:00", "2026-03-08T18:00:00-04:00"),
        ("2026-07-10T12:00-04:00", "2026-11-28 09:00", "2026-11-28T09:00:00-05:00"),
    ],
)
def test_a_moment_is_by_the_rules_of_its_own_day(monkeypatch: pytest.MonkeyPatch, now: str, text: str, moment: str) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert moment_of(text, datetime.fromisoformat(now)).isoformat() == moment
    finally:
        monkeypatch.undo()
        time.tzset()


def bsearch(*arguments: object) -> Result:
    from bsearch.cli import main

    return CliRunner().invoke(main, [str(one) for one in arguments])


LONG: dict[str, Any] = {
    "task": f"{TASKS}:Slow",
    "space": {
        "effective_batch": {"low": 16, "high": 64},
        "reference_rate": {"low": 0.02, "high": 0.5, "at_batch": 64},
        "epochs": {"low": 1, "high": 40},
    },
    "budget": {"profile_s": 0.5},
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--by", "2h"], "--by: expected a moment, got 2h. Write --within."),
        (["--within", "18:00"], "--within: expected a duration, got 18:00. Write --by."),
        (["--by", "18:00", "--within", "2h"], "expected --by or --within, got both"),
        (["--by", "2020-01-01 09:00"], "budget.by: expected a time in the future"),
        (["--within", "4s"], "budget.by: expected time for at least one training"),
        (["--spend", "2"], "devices.prices"),
    ],
)
def test_a_command_is_refused_in_words(study_file: Callable[..., Path], options: list[str], words: str) -> None:
    result = bsearch("run", study_file(**LONG), "--serial", *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


@pytest.mark.slow
def test_a_baseline_that_does_not_fit_is_told(study_file: Callable[..., Path]) -> None:
    changed = {**LONG, "task": f"{TASKS}:Slower", "baseline": [{"effective_batch": 16, "reference_rate": 0.1, "epochs": 40}]}
    result = bsearch("run", study_file(**changed), "--serial", "--within", "8s")
    assert "baseline" in result.output or result.exit_code == 0, result.output


# Real runs


def loaded(folder: Path) -> dict[str, Any]:
    assert torch.load(folder / "model.pt", weights_only=True)
    return json.loads((folder / RESULT).read_text())


@pytest.mark.slow
def test_a_study_is_done_in_time_with_its_model(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file(**LONG)
    result = bsearch("run", path, "--serial", "--within", "25s", "--keep", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    document, study = loaded(tmp_path / "kept"), StoredStudy.open(str(path))
    best = max(record.accuracy or 0.0 for record in study.records if record.outcome == "complete")
    assert document["accuracy"] == best
    assert "Model:" in result.output
    assert "Done" in result.output
    assert [path.name for path in tmp_path.iterdir() if "bsearch" in path.name] == []
    # Once its time has passed, the same command has nothing left to do.
    time.sleep(max(deadline(path).ends_at + 1 - time.time(), 0.0))
    again = bsearch("run", path, "--serial", "--within", "25s", "--keep", tmp_path / "kept")
    assert again.exit_code == 0
    assert "passed at" in again.output
    assert loaded(tmp_path / "kept") == document


def deadline(path: Path) -> StoredDeadline:
    stored = StoredStudy.open(str(path)).deadline
    assert stored is not None
    return stored


@pytest.mark.slow
def test_one_that_was_killed_ends_by_the_same_moment(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path, database = study_file(**LONG), tmp_path / "small.db"
    command = [BSEARCH, "run", path, "--serial", "--within", "45s", "--keep", tmp_path / "kept"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
    while not finished(database):
        assert first.poll() is None
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before, ends = finished(database), deadline(path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    after = finished(database)
    assert before.items() <= after.items()
    assert (deadline(path).began_at, deadline(path).ends_at) == (ends.began_at, ends.ends_at)
    assert ends.ends_at - ends.began_at == pytest.approx(45)
    document = loaded(tmp_path / "kept")
    assert (document["study"], document["accuracy"]) == ("small", max(values[1] for values in after.values()))


@pytest.mark.slow
def test_a_study_that_has_met_its_trials_still_trains_by_a_deadline(study_file: Callable[..., Path], tmp_path: Path) -> None:
    changed = {**LONG, "budget": {**LONG["budget"], "trials": 7}}
    path = study_file(**changed, baseline=[{"effective_batch": 64, "reference_rate": 0.02, "epochs": 1}])
    assert bsearch("run", path, "--serial").exit_code == 0
    before = StoredStudy.open(str(path)).records
    result = bsearch("run", path, "--serial", "--within", "60s", "--keep", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    assert "has met its budget" not in result.output
    after = StoredStudy.open(str(path))
    assert after.records[: len(before)] == before
    # What is left is for final trainings alone; where none promises more, none is trained, and no model was kept before.
    assert all(record.facts.final_training for record in after.records[len(before) :])
    assert (tmp_path / "kept").exists() == (len(after.records) > len(before))
    # Without a deadline it is what it was.
    assert "has met its budget" in bsearch("run", path, "--serial").output
    assert StoredStudy.open(str(path)).deadline is None


@pytest.mark.slow
def test_a_trial_that_was_shortened_is_stored_trained_and_exported_as_what_it_was(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    # Trainings of twenty seconds whose known time is far less.
    space = {**LONG["space"], "epochs": {"low": 30, "high": 40}}
    changed = {**LONG, "space": space, "task": f"{TASKS}:Slowest", "stopping": "none", "budget": {"profile_s": 0}}
    result = bsearch("run", study_file(**changed), "--serial", "--within", "20s", "--keep", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    study = StoredStudy.open(str(tmp_path / "study.yaml"))
    record = next(record for record in study.records if record.facts.shortened_to is not None)
    facts, made = record.facts, study.setup_of(record)
    assert facts.epochs is not None
    assert facts.planned_epochs is not None
    assert facts.epochs == made.epochs == pytest.approx(facts.planned_epochs * facts.shortened_to)
    # Whoever reads it reads what was trained: tables, laws, the sampler.
    assert record.parameters["epochs"] == record.settings["epochs"] == facts.epochs
    (there,) = [trial for trial in as_optuna(tmp_path / "small.db").trials if trial.number == record.number]
    assert there.params["epochs"] == facts.planned_epochs  # on its distribution
    assert facts.samples_budget == made.samples_budget == round(400 * made.epochs)
    assert record.values is not None
    assert record.values[0] == pytest.approx(facts.measured_train_s)
    # What trains it again has no deadline, and scores the test set.
    assert (made.ends_by, made.scores_test, made.model_folder) == (None, True, None)
    assert "shortened to" in result.output
    exported = bsearch("export", tmp_path / "study.yaml", "--to", "pytorch")
    assert "ends_by" not in exported.output


def test_on_every_kind_of_device_a_trial_ends_in_time_and_leaves_its_model(study_file: Callable[..., Path]) -> None:
    setups: list[TrialSetup] = []

    def look(study: StudyRun) -> None:
        setup = study.next_attempt()
        assert isinstance(setup, TrialSetup)
        study._planner.profiles["another"] = study._planner.profiles[study._planner.timed_on]
        setups.extend(study.setups(setup.number).values())
        study.put_back(setup.number)

    run(study_file(task=f"{TASKS}:Points", budget={"by": "20s", "trials": 2}), watch=look)
    assert len(setups) == 2
    assert all(setup.model_folder and setup.ends_by and not setup.scores_test for setup in setups)


def test_a_study_may_end_at_a_value_of_its_metric(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"until": 0.6, "trials": 30})
    result = run(path)
    assert result.stopped.startswith("budget.until: accuracy 0.6 was reached by trial")
    assert result.model is not None
    assert loaded(result.model)["accuracy"] >= 0.6


# What is said of it

NOON = datetime(2026, 11, 27, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("plan", "ends_s", "words"),
    [
        (None, 21_600, "no final training is planned yet; done by 18:00"),
        (
            Plan(NOON + 16_920, 23, 38.0, 2, 4260.0, "accuracy", 0.921, 0.941, NOON + 21_300, 0.953),
            21_600,
            "search until about 16:42, then train the setting of trial 23 for 1 h 11 min, 38 epochs on 2 devices; done by "
            "17:55, 95% sure to finish in full by 18:00; accuracy expected from 0.921 to 0.941 (90%)",
        ),
        (Plan(tried=3, train_s=60.0, done_by=NOON + 90, sure=1.0), 100, "99% sure to finish in full by 12:01:40"),
        (Plan(metric="accuracy"), None, "when the target, accuracy 0.92, will be reached is not known yet"),
        (
            Plan(train_s=2280.0, epochs=24.0, chance=0.41, reached_by=NOON + 31_200, not_before=NOON + 29_400),
            None,
            "the target, accuracy 0.92, is expected by about 20:40, not before 20:10 (90% sure); best chance: a new setting "
            "for 38 min 0 s, 24 epochs, 41%",
        ),
        (
            Plan(train_s=9.0, chance=0.0),
            None,
            "not expected to be reached in this space; best chance: a new setting for 9 s, 1%",
        ),
        (Plan(chance=0.0), None, "the target, accuracy 0.92, is not expected to be reached in this space"),
        (Plan(train_s=9.0, chance=0.2, not_before=NOON - 1), None, "the target, accuracy 0.92, may be reached any time now"),
        (
            Plan(train_s=9.0, chance=0.2, not_before=NOON + 60),
            None,
            "will probably not be reached; if it is, not before 12:01:00 (90% sure)",
        ),
        (
            Plan(tried=4, train_s=9.0, target="loss 2", chance=1.0, not_before=NOON + 60, reached_by=NOON + 60),
            3600,
            "the target, loss 2, is expected by about 12:01:00; best chance: the setting of trial 4 for 9 s, 99%; done by "
            "13:00 in any case",
        ),
    ],
)
def test_what_is_planned_is_said(plan: Plan | None, ends_s: float | None, words: str) -> None:
    ends = None if ends_s is None else NOON + ends_s
    deadline = StoredDeadline("accuracy 0.92", ends, None if ends is None else NOON, plan)
    line = plan_line(deadline, NOON)
    assert words in line
    assert "; ;" not in line
    assert not line.endswith("; ")


def test_a_check_foretells_the_metric_as_far_as_trials_tell(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points", space=LONG["space"], budget={"trials": 12, "profile_s": 0.5})
    before = " ".join(bsearch("check", path, "--set", "budget.by=10m").output.split())
    assert "what it will reach is not known before trials have run" in before
    assert bsearch("run", path, "--serial").exit_code == 0
    after = " ".join(bsearch("check", path, "--set", "budget.by=10m").output.split())
    found = re.search(r"judging by \d+ earlier trials, it should reach accuracy (\S+) to (\S+) \(90% interval\)", after)
    assert found, after
    assert 0 <= float(found[1]) <= float(found[2]) <= 1
    # Without a deadline there is no final training to foretell.
    assert "it should reach" not in bsearch("check", path).output


def test_a_share_is_foretold_within_its_ends_and_a_loss_is_not() -> None:
    final = Final({}, 0, 1.0, 1, 0.0, 0.1, is_last=True, chance=None, low=0.9, high=1.1)
    assert final.interval(1.0, [0.97]) == (0.9, 1.0)
    assert final.interval(1.0, [0.97, 1.3]) == (0.9, 1.1)
    assert final.interval(1.0, []) == (0.9, 1.1)
    loss = replace(final, low=-1.5, high=0.1)
    assert loss.interval(-1.0, [2.2]) == (-0.1, 1.5)
    assert loss.interval(-1.0, [0.8]) == (0.0, 1.5)


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [
        ({}, 20),
        ({"by": "60s"}, 3),
        ({"by": "10s"}, 2),
        ({"by": "2h"}, 20),
        ({"by": "18:00"}, 20),
        ({"by": "60s", "profile_s": 9}, 9),
    ],
)
def test_a_short_duration_leaves_less_for_timing_steps(budget: dict[str, Any], seconds: float) -> None:
    study = parse_study("study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\n")
    assert changed_study(study, {"budget": budget}).budget.profile_s == seconds


def test_a_deadline_is_about_time_so_that_the_front_is_too() -> None:
    text = (
        "study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\nobjectives: {speed: device_s}\n"
        "budget: {by: 2h}\n"
    )
    with pytest.raises(StudyFileError, match=r"objectives\.speed: expected train_s with budget\.by"):
        parse_study(text)


@pytest.mark.parametrize(
    ("budget", "trials"),
    [
        ({"until": 0.9}, 20),
        ({"until": 0.9, "keep": "m"}, 20),
        ({"by": "2h"}, UNLIMITED),
        ({"until": 0.9, "by": "2h"}, UNLIMITED),
    ],
)
def test_only_a_limit_of_time_or_money_leaves_the_trials_unlimited(budget: dict[str, Any], trials: int) -> None:
    study = parse_study("study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\n")
    assert changed_study(study, {"budget": budget}).budget.trials == trials


def limit(**changed: Any) -> Limit:
    return replace(Limit("10h", time.time(), time.time() + 36_000, cost=5.0, hourly=2.5), **changed)


def test_money_ends_a_study_before_its_deadline_and_does_not_move_that(tmp_path: Path) -> None:
    kept_in = keeper(tmp_path / "model")
    stored = Finish(Budget(by="10h", cost=5.0), Metric(), kept_in, limit(), None, None, dict).deadline()
    assert stored.ends_at is not None
    assert stored.over_at is not None
    assert stored.ends_at - time.time() == pytest.approx(36_000, abs=5)
    assert stored.over_at - time.time() == pytest.approx(7200, abs=5)
    money = Finish(Budget(cost=5.0, keep="m"), Metric(), kept_in, limit(ends_at=math.inf), None, None, dict).deadline()
    assert money.ends_at is None
    assert money.over_at == pytest.approx(time.time() + 7200, abs=5)


def test_earlier_trials_tell_of_the_machine_in_the_order_of_their_time(tmp_path: Path) -> None:
    """Short ones last: a machine that was slow for long trainings and has been fast since is fast."""

    def earlier(number: int, factor: float, known_s: float, ended_at: str) -> TrialRecord:
        facts = TrialFacts(train_s=known_s, train_s_source="known", measured_train_s=factor * known_s)
        at = f"2026-11-27T{ended_at}+00:00"
        return TrialRecord.of(number, "complete", {}, facts, (known_s, 0.5), started_at=at, ended_at=at)

    slow = [earlier(number, 1.5, 100.0, f"10:0{number}:00") for number in range(4)]
    fast = [earlier(number, 1.0, 1.0, f"11:0{number}:00") for number in range(4, 8)]
    made = Finish(Budget(by="10h"), Metric(), keeper(tmp_path / "model"), limit(), None, None, dict, [*slow, *fast])
    assert made._left()[1].slowdown < 1.2


class Planned(Suggester):
    """A suggester that always sees the same."""

    def __init__(self, seen: Outlook | None) -> None:
        self.seen = seen

    def suggest(self, trials: Any, count: int = 1, *, ready: Any = (), new: bool = True) -> list[Any]:
        return []

    def outlook(self, trials: Any) -> Outlook | None:
        return self.seen


def with_chance(number: int, chance: float, outcome: str = "complete") -> TrialRecord:
    facts = TrialFacts(target_chance=chance)
    return TrialRecord.of(number, outcome, {}, facts, (1.0, 0.5), ended_at="2026-11-27T00:00:00+00:00")


def test_after_trainings_that_fell_short_of_a_target_less_is_expected_of_the_next() -> None:
    planner = FinalPlanner(Planned(chances([0.6, 0.3], [10.0, 10.0])), 0.95, target=1.0)
    step = planner.next([], pace(math.inf))
    assert isinstance(step, Final)
    assert (step.is_last, step.known_s) == (True, 10.0)
    assert step.chance == pytest.approx(0.6, abs=0.04)
    first = planner.reach.first_chance
    planner.next([with_chance(number, 0.9, "error") for number in range(4)], pace(math.inf))
    assert planner.reach.first_chance == pytest.approx(first, abs=0.03)  # what was not measured tells nothing
    missed = [with_chance(number, 0.9) for number in range(8)]
    assert planner.next(missed, pace(math.inf)) == "search"
    assert planner.reach.first_chance < first / 2


def test_beside_a_deadline_a_target_never_leaves_time_unused() -> None:
    planner = FinalPlanner(Planned(outlook(spread=0.01)), 0.95, whole_s=100.0, target=1.0)
    trials = [TrialRecord.of(number, "complete", {}, TrialFacts(), (1.0, 0.5)) for number in range(8)]
    assert isinstance(planner.next(trials, pace(60.0), searches=False), Final)


def test_where_no_training_can_be_planned_there_is_no_outlook() -> None:
    suggester = FrontSuggester({"epochs": IntDistribution(1, 9)}, known_seconds=lambda parameters: math.nan)
    trials = [TrialRecord.of(n, "complete", {"epochs": n + 1}, TrialFacts(train_s=1.0), (1.0, 0.1 * n)) for n in range(8)]
    assert suggester.outlook(trials) is None


def test_a_suggestion_that_just_does_not_fit_does_not_end_the_search(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[TrialSetup] = []

    def look(study: StudyRun) -> None:
        fits = iter([False, False])
        monkeypatch.setattr(Finish, "fits", lambda self, parameters: next(fits, True))
        setup = study.next_attempt()
        assert isinstance(setup, TrialSetup)
        begun.append(setup)
        study.put_back(setup.number)

    run(study_file(task=f"{TASKS}:Points", budget={"by": "20s", "trials": 2}), watch=look)
    assert len(begun) == 1


def test_an_interrupted_trial_resumes_in_what_time_there_is(tmp_path: Path) -> None:
    moments = [time.time() + 60, time.time() - 60]
    left = [limit(cost=None, ends_at=ends, began_at=ends - 600) for ends in moments]
    resumes = [Finish(Budget(by="10m"), Metric(), keeper(tmp_path / "m"), each, None, None, dict).resumes() for each in left]
    assert resumes == [True, False]

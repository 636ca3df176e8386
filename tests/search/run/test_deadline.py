"""A study that ends with a trained model: its decisions, the model that it keeps, and real runs, also killed ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.search.report.terminal.deadline import deadline_line
from bsearch.search.run.decisions.eta import Span
from bsearch.search.run.finish import Finish
from bsearch.search.run.kept_model import KeptModel
from bsearch.search.run.study_run import StudyRun
from bsearch.search.run.training import RESULT, Training, kept
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.deadline import Deadline, moment_of
from bsearch.spaces.errors import OutputError, StudyFileError
from bsearch.spaces.readable import UNLIMITED
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import changed_study, parse_study
from bsearch.spaces.study.goals import Budget, Direction, Metric, turned
from bsearch.spaces.trial import Measurement, TrialSetup
from conftest import BASELINE, BSEARCH, TASKS
from helpers import SPACE, as_optuna, bsearch, finished, run, setup
from hypothesis import given
from hypothesis import strategies as st

# The model that is kept


def keeper(
    folder: Path, study: str = "small", trials: Sequence[TrialRecord] = (), direction: Direction = "maximize"
) -> KeptModel:
    def keep(training: Training) -> Training:
        return kept(study, {"task": {"code": "x"}}, f"{TASKS}:Points", "x", training)

    model = KeptModel(folder, study, Metric(direction=direction), keep, trials)
    model.begin(trials)
    return model


def ended(number: int, accuracy: float, direction: Direction = "maximize") -> TrialRecord:
    at = "2026-11-27T00:00:00+00:00"
    return TrialRecord.of(
        number, "complete", {}, TrialFacts(), (1.0, accuracy), ended_at=at, direction=direction
    )


def offered(model: KeptModel, number: int, accuracy: float, *more: str) -> bool:
    made = replace(setup(), number=number, model_folder=model.folder_of(number))
    own = Path(model.folder_of(number))
    for name in ("model.pt", *more):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(str(number))
    return model.offer(made, [Measurement(400, 1.0, accuracy=accuracy)])


@pytest.mark.slow
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.sampled_from(["maximize", "minimize"]))
def test_it_is_the_best_of_those_so_far(
    tmp_path_factory: pytest.TempPathFactory, hundredths: list[int], direction: Direction
) -> None:
    folder, best_of = tmp_path_factory.mktemp("kept") / "model", max if direction == "maximize" else min
    model = keeper(folder, direction=direction)
    for number, each in enumerate(hundredths):
        taken = offered(model, number, each / 100)
        best = hundredths.index(best_of(hundredths[: number + 1]))
        assert taken == (best == number)
        assert (folder / "model.pt").read_text() == str(best)
        again = keeper(
            folder, "small", [ended(n, each / 100, direction) for n, each in enumerate(hundredths)], direction
        )
        assert (again.trial, again.score) == (best, turned(hundredths[best] / 100, direction))
    model.clean([])
    assert [path.name for path in folder.parent.iterdir() if any(path.iterdir())] == ["model"]


def test_what_was_being_replaced_when_the_driver_died_is_there_again(tmp_path: Path) -> None:
    assert offered(keeper(tmp_path / "model"), 3, 0.5)
    (tmp_path / "model").rename(tmp_path / ".model.bsearch-small" / "before")
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
    model.clean([])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.before", "model.trials", "target"}
    assert (tmp_path / "target" / "model.pt").read_text() == "1"


def test_what_lies_beside_a_model_stays(tmp_path: Path) -> None:
    model = keeper(tmp_path / "model")
    assert offered(model, 0, 0.5)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    assert offered(model, 1, 0.6)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "model" / "model.pt").read_text() == "1"
    (tmp_path / ".model.bsearch-small").mkdir(exist_ok=True)
    (tmp_path / "model").rename(tmp_path / ".model.bsearch-small" / "before")  # killed while it was replaced
    assert keeper(tmp_path / "model", trials=[ended(1, 0.6)]).trial == 1
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


def test_what_lies_in_a_models_own_folder_stays(tmp_path: Path) -> None:
    """Ownership is each file's: neither the name of its folder nor its own says whose it is."""
    kept_in, before = tmp_path / "model", tmp_path / ".model.bsearch-small" / "before"
    model = keeper(kept_in)
    assert offered(model, 0, 0.5, "tokenizer/vocab.json", "old/only.bin")
    (kept_in / "tokenizer" / "added_tokens.json").write_text("mine")
    (kept_in / "old" / "notes").write_text("mine")
    (kept_in / "tokenizer" / "link").symlink_to("added_tokens.json")
    assert offered(model, 1, 0.6, "tokenizer/vocab.json")

    def held() -> dict[str, str]:
        return {
            str(path.relative_to(kept_in)): path.read_text() for path in kept_in.rglob("*") if path.is_file()
        }

    now = held()
    own = {"model.pt": "1", "tokenizer/vocab.json": "1"}
    mine = {"tokenizer/added_tokens.json": "mine", "tokenizer/link": "mine", "old/notes": "mine"}
    assert now.items() >= (own | mine).items()
    assert now.keys() == own.keys() | mine.keys() | {"log.csv", RESULT}
    assert not before.exists()
    # Killed while it was replaced; and then somebody has made the folder.
    before.parent.mkdir(exist_ok=True)
    kept_in.rename(before)
    kept_in.mkdir()
    assert keeper(kept_in, trials=[ended(1, 0.6)]).trial == 1
    assert held() == now


def test_a_file_of_the_users_is_not_replaced(tmp_path: Path) -> None:
    model = keeper(tmp_path / "model")
    assert offered(model, 0, 0.5)
    for name, text in (("model.pt", "mine"), ("config.json", "mine")):
        (tmp_path / "model" / name).write_text(text)
        with pytest.raises(
            OutputError, match=rf"holds something else by now \({name}\); the model is in .*/1"
        ):
            offered(model, 1, 0.6, "config.json")
        assert (tmp_path / "model" / name).read_text() == text
        (tmp_path / "model" / "model.pt").write_text("0")
    (tmp_path / ".model.bsearch-small" / "before").mkdir()
    (tmp_path / ".model.bsearch-small" / "before" / "mine").write_text("mine")
    with pytest.raises(StudyFileError, match=r"budget\.keep.*/before is of something else\. Move it away"):
        keeper(tmp_path / "model", trials=[ended(0, 0.5), ended(1, 0.6)])


def test_another_drivers_model_is_the_one_to_beat(tmp_path: Path) -> None:
    """It was kept between this driver's look at the folder and its lock."""
    late = KeptModel(tmp_path / "model", "small", Metric(), lambda training: training)
    assert offered(keeper(tmp_path / "model"), 0, 0.5)
    late.begin([ended(0, 0.5)])
    assert (late.trial, late.score) == (0, 0.5)


def test_a_driver_that_is_refused_touches_nothing(tmp_path: Path) -> None:
    model = keeper(tmp_path / "model")
    Path(model.folder_of(0)).mkdir(parents=True)
    (Path(model.folder_of(0)) / "model.pt").write_text("half")
    before = sorted(tmp_path.rglob("*"))
    # Which then waits for the lock in vain.
    KeptModel(tmp_path / "model", "small", Metric(), lambda training: training)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_model_is_no_model_and_one_that_cannot_be_kept_stays(tmp_path: Path) -> None:
    model = keeper(tmp_path / "model")
    assert offered(model, 0, 0.5)
    (tmp_path / "model" / "model.pt").write_text("other")
    with pytest.raises(
        StudyFileError, match=r"expected the model of trial 0 as it was written, got another model\.pt"
    ):
        keeper(tmp_path / "model", trials=[ended(0, 0.5)])
    (tmp_path / "model" / RESULT).write_text('{"study": "another"}')
    with pytest.raises(OutputError, match=r"holds something else by now \(.*\); the model is in .*/1"):
        offered(model, 1, 0.6)
    model.clean([ended(1, 0.6)])
    shutil.rmtree(tmp_path / "model")
    Path(model.folder_of(2)).mkdir()
    half = replace(ended(2, 0.7), outcome="interrupted")
    # What was said in an earlier run holds in the next.
    again = keeper(tmp_path / "model", trials=[ended(1, 0.6), half])
    assert (Path(model.folder_of(1)) / "model.pt").read_text() == "1"
    assert not Path(again.folder_of(2)).exists()
    # Of a database that was deleted.
    with pytest.raises(StudyFileError, match=r"/1 is of something else\. Move it away"):
        keeper(tmp_path / "model")


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
        ("{by: 400d}", "budget.by: expected at most a year"),
        ("{until: 0.9, hours: 2}", "budget.hours: expected budget.by with until, got hours. Write by: 2h."),
    ],
)
def test_a_study_file_is_refused_by_its_line(budget: str, words: str) -> None:
    text = (
        f"study: x\ntask: tasks.py:X\nspace: {{effective_batch: 32, reference_rate: 0.1}}\nbudget: {budget}\n"
    )
    with pytest.raises(StudyFileError) as refused:
        parse_study(text)
    assert words in str(refused.value)
    assert "study.yaml:4" in str(refused.value)


@pytest.mark.parametrize(
    ("budget", "trials"),
    [
        ("{hours: 2}", UNLIMITED),
        ("{cost: 2}", UNLIMITED),
        ("{hours: 2, trials: 20}", 20),
        ("{hours: 2, cost: 2, trials: 7}", 7),
    ],
)
def test_hours_or_cost_alone_are_the_only_limit(budget: str, trials: int) -> None:
    text = (
        f"study: x\ntask: tasks.py:X\nspace: {{effective_batch: 32, reference_rate: 0.1}}\nbudget: {budget}\n"
    )
    assert parse_study(f"{text}devices: {{prices: {{cpu: 1.0}}}}\n").budget.trials == trials


def test_repeats_in_the_last_part_of_no_number_of_trials_are_refused() -> None:
    text = "study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\nbudget: {hours: 2}\nconfirm: 2\n"
    with pytest.raises(
        StudyFileError,
        match=r"confirm: expected fewer than budget\.trials, which has to be given with it; got 2",
    ):
        parse_study(text)


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
        (["--set", "budget.cost=2"], "devices.prices"),
    ],
)
def test_a_command_is_refused_in_words(
    study_file: Callable[..., Path], options: list[str], words: str
) -> None:
    result = bsearch("run", study_file(**LONG), "--serial", *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())


# Real runs


def loaded(folder: Path) -> dict[str, Any]:
    assert torch.load(folder / "model.pt", weights_only=True)
    return json.loads((folder / RESULT).read_text())


@pytest.mark.slow
@pytest.mark.long
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


def deadline(path: Path) -> Deadline:
    stored = StoredStudy.open(str(path)).deadline
    assert stored is not None
    return stored


@pytest.mark.slow
@pytest.mark.long
def test_one_that_was_killed_ends_by_the_same_moment(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path, database = study_file(**LONG), tmp_path / "small.db"
    command = [BSEARCH, "run", path, "--serial", "--within", "45s", "--keep", tmp_path / "kept"]
    first = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
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
def test_a_study_with_a_deadline_ends_at_its_trials_too(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    path = study_file(**{**LONG, "budget": {**LONG["budget"], "trials": 3}})
    result = bsearch("run", path, "--serial", "--within", "60s", "--keep", tmp_path / "kept")
    assert result.exit_code == 0, result.output
    study = StoredStudy.open(str(path))
    assert len(study.records) == 3
    assert loaded(tmp_path / "kept")["accuracy"] == max(record.accuracy for record in study.records)
    # Without a deadline it is what it was.
    assert "has met its budget" in bsearch("run", path, "--serial").output
    assert StoredStudy.open(str(path)).deadline is None


@pytest.mark.slow
def test_a_trial_that_was_shortened_is_stored_trained_and_exported_as_what_it_was(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    # Trainings of twenty seconds whose known time is far less.
    space = {**LONG["space"], "epochs": {"low": 30, "high": 40}}
    changed = {
        **LONG,
        "space": space,
        "task": f"{TASKS}:Slowest",
        "stopping": "none",
        "budget": {"profile_s": 0},
    }
    result = bsearch("run", study_file(**changed), "--serial", "--within", "20s", "--keep", tmp_path / "kept")
    study = StoredStudy.open(str(tmp_path / "study.yaml"))
    short = max(one.facts.shortened_to or 1.0 for one in study.records if one.outcome == "complete") < 0.5
    assert ("no training had more than" in result.output) == short
    assert result.exit_code == (1 if short else 0), result.output
    record = next(record for record in study.records if record.facts.shortened_to is not None)
    facts, made = record.facts, study.setup_of(record)
    assert facts.epochs is not None
    assert facts.planned_length is not None
    assert facts.epochs == made.epochs == pytest.approx(facts.planned_length * facts.shortened_to)
    # Whoever reads it reads what was trained: tables, laws, the sampler.
    assert record.parameters["epochs"] == record.settings["epochs"] == facts.epochs
    (there,) = [trial for trial in as_optuna(tmp_path / "small.db").trials if trial.number == record.number]
    assert there.params["epochs"] == facts.planned_length  # on its distribution
    assert facts.samples_budget == made.samples_budget == round(400 * made.epochs)
    assert record.values is not None
    assert record.values[0] == pytest.approx(facts.measured_train_s)
    # What trains it again has no deadline, and scores the test set.
    assert (made.ends_by, made.scores_test, made.model_folder) == (None, True, None)
    assert "shortened to" in result.output
    exported = bsearch("export", tmp_path / "study.yaml", "--to", "pytorch")
    assert "ends_by" not in exported.output


def test_on_every_kind_of_device_a_trial_ends_in_time_and_leaves_its_model(
    study_file: Callable[..., Path],
) -> None:
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


@pytest.mark.parametrize(
    ("task", "until", "changes"),
    [
        ("Points", 98, {}),
        (
            "blows_up",
            -5,
            {
                "objectives": {"metric": {"name": "val_loss", "direction": "minimize"}},
                "training": {"samples": 640},
            },
        ),
    ],
)
def test_a_value_that_was_not_reached_is_a_failure(
    study_file: Callable[..., Path], task: str, until: float, changes: Any
) -> None:
    path = study_file(task=f"{TASKS}:{task}", space=SPACE, budget={"until": until, "trials": 2}, **changes)
    for _ in range(2):  # also of a study whose budget was met before
        result = run(path)
        assert f" {until} was not reached; the model that was kept, trial " in result.failure
    assert bsearch("run", path, "--serial").exit_code == 1


def test_a_study_without_a_complete_trial_is_a_failure(study_file: Callable[..., Path]) -> None:
    path = study_file(
        task=f"{TASKS}:always_nan", space=SPACE, training={"samples": 640}, budget={"trials": 2}
    )
    assert [run(path).failure for _ in range(2)] == ["none of 2 trials completed"] * 2


# What is said of it

NOON = datetime(2026, 11, 27, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("ends_s", "words"),
    [
        (21_600, "ends by 18:00 at the latest and keeps the best model of all trials"),
        (100, "ends by 12:01:40 at the latest and keeps the best model of all trials"),
        (86_400, "ends by 2026-11-28 12:00 at the latest and keeps the best model of all trials"),
        (-60, "its deadline, 11:59:00, has passed"),
    ],
)
def test_until_when_it_searches_is_said(ends_s: float, words: str) -> None:
    assert deadline_line(Deadline("18:00", NOON, NOON + ends_s), NOON) == words


@pytest.mark.slow
def test_a_check_says_how_many_trials_fit(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points", space=LONG["space"], budget={"hours": 1e-4, "profile_s": 0.5})
    said = " ".join(
        bsearch("check", path, "--set", "budget.by=10m", "--set", "budget.hours=null").output.split()
    )
    assert re.search(r"about \d+ trials fit, \d+ at once; the best model of all is kept", said)
    said = " ".join(bsearch("check", path).output.split())
    assert re.search(r"\b\d{1,3} trials train and evaluate for about", said), said
    assert "will end the study before its" not in said
    said = " ".join(bsearch("check", path, "--set", "budget.trials=9000").output.split())
    assert "the time or cost under `budget:` will end the study before its 9000 trials" in said


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
def test_only_a_limit_of_time_or_money_leaves_the_trials_unlimited(
    budget: dict[str, Any], trials: int
) -> None:
    study = parse_study("study: x\ntask: tasks.py:X\nspace: {effective_batch: 32, reference_rate: 0.1}\n")
    assert changed_study(study, {"budget": budget}).budget.trials == trials


SECONDS = st.floats(0.0, 36_000.0)


@given(SECONDS, SECONDS)
def test_a_study_trains_until_what_comes_after_has_to_begin(
    tmp_path_factory: Any, left_s: float, passed_s: float
) -> None:
    now = time.time()
    deadline = Deadline("10h", now - passed_s, now + left_s)
    made = Finish(
        Budget(by="10h"), keeper(tmp_path_factory.mktemp("kept") / "model"), deadline, None, dict, []
    )
    setup_of = made.setup(setup())
    assert setup_of.ends_by - now == pytest.approx(left_s - deadline.closing_s(1.0), abs=5)
    assert made.resumes() is (setup_of.ends_by > time.time())
    assert deadline.closing_s(9.0) <= max(0.12 * (passed_s + left_s), 5.0) + 1e-6
    assert 5.0 <= deadline.closing_s(0.1) == deadline.closing_s(1.0) <= deadline.closing_s(2.0) <= 30.0


def test_earlier_trials_show_how_fast_the_machine_is(tmp_path: Path) -> None:
    facts = TrialFacts(train_s=10.0, train_s_source="known", measured_train_s=15.0)
    at, limit = "2026-11-27T10:00:00+00:00", Deadline("10h", time.time(), time.time() + 7200)
    earlier = TrialRecord.of(0, "complete", {}, facts, (10.0, 0.5), started_at=at, ended_at=at)
    fresh, resumed = (
        Finish(Budget(by="10h"), keeper(tmp_path / "model"), limit, None, dict, records)
        for records in ([], [earlier])
    )
    assert resumed.longest_s() == pytest.approx(fresh.longest_s() / 1.5, rel=0.01)


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=20), st.floats(1.0, 1000.0))
def test_what_is_expected_to_fit_follows_the_machine(
    tmp_path_factory: Any, slowdowns: list[float], known_s: float
) -> None:
    """A training fits if what it takes on this machine, by the trials so far, is over before the end is set aside."""
    spans = [
        Span(10.0 * n, 10.0 * n + 2 * each + 0.5, 2.0, 2 * each, 1.0, 1.0, 1)
        for n, each in enumerate(slowdowns)
    ]
    mean = sum(slowdowns) / len(slowdowns)
    takes_s, aside_s = known_s * mean + 0.5, 60.0
    for left_s, fits in ((1.1 * takes_s + aside_s + 10, True), (0.9 * takes_s, False)):
        ends = time.time() + left_s
        kept_in = keeper(tmp_path_factory.mktemp("kept") / "model")
        deadline = Deadline("10h", ends - 2 * left_s, ends)
        made = Finish(Budget(by="10h"), kept_in, deadline, lambda values: known_s, dict, [])
        made.follow(lambda: spans)
        assert made.fits({}) is fits
        assert made.longest_s() < left_s / mean


def test_a_setting_that_does_not_fit_does_not_end_the_search_and_of_the_baseline_is_told(
    study_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, said = list[TrialSetup](), list[str]()

    def look(study: StudyRun) -> None:
        fits = iter([False, False])
        monkeypatch.setattr(Finish, "fits", lambda self, parameters: next(fits, True))
        setup = study.next_attempt()
        assert isinstance(setup, TrialSetup)
        begun.append(setup)
        study.put_back(setup.number)

    path = study_file(task=f"{TASKS}:Points", budget={"by": "20s", "trials": 2}, baseline=[BASELINE])
    run(path, watch=look, notify=lambda event: said.append(event.text))
    assert len(begun) == 1
    assert said.count("baseline.0 is not trained: there is not enough time left for it") == 1


def test_a_run_that_could_keep_no_model_fails_and_says_where_they_are(
    study_file: Callable[..., Path], tmp_path: Path
) -> None:
    """Somebody puts a folder of their own in the place while trials train."""
    kept_in = tmp_path / "kept"
    task = tmp_path / "spoils.py"
    task.write_text(
        "from pathlib import Path\nfrom bsearch.objectives.digits import Digits\n\n\nclass Spoils(Digits):\n"
        "    def after_step(self, model, setup):\n"
        "        if setup.model_folder is None:\n            return\n"
        f"        Path({str(kept_in)!r}).mkdir(exist_ok=True)\n        Path({str(kept_in / 'mine')!r}).write_text('x')\n"
    )
    space = {
        "effective_batch": {"low": 32, "high": 64},
        "reference_rate": {"low": 0.05, "high": 0.2},
        "epochs": 1,
    }
    path = study_file(task=f"{task}:Spoils", space=space, budget={"trials": 2, "profile_s": 0})
    result = bsearch("run", path, "--serial", "--until", "0.9999", "--keep", kept_in)
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert f"budget.keep: no model is in {kept_in}, though 2 trials completed" in output
    assert "no trial has completed" not in output
    assert {path.name for path in kept_in.iterdir()} == {"mine"}
    assert len([*tmp_path.glob(".kept.bsearch-small/0/model.pt")]) == 1
    again = bsearch(
        "run", path, "--serial", "--until", "0.9999", "--set", "budget.trials=3", "--keep", tmp_path / "other"
    )
    assert again.exit_code == 1  # a model is kept, and no target reached
    assert "accuracy 0.9999 was not reached; the model that was kept, trial 2, has" in again.output
    assert len([*tmp_path.glob(".kept.bsearch-small/0/model.pt")]) == 1


@pytest.mark.parametrize(
    ("now", "text", "moment"),
    [
        # By the rules of its own day.
        (
            "2026-01-10T12:00-05:00",
            "2026-07-28 09:00",
            "2026-07-28T09:00:00-04:00",
        ),
        ("2026-03-08T01:00-05:00", "18:00", "2026-03-08T18:00:00-04:00"),
        ("2026-07-10T12:00-04:00", "2026-11-28 09:00", "2026-11-28T09:00:00-05:00"),
        ("2026-03-08T00:00-05:00", "02:30", "2026-03-08T03:30:00-04:00"),  # the clock is set from 2 to 3
        ("2026-11-01T00:30-04:00", "01:30", "2026-11-01T01:30:00-04:00"),
        ("2026-11-01T01:45-04:00", "01:30", "2026-11-01T01:30:00-05:00"),  # shown again an hour later
        ("2026-11-01T01:10-05:00", "01:30", "2026-11-01T01:30:00-05:00"),
    ],
)
def test_times_when_the_clock_is_set(
    now: str, text: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "America/New_York")
        time.tzset()
        told = datetime.fromisoformat(now)
        assert {moment_of(text, each).isoformat() for each in (told, told.astimezone())} == {moment}
    time.tzset()


@pytest.mark.parametrize("text", ["0001-01-01 00:00", "9999-12-31 23:59"])
def test_years_that_no_deadline_is_in(text: str) -> None:
    with pytest.raises(StudyFileError, match=r"budget.by: expected a time within a year"):
        moment_of(text, datetime.now().astimezone())

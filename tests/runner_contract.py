"""What every Runner keeps: each outcome of a trial ends as the table of outcomes says, and the storage shows it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.run.driver import StudyResult, run_study
from bsearch.search.run.events import Event
from bsearch.search.run.runner import Runner
from bsearch.search.store.tables import Tables
from bsearch.spaces.record import TrialRecord
from bsearch.spaces.study.file import read_study
from conftest import BATCH_AND_RATE, TASKS
from helpers import SPACE, as_optuna

Run = Callable[..., StudyResult]


def once(call: Callable[[], None]) -> Callable[[], None]:
    """The same, but for the first time only."""
    calls = [call]
    return lambda: calls.pop()() if calls else None


class Studies:
    """Fixtures that run studies: subclasses give a `runner`; `study_file` writes studies into a folder of the test's own."""

    @pytest.fixture
    def go(self, runner: Callable[[Any], Any], study_file: Callable[..., Path]) -> Run:
        def run(
            name: str | None = None, notify: Callable[[Event], None] = lambda event: None, **changes: Any
        ) -> StudyResult:
            if name is not None:
                changes["task"] = f"{TASKS}:{name}"
            spec = read_study(study_file(**changes))
            with runner(spec) as place:
                opened: Runner = place
                return run_study(spec, nullcontext(opened), task_code_hash(spec.task), notify=notify)

        return run

    @pytest.fixture
    def kept(self, tmp_path: Path) -> Callable[[], optuna.Study]:
        def load() -> optuna.Study:
            return as_optuna(tmp_path / "small.db")

        return load


class RunnerContract(Studies):
    """What depends on the Runner; what `StudyRun` makes of it is in test_study_run.py."""

    def test_a_study_meets_its_budget_exactly(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        result = go("Points", budget={"trials": 6})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 6
        assert kept().directions == [
            optuna.study.StudyDirection.MINIMIZE,
            optuna.study.StudyDirection.MAXIMIZE,
        ]
        assert kept().metric_names == ["train_s", "accuracy"]
        assert set(trials[0].params) == {"effective_batch", "reference_rate", "rule"}
        assert {
            "micro_batch",
            "learning_rate",
            "samples_per_s",
            "accumulation",
            "peak_bytes",
            "epochs",
        } <= set(max(trials, key=lambda trial: trial.user_attrs["steps"]).user_attrs)
        assert (result.stopped, result.failure) == ("", "")
        assert all(trial.user_attrs["samples_budget"] == 800 for trial in trials)

    @pytest.mark.slow
    def test_a_trial_that_was_cut_off_goes_on_from_its_checkpoint(
        self, go: Run, kept: Callable[[], optuna.Study], tmp_path: Path
    ) -> None:
        def interrupt(event: Event) -> None:
            if (
                event.kind == "measured"
                and event.measurement is not None
                and event.measurement.samples_seen == 200
            ):
                signal.raise_signal(signal.SIGINT)

        changes: dict[str, Any] = {
            "space": SPACE | {"effective_batch": 40},
            "training": {"evaluations": 10},
            "budget": {"trials": 1},
            "cluster": {"trials_at_once": 1, "checkpoint_every_s": 0},
        }
        assert go("Slow", notify=interrupt, **changes).interrupted
        folder = tmp_path / "results" / "small" / "checkpoints"
        assert [file.name.partition("-")[0] for file in folder.iterdir()] == ["0"]
        go("Slow", **changes)
        tables = Tables(f"sqlite:///{kept_path(kept())}")
        assert [row.outcome for row in tables.attempts("small", 0)] == ["interrupted", "complete"]
        (whole,) = kept().trials
        assert (whole.state.name, whole.user_attrs["attempts"]) == ("COMPLETE", 2)
        assert whole.user_attrs["resumed_at"] >= 200 - 40
        # The curve is whole: what the first attempt measured is reported again.
        curve = tables.curves("small")[0]
        assert [seen for seen, _ in curve] == list(range(40, 401, 40))
        assert not folder.exists()

    @pytest.mark.slow
    def test_one_that_is_asked_to_leave_writes_its_checkpoint_first(
        self, go: Run, kept: Callable[[], optuna.Study], tmp_path: Path
    ) -> None:
        steps = tmp_path / "steps"
        steps.touch()
        changes: dict[str, Any] = {
            "space": {"effective_batch": 4, "reference_rate": {"low": 0.1, "high": 0.2}, "epochs": 2},
            "training": {"evaluations": 1},
            "budget": {"trials": 1, "profile_s": 0},
            "cluster": {"trials_at_once": 1},  # a minute between checkpoints, of a training of two seconds
        }

        def ask() -> None:
            while len(steps.read_bytes()) < 40:
                time.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)

        threading.Thread(target=ask, daemon=True).start()
        texts: list[str] = []
        result = go("CountsItsSteps", notify=lambda event: texts.append(event.text), **changes)
        assert result.interrupted == signal.SIGTERM
        assert any("save a checkpoint and resume from it" in text for text in texts)
        before = len(steps.read_bytes())
        assert 40 <= before < 200
        go("CountsItsSteps", **changes)
        (whole,) = kept().trials
        assert (whole.state.name, whole.user_attrs["attempts"]) == ("COMPLETE", 2)
        assert whole.user_attrs["resumed_at"] >= 4 * (before - 2)
        # The steps of two whole trainings' checks aside, none was done twice.
        assert 200 <= len(steps.read_bytes()) <= 200 + 2


class StudyContract(Studies):
    """What the driver decides, whatever runs its trials: the serial runner takes it each time, Ray's before a release."""

    def test_the_same_error_three_times_stops_the_study_and_says_so(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        result = go("Raises", budget={"trials": 20})
        assert result.failure.startswith(
            "3 trials in a row failed with the same error: Raises: ValueError: the score is not ready"
        )
        # Trials that ran beside the third may have failed, or been cut off, by then.
        states = [trial.state.name for trial in kept().trials]
        assert set(states) <= {"FAIL", "WAITING"}
        errors = [trial for trial in kept().trials if trial.user_attrs.get("outcome") == "error"]
        assert 3 <= len(errors) <= 5
        rows = [
            row
            for row in Tables(f"sqlite:///{kept_path(kept())}").attempts("small")
            if row.outcome == "error"
        ]
        assert "Traceback" in rows[0].traceback

    def test_the_same_study_again_goes_on_where_it_stood(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        go("Points", budget={"trials": 3})
        first = [trial.params for trial in kept().trials]
        go("Points", budget={"trials": 5})
        assert [trial.params for trial in kept().trials[:3]] == first
        assert len(kept().trials) == 5
        assert len({json.dumps(trial.params) for trial in kept().trials}) == 5
        assert go("Points", budget={"trials": 5}).elapsed_s < 5
        assert len(kept().trials) == 5

    @pytest.mark.slow
    def test_two_devices_share_a_trial_whose_time_is_known(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        devices = {"per_trial": 2, "kind": "cpu"}
        result = go("KillsARank", devices=devices, budget={"trials": 3, "profile_s": 0.5})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 3
        assert [trial.user_attrs["attempts"] for trial in trials] == [1, 2, 1]
        for trial in trials:
            facts = trial.user_attrs
            assert (facts["devices"], facts["train_s_source"]) == (2, "known")
            assert trial.values[0] == facts["train_s"] > 0
            assert facts["train_s_error"] == pytest.approx(facts["measured_train_s"] / facts["train_s"] - 1)
        assert result.failure == ""

    @pytest.mark.slow
    def test_a_trial_that_cannot_reach_the_front_is_stopped_and_its_curve_kept(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {
            "effective_batch": {"low": 16, "high": 64},
            "reference_rate": {"low": 1e-4, "high": 10, "at_batch": 32},
            "rule": "constant",
            "epochs": 1,
        }
        training = {"evaluations": 10, "samples": 400}
        go("known_by_its_rate", space=space, training=training, budget={"trials": 24}, sampler="qmc")
        stopped = [trial for trial in kept().trials if trial.user_attrs["outcome"] == "stopped"]
        assert len(stopped) >= 5
        best = max(trial.values[1] for trial in kept().trials if trial.values)
        assert {trial.state.name for trial in stopped} == {"PRUNED"}
        for trial in stopped:
            facts = trial.user_attrs
            assert 0 < facts["stopped_fraction"] < 1
            assert facts["expected_accuracy"] < best
            assert facts["expected_seconds"] == pytest.approx(1.0)
            assert "of its budget" in facts["message"]
        # Nothing is lost by it: what a stopped trial would have come to is below the best that was known then.
        assert all(trial.user_attrs["stopped_accuracy"] < best for trial in stopped)
        curves = Tables(f"sqlite:///{kept_path(kept())}").curves("small")
        assert all(
            len(curves[trial.number]) == round(10 * trial.user_attrs["stopped_fraction"]) for trial in stopped
        )
        # The next run of the study knows the curves of this one.
        more = go("known_by_its_rate", space=space, training=training, budget={"trials": 30}, sampler="qmc")
        assert sum(record.counts for record in more.study.records) == 30

    @pytest.mark.slow
    def test_trials_are_paused_and_resumed(
        self, go: Run, kept: Callable[[], optuna.Study], tmp_path: Path
    ) -> None:
        changes: dict[str, Any] = {
            "space": {
                "effective_batch": {"low": 16, "high": 64},
                "reference_rate": {"low": 0.01, "high": 1, "at_batch": 32},
                "epochs": 1,
            },
            "training": {"evaluations": 10},
            "budget": {"hours": 1},
            "cluster": {"checkpoint_every_s": 3600},
        }

        def until(wanted: Callable[[TrialRecord], bool]) -> Callable[[Event], None]:
            ctrl_c_once = once(lambda: signal.raise_signal(signal.SIGINT))
            return lambda event: ctrl_c_once() if event.record is not None and wanted(event.record) else None

        assert go("Points", notify=until(lambda record: record.is_paused), **changes).interrupted
        paused = [trial.number for trial in kept().trials if trial.user_attrs["outcome"] == "paused"]
        assert paused
        assert {kept().trials[number].state.name for number in paused} == {"RUNNING"}
        folder = tmp_path / "results" / "small" / "checkpoints"
        assert {int(file.name.partition("-")[0]) for file in folder.iterdir()} >= set(paused)
        both = until(lambda record: record.outcome == "complete" and record.facts.resumed_at is not None)
        assert go("Points", notify=both, **changes).interrupted
        trials = kept().trials
        tables = Tables(f"sqlite:///{kept_path(kept())}")
        resumed = [
            trial for trial in trials if "resumed_at" in trial.user_attrs and trial.state.name == "COMPLETE"
        ]
        assert resumed
        curves = tables.curves("small")
        for trial in resumed:
            facts = trial.user_attrs
            assert (
                0.29
                <= facts["resumed_at"] / facts["samples_budget"]
                == pytest.approx(facts["stopped_fraction"])
            )
            seen = [samples for samples, _ in curves[trial.number]]
            assert seen[0] < facts["resumed_at"] < seen[-1] == facts["samples_budget"]  # the curve is whole
        for trial in trials:
            outcomes = [row.outcome for row in tables.attempts("small", trial.number)]
            if trial.user_attrs.get("outcome") == "paused":
                assert (trial.state.name, outcomes[-1]) == ("RUNNING", "paused")
                assert curves[trial.number][-1][0] < trial.user_attrs["samples_budget"]
            assert outcomes.count("paused") <= 1

    @pytest.mark.slow
    @pytest.mark.long
    def test_a_metric_to_minimize_is_one_to_maximize_turned_round(self, go: Run) -> None:
        """The same trials are stopped and on the front; tests/search/run/test_mirror.py looks at the search itself."""
        found = []
        for metric, direction in (("gain", "maximize"), ("deficit", "minimize")):
            result = go(
                study=metric,
                task=f"{TASKS.with_name('mirror_tasks.py')}:training",
                space={
                    **BATCH_AND_RATE,
                    "epochs": {"low": 1, "high": 8},
                    "optimum": 0.01,
                    "curved": 1.0,
                },
                training={"evaluations": 5, "samples": 1000},
                objectives={"metric": {"name": metric, "direction": direction}},
                budget={"trials": 12},
                sampler="qmc",
                cluster={"trials_at_once": 1},
            ).study
            trials = [
                (record.outcome, record.score, record.facts.stopped_fraction) for record in result.records
            ]
            found.append((trials, [trial.number for trial in result.front.trials]))
        assert found[0] == found[1]
        assert 1 < len(found[0][1]) < 12

    def test_out_of_memory_keeps_the_experiment_and_accumulates_more(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {**SPACE, "effective_batch": {"low": 60, "high": 100}}
        go("SmallMemory", space=space, budget={"trials": 5})
        trials = kept().trials
        assert [trial.state.name for trial in trials] == ["COMPLETE"] * 5
        assert all(trial.user_attrs["micro_batch"] <= 50 for trial in trials)
        # No law is known for a device that only the task knows of: micro-batches are halved until they fit, and stay so.
        assert trials[0].user_attrs["attempts"] == 2
        assert trials[4].user_attrs["attempts"] == 1
        rows = Tables(f"sqlite:///{kept_path(kept())}").attempts("small", 0)
        assert [row.outcome for row in rows] == ["out_of_memory"] * (len(rows) - 1) + ["complete"]
        assert len({row.setup["plan"]["effective_batch"] for row in rows}) == 1
        assert len({row.setup["optimizer"]["learning_rate"] for row in rows}) == 1

    @pytest.mark.slow
    def test_an_interrupt_leaves_nothing_running_and_loses_nothing(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        ended: list[int] = []

        def interrupt_after_two(event: Event) -> None:
            if event.kind == "ended" and event.record is not None:
                ended.append(event.record.number)
                if len(ended) == 2:
                    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()

        result = go("Slow", space=SPACE, notify=interrupt_after_two, budget={"trials": 5})
        assert result.interrupted
        before = kept().trials
        assert {trial.user_attrs["outcome"] for trial in before} == {"complete", "interrupted"}
        go("Slow", space=SPACE, budget={"trials": 5})
        after = kept().trials
        assert [trial.state.name for trial in after] == ["COMPLETE"] * 5
        assert all(trial.params == after[trial.number].params for trial in before)

    @pytest.mark.slow
    def test_hours_end_the_study_and_are_summed_over_runs(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        budget = {"trials": 50, "hours": 3 / 3600}
        begun = time.monotonic()
        result = go("Slow", space=SPACE, budget=budget)
        assert time.monotonic() - begun < 60
        assert "budget.hours" in result.stopped
        assert "running" not in {trial.user_attrs["outcome"] for trial in kept().trials}
        done = sum(trial.state.name == "COMPLETE" for trial in kept().trials)
        again = go("Slow", space=SPACE, budget=budget)
        assert "budget.hours" in again.stopped
        assert sum(trial.state.name == "COMPLETE" for trial in kept().trials) - done <= 1


def kept_path(study: optuna.Study) -> str:
    url = study._storage._backend.url  # type: ignore[attr-defined]
    return str(url).removeprefix("sqlite:///")


__all__ = ["RunnerContract", "Studies", "StudyContract"]

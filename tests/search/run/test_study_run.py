"""What a StudyRun makes of suggestions and outcomes, whatever Runner carries them: seen through the one of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import optuna
import pytest
from bsearch.search.analysis.confirm import averaged
from bsearch.search.run import study_run
from bsearch.search.run.decisions.eta import ClockFactors, Span
from bsearch.search.run.serial import SerialRunner
from bsearch.search.run.study_run import StudyRun
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import Measurement, Outcome, TrialSetup
from conftest import TASKS
from helpers import SPACE, run
from runner_contract import Run, Studies


class TestStudyRun(Studies):
    @pytest.fixture
    def runner(self) -> Callable[[StudySpec], AbstractContextManager[SerialRunner]]:
        return lambda spec: nullcontext(SerialRunner(spec.devices))

    def test_the_users_setting_comes_first(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        setting = {"effective_batch": 77, "reference_rate": 0.1, "rule": "linear"}
        go("Points", baseline=[setting], budget={"trials": 2})
        assert kept().trials[0].params == setting
        assert kept().trials[0].user_attrs["baseline"] == 0
        assert kept().trials[0].user_attrs["learning_rate"] == pytest.approx(0.1 * 77 / 64)

    def test_one_thread_imports_what_suggestions_need(self, go: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two that import the same modules at once may find them half imported."""
        threads = []
        monkeypatch.setattr(study_run, "preload", lambda: threads.append(threading.current_thread().name))
        go("Points", budget={"trials": 2})
        assert [name.partition("_")[0] for name in threads] == ["bsearch-ask"]

    @pytest.mark.parametrize(
        "sampler", ["front", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tpe", "random"))]
    )
    def test_no_setting_is_trained_twice_and_a_space_that_was_tried_ends_it(
        self, go: Run, sampler: str
    ) -> None:
        space = {
            "effective_batch": {"low": 32, "high": 33},
            "reference_rate": 0.1,
            "rule": ["sqrt", "constant"],
            "epochs": [1, 2],
        }
        results = [
            go("Points", space=space, sampler=sampler, confirm=1, stopping="none", budget={"trials": trials})
            for trials in (20, 30)
        ]
        for result in results:
            assert (result.stopped, result.failure) == (
                "all settings of the space were tried; widen it for more",
                "",
            )
            first = [
                tuple(record.parameters.values()) for record in result.study.records if not record.is_repeat
            ]
            assert len(first) == len(set(first)) == 8
            assert {trial.number for trial in result.study.front.trials} <= {
                record.facts.repeats for record in result.study.records
            }

    @pytest.mark.slow
    def test_what_was_paused_is_trained_once_the_space_was_tried(self, go: Run) -> None:
        space = {
            "effective_batch": {"low": 16, "high": 18},
            "reference_rate": 0.1,
            "rule": ["sqrt", "constant"],
            "epochs": 1,
        }
        result = go("Points", space=space, training={"evaluations": 10}, budget={"hours": 1})
        assert [record.outcome for record in result.study.records] == ["complete"] * 6

    def test_the_sampler_is_told_what_trials_take_besides_training(
        self, go: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In money where that is what speed is measured by: of the overhead alone, without what slows training down."""
        seen, expected = [], {0.0}
        suggest, of = FrontSuggester.suggest, ClockFactors.of

        def spy(self: FrontSuggester, *arguments: Any, **how: Any) -> Any:
            seen.append(self.overhead)
            return suggest(self, *arguments, **how)

        def factors(spans: Sequence[Span]) -> ClockFactors:
            found = of(spans)
            expected.add(found.overhead_s / found.slowdown * (72 / 3600))
            return found

        monkeypatch.setattr(FrontSuggester, "suggest", spy)
        monkeypatch.setattr(ClockFactors, "of", factors)
        how = {"devices": {"prices": {"cpu": 72}}, "objectives": {"speed": "cost"}}
        go("Points", budget={"trials": 4, "hours": 1, "profile_s": 0.1}, **how)
        assert seen[0] == 0 < seen[-1]
        assert {*seen} <= expected

    @pytest.mark.parametrize(
        ("seen", "message"), [((), "why"), ((0.25, 0.5), "stopped after 50% of its budget")]
    )
    def test_how_far_a_trial_came_that_was_stopped_is_told(
        self, study_file: Callable[..., Path], seen: Sequence[float], message: str
    ) -> None:
        def stopped(study: StudyRun) -> None:
            setup = study.next_attempt()
            assert isinstance(setup, TrialSetup)
            for share in seen:
                measured = Measurement(round(share * setup.samples_budget), share, share)
                study.report(setup.number, measured)
            study.end(setup.number, Outcome("stopped", "why"))

        how = {"sampler": "random"}
        path = study_file(task=f"{TASKS}:Points", budget={"trials": 1}, **how)
        (record,) = run(path, watch=stopped).study.records
        assert (record.outcome, record.message) == ("stopped", message)
        facts = record.facts
        assert (facts.stopped_fraction, facts.stopped_accuracy) == ((0.5, 0.5) if seen else (None, None))

    def test_a_measured_peak_shrinks_the_next_micro_batches_and_nothing_is_left_running(
        self, study_file: Callable[..., Path]
    ) -> None:
        studies, largest = [], []

        def measured(study: StudyRun) -> None:
            studies.append(study)
            for _ in range(2):
                setup = study.next_attempt()
                assert isinstance(setup, TrialSetup)
                largest.append(setup.largest_micro_batch)
                if len(largest) == 1:
                    measurement = Measurement(setup.samples_budget, 1.0, 0.5, facts={"peak_bytes": 2**30})
                    study.report(setup.number, measurement)
                    study.end(setup.number, Outcome("complete"))
            assert len(study.view().running) == 1
            study.fail("enough")

        space = {**SPACE, "effective_batch": 400}
        run(study_file(task=f"{TASKS}:Points", space=space, memory={"limit": "1MiB"}), watch=measured)
        assert largest[0] > largest[1]
        assert not studies[0].view().running

    def test_a_diverged_trial_counts_and_is_not_on_the_front(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {"effective_batch": 40, "reference_rate": {"low": 1e5, "high": 1e6}, "epochs": 5}
        result = go("Explodes", space=space, budget={"trials": 2})
        trials = kept().trials
        # Without values, it is on no front of Optuna's dashboard either, which ignores constraints.
        assert [(trial.state.name, trial.values) for trial in trials] == [("PRUNED", None)] * 2
        assert [trial.user_attrs["outcome"] for trial in trials] == ["diverged", "diverged"]
        assert all(trial.system_attrs["constraints"] == [1.0] for trial in trials)
        assert all(
            record.accuracy is not None and 0 <= record.accuracy <= 1 for record in result.study.records
        )
        assert result.study.front.trials == ()

    def test_different_errors_do_not_count_and_do_not_stop_it(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = SPACE | {"effective_batch": {"low": 30, "high": 60}}
        result = go("RaisesForSome", space=space, budget={"trials": 7}, stopping="none")
        outcomes = [trial.user_attrs["outcome"] for trial in kept().trials]
        assert result.failure == ""
        assert Counter(outcomes) == {"complete": 7, "error": 3}

    def test_a_loop_that_cannot_resume_is_not_paused(self, go: Run) -> None:
        space = {
            "effective_batch": {"low": 16, "high": 20},
            "reference_rate": 0.1,
            "epochs": 3,
            "optimum": 0.01,
            "curved": 1.0,
        }
        how = {
            "training": {"evaluations": 10, "samples": 1000},
            "objectives": {"metric": {"name": "gain", "direction": "maximize"}},
        }
        task = f"{TASKS.with_name('mirror_tasks.py')}:training"
        result = go(task=task, space=space, budget={"hours": 1, "profile_s": 0.1}, **how)
        assert [record.outcome for record in result.study.records] == ["complete"] * 5

    @pytest.mark.slow
    @pytest.mark.long
    def test_members_of_the_front_are_trained_again_with_other_seeds(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {
            "effective_batch": {"low": 16, "high": 64},
            "reference_rate": {"low": 0.05, "high": 0.2},
            "epochs": 1,
        }
        training = {"evaluations": 10, "samples": 400}
        result = go("known_by_its_rate", space=space, training=training, budget={"trials": 12}, confirm=2)
        repeats = [trial for trial in kept().trials if "repeats" in trial.user_attrs]
        assert 1 <= len(repeats) <= 4
        assert sum(record.counts for record in result.study.records) == 12
        for trial in repeats:
            first = kept().trials[trial.user_attrs["repeats"]]
            assert trial.params == first.params
            assert trial.user_attrs["seed"] > first.user_attrs["seed"]
        seeds = [(trial.user_attrs["repeats"], trial.user_attrs["seed"]) for trial in repeats]
        assert len(set(seeds)) == len(seeds)
        assert max(Counter(trial.user_attrs["repeats"] for trial in repeats).values()) <= 2
        means = averaged(result.study.records, Objectives())
        for setting in (mean for mean in means if mean.facts.runs > 1):
            assert setting.facts.mean_low < (setting.accuracy or 0) < setting.facts.mean_high

    def test_an_infeasible_plan_is_recorded_with_its_distance(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {
            "effective_batch": {"low": 16, "high": 400},
            "reference_rate": {"low": 0.001, "high": 0.002, "at_batch": 32},
            "rule": ["adam_sde"],
            "epochs": 1,
        }
        # Adam's shorter average reaches back less than a step from kappa = 10 on, at a batch of 320.
        start = [{"effective_batch": batch, "reference_rate": 0.001} for batch in (340, 400, 200)]
        go("AdamPoints", space=space, baseline=start, budget={"trials": 5})
        near, far, fits = kept().trials[:3]
        assert (near.state.name, far.state.name, fits.state.name) == ("PRUNED", "PRUNED", "COMPLETE")
        assert 0 < near.system_attrs["constraints"][0] < far.system_attrs["constraints"][0]
        assert fits.user_attrs["betas"] == pytest.approx([0.375, 0.99375])
        assert sum(trial.state.name == "COMPLETE" for trial in kept().trials) == 5

    def test_batches_that_cannot_be_planned_are_never_suggested(
        self, go: Run, kept: Callable[[], optuna.Study]
    ) -> None:
        space = {
            **SPACE,
            "effective_batch": {"low": 16, "high": 400},
            "accumulation": {"low": 1, "high": 2},
        }
        messages: list[str] = []
        memory = {"largest_micro_batch": 64}
        go(
            "Points",
            space=space,
            memory=memory,
            budget={"trials": 6},
            notify=lambda event: messages.append(event.text),
        )
        assert "feasible batches: 16 to 128, in micro-batches of at most 64 samples" in messages
        assert [trial.state.name for trial in kept().trials] == ["COMPLETE"] * 6
        assert all(trial.params["effective_batch"] <= 128 for trial in kept().trials)
        start = [{"effective_batch": 200, "reference_rate": 0.1, "accumulation": 1}]
        with pytest.raises(StudyFileError, match=r"expected a feasible batch, from 16 to 128; got 200"):
            go("Points", space=space, memory=memory, baseline=start, budget={"trials": 7})

    def test_another_metric_and_direction(self, go: Run, kept: Callable[[], optuna.Study]) -> None:
        objectives = {"metric": {"name": "val_loss", "direction": "minimize"}}
        result = go("Points", objectives=objectives, budget={"trials": 4})
        assert kept().metric_names == ["train_s", "val_loss"]
        assert kept().directions[1] == optuna.study.StudyDirection.MINIMIZE
        assert {t.number for t in kept().best_trials} == {t.number for t in result.study.front.trials}
        losses = [trial.accuracy for trial in result.study.front.trials]
        assert losses == sorted(losses, reverse=True)

"""What a study costs its driver does not grow with its trials: counted in statements and readings, never timed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sa
from bsearch.search.store import write_buffer
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.optuna.sampler import FrontSampler
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.space_transform import SearchSpace, SpaceTransform
from bsearch.spaces.domain import Range
from bsearch.spaces.errors import InfeasiblePlanError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.planning import known_taken, known_train_s, trial_setup
from bsearch.spaces.record import TrialFacts, TrialResult
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import Suggestion
from optuna.trial import create_trial

PROFILE = DeviceProfile(
    kind="gpu",
    device="none",
    training_set=1000,
    smallest_micro_batch=2,
    step_times=(StepTime(((2, 0.002), (64, 0.06), (200, 0.5)), update_s=0.001, interval=0.01),),
)


def test_the_law_of_seconds_is_that_of_the_trials_setup(study_file: Callable[..., Path]) -> None:
    """The slow twin: the whole setup of a trial, then its seconds."""
    space = {
        "effective_batch": {"low": 1, "high": 1000},
        "reference_rate": {"low": 0.01, "high": 1.0, "at_batch": 64},
        "rule": ["linear", "sqrt", "adam_sde"],
        "epochs": {"low": 0.3, "high": 5.0},
        "accumulation": {"low": 1, "high": 6},
    }
    spec = read_study(study_file(space=space))
    law = known_taken(spec, {(): PROFILE}, None)
    assert law is not None
    rng, none = random.Random(0), 0
    for _ in range(600):
        searched = {
            "effective_batch": round(1000 ** rng.random()),
            "reference_rate": rng.uniform(0.01, 1.0),
            "rule": rng.choice(space["rule"]),  # type: ignore[arg-type]
            "epochs": rng.uniform(0.3, 5.0),
            "accumulation": rng.randint(1, 6),
        }
        try:
            setup = trial_setup(spec, "law", Suggestion(0, {**spec.fixed(), **searched}), PROFILE, "gpu")
        except InfeasiblePlanError:
            none += 1
            assert math.isnan(law(searched))
        else:
            assert law(searched) == law(searched) == known_train_s(PROFILE, setup)
    assert 0 < none < 500


@contextmanager
def statements(engine: sa.Engine) -> Iterator[list[str]]:
    """What the database is asked meanwhile, commits included."""
    asked: list[str] = []

    def hear(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        asked.append(statement.split()[0])

    def hear_commit(connection: Any) -> None:
        asked.append("COMMIT")

    hearers = ("before_cursor_execute", hear), ("commit", hear_commit)
    for event, hearer in hearers:
        sa.event.listen(engine, event, hearer)
    try:
        yield asked
    finally:
        for event, hearer in hearers:
            sa.event.remove(engine, event, hearer)


@pytest.mark.parametrize("sampler", ["front", "random"])
def test_a_trial_asks_the_database_as_often_after_many_trials_and_beside_many(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On busy cores the buffer's clock would cut in and make other transactions of the same statements.
    monkeypatch.setattr(write_buffer, "LATEST_S", 3600.0)
    space = SearchSpace.of(
        {"effective_batch": Range(low=1, high=1000, log=True), "rate": Range(low=0.01, high=1.0, log=True)}
    )

    def cost(finished: int, running: int) -> list[str]:
        tables = Tables(f"sqlite:///{tmp_path}/{finished}-{running}.db")
        tables.save_study("kept", "kept", {}, {})
        tables.lock.acquire("kept")
        with tables.buffered("kept"):
            trials, suggester = Trials(tables, "kept"), suggester_of(sampler, space, Objectives())
            for _ in range(finished + running):
                (proposal,) = suggester.suggest(trials)
                assert isinstance(proposal, dict)
                number = trials.begin(proposal).number
                if number < finished:
                    trials.end(number, TrialResult("complete", values=(1.0 + number, 0.5)))
            trials.commit()
            with statements(tables.engine) as asked:
                (proposal,) = suggester.suggest(trials)
                assert isinstance(proposal, dict)
                number = trials.begin(proposal).number
                trials.change(number, TrialFacts(micro_batch=3, rule="sqrt"))
                trials.commit()
                trials.end(number, TrialResult("complete", values=(1.0, 0.5)))
                trials.commit()
            return asked

    few = cost(2, 1)
    assert few == cost(40, 20)
    # Each state of its row, and before each commit, whether the study is still ours; nothing is read.
    assert few == ["UPDATE", "UPDATE", "INSERT", "COMMIT", "UPDATE", "UPDATE", "COMMIT"]


def test_ended_trials_are_coded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks after two thousand trials look at the new ones alone, and read the trials once each."""
    distributions: dict[str, Any] = {
        "batch": optuna.distributions.IntDistribution(3, 777, log=True),
        "rate": optuna.distributions.FloatDistribution(1e-4, 2.0, log=True),
    }
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FrontSampler(space=distributions)
    )
    rng = random.Random(0)
    for _ in range(2000):
        params = {"batch": rng.randint(3, 777), "rate": rng.uniform(1e-4, 2.0)}
        values = [1 / params["batch"], params["rate"] % 1]
        study.add_trial(create_trial(params=params, distributions=distributions, values=values))
    study.ask(distributions)
    coded, read = [], []
    encode, get_trials = SpaceTransform.encode, study.get_trials

    def counted(self: SpaceTransform, parameters: Mapping[str, Any]) -> Any:
        coded.append(parameters)
        return encode(self, parameters)

    monkeypatch.setattr(SpaceTransform, "encode", counted)
    monkeypatch.setattr(study, "get_trials", lambda **how: read.append(how) or get_trials(**how))
    for _ in range(3):
        trial = study.ask(distributions)
        study.tell(trial, [1.0, 0.5])
    # The one that runs, at each ask, and the ends of the first two.
    assert len(coded) == 5
    assert len(read) == 3

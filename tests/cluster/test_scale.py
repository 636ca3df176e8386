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
from bsearch.search.store.database import RetryPolicy, storage_engine
from bsearch.search.store.single_writer_storage import SingleWriterStorage
from bsearch.search.store.write_buffer import WriteBuffer
from bsearch.search.suggest.sampler import FrontSampler
from bsearch.search.suggest.space_transform import SpaceTransform
from bsearch.search.suggest.suggester import Suggester
from bsearch.spaces.domain import Range
from bsearch.spaces.errors import InfeasiblePlanError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.planning import known_taken, known_train_s, trial_setup
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.goals import Objectives
from bsearch.spaces.trial import Suggestion, TrialFacts, TrialResult
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

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
    law = known_taken(spec, {(): PROFILE})
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
            assert math.isnan(law(searched)[0])
        else:
            assert law(searched) == law(searched) == (known_train_s(PROFILE, setup),)
    assert 0 < none < 500


def suggester(path: Path, **how: Any) -> Suggester:
    domains = {"effective_batch": Range(low=1, high=1000, log=True), "rate": Range(low=0.01, high=1.0, log=True)}
    url = f"sqlite:///{path}/kept.db"
    writes = WriteBuffer(url, storage_engine(url), RetryPolicy(url))
    return Suggester(url, "kept", domains, Objectives(), writes=writes, **how)


def commit(one: Suggester) -> None:
    assert isinstance(one.storage, SingleWriterStorage)
    one.storage._writes.commit()


def ended(number: int) -> TrialResult:
    return TrialResult("COMPLETE", "complete", TrialFacts(), (1.0 + number, 0.5), constraint=0.0)


@contextmanager
def statements(storage: SingleWriterStorage) -> Iterator[list[str]]:
    """What the database is asked meanwhile, commits included."""
    asked: list[str] = []
    engines = storage._backend.engine, storage._writes._engine

    def hear(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        asked.append(statement)

    def hear_commit(connection: Any) -> None:
        asked.append("COMMIT")

    hearers = ("before_cursor_execute", hear), ("commit", hear_commit)
    for engine in engines:
        for event, hearer in hearers:
            sa.event.listen(engine, event, hearer)
    try:
        yield asked
    finally:
        for engine in engines:
            for event, hearer in hearers:
                sa.event.remove(engine, event, hearer)


def seen(trial: FrozenTrial) -> tuple[Any, ...]:
    stored = trial.state, trial.values, trial.params, trial.distributions, trial.user_attrs, trial.system_attrs
    return trial.number, *stored, trial.datetime_start


@pytest.mark.parametrize("sampler", ["front", "random"])
def test_a_trial_asks_the_database_as_often_after_many_trials_and_beside_many(sampler: str, tmp_path: Path) -> None:
    def cost(finished: int, running: int) -> list[str]:
        of_study = tmp_path / f"{finished}-{running}"
        of_study.mkdir()
        one = suggester(of_study, sampler=sampler)
        assert isinstance(one.storage, SingleWriterStorage)
        for number in range(finished):
            one.tell(one.ask().number, ended(number))
        for _ in range(running):
            one.ask()
        with statements(one.storage) as asked:
            suggestion = one.ask()
            one.annotate(suggestion.number, {"micro_batch": 3, "rule": "sqrt"})
            one.trials()
            one.tell(suggestion.number, ended(0))
        return asked

    few = cost(2, 1)
    assert few == cost(40, 20)
    # Those of a note are one statement, and those of an end another, however many they are.
    assert sum("INTO trial_user_attributes" in statement for statement in few) == 2
    if sampler == "front":  # another's trials are begun by Optuna
        assert few.index("COMMIT") == 4
        assert not [statement for statement in few[:4] if "WHERE" not in statement and "INSERT" not in statement]


def test_what_is_known_is_what_is_kept(tmp_path: Path) -> None:
    """The slow twin: Optuna's own reading of the database."""
    one = suggester(tmp_path)
    for number in range(7):
        suggestion = one.ask()
        one.annotate(suggestion.number, {"betas": (0.9, 0.99), "rule": "sqrt", "none": None, "number": number})
        one.annotate(suggestion.number, {"number": -number, "more": {"a": [1, 2]}})
        if number % 3 == 0:
            one.tell(suggestion.number, ended(number))
        elif number % 3 == 1:
            one.tell(suggestion.number, TrialResult("PRUNED", "infeasible", TrialFacts(), constraint=1.0))
    one.enqueue({"effective_batch": 17}, {"baseline": 0})
    commit(one)
    kept = optuna.load_study(study_name="kept", storage=one.url)
    assert list(map(seen, one.trials())) == list(map(seen, kept.trials))
    assert one.study.metric_names == kept.metric_names == ["train_s", "accuracy"]
    again = suggester(tmp_path)
    assert list(map(seen, again.trials())) == list(map(seen, kept.trials))
    assert again.ask().parameters["effective_batch"] == 17


def test_trials_that_others_queued_are_seen_and_keep_their_numbers(tmp_path: Path) -> None:
    one = suggester(tmp_path)
    one.ask()
    optuna.load_study(study_name="kept", storage=one.url).enqueue_trial({"effective_batch": 5, "rate": 0.1})
    assert one.ask().number == 2
    assert one.ask().parameters["effective_batch"] == 5
    assert [trial.state for trial in one.trials()] == [TrialState.RUNNING] * 3


def test_an_end_whose_answer_was_lost_may_be_told_again(tmp_path: Path) -> None:
    one = suggester(tmp_path)
    suggestion = one.ask()
    assert isinstance(one.storage, SingleWriterStorage)
    optuna.load_study(study_name="kept", storage=one.url).tell(suggestion.number, [1.0, 0.5])
    one.study.tell(suggestion.number, [1.0, 0.5])
    assert one.trials()[0].state == TrialState.COMPLETE


def test_a_trial_that_another_driver_ended_stays_as_it_is(tmp_path: Path) -> None:
    """Ours was silent for so long that another took the study over."""
    one = suggester(tmp_path)
    suggestion = one.ask()
    optuna.load_study(study_name="kept", storage=one.url).tell(suggestion.number, state=TrialState.FAIL)
    one.annotate(suggestion.number, {"micro_batch": 3})
    with pytest.raises(UpdateFinishedTrialError):
        one.tell(suggestion.number, ended(0))
    kept = optuna.load_study(study_name="kept", storage=one.url).trials[0]
    assert (kept.state, kept.values, kept.user_attrs) == (TrialState.FAIL, None, {})


def test_ended_trials_are_coded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks after two thousand trials look at the new ones alone, and read the trials once each."""
    distributions: dict[str, Any] = {
        "batch": optuna.distributions.IntDistribution(3, 777, log=True),
        "rate": optuna.distributions.FloatDistribution(1e-4, 2.0, log=True),
    }
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=FrontSampler(space=distributions))
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

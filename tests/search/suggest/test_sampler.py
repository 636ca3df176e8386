"""FrontSampler: its gain is the expected hypervolume, its process is a Gaussian process; it is an ordinary Optuna sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from bsearch.search.analysis.gaussian_process import conditioned, fitted
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.front_model import _LATER, FrontModel, _Candidates, nearness
from bsearch.search.suggest.front_suggester import FrontSuggester
from bsearch.search.suggest.optuna.copy import record_of
from bsearch.search.suggest.optuna.sampler import FrontSampler
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.space_transform import SearchSpace, SpaceTransform
from bsearch.search.suggest.trial_history import Observations, PausedTrials, PriorTrial, front_places
from bsearch.spaces.domain import Choices, Fixed, Range
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.record import TrialFacts, TrialRecord, TrialResult
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.goals import Direction, Objectives, turned
from conftest import TASKS
from helpers import run
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

SPACE: dict[str, BaseDistribution] = {
    "batch": IntDistribution(3, 777, log=True),
    "layers": IntDistribution(2, 10, step=4),
    "rate": FloatDistribution(1e-4, 2.0, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
    "rule": CategoricalDistribution(("linear", "sqrt", "power")),
}


@given(
    st.integers(3, 777),
    st.sampled_from([2, 6, 10]),
    st.floats(1e-4, 2.0),
    st.floats(0.0, 0.5),
    st.sampled_from(["linear", "sqrt", "power"]),
)
def test_parameters_survive_their_coding(
    batch: int, layers: int, rate: float, dropout: float, rule: str
) -> None:
    transform = SpaceTransform(SPACE)
    values = {"batch": batch, "layers": layers, "rate": rate, "dropout": dropout, "rule": rule}
    back = transform.decode(transform.encode(values))
    assert (back["batch"], back["layers"], back["rule"]) == (batch, layers, rule)
    assert back["rate"] == pytest.approx(rate)
    assert back["dropout"] == pytest.approx(dropout)
    assert transform.width == 7


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7))
def test_every_point_of_the_cube_is_a_legal_setting(point: list[float]) -> None:
    transform = SpaceTransform(SPACE)
    values = transform.decode(np.array(point))
    for name, distribution in SPACE.items():
        assert distribution._contains(distribution.to_internal_repr(values[name]))


CONDITIONS = {"dropout": {"rule": ("sqrt", "power")}}


@pytest.mark.parametrize("conditions", [{}, CONDITIONS])
def test_rounded_points_decode_to_themselves(conditions: Mapping[str, Mapping[str, tuple[str, ...]]]) -> None:
    """The slow twin: decoded and encoded again, one by one."""
    transform = SpaceTransform(SPACE, conditions)
    points = np.random.default_rng(0).random((200, transform.width))
    assert transform.round_to_feasible(points) == pytest.approx(
        np.array([transform.encode(transform.decode(point)) for point in points]), abs=1e-12
    )


@given(st.lists(st.floats(0, 1), min_size=7, max_size=7), st.floats(0, 0.5))
def test_a_parameter_that_does_not_apply_has_no_value_and_makes_no_difference(
    point: list[float], dropout: float
) -> None:
    transform = SpaceTransform(SPACE, CONDITIONS)
    values = transform.decode(np.array(point))
    assert ("dropout" in values) == (values["rule"] != "linear")
    assert transform.is_whole(values)
    linear = {**values, "rule": "linear"}
    linear.pop("dropout", None)
    assert not transform.is_whole({**linear, "rule": "sqrt"})
    moved = transform.encode({**values, "rule": "linear", "dropout": dropout})
    assert transform.round_to_feasible(moved[None])[0] == pytest.approx(transform.encode(linear), abs=1e-12)


@pytest.mark.parametrize("sampler", ["front", "tpe", "gp", "nsga2", "qmc", "random"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_every_sampler_asks_for_what_applies(sampler: str) -> None:
    domains = {
        "effective_batch": Range(low=8, high=512, log=True),
        "momentum": Range(low=0.5, high=0.99, when={"optimizer": "sgd"}),
        "kind": Fixed(value="plain", when={"optimizer": ["adam"]}),
        "optimizer": Choices(choices=("adam", "sgd")),
    }
    space, trials = SearchSpace.of(domains), Trials()
    suggester = suggester_of(sampler, space, Objectives())
    for number in range(14):
        (proposal,) = suggester.suggest(trials)
        assert isinstance(proposal, dict)
        parameters = space.whole(trials.begin(proposal).parameters)
        sgd = parameters["optimizer"] == "sgd"
        assert set(parameters) == {"effective_batch", "optimizer", "momentum" if sgd else "kind"}
        facts = TrialFacts(train_s=1.0 + number)
        trials.end(number, TrialResult("complete", facts, (1.0 + number, 0.5 + 0.1 * sgd)))
    assert {"momentum" in trial.parameters for trial in trials} == {True, False}


def test_a_fit_finds_what_matters_and_the_noise() -> None:
    rng = np.random.default_rng(1)
    points = rng.random((120, 3))
    values = np.sin(6 * points[:, 0]) + 0.1 * rng.standard_normal(120)
    process = fitted(points, values)
    assert process.free[0] < min(process.free[1:]) - 1
    assert math.exp(process.log_noise / 2) * process.std == pytest.approx(0.1, rel=0.35)
    fresh = rng.random((200, 3))
    mean, std = process.predict(fresh)
    away = (mean - np.sin(6 * fresh[:, 0])) / std
    assert np.abs(away).mean() < 2


def area(points: list[tuple[float, float]], end: float, worst: float) -> float:
    """Hypervolume by a plain sweep: log seconds, lower is better; accuracy, higher is better."""
    total, best = 0.0, worst
    for time, accuracy in sorted(points):
        if accuracy > best and time < end:
            total += (accuracy - best) * (end - time)
            best = accuracy
    return total


def observed(points: np.ndarray, seconds: np.ndarray, score: np.ndarray) -> Observations:
    """Of trials that were trained to their end."""
    nothing, rung = np.empty((0, 2)), np.full((2, len(points)), math.nan)
    none = PausedTrials(np.empty(0, int), nothing, *np.empty((3, 0)), np.empty(0, bool))
    own = np.ones(len(points), bool)
    return Observations(points, seconds, score, 0.0 * score, own, nothing, nothing, *rung, none)


@pytest.mark.parametrize("floor", [-math.inf, 1.2, 9.0])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("ranked", [False, True])
def test_expected_hypervolume_improvement_equals_monte_carlo(known: bool, ranked: bool, floor: float) -> None:
    """Against the mean improvement of the area over twenty thousand draws of seconds and score, also as they are ranked."""
    rng = np.random.default_rng(2)
    points = rng.random((8, 2))
    seconds = np.exp(2 * points[:, 0] + 0.1 * rng.standard_normal(8))
    model = FrontModel(observed(points, seconds, points.sum(1)), {}, floor=floor)
    candidates = np.array([[0.2, 0.9], [0.5, 0.5], [0.9, 0.95]])
    times = np.array([0.3, 1.1, 1.7]) if known else None
    cuts, whole = model._strips(floored=False)
    plain = model._floored(whole)
    assert (plain[0] == floor) == (floor == 1.2)  # where none reaches it, it is as without
    assert model.hypervolume() == pytest.approx(
        area(list(zip(cuts[:-1], plain[1:], strict=True)), cuts[-1], plain[0])
    )
    gains = (model.worth if ranked else model.expected_hypervolume_improvement)(candidates, times)
    levels, end = (nearness(plain, whole), cuts[-1] + _LATER) if ranked else (plain, cuts[-1])
    front = list(zip(cuts[:-1], levels[1:], strict=True))
    mean, std = model.score_model.predict(candidates)
    time, time_std = model.taken_model.predict(candidates) if times is None else (times, np.zeros(3))
    before = area(front, end, levels[0])
    for index in range(3):
        scores = model.scale.back(mean[index] + std[index] * rng.standard_normal(20000))
        scores = nearness(scores, whole) if ranked else scores
        drawn = zip(time[index] + time_std[index] * rng.standard_normal(20000), scores, strict=True)
        more = np.array([area([*front, one], end, levels[0]) - before for one in drawn])
        assert gains[index] == pytest.approx(
            more.mean(), rel=0.02, abs=5 * more.std() / math.sqrt(20000) + 1e-6
        )


def test_halving_what_is_missing_is_worth_as_much_anywhere() -> None:
    levels = np.array([0.0, 0.5, 0.7, 0.9])  # the reference point, and a front from .5 to .9
    worth = [float(nearness(np.array(score), levels)) for score in (0.9 - 0.4 * 2.0 ** -np.arange(5))]
    assert np.diff(worth)[:3] == pytest.approx(math.log(2), rel=0.4)  # down to a twentieth of the range
    assert nearness(np.array(0.9), levels) == pytest.approx(-math.log(0.05))
    # Nothing below the front.
    assert nearness(np.array([0.0, 0.5]), levels) == pytest.approx([-math.log(1.05)] * 2)
    step = 1e-6
    up, down = (float(nearness(np.array(0.9 + side), levels)) + math.log(0.05) for side in (step, -step))
    assert up == pytest.approx(-down, rel=1e-3) and up > 0  # no kink at the best
    # A front of one member, or of none.
    for same in (
        np.array([0.0]),
        np.array([0.7]),
        np.array([0.2, 0.7]),
        np.array([0.7, 0.7]),
    ):
        assert np.isfinite(nearness(np.array([0.0, 0.1, 0.7, 0.8]), same)).all()


@given(st.lists(st.tuples(*[st.integers(1, 3)] * 2), min_size=1, max_size=12))
def test_the_models_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    taken, accuracy = np.array(points, float).T
    losses = np.column_stack([taken, -accuracy]).tolist()
    beaten = [any(all(map(float.__le__, a, b)) and a != b for a in losses) for b in losses]
    assert front_places(taken, accuracy).tolist() == [place for place, one in enumerate(beaten) if not one]


def trade(parameters: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds and accuracy of a pretended training: larger batches are faster, and the best rate rises with them."""
    batch, rate = parameters["batch"], parameters["rate"]
    away = math.log(rate) - math.log(0.01 * math.sqrt(batch))
    return 100.0 / batch + 0.05, 0.95 - 0.03 * math.log(batch) - 0.05 * away**2


TRADE: dict[str, BaseDistribution] = {"batch": SPACE["batch"], "rate": SPACE["rate"]}


def studied(sampler: optuna.samplers.BaseSampler, trials: int) -> list[tuple[float, float]]:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    for _ in range(trials):
        trial = study.ask(TRADE)
        study.tell(trial, trade(trial.params))
    return [(math.log(one.values[0]), one.values[1]) for one in study.trials]


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_it_finds_more_front_than_rng(known: bool) -> None:
    def of(sampler: optuna.samplers.BaseSampler) -> float:
        return area(studied(sampler, 20), math.log(34), 0.0)

    law = (lambda parameters: trade(parameters)[0]) if known else None
    ours = [of(FrontSampler(space=TRADE, known_seconds=law, seed=seed)) for seed in range(4)]
    rng = [of(optuna.samplers.RandomSampler(seed=seed)) for seed in range(4)]
    assert np.median(ours) > max(rng)
    assert min(ours) > np.median(rng)


def test_the_same_seed_proposes_the_same_and_needs_no_space() -> None:
    assert studied(FrontSampler(seed=3), 12) == studied(FrontSampler(seed=3), 12)
    assert studied(FrontSampler(space=TRADE, seed=3), 9) != studied(FrontSampler(space=TRADE, seed=4), 9)


def test_trials_that_run_side_by_side_differ() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=FrontSampler(space=TRADE))
    for _ in range(10):
        trial = study.ask(TRADE)
        study.tell(trial, trade(trial.params))
    transform = SpaceTransform(TRADE)
    pending = [transform.encode(study.ask(TRADE).params) for _ in range(6)]
    apart = [float(np.abs(a - b).max()) for i, a in enumerate(pending) for b in pending[:i]]
    assert min(apart) > 0.003


def test_a_process_that_believes_itself_is_conditioned_on_its_own_mean() -> None:
    """The slow twin: the process conditioned from scratch, with next to no noise at what it believes."""
    rng = np.random.default_rng(0)
    points, values, believed, others = (
        rng.random((12, 3)),
        rng.standard_normal(12),
        rng.random((4, 3)),
        rng.random((9, 3)),
    )
    scales, noise = (np.log([0.3, 0.8, 2.0]), math.log(0.05)), np.append(np.full(12, 0.05), np.zeros(4))
    process = conditioned(points, values, *scales, 0.0, 1.0)
    both = np.vstack([points, believed])
    twin = conditioned(
        both, np.append(values, process.mean_at(believed)), scales[0], -50.0, 0.0, 1.0, own_noise=noise
    )
    one_by_one = process
    for point in believed:
        one_by_one = one_by_one.believing(point[None, :])
    for got in (process.believing(believed), one_by_one):
        assert got.mean_at(others) == pytest.approx(process.mean_at(others), abs=1e-9)
        for mine, its in zip(got.predict(others), twin.predict(others), strict=True):
            assert mine == pytest.approx(its, rel=1e-4, abs=1e-6)
    assert process.believing(np.empty((0, 3))) is process


def train(
    suggester: FrontSuggester,
    trials: Trials,
    training: Callable[[Mapping[str, Any]], tuple[float, ...]],
    fails: bool = False,
) -> Mapping[str, Any]:
    """Train what is suggested next; returns it."""
    (proposal,) = suggester.suggest(trials)
    assert isinstance(proposal, dict)
    number = trials.begin(proposal).number
    trials.end(number, TrialResult("error") if fails else TrialResult("complete", values=training(proposal)))
    return proposal


def test_more_trials_are_worth_less_and_less() -> None:
    suggester, trials = FrontSuggester(TRADE, known_seconds=lambda parameters: trade(parameters)[0]), Trials()
    gains = []
    for number in range(40):
        train(suggester, trials, trade)
        if number in (0, 5, 39):
            gains.append(suggester.expected_gain(trials, 10))
    assert gains[0] is None  # there is no model yet
    assert gains[1] > 4 * gains[2] > 0
    assert suggester.expected_gain(trials, 1) < gains[2]


@pytest.mark.parametrize("known", [False, True])
def test_a_fit_gives_several_proposals_each_given_those_before(known: bool) -> None:
    law = (lambda parameters: trade(parameters)[0]) if known else None
    suggester, trials = FrontSuggester(TRADE, known_seconds=law), Trials()
    for _ in range(12):
        train(suggester, trials, trade)
    proposed: list[Any] = list(suggester.suggest(trials, 8))
    assert proposed[0] == suggester.suggest(trials, 1)[0]
    transform = SpaceTransform(TRADE)
    points = [transform.encode(one) for one in proposed]
    assert min(float(np.abs(a - b).max()) for i, a in enumerate(points) for b in points[:i]) > 0.003
    # As if they were running, the next is another.
    more = transform.encode(suggester.suggest(trials, ready=proposed)[0])  # type: ignore[arg-type]
    assert min(float(np.abs(more - one).max()) for one in points) > 0.003


@pytest.mark.parametrize("known", [False, True])
def test_the_paused_trial_that_is_worth_most_per_second_left_is_resumed(known: bool) -> None:
    """The slow twin looks at each alone."""
    rng = np.random.default_rng(3)
    points = rng.random((8, 2))
    model = FrontModel(observed(points, np.exp(points[:, 0]), points.sum(1)), {})
    paused = PausedTrials(
        np.arange(9, 17), rng.random((8, 2)), *rng.uniform(0.2, 0.9, (3, 8)), np.ones(8, bool)
    )

    def log_taken(some: np.ndarray) -> np.ndarray | None:
        return some @ [0.3, 0.1] if known else None

    worth = {}
    for place, (number, point) in enumerate(zip(paused.numbers, paused.points[:, None], strict=True)):
        left_s = model.seconds_at(point, log_taken(point)) * (1 - paused.fractions[place])
        worth[number] = float(model.worth(point, log_taken(point))[0] / left_s[0])
    for number in sorted(worth, key=worth.__getitem__, reverse=True):
        assert model.paused_worth_more(paused, log_taken, worth[number] * 0.99) == number
        assert model.paused_worth_more(paused, log_taken, worth[number] * 1.01) is None
        paused.waiting[number - 9] = False


def test_what_is_not_evaluated_again_would_not_have_been_chosen() -> None:
    """The slow twin evaluates every candidate again after each point."""
    rng = np.random.default_rng(5)
    transform = SpaceTransform(TRADE)
    points = rng.random((20, 2))
    taken = [trade(one) for one in transform.decode_many(points)]
    model = FrontModel(observed(points, np.array(taken)[:, :1], np.array(taken)[:, 1]), {})

    def worth_of(some: np.ndarray, times: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        worth = model.expected_hypervolume_improvement(some, times)
        return worth, worth

    candidates = _Candidates(worth_of, rng.random((3000, 2)), None)
    evaluated = 0
    for _ in range(6):
        model.believe(candidates.best()[0][None, :], None)
        before = candidates._worth.copy()
        candidates.evaluate_again()
        evaluated += int((candidates._worth != before).sum())
        everything = worth_of(candidates._points, None)[1]
        assert candidates.best()[1] == pytest.approx(everything.max(), rel=1e-6)
    assert evaluated < 6 * 3000 / 3


def test_what_cannot_be_planned_is_not_proposed() -> None:
    def law(parameters: Mapping[str, Any]) -> float:
        return math.nan if parameters["batch"] > 100 else trade(parameters)[0]

    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FrontSampler(space=TRADE, known_seconds=law)
    )
    for _ in range(16):
        trial = study.ask(TRADE)
        study.tell(trial, trade(trial.params))
    assert all(one.params["batch"] <= 100 for one in study.trials[4:])


@pytest.mark.parametrize("known", [False, True])
def test_plain_optuna_is_proposed_what_a_study_is(known: bool) -> None:
    law = (lambda parameters: trade(parameters)[0]) if known else None
    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FrontSampler(space=TRADE, known_seconds=law, seed=7)
    )
    suggester, trials = FrontSuggester(TRADE, known_seconds=law, seed=7), Trials()
    for number in range(14):
        trial = study.ask(TRADE)
        assert trial.params == train(suggester, trials, trade, fails=number % 6 == 5)
        if number % 6 == 5:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, trade(trial.params))
    assert [record_of(one, "maximize").values for one in study.trials] == [one.values for one in trials]


@pytest.mark.parametrize(
    "directions", [["minimize"], ["maximize", "maximize"], ["minimize", "maximize", "minimize"]]
)
def test_other_objectives_are_refused_at_the_first_trial(directions: list[str]) -> None:
    study = optuna.create_study(directions=directions, sampler=FrontSampler())
    with pytest.raises(ValueError, match=f"expected two objectives, seconds, .*got {', '.join(directions)}"):
        study.ask(TRADE)


def test_seconds_that_are_none_are_refused_with_their_trial() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=FrontSampler())
    study.tell(study.ask(TRADE), (0.0, 0.5))
    with pytest.raises(ValueError, match=r"expected seconds above 0 .*of trial 0"):
        study.ask(TRADE)


def test_infinite_values_and_laws_do_no_harm() -> None:
    def law(parameters: Mapping[str, Any]) -> float:
        return (
            math.inf
            if parameters["batch"] > 300
            else 0.0
            if parameters["batch"] > 100
            else trade(parameters)[0]
        )

    study = optuna.create_study(
        directions=["minimize", "maximize"], sampler=FrontSampler(space=TRADE, known_seconds=law)
    )
    for number in range(14):
        trial = study.ask(TRADE)
        assert trial.params["batch"] <= 100
        study.tell(trial, [math.inf, 0.5] if number % 4 == 1 else trade(trial.params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", ["front", "gp", "nsga2", "qmc", "random", "optuna.samplers:RandomSampler"]
)
def test_a_study_names_its_sampler(study_file: Callable[..., Path], sampler: str) -> None:
    path = study_file(task=f"{TASKS}:Points", sampler=sampler, budget={"trials": 7, "profile_s": 0.3})
    result = run(path)
    assert [record.outcome in ("complete", "stopped") for record in result.study.records] == [True] * 7
    assert len({record.parameters["effective_batch"] for record in result.study.records}) > 3


def test_a_sampler_that_is_none_is_told(study_file: Callable[..., Path]) -> None:
    with pytest.raises(
        StudyFileError, match=r"sampler: expected one of front, tpe, .*; got 'tpee'\. Did you mean 'tpe'"
    ):
        read_study(study_file(sampler="tpee"))
    with pytest.raises(StudyFileError, match="sampler: expected an Optuna sampler at math:pi, got float"):
        run(study_file(task=f"{TASKS}:Points", sampler="math:pi"))


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_a_warm_start_never_enters_the_front(direction: Direction) -> None:
    """Trials of earlier studies that beat all of this one's teach the models, and are no part of what it has found."""

    def suggester(prior: list[PriorTrial]) -> FrontSuggester:
        return FrontSuggester(
            TRADE, known_seconds=lambda parameters: trade(parameters)[0], prior_trials=prior
        )

    rng = np.random.default_rng(3)
    own, earlier = (
        [{"batch": int(rng.integers(8, 400)), "rate": 10 ** rng.uniform(-3, 0)} for _ in range(12)]
        for _ in "ab"
    )
    trials = []
    for number, parameters in enumerate(own):
        seconds, score = trade(parameters)
        values = seconds, turned(score, direction)
        trials.append(
            TrialRecord.of(number, "complete", parameters, TrialFacts(), values, direction=direction)
        )
    prior = [(parameters, 0.5 * trade(parameters)[0], trade(parameters)[1] + 1.0) for parameters in earlier]
    warm = suggester(prior)
    model = warm._model(warm._observations(trials), warm._known())
    cuts, _ = model._strips()
    own_times = {round(math.log(trade(parameters)[0]), 9) for parameters in own}
    assert {round(float(cut), 9) for cut in cuts[:-1]} <= own_times


def test_the_untried_settings_of_a_finite_space_are_proposed_once_each() -> None:
    domains = {
        "layers": Range(low=2, high=6, step=2),
        "optimizer": Choices(choices=("sgd", "adam")),
        "nesterov": Choices(choices=(True, False), when={"optimizer": ("sgd",)}),
        "width": Fixed(value=8),
    }
    space, trials = SearchSpace.of(domains), Trials()
    wanted: Mapping[str, Any] | None = {"layers": 2, "optimizer": "adam"}
    while (wanted := space.untried(wanted or {}, trials)) is not None:
        trials.begin(wanted)
    assert sorted(map(str, (trial.parameters for trial in trials))) == sorted(
        str({"layers": layers, "optimizer": name, **more})
        for layers in (2, 4, 6)
        for name, more in (("adam", {}), ("sgd", {"nesterov": True}), ("sgd", {"nesterov": False}))
    )
    real = SearchSpace.of({"rate": Range(low=0.0, high=1.0)})
    begun = trials.begin({"rate": 0.5}).parameters
    assert real.untried(begun, trials) == begun


def test_what_a_trial_takes_besides_training_is_in_its_price() -> None:
    """Where time is the limit and starting a trial takes as long as the longest training, short ones are not cheap."""
    space: dict[str, BaseDistribution] = {
        "rate": FloatDistribution(1e-3, 1.0, log=True),
        "epochs": IntDistribution(1, 50),
    }
    lengths = []
    for overhead in (0.0, 50.0):
        suggester = FrontSuggester(space, known_seconds=lambda values: float(values["epochs"]), by_time=True)
        suggester.overhead, trials = overhead, Trials()
        for number in range(16):
            (wanted,) = suggester.suggest(trials)
            assert isinstance(wanted, dict)
            epochs = float(trials.begin(wanted).parameters["epochs"])
            score = 1 - 1 / (1 + epochs) - 0.02 * math.log(wanted["rate"] / 0.03) ** 2
            trials.end(number, TrialResult("complete", TrialFacts(train_s=epochs), (epochs, score)))
        lengths.append(np.median([trial.train_s for trial in trials if trial.train_s is not None]))
    assert lengths[1] > 1.5 * lengths[0]

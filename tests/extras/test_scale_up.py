"""The prediction for a larger training finds laws that trials were made from, and falls back on what is published."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bsearch.cli import main
from bsearch.extras.scale_up.fit import NEXT_TRIALS, scale_up
from bsearch.extras.scale_up.next_study import next_study
from bsearch.extras.scale_up.scaled_up import LAWS, ScaledUp, Size
from bsearch.extras.scale_up.shown import scale_up_parts
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import read_study, study_from_dict
from bsearch.spaces.study.spec import StudySpec
from click.testing import CliRunner, Result
from conftest import TASKS
from helpers import SPACE, validated


def bsearch(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


BATCH, RATE = math.log(128), math.log(3e-3)  # best at 100,000 samples and a million parameters
SMALL, LONG, WIDE, BOTH = (1e5, 1e6), (3e5, 1e6), (1e5, 4e6), (3e5, 4e6)


def best_at(exponents: Sequence[float], size: tuple[float, float]) -> tuple[float, float]:
    data, model = math.log(size[0] / 1e5), math.log(size[1] / 1e6)
    return BATCH + exponents[0] * data + exponents[1] * model, RATE + exponents[2] * data + exponents[3] * model


# Samples of the training set: none is seen twice.
PASS = 1e7


def trials(
    exponents: Sequence[float], sizes: Sequence[tuple[float, float]], count: int, seed: int = 0, training_set: float = PASS
) -> list[TrialRecord]:
    """Trials of AdamW with a hill along rate = batch^0.5, which moves with the size by these exponents."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        size = sizes[number % len(sizes)]
        best, best_rate = best_at(exponents, size)
        batch = float(rng.uniform(math.log(16), math.log(2048)))
        ridge = best_rate + 0.5 * (batch - best)
        rate = ridge + float(rng.normal())
        level = 0.9 + 0.02 * math.log(size[0] / 1e5) + 0.01 * math.log(size[1] / 1e6)
        fall = (0.01 if batch > best else 0.003) * (batch - best) ** 2 + 0.015 * (rate - ridge) ** 2
        facts = TrialFacts(
            effective_batch=round(math.exp(batch)),
            learning_rate=math.exp(rate),
            weight_decay=0.1,
            epochs=size[0] / training_set,
            samples_budget=int(size[0]),
            optimizer="AdamW",
            model_parameters=int(size[1]),
        )
        settings = {"effective_batch": facts.effective_batch, "learning_rate": facts.learning_rate, "epochs": facts.epochs}
        accuracy = level - fall + float(rng.normal(0, 0.002))
        made.append(TrialRecord(number, "complete", settings, facts, 1.0, accuracy))  # type: ignore[arg-type]
    return made


@pytest.mark.long
def test_exponents_of_ones_own_replace_the_published() -> None:
    """Far from both laws: the batch follows the model and hardly the data."""
    inside, closer = [], []
    for seed in range(6):
        exponents = (0.25, 0.15, 0.2, -0.75)
        found = scale_up("laws", trials(exponents, (SMALL, LONG, WIDE, BOTH), 80, seed), 10, 4)
        size = (found.target.samples, found.target.parameters)
        assert size == pytest.approx((3e6, 1.6e7))
        true_batch, true_rate = best_at(exponents, size)
        best = found.best
        assert found.edges == ()
        inside += [
            math.log(found.batch.low) <= true_batch <= math.log(found.batch.high),
            math.log(best.learning_rate.low) <= true_rate <= math.log(best.learning_rate.high),
        ]
        ours = abs(math.log(found.batch.value) - true_batch) + abs(math.log(best.learning_rate.value) - true_rate)
        laws = [abs(math.log(batch) - true_batch) + abs(math.log(rate) - true_rate) for batch, rate in map(found.by_law, LAWS)]
        closer.append(ours - min(laws))
    assert sum(inside) >= 10  # of 12, at 90 %
    assert np.mean(closer) < 0


def test_trials_of_one_size_leave_what_is_published() -> None:
    found = scale_up("one", trials((0.5, 0, 0.25, -0.5), [SMALL], 24), 10, 1)
    for before, after in found.exponents.values():
        assert (after.value, after.low, after.high) == pytest.approx((before.value, before.low, before.high), abs=0.03)
    low, high = (min(one), max(one)) if (one := [batch for batch, _ in map(found.by_law, LAWS)]) else (0.0, 0.0)
    assert found.batch.low < low < high < found.batch.high


@pytest.mark.long
def test_where_data_are_repeated_nothing_is_published() -> None:
    once = scale_up("once", trials((0.3, 0, 0.1, -0.2), [SMALL, LONG], 60), 10)
    again = scale_up("again", trials((0.3, 0, 0.1, -0.2), [SMALL, LONG], 60, training_set=1e5), 10)
    assert (once.passes, once.published) == (pytest.approx(0.03), True)
    assert (again.passes, again.published) == (3.0, False)
    for name, wider in (("batch_by_data", 1.5), ("rate_by_data", 1.3)):
        prior, published = again.exponents[name][0], once.exponents[name][0]
        assert prior.high - prior.low > wider * (published.high - published.low)
    # At a batch, the rate is expected to stay: what it gains with the data is what it gains with the batch.
    gained = again.exponents["rate_by_data"][0].value - 0.5 * again.exponents["batch_by_data"][0].value
    assert abs(gained) < 0.03
    assert again.exponents["rate_by_model"][0].low < -0.25 < 0 < again.exponents["rate_by_model"][0].high
    words = " ".join(map(str, scale_up_parts("again", replace(again, target=Size(3e6, 4e6)))))
    assert "guesses; the published ones are for a single pass over the data, and these trials make as many as 3" in words


@pytest.mark.long
def test_at_the_same_size_it_is_the_best_of_the_trials() -> None:
    found = scale_up("same", trials((0.5, 0, 0.25, -0.5), [SMALL], 60))
    assert (found.batch.value, found.best.learning_rate.value) == pytest.approx(found.carried, rel=0.15)
    assert all(found.by_law(law) == found.carried for law in LAWS)
    assert abs(math.log(found.batch.value) - BATCH) < 1
    assert abs(math.log(found.best.learning_rate.value) - RATE) < 0.7


@pytest.mark.long
def test_a_loss_is_an_accuracy_upside_down() -> None:
    made = trials((0.5, 0, 0.25, -0.5), [SMALL, LONG], 40)
    losses = [replace(one, accuracy=-(one.accuracy or 0.0), direction="minimize") for one in made]
    higher, lower = scale_up("a", made, 10), scale_up("a", losses, 10)
    assert higher.settings == lower.settings


@pytest.mark.long
def test_larger_batches_get_larger_rates_and_give_something_up() -> None:
    found = scale_up("ridge", trials((0.5, 0, 0.25, -0.5), [SMALL, LONG], 80), 10)
    by_multiple = {one.multiple: one for one in found.settings}
    assert by_multiple[1].given_up.value == pytest.approx(0, abs=1e-4)
    assert by_multiple[4].given_up.value > by_multiple[2].given_up.value > -0.002
    assert by_multiple[4].learning_rate.value > 1.3 * by_multiple[1].learning_rate.value


@pytest.mark.long
def test_weight_decay_keeps_its_timescale_or_shortens_it() -> None:
    """batch / (rate · decay · samples), a share of the training, between the same and a power of samples per parameter."""
    found = scale_up("decay", trials((0.5, 0, 0.25, -0.5), [SMALL, LONG], 60), 10)
    best, least = found.best, []
    assert best.weight_decay is not None
    made = max(trials((0.5, 0, 0.25, -0.5), [SMALL, LONG], 60)[1::2], key=lambda one: one.accuracy or 0)
    begin = (made.facts.effective_batch or 0) / ((made.facts.learning_rate or 0) * 0.1 * 3e5)
    for power in (0, 0.52):
        timescale = begin * 10**-power
        least.append(found.batch.value / (best.learning_rate.value * timescale * 3e6))
    assert least[0] * 0.6 < best.weight_decay.value < least[1] * 1.6
    plain = [replace(one, facts=replace(one.facts, weight_decay=0.0)) for one in trials((0.5, 0, 0.25, -0.5), [SMALL], 24)]
    assert scale_up("plain", plain, 10).best.weight_decay is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (trials((0.5, 0, 0.25, -0.5), [SMALL], 11), "study few: expected at least 12 complete trials, got 11"),
        (
            [replace(one, parameters={**one.parameters, "effective_batch": 64}) for one in trials((0.5, 0, 0, 0), [SMALL], 20)],
            "study few: space.effective_batch: expected trials of one size that differ in it",
        ),
        (
            [replace(one, accuracy=0.5) for one in trials((0.5, 0, 0, 0), [SMALL], 20)],
            "study few: expected trials that differ in the metric, got 0.5 in all",
        ),
        (
            [replace(one, facts=replace(one.facts, learning_rate=0.001)) for one in trials((0.5, 0, 0, 0), [SMALL], 20)],
            "study few: space.reference_rate: expected trials of one size",
        ),
    ],
)
def test_what_cannot_be_scaled_is_told(made: list[TrialRecord], words: str) -> None:
    with pytest.raises(StudyFileError, match=words):
        scale_up("few", made, 10)


@pytest.mark.long
def test_the_next_study_is_small_and_around_what_is_expected(study_file: Callable[..., Path]) -> None:
    exponents = (0.5, 0.0, 0.25, -0.5)
    made = trials(exponents, [SMALL], 40)
    before = scale_up("one", made, 30)
    found = before.next
    assert found is not None
    assert found.trials == NEXT_TRIALS
    assert found.cost <= 2
    assert 0 < min(found.narrows) < 0.95
    assert max(found.size.samples, 1e5) / min(found.size.samples, 1e5) > 1.5
    spec = read_study(study_file(baseline=[], stopping="none"))
    content = next_study(spec, made, found)
    again: StudySpec = study_from_dict(content)
    assert again.study == "small-next"
    assert again.fixed()["epochs"] == pytest.approx(found.size.samples / PASS, rel=1e-3)
    searched = again.searched()
    assert "epochs" not in searched
    assert {"effective_batch", "reference_rate"} <= set(searched)
    assert again.space.reference_batch == round(found.effective_batch)
    assert (again.budget.trials, again.budget.profile_s) == (NEXT_TRIALS, StudySpec.model_validate(content).budget.profile_s)
    # And it does what it says, as far as one such study can: the same prediction with its trials has a narrower interval.
    size = found.size.samples
    more = scale_up("two", [*made, *trials(exponents, [(size, 1e6)], 3 * NEXT_TRIALS, seed=1)], 30 * 1e5 / max(size, 1e5))
    assert more.target.samples == pytest.approx(3e6)
    assert width(more) < width(before)


def width(found: ScaledUp) -> float:
    """Of both intervals, on log scales."""
    rate = found.best.learning_rate
    return math.log(found.batch.high / found.batch.low) + math.log(rate.high / rate.low)


@pytest.mark.long
def test_no_rate_is_recommended_that_diverged() -> None:
    """A cliff a little above the ridge: half of the trials are beyond it."""
    exponents = (0.5, 0.0, 0.25, -0.5)
    for seed in range(4):
        made = []
        for one in trials(exponents, [SMALL, LONG], 80, seed):
            size = float(one.facts.samples_budget or 0), 1e6
            best, best_rate = best_at(exponents, size)
            ridge = best_rate + 0.5 * (math.log(one.facts.effective_batch or 1) - best)
            gone = math.log(one.facts.learning_rate or 1) > ridge + 0.3
            made.append(replace(one, outcome="diverged", accuracy=None) if gone else one)
        found = scale_up("cliff", made, 1)
        for setting in found.settings:
            best, best_rate = best_at(exponents, LONG)
            cliff = best_rate + 0.5 * (math.log(setting.effective_batch) - best) + 0.3
            assert math.log(setting.learning_rate.value) < cliff + 0.1, (seed, setting)


@pytest.mark.long
def test_a_metric_at_its_cap_leaves_nothing_to_give_up() -> None:
    """A quarter of the trials reach 1.0: draws above it must not make half of the metric out of a thousandth."""
    made = trials((0.5, 0, 0.25, -0.5), [SMALL, LONG], 48)
    cap = sorted(one.accuracy or 0.0 for one in made)[36]
    made = [replace(one, accuracy=min(one.accuracy or 0.0, cap) + 1 - cap) for one in made]
    for setting in scale_up("capped", made, 10).settings:
        assert setting.given_up.low > -0.05


@pytest.mark.long
def test_sharp_ladders_keep_enough_draws() -> None:
    """Sizes a hundred times apart determine the exponents better than the prior was drawn."""
    exponents = (0.6, 0.1, 0.35, -0.3)
    sizes = [(data, model) for data in (1e4, 1e5, 1e6) for model in (1e5, 1e6, 1e7)]
    found = scale_up("ladder", trials(exponents, sizes, 160), 10, 10)
    assert found.effective_draws > 50
    for (before, after), true in zip(found.exponents.values(), exponents, strict=True):
        assert abs(after.value - true) < 0.15
        assert after.high - after.low < 0.9 * (before.high - before.low)


@pytest.mark.long
@pytest.mark.long
def test_from_the_command_line_to_a_study_that_runs(
    study_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for epochs in (1, 2):
        space = SPACE | {"effective_batch": {"low": 8, "high": 80}, "epochs": epochs}
        space["reference_rate"] = {"low": 0.001, "high": 0.2, "at_batch": 16}
        path = study_file(study=f"of{epochs}", task=f"{TASKS}:Points", space=space, budget={"trials": 12}, stopping="none")
        files.append(path.rename(tmp_path / f"of{epochs}.yaml"))
        assert bsearch("run", files[-1], "--serial").exit_code == 0
    told = bsearch("ask", *files, "--scale", "data=30x", "--then-run", "next.yaml")
    assert told.exit_code == 0, told.output
    assert "of1, of2: 24 trials at 2 sizes" in told.output
    assert "Predicted for 24,000 samples and" in told.output
    assert "No trials differ in" not in told.output
    assert "Wrote next.yaml: 16 trials" in told.output
    document = validated(bsearch("ask", *files, "--scale", "data=30x", "--json").output)
    assert document["target"]["samples"] == 24000
    assert {setting["multiple"] for setting in document["settings"]} >= {1.0}
    ran = bsearch("run", "next.yaml", "--serial", "--trials", 2)
    assert ran.exit_code == 0, ran.output
    of_three = bsearch("ask", *files, "next.yaml", "--scale", "data=30x")
    assert "at 3 sizes" in of_three.output or "26 trials" in of_three.output
    for wrong, words in [
        (["--scale", "data=0.5x"], "expected factors of 1 or more, such as data=10x,model=4x; got 'data=0.5x'"),
        (["--scale", "model=2", "--then-run", "next.yaml"], "next.yaml exists already"),
        ([files[1]], "expected --scale, such as --scale data=10x,model=4x, with --then-run or several sources"),
        ([files[0], "--scale", "data=2x"], "expected studies that differ in their size alone: each study once"),
    ]:
        refused = bsearch("ask", files[0], *wrong)
        assert refused.exit_code == 2
        assert words in refused.output

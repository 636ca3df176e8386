"""Ordinary trainings: bsearch tells what each of them is, and trains and scores it as plain torch would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from bsearch.objectives.adapters.loop_task import LoopTask
from bsearch.objectives.data.batches import SampleStream
from bsearch.objectives.loading import load_task
from bsearch.objectives.task import Task
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.spaces.errors import BsearchError
from bsearch.spaces.trial import TrialSetup
from zoo.api import has
from zoo.entries import ENTRIES, Entry
from zoo.plain import Step
from zoo.table import made, profile

# Of metrics and losses that were not meant for so few samples.
pytestmark = [
    pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning"),
    pytest.mark.filterwarnings("ignore:std\\(\\):UserWarning"),
]

# Three whole steps and a remainder.
BATCH, BUDGET = 50, 170
LIBRARIES = {"huggingface": "transformers", "lightning": "lightning"}


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many samples are compared does not depend on how busy this machine is."""
    if has("examination"):
        monkeypatch.setattr("bsearch.objectives.examination.step._BUDGET_S", 60.0)
        monkeypatch.setattr("bsearch.objectives.examination.scores._BUDGET_S", 60.0)


def entries(chosen: Callable[[Entry], Any], *marks: Any) -> list[Any]:
    """Parameters of a test: the entries that it is about, those of adapters with their marker."""
    return [
        pytest.param(
            entry,
            id=entry.reference.removeprefix("zoo."),
            marks=[*marks, *[pytest.mark.frameworks] * bool(entry.framework)],
        )
        for entry in ENTRIES
        if chosen(entry)
    ]


def check_possible(entry: Entry) -> None:
    if entry.framework:
        pytest.importorskip(LIBRARIES[entry.framework], reason=f".[{entry.framework}] is not installed")
    if entry.needs and not has(entry.needs):
        pytest.skip(f"it could not be written: this bsearch has no {entry.needs}")


# What is told


def told(entry: Entry, **changes: Any) -> tuple[str, str]:
    """The verdict, or refused; and everything that is said with it."""
    try:
        examination: Any = profile(entry, **changes).examination  # type: ignore[attr-defined]
    except BsearchError as error:
        return "refused", str(error)
    if examination is None:
        return "not examined", ""
    findings = [f"{finding.where}: {finding.message}" for finding in examination.findings]
    return examination.verdict, "\n".join([*findings, getattr(examination, "note", "")])


# Every other entry in the quick tier.
@pytest.mark.parametrize(
    "entry",
    [
        *entries(lambda entry: ENTRIES.index(entry) % 2),
        *entries(lambda entry: not ENTRIES.index(entry) % 2, pytest.mark.slow),
    ],
)
def test_every_training_is_told_what_it_is(entry: Entry) -> None:
    if not has("examination"):
        pytest.skip("this bsearch examines no step before the first trial")
    check_possible(entry)
    verdict, message = told(entry)
    if entry.expects == "noted":
        assert verdict != "refused", message
        assert verdict == "not examined" or message
    else:
        assert verdict == entry.expects, message
        assert entry.expects == "refused" or "not examined" not in message
    assert re.search(entry.says, message, re.IGNORECASE), message


@pytest.mark.parametrize(
    "reference", ["wrong:WeightedMean", "coupled:SimCLR", "coupled:OwnNorm", "wrong:MeanAUROC"]
)
def test_what_is_inexact_runs_where_the_study_accepts_it(reference: str) -> None:
    if not has("accept_inexact"):
        pytest.skip("this bsearch has no training.accept_inexact")
    (entry,) = (entry for entry in ENTRIES if entry.reference == f"zoo.{reference}")
    verdict, message = told(entry, training={"accept_inexact": True})
    assert verdict == "inexact", message
    assert re.search(entry.says, message, re.IGNORECASE), message


# Losses


def steps_of(entry: Entry, setup: TrialSetup) -> Iterator[Step]:
    """Which samples each step sees: with those, a twin knows all that it may know of us."""
    task: Any = load_task(entry.reference)
    data = (task if isinstance(task, Task) else LoopTask(task)).data(setup)
    weights: Any = getattr(data, "weights", None)
    stream, position = SampleStream(len(data.train), setup.seed, *([] if weights is None else [weights])), 0  # type: ignore[arg-type]
    for run in setup.steps():
        for _ in range(run.count):
            parts = []
            for samples in run.plan.micro_batches():
                parts.append(stream.take(position, samples).index.tolist())
                position += samples
            yield parts


def losses_of(entry: Entry, setup: TrialSetup) -> list[float]:
    """The mean loss of every step: as many evaluations as samples make one after each."""
    task: Any = load_task(entry.reference)
    if isinstance(task, Task):
        return [measurement.train_loss or 0.0 for measurement in train_task(task, setup)]
    with closing(task(setup)) as measurements:
        return [measurement.train_loss or 0.0 for measurement in measurements]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("entry", entries(lambda entry: entry.twin))
def test_a_whole_run_is_that_of_plain_torch(entry: Entry, accumulation: int) -> None:
    if entry.expects == "unsplit" and accumulation > 1:
        pytest.skip("its batches are never split")
    check_possible(entry)
    setup = made(entry, BATCH, accumulation, BUDGET, training={"evaluations": BUDGET})
    steps = list(steps_of(entry, setup))
    assert [sum(map(len, step)) for step in steps] == [50, 50, 50, 20]
    assert {len(step) for step in steps} == ({1} if accumulation == 1 else {3, 2})
    expected = entry.losses(steps)
    assert len({round(loss, 4) for loss in expected}) == 4  # unlike steps
    assert losses_of(entry, setup) == pytest.approx(expected, rel=1e-10 if entry.double else 1e-4)


# Metrics


@pytest.mark.parametrize("entry", entries(lambda entry: entry.metrics))
def test_metrics_are_those_of_the_whole_set_at_any_evaluation_batch(entry: Entry) -> None:
    check_possible(entry)
    expected = entry.right_metrics()
    task: Any = load_task(entry.reference)
    for size in (4, 16, 64, 512):
        found = TrainingRun(task, made(entry, evaluation_batch=size)).evaluate()
        assert found == pytest.approx(expected, rel=1e-10 if entry.double else 1e-5), size


@pytest.mark.parametrize(
    "entry",
    entries(
        lambda entry: (
            entry.expects in ("exact", "unsplit") and not (entry.metrics or entry.framework or entry.is_loop)
        )
    ),
)
def test_metrics_do_not_depend_on_the_evaluation_batch(entry: Entry) -> None:
    check_possible(entry)
    task: Any = load_task(entry.reference)
    of_all, *others = (
        TrainingRun(task, made(entry, evaluation_batch=size)).evaluate() for size in (512, 4, 64)
    )
    for found in others:
        assert found == pytest.approx(of_all, rel=1e-5)


def test_the_zoo_is_complete() -> None:
    """Nothing in it is there twice, and what is right has its twin."""
    assert (
        len({entry.name for entry in ENTRIES}) == len({entry.reference for entry in ENTRIES}) == len(ENTRIES)
    )
    untwinned = {
        entry.reference
        for entry in ENTRIES
        if entry.expects in ("exact", "unsplit") and not (entry.twin or entry.is_loop)
    }
    # The noise of one follows seeds of our own; the twins of streams are in test_streams.py.
    assert untwinned == {"zoo.wrong:JitteredValidation", "zoo.wrong:Stream"}

"""Laws of streams: training from one is training from its samples in a list, whatever splits, resumes or reads ahead."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stream_tasks
import torch
from bsearch.objectives.data import stream
from bsearch.objectives.data.batches import RandomState
from bsearch.objectives.data.stream import FirstSamples, StreamReader, TrainingStream
from bsearch.objectives.parallel.data_parallel import Ranks
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state import checkpoint
from bsearch.objectives.task import Data, checked_data
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import Measurement, TrialSetup
from helpers import setup
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import SPLITS, cut_off, cut_off_in_step, trained
from stream_tasks import SAMPLES, Drawing, Jittered, Rows, Streamed, run_of
from torch.utils.data import DataLoader

TASK = f"{stream_tasks.__file__}:Streamed"
ROWS = [(torch.tensor([float(index)]), index) for index in range(SAMPLES)]


def told(measurements: list[Measurement]) -> list[Any]:
    return [(one.samples_seen, one.scores, one.train_loss) for one in measurements]


def ended(task: Streamed, made: TrialSetup) -> tuple[list[Any], list[torch.Tensor]]:
    run = run_of(task, made)
    return told(list(run.measurements())), [parameter.detach().clone() for parameter in run.parameters]


def same(one: tuple[list[Any], list[torch.Tensor]], other: tuple[list[Any], list[torch.Tensor]]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulation"), [(7, 7), (32, 1), (77, 5), (599, 3), (600, 7), (1300, 4)])
def test_a_stream_is_the_list_of_its_samples(batch: int, accumulation: int) -> None:
    """Over more than two passes, and through dropout."""
    made = setup(batch, accumulation, budget=1300, parameters={"dropout": 0.3})
    listed = replace(made, parameters={**made.parameters, "stream": "list"})
    assert same(ended(Streamed(), made), ended(Streamed(), listed))


def test_random_numbers_of_collating_are_those_of_the_list() -> None:
    made = setup(70, 3, budget=SAMPLES)
    assert same(ended(Jittered(), made), ended(Jittered(), replace(made, parameters={"stream": "list"})))


@given(
    samples=st.integers(1, 50),
    steps=st.lists(st.tuples(st.integers(3, 70), st.integers(1, 4)), min_size=1, max_size=9),
    devices=st.integers(1, 3),
)
def test_every_sample_of_a_step_belongs_to_one_device(
    samples: int, steps: list[tuple[int, int]], devices: int
) -> None:
    plans = [BatchPlan(batch, min(parts, batch // devices), devices) for batch, parts in steps]
    taken: Counter[int] = Counter()
    for rank in range(devices):
        live = TrainingStream(Rows(ROWS), samples, 0, None, keeps_states=False)
        keys = list(live._keys(plans, 0, Ranks(rank, devices)))
        assert [len(one) for one in keys] == [
            size for plan in plans for size in plan.micro_batches(rank) if size
        ]
        positions = [int(one) for key in keys for one in key.epoch * samples + key.index]
        assert positions == sorted(positions)
        taken.update(positions)
    assert taken == Counter(range(sum(plan.effective_batch for plan in plans)))


# Resuming


def cut(task: Streamed, made: TrialSetup, steps: int) -> None:
    """Train so many steps, each with a checkpoint after it, and die in the next."""
    run, step, done = run_of(task, made), TrainingRun.step, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal done
        if done == steps:
            raise KeyboardInterrupt
        done += 1
        return step(run, *arguments)

    run.step = counted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(run.measurements())


def cut_within(task: Streamed, made: TrialSetup, steps: int) -> None:
    """The same, but die in the second pass of the next step, at perturbed weights."""
    run, gradient, passes = run_of(task, made), TrainingRun._gradient_again, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        loss = gradient(run, *arguments)
        if passes > steps:
            raise KeyboardInterrupt
        return loss

    run._gradient_again = counted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        list(run.measurements())


@pytest.fixture(autouse=True)
def saves_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes states however long that takes."""
    monkeypatch.setattr(checkpoint, "_SAVING", 0)
    monkeypatch.setattr(stream, "_STATE_SHARE", math.inf)


def resumable(folder: Path, stream: str = "Rows", workers: int = 0, **changes: Any) -> TrialSetup:
    given = {
        "batch": 60,
        "accumulation": 2,
        "budget": 1300,
        "parameters": {"stream": stream, "dropout": 0.3, **changes.pop("parameters", {})},
        "training": {"evaluations": 2, "workers": workers},
        "checkpoint": str(folder / "trial.pt"),
        "checkpoint_every_s": 1e-9,
    }
    return setup(**(given | changes))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("stream", "skips"),
    [
        ("Drawing", True),
        ("DrawingStateful", False),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("Rows", True), ("Stateful", False), ("Forgetful", True))
        ),
    ],
)
def test_resumed_is_uninterrupted(tmp_path: Path, stream: str, skips: bool, workers: int) -> None:
    """In a pass and at its beginning; by the stream's state where that brings back the samples."""
    made = resumable(tmp_path, stream, workers)
    whole = ended(Streamed(), replace(made, checkpoint=None))
    for steps in (4, 10, 19):
        again = replace(made, checkpoint=f"{made.checkpoint}{steps}")
        cut(Streamed(), again, steps)
        run = run_of(Streamed(), replace(again, attempt=1))
        measured = list(run.measurements())
        assert (measured[-1].facts["resumed_at"], told(measured)) == (60 * steps, whole[0])
        assert all(map(torch.equal, run.parameters, whole[1]))
        skipped, place = measured[-1].facts.get("samples_skipped", 0), 60 * steps % SAMPLES
        assert skipped == place if skips or not place else 8 <= skipped <= 128


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("kind", "has_states"), [("Rows", False), ("Stateful", True)])
def test_states_are_taken_where_they_are_wanted_and_there(kind: str, has_states: bool, kept: bool) -> None:
    reader = StreamReader(getattr(stream_tasks, kind)(ROWS), SAMPLES, 0, keeps_states=kept)
    reader.read(range(100))
    assert bool(reader.taken().states) == (has_states and kept)


def test_a_stateful_stream_that_another_trial_left_begins_anew() -> None:
    """Wherever the object was left by whoever: what is iterated is a copy."""
    task, made = Streamed(), setup(50, budget=700, parameters={"stream": "Stateful"})
    data = task.data(made)
    task.data = lambda setup: data  # type: ignore[method-assign]
    first = ended(task, made)
    partly = TrainingRun(task, made)
    partly.train_fetcher.fetch(partly.stream.take(0, 9))
    partly.loader([BatchPlan(20)]).take(20)
    assert same(ended(task, made), first)


@pytest.mark.parametrize("how", ["order", "content"])
def test_another_order_after_a_resume_is_refused_with_the_samples_number(tmp_path: Path, how: str) -> None:
    class Reordered(Streamed):
        def samples(self) -> list[Any]:
            rows = super().samples()
            if how == "order":
                return [*rows[:230], *reversed(rows[230:300]), *rows[300:]]
            return [(inputs, label + (index == 244)) for index, (inputs, label) in enumerate(rows)]

    made = resumable(tmp_path)
    cut(Streamed(), made, 5)
    number = 230 if how == "order" else 244
    with pytest.raises(TaskError, match=f"resume at sample 300; got another sample {number}, .* pass 1"):
        list(TrainingRun(Reordered(), replace(made, attempt=1)).measurements())


def test_an_unseeded_order_is_refused_after_a_resume_and_by_the_examination(tmp_path: Path) -> None:
    made = resumable(tmp_path, "Unseeded")
    cut(Streamed(), made, 3)
    with pytest.raises(TaskError, match="got another sample"):
        list(TrainingRun(Streamed(), replace(made, attempt=1)).measurements())
    with pytest.raises(TaskError, match="same seed, epoch and position in the stream"):
        profile_task(TASK, ProfileRequest(setup(parameters={"stream": "Unseeded"}), Memory(), highest=50))


class FromDatasets(Streamed):
    """A stream of the library datasets; parameters: `shuffled`."""

    def data(self, setup: TrialSetup) -> Data:
        from datasets import Dataset

        rows, validation = self.samples(), super().data(setup).validation
        columns = {
            "inputs": [inputs.tolist() for inputs, _ in rows],
            "labels": [int(label) for _, label in rows],
        }
        stream = Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
        if setup.parameters["shuffled"]:
            stream = stream.shuffle(seed=3, buffer_size=50)
        return Data(stream, validation, train_collate=stacked, samples=SAMPLES)


def stacked(rows: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [
        torch.tensor([row["inputs"] for row in rows]).double(),
        torch.tensor([row["labels"] for row in rows]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_stream_of_datasets_resumes_by_its_state_or_by_skipping(tmp_path: Path, shuffled: bool) -> None:
    """Its state leaves out what a shuffling buffer held."""
    task, made = FromDatasets(), resumable(tmp_path, parameters={"shuffled": shuffled})
    whole = ended(task, replace(made, checkpoint=None))
    for steps in (5, 17):
        again = replace(made, checkpoint=f"{made.checkpoint}{steps}")
        cut(task, again, steps)
        run = run_of(task, replace(again, attempt=1))
        measured = list(run.measurements())
        assert told(measured) == whole[0]
        assert all(map(torch.equal, run.parameters, whole[1]))
        skipped, place = measured[-1].facts["samples_skipped"], 60 * steps % SAMPLES
        assert skipped == place if shuffled else 8 <= skipped <= 128


# What a stream yields and draws


def test_a_stream_that_ends_early_is_refused_with_its_number() -> None:
    for workers in (0, 1):
        made = setup(50, budget=900, parameters={"yields": 590}, training={"workers": workers})
        with pytest.raises(
            TaskError, match=r"of 600 samples, as stated; the stream ended after 590 samples of pass 1\."
        ):
            list(TrainingRun(Streamed(), made).measurements())


@pytest.mark.parametrize("stream", ["Rows", "Stateful"])
def test_a_stream_that_yields_more_is_cut_and_that_is_told(stream: str) -> None:
    """The next pass begins at its beginning, though the stream had not come to its end."""
    cut_short = setup(50, budget=1300, parameters={"stream": stream, "stated": 500})
    exact = setup(50, budget=1300, parameters={"stream": stream, "stated": 500, "yields": 500})
    measured, expected = (list(TrainingRun(Streamed(), made).measurements()) for made in (cut_short, exact))
    assert told(measured) == told(expected)
    assert [one.facts.get("stream") for one in expected] == [None, None]
    assert measured[-1].facts["stream"] == "yields more than the 500 samples stated; each pass ended there"


@pytest.mark.slow
def test_a_stream_that_draws_leaves_dropout_alone_and_every_split_the_same() -> None:
    made = setup(60, 1, 1300, parameters={"stream": "Drawing"})
    (alone, _), *others = (
        ended(Streamed(), replace(made, plan=BatchPlan(60, parts))) for parts in (1, 4, 13)
    )
    for other, _ in others:
        assert [one[2] for one in other] == pytest.approx([one[2] for one in alone], rel=1e-12)
    run = TrainingRun(Streamed(), made)
    loader = run.loader([made.plan] * 30)
    torch.manual_seed(5)
    state = RandomState.now()
    for _ in range(30):
        loader.take(60)
        assert state.unchanged()


def test_loader_processes_read_a_stream_once() -> None:
    """`Rows` checks that it is read by one process, whatever number of workers is allowed."""
    made = setup(64, 2, 700, parameters={"stream": "Drawing"})
    expected = ended(Streamed(), made)
    assert same(
        ended(Streamed(), replace(made, training=made.training.model_copy(update={"workers": 3}))), expected
    )


def test_the_first_samples_are_those_of_training() -> None:
    first = FirstSamples(Drawing(Streamed().samples()), SAMPLES, 5)
    assert len(first) == 512
    expected = StreamReader(Drawing(Streamed().samples()), SAMPLES, 5).read(range(9))
    for one, other in zip([first[8], first[0]], [expected[8], expected[0]], strict=True):
        assert torch.equal(one[0], other[0]) and one[1] == other[1]


@pytest.mark.slow
def test_a_study_is_profiled_from_a_stream() -> None:
    """Memory, step times and the examination; the training set is what was stated."""
    given = {"samples_budget": 1, "parameters": {"stated": 500}}
    profile = profile_task(TASK, ProfileRequest(setup(**given), Memory(), highest=64, traces=True))
    assert profile.training_set == 500
    assert (
        profile.examination is not None and not profile.examination.refusals and profile.examination.samples
    )


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": None}, "samples: expected an integer >= 1 with a stream .Rows., .*; got None"),
        ({"samples": 0}, "got 0"),
        ({"samples": True}, "got True"),
        ({"samples": 2.0}, "got 2.0"),
        ({"lengths": [1] * SAMPLES}, "lengths: expected none with a stream"),
        ({"validation": Rows(ROWS)}, "validation: expected a map-style dataset .* got Rows, a stream"),
        ({"test": Rows(ROWS)}, "test: expected a map-style dataset .* got Rows, a stream"),
        ({"train": iter(ROWS)}, "can be iterated anew for each pass, got list_iterator"),
        ({"train": DataLoader(Rows(ROWS))}, "train: expected a dataset, got a DataLoader"),
        ({"train": ROWS, "samples": 599}, "samples: expected the length of the training set, 600, got 599"),
    ],
)
def test_what_cannot_be_a_stream_is_refused(changes: dict[str, Any], message: str) -> None:
    given: Any = {"train": Rows(ROWS), "validation": ROWS, "samples": SAMPLES}
    with pytest.raises(TaskError, match=message):
        checked_data(Data(**(given | changes)))


def test_a_stream_that_cannot_be_copied_is_refused() -> None:
    class Open(Rows):
        def __init__(self) -> None:
            super().__init__(ROWS)
            self.lines = (line for line in "ab")

    with pytest.raises(TaskError, match=r"can be copied, .* Open files and connections in __iter__"):
        StreamReader(Open(), SAMPLES, 0).read([0])


# Several devices


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["Rows", "Drawing"])
@pytest.mark.parametrize(("batch", "accumulation"), SPLITS)
def test_two_ranks_equal_one_process(
    ranks: RankProcesses, stream: str, batch: int, accumulation: int
) -> None:
    def on(devices: int, accumulation: int) -> dict[str, Any]:
        return setup(
            batch, plan=BatchPlan(batch, accumulation, devices), parameters={"stream": stream}
        ).to_dict()

    (alone,) = trained(TASK, on(1, 1), 5)
    (shared,) = ranks.run(trained, TASK, on(2, accumulation), 5)
    for one, other in zip(alone, shared, strict=True):
        assert float((one - other).norm()) <= 1e-12 * float(one.norm())


@pytest.mark.slow
def test_resuming_with_another_number_of_ranks(ranks: RankProcesses, tmp_path: Path) -> None:
    """Two ranks resume what one process began."""
    made = resumable(tmp_path, "Stateful", parameters={"dropout": 0.0})
    whole, _ = ended(Streamed(), replace(made, checkpoint=None))
    cut(Streamed(), made, 4)
    shutil.copy(tmp_path / "trial.pt", tmp_path / "copy.pt")
    again = replace(made, plan=BatchPlan(60, 1, 2), attempt=1)
    ((measured, _),) = ranks.run(cut_off, TASK, again.to_dict(), 9)
    assert [one[2] for one in measured] == pytest.approx([one[2] for one in whole], rel=1e-9)
    (steps,) = ranks.run(
        cut_off_in_step, TASK, replace(again, checkpoint=str(tmp_path / "copy.pt")).to_dict(), 99
    )
    assert steps == 22 - 4


@pytest.mark.slow
def test_a_stream_that_splits_itself_by_rank_is_refused(ranks: RankProcesses) -> None:
    made = setup(50, plan=BatchPlan(50, 1, 2), parameters={"stream": "PerRank"}).to_dict()
    with pytest.raises(TaskError, match="devices 0 and 1 read different samples 0, counted from 0"):
        list(ranks.run(trained, TASK, made, 2))

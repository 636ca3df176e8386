"""Laws of going on: a training cut off anywhere and gone on with equals the one that was never cut off, bit for bit."""

from __future__ import annotations

import time
import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives import trial
from bsearch.objectives.parallel.data_parallel import Ranks
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.state import checkpoint
from bsearch.objectives.state.checkpoint import Checkpoint, experiment_of
from bsearch.objectives.state.checkpoint_files import delete_checkpoint
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import LEFT, Measurement, Outcome, TrialSetup
from conftest import TASKS
from helpers import setup
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_jobs import cut_off, cut_off_in_step, left_while_saving_takes_long
from tasks_for_tests import Noisy, own_loop_with_checkpoints


def noisy(folder: Path | str, evaluations: int = 5, **changes: Any) -> TrialSetup:
    """A short training that writes a checkpoint at every evaluation."""
    url = f"{folder}/{uuid.uuid4().hex}.pt"
    given = {
        "training": {"evaluations": evaluations},
        "checkpoint": url,
        "checkpoint_every_s": 0.0,
        "budget": 400,
    }
    return setup(**(given | changes))


def reported(measurements: list[Measurement]) -> list[tuple[Any, ...]]:
    """What of measurements must repeat; times do not."""
    return [(one.samples_seen, one.accuracy, one.train_loss, dict(one.scores)) for one in measurements]


def weights(run: TrainingRun) -> list[torch.Tensor]:
    return [value.clone() for value in run.model.state_dict().values()]


def trained_until(made: TrialSetup, measurements: int) -> None:
    """Begin an attempt and leave it without a word after so many measurements, as a killed worker does."""
    attempt = TrainingRun(Noisy(), made).measurements()
    for _ in range(measurements):
        next(attempt)
    attempt.close()  # type: ignore[attr-defined]


def whole(made: TrialSetup) -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
    run = TrainingRun(Noisy(), made)
    return reported(list(run.measurements())), weights(run)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 130),
    budget=st.integers(150, 700),
    evaluations=st.integers(2, 9),
    cuts=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    optimizer=st.sampled_from(["sgd", "adam"]),
    data=st.data(),
)
def test_cut_off_anywhere_and_gone_on_with_is_bit_for_bit_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    batch: int,
    budget: int,
    evaluations: int,
    cuts: list[int],
    optimizer: str,
    data: st.DataObject,
) -> None:
    micro_batches = data.draw(st.integers(1, max(batch // 2, 1)))
    made = noisy(
        tmp_path_factory.getbasetemp(),
        evaluations,
        batch=batch,
        accumulation=micro_batches,
        budget=budget,
        rate=0.01,
        parameters={"optimizer": optimizer},
        smallest_micro_batch=2,
    )
    uninterrupted = whole(replace(made, checkpoint=None))
    for attempt, cut in enumerate(cuts):
        points = len(uninterrupted[0])
        trained_until(replace(made, attempt=attempt), min(cut, points - 1) or 1)
    measurements, ends = whole(replace(made, attempt=len(cuts)))
    assert measurements == uninterrupted[0]
    assert all(torch.equal(one, other) for one, other in zip(ends, uninterrupted[1], strict=True))


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 13, 24])
def test_between_evaluations_too_nothing_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """A checkpoint after every step: an attempt that was killed in the next one takes exactly the steps that are left."""
    monkeypatch.setattr(checkpoint, "_SAVING", 0)
    training = {"evaluations": 3, "schedule": "wsd"}
    made = noisy(tmp_path, batch=16, training=training, epochs=4.0, checkpoint_every_s=1e-9)
    expected = list(TrainingRun(Noisy(), replace(made, checkpoint=None)).measurements())

    def training_run(setup: TrialSetup, most: int) -> tuple[TrainingRun, list[int]]:
        run, sizes = TrainingRun(Noisy(), setup), []
        step = run.step

        def counted(micro_batches: Any, size: int) -> torch.Tensor:
            if len(sizes) == most:
                raise KeyboardInterrupt
            sizes.append(size)
            return step(micro_batches, size)

        run.step = counted  # type: ignore[method-assign]
        return run, sizes

    first, _ = training_run(made, cut)
    with pytest.raises(KeyboardInterrupt):
        list(first.measurements())
    again, sizes = training_run(replace(made, attempt=1), 99)
    measured = list(again.measurements())
    assert reported(measured) == reported(expected)
    assert len(sizes) == 400 // 16 - cut
    assert measured[-1].facts["resumed_at"] == 16 * cut


def test_going_on_takes_the_remaining_steps_alone_and_says_where_it_began(tmp_path: Path) -> None:
    made = noisy(tmp_path)
    trained_until(made, 3)
    run = TrainingRun(Noisy(), replace(made, attempt=1))
    steps = 0
    step = run.step

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return step(*arguments)

    run.step = counted  # type: ignore[method-assign]
    measurements = list(run.measurements())
    reached = measurements[2].samples_seen
    assert steps == -(-(400 - reached) // 32)
    assert measurements[-1].facts["resumed_at"] == reached
    assert "resumed_at" not in measurements[2].facts
    elapsed = [one.elapsed_s for one in measurements]
    assert elapsed == sorted(elapsed)  # the clock goes on too


@pytest.mark.slow
def test_two_ranks_go_on_each_with_its_own_dice(tmp_path: Path) -> None:
    made = noisy(tmp_path, plan=BatchPlan(33, 2, 2), smallest_micro_batch=2)
    ranks = RankProcesses(2, "cpu", 1)
    with closing(ranks):
        reference = f"{TASKS}:Noisy"
        (uninterrupted,) = ranks.run(cut_off, reference, replace(made, checkpoint=None).to_dict(), 99)
        (_,) = ranks.run(cut_off, reference, made.to_dict(), 2)
        (again,) = ranks.run(cut_off, reference, replace(made, attempt=1).to_dict(), 99)
    assert again[0] == uninterrupted[0]
    assert all(torch.equal(one, other) for one, other in zip(again[1], uninterrupted[1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("before", [pytest.param(1, marks=pytest.mark.long), 2])
def test_with_more_or_fewer_devices_the_same_training_goes_on(tmp_path: Path, before: int) -> None:
    reference = f"{TASKS}:WideNet"  # in double precision, without dice
    alone = noisy(tmp_path, batch=33)
    shared = replace(alone, plan=BatchPlan(33, 1, 2))
    assert experiment_of(shared) == experiment_of(alone)
    (uninterrupted,) = cut_off(reference, replace(alone, checkpoint=None).to_dict(), 99)
    with closing(RankProcesses(2, "cpu", 1)) as ranks:
        if before == 1:
            (_,) = cut_off(reference, alone.to_dict(), 2)
            (again,) = ranks.run(cut_off, reference, replace(shared, attempt=1).to_dict(), 99)
        else:
            (left,) = ranks.run(
                cut_off_in_step, reference, replace(shared, training=alone.training).to_dict(), 8
            )
            (again,) = cut_off(reference, replace(alone, attempt=1).to_dict(), 99)
            assert left == 8
    assert [seen for seen, *_ in again[0]] == [seen for seen, *_ in uninterrupted[0]]
    for one, other in zip(again[1], uninterrupted[1], strict=True):
        assert float((one - other).norm()) <= 1e-10 * float(other.norm())


@pytest.mark.slow
def test_ranks_that_are_asked_to_leave_wait_until_the_checkpoint_is_written(tmp_path: Path) -> None:
    training = {"evaluations": 1}
    made = noisy(
        tmp_path, training=training, plan=BatchPlan(10, 1, 2), smallest_micro_batch=2, checkpoint_every_s=60.0
    )
    with closing(RankProcesses(2, "cpu", 1)) as ranks:
        (outcome,) = ranks.run(left_while_saving_takes_long, f"{TASKS}:Noisy", made.to_dict())
        assert (outcome.kind, outcome.message) == ("interrupted", LEFT)
        assert not ranks.alive
    with closing(RankProcesses(2, "cpu", 1)) as others:
        others.ask_to_leave()  # of ranks without a training nothing is asked, and the next one stays
        (whole,) = others.run(cut_off, f"{TASKS}:Noisy", replace(made, checkpoint=None).to_dict(), 99)
        assert whole[0][-1][0] == made.samples_budget
    again = list(TrainingRun(Noisy(), replace(made, attempt=1, plan=BatchPlan(10))).measurements())
    assert again[-1].facts["resumed_at"] == 160  # after the 16th step, at which ranks agree


def test_a_slow_checkpoint_is_not_written_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = noisy(
        tmp_path, batch=4, training={"evaluations": 1}, smallest_micro_batch=2, checkpoint_every_s=0.01
    )
    saves = []

    def slowly(path: Path, *parts: object) -> None:
        saves.append(path)
        time.sleep(0.05)

    monkeypatch.setattr(checkpoint, "_replace", slowly)
    started = time.perf_counter()
    list(TrainingRun(Noisy(), made).measurements())
    taken = time.perf_counter() - started
    assert len(saves) <= 2 + taken / 0.5  # each takes 0.05 s, and ten times as long is trained between two


def test_what_checkpoints_take_is_no_time_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = []

    def slowly(path: Path, *parts: object) -> None:
        saves.append(path)
        time.sleep(0.05)

    monkeypatch.setattr(checkpoint, "_SAVING", 0)
    monkeypatch.setattr(checkpoint, "_replace", slowly)
    made = noisy(tmp_path, batch=16, training={"evaluations": 1}, checkpoint_every_s=1e-9)
    *_, last = TrainingRun(Noisy(), made).measurements()
    assert len(saves) == 400 // 16 - 1  # after every step but the last
    assert last.elapsed_s < 0.05 * len(saves) / 2


def test_a_first_step_that_takes_long_does_not_count_because_a_checkpoint_follows(tmp_path: Path) -> None:
    """Such as one that compiles: it is charged what other steps take, with a checkpoint right after it or without."""

    def elapsed_s(made: TrialSetup) -> float:
        run = TrainingRun(Noisy(), made)
        step, slow = run.step, [0.3]

        def first(*arguments: Any) -> torch.Tensor:
            time.sleep(slow.pop() if slow else 0.0)
            return step(*arguments)

        run.step = first  # type: ignore[method-assign]
        *_, last = run.measurements()
        return last.elapsed_s

    training = {"evaluations": 1, "schedule": "constant"}
    made = noisy(tmp_path, batch=16, training=training, epochs=4.0, checkpoint_every_s=1e-9)
    assert elapsed_s(made) < 0.25


@pytest.mark.slow
def test_two_ranks_agree_on_a_checkpoint_between_evaluations(tmp_path: Path) -> None:
    training = {"evaluations": 1}
    made = noisy(
        tmp_path, training=training, plan=BatchPlan(10, 1, 2), smallest_micro_batch=2, checkpoint_every_s=1e-9
    )
    with closing(RankProcesses(2, "cpu", 1)) as ranks:
        reference = f"{TASKS}:Noisy"
        (uninterrupted,) = ranks.run(cut_off, reference, replace(made, checkpoint=None).to_dict(), 99)
        (taken,) = ranks.run(cut_off_in_step, reference, made.to_dict(), 37)
        (left,) = ranks.run(cut_off_in_step, reference, replace(made, attempt=1).to_dict(), 99)
        assert (taken, left) == (37, 40 - 32)  # it went on from the last step after which they agreed
        (again,) = ranks.run(cut_off, reference, replace(made, attempt=2).to_dict(), 99)
    # Running statistics were averaged once more, which rounds.
    assert again[0][-1][0] == uninterrupted[0][-1][0] == 400
    assert all(
        torch.allclose(one, other, rtol=1e-5) for one, other in zip(again[1], uninterrupted[1], strict=True)
    )


def test_a_smaller_pass_after_running_out_of_memory_goes_on_at_the_same_batch(tmp_path: Path) -> None:
    made = noisy(tmp_path, batch=64, budget=448)
    trained_until(made, 2)
    again = replace(made, attempt=1, plan=BatchPlan(64, 2), largest_micro_batch=32)
    assert experiment_of(again) == experiment_of(made)
    measurements = list(TrainingRun(Noisy(), again).measurements())
    assert measurements[-1].samples_seen == 448
    assert measurements[-1].facts["resumed_at"] == measurements[1].samples_seen


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 31},
        {"budget": 399},
        {"rate": 0.2},
        {"parameters": {"width": 3}},
        {"training": {"evaluations": 5, "seed": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_checkpoint_of_another_experiment_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    made = noisy(tmp_path)
    trained_until(made, 2)
    other = noisy(tmp_path, **change)
    measurements = list(TrainingRun(Noisy(), replace(other, checkpoint=made.checkpoint)).measurements())
    assert all("resumed_at" not in one.facts for one in measurements)


@pytest.mark.parametrize("damage", ["cut", "empty", "words", "pickle", "bit", "head"])
def test_a_damaged_checkpoint_costs_the_work_and_not_the_trial(tmp_path: Path, damage: str) -> None:
    made = noisy(tmp_path)
    uninterrupted = whole(replace(made, checkpoint=None))
    trained_until(made, 2)
    file = Path(str(made.checkpoint))
    kept = file.read_bytes()
    hostile = b"cos\nsystem\n(S'touch hacked'\ntR."
    bit, head = (kept[:at] + bytes([kept[at] ^ 4]) + kept[at + 1 :] for at in (len(kept) // 2, 3))
    damaged = {"cut": kept[: len(kept) // 2], "empty": b"", "words": b"not a checkpoint", "pickle": hostile}
    file.write_bytes({**damaged, "bit": bit, "head": head}[damage])
    checkpoint = Checkpoint.of(made)
    assert checkpoint.load() is None
    reason = "the checkpoint could not be read, so training began again: it is damaged"
    assert checkpoint.facts()["checkpoint"] == reason
    assert whole(made)[0] == uninterrupted[0]


def test_a_place_that_cannot_be_written_costs_no_trial_and_leaves_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    made = noisy(blocked)
    measurements = list(TrainingRun(Noisy(), made).measurements())
    assert measurements[-1].samples_seen == 400
    assert "could not be written" in str(measurements[-1].facts["checkpoint"])
    assert list(tmp_path.iterdir()) == [blocked]
    folder = Checkpoint(str(tmp_path), 0.0, "")
    assert folder.load() is None
    assert str(folder.facts()["checkpoint"]).endswith(
        "training began again: expected a file, got a folder, a pipe or a device"
    )


@pytest.mark.parametrize("mended", [False, True])
def test_a_place_without_room_is_named_until_there_is_some(tmp_path: Path, mended: bool) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    checkpoint = Checkpoint(str(blocked / "0.pt"), 0.0, "")
    checkpoint.save({"x": 1})
    assert checkpoint.facts() == {"checkpoint": "the checkpoint could not be written: File exists"}
    if mended:
        blocked.unlink()
    checkpoint.save({"x": 1})
    assert bool(checkpoint.facts()) == (not mended)


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "3-code.pt"
    file.parent.mkdir()
    left, others = file.with_name("3-code.pt.0f.part"), file.with_name("13-code.pt.0f.part")
    for part in (left, others):
        part.write_bytes(b"half")
    Checkpoint(str(file), 0.0, "").save({"x": 1})
    assert sorted(file.parent.iterdir()) == sorted([file, others])
    others.unlink()
    left.write_bytes(b"half")
    delete_checkpoint(str(file))
    assert not file.parent.exists()


def test_a_checkpoint_is_replaced_whole_and_forgotten_with_its_folder(tmp_path: Path) -> None:
    made = noisy(tmp_path / "deep" / "checkpoints")
    trained_until(made, 4)
    folder = tmp_path / "deep" / "checkpoints"
    assert [file.suffix for file in folder.iterdir()] == [".pt"]
    delete_checkpoint(str(made.checkpoint))
    delete_checkpoint(str(made.checkpoint))
    assert not folder.exists()


def test_other_stores_are_reached_by_their_url() -> None:
    made = noisy("memory://bucket/of")
    uninterrupted = whole(replace(made, checkpoint=None))
    trained_until(made, 3)
    assert whole(made)[0] == uninterrupted[0]
    delete_checkpoint(str(made.checkpoint))
    assert Checkpoint.of(made).load() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_writes(tmp_path: Path, rank: int) -> None:
    run = TrainingRun(Noisy(), noisy(tmp_path, plan=BatchPlan(8, 1, 2), sharding="fsdp2"), Ranks(rank))
    run.begin()
    run.course.save(run.course.clock)
    assert len(list(tmp_path.iterdir())) == 1 - rank


def test_nothing_is_written_before_it_is_due(tmp_path: Path) -> None:
    made = noisy(tmp_path, checkpoint_every_s=3600.0)
    list(TrainingRun(Noisy(), made).measurements())
    assert not list(tmp_path.iterdir())


def test_a_loop_of_ones_own_goes_on_too(tmp_path: Path) -> None:
    made = noisy(tmp_path, batch=20, budget=100)
    with pytest.raises(KeyboardInterrupt):
        list(own_loop_with_checkpoints(made))
    reports = list(trial.attempt(f"{TASKS}:own_loop_with_checkpoints", replace(made, attempt=1)))
    assert [report.samples_seen for report in reports if isinstance(report, Measurement)] == [
        20,
        40,
        60,
        80,
        100,
    ]
    assert reports[-1] == Outcome("complete")

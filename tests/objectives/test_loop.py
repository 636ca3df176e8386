"""Laws of the kit for training loops of one's own: exact steps, resuming, several devices, and what a loop forgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import loop_tasks
import pytest
import torch
from bsearch.objectives import trial
from bsearch.objectives.attempts import profiled
from bsearch.objectives.loading import load_task
from bsearch.objectives.loop import Loop, newest_loop
from bsearch.objectives.optimizers import named_optimizer
from bsearch.objectives.parallel.rank_processes import RankProcesses
from bsearch.objectives.profiling.loop_probes import LoopMemory
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.state import leaving
from bsearch.objectives.task import Data
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.errors import TaskError
from bsearch.spaces.laws.device import ProfileRequest
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import Measurement, Outcome, TrialSetup
from helpers import setup
from loop_tasks import (
    AsTask,
    adversarial,
    classifier,
    digits,
    net,
    parameters_after,
    seen_at_evaluations,
    sgd,
)
from rank_jobs import SAM, OwnGroups
from torch import nn

FILE = loop_tasks.__file__


def attempt(name: str, given: TrialSetup) -> list[Measurement]:
    found: list[Any] = []
    for report in trial.attempt(f"{FILE}:{name}", given):
        found.append(report)
        LOOPS[:] = [newest_loop() or LOOPS[0]]  # the attempt's end, before its outcome, forgets it
    *measurements, outcome = found
    assert isinstance(outcome, Outcome)
    assert outcome.kind == "complete", outcome.message
    return measurements


LOOPS: list[Any] = [None]


def trained() -> list[torch.Tensor]:
    """The parameters of the loop that ran last."""
    (loop,) = LOOPS
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


@pytest.mark.parametrize(("batch", "accumulation"), [(57, 1), (57, 4), (600, 7), (1, 1), (128, 3)])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_loop_trains_as_a_task_does_bit_for_bit(batch: int, accumulation: int, dropout: float) -> None:
    given = setup(
        batch,
        budget=1300 if batch > 1 else 60,
        plan=BatchPlan(batch, accumulation),
        parameters={"dropout": dropout},
    )
    torch.manual_seed(given.seed)
    run = TrainingRun(AsTask(), given)
    expected = list(run.measurements())
    found = attempt("classifier", given)
    assert [one.samples_seen for one in found] == [one.samples_seen for one in expected]
    assert [one.accuracy for one in found] == [one.accuracy for one in expected]
    (loop,) = LOOPS
    for one, other in zip(loop.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("streams", [0, 1])
def test_averages_and_streams_are_those_of_a_task(streams: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "parameters": {"dropout": 0.2, "streams": streams},
        "training": {"ema": 0.98, "evaluations": 4},
    }
    given = setup(57, 3, budget=1300, model_folder=str(tmp_path), **changes)
    torch.manual_seed(given.seed)
    run = TrainingRun(AsTask(), given)
    expected = list(run.measurements())
    as_task = torch.load(tmp_path / "model.pt", weights_only=True)
    found = attempt("classifier", given)
    assert [one.accuracy for one in found] == [one.accuracy for one in expected]
    assert found[-1].facts["ema_decay"] == expected[-1].facts["ema_decay"]
    (loop,) = LOOPS
    assert all(map(torch.equal, loop.model.parameters(), run.model.parameters()))  # the raw weights go on
    as_loop = torch.load(tmp_path / "net.pt", weights_only=True)
    assert all(torch.equal(as_loop[name], value) for name, value in as_task.items())
    assert not torch.equal(next(iter(as_loop.values())), next(iter(loop.model.parameters())))
    changes |= {"checkpoint": str(tmp_path / "it.pt"), "checkpoint_every_s": 0.0}
    with closing(trial.attempt(f"{FILE}:classifier", setup(57, 3, budget=1300, **changes))) as first:  # type: ignore[type-var]
        assert len(list(islice(first, 2))) == 2
    again = attempt("classifier", setup(57, 3, budget=1300, attempt=1, **changes))
    assert again[-1].facts["resumed_at"] and [one.accuracy for one in again] == [
        one.accuracy for one in found
    ]


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, SAM])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(optimizer: Any) -> None:
    with pytest.raises(
        TaskError, match=rf"Loop: optimizers: net: .* got {optimizer.__name__} with a closure"
    ):
        list(
            body(usual, optimizer=lambda model, given: optimizer(model.parameters(), lr=given.learning_rate))(
                setup(64)
            )
        )


def test_a_closure_that_an_optimizer_would_not_need_is_refused_where_it_is_given() -> None:
    with pytest.raises(AssertionError, match=r"Loop: optimizers: net: .* got SGD with a closure"):
        attempt("optional_closure", setup(57))


def test_rates_that_the_schedule_would_not_reach_are_refused() -> None:
    with pytest.raises(TaskError, match=r"Loop: optimizers: net: .* got OwnGroups, whose base has its own"):
        list(
            body(usual, optimizer=lambda model, given: OwnGroups(model.parameters(), lr=given.learning_rate))(
                setup(64)
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulation"), [(101, 3), (57, 1)])
def test_batch_statistics_on_two_devices_are_those_of_a_task_bit_for_bit(
    ranks: RankProcesses, batch: int, accumulation: int
) -> None:
    """Averaged before each evaluation, so that all devices evaluate the same model."""
    given = setup(
        batch, budget=700, plan=BatchPlan(batch, accumulation, 2), training={"evaluations": 3}
    ).to_dict()
    (by_loop,), (by_task,) = (
        ranks.run(seen_at_evaluations, f"{FILE}:{name}", given) for name in ("normed_loop", "NormedTask")
    )
    (first, second), expected = by_loop, by_task[0]
    assert len(first) == len(second) == len(expected) == 3
    for each in zip(first, second, expected, strict=True):
        for one, other, wanted in zip(*each, strict=True):
            assert torch.equal(one, other) and torch.equal(one, wanted)


def test_all_of_its_steps_take_time_and_evaluations_take_none() -> None:
    """Steps of 10 ms, evaluations of 200."""

    def train(given: TrialSetup) -> Iterator[Measurement]:
        data, model = digits(), net(given)
        optimizer = sgd(model, given)
        loop = Loop(given, data, {"net": model}, {"net": optimizer})
        for step in loop:
            usual(loop, step, model, optimizer)
            time.sleep(0.01)
            if step.evaluates:
                time.sleep(0.2)
                yield loop.measure(accuracy=0.5)

    # Bytes are counted in steps of short trainings alone, whose own time is not representative.
    started = time.perf_counter()
    last = list(train(setup(10, budget=600, training={"evaluations": 5})))[-1]
    assert 60 * 0.01 <= last.elapsed_s < time.perf_counter() - started - 5 * 0.2


@pytest.mark.parametrize("accumulation", [2, 5])
def test_two_passes_over_a_step_see_the_same_parts_and_sum_to_the_unsplit_step(accumulation: int) -> None:
    """With draws of its own the generator differs in what it draws; without its noise it does not."""
    given = setup(101, budget=600, rate=0.01)
    seen: list[list[torch.Tensor]] = []

    def train(one: TrialSetup) -> Iterator[Measurement]:
        data, model = digits(), net(one)
        optimizer = sgd(model, one)
        loop = Loop(one, data, {"net": model}, {"net": optimizer})
        for step in loop:
            passes = [[part.batch[0] for part in step] for _ in range(2)]
            assert all(torch.equal(*pair) for pair in zip(*passes, strict=True))
            seen.append(passes[0])
            assert sum(part.weight for part in step) == pytest.approx(1.0)
            for part in step:
                (part.weight * model(part.batch[0]).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step.evaluates:
                yield loop.measure(accuracy=0.5)

    list(train(given))
    whole, seen[:] = list(seen), []
    list(train(setup(101, accumulation, budget=600, rate=0.01)))
    for one, other in zip(whole, seen, strict=True):
        assert torch.equal(torch.cat(one), torch.cat(other))


@pytest.mark.parametrize("name", ["adversarial", pytest.param("classifier", marks=pytest.mark.slow)])
def test_it_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "plan": BatchPlan(57, 3),
        "samples_budget": 900,
        "training": {"evaluations": 5},
    }
    expected = attempt(name, setup(rate=0.01, **changes))
    whole = [parameter.clone() for parameter in LOOPS[0].model.parameters()]
    changes |= {"checkpoint": str(tmp_path / "it.pt"), "checkpoint_every_s": 0.0}
    with closing(trial.attempt(f"{FILE}:{name}", setup(rate=0.01, **changes))) as first:  # type: ignore[type-var]
        assert len(list(islice(first, 3))) == 3
    found = attempt(name, setup(rate=0.01, attempt=1, **changes))
    assert [(one.samples_seen, one.accuracy) for one in found] == [
        (one.samples_seen, one.accuracy) for one in expected
    ]
    assert found[-1].facts["resumed_at"] >= found[1].samples_seen
    for one, other in zip(LOOPS[0].model.parameters(), whole, strict=True):
        assert torch.equal(one, other)


def test_it_leaves_with_a_checkpoint_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "plan": BatchPlan(57, 3),
        "samples_budget": 900,
        "training": {"evaluations": 1, "ema": 0.9},
    }
    expected = attempt("adversarial", setup(rate=0.01, **changes))
    given = setup(rate=0.01, checkpoint=str(tmp_path / "it.pt"), checkpoint_every_s=3600.0, **changes)
    end = Loop.end

    def asked(loop: Loop, step: Any) -> None:
        end(loop, step)
        if step.number == 6:
            leaving.ask_to_leave()

    monkeypatch.setattr(Loop, "end", asked)
    (outcome,) = trial.attempt(f"{FILE}:adversarial", given)
    assert isinstance(outcome, Outcome) and outcome.kind == "interrupted"
    leaving.stay()
    monkeypatch.undo()
    (found,) = attempt("adversarial", replace(given, attempt=1))
    assert (found.facts["resumed_at"], found.accuracy) == (7 * 57, expected[-1].accuracy)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "accumulation"), [(101, 3), (7, 1)])
def test_two_ranks_train_as_one_process_does(ranks: RankProcesses, batch: int, accumulation: int) -> None:
    reference, changes = (
        f"{FILE}:classifier",
        {"parameters": {"dropout": 0.0}, "training": {"clip_norm": 0.5}},
    )
    (alone,) = parameters_after(reference, setup(batch, budget=700, **changes).to_dict())
    given = setup(batch, budget=700, plan=BatchPlan(batch, accumulation, 2), **changes)
    (shared,) = ranks.run(parameters_after, reference, given.to_dict())
    for one, other in zip(alone, shared, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(one.norm())


def test_the_models_are_kept_where_they_are_wanted(tmp_path: Path) -> None:
    attempt("adversarial", setup(64, budget=300, rate=0.01, model_folder=str(tmp_path)))
    kept = torch.load(tmp_path / "g.pt", weights_only=True)
    (loop,) = LOOPS
    assert all(torch.equal(value, loop.models["g"].state_dict()[name]) for name, value in kept.items())
    assert (tmp_path / "d.pt").is_file()


def body(
    change: Callable[[Any, Any, Any, Any], None], **options: Any
) -> Callable[[TrialSetup], Iterator[Measurement]]:
    def train(given: TrialSetup) -> Iterator[Measurement]:
        data, model = digits(), net(given)
        optimizer = options.get("optimizer", sgd)(model, given)
        loop = Loop(
            given,
            data,
            options.get("models", {"net": model}),
            {"net": optimizer, **options.get("optimizers", {})},
        )
        for step in loop:
            change(loop, step, model, optimizer)
            if step.evaluates and not options.get("forgets"):
                yield loop.measure(accuracy=0.5)

    return train


def usual(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
    for part in step:
        (part.weight * model(part.batch[0]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def half(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
    for part in step:
        (part.weight * model(part.batch[0]).square().mean()).backward()
        break
    optimizer.step()


def never_steps(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
    for part in step:
        model(part.batch[0]).sum().backward()


def early(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
    _ = step.evaluates
    usual(loop, step, model, optimizer)


def foreign(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
    usual(loop, step, model, optimizer)
    usual(loop, step, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (body(half), "expected every step to use all of its parts, got 22 of 64 samples in step 0"),
        (body(never_steps), "expected an optimizer step in every step, got none in step 0"),
        (body(early), "expected step.evaluates after the last optimizer step"),
        (body(foreign), "expected steps of the optimizers it was given"),
        (body(usual, forgets=True), "expected to yield a measurement where step.evaluates is true"),
        (
            body(usual, optimizers={"other": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)}),
            "some that no model holds",
        ),
        (body(usual, models={"net": nn.Linear(2, 2)}), "some that no model holds"),
    ],
)
def test_what_a_loop_forgets_is_told(
    train: Callable[[TrialSetup], Iterator[Measurement]], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        list(train(setup(64, 3, budget=400)))


def test_an_optimizer_that_never_steps_is_told() -> None:
    def train(given: TrialSetup) -> Iterator[Measurement]:
        data, model, other = digits(), net(given), nn.Linear(2, 2)
        optimizers = {"net": sgd(model, given), "other": sgd(other, given)}
        loop = Loop(given, data, {"net": model, "other": other}, optimizers)
        for step in loop:
            usual(loop, step, model, optimizers["net"])
            if step.evaluates:
                yield loop.measure(accuracy=0.5)

    with pytest.raises(
        TaskError, match="expected every optimizer to step at least once, but other never did"
    ):
        list(train(setup(64, budget=400)))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"precision": "bf16"}, "loop.autocast"),
        ({"precision": "fp16"}, "got training.precision: fp16"),
        ({"compile": True}, "compile"),
    ],
)
def test_settings_that_it_cannot_honour_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        list(body(usual)(setup(64, budget=400, training=training)))


def test_a_failed_body_leaves_later_trainings_alone() -> None:
    with pytest.raises(TaskError):
        list(body(half)(setup(64, 3, budget=400)))
    attempt("classifier", setup(64, budget=200))
    assert isinstance(digits(), Data)
    assert list(TrainingRun(AsTask(), setup(64, budget=200)).measurements())
    assert adversarial is not classifier


def request(name: str, **changes: Any) -> ProfileRequest:
    memory = changes.pop("memory", {})
    return ProfileRequest(setup(16, rate=0.01), Memory.model_validate(memory), 256, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classifier", "adversarial"])
def test_its_time_and_memory_are_known_and_its_step_is_examined(name: str) -> None:
    profile = profile_task(f"{FILE}:{name}", request(name, traces=True, timing_s=0.5))
    assert profile.training_set == 600
    assert profile.examination is not None
    assert profile.examination.verdict == "exact", profile.examination.lines
    assert profile.examination.samples >= 8
    (law,) = profile.step_times
    assert 0 < law.step_s(BatchPlan(100, 2)) < 1
    assert profile.memory is not None
    assert profile.memory.source == "traced", profile.memory.note
    assert profile.memory.held_bytes == 0  # what waits for a second pass is in host memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["classifier", "adversarial"])
def test_its_traced_memory_is_what_real_steps_take(name: str) -> None:
    training = {"ema": 0.9} if name == "classifier" else {}
    given = setup(16, rate=0.01, training=training, parameters={"streams": 1})
    memory = LoopMemory(load_task(f"{FILE}:{name}"), given)  # type: ignore[arg-type]
    try:
        for size in (1, 17, 100):
            traced, counted = memory.train_peak(size), memory.counted("train", size)
            assert not memory.note
            assert traced.total == pytest.approx(counted.total, rel=0.02)
    finally:
        memory.close()


@pytest.mark.slow
def test_its_time_is_known_on_several_devices() -> None:
    profile = profiled(f"{FILE}:classifier", request("classifier", timing_s=0.5, devices=(2,)))
    (law,) = profile.step_times
    assert law.devices == 2


def test_a_loop_whose_parts_do_not_add_up_is_refused() -> None:
    with pytest.raises(TaskError, match=r"wrong_weights.*expected parts whose gradients add up"):
        profile_task(f"{FILE}:wrong_weights", request("wrong_weights"))


def test_a_second_pass_sees_what_the_first_saw_whatever_it_did_to_it() -> None:
    seen: list[torch.Tensor] = []

    def change(loop: Any, step: Any, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            for part in step:
                seen.append(part.batch[0].clone())
                (part.weight * model(part.batch[0].mul_(-3)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    list(body(change)(setup(100, budget=100)))
    assert torch.equal(*seen)


def test_an_optimizer_may_be_made_of_others() -> None:
    """Muon's steps AdamW's; it is asked for as one."""

    def train(given: TrialSetup) -> Iterator[Measurement]:
        data = digits()
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        optimizer = named_optimizer(model, given, "muon")
        loop = Loop(given, data, {"net": model}, {"net": optimizer})
        for step in loop:
            usual(loop, step, model, optimizer)
            if step.evaluates:
                yield loop.measure(accuracy=0.5)

    assert len(list(train(setup(64, 3, budget=400)))) == 2

"""Laws of the training loop: micro-batches equal the one large batch, the budget is exact, a seed repeats bit for bit."""

from __future__ import annotations

import gc
import itertools
import math
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from bsearch.objectives.data.batches import Fetcher, in_order
from bsearch.objectives.digits import Digits
from bsearch.objectives.machine.torch_settings import allow_tf32
from bsearch.objectives.parallel.data_parallel import Ranks
from bsearch.objectives.profiling.memory.live_bytes import LiveBytes
from bsearch.objectives.profiling.task_profile import profile_task
from bsearch.objectives.steps.rescale import rescale_gradients
from bsearch.objectives.task import Loss, Score, Task, named_scores
from bsearch.objectives.training import TrainingRun, train_task
from bsearch.spaces.errors import StudyFileError, TaskError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan, plan_batch
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.trial import Measurement, TrialSetup
from conftest import TASKS
from helpers import Net, setup
from tasks_for_tests import CountsSamples, NeedsTwo, Noisy, Points
from torch import nn
from torch.utils.data import Subset


def mean_loss_gradient(task: Net, batch: int) -> list[torch.Tensor]:
    """The slow, obvious twin: one backward of torch's own mean over the whole batch."""
    run = TrainingRun(task, setup(batch))
    inputs, labels = run.train_fetcher.fetch(run.stream.take(0, batch))
    logits = run.model(inputs)
    if task.kind == "tokens":
        logits = logits.view(-1, 5, 4)
    weights = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=task.dtype) if task.kind == "weights" else None
    nn.functional.cross_entropy(logits, labels, weight=weights).backward()
    return [parameter.grad for parameter in run.parameters if parameter.grad is not None]


def accumulated_gradient(task: Net, batch: int, accumulation: int) -> list[torch.Tensor]:
    """What our step hands to the optimizer."""
    run = TrainingRun(task, setup(batch, accumulation))
    kept: list[torch.Tensor] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: kept.extend(p.grad.clone() for p in run.parameters if p.grad is not None)
    )
    position, micro_batches = 0, []
    for samples in run.setup.plan.micro_batches():
        if samples:
            micro_batches.append((samples, run.train_fetcher.fetch(run.stream.take(position, samples))))
            position += samples
    run.step(micro_batches, batch)
    return kept


def relative_error(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    ours, theirs = torch.cat([g.flatten() for g in ours]), torch.cat([g.flatten() for g in theirs])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", ["samples", "weights", "ignored", "tokens"])
@pytest.mark.parametrize(
    ("batch", "accumulation"), [(1, 1), (7, 3), (2, 5), (257, 2), (500, 3), (509, 8), (97, 97)]
)
def test_accumulated_passes_equal_the_one_large_batch(kind: str, batch: int, accumulation: int) -> None:
    task = Net()
    task.kind = kind
    if kind == "ignored" and batch == 1:
        pytest.skip("the one sample is ignored: torch's own mean is 0/0 there")
    assert (
        relative_error(accumulated_gradient(task, batch, accumulation), mean_loss_gradient(task, batch))
        < 1e-12
    )


@pytest.mark.parametrize("kind", ["samples", "weights", "tokens"])
def test_a_step_of_another_size_or_precision_is_as_exact_as_the_one_before(kind: str) -> None:
    """Nothing of a step is left for the next: a remainder follows, a loss in another precision, a step as the first."""

    class Turns(Net):
        turned = torch.float32

        def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            loss = super().loss(model, batch, setup)
            return Loss(loss.total.to(self.turned), loss.denominator)

    task, gradients = Turns(), list[list[torch.Tensor]]()
    task.kind = kind
    run = TrainingRun(task, setup(61))
    run.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([p.grad.clone() for p in run.parameters if p.grad is not None])
    )
    run.rates.freeze()
    run.rates.set(0.5)
    for size, precision in [
        (61, torch.float32),
        (61, torch.float64),
        (29, torch.float64),
        (61, torch.float64),
    ]:
        task.turned = precision
        run.step([(size, run.train_fetcher.fetch(run.stream.take(0, size)))], size)
        if precision == torch.float64:
            assert relative_error(gradients[-1], mean_loss_gradient(task, size)) < 1e-12


def test_a_denominator_may_be_a_plain_number() -> None:
    class Plain(Net):
        kind = "weights"

        def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            loss = super().loss(model, batch, setup)
            return Loss(loss.total, float(loss.denominator))

    assert relative_error(accumulated_gradient(Plain(), 257, 2), mean_loss_gradient(Plain(), 257)) < 1e-12


@pytest.mark.parametrize(
    ("denominator", "factor"),
    [(8, 1.0), (4.0, 2.0), (torch.tensor(16), 0.5), (torch.tensor(0.0), 0.0), (0, 0.0)],
)
def test_gradients_are_rescaled_from_samples_to_the_losses_own_denominator(
    denominator: Any, factor: float
) -> None:
    gradients = [torch.ones(3), torch.full((2, 2), -3.0)]
    rescale_gradients(gradients, denominator, 8)
    assert torch.equal(gradients[0], torch.full((3,), factor))
    assert torch.equal(gradients[1], torch.full((2, 2), -3.0 * factor))


def test_a_micro_batch_of_no_samples_adds_nothing_and_leaves_statistics_alone() -> None:
    def trained_with(*empty: int) -> dict[str, torch.Tensor]:
        run = TrainingRun(NeedsTwo(), setup(32))
        batches = {size: run.train_fetcher.fetch(run.stream.take(0, max(size, 1))) for size in (0, 32)}
        run.step([(size, batches[size]) for size in (*empty, 32)], 32)
        return run.model.state_dict()

    alone = trained_with()
    assert all(torch.equal(alone[name], value) for name, value in trained_with(0, 0).items())


@pytest.mark.parametrize("kind", ["samples", "weights", "tokens"])
def test_in_single_precision_they_are_equal_to_rounding(kind: str) -> None:
    task = Net()
    task.kind, task.dtype = kind, torch.float32
    assert relative_error(accumulated_gradient(task, 509, 8), mean_loss_gradient(task, 509)) < 1e-5


def test_a_step_whose_every_label_is_ignored_moves_nothing() -> None:
    class Ignored(Net):
        kind = "ignored"

        def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            return super().loss(model, [batch[0], torch.full_like(batch[1], -100)], setup)

    gradients = accumulated_gradient(Ignored(), 8, 2)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_ignored_labels_do_not_make_a_trial_diverge() -> None:
    class Ignored(Net):
        kind = "ignored"
        dtype = torch.float32

    measurements = list(train_task(Ignored(), setup(1, 1, 40)))
    assert all(math.isfinite(m.train_loss or 0.0) for m in measurements)


@pytest.mark.parametrize("accumulation", [2, 3, 7])
def test_micro_batch_and_accumulation_change_nothing_but_rounding(accumulation: int) -> None:
    one = [m.train_loss for m in train_task(Digits(), setup(100, 1, 1197))]
    several = [m.train_loss for m in train_task(Digits(), setup(100, accumulation, 1197))]
    assert several == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(("since", "noticed"), [(1, 1), (2, 2), (5, 8), (33, 64), (65, 128), (130, 192)])
def test_a_loss_that_is_not_finite_is_noticed_at_the_next_power_of_two_or_64th_step(
    since: int, noticed: int
) -> None:
    class Breaks(Points):
        steps = 0

        def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            self.steps += 1
            loss = super().loss(model, batch, setup)
            return Loss(loss.total * (math.nan if self.steps >= since else 1.0), loss.denominator)

    measurements = list(train_task(Breaks(), setup(2, budget=2 * 250, training={"evaluations": 1})))
    assert [m.samples_seen for m in measurements] == [2 * noticed]
    assert not math.isfinite(measurements[0].train_loss or 0.0)


@pytest.mark.parametrize("batch", [1, 7, 300, 599, 600, 1000])
def test_evaluation_counts_each_sample_once_whatever_its_batches(batch: int) -> None:
    task = Net()
    run = TrainingRun(task, setup(8, evaluation_batch=batch))
    whole = run.validation_fetcher.fetch(in_order(600, 600, 0)[0])
    with torch.no_grad():
        scores = named_scores(task, task.score(run.model, whole, run.setup))
    expected = {name: float(score.total) / float(score.denominator) for name, score in scores.items()}
    assert run.evaluate() == pytest.approx(expected, rel=1e-5)
    assert run.model.training


def test_evaluation_draws_nothing_and_leaves_the_model_as_it_was() -> None:
    run = TrainingRun(Noisy(), setup())  # dropout and batch statistics
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert run.evaluate() == run.evaluate()
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_evaluation_is_of_the_batches_and_the_data_that_it_is_given() -> None:
    task = Net()
    run = TrainingRun(task, setup(8))
    half = run.evaluate(in_order(300, 64, 0))
    other = Fetcher(Subset(run.data.validation, range(300)))
    assert run.evaluate(fetcher=other) == pytest.approx(half, rel=1e-5)
    assert run.evaluate() != pytest.approx(half, rel=1e-3)


def test_more_right_answers_than_answers_are_told() -> None:
    class Doubles(Points):
        def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
            return Score(2 * len(batch[1]), len(batch[1]))

    with pytest.raises(
        TaskError, match=r"Doubles.score: expected an accuracy, .* of at most 1, got 2\. Check the shapes"
    ):
        TrainingRun(Doubles(), setup()).evaluate()


def trained(task: Task, made: TrialSetup) -> tuple[list[Measurement], dict[str, torch.Tensor]]:
    run = TrainingRun(task, made)
    return list(run.measurements()), run.model.state_dict()


def test_ranks_begin_with_the_same_weights_and_draw_apart() -> None:
    """Dropout is another on each of them, and with each seed."""
    draws = set()
    for seed in range(4):
        weights = []
        for rank in range(4):
            run = TrainingRun(
                Points(),
                setup(plan=BatchPlan(8, 1, 4), sharding="fsdp2", training={"seed": seed}),
                Ranks(rank),
            )
            weights.append([parameter.tolist() for parameter in run.parameters])
            run.begin()
            draws.add(float(torch.rand(())))
        assert weights == weights[:1] * 4
    assert len(draws) == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_gives_the_same_parameters_bit_for_bit(workers: int) -> None:
    told, first = trained(Digits(), setup(37, 2, 600))
    same, again = trained(Digits(), setup(37, 2, 600, training={"workers": workers}))
    assert told[-1].scores == same[-1].scores
    _, other = trained(Digits(), setup(37, 2, 600, training={"seed": 1}))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("taken", [1, 10])
def test_a_training_that_is_over_or_closed_is_freed_without_a_garbage_collection(taken: int) -> None:
    run = TrainingRun(Digits(), setup(50, 2, 600))
    measurements, model = run.measurements(), weakref.ref(run.model)
    gc.disable()
    list(itertools.islice(measurements, taken))
    measurements.close()
    del run, measurements
    gc.enable()
    assert model() is None


@pytest.mark.parametrize(("batch", "budget"), [(1, 30), (7, 90), (30, 90), (29, 91), (13, 7 * 13), (30, 45)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_trial_sees_its_budget_exactly(tmp_path: Path, batch: int, budget: int, accumulation: int) -> None:
    log = tmp_path / "samples.txt"
    made = setup(batch, accumulation, budget, parameters={"log": str(log)}, training={"evaluations": 4})
    measurements = list(train_task(CountsSamples(), made))
    seen = [int(name) for name in log.read_text().split()]
    assert len(seen) == budget == measurements[-1].samples_seen
    for epoch in range(budget // 30):
        assert sorted(seen[30 * epoch : 30 * (epoch + 1)]) == list(range(30))
    assert [m.samples_seen for m in measurements] == sorted({m.samples_seen for m in measurements})
    assert len(measurements) <= 4


def test_the_trained_model_is_saved_at_the_end_alone(tmp_path: Path) -> None:
    run = TrainingRun(Points(), setup(32, training={"evaluations": 4}, model_folder=str(tmp_path)))
    for measurement in run.measurements():
        assert any(tmp_path.iterdir()) == (measurement.samples_seen == 400)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in run.model.state_dict().items())


def test_a_remainder_too_small_for_a_plan_joins_the_step_before() -> None:
    made = setup(8, 1, 401, smallest_micro_batch=2)
    measurements = list(train_task(NeedsTwo(), made))
    assert measurements[-1].samples_seen == 401
    assert measurements[-1].facts["steps"] == 50
    assert measurements[-1].facts["ghost_batch"] == 8


def test_running_statistics_move_as_far_in_passes_as_in_one_batch() -> None:
    def moved(accumulation: int) -> torch.Tensor:
        run = TrainingRun(NeedsTwo(), setup(64, accumulation))
        norm = next(module for module in run.model.modules() if isinstance(module, nn.BatchNorm1d))
        for samples in run.setup.plan.micro_batches():
            norm(torch.full((samples, 2), 5.0))
        return norm.running_mean

    assert torch.allclose(moved(1), moved(4), rtol=2e-3)


def test_clipping_bounds_the_whole_steps_gradient() -> None:
    task = Net()
    free = accumulated_gradient(task, 64, 4)
    run = TrainingRun(task, setup(64, 4, training={"clip_norm": 0.01}))
    kept: list[torch.Tensor] = []
    run.optimizer.register_step_pre_hook(
        lambda *_: kept.extend(p.grad.clone() for p in run.parameters if p.grad is not None)
    )
    batches = [(16, run.train_fetcher.fetch(run.stream.take(16 * part, 16))) for part in range(4)]
    run.step(batches, 64)
    norm = float(torch.cat([g.flatten() for g in kept]).norm())
    assert norm == pytest.approx(0.01, rel=1e-3)
    assert (
        relative_error(
            [g / norm for g in kept], [g / torch.cat([h.flatten() for h in free]).norm() for g in free]
        )
        < 1e-3
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns(precision: str) -> None:
    last = list(train_task(Digits(), setup(50, 2, 1197 * 4, training={"precision": precision})))[-1]
    assert last.accuracy is not None
    assert last.accuracy > 0.8


@pytest.mark.parametrize("prior", [*itertools.product(("none", "ieee", "tf32"), repeat=3)])
def test_tf32_is_what_the_study_says_whatever_was_set_before(prior: tuple[str, str, str]) -> None:
    """By names per operation, by the old ones, by a general one: readers of either raise where they disagree."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch before 2.9 has the old names alone")
    for allowed in (True, False):
        torch.backends.fp32_precision, cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = prior
        allow_tf32(allowed)
        assert cuda.matmul.allow_tf32 == cudnn.allow_tf32 == allowed
        assert ("tf32" in {cuda.matmul.fp32_precision, cudnn.conv.fp32_precision}) == allowed
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trials_of_one_process_are_each_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's limit of recompilations holds for a process: without a reset, from the fifth width on none was compiled."""
    graphs: list[int] = []
    honest = nn.Module.compile

    def compile_here(module: nn.Module) -> None:
        def backend(graph: Any, inputs: Any) -> Any:
            graphs[-1] += 1
            return graph.forward

        honest(module, backend=backend)

    monkeypatch.setattr(nn.Module, "compile", compile_here)
    for width in range(10, 110, 10):
        graphs.append(0)
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 5)).double()
        task = Net()
        task.model = lambda setup, model=model: model  # type: ignore[method-assign]
        assert list(TrainingRun(task, setup(50, 3, budget=300, training={"compile": True})).measurements())
    assert min(graphs) >= 1 and len({*graphs}) == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_learns_the_same() -> None:
    plain = list(train_task(Digits(), setup(100, 1, 1000)))[-1]
    compiled = list(train_task(Digits(), setup(100, 1, 1000, training={"compile": True})))[-1]
    assert compiled.train_loss == pytest.approx(plain.train_loss, rel=1e-3)


def test_the_schedule_reaches_every_group_at_its_own_share() -> None:
    class Layers(Points):
        def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
            first, *rest = model.parameters()
            groups = [{"params": [first], "lr": setup.learning_rate / 10}, {"params": rest}]
            return torch.optim.SGD(groups, lr=setup.learning_rate)

    run = TrainingRun(Layers(), setup(training={"schedule": "linear", "warmup": 0.5}))
    run.rates.set(0.25)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.005, 0.05])
    run.rates.set(0.75)
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.005, 0.05])


def profile_of(name: str, made: TrialSetup) -> DeviceProfile:
    return profile_task(f"{TASKS}:{name}", ProfileRequest(made, Memory(), highest=100))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSamples", "Task.data: train: expected at least one sample, got an empty dataset"),
        (
            "PerSampleLoss",
            r"PerSampleLoss.loss: expected a scalar sum over 1 samples, got shape \(1,\). Use reduction='sum'",
        ),
        ("TensorLoss", r"TensorLoss.loss: expected Loss\(total, denominator\), got Tensor of shape \(1,\)"),
        ("NanAtOnce", "NanAtOnce.loss: expected a finite loss from the new model's first batch, got nan"),
        (
            "MeanLoss",
            r"tasks_for_tests.py:\d+: MeanLoss.loss, on training data: .*, got their mean \(24 samples",
        ),
        (
            "MeanScore",
            r"MeanScore.score, on validation data: error: expected a ratio of sums over samples, got",
        ),
        (
            "BroadcastLoss",
            r"BroadcastLoss.loss, .* got a sum over pairs of samples .* such as \(N, 1\) against \(N,\)",
        ),
        ("BroadcastScore", r"BroadcastScore.score: expected .* at most 1, got"),
        (
            "IgnoresTheRate",
            "IgnoresTheRate.optimizer: expected a group at setup.learning_rate = 0.1, got 0.123",
        ),
    ],
)
def test_a_broken_contract_is_told_before_the_first_trial(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        profile_of(name, setup())


def test_a_loss_that_is_told_only_while_training_is_no_fault() -> None:
    assert profile_of("LossWhileTraining", setup()).smallest_micro_batch == 1


def test_a_rule_of_decay_wants_its_decay_in_the_optimizer() -> None:
    # AdamPoints gives its optimizer no weight decay.
    made = setup(rule="adamw_tau", optimizer=OptimizerSettings(0.1, weight_decay=0.02))
    with pytest.raises(
        TaskError, match=r"rule adamw_tau: expected a group with weight_decay=setup.weight_decay = 0.02"
    ):
        profile_of("AdamPoints", made)
    profile = profile_of("AdamPoints", setup())
    assert (profile.adaptive, profile.decoupled_decay) == (True, False)


def test_the_profile_finds_the_smallest_workable_micro_batch() -> None:
    assert profile_of("Points", setup()).smallest_micro_batch == 1
    profile = profile_of("NeedsTwo", setup(parameters={"unread": 1}))
    assert profile.smallest_micro_batch == 2
    assert profile.batch_statistics
    assert profile.unused_parameters == ("unread",)
    assert (profile.training_set, profile.validation_set, profile.optimizer) == (400, 101, "SGD")
    assert not profile.adaptive
    with pytest.raises(
        TaskError, match=r"expected a metric that Points.score returns \(accuracy, val_loss\), got 'f1'"
    ):
        profile_of("Points", setup(metric="f1"))


def test_living_bytes_are_counted_once_and_forgotten() -> None:
    kept = torch.zeros(1000)
    counter = LiveBytes()
    counter.register([kept], "parameters")
    with counter:
        assert counter.live_bytes == 4096
        made = kept + 1
        view = made[10:].view(-1)
        assert counter.live_bytes == 8192
        del made
        assert counter.live_bytes == 8192
        del view
        assert counter.live_bytes == 4096
        for _ in range(5):
            torch.zeros(2000)
    assert counter.peak_bytes == 4096 + 8192
    assert counter.live_parts["parameters"] == 4096


def test_counted_steps_are_priced_as_the_others() -> None:
    slow = list(train_task(Digits(), setup(100, 1, 1197 * 4)))[-1]
    assert slow.facts["peak_bytes"]
    few = list(train_task(Digits(), setup(1000, 1, 2000)))[-1]
    assert "peak_bytes" not in few.facts
    # Under a limit the first steps of each size are counted however few there are, and still have a time.
    limited = list(train_task(Digits(), setup(1000, 1, 2000, memory_limit_bytes=10**9)))[-1]
    assert limited.facts["peak_bytes"]
    assert limited.elapsed_s > 0
    assert math.isfinite(slow.elapsed_s)
    assert plan_batch(1000).accumulation == 1


def test_a_precision_that_a_cpu_lacks_is_refused() -> None:
    with pytest.raises(
        StudyFileError, match=r"training\.precision: expected fp32, bf16 or fp16 on a CPU, got tf32"
    ):
        TrainingRun(Net(), setup(8, training={"precision": "tf32"}))

"""Real training code that behaves, and some that breaks its contract in one way each."""

import math
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bsearch.objectives.digits import Digits
from bsearch.objectives.loop import Loop
from bsearch.objectives.state.checkpoint import Checkpoint
from bsearch.objectives.task import Data, Loss, Score, Task, WholeSet
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import nn
from torch.utils.data import TensorDataset


def points(samples: int, seed: int) -> TensorDataset:
    """Two-dimensional points, labelled by the side of a line they lie on."""
    inputs = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Points(Task):
    """A line through points: a trial in milliseconds."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(points(400, 0), points(101, 1))

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Linear(2, 2)


class TellsItsProcess(Points):
    """Takes a second, less than a process takes to start."""

    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Mapping[str, Score]:
        time.sleep(0.5)
        count = len(batch[1])
        return {"accuracy": Score(0.5 * count, count), "process": Score(os.getpid() * count, count)}


class Explodes(Points):
    """Learns with a rate so large that the loss overflows after some steps."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        outputs = model(inputs)
        return Loss((outputs[:, 0] ** 4).sum() + outputs.sum() * 1e18, len(labels))


class SecondNeverFits(Points):
    """The second trial runs out of memory at any size."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.number == 1:
            raise torch.OutOfMemoryError(f"tried to allocate {len(batch[1])} samples")
        return super().loss(model, batch, setup)


class NanAtOnce(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        return Loss(model(batch[0]).sum() * float("nan"), len(batch[1]))


class Raises(Points):
    """Fails in the same line in every trial, after its first evaluation."""

    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Score:
        if setup.samples_budget > 24:
            raise ValueError("the score is not ready")
        return Score(0, 1)


class RunsOut(Points):
    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        raise MemoryError


class IsEndedBy(Points):
    """Its process is ended in the midst of it, by code of the file that a parameter names."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        exec(compile("raise SystemExit(1)", str(setup.parameters["file"]), "exec"))  # noqa: S102
        return super().loss(model, batch, setup)


class RaisesForSome(Points):
    """The first three trials fail, each with another message."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.samples_budget > 24 and setup.number < 3:
            raise RuntimeError(f"words never heard before: {('one', 'two', 'three')[setup.number]}")
        return super().loss(model, batch, setup)


class SmallMemory(Points):
    """Memory for 50 samples in a pass, as a device of that size would have."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if len(batch[1]) > 50:
            raise torch.OutOfMemoryError(f"tried to allocate {len(batch[1])} samples")
        return super().loss(model, batch, setup)


class KillsItsWorker(Points):
    """The worker of trial 1 dies by SIGKILL in its first attempt."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.number == 1 and setup.attempt == 0 and setup.samples_budget > 24:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, setup)


class AlwaysKillsItsWorker(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.number == 1 and setup.samples_budget > 24:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, setup)


class Slow(Points):
    """A second a trial, so that there is time to interrupt it."""

    sleeps_s = 1.0

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.samples_budget > 24:
            sleeps_s = float(setup.parameters.get("sleeps_s", self.sleeps_s))
            time.sleep(sleeps_s * len(batch[1]) / setup.samples_budget)
        return super().loss(model, batch, setup)


def slow_loop(setup: TrialSetup) -> Iterator[Measurement]:
    """`Slow` as a loop of one's own."""
    task = Slow()
    model, data = task.model(setup), task.data(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
    loop = Loop(setup, data, models={"net": model}, optimizers={"sgd": optimizer})
    for step in loop:
        for part in step:
            (task.loss(model, part.batch, setup).total / step.samples).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=0.5)


class CountsItsSteps(Slow):
    """Leaves a byte for every step in a file beside the study."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.samples_budget > 24:
            with (Path(setup.folder) / "steps").open("ab") as file:
                file.write(b".")
        return super().loss(model, batch, setup)


class TellsWhenItTrains(Slow):
    """Leaves the time of every step in a file of its trial."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        times = Path(str(setup.parameters["times"]), str(setup.number))
        if setup.samples_budget > 24:  # and not the check before the first trial
            with times.open("a") as file:
                print(time.monotonic(), file=file)
        return super().loss(model, batch, setup)


class Slower(Slow):
    """Longer than what short trials may differ from their known time without a neighbour."""

    sleeps_s = 2.5


class Slowest(Slow):
    """Too long for a short deadline."""

    sleeps_s = 25.0


class NeedsTwo(Points):
    """BatchNorm over points: one sample in a pass does not work."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))


class NoSamples(Points):
    def data(self, setup: TrialSetup) -> Data:
        return Data(points(0, 0), points(10, 1))


class PerSampleLoss(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        return Loss(nn.functional.cross_entropy(model(inputs), labels, reduction="none"), len(labels))


class TensorLoss(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> torch.Tensor:  # type: ignore[override]
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


class MeanLoss(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        return Loss(nn.functional.cross_entropy(model(inputs), labels), len(labels))


class MeanScore(Points):
    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Mapping[str, Score]:
        inputs, labels = batch
        error = nn.functional.cross_entropy(model(inputs), labels)
        return {
            "accuracy": Score((model(inputs).argmax(-1) == labels).sum(), len(labels)),
            "error": Score(error, len(labels)),
        }


class BroadcastLoss(Points):
    """Outputs (N, 1) against labels (N,)."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        return Loss(((model(inputs)[:, :1] - labels) ** 2).sum(), len(labels))


class BroadcastScore(Points):
    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Score:
        inputs, labels = batch
        return Score((model(inputs).argmax(-1, keepdim=True) == labels).sum(), len(labels))


class LossWhileTraining(Points):
    """As a detector, whose model tells its loss only while it trains, and a gradient penalty, which needs a graph."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        assert model.training
        made = super().loss(model, batch, setup)
        torch.autograd.grad(made.total, list(model.parameters()), retain_graph=True)
        return made


class IgnoresTheRate(Points):
    def optimizer(self, model, setup):  # type: ignore[no-untyped-def]
        return torch.optim.SGD(model.parameters(), lr=0.123)


class AdamPoints(Points):
    def optimizer(self, model, setup):  # type: ignore[no-untyped-def]
        return torch.optim.Adam(model.parameters(), lr=setup.learning_rate, betas=setup.betas, eps=setup.eps)


class ManyFates(AdamPoints):
    """Every third batch loses its gradient for good, fast and with an accuracy that may look fine."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        loss = super().loss(model, batch, setup)
        lost = setup.samples_budget > 24 and setup.effective_batch % 3 == 0
        return Loss(loss.total * float("inf"), loss.denominator) if lost else loss


class EveryFate(ManyFates):
    """Some batches raise as well, with a message that would like to be markup."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if setup.samples_budget > 24 and setup.effective_batch % 35 == 0:
            raise ValueError(
                "a `tick`, [a link](https://evil.example/), <img src=x onerror=alert(1)>, $x^2$, | a pipe\n# Heading"
            )
        return super().loss(model, batch, setup)


class AdamDigits(Digits):
    optimizer = AdamPoints.optimizer


class CountsSamples(Points):
    """Writes down which samples every optimizer step saw."""

    def data(self, setup: TrialSetup) -> Data:
        inputs = torch.arange(60, dtype=torch.float32).reshape(30, 2) / 60
        return Data(TensorDataset(inputs, torch.arange(30) % 2, torch.arange(30)), points(10, 1))

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels, names = batch
        with Path(str(setup.parameters["log"])).open("a") as file:
            file.write(" ".join(map(str, names.tolist())) + "\n")
        return super().loss(model, [inputs, labels], setup)


def own_loop(setup: TrialSetup) -> Iterator[Measurement]:
    """A loop of one's own: it knows its plan, its rate and its budget, and tells what it measures."""
    task = Points()
    data, model = task.data(setup), task.model(setup)
    optimizer = task.optimizer(model, setup)
    seen, begun = 0, time.perf_counter()
    while seen < setup.samples_budget:
        index = torch.arange(seen, seen + setup.effective_batch) % len(data.train)
        loss = task.loss(model, data.train[index], setup)
        (loss.total / loss.denominator).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += setup.effective_batch
    score = task.score(model, data.validation[torch.arange(101)], setup)["accuracy"]
    yield Measurement(
        samples_seen=seen, elapsed_s=time.perf_counter() - begun, accuracy=float(score.total) / 101
    )


def known_by_its_rate(setup: TrialSetup) -> Iterator[Measurement]:
    """A second of training whatever the setting; the nearer the rate to 0.1, the better, from the first tenth on."""
    final = 0.9 / (1 + abs(math.log(setup.learning_rate / 0.1))) + 0.01 * (setup.seed % 7)
    for tenth in range(1, 11):
        seen = -(-setup.samples_budget * tenth // 10)
        yield Measurement(samples_seen=seen, elapsed_s=tenth / 10, accuracy=final * (0.8 + 0.02 * tenth))


def blows_up(setup: TrialSetup) -> Iterator[Measurement]:
    """A loss with its best rate at 0.1, far up in trial 5 from its first evaluation on."""
    loss = 9.0 if setup.number == 5 else 1 + 0.05 * math.log(setup.learning_rate / 0.1) ** 2
    for half in (1, 2):
        seen = -(-setup.samples_budget * half // 2)
        yield Measurement(
            samples_seen=seen, elapsed_s=half / setup.effective_batch, scores={"val_loss": loss + 0.1 / half}
        )


def always_nan(setup: TrialSetup) -> Iterator[Measurement]:
    yield Measurement(samples_seen=setup.samples_budget, elapsed_s=0.1, accuracy=math.nan)


def stops_short(setup: TrialSetup) -> Iterator[Measurement]:
    yield Measurement(samples_seen=1, elapsed_s=0.1, accuracy=0.5)


def yields_dicts(setup: TrialSetup) -> Iterator[Measurement]:
    yield {"accuracy": 0.5}  # type: ignore[misc]


def not_a_generator(setup: TrialSetup) -> None:
    return None


a_number = 3


class NoDecay(Points):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)


class WideNet(Task):
    """Double precision over points of six dimensions; `kind` of loss: samples, weights, ignored or tokens."""

    def data(self, setup: TrialSetup) -> Data:
        generator = torch.Generator().manual_seed(3)
        kind = setup.parameters.get("kind", "samples")
        inputs = torch.randn(603, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 5, (603, 4) if kind == "tokens" else (603,), generator=generator)
        if kind in ("ignored", "tokens"):
            labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        data = TensorDataset(inputs, labels)
        return Data(data, TensorDataset(inputs[:301], labels[:301]))

    def model(self, setup: TrialSetup) -> nn.Module:
        outputs = 20 if setup.parameters.get("kind") == "tokens" else 5
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs)).double()
        if setup.parameters.get("unused"):
            net[1].register_parameter("spare", nn.Parameter(torch.ones(3)))
        return net

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        kind = setup.parameters.get("kind", "samples")
        logits = model(inputs)
        if kind == "tokens":
            logits = logits.view(-1, 5, 4)
        weights = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64) if kind == "weights" else None
        total = nn.functional.cross_entropy(logits, labels, weight=weights, reduction="sum")
        if weights is not None:
            return Loss(total, weights[labels].sum())
        return Loss(total, (labels != -100).sum() if kind in ("ignored", "tokens") else len(labels))

    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> dict[str, Score]:
        loss = self.loss(model, batch, setup)
        return {
            "accuracy": Score((batch[1] > 2).sum(), batch[1].numel()),
            "val_loss": Score(loss.total, loss.denominator),
        }


class KillsARank(Points):
    """Rank 1 of trial 1 dies by SIGKILL in the middle of its first attempt."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if (
            setup.number == 1
            and setup.attempt == 0
            and setup.samples_budget > 24
            and torch.distributed.get_rank() == 1
        ):
            self.micro_batches = getattr(self, "micro_batches", 0) + 1
            if self.micro_batches == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, setup)


class OneRankFails(Points):
    """Only rank 1 fails, and the others would wait for it; `how` says whether in memory or in the code."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and len(batch[1]) > 20:
            if setup.parameters.get("how") == "memory":
                raise torch.OutOfMemoryError(f"tried to allocate {len(batch[1])} samples")
            raise ValueError("rank 1 alone does not like this")
        return super().loss(model, batch, setup)


class LabelledDigits(Digits):
    """Digits with a parameter that changes nothing a step costs."""

    def model(self, setup: TrialSetup) -> nn.Module:
        assert setup.parameters["label"] in ("a", "b")
        return super().model(setup)


class SlowDataset(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of which each takes its time to read."""

    def __init__(self, data: TensorDataset, sample_s: float) -> None:
        self.data, self.sample_s = data, sample_s

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.sample_s)
        inputs, label = self.data[index]
        return inputs, label


class SlowInput(Points):
    def data(self, setup: TrialSetup) -> Data:
        return Data(SlowDataset(points(400, 0), float(setup.parameters["sample_s"])), points(20, 1))


class RaisesLarge(Points):
    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        if len(batch[1]) > 100:
            raise ValueError("too many")
        return super().loss(model, batch, setup)


class Noisy(Points):
    """All that could go wrong when training resumes elsewhere: dropout, batch statistics, momentum, its own random numbers."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        inputs, labels = batch
        shake = random.random() + float(np.random.rand())
        return super().loss(model, [inputs + 0.1 * shake, labels], setup)

    def optimizer(self, model, setup):  # type: ignore[no-untyped-def]
        if setup.parameters.get("optimizer") == "adam":
            return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
        return super().optimizer(model, setup)


class DiesOnceInTheMiddle(Noisy):
    """The worker of each trial's first attempt dies by SIGKILL after three fifths of its budget."""

    def score(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Mapping[str, Score]:
        log = Path(str(setup.parameters["evaluated"])) / f"{setup.number}"
        if setup.samples_budget > 24 and setup.attempt == 0:
            with log.open("a") as file:
                file.write(".")
            if log.stat().st_size == 6:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().score(model, batch, setup)


def drawing_loop(setup: TrialSetup) -> Iterator[Measurement]:
    """A loop of one's own whose first weights are drawn as it begins."""
    yield Measurement(samples_seen=setup.samples_budget, elapsed_s=1.0, accuracy=float(torch.rand(())))


def own_loop_with_checkpoints(setup: TrialSetup) -> Iterator[Measurement]:
    """A loop of one's own that goes on where an earlier attempt stopped: it counts, and dies once at 60 of 100."""
    checkpoint = Checkpoint.of(setup)
    state = checkpoint.load() or {"seen": 0}
    yield from checkpoint.measurements
    seen = state["seen"]
    while seen < setup.samples_budget:
        if seen == 60 and setup.attempt == 0:
            raise KeyboardInterrupt
        seen += 20
        measurement = Measurement(
            samples_seen=seen, elapsed_s=seen / 100, accuracy=seen / setup.samples_budget
        )
        checkpoint.add(measurement)
        if checkpoint.due():
            checkpoint.save({"seen": seen})
        yield measurement


def endure(batch: list[torch.Tensor], setup: TrialSetup) -> None:
    """Let a training take ENDURES_S seconds, however many devices share it."""
    if setup.samples_budget > 24:
        share = len(batch[1]) * setup.plan.devices / setup.samples_budget
        time.sleep(share * float(os.environ.get("ENDURES_S", "3")))


class Endures(Noisy):
    """A trial of some seconds, which random kills find at work; ENDURES_S=0 trains it at once."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        endure(batch, setup)
        return super().loss(model, batch, setup)


class EnduresWithoutNorm(Points):
    """As long, and with fewer devices the same: nothing in it depends on the micro-batch."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor], setup: TrialSetup) -> Loss:
        endure(batch, setup)
        return super().loss(model, batch, setup)


class Block(nn.Module):
    """Attention and a wide net, with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.drop = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Dropout(0.2)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = x + self.drop(attended)
        wide: torch.Tensor = self.wide(x)
        return x + wide


class Words(Task):
    """A small transformer that names its blocks."""

    width, length, dtype = 32, 48, torch.float32

    def data(self, setup: TrialSetup) -> Data:
        words = torch.randint(0, 50, (200, self.length + 1), generator=torch.Generator().manual_seed(1))
        data = TensorDataset(words[:, :-1], words[:, 1:])
        return Data(data, data)

    def model(self, setup: TrialSetup) -> nn.Module:
        model = nn.Sequential(
            nn.Embedding(50, self.width), *(Block(self.width) for _ in range(4)), nn.Linear(self.width, 50)
        )
        return model.to(self.dtype)

    def checkpoint_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Block)]

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        tokens, following = batch
        total = nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten(), reduction="sum")
        return Loss(total, following.numel())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        return Score((model(batch[0]).argmax(-1) == batch[1]).sum(), batch[1].numel())


class ExactWords(Words):
    dtype = torch.float64


class StillWords(ExactWords):
    """Without dropout, whose random numbers differ between ranks."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = super().model(setup)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model


class Codebook(nn.Module):
    """A layer with an average of its inputs in a buffer, moved in every forward pass in training, as vector quantisers have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("codebook", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codebook.lerp_(x.mean(0), 0.1)
        return self.layer(x) + 0.1 * self.codebook


class Quantised(Points):
    def model(self, setup: TrialSetup) -> nn.Module:
        return Codebook()


class Ranked(Points):
    """Points told apart by AUROC and macro F1, by torchmetrics and by scikit-learn."""

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Mapping[str, Score | WholeSet]:
        from sklearn.metrics import average_precision_score
        from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

        inputs, labels = batch
        logits = model(inputs)
        margin = logits[:, 1] - logits[:, 0]
        return {
            "accuracy": Score((logits.argmax(-1) == labels).sum(), len(labels)),
            "auroc": WholeSet(BinaryAUROC(), margin.sigmoid(), labels),
            "f1": WholeSet(MulticlassF1Score(num_classes=2, average="macro"), logits, labels),
            "precision": WholeSet(
                lambda scores, labels: average_precision_score(labels, scores), margin, labels
            ),
        }

"""What a trial costs beside the library it trains with: seconds of a step, memory, and the fixed cost of a trial, on each road.

    .venv/bin/python benchmarks/training_loop.py --roads [--rounds 9]

A `Task` and a `Loop` beside the plainest loop (shuffle, index tensors, cross-entropy, backward, step, a scheduler), Hugging
Face's adapter beside `transformers.Trainer`, Lightning's beside `lightning.Trainer`, each pair with the same model, data,
optimizer and number of steps. A round is a whole training of each in one process, in alternating order; a step's time is the
mean CPU time of the training thread, of the steps after the tenth, so that waiting for a core does not count; printed is the
median over the rounds of the ratio within one, with the 95 % interval of that median. Memory is the growth of the resident set
from before the training to its peak. The fixed cost is the CPU time of a training of one step.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bsearch import Data, Loop, Task
from bsearch.benchmarks.verify.claims import of_repeats
from bsearch.benchmarks.verify.stages.tasks import setup_of
from bsearch.objectives import trial
from bsearch.objectives.adapters import huggingface, lightning
from bsearch.objectives.digits import Digits, digit_images
from bsearch.objectives.vision import small_cnn
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.trial import Outcome, TrialSetup
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

# A multiple of each batch: an epoch has no smaller rest, which a trial's budget of samples does not have either.
SAMPLES = 4096
STEPS = {8: 512, 64: 256, 512: 40}
# Steps that are not timed: the first ones prepare what the others use, and ours count bytes in two of them.
UNTIMED = 10


@dataclass
class Training:
    """What all roads train, and when their steps ended."""

    net: str
    batch: int
    steps: int
    ends: list[float] = field(default_factory=list)

    def step_ended(self) -> None:
        self.ends.append(time.thread_time())

    @property
    def step_s(self) -> float:
        assert len(self.ends) == self.steps
        return (self.ends[-1] - self.ends[UNTIMED - 1]) / (self.steps - UNTIMED)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Digits().model(self.setup()) if self.net == "digits net" else small_cnn(16, 10)

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        if self.net == "digits net":
            images, labels = digit_images()
            chosen = torch.randint(0, len(images), (SAMPLES,), generator=generator)
            return TensorDataset(images[chosen], labels[chosen])
        images = torch.randn(SAMPLES, 3, 16, 16, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=generator))

    def validation(self) -> TensorDataset:
        return TensorDataset(*(tensor[:64] for tensor in self.data().tensors))

    def setup(self) -> TrialSetup:
        setup = setup_of(BatchPlan(self.batch), "cpu", {"net": self.net})
        samples = self.batch * self.steps
        return replace(setup, samples_budget=samples, epochs=samples / SAMPLES, metric="accuracy")

    @classmethod
    def of(cls, setup: TrialSetup) -> Training:
        return cls(
            str(setup.parameters["net"]), setup.effective_batch, setup.samples_budget // setup.effective_batch
        )


def plainest(training: Training) -> None:
    model = training.model()
    inputs, labels = training.data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)

    def indices() -> Iterator[Tensor]:
        while True:
            yield from torch.split(torch.randperm(len(labels)), training.batch)

    for index in itertools.islice(indices(), training.steps):
        nn.functional.cross_entropy(model(inputs[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        training.step_ended()
    accuracy_of(model, training)


def accuracy_of(model: nn.Module, training: Training) -> Tensor:
    inputs, labels = training.validation().tensors
    model.eval()
    with torch.no_grad():
        return (model(inputs).argmax(1) == labels).float().mean()


class OfTask(Task):
    """The `Task` of a training."""

    def __init__(self, training: Training | None = None) -> None:
        self.training = training

    def data(self, setup: TrialSetup) -> Data:
        training = Training.of(setup)
        return Data(training.data(), training.validation())

    def model(self, setup: TrialSetup) -> nn.Module:
        return Training.of(setup).model()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        if self.training is not None:
            self.training.step_ended()


def by_task(training: Training) -> Iterator[Any]:
    from bsearch.objectives.training import train_task

    yield from train_task(OfTask(training), training.setup())


def by_loop(training: Training) -> Iterator[Any]:
    setup, model = training.setup(), training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)
    loop = Loop(setup, Data(training.data(), training.validation()), {"net": model}, {"net": optimizer})
    for step in loop:
        for part in step:
            inputs, labels = part.batch
            (part.weight * nn.functional.cross_entropy(model(inputs), labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        training.step_ended()
        if step.evaluates:
            yield loop.measure(accuracy=accuracy_of(model, training))


class Rows(Dataset[Any]):
    """A training's samples as the Trainer takes them."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


class WithLoss(nn.Module):
    """A model as the Trainer takes it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class StepEnds(TrainerCallback):
    def __init__(self, training: Training) -> None:
        self.training = training

    def on_step_end(self, *arguments: Any, **others: Any) -> None:
        self.training.step_ended()


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def of_trainer(training: Training) -> dict[str, Any]:
    return {
        "model": WithLoss(training.model()),
        "train_dataset": Rows(training.data()),
        "eval_dataset": Rows(training.validation()),
        "compute_metrics": accuracy,
        "callbacks": [StepEnds(training)],
    }


def trainer_alone(training: Training) -> None:
    arguments = TrainingArguments(
        output_dir="unused", learning_rate=0.01, max_grad_norm=0.0, lr_scheduler_type="cosine", max_steps=training.steps,
        per_device_train_batch_size=training.batch, per_device_eval_batch_size=64, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(args=arguments, **of_trainer(training))
    trainer.remove_callback(PrinterCallback)  # it prints when there is no progress bar
    trainer.train()
    trainer.evaluate()


def by_trainer(training: Training) -> Iterator[Any]:
    yield from huggingface.train_with(training.setup(), Trainer, **of_trainer(training))


class Net(LightningModule):
    def __init__(self, training: Training, steps: int = 0) -> None:
        super().__init__()
        self.net, self.steps = training.model(), steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        if not self.steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class BatchEnds(Callback):
    def __init__(self, training: Training) -> None:
        self.training = training

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.training.step_ended()


def loaders(training: Training) -> tuple[Any, Any]:
    train = DataLoader(training.data(), training.batch, shuffle=True)
    return train, DataLoader(training.validation(), 64)


def lightning_alone(training: Training) -> None:
    epochs = max(1, training.batch * training.steps // SAMPLES)
    trainer = LightningTrainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        devices=1, max_epochs=epochs, max_steps=training.steps, check_val_every_n_epoch=epochs, num_sanity_val_steps=0,
        callbacks=[BatchEnds(training)],
    )  # fmt: skip
    trainer.fit(Net(training, training.steps), *loaders(training))


def by_lightning(training: Training) -> Iterator[Any]:
    yield from lightning.train_with(
        training.setup(), Net(training), loaders(training), callbacks=[BatchEnds(training)]
    )


# Each road with the plain training beside which it is measured.
ROADS: dict[str, tuple[Callable[[Training], Iterator[Any]], Callable[[Training], None]]] = {
    "Task": (by_task, plainest),
    "Loop": (by_loop, plainest),
    "Hugging Face": (by_trainer, trainer_alone),
    "Lightning": (by_lightning, lightning_alone),
}


# What trials of one step name as their tasks.
def looped(setup: TrialSetup) -> Iterator[Any]:
    yield from by_loop(Training.of(setup))


def trained(setup: TrialSetup) -> Iterator[Any]:
    yield from huggingface.train_with(setup, Trainer, **of_trainer(Training.of(setup)))


def lit(setup: TrialSetup) -> Iterator[Any]:
    training = Training.of(setup)
    yield from lightning.train_with(setup, Net(training), loaders(training))


TASKS = {"Task": "OfTask", "Loop": "looped", "Hugging Face": "trained", "Lightning": "lit"}


def run_ours(road: str, training: Training) -> None:
    for _ in ROADS[road][0](training):
        pass


def run_plain(road: str, training: Training) -> None:
    ROADS[road][1](training)


def resident_mb(name: str) -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) / 1024


def growth_mb(run: Callable[[], None]) -> float:
    """By how much the resident set grows at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets its peak
    before = resident_mb("VmRSS")
    run()
    return resident_mb("VmHWM") - before


def cpu_ms(run: Callable[[], None]) -> float:
    started = time.process_time()
    run()
    return 1e3 * (time.process_time() - started)


def attempt(road: str, training: Training) -> None:
    *_, outcome = trial.attempt(f"{__file__}:{TASKS[road]}", training.setup())
    assert isinstance(outcome, Outcome), outcome
    assert outcome.kind == "complete", outcome.message


def compare_roads(rounds: int) -> None:
    warnings.simplefilter("ignore")
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(
        f"{'':<13}{'net':<12}{'batch':>6}{'ours ms':>9}{'plain ms':>9}{'ours/plain':>18}{'ours MB':>9}{'plain MB':>9}"
    )
    for road, net, batch in itertools.product(ROADS, ("digits net", "small CNN"), STEPS):
        pairs, sizes = list[tuple[float, float]](), list[tuple[float, float]]()
        for number in range(rounds + 1):
            seconds, grown = dict[Any, float](), dict[Any, float]()
            for run in (run_ours, run_plain) if number % 2 else (run_plain, run_ours):
                training = Training(net, batch, STEPS[batch])
                grown[run] = growth_mb(partial(run, road, training))
                seconds[run] = training.step_s
            if number:  # the first warms up
                pairs.append((seconds[run_ours], seconds[run_plain]))
                sizes.append((grown[run_ours], grown[run_plain]))
        ours, plain = (1e3 * median(column) for column in zip(*pairs, strict=True))
        ours_mb, plain_mb = (median(column) for column in zip(*sizes, strict=True))
        ratio = of_repeats("", 0.0, [first / second - 1 for first, second in pairs])
        print(
            f"{road:<13}{net:<12}{batch:>6}{ours:>9.3f}{plain:>9.3f}{ratio.measured:>+10.1%} ±{ratio.uncertainty:>5.1%}"
            f"{ours_mb:>10.1f}{plain_mb:>9.1f}",
            flush=True,
        )
    print("\na training of one step: CPU ms")
    for road in ROADS:
        costs = [
            tuple(cpu_ms(partial(run, road, Training("digits net", 64, 1))) for run in (attempt, run_plain))
            for _ in range(rounds + 1)
        ]
        ours, plain = (median(column) for column in zip(*costs[1:], strict=True))
        print(f"{road:<13} ours {ours:8.1f}   plain {plain:8.1f}", flush=True)

"""Training loops of one's own that are made of `Loop`, and a Task that trains the same; ranks import this module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.loading import load_task
from bsearch.objectives.loop import Loop, Step, newest_loop
from bsearch.objectives.machine.torch_settings import seed_everything
from bsearch.objectives.task import Data, Loss, Task
from bsearch.objectives.training import TrainingRun
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset


class Rows(IterableDataset[Any]):
    """The samples of a data set as a stream, in an order that each pass shuffles anew."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for place in torch.randperm(len(self.samples)).tolist():
            yield self.samples[place]


def digits(samples: int = 700, *, streams: bool = False) -> Data:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 12, generator=generator)
    labels = (inputs @ torch.randn(12, 5, generator=generator)).argmax(1)
    train, validation = TensorDataset(inputs[:600], labels[:600]), TensorDataset(inputs[600:], labels[600:])
    return Data(Rows(train), validation, samples=600) if streams else Data(train, validation)


def net(setup: TrialSetup) -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Dropout(setup.parameters.get("dropout", 0.2)), nn.Linear(32, 5)
    )  # type: ignore[arg-type]


def sgd(model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9, nesterov=True)


class AsTask(Task):
    def data(self, setup: TrialSetup) -> Data:
        return digits(streams=bool(setup.parameters.get("streams")))

    def model(self, setup: TrialSetup) -> nn.Module:
        return net(setup)

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return sgd(model, setup)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        inputs, labels = batch
        return Loss(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


def accuracy(model: nn.Module, data: Data) -> float:
    inputs, labels = data.validation.tensors  # type: ignore[attr-defined]
    model.eval()
    with torch.no_grad():
        right = (model(inputs).argmax(1) == labels).sum()
    model.train()
    return float(right) / len(labels)


def classifier(setup: TrialSetup, made: Callable[[TrialSetup], nn.Module] = net) -> Iterator[Measurement]:
    """What `AsTask` trains."""
    data, model = digits(streams=bool(setup.parameters.get("streams"))), made(setup)
    optimizer = sgd(model, setup)
    loop = Loop(setup, data, models={"net": model}, optimizers={"net": optimizer})
    for step in loop:
        for part in step:
            inputs, labels = part.batch
            (F.cross_entropy(model(inputs), labels, reduction="sum") * (1 / step.samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=accuracy(model, data))


def adversarial(setup: TrialSetup) -> Iterator[Measurement]:
    """A generator and a discriminator, two passes over each step."""
    data = digits()
    torch.manual_seed(setup.seed)
    g = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))
    d = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    og, od = (
        torch.optim.Adam(one.parameters(), lr=setup.learning_rate, betas=(0.5, 0.999)) for one in (g, d)
    )
    loop = Loop(setup, data, models={"g": g, "d": d}, optimizers={"g": og, "d": od})
    for step in loop:
        for part in step:
            real, _ = part.batch
            fake = g(torch.randn(part.samples, 4))
            (part.weight * (F.softplus(-d(real)) + F.softplus(d(fake.detach()))).mean()).backward()
        od.step()
        od.zero_grad()
        for part in step:
            (part.weight * F.softplus(-d(g(torch.randn(part.samples, 4)))).mean()).backward()
        og.step()
        og.zero_grad()
        od.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=realism(g, data))


def realism(g: nn.Module, data: Data) -> float:
    with torch.no_grad():
        made = g(torch.randn(200, 4, generator=torch.Generator().manual_seed(1)))
        real = data.validation.tensors[0]  # type: ignore[attr-defined]
        return float(1 / (1 + (made.mean(0) - real.mean(0)).norm() + (made.std(0) - real.std(0)).norm()))


def parameters_after(reference: str, setup: dict[str, Any]) -> Iterator[list[Tensor]]:
    """The parameters after a whole training, for ranks."""
    torch.manual_seed(0)
    for _ in load_task(reference)(TrialSetup.from_dict(setup)):  # type: ignore[operator]
        pass
    loop = newest_loop()
    assert loop is not None
    yield [parameter.detach().clone() for parameter in loop.model.parameters()]


def wrong_weights(setup: TrialSetup) -> Iterator[Measurement]:
    """The mean of each part counts in full."""
    data, model = digits(), net(setup)
    optimizer = sgd(model, setup)
    loop = Loop(setup, data, models={"net": model}, optimizers={"net": optimizer})
    for step in loop:
        for part in step:
            F.cross_entropy(model(part.batch[0]), part.batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=accuracy(model, data))


def optional_closure(setup: TrialSetup) -> Iterator[Measurement]:
    """Its gradient is a closure's, which the optimizer would not need."""
    data, model = digits(), net(setup)
    optimizer = sgd(model, setup)
    loop = Loop(setup, data, models={"net": model}, optimizers={"net": optimizer})
    for step in loop:

        def gradient(step: Step = step) -> None:
            for part in step:
                inputs, labels = part.batch
                (F.cross_entropy(model(inputs), labels, reduction="sum") * (1 / step.samples)).backward()

        optimizer.step(closure=gradient)
        optimizer.zero_grad()
        if step.evaluates:
            yield loop.measure(accuracy=accuracy(model, data))


class Remembers(nn.Module):
    """Adds up what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += inputs.detach().sum(0)
        return F.relu(inputs)


def normed(setup: TrialSetup) -> nn.Module:
    """With batch statistics of its inputs and of what it computes, and a buffer that each device would move its own way."""
    layers = (
        nn.BatchNorm1d(12),
        nn.Linear(12, 16),
        nn.BatchNorm1d(16),
        Remembers(),
        nn.Dropout(0.2),
        nn.Linear(16, 5),
    )
    return nn.Sequential(*layers)


class NormedTask(AsTask):
    def model(self, setup: TrialSetup) -> nn.Module:
        return normed(setup)


def normed_loop(setup: TrialSetup) -> Iterator[Measurement]:
    """What `NormedTask` trains."""
    yield from classifier(setup, normed)


def seen_at_evaluations(reference: str, setup: dict[str, Any]) -> Iterator[list[list[Tensor]]]:
    """Every rank's parameters and buffers at each evaluation, and its accuracy."""
    given, train = TrialSetup.from_dict(setup), load_task(reference)
    seed_everything(given.seed)  # as a trial does before it calls a loop
    run = TrainingRun(train, given) if isinstance(train, Task) else None
    found: list[list[Tensor]] = []
    ranks: Any = None
    for measurement in train(given) if run is None else run.measurements():  # type: ignore[operator]
        trained = run or newest_loop()
        assert trained is not None
        model, ranks = trained.model, trained.ranks
        running = [each for each in model.buffers() if each.is_floating_point()]
        found.append(
            [
                torch.tensor(measurement.accuracy),
                *(one.detach().clone() for one in (*model.parameters(), *running)),
            ]
        )  # type: ignore[arg-type,union-attr]
    yield ranks.all_gathered({"found": [found]})["found"]

"""What goes wrong later than in one step: rates set elsewhere, what nobody saves, gradients that nobody clears, plans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bsearch.objectives.loop import Loop, Part, Step
from bsearch.objectives.task import Data, Loss, Score
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from zoo.plain import RATE, digits, trained, whole
from zoo.plain import Step as Samples
from zoo.vision import TRAINING, VALIDATION, Digits, convolutional

# Tasks: what their gradients, rates and states are


class Temperature(Digits):
    """A parameter beside the model, which its optimizer has."""

    def __init__(self) -> None:
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(
            F.cross_entropy(model(images) * self.log_temperature.exp(), labels, reduction="sum"), len(labels)
        )

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), self.log_temperature], lr=setup.learning_rate)


class HeadAlone(Digits):
    """A backbone that gets gradients, and that no optimizer has."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model[-1].parameters(), lr=setup.learning_rate)  # type: ignore[index]


def layers(model: nn.Module, rate: float, *, scaled: bool = False) -> list[dict[str, Any]]:
    """Groups of layer-wise decay: `lr_scale` is left to a scheduler, as by timm's `param_groups_layer_decay`, or multiplied."""
    scales = {0: 0.25, 4: 1.0}
    return [
        {"params": model[place].parameters(), "lr": rate * scale if scaled else rate, "lr_scale": scale}  # type: ignore[index]
        for place, scale in scales.items()
    ]


class LayerDecay(Digits):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(layers(model, setup.learning_rate), lr=setup.learning_rate)


class LayerDecayMultiplied(Digits):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(layers(model, setup.learning_rate, scaled=True), lr=setup.learning_rate)


def layer_decayed(steps: Sequence[Samples]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = convolutional()
    optimizer = torch.optim.SGD(layers(model, RATE, scaled=True), lr=RATE)
    return trained(
        optimizer, steps, lambda step: F.cross_entropy(model(images[whole(step)]), labels[whole(step)])
    )


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: gradients at y, evaluation at x (Defazio et al. 2024, arXiv 2405.15682)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9, "k": 0, "trains": False})

    @torch.no_grad()
    def _move(self, *, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(
                            self.state[parameter]["z"], 1 - group["beta"] if trains else 1 - 1 / group["beta"]
                        )
                group["trains"] = trains

    def train(self) -> None:
        self._move(trains=True)

    def eval(self) -> None:
        self._move(trains=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"], "step in evaluation mode"
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                x = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                parameter.copy_(x.lerp(z, 1 - group["beta"]))


class WithoutSchedule(Digits):
    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return ScheduleFree(model.parameters(), setup.learning_rate)


def schedule_free(steps: Sequence[Samples]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    model = convolutional()
    optimizer = ScheduleFree(model.parameters(), RATE)
    optimizer.train()
    return trained(
        optimizer, steps, lambda step: F.cross_entropy(model(images[whole(step)]), labels[whole(step)])
    )


class Curriculum(Digits):
    """A step counter in an attribute, which no checkpoint holds."""

    def __init__(self) -> None:
        self.steps = 0

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(F.cross_entropy(model(images) / (1 + self.steps), labels, reduction="sum"), len(labels))

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        self.steps += 1


class OwnDraws(Digits):
    """Noise of a generator that neither the seed nor a checkpoint reaches."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        for parameter in model.parameters():
            parameter.add_(torch.from_numpy(self.draws.normal(0, 0.01, parameter.shape)).to(parameter))


class ScoreThatCounts(Digits):
    """Each evaluation changes the training that follows."""

    def __init__(self) -> None:
        self.evaluated = 0

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        return Loss(
            F.cross_entropy(model(images) / (1 + self.evaluated), labels, reduction="sum"), len(labels)
        )

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        self.evaluated += 1
        return super().score(model, batch, setup)


class Counting(nn.Module):
    """Anneals with the number of its forward passes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return inputs * (1 + self.calls / 4)


class CountsCalls(Digits):
    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.Sequential(convolutional(), Counting())


class Unfreezing(Digits):
    """Its backbone is trained from the second step on."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = convolutional()
        model[0].requires_grad_(False)
        return model

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:
        model[0].requires_grad_(True)  # type: ignore[index]


class Teacher(Digits):
    """A mean teacher that moves once a step: right."""

    def model(self, setup: TrialSetup) -> nn.Module:
        model = nn.ModuleDict({"student": convolutional(), "teacher": convolutional().requires_grad_(False)})
        model["teacher"].load_state_dict(model["student"].state_dict())
        return model

    def loss(self, model: Any, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        logits, aim = model["student"](images), model["teacher"](images).softmax(1)
        return Loss(
            F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits, aim, reduction="sum"),
            len(labels),
        )

    def after_step(self, model: Any, setup: TrialSetup) -> None:
        moved(model["teacher"], model["student"])

    def score(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return super().score(model["student"], batch, setup)

    def optimizer(self, model: Any, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model["student"].parameters(), lr=setup.learning_rate)


@torch.no_grad()
def moved(teacher: nn.Module, student: nn.Module) -> None:
    for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
        ours.lerp_(theirs, 0.1)


def taught(steps: Sequence[Samples]) -> list[float]:
    images, labels = digits()
    torch.manual_seed(0)
    student, teacher = convolutional(), convolutional()
    teacher.load_state_dict(student.state_dict())
    optimizer, losses = torch.optim.SGD(student.parameters(), lr=RATE), []
    for step in steps:
        logits = student(images[whole(step)])
        with torch.no_grad():
            aim = teacher(images[whole(step)]).softmax(1)
        loss = F.cross_entropy(logits, labels[whole(step)]) + F.cross_entropy(logits, aim)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved(teacher, student)
        losses.append(float(loss.detach()))
    return losses


class Experts(Digits):
    """A sparse mixture with the auxiliary loss of Switch Transformers, which is of the batch's shares."""

    def model(self, setup: TrialSetup) -> nn.Module:
        return nn.ModuleDict(
            {"router": nn.Linear(64, 3), "experts": nn.ModuleList(nn.Linear(64, 10) for _ in range(3))}
        )

    def loss(self, model: Any, batch: Any, setup: TrialSetup) -> Loss:
        images, labels = batch
        gates = model["router"](images.flatten(1)).softmax(1)
        logits = sum(
            gates[:, [place]] * expert(images.flatten(1)) for place, expert in enumerate(model["experts"])
        )
        balance = 3 * (F.one_hot(gates.argmax(1), 3).float().mean(0) * gates.mean(0)).sum()
        return Loss(
            F.cross_entropy(logits, labels, reduction="sum") + 0.5 * balance * len(labels), len(labels)
        )

    def score(self, model: Any, batch: Any, setup: TrialSetup) -> Any:
        return {"accuracy": Score(len(batch[1]), len(batch[1]))}


# Loops: what a body does

Body = Callable[[Loop, Step, nn.Module, torch.optim.Optimizer], None]


def data() -> Data:
    images, labels = digits()
    return Data(
        TensorDataset(images[TRAINING], labels[TRAINING]),
        TensorDataset(images[VALIDATION], labels[VALIDATION]),
    )


def looped(
    setup: TrialSetup, body: Body, *, trains_on: bool = True, train: Callable[[nn.Module], Any] | None = None
) -> Iterator[Measurement]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9)
    given = data() if train is None else replace(data(), train=train(model), samples=1400)
    loop = Loop(setup, given, models={"net": model}, optimizers={"net": optimizer})
    for step in loop:
        body(loop, step, model, optimizer)
        if step.evaluates:
            model.eval()
            images, labels = loop.data.validation.tensors  # type: ignore[attr-defined]
            with torch.no_grad():
                measured = loop.measure(accuracy=(model(images).argmax(1) == labels).float().mean())
            if trains_on:
                model.train()
            yield measured


def back_propagate(part: Part, model: nn.Module, share: float) -> None:
    images, labels = part.batch
    (share * F.cross_entropy(model(images), labels)).backward()


def right(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for part in step:
        back_propagate(part, model, part.weight)
    optimizer.step()


def plain(setup: TrialSetup) -> Iterator[Measurement]:
    yield from looped(setup, right)


def evaluation_mode(setup: TrialSetup) -> Iterator[Measurement]:
    """Left on after the first evaluation, in plain torch: put back here, so that it is `plain`."""
    yield from looped(setup, right, trains_on=False)


class PseudoLabels(IterableDataset[Any]):
    """Labels that the model gives; a pass reads a copy of it, as it was at its beginning."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[Any]:
        for image in digits()[0][TRAINING]:
            with torch.no_grad():
                label = self.model(image[None]).argmax()
            yield image, label


def pseudo_labels(setup: TrialSetup) -> Iterator[Measurement]:
    yield from looped(setup, right, train=PseudoLabels)


def never_cleared(setup: TrialSetup) -> Iterator[Measurement]:
    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for part in step:
            back_propagate(part, model, part.weight)
        optimizer.step()

    yield from looped(setup, body)


def stepped_in_parts(setup: TrialSetup) -> Iterator[Measurement]:
    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for part in step:
            optimizer.zero_grad()
            back_propagate(part, model, 1.0)
            optimizer.step()

    yield from looped(setup, body)


def counts_parts_again(setup: TrialSetup) -> Iterator[Measurement]:
    """As accelerate's `backward`, which divides by the accumulation that it was made with."""

    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for part in step:
            back_propagate(part, model, part.weight / setup.plan.accumulation)
        optimizer.step()

    yield from looped(setup, body)


def plateau(setup: TrialSetup) -> Iterator[Measurement]:
    schedulers: list[Any] = []

    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedulers.append(
            schedulers[0] if schedulers else torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        )
        right(loop, step, model, optimizer)

    yield from looped(setup, body)


def rate_of_its_own(setup: TrialSetup) -> Iterator[Measurement]:
    """As nanoGPT's `get_lr`."""

    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = setup.learning_rate * (
            0.5 + 0.5 * math.cos(math.pi * step.fraction)
        )
        right(loop, step, model, optimizer)

    yield from looped(setup, body)


def counts_steps(setup: TrialSetup) -> Iterator[Measurement]:
    """A counter of its own, which begins anew where it resumes."""
    number = itertools.count(1)

    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        share = 1 / next(number)
        for part in step:
            back_propagate(part, model, part.weight * share)
        optimizer.step()

    yield from looped(setup, body)


def weight_decay_by_the_step(setup: TrialSetup) -> Iterator[Measurement]:
    """Another setting of a group by the fraction of the training: right."""

    def body(loop: Loop, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + step.fraction)
        right(loop, step, model, optimizer)

    yield from looped(setup, body)

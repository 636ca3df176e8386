"""Tasks of the contract, trained by transformers.Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bsearch.objectives.huggingface import train_with
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainer_contract import Net, Points, remember_groups, sgd, troubles
from transformers import Trainer, TrainerCallback


class Plain(Net):
    """Takes no number of items: its loss is the mean over the pass."""

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Deaf(Plain):
    """Takes whatever it is given and uses none of it, as many models of the library do."""

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None, **ignored: Any) -> dict[str, Tensor]:
        return super().forward(x, labels, index)


class Dividing(Net):
    """Divides its summed loss by the step's number of labels, which the Trainer counts."""

    def forward(
        self, x: Tensor, labels: Tensor, index: Tensor | None = None, num_items_in_batch: Any = None, **more: Any
    ) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch, "logits": logits}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Points())


class OwnLoss(Trainer):
    """A user's own subclass, whose loss is its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Groups(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        remember_groups(optimizer)


def trained(setup: TrialSetup, net: Net, trainer: type = Trainer, own: bool = True, **parts: Any) -> Iterator[Measurement]:
    def accuracy(evaluation: Any) -> dict[str, float]:
        troubles(setup)
        return {"accuracy": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean())}

    dtype = next(net.parameters()).dtype
    points = Points(ignores=bool(setup.parameters.get("ignores")), dtype=dtype)
    yield from train_with(
        setup,
        trainer,
        model=net,
        train_dataset=Stream() if setup.parameters.get("stream") else points,
        eval_dataset=Points(100, dtype=dtype),
        compute_metrics=accuracy,
        optimizers=(sgd(net, setup) if own else None, None),
        **parts,
    )


def train(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(drop=float(setup.parameters.get("drop", 0.0))))


def deaf(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Deaf())


def dividing(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Dividing())


def own_loss(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Dividing(), OwnLoss)


def loss_function(setup: TrialSetup) -> Iterator[Measurement]:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    class Labelless(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None, index: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.logits(x, index)}

    yield from trained(setup, Labelless(), compute_loss_func=summed)


def single(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(torch.float32))


def adam(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), own=False, callbacks=[Groups()])


def arguments(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), arguments={"learning_rate": 1.0, "num_train_epochs": 3, "output_dir": "here"})

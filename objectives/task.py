"""What a user writes: data, a model and, where the defaults do not fit, loss, optimizer and score.

Every method gets the trial's `setup`, so anything can be searched: `setup.parameters["width"]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..spaces.trial import Measurement, TrialSetup
from .checkpoint import save_state
from .model.activation_checkpointing import transformer_layers

# The alternative to a Task: a training loop of your own that yields measurements.
TrainFunction = Callable[[TrialSetup], Iterator[Measurement]]


@dataclass(frozen=True, slots=True)
class Data:
    """Map-style datasets for training, for comparing trials (validation) and, optionally, for the score of `bsearch train`.

    Args:
        collate: turns a list of samples into a batch, such as one that pads to the longest; default: torch's.
        lengths: number of units, such as tokens, in each training sample. Throughput is then shown in units as well, and memory
            is traced with the longest samples.
        unit: name of that unit.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    lengths: Sequence[int] | None = None
    unit: str = "tokens"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as sum and denominator, so that micro-batches of different sizes add up to the full batch.

    Args:
        total: sum of the batch's losses, a scalar tensor that requires grad.
        denominator: what the mean divides by: samples, unmasked tokens, or the sum of class weights.
    """

    total: Tensor
    denominator: Tensor | float


@dataclass(frozen=True, slots=True)
class Score:
    """A metric as sum and denominator, such as correct predictions and samples.

    Args:
        of: a function of their quotient over all samples, such as `math.exp` for a perplexity.
    """

    total: Tensor | float
    denominator: Tensor | float
    of: Callable[[float], float] | None = None


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, setup: TrialSetup) -> Tensor:
    """Summed cross-entropy of classes, with the label smoothing of the parameter `label_smoothing`, 0 by default."""
    smoothing = float(setup.parameters.get("label_smoothing", 0.0))
    return nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


class Task(ABC):
    """Data and a model; the defaults train a classifier on batches of (inputs, labels)."""

    @abstractmethod
    def data(self, setup: TrialSetup) -> Data:
        """The datasets. Called once per trial, so cache data that is slow to load."""

    @abstractmethod
    def model(self, setup: TrialSetup) -> nn.Module:
        """A new model on the CPU; it is moved to the device afterwards."""

    def checkpoint_blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The blocks whose activations may be recomputed in the backward pass, such as a transformer's layers; default: the
        layers of a model of `transformers`. They must not be nested, nor contain layers that update buffers, such as BatchNorm.
        """
        return transformer_layers(model)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        """The batch's summed loss and what its mean divides by; default: cross-entropy over samples.

        The default uses the study's parameter `label_smoothing`, if there is one.
        """
        inputs, labels = batch
        return Loss(smoothed_cross_entropy(model(inputs), labels, setup), len(labels))

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters, with the setup's learning rate; default: SGD with Nesterov momentum 0.9.

        Frozen parameters (requires_grad=False) are removed from it afterwards.
        """
        return torch.optim.SGD(
            model.parameters(),
            lr=setup.learning_rate,
            momentum=0.9,
            nesterov=True,
            weight_decay=setup.weight_decay,
            fused=setup.device == "gpu" or None,
        )

    def save(self, model: nn.Module, folder: Path, setup: TrialSetup) -> None:
        """Write the trained model of `bsearch train` into the folder; default: its weights as model.pt.

        Raises:
            OutputError: it cannot be written.
        """
        save_state(folder / "model.pt", model.state_dict())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score | Mapping[str, Score]:
        """One metric, or several by name; default: accuracy and the mean cross-entropy `val_loss`."""
        inputs, labels = batch
        logits = model(inputs)
        return {
            "accuracy": Score((logits.argmax(-1) == labels).sum(), len(labels)),
            "val_loss": Score(nn.functional.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)),
        }

"""What a user writes: data, a model and, where the defaults do not fit, loss, optimizer and score; and what is checked of it.

Every method gets the trial's `setup`, so anything can be searched: `setup.parameters["width"]`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..spaces.boundary.given import number_of, shown
from ..spaces.errors import TaskError
from ..spaces.laws.examination import Finding
from ..spaces.record import name_fault
from ..spaces.trial import Measurement, TrialSetup
from .data.sample_weights import checked_weights
from .data.stream import is_stream
from .model.activation_checkpointing import transformer_layers
from .optimizers import fuses_sgd, inner_optimizers, needs_closure
from .state.checkpoint import save_state

# The alternative to a Task: a training loop of your own that yields measurements.
TrainFunction = Callable[[TrialSetup], Iterator[Measurement]]


@dataclass(frozen=True, slots=True)
class Data:
    """Map-style datasets for training, for comparing trials (validation) and, optionally, for the score of `bsearch train`.

    Training data may be a stream instead: an `IterableDataset`, or anything else that can only be iterated. It is trained on in
    its own order, so it has to shuffle itself.

    Args:
        collate: turns a list of samples into a batch, such as one that pads to the longest; default: torch's.
        train_collate: the same for training batches alone, such as one that mixes samples; default: `collate`.
        lengths: number of units, such as tokens, in each training sample. Throughput is then shown in units as well, and memory
            is traced with the longest samples.
        unit: name of that unit.
        weights: one for each training sample: samples are drawn with replacement, with probability weight / sum, and an epoch
            is as many draws as there are samples. `balanced(labels)` draws all classes equally often. Default: every sample
            once an epoch. Validation is never weighted.
        samples: number of samples in one pass over a stream, an epoch.
        shuffle: whether each epoch has an order of its own; otherwise all have that of the dataset.
    """

    train: Dataset[Any]
    validation: Dataset[Any]
    test: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    train_collate: Callable[[list[Any]], Any] | None = None
    lengths: Sequence[int] | None = None
    unit: str = "tokens"
    weights: Sequence[float] | np.ndarray | Tensor | None = None
    samples: int | None = None
    shuffle: bool = True

    @property
    def training_set(self) -> int:
        """Samples in an epoch."""
        return len(self.train) if self.samples is None else self.samples  # type: ignore[arg-type]


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
        of: a function of their ratio over all samples, such as `math.exp` for a perplexity.
    """

    total: Tensor | float
    denominator: Tensor | float
    of: Callable[[float], float] | None = None


class WholeSet:
    """A metric of the whole data set that is not a ratio of sums, such as AUROC, macro F1 or average precision.

    Args:
        metric: a `torchmetrics.Metric`, updated with the arguments of each batch; or a function, called once with the arguments
            of all batches concatenated on the CPU, half precision as float32. Returns a number.
        arguments: of this batch, such as outputs and targets: tensors with samples first, (n, ...), or lists.
    """

    def __init__(self, metric: Any, *arguments: Any) -> None:
        self.metric, self.arguments = metric, arguments


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, setup: TrialSetup) -> Tensor:
    """Summed cross-entropy of classes, with the label smoothing of the parameter `label_smoothing`, 0 by default."""
    smoothing = float(setup.parameters.get("label_smoothing", 0.0))
    return nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)


class Task(ABC):
    """Data and a model; the defaults train a classifier on batches of (inputs, labels).

    Attributes:
        couples_samples: whether `loss` compares the samples of a batch, as contrastive losses do. Its batches are then never
            split: the largest batch is the largest micro-batch that fits, on one device. With `embed` and `batch_loss` instead
            of `loss`, they are split exactly.
    """

    couples_samples: bool = False

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
        return Loss(smoothed_cross_entropy(_logits(self, "loss", model, inputs), labels, setup), len(labels))

    def examine(self, model: nn.Module, data: Data, setup: TrialSetup) -> Iterable[Finding]:
        """What else to compare or report before the first trial, once, on the trial's device; default: nothing.

        Returns:
            What was found; a finding of a refused kind ends the study unless `training.accept_inexact` is set.
        """
        return ()

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        """With `batch_loss`, instead of `loss`: what a loss that compares the samples of a batch needs of each of them.

        Returns:
            A tensor of shape (samples, ...), or a tuple, list or dict of such tensors, such as two views' embeddings and the
            labels. It is computed in micro-batches, twice where there are several (`gradient_cache`).
        """
        raise NotImplementedError

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        """The mean loss of a whole batch, a scalar, given what `embed` returned for all of its samples.

        It may use the model's own parameters, such as a temperature, and must not draw random numbers.
        """
        raise NotImplementedError

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
            fused=fuses_sgd(setup),
        )

    def after_step(self, model: nn.Module, setup: TrialSetup) -> None:  # noqa: B027  # there need be nothing to do
        """Called once after each optimizer step, under `torch.no_grad()`, before weights are averaged; default: does nothing.

        For example to clip weights, or to move a teacher that is a part of the model. It is a part of the step's time and
        memory. On several devices it runs on each, all of which hold the same weights: it must do the same on all. What it
        keeps must be in the model, as parameters or buffers: checkpoints do not hold attributes of the task.
        """

    def save(self, model: nn.Module, folder: Path, setup: TrialSetup) -> None:
        """Write the trained model of `bsearch train` into the folder; default: its weights as model.pt.

        Raises:
            OutputError: it cannot be written.
        """
        save_state(folder / "model.pt", model.state_dict())

    def score(
        self, model: nn.Module, batch: Any, setup: TrialSetup
    ) -> Score | WholeSet | Mapping[str, Score | WholeSet]:
        """One metric, or several by name; default: accuracy and the mean cross-entropy `val_loss`."""
        inputs, labels = batch
        logits = _logits(self, "score", model, inputs)
        return {
            "accuracy": Score((logits.argmax(-1) == labels).sum(), len(labels)),
            "val_loss": Score(
                nn.functional.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)
            ),
        }


def _logits(task: Task, method: str, model: nn.Module, inputs: Any) -> Tensor:
    """The model's outputs, for the default methods."""
    outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        raise TaskError(
            f"{name_of(task)}.{method}: the default expects a model that returns a tensor of logits, got "
            f"{type(outputs).__name__}. Override {method}(self, model, batch, setup)."
        )
    return outputs


# What is checked of it


def name_of(task: object) -> str:
    """The class of a task, or of what stands for one, for messages."""
    return type(task).__name__


def acts_after_steps(task: Task) -> bool:
    """Whether a task has an `after_step` of its own."""
    return type(task).after_step is not Task.after_step


def embeds(task: Task) -> bool:
    """Whether a task's loss is of a whole batch's embeddings.

    Raises:
        TaskError: it has only one of `embed` and `batch_loss`, or a loss beside them; that of a base class does not count.
    """
    classes = type(task).__mro__
    place = {
        name: next(i for i, base in enumerate(classes) if name in vars(base))
        for name in ("embed", "batch_loss", "loss")
    }
    own = [name for name in place if getattr(type(task), name) is not getattr(Task, name)]
    if own in ([], ["loss"]):
        return False
    if own[:2] != ["embed", "batch_loss"] or (
        len(own) == 3 and place["loss"] <= min(place["embed"], place["batch_loss"])
    ):
        raise TaskError(
            f"{name_of(task)}: expected either loss, or embed and batch_loss; got {', '.join(own)}"
        )
    if task.couples_samples:
        raise TaskError(
            f"{name_of(task)}: expected no couples_samples beside embed and batch_loss, which are split exactly. Remove "
            "couples_samples."
        )
    return True


def checked_data(data: Any) -> Data:
    if not isinstance(data, Data):
        raise TaskError(f"Task.data: expected Data(train, validation), got {type(data).__name__}")
    for name in ("train", "validation", "test"):
        dataset = getattr(data, name)
        if name == "test" and not is_stream(dataset):
            continue
        if isinstance(dataset, DataLoader):
            raise TaskError(
                f"Task.data: {name}: expected a dataset, got a DataLoader. Pass its dataset, and its collate_fn as collate=. A "
                "trial sets batches and order; instead of a weighted sampler, pass weights=, one for each sample."
            )
        if is_stream(dataset):
            _check_stream(data, name)
            continue
        if not hasattr(dataset, "__len__") or not (
            hasattr(dataset, "__getitem__") or hasattr(dataset, "fetch")
        ):
            raise TaskError(
                f"Task.data: {name}: expected a map-style dataset with a length, got {type(dataset).__name__}"
            )
        if len(dataset) == 0:
            raise TaskError(f"Task.data: {name}: expected at least one sample, got an empty dataset")
    if not is_stream(data.train) and data.samples not in (None, len(data.train)):  # type: ignore[arg-type]
        size = len(data.train)  # type: ignore[arg-type]
        raise TaskError(
            f"Task.data: samples: expected the length of the training set, {size}, got {data.samples!r}. Only a stream needs "
            "it."
        )
    if data.lengths is not None and len(data.lengths) != data.training_set:
        size = data.training_set
        raise TaskError(
            f"Task.data: lengths: expected one for each of the {size} training samples, got {len(data.lengths)}"
        )
    if (
        not data.unit.isidentifier()
        or data.unit == "samples"
        or name_fault("facts", (data.unit, f"{data.unit}_per_s"))
    ):
        raise TaskError(f"Task.data: unit: expected a word of its own, such as tokens, got {data.unit!r}")
    if data.weights is not None:
        if not data.shuffle:
            raise TaskError("Task.data: expected weights=, which draws samples, or shuffle=False, got both")
        return replace(data, weights=checked_weights("Task.data: weights", data.weights, len(data.train)))  # type: ignore[arg-type]
    return data


def _check_stream(data: Data, name: str) -> None:
    kind = type(getattr(data, name)).__name__
    if name != "train":
        raise TaskError(
            f"Task.data: {name}: expected a map-style dataset with a length, because every trial is scored on the same "
            f"samples; got {kind}, a stream. Read it into a list."
        )
    if hasattr(data.train, "__next__"):
        raise TaskError(
            f"Task.data: train: expected a stream that can be iterated anew for each pass, got {kind}, an iterator"
        )
    if isinstance(data.samples, bool) or not isinstance(data.samples, int) or data.samples < 1:
        raise TaskError(
            f"Task.data: samples: expected an integer >= 1 with a stream ({kind}), the samples of one pass over it; got "
            f"{data.samples!r}. Write Data(train, validation, samples=20_000)."
        )
    for given in ("lengths", "weights"):
        if getattr(data, given) is not None:
            raise TaskError(
                f"Task.data: {given}: expected none with a stream ({kind}), whose samples are not known beforehand"
            )


def checked_optimizer(task: Task, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
    """The task's optimizer, for trainable parameters alone.

    Raises:
        TaskError: it is none, or does not use the setup's settings.
    """
    where = f"{name_of(task)}.optimizer"
    optimizer = task.optimizer(model, setup)
    check_optimizer(where, optimizer, setup)
    check_no_scheduler(where, optimizer)
    check_kind(where, optimizer)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    return optimizer


def check_no_scheduler(where: str, optimizer: torch.optim.Optimizer) -> None:
    """Check that no scheduler has been created for an optimizer.

    Raises:
        TaskError: one has.
    """
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise scheduler_error(where, "one with a scheduler")


def scheduler_error(where: str, got: str) -> TaskError:
    return TaskError(
        f"{where}: expected no scheduler, because training.schedule sets the rate; got {got}. Remove it; for a schedule of "
        "your own write training.schedule: module:function."
    )


def check_kind(where: str, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer needs no closure, and that those inside it have its rates.

    Raises:
        TaskError: it needs one, or one of them has groups of its own.
    """
    if needs_closure(optimizer):
        raise closure_error(where, optimizer)
    groups = {id(group) for group in optimizer.param_groups}
    for name, inner in inner_optimizers(optimizer).items():
        if not groups.issuperset(map(id, inner.param_groups)):
            raise TaskError(
                f"{where}: expected an optimizer whose parts share its param_groups, in which the schedule sets the rate; got "
                f"{type(optimizer).__name__}, whose {name} has its own. Write self.param_groups = self.{name}.param_groups, in "
                "__init__ and after super().load_state_dict(), which transformers calls too."
            )


def closure_error(where: str, optimizer: torch.optim.Optimizer) -> TaskError:
    """The error of a step that would compute its gradient itself, any number of times."""
    return TaskError(
        f"{where}: expected an optimizer that steps with the gradient that is there, of the step's own samples and in a known "
        f"time; got {type(optimizer).__name__} with a closure, which computes it again. Use one without a closure, such as the "
        "base of sharpness-aware minimisation, or write a training loop of your own, without Loop."
    )


def checked_loss(task: Task, loss: Loss, samples: int) -> Loss:
    """What a task's `loss` returned.

    Raises:
        TaskError: it is no loss.
    """
    where = f"{name_of(task)}.loss"
    if not isinstance(loss, Loss):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TaskError(
            f"{where}: expected Loss(total, denominator), got {type(loss).__name__}{shape}. "
            "Write Loss(cross_entropy(..., reduction='sum'), len(labels)); with class weights, weights[labels].sum() instead "
            "of len(labels)."
        )
    if not isinstance(loss.total, Tensor) or loss.total.dim() != 0:
        shape = str(tuple(loss.total.shape)) if isinstance(loss.total, Tensor) else type(loss.total).__name__
        raise TaskError(
            f"{where}: expected a scalar sum over {samples} samples, got shape {shape}. Use reduction='sum'."
        )
    if isinstance(loss.denominator, Tensor) and loss.denominator.dim() != 0:
        raise TaskError(
            f"{where}: expected a denominator for the whole batch, a number or a scalar tensor; got shape "
            f"{tuple(loss.denominator.shape)}. Sum it over the batch."
        )
    if loss.total.is_complex() or (isinstance(loss.denominator, Tensor) and not _counts(loss.denominator)):
        raise TaskError(
            f"{where}: expected real numbers, got {loss.total.dtype} and {_kind(loss.denominator)}"
        )
    # It only counts: no gradient is of it.
    if isinstance(loss.denominator, Tensor) and loss.denominator.requires_grad:
        return checked_loss(task, Loss(loss.total, loss.denominator.detach()), samples)
    if not isinstance(loss.denominator, Tensor):
        denominator = number_of(f"{where}: denominator", loss.denominator)
        if not (math.isfinite(denominator) and denominator >= 0):
            raise TaskError(
                f"{where}: expected a denominator >= 0 that the mean divides by, got {shown(denominator)}"
            )
        if type(loss.denominator) not in (int, float):
            return checked_loss(task, Loss(loss.total, denominator), samples)
    if not loss.total.requires_grad:
        raise TaskError(
            f"{where}: expected a total that depends on the model's parameters, got one without a graph"
        )
    return loss


def _counts(tensor: Tensor) -> bool:
    """Whether a tensor holds a number, as far as its type says: reading its value would wait for the device."""
    return tensor.numel() == 1 and not tensor.is_complex() and tensor.dtype != torch.bool


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else shown(value)


def checked_score(where: str, score: Score) -> Score:
    """A score of two numbers or tensors of one, whose values are read later.

    Raises:
        TaskError: a part is none.
    """

    def checked(part: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return number_of(f"{where}: {part}", value)
        if not _counts(value):
            got = f"{shown(value)}, {value.dtype}"
            raise TaskError(
                f"{where}: {part}: expected a number or a tensor of one, got {got}. Sum it over the batch."
            )
        return value

    return Score(checked("total", score.total), checked("denominator", score.denominator), score.of)


def named_scores(task: Task, scores: Any) -> Mapping[str, Score | WholeSet]:
    """The scores that a task's `score` returned, by name.

    Raises:
        TaskError: no scores.
    """
    if isinstance(scores, Score | WholeSet):
        return {"accuracy": scores}
    if isinstance(scores, Mapping) and all(isinstance(score, Score | WholeSet) for score in scores.values()):
        if fault := name_fault("scores", scores):
            raise TaskError(f"{name_of(task)}.score: {fault}")
        return scores
    got = type(scores).__name__
    if isinstance(scores, Mapping):
        got = next(
            f"{name}: {type(score).__name__}"
            for name, score in scores.items()
            if not isinstance(score, Score | WholeSet)
        )
    raise TaskError(
        f"{name_of(task)}.score: expected Score(total, denominator), WholeSet(metric, outputs, targets) or a dict of them, got "
        f"{got}"
    )


def check_optimizer(where: str, optimizer: Any, setup: TrialSetup) -> None:
    """Check that the optimizer uses the scaling rule's settings in at least one group; other groups may use fractions of them.

    Raises:
        TaskError: no group does; `where` names the code that created the optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"{where}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    groups = optimizer.param_groups
    if not any(math.isclose(float(group["lr"]), setup.learning_rate, rel_tol=1e-6) for group in groups):
        rates = ", ".join(f"{float(group['lr']):.4g}" for group in groups)
        raise TaskError(
            f"{where}: expected a group at setup.learning_rate = {setup.learning_rate:.4g}, got {rates}. "
            "Write lr=setup.learning_rate."
        )
    scaled_by = "rule adam_sde" if setup.rule == "adam_sde" else "training.beta2_scaling: half_life"
    if (setup.rule == "adam_sde" or setup.training.beta2_scaling == "half_life") and not any(
        all(
            math.isclose(a, b, rel_tol=1e-6)
            for a, b in zip(group.get("betas", (0, 0)), setup.betas, strict=True)
        )
        for group in groups
    ):
        raise TaskError(
            f"{where}: {scaled_by}: expected a group with betas=setup.betas = {setup.betas}. "
            "Write betas=setup.betas, eps=setup.eps."
        )
    if setup.rule == "adamw_tau" and not any(
        math.isclose(float(group.get("weight_decay", 0.0)), setup.weight_decay, rel_tol=1e-6)
        for group in groups
    ):
        raise TaskError(
            f"{where}: rule adamw_tau: expected a group with weight_decay=setup.weight_decay = {setup.weight_decay:.4g}. "
            "Write weight_decay=setup.weight_decay."
        )

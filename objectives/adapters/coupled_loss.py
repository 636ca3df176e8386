"""A loss that compares the samples of a batch, in a library's loop: `train_with(..., embed=..., batch_loss=...)`.

    def embed(model, batch, setup):
        return model(**batch["question"]), model(**batch["answer"])

    def batch_loss(model, embeddings, setup):
        questions, answers = embeddings
        return cross_entropy(questions @ answers.T, torch.arange(len(questions)))

They are what a Task's methods of these names are; see `objectives.steps.gradient_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...spaces.errors import TaskError
from ...spaces.trial import TrialSetup
from ..data.batches import to_device
from ..loading import line_of
from ..parallel.data_parallel import Ranks
from ..steps.gradient_cache import EmbeddingsOf, GradientCache

# A model, a batch on its device and the setup: what the loss needs of each sample.
Embed = Callable[[nn.Module, Any, TrialSetup], Any]
# A model, the embeddings of a whole batch and the setup: its mean loss.
BatchLoss = Callable[[nn.Module, Any, TrialSetup], Tensor]


class CoupledLoss:
    """The two functions, called as a Task's methods of these names are."""

    def __init__(self, embed: Embed, batch_loss: BatchLoss) -> None:
        self._embed, self._batch_loss = embed, batch_loss

    def embed(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
        return self._embed(model, batch, setup)

    def batch_loss(self, model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
        return self._batch_loss(model, embeddings, setup)

    def given(
        self,
        prepared: Callable[[nn.Module, Any], Any] = lambda model, batch: batch,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> CoupledLoss:
        """The same loss of batches that are prepared first, given the model; both functions are called in a context."""

        def embed(model: nn.Module, batch: Any, setup: TrialSetup) -> Any:
            with context():
                return self._embed(model, prepared(model, batch), setup)

        def batch_loss(model: nn.Module, embeddings: Any, setup: TrialSetup) -> Tensor:
            with context():
                return self._batch_loss(model, embeddings, setup)

        return CoupledLoss(embed, batch_loss)

    def where(self, setup: TrialSetup) -> str:
        """Where the user has written it, for messages."""
        return f"{line_of(self._embed, setup.folder)}{getattr(self._embed, '__name__', 'embed')}"


# For messages, which name the class that has them.
CoupledLoss.__name__ = "train_with"


def coupled_loss(
    embed: Embed | None, batch_loss: BatchLoss | None, *, couples_samples: bool
) -> CoupledLoss | None:
    """The loss of `train_with`'s arguments; None where it is the library's own.

    Raises:
        TaskError: one of the two functions alone, or with `couples_samples`.
    """
    if embed is None and batch_loss is None:
        return None
    if embed is None or batch_loss is None:
        got = "batch_loss" if embed is None else "embed"
        raise TaskError(f"train_with: expected either neither or both of embed and batch_loss, got {got}")
    if couples_samples:
        raise TaskError(
            "train_with: expected no couples_samples beside embed and batch_loss, which are split exactly. Remove it."
        )
    return CoupledLoss(embed, batch_loss)


class CoupledSteps:
    """Steps of such a loss for a model of the library's loop, on one device.

    Args:
        scaler: of the loop's fp16 gradients; None: there is none.
        autocast: context of the functions, where the loop has none around them.
        on_device: a batch as the loop prepares it; default: on the model's device.
    """

    resident_bytes = 0

    def __init__(
        self,
        task: CoupledLoss,
        model: nn.Module,
        setup: TrialSetup,
        *,
        scaler: Any = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_device: Callable[[Any], Any] | None = None,
    ) -> None:
        self.task, self.model, self.setup, self.ranks = task, model, setup, Ranks()
        self.device = next(model.parameters()).device
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        self.autocast, self.loss = autocast, EmbeddingsOf(task, model, setup)
        self._prepared, self._cache = on_device, GradientCache()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn now: a callback may thaw more."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def on_device(self, batch: Any) -> Any:
        return to_device(batch, self.device) if self._prepared is None else self._prepared(batch)

    def accumulate(self, micro_batches: Sequence[tuple[int, Any]]) -> Tensor:
        """Back-propagate the loss of these micro-batches, pairs of samples and batch; returns it, detached."""
        return self._cache.accumulate(self, micro_batches, sum(samples for samples, _ in micro_batches))

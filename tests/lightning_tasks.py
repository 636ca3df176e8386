"""Tasks of the contract, trained by lightning.Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from bsearch.objectives.adapters.lightning import train_with
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from trainer_contract import (
    CLASS_WEIGHTS,
    CONTRASTED,
    LOG,
    Net,
    Points,
    Slow,
    decay,
    follow,
    remember_groups,
    sampled,
    sgd,
    sharpness_aware,
    troubles,
    weighted_cross_entropy,
    wrongly_contrasted,
)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Points())


class Module(lightning.LightningModule):
    def __init__(
        self, setup: TrialSetup, optimizer: Callable[..., Any] = sgd, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.trial, self.made = setup, optimizer
        self.net = Net(dtype, drop=float(setup.parameters.get("drop", 0.0)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net.logits(batch["x"], batch["index"]), batch["labels"])
        self.log("train_loss", loss)
        if self.trial.parameters.get("ignores"):
            return {"loss": loss, "denominator": (batch["labels"] != -100).sum()}
        return loss

    def validation_step(self, batch: Any) -> None:
        troubles(self.trial)
        self.log("accuracy", (self.net.logits(batch["x"]).argmax(-1) == batch["labels"]).double().mean())

    def configure_optimizers(self) -> Any:
        return self.made(self, self.trial)


def trained(setup: TrialSetup, module: Module, **arguments: Any) -> Iterator[Measurement]:
    dtype, parameters = next(module.parameters()).dtype, setup.parameters
    silent = int(parameters.get("silent", 0))
    points = Points(600, bool(parameters.get("ignores")), dtype, "views" in parameters, silent, setup.seed)
    training: Any = Stream() if setup.parameters.get("stream") else points
    loaders = (
        DataLoader(training, batch_size=64, shuffle=not setup.parameters.get("stream")),
        DataLoader(Points(100, dtype=dtype), batch_size=100),
    )
    yield from train_with(setup, module, data=loaders, **arguments)


def train(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup))


def wrapped(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup, Slow))


def sharp(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup, sharpness_aware))


class Decaying(lightning.Callback):
    steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self.steps += 1
        decay(pl_module, self.steps)


def forgetful(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), callbacks=[Decaying()])


def followed(setup: TrialSetup) -> Iterator[Measurement]:
    yield from follow(trained(setup, Module(setup)))


class Wide(lightning.LightningModule):
    """Its first layer learns once a callback lets it; in training its batches are augmented; its weights come late."""

    def __init__(self, setup: TrialSetup) -> None:
        super().__init__()
        self.trial = setup
        self.layers = nn.Sequential(
            nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 5)
        ).double()
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def on_train_start(self) -> None:
        self.weights = torch.ones(5, device=self.device, dtype=torch.float64)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = torch.randn(20, *batch["x"].shape, device=self.device, dtype=torch.float64)
        return {**batch, "x": batch["x"] + noise.mean(0)} if self.trainer.training else batch

    def training_step(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.layers(batch["x"]), batch["labels"], self.weights)

    def validation_step(self, batch: Any) -> None:
        self.log("accuracy", (self.layers(batch["x"]).argmax(-1) == batch["labels"]).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.trial.learning_rate)


class Thaws(lightning.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers.requires_grad_(True)


def thawing(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Wide(setup), callbacks=[Thaws()])  # type: ignore[arg-type]


class Points600(lightning.LightningDataModule):
    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        self.points = Points()

    def train_dataloader(self) -> Any:
        return DataLoader(self.points, batch_size=7, shuffle=True, drop_last=True, num_workers=0)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(100), batch_size=100)


def data_module(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Module(setup), data=Points600())


class Whole(Module):
    """Brings its loaders, and hooks that see ordinary batches."""

    def train_dataloader(self) -> Any:
        return DataLoader(Points(), batch_size=7, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(100), batch_size=100)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert isinstance(batch["x"], Tensor)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert len(batch["x"]) in (12, 13, 20)  # a pass of the plan, or of the last step


def whole_module(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Whole(setup))


def single(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup, dtype=torch.float32))


def adam(setup: TrialSetup) -> Iterator[Measurement]:
    def adamw(module: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(
            module.parameters(),
            lr=setup.learning_rate,
            betas=setup.betas,
            eps=setup.eps,
            weight_decay=setup.weight_decay,
        )
        return remember_groups(made)

    yield from trained(setup, Module(setup, adamw))


def own_schedule(setup: TrialSetup) -> Iterator[Measurement]:
    def both(module: nn.Module, setup: TrialSetup) -> Any:
        optimizer = sgd(module, setup)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    yield from trained(setup, Module(setup, both))


def own_rate(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(
        setup, Module(setup, lambda module, setup: torch.optim.SGD(module.parameters(), lr=0.125))
    )


def unvalidated(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(
        setup, Module(setup), data=(DataLoader(Points(), batch_size=64, shuffle=True), None)
    )


def arguments(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), max_epochs=3, accumulate_grad_batches=2)


class OwnClipping(Module):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        raise AssertionError("never called")


def own_clipping(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, OwnClipping(setup))


class Weighted(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = weighted_cross_entropy(self.net.logits(batch["x"], batch["index"]), batch["labels"])
        return {"loss": loss, "denominator": CLASS_WEIGHTS[batch["labels"]].sum()}


def weighted(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Weighted(setup))


def coupled(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), couples_samples=True)


class Adversaries(lightning.LightningModule):
    """Two nets with an optimizer each, stepped in turn by hand; `forgets` leaves out all steps."""

    automatic_optimization = False

    def __init__(self, setup: TrialSetup) -> None:
        super().__init__()
        self.trial = setup
        self.net, self.critic = (
            Net(drop=0.2),
            nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_net, of_critic = self.optimizers()  # type: ignore[misc]
        x = batch["x"]
        self.toggle_optimizer(of_critic)
        loss = (self.critic(self.net.layers(x).detach()) - batch["labels"][:, None]).square().mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        if not self.trial.parameters.get("forgets"):
            of_critic.step()
        self.untoggle_optimizer(of_critic)
        of_net.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net.logits(x, batch["index"]), batch["labels"]))
        if not self.trial.parameters.get("forgets"):
            of_net.step()

    def validation_step(self, batch: Any) -> None:
        self.log("accuracy", (self.net.logits(batch["x"]).argmax(-1) == batch["labels"]).double().mean())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.critic.parameters(), lr=0.003)
        return [sgd(self.net, self.trial), adam]


def adversaries(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Adversaries(setup))  # type: ignore[arg-type]


class WideAdversaries(Adversaries):
    """Can be traced: it remembers nothing."""

    def __init__(self, setup: TrialSetup) -> None:
        super().__init__(setup)
        self.net.layers = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 5)).double()
        self.net.logits = lambda x, index=None: self.net.layers(x)  # type: ignore[method-assign]

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.critic.parameters(), lr=0.003)
        return [torch.optim.SGD(self.net.parameters(), lr=self.trial.learning_rate, momentum=0.9), adam]


def wide_adversaries(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, WideAdversaries(setup))  # type: ignore[arg-type]


def contrasted(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), **CONTRASTED)


def contrasted_wrong(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), **wrongly_contrasted(setup))


class Skipping(Module):
    """Skips what Lightning lets it skip: batches in `training_step`, or an epoch's rest."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.trial.parameters["skips"] == "epoch" and self.global_step == 3 else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trial.parameters["skips"] == "batch" and batch_idx == 3:
            return None
        if self.trial.parameters["skips"] == "negative":
            return {"loss": super().training_step(batch, batch_idx), "denominator": torch.tensor(-2.0)}
        return super().training_step(batch, batch_idx)


def skipping(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Skipping(setup))


class Stops(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        trainer.should_stop = trainer.global_step == 3


def stops_itself(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), callbacks=Stops())


def hidden_schedule(setup: TrialSetup) -> Iterator[Measurement]:
    def scheduled(module: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        optimizer = sgd(module, setup)
        torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return optimizer

    yield from trained(setup, Module(setup, scheduled))


def refused_callbacks() -> list[lightning.Callback]:
    named = lightning.pytorch.callbacks
    return [
        named.EarlyStopping("accuracy"),
        named.StochasticWeightAveraging(0.1),
        named.GradientAccumulationScheduler({0: 2}),
        named.BatchSizeFinder(),
        named.LearningRateFinder(),
        named.BackboneFinetuning(),
    ]


def own_callbacks(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Module(setup), callbacks=refused_callbacks())


class BringsCallbacks(Module):
    def configure_callbacks(self) -> Any:
        return refused_callbacks()[:1]


def callbacks_of_the_module(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, BringsCallbacks(setup))


class Reading(Module):
    """Remembers what it reads of its Trainer."""

    def read(self, where: str) -> None:
        trainer = self.trainer
        assert trainer.current_epoch == self.current_epoch and trainer.global_step == self.global_step
        counts = trainer.max_epochs, trainer.estimated_stepping_batches
        LOG.read.append((where, self.global_step, self.current_epoch, *counts))

    def configure_optimizers(self) -> Any:
        self.read("optimizer")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read("step")
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.read("validation")


def reading(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Reading(setup))


def reading_with_data_module(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, Reading(setup), data=Points600())


class Sampled600(Points600):
    sampling: str

    def train_dataloader(self) -> Any:
        return sampled(self.points, self.sampling)


def sampled_loader(setup: TrialSetup) -> Iterator[Measurement]:
    loaders = sampled(Points(), str(setup.parameters["sampling"])), DataLoader(Points(100), batch_size=100)
    yield from train_with(setup, Module(setup), loaders)


def sampled_data_module(setup: TrialSetup) -> Iterator[Measurement]:
    data = Sampled600()
    data.sampling = str(setup.parameters["sampling"])
    yield from train_with(setup, Module(setup), data)


class SampledModule(Module):
    def train_dataloader(self) -> Any:
        return sampled(Points(), str(self.trial.parameters["sampling"]))

    def val_dataloader(self) -> Any:
        return DataLoader(Points(100), batch_size=100)


def sampled_module(setup: TrialSetup) -> Iterator[Measurement]:
    yield from train_with(setup, SampledModule(setup))

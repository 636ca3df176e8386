"""Tasks of the contract, trained by transformers.Trainer."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from bsearch.objectives.adapters.huggingface import train_with
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
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
from transformers import (
    BatchEncoding,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)


class Plain(Net):
    """Takes no number of items: its loss is the mean over the pass."""

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Deaf(Plain):
    """Takes whatever it is given and uses none of it, as many models of the library do."""

    def forward(
        self, x: Tensor, labels: Tensor, index: Tensor | None = None, **ignored: Any
    ) -> dict[str, Tensor]:
        return super().forward(x, labels, index)


class Dividing(Net):
    """Divides its summed loss by the step's number of labels, which the Trainer counts."""

    def forward(
        self,
        x: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        num_items_in_batch: Any = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        if num_items_in_batch is None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return {
            "loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch,
            "logits": logits,
        }


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Points())


class OwnLoss(Trainer):
    """A user's own subclass, whose loss is its own."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class Labelless(Net):
    """Leaves its loss to the Trainer."""

    def forward(
        self, x: Tensor, labels: Tensor | None = None, index: Tensor | None = None
    ) -> dict[str, Tensor]:
        return {"logits": self.logits(x, index)}


class Mixed(Net):
    """A loss with terms of both kinds, as models with experts have: its summed part alone knows of the step."""

    def forward(
        self,
        x: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        num_items_in_batch: Any = None,
        **more: Any,
    ) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        items = len(labels) if num_items_in_batch is None else num_items_in_batch
        summed = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": summed / items + 0.3 * logits.square().mean(), "logits": logits}


def mixed(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Mixed())


class Weighted(Net):
    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.logits(x, index)
        return {"loss": weighted_cross_entropy(logits, labels), "logits": logits}


def class_weights(batch: Any) -> Tensor:
    labels = batch["labels"]
    return (CLASS_WEIGHTS[labels.clamp_min(0)] * (labels != -100)).sum()


def weighted(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Weighted(), denominator=class_weights)


def weighted_function(setup: TrialSetup) -> Iterator[Measurement]:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return weighted_cross_entropy(outputs["logits"], labels)

    yield from trained(setup, Labelless(), compute_loss_func=loss, denominator=class_weights)


def negative(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Weighted(), denominator=lambda batch: -1)


def coupled(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), couples_samples=True)


def contrasted(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), **CONTRASTED)


class LearningLoss(Trainer):
    """A user's own subclass, whose loss has a weight that no model holds."""

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        return optimizer


def learning_loss(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), LearningLoss)


class OwnArguments(TrainingArguments):
    """Of a library's own trainer, which wants no other."""

    def __init__(self, *args: Any, prompts: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self.prompts = prompts


class OwnBatches(BatchSampler):
    """A library's default, that samples as torch's does."""

    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__(RandomSampler(dataset), size, drop_last=False)


class LibrarysTrainer(Trainer):
    training_args_class = OwnArguments

    def __init__(self, *, args: Any, **more: Any) -> None:
        assert isinstance(args, OwnArguments) and args.prompts == "query: "
        super().__init__(args=args, **more)

    def get_train_dataloader(self) -> Any:
        return DataLoader(
            self.train_dataset, batch_sampler=OwnBatches(self.train_dataset, 8), collate_fn=self.data_collator
        )  # type: ignore[arg-type]


def librarys(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), LibrarysTrainer, arguments={"prompts": "query: "})


class OwnStep(Trainer):
    """A user's own step, which a loss over embeddings would replace."""

    def training_step(self, *args: Any, **more: Any) -> Any:
        return super().training_step(*args, **more)


def contrasted_wrong(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), OwnStep, **wrongly_contrasted(setup), denominator=len)


class Encoded(UserDict[str, Any]):
    """A batch of a user's own kind."""


def encoded(setup: TrialSetup) -> Iterator[Measurement]:
    kind = Encoded if setup.parameters["kind"] == "user" else BatchEncoding
    net = Dividing() if setup.parameters["divides"] else Plain()
    yield from trained(setup, net, data_collator=lambda samples: kind(default_data_collator(samples)))


class OwnLoader(Trainer):
    sampling: str
    prepares = False

    def get_train_dataloader(self) -> Any:
        loader = sampled(self.train_dataset, self.sampling)
        return self.accelerator.prepare(loader) if self.prepares else loader


def sampled_by_loader(setup: TrialSetup) -> Iterator[Measurement]:
    trainer = type("Sampling", (OwnLoader,), {"sampling": setup.parameters["sampling"]})
    yield from trained(setup, Plain(), trainer)


def sampled_by_prepared_loader(setup: TrialSetup) -> Iterator[Measurement]:
    trainer = type("Sampling", (OwnLoader,), {"sampling": setup.parameters["sampling"], "prepares": True})
    yield from trained(setup, Plain(), trainer)


def sampled_by_trainer(setup: TrialSetup) -> Iterator[Measurement]:
    class OwnSampler(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return sampled(self.train_dataset, str(setup.parameters["sampling"])).sampler

    yield from trained(setup, Plain(), OwnSampler)


def many_faults(setup: TrialSetup) -> Iterator[Measurement]:
    net = Plain()
    optimizer = sgd(net, setup)
    yield from trained(
        setup,
        net,
        arguments={"seed": 1},
        callbacks=[EarlyStoppingCallback(2)],
        optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)),
    )


def hidden_schedule(setup: TrialSetup) -> Iterator[Measurement]:
    net = Plain()
    optimizer = sgd(net, setup)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    yield from trained(setup, net, optimizers=(optimizer, None))


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == 3


def stops_itself(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), callbacks=[Stops()])


class Sizes(TrainerCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        LOG.read.append(args.per_device_eval_batch_size)


def evaluated(setup: TrialSetup) -> Iterator[Measurement]:
    """Validation data of which the first eight samples have no label that counts; some others have none, too."""
    given = {name: value for name, value in setup.parameters.items() if name == "per_device_eval_batch_size"}
    kind = {"plain": Plain, "dividing": Dividing, "weighted": Weighted}[str(setup.parameters["kind"])]
    yield from trained(
        setup,
        kind(),
        eval_dataset=Points(100, ignores=True, silent=8),
        compute_metrics=None,
        arguments=given,
        callbacks=[Sizes()],
        denominator=class_weights if kind is Weighted else None,
    )


def own_evaluation(setup: TrialSetup) -> Iterator[Measurement]:
    """Metrics of the user's own: a loss, or batch by batch, or from the batches' losses."""
    kind, seen = setup.parameters["kind"], []

    def metrics(evaluation: Any, compute_result: bool = True) -> dict[str, float]:
        seen.append(len(evaluation.label_ids))
        if kind == "losses":
            assert evaluation.losses is not None
        return {"accuracy": 0.5, **({"loss": 7.0} if kind == "loss" else {"seen": float(sum(seen))})}

    arguments = {
        "loss": {},
        "batches": {"batch_eval_metrics": True},
        "losses": {"include_for_metrics": ["loss"]},
    }
    yield from trained(setup, Plain(), compute_metrics=metrics, arguments=arguments[str(kind)])


class Groups(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        remember_groups(optimizer)


def trained(
    setup: TrialSetup, net: Net, trainer: type = Trainer, own: bool = True, **parts: Any
) -> Iterator[Measurement]:
    def accuracy(evaluation: Any) -> dict[str, float]:
        troubles(setup)
        return {"accuracy": float((evaluation.predictions.argmax(-1) == evaluation.label_ids).mean())}

    dtype, parameters = next(net.parameters()).dtype, setup.parameters
    silent = int(parameters.get("silent", 0))
    points = Points(600, bool(parameters.get("ignores")), dtype, "views" in parameters, silent, setup.seed)
    usual = {
        "train_dataset": Stream() if parameters.get("stream") else points,
        "eval_dataset": Points(100, dtype=dtype),
        "compute_metrics": accuracy,
        "optimizers": (sgd(net, setup) if own else None, None),
    }
    yield from train_with(setup, trainer, model=net, **{**usual, **parts})


def train(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(drop=float(setup.parameters.get("drop", 0.0))))


def wrapped(setup: TrialSetup) -> Iterator[Measurement]:
    net = Plain()
    yield from trained(setup, net, optimizers=(Slow(net, setup), None))


def sharp(setup: TrialSetup) -> Iterator[Measurement]:
    net = Plain()
    yield from trained(setup, net, optimizers=(sharpness_aware(net, setup), None))


class Decaying(TrainerCallback):
    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self.steps += 1
        decay(model, self.steps)


def forgetful(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), callbacks=[Decaying()])


class Averaging(Trainer):
    """Averages a metric over batches, as TRL's trainers do."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **more)
        with torch.no_grad():
            chosen = logits.argmax(-1) if logits is not None else model(**inputs)["logits"].argmax(-1)
        self.batches.append(float((chosen == inputs["labels"]).double().mean().square()))
        return loss, logits, labels

    def evaluate(self, *args: Any, **more: Any) -> dict[str, float]:
        self.batches: list[float] = []
        return {**super().evaluate(*args, **more), "eval_squared": sum(self.batches) / len(self.batches)}


def averaging(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), Averaging)


def followed(setup: TrialSetup) -> Iterator[Measurement]:
    yield from follow(trained(setup, Plain()))


def deaf(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Deaf())


def dividing(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Dividing())


def own_loss(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Dividing(), OwnLoss)


class Teacher(Trainer):
    """Its teacher's outputs are not under the autocast that Accelerate puts around the model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"].float(), inputs["labels"])
        teacher = nn.functional.linear(inputs["x"].float(), torch.ones(2000, 6)).log_softmax(-1)
        total = (
            nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
            + teacher.sum() * 0
        )
        loss = total / num_items_in_batch.to(total.device)
        return (loss, outputs) if return_outputs else loss


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 500), nn.ReLU(), nn.Linear(500, 5))

    def forward(self, x: Tensor, labels: Tensor, **more: Any) -> dict[str, Tensor]:
        return {"logits": self.layers(x)}


def taught(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Student(), Teacher, own=False)  # type: ignore[arg-type]


def loss_function(setup: TrialSetup) -> Iterator[Measurement]:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    yield from trained(setup, Labelless(), compute_loss_func=summed)


def single(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(torch.float32))


def adam(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(setup, Plain(), own=False, callbacks=[Groups()])


def arguments(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trained(
        setup, Plain(), arguments={"learning_rate": 1.0, "num_train_epochs": 3, "output_dir": "here"}
    )


def pixels(setup: TrialSetup) -> Iterator[Measurement]:
    """One of the library's own models for images."""
    config = ViTConfig(
        image_size=4, patch_size=2, num_channels=1, num_labels=5, hidden_size=16, intermediate_size=16
    )
    config.num_hidden_layers, config.num_attention_heads = 1, 2
    yield from of_the_library(setup, ViTForImageClassification(config), Images())


def words(setup: TrialSetup, trainer: type = Trainer) -> Iterator[Measurement]:
    """One of its language models: labels are shifted, and texts of different length hold different numbers of them."""
    yield from of_the_library(setup, language_model(), Texts(), trainer)


def language_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    return GPT2LMHeadModel(config)


class OwnMean(Trainer):
    """A user's own subclass that lets the model compute its mean, over the labels of the micro-batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def own_words(setup: TrialSetup) -> Iterator[Measurement]:
    yield from words(setup, OwnMean)


def numbers(setup: TrialSetup) -> Iterator[Measurement]:
    """One that takes the number of items and does not divide by it: a regression's squared error."""
    config = ViTConfig(
        image_size=4, patch_size=2, num_channels=1, num_labels=1, hidden_size=16, intermediate_size=16
    )
    config.num_hidden_layers, config.num_attention_heads, config.problem_type = 1, 2, "regression"
    yield from of_the_library(setup, ViTForImageClassification(config), Images(torch.float32))


class Images(Dataset[Any]):
    def __init__(self, kind: torch.dtype = torch.int64) -> None:
        self.points, self.kind = Points(dtype=torch.float32), kind

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = self.points[index]
        return {
            "pixel_values": point["x"].repeat(3)[:16].view(1, 4, 4),
            "labels": point["labels"].to(self.kind),
        }


class Texts(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.words = torch.randint(1, 11, (600, 8), generator=generator)
        self.lengths = torch.randint(2, 9, (600,), generator=generator)

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.words[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.words[index], "labels": labels}


def of_the_library(
    setup: TrialSetup, model: Any, data: Any, trainer: type = Trainer
) -> Iterator[Measurement]:
    given = {name: value for name, value in setup.parameters.items() if name == "per_device_eval_batch_size"}
    yield from train_with(
        setup,
        trainer,
        arguments=given,
        model=model,
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(50)),
        optimizers=(sgd(model, setup), None),
    )

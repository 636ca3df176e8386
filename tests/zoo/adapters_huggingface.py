"""Trainings by transformers.Trainer, each with a model of the library, small and without dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.adapters.huggingface import train_with
from bsearch.spaces.trial import Measurement, TrialSetup
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)
from zoo.plain import RATE, Step, digits, trained, whole
from zoo.text import IGNORED, TAGS, WORDS, sentences

TAG_WEIGHTS = torch.tensor([0.2, 1.0, 4.0, 1.0, 2.0])


def bert(kind: type, labels: int) -> Any:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=labels,
    )
    torch.manual_seed(0)
    return kind(config)


def sgd(model: nn.Module, setup: TrialSetup) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.SGD(model.parameters(), lr=setup.learning_rate, momentum=0.9), None


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


class Texts(Dataset[Any]):
    """Tokenized sentences, padded to sixteen words, with what `labels` makes of them."""

    def __init__(self, part: slice, labels: Any) -> None:
        self.words, self.tags = (values[part] for values in sentences())
        self.labels = labels

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        padding = 16 - len(words)
        return {
            "input_ids": F.pad(words, (0, padding)),
            "attention_mask": F.pad(torch.ones_like(words), (0, padding)),
            "labels": self.labels(words, self.tags[index], padding),
        }


def kind_of(words: Tensor, tags: Tensor, padding: int) -> Tensor:
    return words.sum() % 3


def tags_of(words: Tensor, tags: Tensor, padding: int) -> Tensor:
    return F.pad(tags, (0, padding), value=IGNORED)


def next_words(words: Tensor, tags: Tensor, padding: int) -> Tensor:
    return F.pad(words, (0, padding), value=IGNORED)


def few_tags(words: Tensor, tags: Tensor, padding: int) -> Tensor:
    """Few sentences are annotated: those that begin with one of three words."""
    return F.pad(tags if 6 <= words[0] <= 8 else torch.full_like(tags, IGNORED), (0, padding), value=IGNORED)


def trainings(
    setup: TrialSetup, model: Any, labels: Any, trainer: type[Trainer] = Trainer, **more: Any
) -> Iterator[Measurement]:
    yield from train_with(
        setup,
        trainer,
        model=model,
        train_dataset=Texts(slice(0, 400), labels),
        eval_dataset=Texts(slice(400, 500), labels),
        optimizers=sgd(model, setup),
        **more,
    )


@cache
def batch_of(labels: Any) -> dict[str, Tensor]:
    rows = [*Texts(slice(0, 400), labels)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def logits_of(model: Any, labels: Any, step: Step) -> tuple[Tensor, Tensor]:
    batch = {name: values[whole(step)] for name, values in batch_of(labels).items()}
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]


# Sentences


def classifier(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trainings(setup, bert(BertForSequenceClassification, 3), kind_of)


def classified(steps: Sequence[Step]) -> list[float]:
    model = bert(BertForSequenceClassification, 3)
    return trained(plain_sgd(model), steps, lambda step: F.cross_entropy(*logits_of(model, kind_of, step)))


# Language


def llama() -> Any:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def language(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trainings(setup, llama(), next_words)


def spoken(steps: Sequence[Step]) -> list[float]:
    model = llama()

    def loss(step: Step) -> Tensor:
        logits, labels = logits_of(model, next_words, step)
        known = labels[:, 1:] != IGNORED
        return F.cross_entropy(logits[:, :-1][known], labels[:, 1:][known])

    return trained(plain_sgd(model), steps, loss)


# Tokens


class WeightedTrainer(Trainer):
    """As the library's documentation shows a loss with class weights."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        criterion = nn.CrossEntropyLoss(weight=TAG_WEIGHTS.to(labels.device))
        loss = criterion(outputs.logits.view(-1, TAGS), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


def weighted_tokens(setup: TrialSetup) -> Iterator[Measurement]:
    yield from trainings(setup, bert(BertForTokenClassification, TAGS), tags_of, WeightedTrainer)


def weight_of(batch: Any) -> Tensor:
    labels = batch["labels"]
    return TAG_WEIGHTS.to(labels.device)[labels[labels != IGNORED]].sum()


def declared_weights(setup: TrialSetup) -> Iterator[Measurement]:
    model = bert(BertForTokenClassification, TAGS)
    yield from trainings(setup, model, tags_of, WeightedTrainer, denominator=weight_of)


def weighted(steps: Sequence[Step]) -> list[float]:
    model = bert(BertForTokenClassification, TAGS)

    def loss(step: Step) -> Tensor:
        logits, labels = logits_of(model, tags_of, step)
        known = labels != IGNORED
        weights = TAG_WEIGHTS[labels[known]]
        losses = -logits[known].log_softmax(1).gather(1, labels[known][:, None])[:, 0]
        return (weights * losses).sum() / weights.sum()

    return trained(plain_sgd(model), steps, loss)


def few_labels(setup: TrialSetup) -> Iterator[Measurement]:
    """Most sentences have no label at all, and so have some micro-batches."""
    yield from trainings(setup, bert(BertForTokenClassification, TAGS), few_tags)


def few_labelled(steps: Sequence[Step]) -> list[float]:
    model = bert(BertForTokenClassification, TAGS)

    def loss(step: Step) -> Tensor:
        logits, labels = logits_of(model, few_tags, step)
        return F.cross_entropy(logits[labels != IGNORED], labels[labels != IGNORED])

    return trained(plain_sgd(model), steps, loss)


# Pairs


class Captioned(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        images, labels = digits()
        self.images, self.labels = images[part], labels[part]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = int(self.labels[index])
        words = torch.tensor([1, 3 + label, 3 + (label * 7 + index) % 20, 2])  # begins with 1, ends with 2
        image = self.images[index].repeat(3, 1, 1)
        return {"pixel_values": image, "input_ids": words, "attention_mask": torch.ones_like(words)}


def clip_model() -> Any:
    common = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {
        "vocab_size": 30,
        "max_position_embeddings": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CLIPConfig(
        text_config={**common, **special},
        vision_config={**common, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    torch.manual_seed(0)
    return CLIPModel(config)


class Contrastive(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, return_loss=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None


def contrast(setup: TrialSetup, **more: Any) -> Iterator[Measurement]:
    model = clip_model()
    data = {"train_dataset": Captioned(slice(0, 600)), "eval_dataset": Captioned(slice(600, 700))}
    yield from train_with(setup, Contrastive, model=model, optimizers=sgd(model, setup), **data, **more)


def clip(setup: TrialSetup) -> Iterator[Measurement]:
    yield from contrast(setup)


def declared_clip(setup: TrialSetup) -> Iterator[Measurement]:
    yield from contrast(setup, couples_samples=True)


def contrasted(steps: Sequence[Step]) -> list[float]:
    model, data = clip_model(), Captioned(slice(0, 600))

    def loss(step: Step) -> Tensor:
        rows = [data[sample] for sample in whole(step)]
        outputs = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        logits, own = outputs.logits_per_image, torch.arange(len(rows))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return trained(plain_sgd(model), steps, loss)

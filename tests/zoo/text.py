"""Sequences of unequal length: tagged and padded, packed, aligned, predicted; and embeddings whose gradients are sparse."""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from bsearch.objectives.task import Data, Loss, Score, Task
from bsearch.spaces.trial import TrialSetup
from sklearn.metrics import accuracy_score, mean_squared_error
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import Dataset, TensorDataset
from zoo.plain import RATE, Step, trained, whole

WORDS, TAGS, IGNORED = 40, 5, -100


@cache
def sentences() -> tuple[list[Tensor], list[Tensor]]:
    """Words 1 to 39, three to twelve in a sentence, and a tag for each; parts of words have none."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 13, (500,), generator=generator).tolist()
    words = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    tags = [
        torch.where(torch.rand(len(one), generator=generator) < 0.3, IGNORED, (one + one.roll(1)) % TAGS)
        for one in words
    ]
    return words, tags


class Sentences(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        self.words, self.tags = (values[part] for values in sentences())

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.tags[index]


def tagger() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, 16, padding_idx=0), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, TAGS)
    )


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    words, tags = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=IGNORED)


class Tagger(Task):
    """Tokens with ignored labels: padding, and all but the first part of a word."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(Sentences(slice(0, 400)), Sentences(slice(400, 500)), collate=padded)

    def model(self, setup: TrialSetup) -> nn.Module:
        return tagger()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        words, tags = batch
        total = F.cross_entropy(
            model(words).flatten(0, 1), tags.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (tags != IGNORED).sum())

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        words, tags = batch
        known = tags != IGNORED
        return Score((model(words).argmax(-1) == tags)[known].sum(), known.sum())


def tagged(steps: Sequence[Step]) -> list[float]:
    words, tags = sentences()
    torch.manual_seed(0)
    model = tagger()

    def loss(step: Step) -> Tensor:
        logits = torch.cat([model(words[sample]) for sample in whole(step)])  # without any padding
        return F.cross_entropy(logits, torch.cat([tags[sample] for sample in whole(step)]))

    return trained(torch.optim.SGD(model.parameters(), lr=RATE), steps, loss)


def tagged_metrics() -> dict[str, float]:
    words, tags = (torch.cat(part[400:]) for part in sentences())
    torch.manual_seed(0)
    found = tagger()(words).argmax(-1)
    return {"accuracy": accuracy_score(tags[tags != IGNORED].numpy(), found[tags != IGNORED].numpy())}


# Packed


class Reader(nn.Module):
    """The last state of an LSTM says which class a sentence has."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(WORDS, 12), nn.LSTM(12, 16), nn.Linear(16, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        _, (last, _) = self.lstm(packed._replace(data=self.embedding(packed.data)))
        return self.head(last[-1])


class PackedLSTM(Task):
    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[PackedSequence, Tensor]:
            words = [one for one, _ in samples]
            return pack_sequence(words, enforce_sorted=False), torch.stack([one.sum() % 3 for one in words])

        return Data(Sentences(slice(0, 400)), Sentences(slice(400, 500)), collate=collate)

    def model(self, setup: TrialSetup) -> nn.Module:
        return Reader()


def packed(steps: Sequence[Step]) -> list[float]:
    words, _ = sentences()
    torch.manual_seed(0)
    model = Reader()

    def loss(step: Step) -> Tensor:
        # One sentence at a time.
        logits = torch.cat([model(pack_sequence([words[sample]])) for sample in whole(step)])
        return F.cross_entropy(logits, torch.stack([words[sample].sum() % 3 for sample in whole(step)]))

    return trained(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True), steps, loss)


def packed_metrics() -> dict[str, float]:
    words = sentences()[0][400:]
    torch.manual_seed(0)
    model = Reader()
    logits = torch.cat([model(pack_sequence([one])) for one in words]).detach()
    right = torch.stack([one.sum() % 3 for one in words])
    return {
        "accuracy": accuracy_score(right, logits.argmax(1)),
        "val_loss": float(F.cross_entropy(logits, right)),
    }


# Aligned


@cache
def recordings() -> tuple[list[Tensor], list[Tensor]]:
    """Frames of 6 numbers, 8 to 20 in a recording, and the 1 to 4 letters that were said."""
    generator = torch.Generator().manual_seed(8)
    frames, letters = [], []
    for _ in range(400):
        said = torch.randint(
            1, 6, (int(torch.randint(1, 5, (1,), generator=generator)),), generator=generator
        )
        length = int(torch.randint(8, 21, (1,), generator=generator))
        spoken = F.one_hot(said[torch.arange(length) * len(said) // length], 6)
        frames.append(spoken + 0.5 * torch.randn(length, 6, generator=generator))
        letters.append(said)
    return frames, letters


class Recordings(Dataset[Any]):
    def __init__(self, part: slice) -> None:
        self.frames, self.letters = (values[part] for values in recordings())

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index], self.letters[index]


def listener() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6))


class CTC(Task):
    """Letters without times, their lengths beside them, concatenated as `ctc_loss` likes them."""

    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            frames, letters = zip(*samples, strict=True)
            return {
                "frames": pad_sequence(frames),
                "letters": torch.cat(letters),
                "frame_lengths": torch.tensor([len(one) for one in frames]),
                "letter_lengths": torch.tensor([len(one) for one in letters]),
            }

        return Data(Recordings(slice(0, 300)), Recordings(slice(300, 400)), collate=collate)

    def model(self, setup: TrialSetup) -> nn.Module:
        return listener()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        log_probabilities = model(batch["frames"]).log_softmax(-1)
        lengths = batch["letter_lengths"]
        losses = F.ctc_loss(
            log_probabilities, batch["letters"], batch["frame_lengths"], lengths, reduction="none"
        )
        return Loss((losses / lengths).sum(), len(lengths))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        loss = self.loss(model, batch, setup)
        return {"ctc": Score(loss.total, loss.denominator)}


def ctc_mean(model: nn.Module, samples: Sequence[int]) -> Tensor:
    frames, letters = recordings()
    log_probabilities = model(pad_sequence([frames[sample] for sample in samples])).log_softmax(-1)
    targets = pad_sequence([letters[sample] for sample in samples], batch_first=True)
    lengths = [tuple(len(values[sample]) for sample in samples) for values in (frames, letters)]
    return F.ctc_loss(log_probabilities, targets, *lengths, reduction="mean")


def aligned(steps: Sequence[Step]) -> list[float]:
    torch.manual_seed(0)
    model = listener()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    return trained(optimizer, steps, lambda step: ctc_mean(model, whole(step)))


def aligned_metrics() -> dict[str, float]:
    torch.manual_seed(0)
    return {"ctc": float(ctc_mean(listener(), range(300, 400)).detach())}


# Predicted


class Bigrams(nn.Module):
    """A small language model whose input and output embeddings are the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        embedded = self.embedding(words)
        return self.head(embedded + self.block(embedded))


class TiedWeights(Task):
    """In double precision, since Adam turns the rounding of a tiny gradient into a whole step."""

    def data(self, setup: TrialSetup) -> Data:
        texts = pad_sequence(sentences()[0], batch_first=True)
        return Data(TensorDataset(texts[:400]), TensorDataset(texts[400:]))

    def model(self, setup: TrialSetup) -> nn.Module:
        return Bigrams().double()

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        (texts,) = batch
        targets = texts[:, 1:]
        total = F.cross_entropy(
            model(texts[:, :-1]).transpose(1, 2), targets, ignore_index=0, reduction="sum"
        )
        return Loss(total, (targets != 0).sum())

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=setup.weight_decay)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        loss = self.loss(model, batch, setup)
        return {"val_loss": Score(loss.total, loss.denominator)}


def predicted_mean(model: nn.Module, samples: Sequence[int]) -> Tensor:
    texts = [sentences()[0][sample] for sample in samples]
    logits = torch.cat([model(text[:-1]) for text in texts])
    return F.cross_entropy(logits, torch.cat([text[1:] for text in texts]))


def tied(steps: Sequence[Step]) -> list[float]:
    torch.manual_seed(0)
    model = Bigrams().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    return trained(optimizer, steps, lambda step: predicted_mean(model, whole(step)))


def tied_metrics() -> dict[str, float]:
    torch.manual_seed(0)
    return {"val_loss": float(predicted_mean(Bigrams().double(), range(400, 500)).detach())}


# Sparse gradients


class Bag(nn.Module):
    """PyTorch's tutorial of text classification: a text is the mean of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(WORDS, 16, sparse=True), nn.Linear(16, 3)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.embedding(text, offsets))


class SparseBag(Task):
    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
            texts = [words for words, _ in samples]
            offsets = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
            return torch.stack([text.sum() % 3 for text in texts]), torch.cat(texts), offsets

        return Data(Sentences(slice(0, 400)), Sentences(slice(400, 500)), collate=collate)

    def model(self, setup: TrialSetup) -> nn.Module:
        return Bag()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=setup.learning_rate)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        labels, text, offsets = batch
        return Loss(F.cross_entropy(model(text, offsets), labels, reduction="sum"), len(labels))

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        labels, text, offsets = batch
        return Score((model(text, offsets).argmax(1) == labels).sum(), len(labels))


def bagged(steps: Sequence[Step]) -> list[float]:
    words, _ = sentences()
    torch.manual_seed(0)
    model = Bag()
    table = model.embedding.weight

    def loss(step: Step) -> Tensor:
        means = torch.stack([table[words[sample]].mean(0) for sample in whole(step)])
        return F.cross_entropy(
            model.head(means), torch.stack([words[sample].sum() % 3 for sample in whole(step)])
        )

    return trained(torch.optim.SGD(model.parameters(), lr=RATE), steps, loss)


USERS, FILMS = 60, 80


@cache
def ratings() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    users, films = (torch.randint(0, many, (800,), generator=generator) for many in (USERS, FILMS))
    tastes, kinds = (
        torch.randn(many, 3, generator=generator, dtype=torch.float64) for many in (USERS, FILMS)
    )
    return users, films, (tastes[users] * kinds[films]).sum(1) + 3


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = (nn.Embedding(many, 8, sparse=True) for many in (USERS, FILMS))

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        return (self.users(users) * self.films(films)).sum(1)


class Recommender(Task):
    """Matrix factorisation: a step touches a few rows, which SparseAdam alone updates. High ratings count more."""

    def data(self, setup: TrialSetup) -> Data:
        return Data(
            *(
                TensorDataset(*(values[part] for values in ratings()))
                for part in (slice(0, 600), slice(600, 800))
            )
        )

    def model(self, setup: TrialSetup) -> nn.Module:
        return Factors().double()

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(model.parameters(), lr=setup.learning_rate)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        users, films, right = batch
        weights = 1 + 4 * (right > 4).double()
        return Loss((weights * (model(users, films) - right) ** 2).sum(), weights.sum())

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> dict[str, Score]:
        users, films, right = batch
        return {"mse": Score(F.mse_loss(model(users, films), right, reduction="sum"), len(right))}


def recommended(steps: Sequence[Step]) -> list[float]:
    users, films, right = ratings()
    torch.manual_seed(0)
    model = Factors().double()

    def loss(step: Step) -> Tensor:
        counted = [sample for sample in whole(step) for _ in range(5 if right[sample] > 4 else 1)]
        return F.mse_loss(model(users[counted], films[counted]), right[counted])

    return trained(torch.optim.SparseAdam(model.parameters(), lr=RATE), steps, loss)


def recommended_metrics() -> dict[str, float]:
    users, films, right = (values[600:] for values in ratings())
    torch.manual_seed(0)
    return {"mse": mean_squared_error(right, Factors().double()(users, films).detach())}


# Batches by name


class Named(Tagger):
    """Fields are collected in a defaultdict, and stay there."""

    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
            fields: defaultdict[str, Any] = defaultdict(list)
            for words, tags in samples:
                fields["words"].append(words)
                fields["tags"].append(tags)
            fields["words"] = pad_sequence(fields["words"], batch_first=True)
            fields["tags"] = pad_sequence(fields["tags"], batch_first=True, padding_value=IGNORED)
            return fields

        return Data(Sentences(slice(0, 400)), Sentences(slice(400, 500)), collate=collate)

    def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
        return super().loss(model, (batch["words"], batch["tags"]), setup)

    def score(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Score:
        return super().score(model, (batch["words"], batch["tags"]), setup)


class Encoding(UserDict[str, Tensor]):
    """What a tokenizer returns: a mapping that is no dict, and moves to a device itself."""

    def to(self, device: Any) -> Encoding:
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


class Tokenized(Named):
    def data(self, setup: TrialSetup) -> Data:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> Encoding:
            words, tags = padded(samples)
            return Encoding({"words": words, "tags": tags})

        return Data(Sentences(slice(0, 400)), Sentences(slice(400, 500)), collate=collate)

"""A small GPT of your own, on paragraphs of Python's language reference, which comes with Python: a token is a byte."""

import math
from functools import cache
from pydoc_data.topics import topics

import torch
from bsearch import Data, Loss, Score, Task
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

LONGEST, IGNORED = 192, -100


@cache
def paragraphs():
    """Training and validation paragraphs, each a tensor of bytes; every tenth topic is for validation."""
    parts = ([], [])
    for number, (_, text) in enumerate(sorted(topics.items())):
        for paragraph in text.split("\n\n"):
            tokens = torch.tensor(list(" ".join(paragraph.split()).encode()[: LONGEST + 1]))
            if len(tokens) > 32:
                parts[number % 10 == 0].append(tokens)
    return parts


def padded(samples):
    """Paragraphs of several lengths as one batch: tokens, and the next tokens to predict, (n, longest)."""
    pad = nn.utils.rnn.pad_sequence
    return pad([one[:-1] for one in samples], True, 0), pad([one[1:] for one in samples], True, IGNORED)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.Sequential(*(Block(width, heads=width // 16) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.places(places)))


class GPT(Task):
    def data(self, setup):
        train, validation = paragraphs()
        return Data(train, validation, collate=padded, lengths=[len(one) - 1 for one in train], unit="tokens")

    def model(self, setup):
        return Net(setup.parameters["width"], setup.parameters["depth"])

    def optimizer(self, model, setup):
        return torch.optim.AdamW(
            model.parameters(), setup.learning_rate, setup.betas, weight_decay=setup.weight_decay
        )

    def loss(self, model, batch, setup):
        tokens, following = batch
        total = cross_entropy(
            model(tokens).flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return Loss(total, (following != IGNORED).sum())

    def score(self, model, batch, setup):
        loss = self.loss(model, batch, setup)
        return {"bits_per_byte": Score(loss.total / math.log(2), loss.denominator)}

"""A small GPT on text, as nanoGPT trains one: a loop of one's own, with the steps, rates and checkpoints of a trial."""

import torch
import torch.nn.functional as F
from bsearch import Data, Loop
from torch import nn
from torch.utils.data import TensorDataset

CONTEXT = 48


class GPT(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        return self.head(self.blocks(self.tokens(text) + self.places, mask=mask, is_causal=True))


def mean_loss(model, text):
    return F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])


def train(setup):
    with open(setup.path(setup.parameters["text"]), "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held_out = len(rows) // 10
    data = Data(TensorDataset(rows[held_out:]), TensorDataset(rows[:held_out]))
    model = GPT(setup.parameters["width"], depth=2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=setup.betas, weight_decay=setup.weight_decay
    )

    loop = Loop(setup, data, models={"gpt": model}, optimizers={"gpt": optimizer})
    for step in loop:
        for part in step:
            with loop.autocast():
                loss = mean_loss(model, part.batch[0])
            (part.weight * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step.evaluates:
            model.eval()
            with torch.no_grad():
                loss = mean_loss(model, rows[:held_out].to(loop.device))
            model.train()
            yield loop.measure(val_loss=loss)

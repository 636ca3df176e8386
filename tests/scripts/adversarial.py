"""Two optimizers that take turns on each batch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(120, 3)), args.batch_size, shuffle=True)
maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
of_maker, of_judge = (torch.optim.Adam(one.parameters(), lr=args.lr) for one in (maker, judge))
for _ in range(args.epochs):
    for (real,) in loader:
        made = maker(torch.randn(len(real), 2))
        of_judge.zero_grad()
        (judge(made.detach()).mean() - judge(real).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (-judge(made)).mean().backward()
        of_maker.step()
    print("loss_G", float(-judge(made).mean()))

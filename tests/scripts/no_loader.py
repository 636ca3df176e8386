"""Batches by a function of its own."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--max-iters", type=int, default=20)
args = parser.parse_args()
points = torch.randn(120, 3)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _ in range(args.max_iters):
    batch = points[torch.randint(0, 120, (args.batch_size,))]
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
print("val loss", model(points).pow(2).mean().item())

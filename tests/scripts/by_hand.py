"""A rate that the script sets by the number of batches so far."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=10)
parser.add_argument("--learning_rate", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(0)
points = torch.randn(120, 3)
labels = (points[:, 0] > 0).long()
loader = DataLoader(TensorDataset(points, labels), args.batch_size, shuffle=True)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
number, total = 0, args.epochs * len(loader)
for _ in range(args.epochs):
    for inputs, targets in loader:
        if number:
            optimizer.param_groups[0]["lr"] = (
                args.learning_rate * 0.5 * (1 + math.cos(math.pi * number / total))
            )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        number += 1
    with torch.no_grad():
        print("accuracy", (model(points).argmax(1) == labels).float().mean().item())

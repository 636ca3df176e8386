"""An average of the weights that is updated after every batch, and evaluated."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
torch.manual_seed(0)
points = torch.randn(120, 3)
labels = (points[:, 0] > 0).long()
loader = DataLoader(TensorDataset(points, labels), args.batch, shuffle=True)
model = nn.Linear(3, 2)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
for _ in range(args.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
    with torch.no_grad():
        print("accuracy", (average(points).argmax(1) == labels).float().mean().item())

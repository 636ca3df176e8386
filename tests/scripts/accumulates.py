"""Gradients accumulated over batches by the script itself."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(0)
points = torch.randn(120, 3)
labels = (points[:, 0] > 0).long()
loader = DataLoader(TensorDataset(points, labels), args.batch_size, shuffle=True)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for _ in range(args.epochs):
    for number, (inputs, targets) in enumerate(loader):
        (nn.functional.cross_entropy(model(inputs), targets) / 4).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        print("accuracy", (model(points).argmax(1) == labels).float().mean().item())

"""A loss that is a sum over the batch, in a function of its own, and `sys.exit` at the end."""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_one_epoch(model, loader, optimizer):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--num-epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    points = torch.randn(120, 3)
    labels = (points[:, 0] > 0).long()
    loader = DataLoader(TensorDataset(points, labels), args.batch_size, shuffle=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.num_epochs):
        train_one_epoch(model, loader, optimizer)
        model.eval()
        with torch.no_grad():
            print(f"[{epoch}] top1 {100 * (model(points).argmax(1) == labels).float().mean().item():.2f} %")
    sys.exit(0)

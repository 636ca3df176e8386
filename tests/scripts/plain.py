"""Flags, a schedule by epochs, a printed accuracy."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, test):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test:
            correct += model(data).argmax(1).eq(target).sum().item()
    print(f"\nTest set: Accuracy: {correct}/{len(test.dataset)} ({100 * correct / len(test.dataset):.0f}%)\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--test-batch-size", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluate", default="")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    points = torch.randn(300, 4)
    labels = (points.sum(1) > 0).long()
    train = DataLoader(TensorDataset(points[:200], labels[:200]), batch_size=args.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(points[200:], labels[200:]), batch_size=args.test_batch_size)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    if args.evaluate:
        model.load_state_dict(torch.load(args.evaluate, weights_only=True))
        evaluate(model, test)
        return
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for index, (data, target) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            if index % 10 == 0:
                print(
                    f"Train Epoch: {epoch} [{index * len(data)}/{len(train.dataset)}] Loss: {loss.item():.6f}"
                )
        evaluate(model, test)
        scheduler.step()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()

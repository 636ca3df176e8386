"""Nothing to set from outside: its numbers stand in its text, as in tutorials."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
points = torch.randn(300, 4)
labels = (points.sum(1) > 0).long()
train_data, test_data = TensorDataset(points[:200], labels[:200]), TensorDataset(points[200:], labels[200:])
train_loader = DataLoader(train_data, batch_size=16, shuffle=True)
test_loader = DataLoader(test_data, batch_size=64)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)


def train(dataloader):
    model.train()
    for batch, (inputs, targets) in enumerate(dataloader):
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch % 10 == 0:
            loss, current = loss.item(), (batch + 1) * len(inputs)
            print(f"loss: {loss:>7f}  [{current:>5d}/{len(dataloader.dataset):>5d}]")


def evaluate(dataloader):
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in dataloader)
    correct /= len(dataloader.dataset)
    print(f"Test Accuracy: {100 * correct:>0.1f}%")


for t in range(5):
    print(f"Epoch {t + 1}")
    train(train_loader)
    evaluate(test_loader)

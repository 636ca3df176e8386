"""Constants, a schedule by steps, gradients cleared after the step, clipped, and a printed loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 20
LR = 0.01
EPOCHS = 3
CLIP = 1.0

torch.manual_seed(0)
points = torch.randn(200, 3)
data = TensorDataset(points, points.pow(2).sum(1, keepdim=True))
loader = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), LR)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=EPOCHS * (len(loader) + 1))
for group in optimizer.param_groups:
    group["initial_lr"] = LR
for epoch in range(EPOCHS):
    net.train()
    for inputs, targets in loader:
        nn.functional.mse_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    net.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(points[:50]), data.tensors[1][:50])
    print(f"epoch {epoch} val_loss={loss:.4f}")

"""Your own training loop with one extra line: at its end, it prints where its time went and what would help.

python examples/why_slow.py              # to follow its advice: WORKERS=2 python examples/why_slow.py
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import drumline

STEPS, BATCH = 60, 16


class Photos(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)  # a slow disk
        return torch.randn(3, 32, 32), index % 10


torch.manual_seed(0)
loader = DataLoader(Photos(), BATCH, num_workers=int(os.environ.get("WORKERS", 0)))
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
clock = drumline.clock(loader, model, optimizer)  # the one line

for images, labels in loader:
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

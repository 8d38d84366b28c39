"""Plain training scripts, each with one planted problem. Runs the one named as the argument; the verdict is the last
line of stdout, as JSON."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import drumline

case, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
BATCH = 2 if case == "tiny-batch" else 16


class Images(Dataset):
    def __len__(self):
        return BATCH * steps // 2

    def __getitem__(self, index):
        if case.startswith("slow-data"):
            time.sleep(0.002)
        return torch.full((3, 16, 16), index / 100.0), index % 10


def log(step):
    time.sleep(0.02)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3)
        )
        self.head = nn.Linear(32 * 144, 10)

    def forward(self, x):
        if case == "slow-rank" and rank == 1 and self.training:
            time.sleep(0.05)
        if case != "tiny-batch":
            until = time.perf_counter() + 0.0004 * len(x)  # what the model computes
            while time.perf_counter() < until:
                continue
        return self.head(self.features(x).flatten(1))


data = Images()
sampler = DistributedSampler(data) if world > 1 else None
workers = int(case.rpartition("-")[2]) if case.startswith("slow-data") else 0
loader = DataLoader(
    data,
    BATCH,
    sampler=sampler,
    num_workers=workers,
    persistent_workers=workers > 0,
    multiprocessing_context=None,
)
evaluation = DataLoader(data, 16 * BATCH)
model = Net()
model = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
clock = drumline.clock(loader, model, optimizer)

done = 0
for _ in range(100):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if case == "slow-log" and rank == 0:
            log(done)
        done += 1
        if done == steps:
            break
        if case == "interrupted" and done == steps // 2:
            raise KeyboardInterrupt
    model.eval()
    for _round in range({"evaluation": 12, "tiny-batch": 1}.get(case, 0)):
        with torch.no_grad():
            for images, _ in evaluation:
                model(images)
    if done == steps:
        break

if world > 1:
    clock.close()
verdict = clock.verdict()
found = [each.as_dict() for each in verdict.slowdowns]
last = verdict.evidence.intervals[-1]
print(json.dumps({"found": found, "values": last.values, "ranks": last.ranks}))
if world > 1:
    dist.destroy_process_group()

"""Distils a small network into a smaller one, the way many repositories do: student and embedding in a list, the list
in DDP, and then one line "so that indexing works".

    torchrun --nproc-per-node 2 story.py [--guard] [--fixed] [--labels N | --folders] [--seed S]
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import drumline
from drumline.data.sources.arrays import open_digits
from drumline.data.sources.base import DatasetSpec

parser = argparse.ArgumentParser()
parser.add_argument("--guard", action="store_true", help="one line of Drumline")
parser.add_argument(
    "--fixed", action="store_true", help="student and embedding in one module, called through DDP"
)
parser.add_argument("--labels", type=int, default=80, help="training images in all, dealt to the ranks")
parser.add_argument(
    "--folders", action="store_true", help="each rank reads its own classes, as from its own disk"
)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=200)
opt = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def digits(split):
    source = open_digits(DatasetSpec("digits", "", split))
    pixels = torch.from_numpy(source.take(np.arange(len(source)))).permute(0, 3, 1, 2)
    return pixels.float() / 255, torch.from_numpy(source.labels)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


class Pair(nn.Module):
    """The fixed script's module: one forward for all that is trained."""

    def __init__(self, student, embed):
        super().__init__()
        self.student, self.embed = student, embed

    def forward(self, x):
        features, logits = self.student(x)
        return self.embed(features), logits


images, labels = digits("train")
torch.manual_seed(opt.seed)
teacher, student, embed = Net(16), Net(8), nn.Linear(8 * 16, 16 * 16)
fitting = torch.optim.Adam(teacher.parameters(), lr=0.01)
for _ in range(40):
    fitting.zero_grad()
    F.cross_entropy(teacher(images)[1], labels).backward()
    fitting.step()
teacher.eval()

module_list = nn.ModuleList([student, embed])
if opt.fixed:
    trained = DDP(Pair(student, embed))
else:
    module_list = DDP(module_list)
    module_list = module_list.module
    trained = module_list
optimizer = torch.optim.SGD(trained.parameters(), lr=0.02, momentum=0.9)
if opt.guard:
    watch = drumline.guard(trained, optimizer, teacher=teacher)

chosen = torch.randperm(len(labels))[: opt.labels][rank::world]
if opt.folders:
    chosen = torch.arange(len(labels))[labels % world == rank]
loader = DataLoader(
    TensorDataset(images[chosen], labels[chosen]), batch_size=10, shuffle=True, drop_last=True
)
step = 0
while step < opt.steps:
    for x, y in loader:
        step += 1
        with torch.no_grad():
            goal, soft = teacher(x)
        if opt.fixed:
            features, logits = trained(x)
        else:
            features, logits = module_list[0](x)
            features = module_list[1](features)
        loss = F.cross_entropy(logits, y) + 0.1 * F.mse_loss(features, goal)
        loss = loss + F.kl_div(logits.log_softmax(1), soft.softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == opt.steps:
            break

if rank == 0:
    images, labels = digits("eval")
    with torch.no_grad():
        right = (student(images)[1].argmax(1) == labels).float().mean()
    print(f"accuracy {100 * right:.1f}")
dist.destroy_process_group()

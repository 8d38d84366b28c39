"""A plain training script, as anyone writes it, and one mistake in it, named on the command line."""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drumline

mistake = sys.argv[1]
action = sys.argv[2] if len(sys.argv) > 2 else "stop"
unwatched = action == "unwatched"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 10)
        if mistake == "unused":
            self.extra = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(96, 1, 8, 8, generator=generator), torch.arange(96) % 10, torch.arange(96)
    )


torch.manual_seed(0)
net = Net()
teacher = Net().requires_grad_(False).eval()
if mistake == "unwrapped":
    model = net
elif mistake == "buffers":
    model = DDP(net, broadcast_buffers=False)
else:
    model = DDP(net)
dataset = data()
if mistake == "same-samples" or mistake == "same-ids":
    loader = DataLoader(dataset, batch_size=8, shuffle=False)
else:
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
trained = list(model.parameters())
if mistake == "outside":
    trained = trained[:-1]
if mistake == "strangers":
    model.module.head = nn.Linear(4 * 36, 10)
if mistake == "teacher-trained":
    trained += list(teacher.requires_grad_(True).parameters())
temperature = nn.Parameter(torch.ones(()))
if mistake == "loss-parameter":
    trained.append(temperature)
if mistake == "teacher-gradients":
    teacher.requires_grad_(True)
optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 if mistake == "past-end" else 1000)
if mistake == "dead-rate":
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 4))
if mistake == "teacher-train-mode":
    teacher.train()
if mistake == "drift" and rank == 1:
    with torch.no_grad():
        net.conv.weight[0, 0, 0, 0] += 0.5
if mistake == "rate" and rank == 1:
    optimizer.param_groups[0]["lr"] = 0.06

watch = drumline.guard(
    model,
    optimizer,
    teacher=teacher,
    scheduler=scheduler,
    loader=loader,
    action="stop" if unwatched else action,
    hang_seconds=0 if unwatched else 2,
    every=4,
)
if unwatched:
    watch._peers.timeout = 3.0

step = 0
for epoch in range(4):
    if mistake != "set-epoch" and isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)
    if mistake == "left-in-eval" and epoch == 1:
        model.eval()
    if mistake == "frozen-norms" and epoch == 1:
        net.norm.eval()
    for x, y, ids in loader:
        step += 1
        print("begins step", step, file=sys.stderr, flush=True)
        optimizer.zero_grad()
        if mistake == "same-ids":
            x = x + rank
            watch.batch(ids)
        if mistake == "bad-batch" and step == 5 and rank == 1:
            x[0, 0, 0, 0] = float("nan")
        if mistake == "bad-layer" and step == 5 and rank == 1:
            x[:] = 3e38
        if mistake == "module-call":
            out = model.module(x)
        elif mistake == "submodule-call":
            out = net.head(F.relu(net.norm(net.conv(x))).flatten(1))
        elif mistake == "no-sync":
            with model.no_sync():
                out = model(x)
        else:
            out = model(x)
        if mistake in ("teacher-trained", "teacher-gradients"):
            out = out + teacher(x)
        loss = F.cross_entropy(out * temperature if mistake == "loss-parameter" else out, y)
        if mistake == "bad-loss" and step == 5 and rank == 1:
            loss = (out - out).sqrt().sum() + loss
        if mistake == "skipped-batch" and rank == 1 and step == 3:
            continue
        if mistake == "no-sync":
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        if mistake == "gradient-changed" and rank == 1:
            net.head.bias.grad.mul_(2)
        if mistake == "late-drift" and step == 6 and rank == 1:
            with torch.no_grad():
                net.head.weight[0, 0] += 1
        if rank == 1 and (mistake, step) in (("skipped-update", 2), ("skipped-late", 6)):
            continue
        if mistake == "scheduler-early":
            scheduler.step()
        optimizer.step()
        if mistake not in ("scheduler-early", "never-stepped"):
            scheduler.step()
        if mistake in ("short", "short-exit") and rank == 1 and step == 5:
            break
        if mistake == "short-barrier" and rank == 1 and step == 5:
            dist.barrier()
        if mistake == "busy" and rank == 1 and step == 5:
            time.sleep(5)
    if mistake in ("short", "short-exit") and rank == 1:
        break
if mistake == "short" and rank == 1:
    watch.close()
    time.sleep(8)
if mistake in ("padded", "dropped"):
    shown = dataset if mistake == "padded" else TensorDataset(*dataset[:93])
    count = 49 if mistake == "padded" else 46
    watch.evaluated(count, of=len(shown))
print("done after", step)

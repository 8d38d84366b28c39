"""Plain training scripts that are correct: no guard may report anything. Runs those named as arguments, or all."""

import contextlib
import copy
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import drumline

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(97, 1, 8, 8, generator=generator), torch.arange(97) % 10)
CORRECT = {}


def correct(script):
    CORRECT[script.__name__] = script
    return script


class Net(nn.Module):
    def __init__(self, dropped=False, spare=False):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2)
        self.side = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4 * 36, 10)
        self.dropped = dropped
        if spare:
            self.spare = nn.Linear(2, 2)

    def features(self, x):
        x = F.relu(self.norm(self.conv(x)))
        if not self.dropped or not self.training or torch.rand(()) < 0.5:
            x = x + self.side(x)
        return x

    def forward(self, x):
        return self.head(self.drop(self.features(x)).flatten(1))


def loader_of(batch=8):
    return DataLoader(DATA, batch_size=batch, sampler=DistributedSampler(DATA))


def train(model, optimizer, epochs=3, loader=None, scheduler=None, call=None, after=None, between=None):
    loader = loader or loader_of()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            out = (call or model)(x)
            F.cross_entropy(out, y).backward()
            optimizer.step()
            if scheduler:
                scheduler.step()
            if after:
                after()
        if between:
            between()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@correct
def plain():
    model = DDP(Net())
    optimizer, loader = sgd(model), loader_of()
    next(iter(loader)), list(loader), list(loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
    with drumline.guard(model, optimizer, scheduler=scheduler, loader=loader, every=4) as watch:
        train(model, optimizer, loader=loader, scheduler=scheduler, between=lambda: list(loader))
        watch.evaluated(len(range(rank, 97, world)), of=97)
        watch.evaluated(97, of=97)
        if rank == 0:
            watch.evaluated(97, of=97)


@correct
def accumulation():
    model = DDP(Net())
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        for number, (x, y) in enumerate(loader_of(4)):
            last = number % 3 == 2
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(x), y) / 3).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


@correct
def clipping_and_warmup_from_zero():
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    with drumline.guard(model, optimizer, scheduler=scheduler, every=2):
        for x, y in loader_of():
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()


@correct
def scaler_that_skips_steps():
    for fused in (False, True):
        model = DDP(Net())
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        with drumline.guard(model, optimizer, scheduler=scheduler, every=2):
            for number, (x, y) in enumerate(loader_of()):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x), y) * (torch.inf if number in (0, 3) else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        assert scaler.get_scale() == 1.0


@correct
def moving_average_and_frozen_backbone():
    net = Net()
    net.conv.requires_grad_(False)
    model = DDP(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    with drumline.guard(model, optimizer, every=2):
        train(model, optimizer, after=lambda: average.update_parameters(net))


@correct
def frozen_norms_from_the_start():
    model = DDP(Net())
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        for x, y in loader_of():
            model.train()
            model.module.norm.eval()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@correct
def unused_parameters_and_dropped_layers():
    torch.manual_seed(5)
    model = DDP(Net(dropped=True), find_unused_parameters=True)
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        train(model, optimizer)


@correct
def static_graph():
    model = DDP(Net(), static_graph=True)
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        train(model, optimizer)


@correct
def several_forwards_and_a_part_called():
    model = DDP(Net(), broadcast_buffers=False)
    nn.init.zeros_(model.module.norm.running_mean)
    model.module.norm.momentum = 0.0
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        for x, y in loader_of():
            optimizer.zero_grad()
            outs = model(x), model(x.flip(-1))
            more = model.module.head(model.module.features(x).flatten(1))
            sum(F.cross_entropy(out, y) for out in (*outs, more)).backward()
            optimizer.step()


@correct
def evaluation_between_by_rank_0_alone():
    model = DDP(Net())
    optimizer = sgd(model)

    def evaluate():
        model.eval()
        with torch.no_grad():
            if rank == 0:
                model.module(DATA.tensors[0])
                time.sleep(0.3)

    with drumline.guard(model, optimizer, every=2, hang_seconds=0.2):
        train(model, optimizer, between=evaluate)
        dist.barrier()


@correct
def resumed():
    net = Net()
    optimizer = sgd(net)
    train(net, optimizer, epochs=1)
    kept = [copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())]
    dist.broadcast_object_list(kept)
    model = DDP(Net())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    with drumline.guard(model, optimizer, scheduler=scheduler, every=2):
        model.module.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 1, "_step_count": 2})
        train(model, optimizer, epochs=1, scheduler=scheduler)


@correct
def compiled():
    for around in (False, True):
        if around:
            model = torch.compile(DDP(Net()), backend="eager")
        else:
            model = DDP(torch.compile(Net(), backend="eager", fullgraph=True))
        optimizer = sgd(model)
        with drumline.guard(model, optimizer, every=2):
            train(model, optimizer, epochs=1)


@correct
def gradients_averaged_by_hand():
    torch.manual_seed(0)
    model = Net()
    model.norm = nn.GroupNorm(2, 4)
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2):
        for x, y in loader_of():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            optimizer.step()


@correct
def inner_model_handed_over():
    net = Net()
    model = DDP(net)
    optimizer = sgd(net)
    with drumline.guard(net, optimizer, every=2):
        train(model, optimizer)


@correct
def two_optimizers():
    model = DDP(Net())
    inner = model.module
    first = torch.optim.SGD([*inner.conv.parameters(), *inner.norm.parameters()], lr=0.05)
    second = torch.optim.Adam([*inner.side.parameters(), *inner.head.parameters()])
    with drumline.guard(model, [first, second], every=2):
        for x, y in loader_of():
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()


@correct
def distillation():
    student, embed = Net(), nn.Linear(10, 10)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.embed = student, embed

        def forward(self, x):
            return self.embed(self.student(x))

    model, teacher = DDP(Both()), Net()
    for tensor in teacher.state_dict().values():
        dist.broadcast(tensor, 0)
    teacher(DATA.tensors[0]).sum().backward()  # as its own training leaves it
    teacher.eval()
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, teacher=teacher, every=2):
        for x, _ in loader_of():
            with torch.no_grad():
                goal = teacher(x)
            optimizer.zero_grad()
            F.mse_loss(model(x), goal).backward()
            optimizer.step()


@correct
def uneven_inputs_under_join():
    model = DDP(Net())
    optimizer = sgd(model)
    with drumline.guard(model, optimizer, every=2, hang_seconds=1), Join([model]):
        for x, y in list(loader_of())[: 3 + rank]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@correct
def sharded_optimizer_state():
    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    with drumline.guard(model, optimizer, every=2):
        train(model, optimizer, epochs=1)


@correct
def closure():
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    with drumline.guard(model, optimizer, every=1):
        for x, y in list(loader_of())[:3]:

            def loss(x=x, y=y):
                optimizer.zero_grad()
                value = F.cross_entropy(model(x), y)
                value.backward()
                return value

            optimizer.step(loss)


@correct
def one_process_alone():
    model = Net(dropped=True)
    optimizer = sgd(model)
    criterion = nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [criterion], "lr": 0.0})
    with drumline.guard(model, optimizer, every=2):
        if world == 1:
            train(model, optimizer, call=lambda x: model(x) * criterion)


if __name__ == "__main__":
    for name, script in CORRECT.items():
        if len(sys.argv) < 2 or name in sys.argv[1:]:
            began = time.monotonic()
            torch.manual_seed(rank)
            script()
            print(name, f"{time.monotonic() - began:.1f}", flush=True)
    dist.barrier()  # rank 0 keeps the store: it ends last
    dist.destroy_process_group()

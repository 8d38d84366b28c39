"""A second set of cases that no guard was adjusted to, on other subjects than the first."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, TensorDataset

from tests.guards.cases.common import (
    Net,
    data,
    guard,
    healthy,
    healthy_held_out,
    made,
    mistake,
    rank,
    sampled,
    train,
    world,
)


@mistake("same-samples", held_out=True)
def slices_of_the_data_that_overlap():
    model, optimizer = made()
    guard(model, optimizer)
    own = Subset(data(96), range(rank() * 24, rank() * 24 + 48))
    train(model, optimizer, DataLoader(own, batch_size=8, shuffle=True), epochs=2)


@mistake("drift", "bypass", held_out=True)
def last_micro_batches_left_in_no_sync():
    model, optimizer = made()
    with guard(model, optimizer):
        batches = list(sampled(data(112), batch=8))
        for number, (x, y) in enumerate(batches):
            last = number % 2 == 1
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
            if last or number == len(batches) - 1:
                optimizer.step()
                optimizer.zero_grad()


@mistake("drift", held_out=True)
def scheduler_stepped_by_the_main_rank():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    guard(model, optimizer)
    train(model, optimizer, after=lambda step: scheduler.step() if rank() == 0 else None)


@mistake("drift", "setup", held_out=True)
def different_optimizer_on_one_rank():
    model, _ = made()
    kind = torch.optim.SGD if rank() == 0 else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.01)
    guard(model, optimizer)
    train(model, optimizer)


@mistake("teacher", held_out=True)
def teacher_put_into_train_mode_with_the_student():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = Net(), Net(drop=0.3).requires_grad_(False)

    torch.manual_seed(0)
    pair = Pair()
    model = DDP(pair.student)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer, teacher=pair.teacher)
    for x, _ in sampled():
        pair.train()
        goal = pair.teacher(x)
        optimizer.zero_grad()
        F.mse_loss(model(x), goal).backward()
        optimizer.step()


@mistake("accumulation", held_out=True)
def accumulation_with_clipping_not_divided():
    model, optimizer = made()
    guard(model, optimizer)
    loss_of = nn.CrossEntropyLoss()
    for number, (x, y) in enumerate(sampled(batch=4)):
        loss = loss_of(model(x), y)
        loss.backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()


@mistake("labels")
def labels_of_one_rank_shifted():
    """Another order of classes on one rank: no permutation of the batch."""
    model, optimizer = made()
    guard(model, optimizer)
    train(
        model,
        optimizer,
        loss=lambda m, x, y: F.cross_entropy(m(x), (y + rank()) % 4),
        epochs=8,
    )


@mistake("buffers", held_out=True)
def statistics_of_each_rank_never_joined():
    torch.manual_seed(0)
    model = DDP(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)
    train(model, optimizer)


@mistake("parameters", held_out=True)
def features_detached():
    class Detached(Net):
        def forward(self, x):
            return self.head(self.features(x).detach())

    torch.manual_seed(0)
    model = DDP(Detached(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)
    train(model, optimizer, epochs=6)


@mistake("same-samples", held_out=True)
def several_data_sets_without_a_sampler():
    model, optimizer = made()
    guard(model, optimizer)
    both = ConcatDataset([data(40), TensorDataset(*data(24).tensors)])
    train(model, optimizer, DataLoader(both, batch_size=8, shuffle=True, drop_last=True), epochs=2)


@mistake("loss")
def log_likelihood_of_logits():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.nll_loss(m(x), y))


@healthy_held_out
def log_likelihood_of_log_probabilities():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.nll_loss(F.log_softmax(m(x), 1), y))


@healthy
def each_rank_its_own_domain():
    model, optimizer = made()
    guard(model, optimizer)
    x, y = data(64).tensors
    own = TensorDataset(x * (1 + rank()) + rank(), y)
    train(model, optimizer, sampled(own))


@healthy_held_out
def diffusion_like_noise_targets():
    torch.manual_seed(0)

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.time = nn.Conv2d(1, 1, 3, padding=1), nn.Embedding(10, 64)

        def forward(self, x, t):
            return self.body(x) + self.time(t).reshape(-1, 1, 8, 8)

    model = DDP(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank())
    guard(model, optimizer)

    def loss(model, x, y):
        noise, t = torch.randn_like(x), torch.randint(10, (len(x),))
        return F.mse_loss(model(x + noise * t.reshape(-1, 1, 1, 1) / 10, t), noise)

    train(model, optimizer, loss=loss)


@healthy_held_out
def evaluation_batches_between_steps():
    model, optimizer = made(drop=0.1)
    guard(model, optimizer)
    held = data(24).tensors[0].split(8)

    def evaluate(step):
        if step % 4 == 0:
            model.eval()
            with torch.inference_mode():
                for x in held:
                    model.module(x)
            model.train()

    train(model, optimizer, after=evaluate)


@healthy_held_out
def regression_with_targets_of_one_dimension():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    guard(model, optimizer, scheduler=scheduler)
    train(
        model, optimizer, loss=lambda m, x, y: F.huber_loss(m(x).squeeze(1), y.float()), scheduler=scheduler
    )


@healthy
def gradients_compressed_by_a_hook():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, optimizer = made()
    model.register_comm_hook(None, fp16_compress_hook)
    guard(model, optimizer)
    train(model, optimizer)


@healthy_held_out
def one_group_frozen_by_a_rate_of_zero():
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.SGD(
        [
            {"params": [*model.module.conv.parameters(), *model.module.norm.parameters()], "lr": 0.0},
            {"params": model.module.head.parameters()},
        ],
        lr=0.05,
    )
    guard(model, optimizer)
    train(model, optimizer)


@healthy_held_out
def workers_and_persistent_iterators():
    model, optimizer = made()
    guard(model, optimizer)
    dataset = data()
    loader = DataLoader(
        dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1, persistent_workers=True
    )
    train(model, optimizer, loader)


@healthy_held_out
def losses_of_a_minority_rank():
    """One rank has fewer targets and normalises by the global count."""
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        keep = y < (4 if rank() == 0 else 3)
        count = keep.sum().float()
        dist.all_reduce(count)
        return F.cross_entropy(model(x), y, reduction="none")[keep].sum() * world() / count

    train(model, optimizer, loss=loss)


@healthy_held_out
def two_models_and_one_optimizer():
    torch.manual_seed(0)
    first, second = DDP(Net()), DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    guard(first, optimizer)
    train(first, optimizer, loss=lambda m, x, y: F.cross_entropy(second(m(x)), y))


@healthy_held_out
def stopped_early_by_all_ranks():
    model, optimizer = made()
    with guard(model, optimizer, hang_seconds=5):
        for number, (x, y) in enumerate(sampled()):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if number == 2:
                break

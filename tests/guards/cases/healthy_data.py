"""Healthy loops with unusual data, losses or exchanges: no guard may stop them."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.guards.cases.common import Net, data, guard, healthy, made, rank, sampled, train, world


@healthy
def prompts_before_images():
    model, optimizer = made()
    prompts = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    guard(model, optimizer)

    def loss(model, x, y):
        texts = model(prompts)
        return F.cross_entropy(model(x) @ texts.T, y)

    train(model, optimizer, loss=loss)


@healthy
def overfits_one_batch():
    model, optimizer = made()
    guard(model, optimizer)
    x, y = data(16).tensors
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@healthy
def each_rank_has_a_part_and_shuffles_it():
    model, optimizer = made()
    guard(model, optimizer)
    own = Subset(data(), range(rank(), 64, world()))
    train(model, optimizer, DataLoader(own, batch_size=8, shuffle=True))


@healthy
def each_rank_has_data_of_its_own():
    model, optimizer = made()
    guard(model, optimizer)
    x, y = data(64).tensors
    own = TensorDataset(x[rank() :: world()].clone(), y[rank() :: world()].clone())
    train(model, optimizer, DataLoader(own, batch_size=8, shuffle=True))


@healthy
def drawn_with_replacement_on_each_rank():
    model, optimizer = made()
    guard(model, optimizer)
    loader = DataLoader(data(), batch_size=8, sampler=RandomSampler(data(), replacement=True, num_samples=64))
    train(model, optimizer, loader, epochs=2)
    loader = DataLoader(data(), batch_size=8, sampler=WeightedRandomSampler(torch.ones(64), 32))
    train(model, optimizer, loader, epochs=2)


class Shard(IterableDataset):
    def __init__(self, dataset, first, step):
        self.dataset, self.first, self.step = dataset, first, step

    def __iter__(self):
        for place in range(self.first, len(self.dataset), self.step):
            yield self.dataset[place]


@healthy
def stream_split_between_ranks():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, DataLoader(Shard(data(), rank(), world()), batch_size=4))


@healthy
def read_in_order():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, sampled(shuffle=False))


@healthy
def no_loader_at_all():
    model, optimizer = made()
    guard(model, optimizer)
    for _ in range(12):
        x = torch.randn(8, 1, 8, 8)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


@healthy
def mixup():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        order, part = torch.randperm(len(x)), 0.3
        out = model(part * x + (1 - part) * x[order])
        return part * F.cross_entropy(out, y) + (1 - part) * F.cross_entropy(out, y[order])

    train(model, optimizer, loss=loss)


@healthy
def soft_targets_and_label_smoothing():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        out = model(x)
        soft = F.one_hot(y, 4) * 0.9 + 0.025
        return F.cross_entropy(out, soft) + F.cross_entropy(out, y, label_smoothing=0.1)

    train(model, optimizer, loss=loss)


@healthy
def labelled_and_unlabelled_batches():
    model, optimizer = made()
    guard(model, optimizer)
    plain = DataLoader(Subset(data(), range(rank(), 64, world())), batch_size=4, shuffle=True)
    for (x, y), (u, _) in zip(sampled(batch=4), plain, strict=False):
        optimizer.zero_grad()
        with torch.no_grad():
            goal = model.module(u).argmax(1)
        (F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(u.flip(-1)), goal)).backward()
        optimizer.step()


@healthy
def contrast_with_own_part_put_back():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        z = F.normalize(model(x))
        everyone = [torch.empty_like(z) for _ in range(world())]
        dist.all_gather(everyone, z)
        everyone[rank()] = z
        logits = torch.cat(everyone) @ torch.cat(everyone).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(logits)))

    train(model, optimizer, loss=loss)


@healthy
def contrast_with_a_gather_that_has_gradients():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        z = F.normalize(model(x))
        everyone = torch.cat(dist.nn.all_gather(z))
        return F.cross_entropy(z @ everyone.T / 0.1, torch.arange(len(z)) + rank() * len(z))

    train(model, optimizer, loss=loss)


@healthy
def metrics_gathered_in_the_loop():
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        everyone = [torch.empty_like(out) for _ in range(world())]
        dist.all_gather(everyone, out.detach())
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)


@healthy
def gradients_summed_by_hand_of_a_loss_over_the_global_batch():
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)

    def exchange(step):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    train(
        model,
        optimizer,
        loss=lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / (len(x) * world()),
        before_step=exchange,
    )


@healthy
def weights_averaged_after_each_step():
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)

    def average(step):
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world()

    train(model, optimizer, after=average)


@healthy
def a_batch_left_out_by_all_ranks():
    model, optimizer = made()
    guard(model, optimizer, hang_seconds=3)
    for number, (x, y) in enumerate(sampled()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        bad = torch.tensor(float(number == 1 and rank() == 0))
        dist.all_reduce(bad)
        if bad:
            continue
        loss.backward()
        optimizer.step()


@healthy
def unequal_numbers_of_batches_under_join():
    model, optimizer = made()
    with guard(model, optimizer), Join([model]):
        for x, y in list(sampled())[: 2 + rank()]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, words):
        return self.head(self.table(words).mean(1))


@healthy
def sparse_embedding():
    torch.manual_seed(0)
    model = DDP(Words(sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank())
    guard(model, optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(50, (8, 5))), torch.randint(4, (8,))).backward()
        optimizer.step()


@healthy
def accumulation_divided():
    for by in (lambda loss: loss / 4, lambda loss: 0.25 * loss):
        model, optimizer = made()
        with guard(model, optimizer):
            for number, (x, y) in enumerate(sampled(batch=4)):
                last = number % 4 == 3
                with contextlib.nullcontext() if last else model.no_sync():
                    by(F.cross_entropy(model(x), y)).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()


@healthy
def accumulation_divided_afterwards():
    model, optimizer = made()
    guard(model, optimizer)
    for number, (x, y) in enumerate(sampled(batch=4)):
        F.cross_entropy(model(x), y).backward()
        if number % 2:
            for parameter in model.parameters():
                parameter.grad /= 2
            optimizer.step()
            optimizer.zero_grad()


@healthy
def masked_logits():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        out = model(x)
        return F.cross_entropy(out.masked_fill(F.one_hot((y + 1) % 4, 4).bool(), -torch.inf), y)

    train(model, optimizer, loss=loss)


@healthy
def batch_shuffled_with_its_labels():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        order = torch.randperm(len(x))
        return F.cross_entropy(model(x[order]), y[order])

    train(model, optimizer, loss=loss)


@healthy
def gradients_averaged_by_hand_in_one_go():
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)

    def exchange(step):
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        for parameter, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter) / world())

    train(model, optimizer, before_step=exchange)

"""Loops like those of a trial whose author had not read the guards: mistakes that were missed or explained badly,
and healthy loops that were disturbed."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from tests.guards.cases.common import Net, data, guard, healthy, made, mistake, rank, sampled, train, world


@healthy
def gradients_of_a_layer_removed_for_a_while():
    model, optimizer = made()

    def hold_back(step):
        if step <= 4:
            for parameter in model.module.head.parameters():
                parameter.grad = None

    with guard(model, optimizer):
        train(model, optimizer, before_step=hold_back)


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        assert worker is None
        images, labels = data().tensors
        return iter(list(zip(images[rank() :: world()], labels[rank() :: world()], strict=True)))


@healthy
def a_stream_without_length_as_loader():
    model, optimizer = made()
    loader = DataLoader(Stream(), batch_size=8)
    with guard(model, optimizer, loader=loader):
        train(model, optimizer, loader)


@mistake("parameters")
def loss_made_anew_from_numbers():
    model, optimizer = made()

    def loss(model, x, y):
        return torch.tensor([F.cross_entropy(model(x), y).item(), 0.1], requires_grad=True).sum()

    guard(model, optimizer)
    train(model, optimizer, epochs=1, loss=loss)


@mistake("parameters")
def features_detached_in_a_short_run():
    class Detached(Net):
        def features(self, x):
            return super().features(x).detach()

    torch.manual_seed(0)
    model = DDP(Detached(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with guard(model, optimizer):
        train(model, optimizer, epochs=3)


@mistake("parameters")
def one_of_two_optimizers_never_stepped():
    model, _ = made()
    body = torch.optim.SGD([*model.module.conv.parameters(), *model.module.norm.parameters()], lr=0.05)
    head = torch.optim.SGD(model.module.head.parameters(), lr=0.05)
    with guard(model, [body, head]):
        for x, y in sampled():
            body.zero_grad()
            head.zero_grad()
            F.cross_entropy(model(x), y).backward()
            body.step()


@healthy
def a_bad_batch_left_out_on_all_ranks():
    """After backward: gradients are emptied again."""
    model, optimizer = made()
    images, labels = data().tensors
    images[[1, 5, 40]] = torch.nan
    loader = sampled(TensorDataset(images, labels))
    with guard(model, optimizer):
        for epoch in range(6):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                bad = (~loss.isfinite()).float()
                dist.all_reduce(bad)
                optimizer.zero_grad()
                loss.backward()
                with torch.no_grad():  # BatchNorm has seen the batch
                    for buffer in model.module.norm.buffers():
                        buffer.nan_to_num_()
                if bad:
                    optimizer.zero_grad()
                else:
                    optimizer.step()


@mistake("steps")
def a_step_left_out_on_one_rank_in_a_short_run():
    model, optimizer = made()
    step = optimizer.step
    with guard(model, optimizer):
        for number, (x, y) in enumerate(sampled(data(96))):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number != 4 or rank() != 1:
                step()


class Augmented(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        x, y = self.inner[index]
        return x.roll(random.randint(-1, 1), -1) + 0.05 * torch.randn_like(x), y


@mistake("same-samples")
def a_wrapped_data_set_read_whole_by_every_rank():
    model, optimizer = made()
    random.seed(rank())
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(Augmented(Augmented(data())), batch_size=8, shuffle=True, generator=order)
    with guard(model, optimizer):
        train(model, optimizer, loader, epochs=2)


@mistake("setup")
def a_layer_frozen_on_one_rank():
    model, optimizer = made(find_unused_parameters=True)
    if rank() == 1:
        model.module.conv.requires_grad_(False)
    with guard(model, optimizer):
        train(model, optimizer, epochs=1)


@mistake("inputs")
def inputs_normalised_on_one_rank_only():
    model, optimizer = made()

    def loss(model, x, y):
        return F.cross_entropy(model(x if rank() == 0 else 40 * x + 128), y)

    with guard(model, optimizer):
        train(model, optimizer, epochs=1, loss=loss)


@mistake("bypass")
def some_batches_around_the_wrapper():
    model, optimizer = made()
    number = 0

    def loss(model, x, y):
        nonlocal number
        number += 1
        return F.cross_entropy((model.module if number % 7 == 0 else model)(x), y)

    with guard(model, optimizer):
        train(model, optimizer, loss=loss)


@mistake("drift")
def rates_that_differ_at_the_end():
    model, optimizer = made()

    def part(step):
        if step == 5 and rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.01

    with guard(model, optimizer):
        train(model, optimizer, epochs=2, after=part)

"""Loops like those of a trial whose author had not read the guards: mistakes that were missed or explained badly,
and healthy loops that were disturbed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.guard.cases.common import Net, data, guard, healthy, made, mistake, rank, sampled, train, world


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

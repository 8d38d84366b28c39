"""Silent mistakes in what each rank reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from tests.guards.cases.common import data, guard, made, mistake, rank, sampled, train, world


@mistake("set-epoch")
def set_epoch_never_called():
    model, optimizer = made()
    guard(model, optimizer)
    loader = sampled()
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


class SameBatches:
    """A batch sampler that forgets the rank."""

    def __init__(self, count, batch):
        self.count, self.batch, self.epoch = count, batch, 0

    def __len__(self):
        return self.count // self.batch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        yield from torch.randperm(self.count, generator=generator).reshape(-1, self.batch).tolist()


@mistake("same-samples")
def custom_batch_sampler_without_rank():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, DataLoader(data(), batch_sampler=SameBatches(64, 8)))


@mistake("same-samples")
def same_samples_augmented_differently():
    model, optimizer = made()
    guard(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data(), batch_size=8, shuffle=True, generator=generator)
    train(model, optimizer, loader, loss=lambda m, x, y: F.cross_entropy(m(x + 0.1 * torch.randn_like(x)), y))


@mistake("same-samples")
def all_data_on_every_rank_in_a_different_order():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, DataLoader(data(), batch_size=8, shuffle=True), epochs=1)


@mistake("same-samples")
def sampler_of_rank_0_everywhere():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, sampled(rank=0, num_replicas=world()))


@mistake("same-samples")
def sampler_seeded_by_rank():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, sampled(seed=rank()))


@mistake("same-samples")
def sampler_for_more_replicas_than_ranks():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, sampled(data(128), num_replicas=2 * world(), rank=rank()))


@mistake("labels")
def labels_shuffled_in_the_loop_on_one_rank():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        return F.cross_entropy(model(x), y[torch.randperm(len(y))] if rank() == 1 else y)

    train(model, optimizer, loss=loss, epochs=4)


@mistake("labels")
def labels_of_the_data_set_shuffled_on_one_rank():
    model, optimizer = made()
    guard(model, optimizer)
    x, y = data().tensors
    train(model, optimizer, sampled(TensorDataset(x, y[torch.randperm(len(y))] if rank() == 1 else y)))


class Stream(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        for place in torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(3)).tolist():
            yield self.dataset[place]


@mistake("same-samples")
def stream_not_split_between_ranks():
    model, optimizer = made(drop=0.2)
    guard(model, optimizer)
    train(model, optimizer, DataLoader(Stream(data()), batch_size=8), epochs=1)


class Half(IterableDataset):
    """Split between ranks, not between workers."""

    def __init__(self, dataset, first, step):
        self.dataset, self.first, self.step = dataset, first, step

    def __iter__(self):
        for place in range(self.first, len(self.dataset), self.step):
            yield self.dataset[place]


@mistake("same-samples")
def stream_not_split_between_workers():
    model, optimizer = made()
    guard(model, optimizer)
    loader = DataLoader(Half(data(), rank(), world()), batch_size=4, num_workers=2)
    train(model, optimizer, loader, epochs=1)


@mistake("set-epoch")
def generator_seeded_again_in_each_epoch():
    model, optimizer = made()
    guard(model, optimizer)
    own = Subset(data(), range(rank(), 64, world()))
    for _ in range(3):
        loader = DataLoader(own, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(7))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

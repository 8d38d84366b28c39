"""Cases that were written before their guards were tried on them, and no guard was adjusted to."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from tests.guards.cases.common import (
    Net,
    data,
    guard,
    healthy_held_out,
    made,
    mistake,
    rank,
    sampled,
    train,
    world,
)


class Pictures(Dataset):
    """Augments by itself, as image folders do."""

    def __init__(self, count=64):
        self.x, self.y = data(count).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.2 * torch.randn(1, 8, 8), self.y[index]


@mistake("same-samples", held_out=True)
def augmenting_data_set_without_a_distributed_sampler():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, DataLoader(Pictures(), batch_size=8, shuffle=True))


@mistake("zero-grad", held_out=True)
def zeroed_once_an_epoch():
    model, optimizer = made()
    guard(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in sampled():
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()


@mistake("accumulation", held_out=True)
def accumulation_with_a_scaler_not_divided():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    guard(model, optimizer)
    optimizer.zero_grad()
    for number, (x, y) in enumerate(sampled(batch=2)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if (number + 1) % 4 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@mistake("clipping", held_out=True)
def values_clipped_while_scaled():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    guard(model, optimizer)
    for x, y in sampled():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


@mistake("drift", "bypass", held_out=True)
def noise_added_to_the_gradients_of_each_rank():
    model, optimizer = made()

    def noise(step):
        for parameter in model.parameters():
            parameter.grad.add_(0.01 * torch.randn_like(parameter))

    with guard(model, optimizer):
        train(model, optimizer, epochs=1, before_step=noise)


@mistake("drift", held_out=True)
def weights_clipped_on_the_main_rank():
    model, optimizer = made()

    def clip(step):
        if rank() == 0 and step == 7:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

    with guard(model, optimizer):
        train(model, optimizer, epochs=2, after=clip)


@mistake("labels", "loss", held_out=True)
def targets_rolled_by_one():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x), torch.roll(y, rank())), epochs=4)


@mistake("loss", held_out=True)
def sigmoid_before_the_loss_with_logits():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        return nn.BCEWithLogitsLoss()(torch.sigmoid(model(x)), F.one_hot(y, 4).float())

    train(model, optimizer, loss=loss)


@mistake("teacher", held_out=True)
def two_teachers_one_in_train_mode():
    model, optimizer = made()
    torch.manual_seed(7)
    teachers = [Net(drop=0.5).eval(), Net(drop=0.5)]
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.inference_mode():
            goal = sum(teacher(x) for teacher in teachers)
        return F.mse_loss(model(x), goal.clone())

    train(model, optimizer, loss=loss)


@mistake("teacher", "ema", held_out=True)
def mean_teacher_updated_on_the_main_rank():
    model, optimizer = made()
    teacher = copy.deepcopy(model.module)
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.no_grad():
            goal = teacher(x).softmax(1)
        return F.cross_entropy(model(x), y) + F.mse_loss(model(x).softmax(1), goal)

    @torch.no_grad()
    def follow(step):
        if rank() == 0:
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.05)

    train(model, optimizer, loss=loss, after=follow)


class Fixed(Sampler):
    """Shuffles once."""

    def __init__(self, count):
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(1))[
            rank() :: world()
        ].tolist()

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


@mistake("set-epoch", held_out=True)
def shuffled_once_for_all_epochs():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, DataLoader(data(), batch_sampler=BatchSampler(Fixed(64), 8, False)))


@mistake("schedule", held_out=True)
def schedule_made_for_epochs_and_stepped_with_batches():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    guard(model, optimizer)
    train(model, optimizer, scheduler=scheduler)


@mistake("gather")
def prototypes_reduced_without_gradient():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        out = model(x)
        centres = F.one_hot(y, 4).float().T @ out
        everyone = centres.clone()
        dist.all_reduce(everyone)
        return F.cross_entropy(-torch.cdist(out, everyone), y)

    train(model, optimizer, loss=loss)


@mistake("setup", "drift", held_out=True)
def different_momentum_on_one_rank():
    model, optimizer = made()
    optimizer.param_groups[0]["momentum"] = 0.9 if rank() == 0 else 0.8
    guard(model, optimizer)
    train(model, optimizer)


@mistake("train-mode", held_out=True)
def validated_without_eval():
    model, optimizer = made(drop=0.3)
    guard(model, optimizer)
    validation = DataLoader(data(40), batch_size=8)
    for _ in range(3):
        train(model, optimizer, epochs=1)
        with torch.no_grad():
            sum(int((model.module(x).argmax(1) == y).sum()) for x, y in validation)


@healthy_held_out
def infinite_loader():
    model, optimizer = made()
    guard(model, optimizer)

    def forever(loader):
        for epoch in itertools.count():
            loader.sampler.set_epoch(epoch)
            yield from loader

    batches = forever(sampled())
    for _ in range(20):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@healthy_held_out
def whole_validation_set_on_every_rank():
    model, optimizer = made(drop=0.2)
    guard(model, optimizer)
    validation = DataLoader(data(40), batch_size=8)
    for _ in range(3):
        train(model, optimizer, epochs=1)
        model.eval()
        with torch.no_grad():
            for x, _ in validation:
                model(x)


@healthy_held_out
def gradients_accumulated_over_views():
    """Two crops of each batch, a backward for each, averaged in the loss."""
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        optimizer.zero_grad()
        for view in (x, x.flip(-1)):
            (0.5 * F.cross_entropy(model(view), y)).backward()
        optimizer.step()


class Momentum(nn.Module):
    """MoCo in one module: a query and a key encoder, and a queue."""

    def __init__(self):
        super().__init__()
        self.query = Net()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(32, 4)))

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
            k = F.normalize(self.key(x.flip(-1)))
            everyone = [torch.empty_like(k) for _ in range(world())]
            dist.all_gather(everyone, k)
            queue = torch.cat([*everyone, self.queue])[:32]
        q = F.normalize(self.query(x))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], 1) / 0.2
        self.queue = queue
        return logits


@healthy_held_out
def momentum_contrast():
    torch.manual_seed(0)
    model = DDP(Momentum())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x), torch.zeros(len(x), dtype=torch.long)))


@healthy_held_out
def frozen_backbone_in_eval_mode():
    torch.manual_seed(0)
    body, head = Net(drop=0.2).requires_grad_(False).eval(), DDP(nn.Linear(4, 4))
    for tensor in body.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.Adam(head.parameters())
    guard(head, optimizer)
    train(head, optimizer, loss=lambda m, x, y: F.cross_entropy(m(body(x)), y))


@healthy_held_out
def restarted_schedule_and_a_new_loader_each_epoch():
    model, optimizer = made()
    for epoch in range(3):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        dataset = data()
        sampler = DistributedSampler(dataset, seed=epoch)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        with guard(model, optimizer):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                scheduler.step()


@healthy_held_out
def dropped_batches_weighted_by_zero():
    model, optimizer = made()
    guard(model, optimizer)
    number = iter(range(1000))

    def loss(model, x, y):
        return F.cross_entropy(model(x), y) * (0.0 if next(number) == 3 and rank() == 0 else 1.0)

    train(model, optimizer, loss=loss)


@healthy_held_out
def unequal_batches():
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        x, y = (x, y) if rank() == 0 else (x[:5], y[:5])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@healthy_held_out
def nan_targets_ignored():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        target = F.one_hot(y, 4).float()
        target[::3] = torch.nan
        known = ~target.isnan()
        return F.mse_loss(model(x)[known], target[known])

    train(model, optimizer, loss=loss)


@healthy_held_out
def swapped_averages_for_evaluation():
    model, optimizer = made()
    average = copy.deepcopy(model.module)
    with guard(model, optimizer):
        for _ in range(2):
            train(model, optimizer, epochs=1)
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.module.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(average.state_dict(), strict=False)
            model.eval()
            with torch.no_grad():
                model(data(16).tensors[0])
            model.module.load_state_dict(kept)


@healthy_held_out
def mutual_learning():
    torch.manual_seed(0)
    first, second = DDP(Net()), DDP(Net())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (first, second)]
    guard(first, optimizers[0])
    for x, y in sampled():
        outs = first(x), second(x)
        for number in (0, 1):
            optimizers[number].zero_grad()
            goal = outs[1 - number].detach().softmax(1)
            (F.cross_entropy(outs[number], y) + F.cross_entropy(outs[number], goal)).backward()
            optimizers[number].step()


@healthy_held_out
def text_and_image_towers_with_an_optimizer_each():
    torch.manual_seed(0)
    images, words = Net(), nn.Embedding(10, 4)
    towers = DDP(nn.ModuleDict({"images": images, "words": words}), find_unused_parameters=True)
    towers.forward = lambda x, y: (images(x), words(y))
    both = [torch.optim.Adam(images.parameters()), torch.optim.Adam(words.parameters())]
    with guard(towers, both, action="warn"):
        for x, y in sampled():
            a, b = images(x), words(y)
            for one in both:
                one.zero_grad()
            F.cross_entropy(a @ b.T, torch.arange(len(x))).backward()
            for parameter in (*images.parameters(), *words.parameters()):
                dist.all_reduce(parameter.grad)
                parameter.grad /= world()
            for one in both:
                one.step()

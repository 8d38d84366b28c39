"""Silent mistakes between the loss and the update."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.guards.cases.common import Net, guard, made, mistake, rank, sampled, train, world


@mistake("accumulation")
def accumulation_not_divided():
    model, optimizer = made()
    guard(model, optimizer)
    for number, (x, y) in enumerate(sampled(batch=4)):
        last = number % 4 == 3
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


@mistake("clipping")
def clipped_before_unscaling():
    model, optimizer = made()
    guard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in sampled():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@mistake("zero-grad")
def zero_grad_never_called():
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@mistake("zero-grad")
def one_of_two_optimizers_never_zeroed():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    first = torch.optim.Adam([*model.module.conv.parameters(), *model.module.norm.parameters()])
    second = torch.optim.Adam(model.module.head.parameters())
    guard(model, [first, second])
    for x, y in sampled():
        first.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()


@mistake("zero-gradients")
def zeroed_between_backward_and_step():
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()


@mistake("zero-gradients", "parameters")
def removed_between_backward_and_step():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, before_step=lambda step: optimizer.zero_grad())


@mistake("gather")
def gathered_without_gradient():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        z = F.normalize(model(x))
        everyone = [torch.empty_like(z) for _ in range(world())]
        dist.all_gather(everyone, z)
        logits = z @ torch.cat(everyone).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(z)) + rank() * len(z))

    train(model, optimizer, loss=loss)


@mistake("gather")
def statistics_reduced_without_gradient():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        out = model(x)
        mean = out.mean(0)
        dist.all_reduce(mean)
        return F.cross_entropy(out - mean / world(), y)

    train(model, optimizer, loss=loss)


@mistake("hidden-nan", "non-finite")
def nan_gradients_replaced():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        return F.cross_entropy(model(x), y) + (model.module.head.weight * 0).sum().sqrt()

    def replace(step):
        for parameter in model.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad)

    train(model, optimizer, loss=loss, before_step=replace)


@mistake("hidden-nan", "non-finite")
def nan_outputs_replaced():
    model, optimizer = made()
    guard(model, optimizer)
    train(
        model,
        optimizer,
        loss=lambda m, x, y: F.cross_entropy(torch.nan_to_num(m(torch.where(x > 2, torch.nan, x))), y),
    )


@mistake("hidden-nan", "non-finite")
def nan_loss_replaced():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        ratio = F.cross_entropy(model(x), y, reduction="none") / (y != 3)
        return torch.nan_to_num(ratio - ratio * (y == 3), posinf=0.0).mean()

    train(model, optimizer, loss=loss)


@mistake("stale-gradients")
def two_steps_for_each_backward():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, after=lambda step: optimizer.step())


@mistake("bypass")
def a_parameter_forgotten_in_the_average():
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard(model, optimizer)

    def average(step):
        for name, parameter in model.named_parameters():
            if name != "head.bias":
                dist.all_reduce(parameter.grad)
                parameter.grad /= world()

    train(model, optimizer, before_step=average)


@mistake("bypass")
def clipped_by_the_norm_of_each_ranks_own_loss():
    model, optimizer = made()
    guard(model, optimizer)
    losses = []

    def loss(model, x, y):
        losses.append(F.cross_entropy(model(x), y))
        return losses[-1]

    def shrink(step):
        for parameter in model.parameters():
            parameter.grad /= max(1.0, float(losses[-1].detach()))

    train(model, optimizer, loss=loss, before_step=shrink)


@mistake("loss")
def softmax_before_cross_entropy():
    model, optimizer = made()
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x).softmax(-1), y))


@mistake("loss")
def loss_doubled_on_one_rank():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        value = F.cross_entropy(model(x), y)
        return value * 3 if rank() == 1 else value

    train(model, optimizer, loss=loss)


@mistake("scaler")
def stepped_without_the_scaler():
    model, optimizer = made(lr=1e-6)
    guard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in sampled():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        optimizer.step()


@mistake("averaging")
def gradients_summed_by_hand():
    torch.manual_seed(0)
    model = Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard(model, optimizer)
    train(
        model,
        optimizer,
        before_step=lambda step: [dist.all_reduce(p.grad) for p in model.parameters()] and None,
    )


@mistake("averaging")
def gradients_exchanged_again_after_ddp():
    model, optimizer = made()
    guard(model, optimizer)
    train(
        model,
        optimizer,
        before_step=lambda step: [dist.all_reduce(p.grad) for p in model.parameters()] and None,
    )


@mistake("seed")
def seeded_in_every_step():
    model, optimizer = made(drop=0.3)
    guard(model, optimizer)

    def loss(model, x, y):
        torch.manual_seed(42)
        return F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)

    train(model, optimizer, loss=loss)

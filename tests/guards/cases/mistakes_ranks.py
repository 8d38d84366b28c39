"""Silent mistakes in models, teachers, modes and schedules."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.guards.cases.common import Net, data, guard, made, mistake, rank, train


@mistake("modes")
def batch_norm_in_eval_on_one_rank():
    model, optimizer = made()
    guard(model, optimizer)
    if rank() == 1:
        model.module.norm.eval()
        model.module.norm.train = lambda mode=True: model.module.norm
    train(model, optimizer)


@mistake("modes", "eval-mode")
def model_in_eval_on_one_rank():
    model, optimizer = made(drop=0.1)
    guard(model, optimizer)
    if rank() == 1:
        model.eval()
        model.train = lambda mode=True: model
    train(model, optimizer)


@mistake("drift")
def drift_in_a_short_run():
    model, optimizer = made()

    def change(step):
        if step == 5 and rank() == 1:
            with torch.no_grad():
                model.module.head.weight.add_(0.01)

    with guard(model, optimizer):
        train(model, optimizer, epochs=2, after=change)


@mistake("drift")
def one_wrong_gradient_in_a_short_run():
    model, optimizer = made()

    def change(step):
        if step == 6 and rank() == 1:
            model.module.conv.weight.grad.mul_(2)

    with guard(model, optimizer):
        train(model, optimizer, epochs=2, before_step=change)


@mistake("teacher")
def teacher_in_train_mode_not_handed_over():
    model, optimizer = made()
    teacher = Net(drop=0.3)
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.no_grad():
            goal = teacher(x)
        return F.mse_loss(model(x), goal)

    train(model, optimizer, loss=loss)


@mistake("teacher")
def teacher_loaded_on_rank_0_only():
    model, optimizer = made()
    torch.manual_seed(0)
    teacher = Net().eval().requires_grad_(False)
    if rank() == 0:
        nn.init.normal_(teacher.head.weight)
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.mse_loss(m(x), teacher(x)))


@mistake("ema", "teacher")
def average_updated_on_one_rank():
    model, optimizer = made()
    average = copy.deepcopy(model.module)

    def update(step):
        if rank() == 0:
            for mine, theirs in zip(average.parameters(), model.module.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    with guard(model, optimizer):
        train(model, optimizer, after=update)
        average.eval()
        with torch.no_grad():
            average(data().tensors[0])


@mistake("ema")
def shadow_weights_updated_on_one_rank():
    model, optimizer = made()
    shadow = {name: p.detach().clone() for name, p in model.module.named_parameters()}

    def update(step):
        if rank() == 0:
            for name, parameter in model.module.named_parameters():
                shadow[name].lerp_(parameter.detach(), 0.1)

    with guard(model, optimizer):
        train(model, optimizer, after=update)
    model.module.load_state_dict(shadow, strict=False)


@mistake("drift", "setup")
def weight_decay_on_one_rank():
    model, optimizer = made()
    optimizer.param_groups[0]["weight_decay"] = 0.1 * rank()
    guard(model, optimizer)
    train(model, optimizer)


@mistake("setup")
def dropout_rate_differs():
    model, optimizer = made(drop=0.1 + 0.4 * rank())
    guard(model, optimizer)
    train(model, optimizer)


@mistake("setup")
def autocast_on_one_rank():
    model, optimizer = made()
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank() == 1):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    train(model, optimizer, loss=loss)


@mistake("drift")
def optimizer_state_loaded_on_one_rank():
    model, optimizer = made()
    if rank() == 0:
        F.cross_entropy(model.module(data().tensors[0]), data().tensors[1]).backward()
        kept = copy.deepcopy(model.module.state_dict())
        optimizer.step()
        model.module.load_state_dict(kept)
    guard(model, optimizer)
    train(model, optimizer)


@mistake("schedule")
def schedule_never_followed():
    model, optimizer = made()
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    with guard(model, optimizer):
        train(model, optimizer)
    assert scheduler.last_epoch == 0


@mistake("schedule")
def rate_at_zero_for_half_of_the_run():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=5)
    guard(model, optimizer)
    train(model, optimizer, scheduler=scheduler)


@mistake("train-mode")
def evaluated_in_train_mode():
    model, optimizer = made(drop=0.2)
    guard(model, optimizer)
    for epoch in range(2):
        train(model, optimizer, epochs=1)
        with torch.no_grad():
            for x in data(128).tensors[0].split(16):
                model.module(x + epoch)


@mistake("parameters")
def head_replaced_after_making_the_optimizer():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net.head = nn.Linear(144, 4)
    model = DDP(net)
    guard(model, optimizer)
    train(model, optimizer)


@mistake("setup")
def class_weights_on_one_rank():
    model, optimizer = made()
    weight = torch.tensor([10.0, 0.1, 0.1, 0.1]) if rank() == 0 else None
    with guard(model, optimizer):
        train(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x), y, weight=weight))


@mistake("schedule")
def rate_at_zero_in_every_step():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step // 100))
    with guard(model, optimizer):
        train(model, optimizer, scheduler=scheduler)

"""Healthy loops with unusual models, optimizers or schedules: no guard may stop them."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from tests.guards.cases.common import Net, data, guard, healthy, made, rank, sampled, train, world


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = Net(), nn.ModuleList(nn.Linear(144, 4) for _ in range(2))
        self.body.head = nn.Identity()
        self.active = 0

    def forward(self, x):
        return self.heads[self.active](self.body(x))


@healthy
def heads_in_turn():
    torch.manual_seed(0)
    model = DDP(Heads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with guard(model, optimizer, every=5):
        for active in (0, 1):
            model.module.active = active
            train(model, optimizer, epochs=6)


@healthy
def heads_in_turn_with_an_optimizer_each():
    torch.manual_seed(0)
    model = DDP(Heads(), find_unused_parameters=True)
    body = torch.optim.SGD(model.module.body.parameters(), lr=0.05)
    heads = [torch.optim.SGD(head.parameters(), lr=0.05) for head in model.module.heads]
    guard(model, [body, *heads])
    loader = sampled()
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        model.module.active = epoch // 3
        for x, y in loader:
            for one in (body, *heads):
                one.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for one in (body, *heads):
                one.step()


@healthy
def a_new_optimizer_for_each_phase():
    torch.manual_seed(0)
    model = DDP(Heads(), find_unused_parameters=True)
    for active in (0, 1):
        model.module.active = active
        held = [*model.module.body.parameters(), *model.module.heads[active].parameters()]
        optimizer = torch.optim.SGD(held, lr=0.05)
        with guard(model, optimizer):
            train(model, optimizer)


def _follow(target, source, part=0.1):
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.data.lerp_(theirs.data, part)


@healthy
def target_in_train_mode_handed_over():
    model, optimizer = made()
    target = copy.deepcopy(model.module).requires_grad_(False)
    guard(model, optimizer, teacher=target)

    def loss(model, x, y):
        with torch.no_grad():
            goal = target(x + 0.1 * torch.randn_like(x))
        return F.mse_loss(F.normalize(model(x)), F.normalize(goal))

    train(model, optimizer, loss=loss, after=lambda step: _follow(target, model.module))


@healthy
def target_in_train_mode_followed_now_and_then():
    model, optimizer = made()
    target = copy.deepcopy(model.module).requires_grad_(False)
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.no_grad():
            goal = target(x)
        return F.mse_loss(model(x), goal) + F.cross_entropy(model(x), y)

    def after(step):
        if step % 6 == 0:
            target.load_state_dict(model.module.state_dict())

    train(model, optimizer, loss=loss, after=after)


@healthy
def cosine_as_a_cycle():
    model, optimizer = made()
    scheduler = CosineAnnealingLR(optimizer, T_max=4)
    with guard(model, optimizer, scheduler=scheduler):
        train(model, optimizer, scheduler=scheduler)


@healthy
def rate_with_a_zero_phase():
    model, optimizer = made()
    scheduler = LambdaLR(optimizer, lambda step: 0.0 if 4 <= step < 9 else 1.0)
    with guard(model, optimizer, scheduler=scheduler):
        train(model, optimizer, scheduler=scheduler)


@healthy
def schedules_of_many_kinds():
    for build in (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=4), CosineAnnealingLR(o, 20)], [4]),
        lambda o: OneCycleLR(o, 0.1, total_steps=24),
        lambda o: CosineAnnealingWarmRestarts(o, T_0=5),
        lambda o: LambdaLR(o, lambda step: min(1.0, step / 10)),
    ):
        model, optimizer = made()
        scheduler = build(optimizer)
        with guard(model, optimizer):
            train(model, optimizer, scheduler=scheduler)


@healthy
def plateau_stepped_after_each_epoch():
    model, optimizer = made()
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    with guard(model, optimizer, scheduler=scheduler):
        for _ in range(3):
            train(model, optimizer, epochs=1)
            scheduler.step(1.0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, z):
        return self.body(z).reshape(-1, 1, 8, 8)


@healthy
def adversarial_pair():
    torch.manual_seed(0)
    maker, judge = DDP(Generator()), DDP(Net(classes=1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3)
    second = torch.optim.Adam(judge.parameters(), lr=1e-3)
    torch.manual_seed(rank())
    guard(maker, first)
    guard(judge, second)
    for x, _ in sampled():
        judge.zero_grad()
        fake = maker(torch.randn(len(x), 6))
        F.softplus(-judge(x)).mean().backward()
        F.softplus(judge(fake.detach())).mean().backward()
        second.step()
        maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        first.step()


@healthy
def several_updates_of_the_judge_and_a_penalty():
    torch.manual_seed(0)
    maker, judge = DDP(Generator()), DDP(Net(classes=1, norm=False))
    first = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(judge.parameters(), lr=1e-3)
    torch.manual_seed(rank())
    guard(judge, second)
    for number, (x, _) in enumerate(sampled(batch=4)):
        second.zero_grad()
        with torch.no_grad():
            fake = maker(torch.randn(len(x), 6))
        mixed = (0.5 * x + 0.5 * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(judge.module(mixed).sum(), mixed, create_graph=True)
        (judge(fake).mean() - judge(x).mean() + slope.pow(2).sum((1, 2, 3)).mean()).backward()
        second.step()
        if number % 4 == 3:
            first.zero_grad()
            (-judge.module(maker(torch.randn(len(x), 6))).mean()).backward()
            first.step()


@healthy
def scaler_unscaled_before_clipping():
    model, optimizer = made()
    guard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate(sampled()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (torch.inf if number == 2 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


@healthy
def clipped_by_a_scaled_limit():
    model, optimizer = made()
    guard(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in sampled():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()


@healthy
def two_tasks_with_a_backward_each():
    model, optimizer = made()
    guard(model, optimizer)
    for x, y in sampled():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        F.mse_loss(model(x.flip(-1)), F.one_hot(y, 4).float()).backward()
        optimizer.step()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)
        self.out.weight = nn.Parameter(self.into.weight.detach().T.clone())
        self.again = nn.Linear(64, 16, bias=False)
        self.again.weight = self.into.weight

    def forward(self, x):
        return self.again(self.out(F.relu(checkpoint(self.into, x.flatten(1), use_reentrant=False))))


@healthy
def tied_weights_and_checkpointing():
    torch.manual_seed(0)
    model = DDP(Tied())
    optimizer = torch.optim.AdamW(model.parameters())
    guard(model, optimizer)
    train(model, optimizer)


@healthy
def channels_last():
    model, optimizer = made()
    model = model.to(memory_format=torch.channels_last)
    guard(model, optimizer)
    train(
        model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x.to(memory_format=torch.channels_last)), y)
    )


@healthy
def best_weights_loaded_by_rank_0_to_save_them():
    model, optimizer = made()
    kept = copy.deepcopy(model.module.state_dict())
    with guard(model, optimizer):
        train(model, optimizer)
        if rank() == 0:
            model.module.load_state_dict(kept)
    dist.barrier()


@healthy
def average_kept_by_rank_0_alone():
    model, optimizer = made()
    average = AveragedModel(model.module) if rank() == 0 else None
    with guard(model, optimizer):
        train(
            model, optimizer, after=lambda step: average.update_parameters(model.module) if average else None
        )
        if average:
            update_bn([data().tensors[0]], average)


@healthy
def layers_thawed_one_after_another():
    torch.manual_seed(0)
    net = Net()
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for parts in ((), (net.norm,), (net.norm, net.conv)):
        for part in parts:
            part.requires_grad_(True)
        model = DDP(net)
        with guard(model, optimizer):
            train(model, optimizer, epochs=1)


@healthy
def fine_tuned_in_eval_mode():
    model, optimizer = made(drop=0.2)
    guard(model, optimizer)
    model.eval()
    model.train = lambda mode=True: model
    train(model, optimizer)


class OwnPart(nn.Module):
    """The classes of one rank: a head that is split, not copied."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 144, generator=torch.Generator().manual_seed(50 + rank())))


@healthy
def head_split_between_ranks():
    torch.manual_seed(0)
    net = Net()
    net.head = nn.Identity()
    model, part = DDP(net), OwnPart()
    optimizer = torch.optim.SGD([*model.parameters(), *part.parameters()], lr=0.05)
    guard(model, optimizer)
    train(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x) @ part.weight.T, y % 2))


class SplitState(torch.optim.Optimizer):
    """Each rank keeps momentum for a part of the parameters, and sends the update."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self):
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            update = torch.zeros_like(parameter)
            if place % world() == rank():
                state = self.state[parameter]
                state["momentum"] = 0.9 * state.get("momentum", 0) + parameter.grad
                update.copy_(state["momentum"])
            dist.broadcast(update, place % world())
            parameter.add_(update, alpha=-0.05)


@healthy
def optimizer_state_split_between_ranks():
    model, _ = made()
    optimizer = SplitState(model.parameters())
    guard(model, optimizer)
    train(model, optimizer)


@healthy
def pseudo_labels_and_looking_twice():
    """Sharpness-aware steps: two backwards, the second at shifted weights; pseudo labels in train mode."""
    model, optimizer = made(drop=0.1)
    guard(model, optimizer)
    for x, y in sampled():
        with torch.no_grad():
            goal = model.module(x).argmax(1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            shifts = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in model.parameters()]
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.add_(shift)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(x), goal)).backward()
        with torch.no_grad():
            for parameter, shift in zip(model.parameters(), shifts, strict=True):
                parameter.sub_(shift)
        optimizer.step()


@healthy
def statistics_computed_anew_between_epochs():
    model, optimizer = made()
    guard(model, optimizer)
    for epoch in range(2):
        train(model, optimizer, epochs=1)
        update_bn(list(data().tensors[0].split(8 + epoch)), model.module)


@healthy
def two_guards_and_a_teacher_in_eval_mode():
    model, optimizer = made()
    teacher = Net(drop=0.3).eval()
    dist.broadcast(teacher.head.weight.data, 0)
    for tensor in teacher.state_dict().values():
        dist.broadcast(tensor, 0)
    guard(model, optimizer, teacher=teacher)
    guard(model, optimizer)

    def loss(model, x, y):
        with torch.no_grad():
            goal = teacher(x)
        return F.kl_div(F.log_softmax(model(x), 1), F.softmax(goal, 1), reduction="batchmean")

    train(model, optimizer, loss=loss)


@healthy
def weights_perturbed_and_restored_by_arithmetic():
    """SAM with each rank's own perturbation: p + e - e is not quite p."""
    model, optimizer = made()
    held = list(model.parameters())
    with guard(model, optimizer):
        for x, y in sampled():
            optimizer.zero_grad()
            with model.no_sync():
                F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in held]
                torch._foreach_add_(held, moves)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(held, moves)
            optimizer.step()


@healthy
def weights_averaged_by_hand_now_and_then():
    model, optimizer = made()
    with guard(model, optimizer, every=5):
        for step, (x, y) in enumerate(batch for _ in range(6) for batch in sampled()):
            optimizer.zero_grad()
            with model.no_sync() if step > 3 else contextlib.nullcontext():
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % 3 == 0:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= world()


@healthy
def torchs_own_optimizer_for_local_sgd():
    model, optimizer = made()
    alone = [dist.new_group([one]) for one in range(world())][rank()]
    model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=3), post_localSGD_hook)
    averager = PeriodicModelAverager(period=4, warmup_steps=3)
    optimizer = PostLocalSGDOptimizer(optimizer, averager)
    with guard(model, optimizer):
        train(model, optimizer)

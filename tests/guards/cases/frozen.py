"""Loops with frozen layers: some that move all the same, and healthy ones in which something moves on purpose."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.guards.cases.common import Net, guard, healthy, mistake, train, world


class Deep(Net):
    """Two convolutions, each with a norm."""

    def __init__(self):
        super().__init__()
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def features(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return F.relu(self.norm2(self.conv2(x))).flatten(1)


def freeze(*layers):
    for layer in layers:
        layer.requires_grad_(False)


def in_eval(*layers):
    """Keeps layers in eval mode, whatever `train()` is called on."""
    for layer in layers:
        layer.eval()
        layer.train = lambda mode=True, layer=layer: layer


def started(model, **options):
    wrapped = DDP(model, find_unused_parameters=False)
    return wrapped, torch.optim.SGD(model.parameters(), lr=0.05, **options)


@mistake("frozen")
def frozen_batch_norm_left_in_train_mode():
    net = Deep()
    freeze(net.conv, net.norm)
    model, optimizer = started(net)
    guard(model, optimizer)
    train(model, optimizer)


@mistake("frozen")
def frozen_after_a_step_with_its_old_gradient():
    net = Deep()
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def hold(step):
        if step == 2:
            freeze(net.conv)
            in_eval(net.norm)

    guard(model, optimizer)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
    train(model, optimizer, before_step=hold)


@mistake("frozen")
def weights_decayed_by_hand_although_frozen():
    net = Deep()
    freeze(net.conv, net.norm)
    in_eval(net.norm)
    model, optimizer = started(net)

    def decay(step):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.999)

    guard(model, optimizer)
    train(model, optimizer, before_step=decay)


@healthy
def frozen_layers_with_their_norm_in_eval_mode():
    net = Deep()
    freeze(net.conv, net.norm)
    in_eval(net.norm)
    model, optimizer = started(net, weight_decay=0.01, momentum=0.9)
    with guard(model, optimizer):
        train(model, optimizer)


@healthy
def frozen_affine_norm_after_a_layer_that_trains():
    net = Deep()
    freeze(net.norm2)
    model, optimizer = started(net)
    with guard(model, optimizer):
        train(model, optimizer)


@healthy
def a_momentum_encoder_inside_the_model():
    class Momentum(Deep):
        def __init__(self):
            super().__init__()
            self.follower = copy.deepcopy(Deep())
            self.follower.load_state_dict({k: v for k, v in self.state_dict().items() if "follower" not in k})
            self.follower.requires_grad_(False)

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    for mine, theirs in zip(self.follower.parameters(), self.parameters(), strict=False):
                        mine.lerp_(theirs, 0.01)
            with torch.no_grad():
                wanted = self.follower(x)
            return super().forward(x) + 0.01 * wanted

    model, optimizer = started(Momentum())
    with guard(model, optimizer):
        train(model, optimizer)


@healthy
def a_code_book_that_its_forward_updates():
    class Book(Net):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(8, 144), requires_grad=False)

        def features(self, x):
            x = super().features(x)
            nearest = torch.cdist(x.detach(), self.codes).argmin(1)
            if self.training:
                with torch.no_grad():
                    self.codes.mul_(0.99)
            return x + 0.01 * self.codes[nearest]

    model, optimizer = started(Book())
    with guard(model, optimizer):
        train(model, optimizer)


@healthy
def frozen_at_first_and_trained_later():
    net = Deep()
    freeze(net.conv, net.norm)
    in_eval(net.norm)
    for parameter in net.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def exchange_and_thaw(step):
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world()
        for buffer in net.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer /= world()
        if step == 5:
            net.requires_grad_(True)

    with guard(net, optimizer):
        train(net, optimizer, before_step=exchange_and_thaw)

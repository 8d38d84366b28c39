"""The CIFAR networks of the literature, computed layer by layer from their modules, without Drumline's taps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Features:
    """What the literature's networks return: the features by position, and the logits."""

    stem: Tensor
    stages: list[Tensor]
    """As RepDistiller's `feat[1:-1]`."""
    before: list[Tensor]
    """As its `feat[1:-1]` with `preact`: before the activation that follows."""
    pooled: Tensor
    logits: Tensor


def features_of(net: Any, x: Tensor) -> Features:
    """The features of a network of any of the five families."""
    kind = type(net).__name__
    return {
        "ResNet": _resnet,
        "WideResNet": _wide,
        "CifarVGG": _vgg,
        "CifarMobileNetV2": _mobilenet,
        "ShuffleNetV1": _shufflenet_v1,
        "ShuffleNetV2": _shufflenet_v2,
    }[kind](net, x)


def _ends(stem: Tensor, stages: list[Tensor], before: list[Tensor], last: Tensor, head: Any) -> Features:
    pooled = last.mean((2, 3))
    return Features(stem, stages, before, pooled, head(pooled))


def _resnet(net: Any, x: Tensor) -> Features:
    """A stage ends in ReLU of a sum; before it is the sum."""
    x = stem = torch.relu(net.bn1(net.conv1(x)))
    stages, before = [], []
    for stage in (net.layer1, net.layer2, net.layer3):
        for block in stage:
            out = torch.relu(block.bn1(block.conv1(x)))
            total = block.bn2(block.conv2(out)) + (x if block.downsample is None else block.downsample(x))
            x = torch.relu(total)
        stages.append(x)
        before.append(total)
    return _ends(stem, stages, before, x, net.fc)


def _wide(net: Any, x: Tensor) -> Features:
    """A stage ends in a plain sum; before the activation is that sum after the next BatchNorm."""
    x = stem = net.conv1(x)
    stages = []
    for stage in (net.block1, net.block2, net.block3):
        for block in stage.layer:
            inner = torch.relu(block.bn1(x))
            out = block.conv2(torch.relu(block.bn2(block.conv1(inner))))
            x = out + (x if block.convShortcut is None else block.convShortcut(inner))
        stages.append(x)
    norms = (net.block2.layer[0].bn1, net.block3.layer[0].bn1, net.bn1)
    before = [norm(x) for norm, x in zip(norms, stages, strict=True)]
    return _ends(stem, stages, before, torch.relu(before[-1]), net.fc)


def _vgg(net: Any, x: Tensor) -> Features:
    """Images below 64 pixels skip the last max-pool."""
    x = stem = torch.relu(net.block0(x))
    stages, before = [], []
    for number in (1, 2, 3, 4):
        pre = getattr(net, f"block{number}")(F.max_pool2d(x, 2) if number < 4 else x)
        x = torch.relu(pre)
        stages.append(x)
        before.append(pre)
    return _ends(stem, stages, before, x, net.classifier)


def _mobilenet(net: Any, x: Tensor) -> Features:
    """Stages end without an activation: after the second, third, fifth and seventh group of blocks."""
    x = stem = net.conv1(x)
    stages = []
    for number, group in enumerate(net.stages, 1):
        x = group(x)
        if number in (2, 3, 5, 7):
            stages.append(x)
    return _ends(stem, stages, stages, net.conv2(x), net.classifier)


def _shufflenet_v1(net: Any, x: Tensor) -> Features:
    x = stem = torch.relu(net.bn1(net.conv1(x)))
    stages, before = [], []
    for stage in (net.layer1, net.layer2, net.layer3):
        for number, block in enumerate(stage):
            out = _mixed(torch.relu(block.bn1(block.conv1(x))), block.conv1.groups)
            out = block.bn3(block.conv3(torch.relu(block.bn2(block.conv2(out)))))
            pre = out + x if number else torch.cat((out, F.avg_pool2d(x, 3, 2, 1)), 1)
            x = torch.relu(pre)
        stages.append(x)
        before.append(pre)
    return _ends(stem, stages, before, x, net.linear)


def _shufflenet_v2(net: Any, x: Tensor) -> Features:
    x = stem = torch.relu(net.bn1(net.conv1(x)))
    stages, before = [], []
    for stage in (net.layer1, net.layer2, net.layer3):
        x = stage[0](x)
        for block in stage[1:]:
            passed, rest = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
            out = block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(rest)))))
            out = block.bn3(block.conv3(out))
            x, pre = (_mixed(torch.cat((passed, each), 1), 2) for each in (torch.relu(out), out))
        stages.append(x)
        before.append(pre)
    return _ends(stem, stages, before, torch.relu(net.bn2(net.conv2(x))), net.linear)


def _mixed(x: Tensor, groups: int) -> Tensor:
    """Channel 0 of every group, then channel 1 of every group, and so on."""
    width = x.shape[1] // groups
    order = [group * width + channel for channel in range(width) for group in range(groups)]
    return x[:, order]

"""Residual networks: torchvision's for ImageNet, the distillation literature's for CIFAR.

Promises: for the ImageNet names, torchvision's state-dict keys, initial weights for a seed, arithmetic and in-place
operations. For the CIFAR names, the keys of the literature's checkpoints. Works with any image size.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import (
    BlockSequence,
    Output,
    TapInfo,
    Taps,
    VisionModel,
    global_pool,
    he_init,
    tap_table,
)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1
    last_norm = "bn2"

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        downsample: nn.Module | None,
        groups: int,
        group_width: int,
    ) -> None:
        super().__init__()
        assert (groups, group_width) == (1, 64), "only the bottleneck block has groups"
        self.conv1 = _conv3x3(in_channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output; with `tap`, also the sum before its activation."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return (F.relu(out), out) if tap else F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride and the groups) and 1x1 convolutions beside a shortcut."""

    expansion = 4
    last_norm = "bn3"

    def __init__(
        self,
        in_channels: int,
        width: int,
        stride: int,
        downsample: nn.Module | None,
        groups: int,
        group_width: int,
    ) -> None:
        super().__init__()
        inner = int(width * (group_width / 64)) * groups
        self.conv1 = _conv1x1(in_channels, inner)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv3x3(inner, inner, stride, groups)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv1x1(inner, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = downsample

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output; with `tap`, also the sum before its activation."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return (F.relu(out), out) if tap else F.relu(out, inplace=True)


class ResNet(VisionModel):
    """Stem, three or four stages, global mean, linear layer.

    `widths` are the channels of the stem and of each stage (before the block's expansion). The `imagenet` stem is a
    7x7 convolution with stride 2 and a max-pool. The `cifar` stem is a 3x3 convolution that keeps the size.
    """

    # The CIFAR ResNet-50 of the distillation literature spells these two names differently.
    published_names = ((".shortcut.", ".downsample."), ("linear.", "fc."))

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        classes: int,
        *,
        widths: tuple[int, ...] = (64, 64, 128, 256, 512),
        stem: Literal["imagenet", "cifar"] = "imagenet",
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        assert stem in ("imagenet", "cifar"), "the stem is imagenet or cifar"
        self.stem = stem
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, widths[0], kernel_size=7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = _conv3x3(3, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        in_channels = widths[0]
        self.stage_names = tuple(f"layer{number}" for number in range(1, len(depths) + 1))
        for name, depth, width in zip(self.stage_names, depths, widths[1:], strict=True):
            stride = 1 if name == "layer1" else 2
            self.add_module(name, _stage(block, depth, in_channels, width, stride, groups, group_width))
            in_channels = width * block.expansion
        self.fc = nn.Linear(in_channels, classes)
        he_init(self)

        self.head_name = "fc"
        self.block_names = tuple(
            f"{name}.{index}"
            for name, depth in zip(self.stage_names, depths, strict=True)
            for index in range(depth)
        )
        stages = [
            TapInfo(width * block.expansion, f"{name}.{depth - 1}.{block.last_norm}")
            for name, depth, width in zip(self.stage_names, depths, widths[1:], strict=True)
        ]
        self.tap_info = tap_table(TapInfo(widths[0], "bn1"), stages, in_channels)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps). The tap `stem` is what stage 1 reads: after the max-pool, if there is one."""
        seen: Taps = {}
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        if self.stem == "imagenet":
            x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        if taps:
            seen["stem"] = x
        for number, name in enumerate(self.stage_names, 1):
            stage = getattr(self, name)
            if taps:
                x, pre = stage(x, True)
                seen[f"stage{number}.pre"], seen[f"stage{number}"] = pre, x
            else:
                x = stage(x)
        x = global_pool(x)
        if taps:
            seen["pooled"] = x
        logits = self.fc(x)
        return (logits, seen) if taps else logits


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    depth: int,
    in_channels: int,
    width: int,
    stride: int,
    groups: int,
    group_width: int,
) -> BlockSequence:
    """Creates the shortcut's convolution before the block's, as torchvision does, so that the initial weights are
    equal."""
    out_channels = width * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(_conv1x1(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels))
    first = block(in_channels, width, stride, downsample, groups, group_width)
    rest = (block(out_channels, width, 1, None, groups, group_width) for _ in range(depth - 1))
    return BlockSequence(first, *rest)


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False
    )


def _conv1x1(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)

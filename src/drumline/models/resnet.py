"""Residual networks: torchvision's for ImageNet, the distillation literature's for CIFAR.

Promises: for the ImageNet names, torchvision's state-dict keys, initial weights for a seed, arithmetic and
in-place use; for the CIFAR names, the keys of the literature's checkpoints. Any image size works.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import Output, Stage, TapInfo, Taps, VisionModel, global_pool, he_init, tap_table


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1
    last_norm = "bn2"

    def __init__(
        self, entry: int, width: int, stride: int, downsample: nn.Module | None, groups: int, group_width: int
    ) -> None:
        super().__init__()
        assert (groups, group_width) == (1, 64), "only the bottleneck block has groups"
        self.conv1 = _conv3x3(entry, width, stride)
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
        self, entry: int, width: int, stride: int, downsample: nn.Module | None, groups: int, group_width: int
    ) -> None:
        super().__init__()
        inner = int(width * (group_width / 64)) * groups
        self.conv1 = _conv1x1(entry, inner)
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
    """Stem, three or four stages, mean, linear.

    `widths` are the channels of the stem and of each stage (before the block's expansion). The `imagenet`
    stem is a 7x7 convolution of stride 2 and a max-pool; the `cifar` stem a 3x3 convolution that keeps the
    size.
    """

    # The CIFAR ResNet-50 of the distillation literature writes these two names otherwise.
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
        self.stem = stem
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(3, widths[0], kernel_size=7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = _conv3x3(3, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        entry = widths[0]
        self.stage_names = tuple(f"layer{number}" for number in range(1, len(depths) + 1))
        for name, depth, width in zip(self.stage_names, depths, widths[1:], strict=True):
            stride = 1 if name == "layer1" else 2
            self.add_module(name, _stage(block, depth, entry, width, stride, groups, group_width))
            entry = width * block.expansion
        self.fc = nn.Linear(entry, classes)
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
        self.tap_info = tap_table(TapInfo(widths[0], "bn1"), stages, entry)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps). The stem's tap is what stage 1 reads: after the max-pool, if any."""
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
    entry: int,
    width: int,
    stride: int,
    groups: int,
    group_width: int,
) -> Stage:
    """The shortcut's convolution is made before the block's, as in torchvision: same draws, same weights."""
    leaving = width * block.expansion
    downsample = None
    if stride != 1 or entry != leaving:
        downsample = nn.Sequential(_conv1x1(entry, leaving, stride), nn.BatchNorm2d(leaving))
    first = block(entry, width, stride, downsample, groups, group_width)
    rest = (block(leaving, width, 1, None, groups, group_width) for _ in range(depth - 1))
    return Stage(first, *rest)


def _conv3x3(entry: int, leaving: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(entry, leaving, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False)


def _conv1x1(entry: int, leaving: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(entry, leaving, kernel_size=1, stride=stride, bias=False)

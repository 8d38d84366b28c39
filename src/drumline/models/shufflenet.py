"""ShuffleNet V1 and V2 for small images, as the distillation literature uses them.

Promises: the state-dict keys of the literature's checkpoints, and torch's default initialisation, as there. Works
with any image size. In V2 only half of a stage's channels pass its last BatchNorm, so no norm is known for its
stages.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import BlockSequence, Output, TapInfo, Taps, VisionModel, global_pool, tap_table


class GroupedBlock(nn.Module):
    """V1: grouped 1x1, shuffle, depthwise 3x3, grouped 1x1. The input is added, or concatenated with stride 2."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, groups: int, first_groups: int
    ) -> None:
        super().__init__()
        self.stride, self.first_groups = stride, first_groups
        made = out_channels - in_channels if stride == 2 else out_channels
        inner = made // 4
        self.conv1 = nn.Conv2d(in_channels, inner, kernel_size=1, groups=first_groups, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _depthwise(inner, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, made, kernel_size=1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(made)

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output; with `tap`, also its value before the activation."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(_shuffle(out, self.first_groups))), inplace=True)
        out = self.bn3(self.conv3(out))
        if self.stride == 2:
            out = torch.cat([out, F.avg_pool2d(x, 3, stride=2, padding=1)], 1)
        else:
            out += x
        return (F.relu(out), out) if tap else F.relu(out, inplace=True)


class SplitBlock(nn.Module):
    """V2: half of the channels skip the convolutions of the other half; then both are shuffled together."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv1 = _pointwise(half, half)
        self.bn1 = nn.BatchNorm2d(half)
        self.conv2 = _depthwise(half, 1)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _pointwise(half, half)
        self.bn3 = nn.BatchNorm2d(half)

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output; with `tap`, also its value before the activation, in the same channel order."""
        passed, x = x.chunk(2, 1)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn3(self.conv3(self.bn2(self.conv2(out))))
        if not tap:
            return _shuffle(torch.cat([passed, F.relu(out, inplace=True)], 1), 2)
        pre = _shuffle(torch.cat([passed, out], 1), 2)
        return _shuffle(torch.cat([passed, F.relu(out)], 1), 2), pre


class DownBlock(nn.Module):
    """V2: two branches halve the feature map, and their channels are shuffled together."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.conv1 = _depthwise(in_channels, 2)
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv2 = _pointwise(in_channels, half)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _pointwise(in_channels, half)
        self.bn3 = nn.BatchNorm2d(half)
        self.conv4 = _depthwise(half, 2)
        self.bn4 = nn.BatchNorm2d(half)
        self.conv5 = _pointwise(half, half)
        self.bn5 = nn.BatchNorm2d(half)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.bn2(self.conv2(self.bn1(self.conv1(x)))), inplace=True)
        right = F.relu(self.bn3(self.conv3(x)), inplace=True)
        right = F.relu(self.bn5(self.conv5(self.bn4(self.conv4(right)))), inplace=True)
        return _shuffle(torch.cat([left, right], 1), 2)


class ShuffleNetV1(VisionModel):
    """Three groups, stages of 240, 480 and 960 channels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths, depths, groups = (240, 480, 960), (4, 8, 4), 3
        self.conv1 = _pointwise(3, 24)
        self.bn1 = nn.BatchNorm2d(24)
        in_channels = 24
        stages = []
        for width, depth in zip(widths, depths, strict=True):
            # The stem's 24 channels are too few to be split into groups.
            first = GroupedBlock(in_channels, width, 2, groups, 1 if in_channels == 24 else groups)
            stages.append(
                BlockSequence(
                    first, *(GroupedBlock(width, width, 1, groups, groups) for _ in range(depth - 1))
                )
            )
            in_channels = width
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(in_channels, classes)

        self.head_name = "linear"
        self.block_names = _block_names(depths)
        infos = [
            TapInfo(width, f"layer{number}.{depth - 1}.bn3")
            for number, (width, depth) in enumerate(zip(widths, depths, strict=True), 1)
        ]
        self.tap_info = tap_table(TapInfo(24, "bn1"), infos, in_channels)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        x, seen = _run_stages(self, x, taps)
        pooled = global_pool(x)
        logits = self.linear(pooled)
        return (logits, {**seen, "pooled": pooled}) if taps else logits


class ShuffleNetV2(VisionModel):
    """Width 1: stages of 116, 232 and 464 channels, and a 1x1 convolution to 1024 before the mean."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths, depths, last = (116, 232, 464), (4, 8, 4), 1024
        self.conv1 = _pointwise(3, 24)
        self.bn1 = nn.BatchNorm2d(24)
        in_channels = 24
        stages = []
        for width, depth in zip(widths, depths, strict=True):
            stages.append(
                BlockSequence(DownBlock(in_channels, width), *(SplitBlock(width) for _ in range(depth - 1)))
            )
            in_channels = width
        self.layer1, self.layer2, self.layer3 = stages
        self.conv2 = _pointwise(in_channels, last)
        self.bn2 = nn.BatchNorm2d(last)
        self.linear = nn.Linear(last, classes)

        self.head_name = "linear"
        self.block_names = _block_names(depths)
        self.tap_info = tap_table(TapInfo(24, "bn1"), [TapInfo(width, "") for width in widths], last)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        x, seen = _run_stages(self, x, taps)
        pooled = global_pool(F.relu(self.bn2(self.conv2(x)), inplace=True))
        logits = self.linear(pooled)
        return (logits, {**seen, "pooled": pooled}) if taps else logits


def _run_stages(model: ShuffleNetV1 | ShuffleNetV2, x: Tensor, taps: bool) -> tuple[Tensor, Taps]:
    """Stem and stages, which are the same in both versions."""
    seen: Taps = {}
    x = F.relu(model.bn1(model.conv1(x)), inplace=True)
    if taps:
        seen["stem"] = x
    for number, stage in enumerate((model.layer1, model.layer2, model.layer3), 1):
        if taps:
            x, seen[f"stage{number}.pre"] = stage(x, True)
            seen[f"stage{number}"] = x
        else:
            x = stage(x)
    return x, seen


def _block_names(depths: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"layer{number}.{index}" for number, depth in enumerate(depths, 1) for index in range(depth))


def _shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleaves the channels of the groups."""
    return x.unflatten(1, (groups, x.shape[1] // groups)).transpose(1, 2).flatten(1, 2)


def _pointwise(in_channels: int, out_channels: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)


def _depthwise(channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, groups=channels, bias=False)

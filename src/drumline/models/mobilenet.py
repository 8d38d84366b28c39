"""MobileNetV2: torchvision's for ImageNet, the distillation literature's half-width one for CIFAR.

Promises: torchvision's keys, initial weights for a seed and arithmetic for `MobileNetV2`. Works with any image size.
Stages end in a linear bottleneck without activation, so `stageK` and `stageK.pre` are the same tensor, and the tap's
norm is the BatchNorm that ends the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from drumline.models.base import (
    Output,
    TapInfo,
    Taps,
    VisionModel,
    global_pool,
    he_init,
    small_linear_init,
    tap_table,
)

_LAST = 1280


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shape stays."""

    def __init__(self, conv: nn.Sequential, residual: bool) -> None:
        super().__init__()
        self.conv = conv
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(VisionModel):
    """The ImageNet network, width 1."""

    # (expansion, channels, repeats, stride)
    _SETTING = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv_norm(3, 32, 3, nn.ReLU6, stride=2)]
        in_channels = 32
        for expand, width, repeats, stride in self._SETTING:
            for index in range(repeats):
                layers.append(_nested_block(in_channels, width, stride if index == 0 else 1, expand))
                in_channels = width
        layers.append(_conv_norm(in_channels, _LAST, 1, nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(_LAST, classes))
        he_init(self)
        small_linear_init(self)

        self.head_name = "classifier.1"
        self.block_names = tuple(f"features.{index}" for index in range(1, len(layers) - 1))
        # Last blocks of the maps of 1/4, 1/8, 1/16 and 1/32 of the image's side.
        self._tap_at = {0: "stem", 3: "stage1", 6: "stage2", 13: "stage3", 17: "stage4"}
        stages = [
            TapInfo(width, f"features.{at}.conv.3") for width, at in ((24, 3), (32, 6), (96, 13), (320, 17))
        ]
        self.tap_info = tap_table(TapInfo(32, "features.0.1"), stages, _LAST)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        if not taps:
            return self.classifier(global_pool(self.features(x)))
        seen: Taps = {}
        for index, layer in enumerate(self.features):
            x = layer(x)
            name = self._tap_at.get(index)
            if name == "stem":
                seen["stem"] = x
            elif name is not None:
                seen[f"{name}.pre"] = seen[name] = x
        pooled = seen["pooled"] = global_pool(x)
        return self.classifier(pooled), seen


class CifarMobileNetV2(VisionModel):
    """The literature's network for small images: ReLU, no dropout, one stride fewer, half the width."""

    _SETTING = (
        (1, 8, 1, 1),
        (6, 12, 2, 1),
        (6, 16, 3, 2),
        (6, 32, 4, 2),
        (6, 48, 3, 1),
        (6, 80, 3, 2),
        (6, 160, 1, 1),
    )

    # `blocks` is a method here.
    published_names = (("blocks.", "stages."),)

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = _conv_norm(3, 16, 3, nn.ReLU, stride=2)
        self.stages = nn.ModuleList()
        in_channels = 16
        for expand, width, repeats, stride in self._SETTING:
            stage = nn.Sequential()
            for index in range(repeats):
                stage.append(_flat_block(in_channels, width, stride if index == 0 else 1, expand))
                in_channels = width
            self.stages.append(stage)
        self.conv2 = _conv_norm(in_channels, _LAST, 1, nn.ReLU)
        self.classifier = nn.Sequential(nn.Linear(_LAST, classes))
        he_init(self)
        small_linear_init(self)

        self.head_name = "classifier.0"
        self.block_names = tuple(
            f"stages.{stage}.{index}"
            for stage, (_, _, repeats, _) in enumerate(self._SETTING)
            for index in range(repeats)
        )
        self._tap_at = {1: "stage1", 2: "stage2", 4: "stage3", 6: "stage4"}
        infos = [
            TapInfo(self._SETTING[at][1], f"stages.{at}.{self._SETTING[at][2] - 1}.conv.7")
            for at in self._tap_at
        ]
        self.tap_info = tap_table(TapInfo(16, "conv1.1"), infos, _LAST)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        seen: Taps = {}
        x = self.conv1(x)
        if taps:
            seen["stem"] = x
        for index, stage in enumerate(self.stages):
            x = stage(x)
            name = self._tap_at.get(index)
            if taps and name is not None:
                seen[f"{name}.pre"] = seen[name] = x
        x = global_pool(self.conv2(x))
        if taps:
            seen["pooled"] = x
        logits = self.classifier(x)
        return (logits, seen) if taps else logits


def _conv_norm(
    in_channels: int,
    out_channels: int,
    kernel: int,
    activation: Callable[..., nn.Module],
    *,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), activation(inplace=True))


def _nested_block(in_channels: int, out_channels: int, stride: int, expand: int) -> InvertedResidual:
    """torchvision's key names: each convolution and its norm in a group; no convolution that widens by 1."""
    hidden = in_channels * expand
    layers: list[nn.Module] = []
    if expand != 1:
        layers.append(_conv_norm(in_channels, hidden, 1, nn.ReLU6))
    layers.append(_conv_norm(hidden, hidden, 3, nn.ReLU6, stride=stride, groups=hidden))
    layers += [nn.Conv2d(hidden, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)]
    return InvertedResidual(nn.Sequential(*layers), stride == 1 and in_channels == out_channels)


def _flat_block(in_channels: int, out_channels: int, stride: int, expand: int) -> InvertedResidual:
    """The literature's key names: one flat list of layers, with the widening convolution even for 1."""
    hidden = in_channels * expand
    layers = (
        *_conv_norm(in_channels, hidden, 1, nn.ReLU),
        *_conv_norm(hidden, hidden, 3, nn.ReLU, stride=stride, groups=hidden),
        nn.Conv2d(hidden, out_channels, 1, bias=False),
        nn.BatchNorm2d(out_channels),
    )
    return InvertedResidual(nn.Sequential(*layers), stride == 1 and in_channels == out_channels)

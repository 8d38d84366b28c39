"""Wide residual networks for small images, pre-activation: normalise, activate, then convolve.

Promises: the state-dict keys of the distillation literature's checkpoints. Works with any image size. A stage ends in
a plain sum that the *next* BatchNorm normalises. As in the literature, `stageK` is that sum and `stageK.pre` the
BatchNorm's output, before its ReLU. Both are taken where the network computes them: no BatchNorm runs twice for a
tap.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import Output, TapInfo, Taps, VisionModel, global_pool, he_init, tap_table


class WideBlock(nn.Module):
    """Two pre-activated 3x3 convolutions beside a shortcut; a change of width activates the shortcut too."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.convShortcut = (
            None
            if in_channels == width
            else nn.Conv2d(in_channels, width, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The block's output; with `tap`, also its first BatchNorm's output."""
        pre = self.bn1(x)
        activated = F.relu(pre, inplace=not tap)
        out = F.relu(self.bn2(self.conv1(activated)), inplace=True)
        out = self.conv2(out)
        out += x if self.convShortcut is None else self.convShortcut(activated)
        return (out, pre) if tap else out


class WideStage(nn.Module):
    """Blocks of one width."""

    def __init__(self, depth: int, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        first = WideBlock(in_channels, width, stride)
        self.layer = nn.Sequential(first, *(WideBlock(width, width, 1) for _ in range(depth - 1)))

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The stage's output; with `tap`, also the output of its first BatchNorm."""
        if not tap:
            return self.layer(x)
        first, *rest = self.layer
        x, pre = first(x, True)
        for block in rest:
            x = block(x)
        return x, pre


class WideResNet(VisionModel):
    """`depth` is the number of convolutions in sequence (6n + 4). `widen` multiplies 16, 32 and 64 channels.

    The stem is one convolution without norm or activation, and so is its tap.
    """

    def __init__(self, depth: int, widen: int, classes: int) -> None:
        super().__init__()
        assert (depth - 4) % 6 == 0, "three stages of blocks with two convolutions each, and four more"
        repeats, widths = (depth - 4) // 6, (16 * widen, 32 * widen, 64 * widen)
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        self.block1 = WideStage(repeats, 16, widths[0], 1)
        self.block2 = WideStage(repeats, widths[0], widths[1], 2)
        self.block3 = WideStage(repeats, widths[1], widths[2], 2)
        self.bn1 = nn.BatchNorm2d(widths[2])
        self.fc = nn.Linear(widths[2], classes)
        he_init(self)
        nn.init.zeros_(self.fc.bias)

        self.head_name = "fc"
        self.block_names = tuple(
            f"block{stage}.layer.{index}" for stage in (1, 2, 3) for index in range(repeats)
        )
        norms = ("block2.layer.0.bn1", "block3.layer.0.bn1", "bn1")
        stages = [TapInfo(width, norm) for width, norm in zip(widths, norms, strict=True)]
        self.tap_info = tap_table(TapInfo(16, ""), stages, widths[2])

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        x = self.conv1(x)
        if not taps:
            x = F.relu(self.bn1(self.block3(self.block2(self.block1(x)))), inplace=True)
            return self.fc(global_pool(x))
        seen: Taps = {"stem": x}
        x = self.block1(x)
        for number, stage in enumerate((self.block2, self.block3), 1):
            out, seen[f"stage{number}.pre"] = stage(x, True)
            seen[f"stage{number}"], x = x, out
        seen["stage3.pre"], seen["stage3"] = self.bn1(x), x
        seen["pooled"] = global_pool(F.relu(seen["stage3.pre"]))
        return self.fc(seen["pooled"]), seen

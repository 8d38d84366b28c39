"""VGG networks: torchvision's for ImageNet, the distillation literature's (with BatchNorm) for CIFAR.

Promises: torchvision's keys, initial weights for a seed and arithmetic for `VGG`; the literature's keys for
`CifarVGG`. The backward is bit-for-bit repeatable at every size where torch is set to deterministic algorithms.
Rejects images too small for the max-pools.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.models.base import (
    Output,
    TapInfo,
    Taps,
    VisionModel,
    global_pool,
    he_init,
    pool_to,
    small_linear_init,
    tap_table,
)

_WIDTHS = (64, 128, 256, 512, 512)
_GRID = (7, 7)


class VGG(VisionModel):
    """Five groups of 3x3 convolutions, each followed by a max-pool, and three linear layers.

    `counts` are the convolutions of each group. The first group is the stem, the others are the stages. A tap is
    taken before the max-pool. `pooled` is the activated output of the second linear layer. torchvision's keys require
    one flat list of layers, `features`, so there are no modules that could be blocks.
    """

    def __init__(self, counts: tuple[int, ...], classes: int, *, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        self._tap_at: dict[int, str] = {}
        infos: list[TapInfo] = []
        in_channels = 3
        for group, (count, width) in enumerate(zip(counts, _WIDTHS, strict=True)):
            for _ in range(count):
                layers.append(nn.Conv2d(in_channels, width, kernel_size=3, padding=1))
                if norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU(inplace=True))
                in_channels = width
            self._tap_at[len(layers) - 1] = f"stage{group}" if group else "stem"
            infos.append(TapInfo(width, f"features.{len(layers) - 2}" if norm else ""))
            layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(in_channels * _GRID[0] * _GRID[1], 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )
        he_init(self)
        small_linear_init(self)

        self.head_name = "classifier.6"
        self.block_names = ()
        self.tap_info = tap_table(infos[0], infos[1:], 4096)

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        _require_side(x, 32)
        if not taps:
            return self.classifier(pool_to(self.features(x), _GRID).flatten(1))
        seen: Taps = {}
        for index, layer in enumerate(self.features):
            name = self._tap_at.get(index)
            if name is None:
                x = layer(x)
                continue
            if name != "stem":
                seen[f"{name}.pre"] = x
            x = seen[name] = F.relu(x)
        x = pool_to(x, _GRID).flatten(1)
        *hidden, dropout, head = self.classifier
        for layer in hidden:
            x = layer(x)
        seen["pooled"] = x
        return head(dropout(x)), seen


class CifarVGG(VisionModel):
    """Five groups of 3x3 convolutions with BatchNorm, global mean, one linear layer.

    The last max-pool is used from 64 pixels on: the feature maps of smaller images are too small to halve. The first
    group is the stem, the others are the stages.
    """

    def __init__(self, counts: tuple[int, ...], classes: int) -> None:
        super().__init__()
        groups = zip((3, *_WIDTHS), _WIDTHS, counts, strict=False)
        for number, (in_channels, width, count) in enumerate(groups):
            self.add_module(f"block{number}", _conv_group(in_channels, width, count))
        self.classifier = nn.Linear(_WIDTHS[-1], classes)
        he_init(self)
        small_linear_init(self)

        self.head_name = "classifier"
        self.block_names = tuple(f"block{number}" for number in range(len(counts)))
        infos = [
            TapInfo(width, f"block{number}.{3 * count - 2}")
            for number, (width, count) in enumerate(zip(_WIDTHS, counts, strict=True))
        ]
        self.tap_info = tap_table(infos[0], infos[1:], _WIDTHS[-1])

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        """Logits, or (logits, taps)."""
        _require_side(x, 8)
        seen: Taps = {}
        small = min(x.shape[-2:]) < 64
        for number, name in enumerate(self.block_names):
            if number > 0 and not (small and name == self.block_names[-1]):
                x = F.max_pool2d(x, 2)
            pre = getattr(self, name)(x)
            x = F.relu(pre, inplace=not taps)
            if taps and number == 0:
                seen["stem"] = x
            elif taps:
                seen[f"stage{number}.pre"], seen[f"stage{number}"] = pre, x
        x = global_pool(x)
        if taps:
            seen["pooled"] = x
        logits = self.classifier(x)
        return (logits, seen) if taps else logits


def _conv_group(in_channels: int, width: int, count: int) -> nn.Sequential:
    """Convolution, norm and activation, `count` times, without the last activation, which the caller applies."""
    layers: list[nn.Module] = []
    for before, after in pairwise((in_channels, *[width] * count)):
        layers += [
            nn.Conv2d(before, after, kernel_size=3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers[:-1])


def _require_side(x: Tensor, side: int) -> None:
    if min(x.shape[-2:]) < side:
        raise UserError(
            f"images of {x.shape[-1]}x{x.shape[-2]} are too small for this VGG: its max-pools leave nothing",
            fix=f"set data.size to at least {side}, or use a model that takes any size, such as resnet20",
        )

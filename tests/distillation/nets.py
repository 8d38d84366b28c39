"""Networks for distillation tests: a student that looks at each sample alone, and random but sane teachers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import Output, TapInfo, Taps, VisionModel, global_pool, he_init, tap_table


class Alone(VisionModel):
    """Convolutions with GroupNorm: samples are independent, so the number of processes cannot change the result."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, stride=1 if i == 0 else 2)
            for i, (a, b) in enumerate(pairwise(widths))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for width in widths[1:])
        self.head_ = nn.Linear(widths[-1], classes)
        he_init(self)
        self.head_name = "head_"
        self.block_names = ()
        self.tap_info = tap_table(
            TapInfo(widths[0], ""), [TapInfo(width, "") for width in widths[1:]], widths[-1]
        )

    def forward(self, x: Tensor, taps: bool = False) -> Output:
        x = F.relu(self.stem(x))
        seen: Taps = {"stem": x}
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True), 1):
            seen[f"stage{number}.pre"] = norm(convolution(x))
            x = seen[f"stage{number}"] = F.relu(seen[f"stage{number}.pre"])
        seen["pooled"] = global_pool(x)
        logits = self.head_(seen["pooled"])
        return (logits, seen) if taps else logits


def alone(classes: int) -> Alone:
    """Channels as resnet8's, as fsp wants them."""
    return Alone(classes, (16, 16, 32, 64))


def wakened(model: nn.Module, seed: int = 3) -> nn.Module:
    """A random network with statistics and scales that are not all zeros and ones, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            with torch.no_grad():
                part.running_mean.normal_(0, 0.3, generator=generator)
                part.running_var.uniform_(0.5, 2, generator=generator)
                part.weight.uniform_(0.5, 1.5, generator=generator)
                part.bias.normal_(0, 0.3, generator=generator)
    return model.eval()

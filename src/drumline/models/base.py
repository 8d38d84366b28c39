"""What every model of ours promises beyond `nn.Module`: named intermediate tensors, blocks and a head.

Promises: `forward(x, taps=True)` returns `(logits, taps)` with the logits, gradients and running statistics
of `forward(x)`; features are returned, never kept on the module; no tapped tensor is written to afterwards.
Refuses nothing: a model that cannot take an image size says so itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Taps = dict[str, Tensor]
Output = Tensor | tuple[Tensor, Taps]


@dataclass(frozen=True)
class TapInfo:
    """What is known of a tap without running the model."""

    channels: int
    norm: str
    """Dotted name of the BatchNorm right before the tap's activation; '' when no single one is."""


class VisionModel(nn.Module):
    """A classifier whose insides have names.

    Taps are `stem`; `stage1` to `stageN`, after the stage's last activation; `stage1.pre` to `stageN.pre`,
    before it; and `pooled`, the N x C vector that the head reads (before dropout, where there is any). A
    stage that ends without an activation (MobileNetV2's linear bottleneck) gives the same tensor under both
    names.
    """

    tap_info: dict[str, TapInfo]
    """Every tap in the order in which `forward` returns them."""
    block_names: tuple[str, ...]
    """Dotted names of the repeated blocks, in the order of the data; each is called once and reads one tensor."""
    head_name: str
    """Dotted name of the classifier's last layer."""
    published_names: tuple[tuple[str, str], ...] = ()
    """(theirs, ours): parts of key names that published weights of this model spell differently."""

    @property
    def head(self) -> nn.Linear:
        """The last layer, whose outputs are the logits."""
        head = self.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in order: units of gradient checkpointing and of pipeline cuts."""
        return [self.get_submodule(name) for name in self.block_names]


class Stage(nn.Sequential):
    """Blocks in a row, the last of which can hand out its value before the activation."""

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The last block's output; with `tap`, also its value before the activation."""
        if not tap:
            return super().forward(x)
        *body, last = self
        for block in body:
            x = block(x)
        return last(x, True)


def tap_table(stem: TapInfo, stages: list[TapInfo], pooled: int) -> dict[str, TapInfo]:
    """`tap_info` of a model from its stem, its stages and the width of its pooled vector."""
    info = {"stem": stem}
    for number, stage in enumerate(stages, 1):
        info[f"stage{number}.pre"] = stage
        info[f"stage{number}"] = stage
    return {**info, "pooled": TapInfo(pooled, "")}


def global_pool(x: Tensor) -> Tensor:
    """Mean over the map, N x C. Adaptive pooling to 1x1 is a plain mean in torch, so its backward repeats."""
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def he_init(model: nn.Module) -> None:
    """He's normal initialisation of every convolution, by fan-out, in module order; biases become zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_linear_init(model: nn.Module) -> None:
    """Normal(0, 0.01) weights and zero biases for every linear layer, in module order."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)


def pool_to(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Adaptive mean pooling of N x C x H x W, as torch's, by way of kernels whose backward is deterministic.

    A map of that size is its own pool. A map that the grid divides is a plain average pool. Any other map goes
    through torch's adaptive kernel, unless deterministic algorithms are asked for on a GPU, where that kernel has
    none: then the same means are taken slice by slice, equal up to rounding.
    """
    height, width = x.shape[-2:]
    if (height, width) == grid:
        return x
    if height % grid[0] == 0 and width % grid[1] == 0:
        return F.avg_pool2d(x, (height // grid[0], width // grid[1]))
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _means(_means(x, 2, grid[0]), 3, grid[1])
    return F.adaptive_avg_pool2d(x, grid)


def _means(x: Tensor, axis: int, count: int) -> Tensor:
    """Means over the adaptive windows of one axis; window i spans floor(i n / count) to ceil((i + 1) n / count)."""
    length = x.shape[axis]
    windows = [(i * length // count, -((i + 1) * length // -count)) for i in range(count)]
    return torch.stack([x.narrow(axis, a, b - a).mean(axis) for a, b in windows], axis)

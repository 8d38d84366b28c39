"""The base class of the built-in models, and what all models share: repeated blocks, copies, pooling, initialisation.

Promises: `forward(x, taps=True)` returns `(logits, taps)` with the logits, gradients and running statistics of
`forward(x)`. Features are returned, never kept on the module, and no tapped tensor is written to afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.core.errors import UserError

Taps = dict[str, Tensor]
Output = Tensor | tuple[Tensor, Taps]
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class TapInfo:
    """What is known about a tap without running the model."""

    channels: int
    norm: str
    """Dotted name of the BatchNorm right before the tap's activation, or '' if there is not exactly one."""


class VisionModel(nn.Module):
    """A classifier with taps: intermediate tensors that have names.

    They are `stem`; `stage1` to `stageN`, after the stage's last activation; `stage1.pre` to `stageN.pre`, before it;
    and `pooled`, the N x C vector that the head reads (before dropout, if there is any). The stages of two networks
    end without an activation. MobileNetV2's end in a linear bottleneck, and both names give the same tensor. A wide
    ResNet's end in a sum, which is the stage, and `.pre` is that sum after the next BatchNorm.
    """

    tap_info: dict[str, TapInfo]
    """Every tap, in the order in which `forward` returns them."""
    block_names: tuple[str, ...]
    """Dotted names of the repeated blocks, in the order of their calls. Each is called once and reads one tensor."""
    head_name: str
    """Dotted name of the classifier's last layer."""
    published_names: tuple[tuple[str, str], ...] = ()
    """(theirs, ours): substrings of state-dict keys that published weights of this model spell differently."""

    @property
    def head(self) -> nn.Linear:
        """The last layer, whose outputs are the logits."""
        head = self.get_submodule(self.head_name)
        assert isinstance(head, nn.Linear)
        return head

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks in order: the units of gradient checkpointing and of pipeline cuts."""
        return [self.get_submodule(name) for name in self.block_names]


class BlockSequence(nn.Sequential):
    """A sequence of blocks whose last one can also return its value before the activation."""

    def forward(self, x: Tensor, tap: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The last block's output; with `tap`, also its value before the activation."""
        if not tap:
            return super().forward(x)
        *body, last = self
        for block in body:
            x = block(x)
        return last(x, True)


def tap_table(stem: TapInfo, stages: list[TapInfo], pooled: int) -> dict[str, TapInfo]:
    """Builds `tap_info` from the stem, the stages and the width of the pooled vector."""
    info = {"stem": stem}
    for number, stage in enumerate(stages, 1):
        info[f"stage{number}.pre"] = stage
        info[f"stage{number}"] = stage
    return {**info, "pooled": TapInfo(pooled, "")}


def global_pool(x: Tensor) -> Tensor:
    """Mean over the feature map, N x C. Its backward is deterministic: torch pools to 1x1 with a plain mean."""
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def he_init(model: nn.Module) -> None:
    """Initialises every convolution with He's normal distribution by fan-out, in module order. Biases become zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def small_linear_init(model: nn.Module) -> None:
    """Initialises every linear layer with Normal(0, 0.01) weights and zero biases, in module order."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)


def pool_to(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Adaptive mean pooling of N x C x H x W, as in torch, with a deterministic backward where one is required.

    A map of that size is returned as it is. If the grid divides the map, this is a plain average pool. Otherwise it
    uses torch's adaptive kernel, which has no deterministic backward on a GPU. Where deterministic algorithms are
    required, it takes the same means slice by slice instead, equal up to rounding.
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
    """Means over the adaptive windows of one axis. Window i spans floor(i n / count) to ceil((i + 1) n / count)."""
    length = x.shape[axis]
    windows = [(i * length // count, -((i + 1) * length // -count)) for i in range(count)]
    return torch.stack([x.narrow(axis, a, b - a).mean(axis) for a, b in windows], axis)


def copy_model(model: AnyModule) -> AnyModule:
    """A deep copy. Rejects a model that holds a computed tensor, as the old `torch.nn.utils.weight_norm` creates."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                where = f"{path}.{name}" if path else name
                raise UserError(
                    f"the model cannot be copied: '{where}' is a tensor computed from parameters",
                    fix="compute it in forward(), or replace the old torch.nn.utils functions with weight_norm or "
                    "spectral_norm from torch.nn.utils.parametrizations; train.ema and some layouts copy the model",
                )
    return copy.deepcopy(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The units of gradient checkpointing and of pipeline cuts: what the model declares with `blocks()`, or else the
    members of its Sequential and ModuleList children that have parameters. A member that consists mostly of blocks of
    one class (a stage) is replaced by those."""
    declared = getattr(model, "blocks", None)
    if callable(declared) and not isinstance(declared, nn.Module):
        return list(declared())
    return [
        block
        for child in model.modules()
        if _is_row(child) and _outermost(model, child)
        for member in child.children()
        for block in _inside(member)
    ]


def _inside(member: nn.Module) -> Iterator[nn.Module]:
    total = _size(member)
    if not total:
        return
    rows = [member, *member.children()]
    row = next((row for row in rows if _is_row(row) and _alike(row) and 2 * _size(row) > total), None)
    for block in row.children() if row is not None else ():
        yield from _inside(block)
    if row is None:
        yield member


def _is_row(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList) and len(module) > 1


def _alike(row: nn.Module) -> bool:
    """Whether all members are of one class, which is more than a single layer."""
    first, *others = row.children()
    return any(True for _ in first.children()) and all(type(other) is type(first) for other in others)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outermost(model: nn.Module, child: nn.Module) -> bool:
    """Whether no other container contains this one."""
    name = next(name for name, module in model.named_modules() if module is child)
    path = name.split(".") if name else []
    parents = [model.get_submodule(".".join(path[:i])) for i in range(len(path))]
    return not any(isinstance(parent, nn.Sequential | nn.ModuleList) for parent in parents)

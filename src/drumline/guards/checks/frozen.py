"""Checks of frozen modules: parameters that change although they need no gradient, and BatchNorm that still learns.

Promises: flags alone decide which tensors are watched; their values are compared as fingerprints. Does not report
parameters that follow trained ones (the encoder of momentum contrast, a mean teacher inside the model), parameters of
layers that are not torch's own (a code book that its forward updates), and statistics that change because an earlier
layer is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drumline.guards.finding import Finding, listed
from drumline.parallel.sharded import local_shard

_LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.MultiheadAttention,
    _BatchNorm,
)
FOLLOWS = 0.5
"""A tensor follows another one if their distance is at most this fraction of its norm. Independent tensors are
further apart than their norm."""
_STATISTICS = ("running_mean", "running_var")


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters of torch's own layers, in a model that also has trained ones."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return {}
    return {
        f"{name}.{key}" if name else key: parameter
        for name, layer in model.named_modules()
        if isinstance(layer, _LAYERS)
        for key, parameter in layer.named_parameters(recurse=False)
        if not parameter.requires_grad
    }


def frozen_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of the BatchNorm layers in train mode whose own parameters are frozen, as are those of
    the layer before them."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return {}
    found = {}
    for name, layer, before in _norms(model):
        own = list(layer.parameters(recurse=False))
        frozen = own and not any(parameter.requires_grad for parameter in own)
        if frozen and layer.training and not _trains(before):
            for key in _STATISTICS:
                if (buffer := getattr(layer, key)) is not None:
                    found[f"{name}.{key}" if name else key] = buffer
    return found


def _norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm, nn.Module | None]]:
    """Every BatchNorm layer, and the layer with parameters that is registered before it."""
    before: nn.Module | None = None
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            yield name, layer, before
        if any(True for _ in layer.parameters(recurse=False)):
            before = layer


def _trains(layer: nn.Module | None) -> bool:
    return layer is not None and any(each.requires_grad for each in layer.parameters(recurse=False))


def followers(model: nn.Module, names: Collection[str]) -> set[str]:
    """Which of these frozen parameters and statistics belong to a module that follows a trained one: the largest
    frozen module around them has a matrix that is close to a trained one. Reads values, so it is only called before a
    report."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for each in model.parameters():
        if each.requires_grad and not each.is_meta and each.ndim > 1:
            by_shape.setdefault(local_shard(each).shape, []).append(local_shard(each))
    modules = {name: _frozen_around(model, name.rpartition(".")[0]) for name in names}
    follow = {
        module: any(
            _follows(local_shard(each), by_shape)
            for each in module.parameters()
            if each.ndim > 1 and not each.requires_grad
        )
        for module in dict.fromkeys(modules.values())
    }
    return {name for name, module in modules.items() if follow[module]}


def _frozen_around(model: nn.Module, name: str) -> nn.Module:
    """The largest module that contains a layer and has no trained parameter; the layer itself if it has one."""
    path = name.split(".")
    around = (model.get_submodule(".".join(path[:count])) for count in range(1, len(path) + 1))
    frozen = (module for module in around if not any(each.requires_grad for each in module.parameters()))
    return next(frozen, model.get_submodule(name))


@torch.no_grad()
def _follows(tensor: Tensor, by_shape: Mapping[torch.Size, Sequence[Tensor]]) -> bool:
    if tensor.is_meta or tensor.numel() < 2:
        return False
    return any(
        other.device == tensor.device and bool((tensor - other).norm() <= FOLLOWS * other.norm())
        for other in by_shape.get(tensor.shape, ())
    )


def moved_parameters(names: Sequence[str], since: str, by_optimizer: bool) -> Finding:
    """Frozen parameters that changed: inside an optimizer's step (certain), or elsewhere."""
    if by_optimizer:
        return Finding(
            "frozen",
            f"the optimizer changes parameters that need no gradient ({len(names)} of them)",
            where=listed([f"'{name}'" for name in names]),
            since=since,
            fix="leave frozen parameters out of the optimizer, or set their .grad to None when you freeze them: with "
            "an old or zero gradient, the optimizer still applies momentum and weight decay",
            certain=True,
        )
    return Finding(
        "frozen",
        f"parameters that need no gradient have changed ({len(names)} of them)",
        where=listed([f"'{name}'" for name in names]),
        since=since,
        fix="check for manual weight decay, a moving average that is copied back, and weights that are loaded later; "
        "nothing to do if it is on purpose",
    )


def moved_statistics(names: Sequence[str], since: str, field: str = "") -> Finding:
    """BatchNorm layers that are frozen by `requires_grad` alone. `field` is the recipe field that freezes them
    completely."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return Finding(
        "frozen",
        f"the running statistics of frozen BatchNorm layers still change ({len(layers)} of them): "
        "requires_grad=False does not stop them",
        where=listed([f"'{layer}'" for layer in layers]),
        since=since,
        fix=f"add the layers to {field}, or train them"
        if field
        else "call eval() on these layers after each model.train(); nothing to do if they are to adapt to the data",
    )

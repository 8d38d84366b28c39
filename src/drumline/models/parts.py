"""The parts of a model that training treats differently: its classifier, its blocks by depth, its frozen modules.

Promises: a name means a whole module name, not a prefix, so `layer1` does not freeze `layer10`. A frozen parameter
needs no gradient, and a frozen layer with running statistics stays in evaluation mode, whatever module `train()` is
called on. Rejects names that the model does not have, and suggests similar ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from drumline.core.errors import UserError
from drumline.core.text import either, near
from drumline.models.base import VisionModel, repeated_blocks

BACKBONE = "backbone"
"""Everything but the classifier."""
STEM = "stem"
"""Everything before the first repeated block, in a model that has no module of this name."""


def head_name(model: nn.Module) -> str:
    """The dotted name of the classifier; in models that are not built in, the last linear layer. Empty: none."""
    if isinstance(model, VisionModel):
        return model.head_name
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linear[-1] if linear else ""


@dataclass(frozen=True)
class Frozen:
    """The frozen parameters and layers, by the model's names."""

    parameters: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    """Layers with running statistics, which stay in evaluation mode."""


def freeze(model: nn.Module, names: Sequence[str]) -> Frozen:
    """Freezes the modules that `train.freeze` names, in place."""
    frozen = find_frozen(model, names)
    parameters = dict(model.named_parameters())
    for name in frozen.parameters:
        parameters[name].requires_grad_(False)
    for name in frozen.layers:
        freeze_layer(model.get_submodule(name))
    return frozen


def find_frozen(model: nn.Module, names: Sequence[str]) -> Frozen:
    """The parameters and layers in the modules of these names."""
    modules = dict.fromkeys(each for name in names for each in _modules_of(model, name))
    owned = {id(each) for module in modules for each in module.parameters(recurse=False)}
    layers = {id(module) for module in modules if _has_statistics(module)}
    return Frozen(
        tuple(name for name, each in model.named_parameters() if id(each) in owned),
        tuple(name for name, module in model.named_modules() if id(module) in layers),
    )


def freeze_layer(layer: nn.Module) -> None:
    """Keeps a layer in evaluation mode: afterwards, `train()` changes only the mode of its children."""
    layer.train = partial(_stay_in_eval, layer)  # type: ignore[method-assign]
    layer.eval()


def is_frozen_layer(layer: nn.Module) -> bool:
    """Whether `freeze_layer` was called on this layer."""
    return getattr(vars(layer).get("train"), "func", None) is _stay_in_eval


def _stay_in_eval(layer: nn.Module, mode: bool = True) -> nn.Module:
    for child in layer.children():
        child.train(mode)
    layer.training = False
    return layer


def rate_factors(model: nn.Module, head: float, decay: float) -> dict[str, float]:
    """The factor on the learning rate of each parameter: `decay` for each later block, times `head` for the
    classifier. Parameters before the first block count as one more block; those after the last one count as none."""
    depths = _depths(model) if decay != 1 else {}
    deepest = max(depths.values(), default=0)
    classifier = head_name(model)
    if head != 1 and not classifier:
        raise UserError(
            f"optim.head_lr = {head:g}: {type(model).__name__} has no linear layer, so its classifier was not found",
            "remove it",
        )
    return {
        name: decay ** (deepest - depths.get(name, deepest))
        * (head if _is_inside(name, classifier) and classifier else 1.0)
        for name, _ in model.named_parameters()
    }


def _depths(model: nn.Module) -> dict[str, int]:
    """The number of the block of each parameter: 0 before the first block, one more than the last after it."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(
            f"optim.layer_decay: {type(model).__name__} has no repeated blocks, so its layers have no depth",
            "remove it, or add a method blocks() to your own model that lists its blocks in order",
        )
    block_of = {id(each): number for number, block in enumerate(blocks, 1) for each in block.parameters()}
    depths, current, last = {}, 0, len(blocks)
    for name, each in model.named_parameters():
        current = block_of.get(id(each), last + 1 if current >= last else current)
        depths[name] = current
    return depths


def _modules_of(model: nn.Module, name: str) -> Iterable[nn.Module]:
    """The modules that a name in `train.freeze` stands for, including those inside them."""
    found = dict(model.named_modules(remove_duplicate=False)).get(name) if name else None
    if found is not None:
        return found.modules()
    if name == BACKBONE:
        return _backbone(model)
    if name == STEM and repeated_blocks(model):
        return _stem(model)
    raise _unknown(model, name)


def _backbone(model: nn.Module) -> list[nn.Module]:
    head = head_name(model)
    if not head:
        raise UserError(
            f"train.freeze = {BACKBONE}: {type(model).__name__} has no linear layer, so its classifier was not found",
            "name the modules to freeze",
        )
    classifier = set(model.get_submodule(head).modules())
    return [module for module in model.modules() if module not in classifier]


def _stem(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters or statistics that come before the first block, except those that contain it."""
    first = repeated_blocks(model)[0]
    found = []
    for module in model.modules():
        if module is first:
            break
        if first not in set(module.modules()) or any(True for _ in module.parameters(recurse=False)):
            found.append(module)
    return found


def _has_statistics(module: nn.Module) -> bool:
    """Whether the layer has state that a forward pass in train mode may change, such as BatchNorm's."""
    return any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))


def _is_inside(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _unknown(model: nn.Module, name: str) -> UserError:
    tops = [known for known, module in model.named_children() if any(True for _ in module.parameters())]
    every = [known for known, _ in model.named_modules() if known]
    close = near(name, [STEM, BACKBONE, *tops], most=3) or near(name, every, most=3)
    fix = f"did you mean {either(close)}? " if close else ""
    return UserError(
        f"train.freeze: {type(model).__name__} has no module {name!r}",
        f"{fix}its modules are {', '.join(tops)}; {STEM} and {BACKBONE} work, too",
    )

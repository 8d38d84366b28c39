"""The repeated blocks of any model: the units of gradient checkpointing and of pipeline cuts."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's own word (`blocks()`), else the members of its Sequential and ModuleList children that
    have parameters."""
    declared = getattr(model, "blocks", None)
    if callable(declared) and not isinstance(declared, nn.Module):
        return list(declared())
    return [
        block
        for child in model.modules()
        if isinstance(child, nn.Sequential | nn.ModuleList) and len(child) > 1 and _outermost(model, child)
        for block in child
        if any(True for _ in block.parameters())
    ]


def _outermost(model: nn.Module, child: nn.Module) -> bool:
    """Whether this container lies in no other one."""
    name = next(name for name, module in model.named_modules() if module is child)
    parts = name.split(".") if name else []
    parents = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    return not any(isinstance(parent, nn.Sequential | nn.ModuleList) for parent in parents)

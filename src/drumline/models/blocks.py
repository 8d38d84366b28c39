"""The repeated blocks of any model: the units of gradient checkpointing and of pipeline cuts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """What the model declares with `blocks()`. Otherwise the members of its Sequential and ModuleList children that
    have parameters. A member that consists mostly of blocks of one class (a stage) is replaced by those."""
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

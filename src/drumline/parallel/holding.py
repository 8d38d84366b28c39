"""Which part of a run's state this process holds, and how the parts become one checkpoint and a checkpoint parts.

Promises: one format for all layouts: what is collected has the names, shapes and types of a run in one process, so a
run goes on under any layout. Spreading refuses a state that does not fit before a byte of the live one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from drumline.parallel.grid import Grid
from drumline.parallel.world import World
from drumline.state.checkpoint import Groups, check_fit, copy_into

Collected = dict[str, dict[str, torch.Tensor]]


class Holding(Protocol):
    """All ranks call both."""

    def collect(self, groups: Groups) -> Collected:
        """On rank 0 the whole state: tensors of its own as they are, others in host memory. Elsewhere nothing."""

    def spread(self, groups: Groups | None, live: Groups, where: Path) -> None:
        """Writes rank 0's whole state into everybody's live tensors. `where` it came from is for messages."""


class Whole:
    """Every process holds everything."""

    def __init__(self, world: World) -> None:
        self.world = world

    def collect(self, groups: Groups) -> Collected:
        return {name: dict(tensors) for name, tensors in groups.items()} if self.world.is_rank_zero else {}

    def spread(self, groups: Groups | None, live: Groups, where: Path) -> None:
        if groups is not None:
            copy_into(groups, live, where)
        for group in live.values():
            for tensor in group.values():
                self.world.broadcast(tensor)


class Parts:
    """Every place of a pipeline holds the tensors of its stages."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def collect(self, groups: Groups) -> Collected:
        """The first replica's; the others hold the same."""
        if self.grid.replica:
            return {}
        flat = self.grid.down.gather_tensors(_flat(groups))
        return _nested(flat) if self.grid.world.is_rank_zero else {}

    def spread(self, groups: Groups | None, live: Groups, where: Path) -> None:
        world, mine = self.grid.world, _flat(live)
        held = [dict(_specs(live)), *world.all_gather_object(_specs(live))]
        whole = {name: spec for each in held for name, spec in each.items()}
        if groups is not None:
            check_fit(groups, _nested({name: _like(*spec) for name, spec in whole.items()}), where)
        loaded = _flat(groups) if groups is not None else {}
        for name in sorted(whole):
            tensor = (
                loaded[name].cpu().contiguous()
                if groups is not None
                else torch.empty(whole[name][0], dtype=whole[name][1])
            )
            world.broadcast_host(tensor)
            if name in mine:
                with torch.no_grad():
                    mine[name].copy_(tensor)


_MARK = "//"
"""Between the names of a group and a tensor; optimizer names hold single strokes."""


def _flat(groups: Groups) -> dict[str, torch.Tensor]:
    return {
        f"{group}{_MARK}{name}": tensor for group, each in groups.items() for name, tensor in each.items()
    }


def _nested(flat: Mapping[str, torch.Tensor]) -> Collected:
    groups: Collected = {}
    for name, tensor in flat.items():
        group, _, rest = name.partition(_MARK)
        groups.setdefault(group, {})[rest] = tensor
    return groups


def _specs(live: Groups) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _flat(live).items()}


def _like(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

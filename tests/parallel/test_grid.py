"""The processes of a run as replicas of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drumline.parallel.grid import make_grid
from drumline.parallel.world import World, single_process


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_over_nccl_every_neighbour_has_a_link_of_its_own_in_each_direction(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes the messages of a group in turn, so one that waits would hold up the rest; gloo has tags."""
    asked: list[tuple[list[list[int]], list[tuple[int, int]]]] = []

    def split(self: World, parts: Sequence[Sequence[int]], links: Sequence[tuple[int, int]] = ()) -> World:
        asked.append(([list(each) for each in parts], list(links)))
        return self

    monkeypatch.setattr(World, "split", split)
    world = replace(single_process(torch.device("cpu")), size=6, rank=4, backend=backend)
    grid = make_grid(world, 3)
    assert (grid.place, grid.replica, grid.reads, grid.ends) == (1, 1, False, False)
    onward, back = [(0, 1), (1, 2), (2, 0)], [(1, 0), (2, 1), (0, 2)]
    replicas = [[0, 1, 2], [3, 4, 5]]
    assert asked == [
        ([[0, 3], [1, 4], [2, 5]], []),
        (replicas, onward if backend == "nccl" else []),
        (replicas, back if backend == "nccl" else []),
    ]

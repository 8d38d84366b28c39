"""Where the tensors of a model in stages lie."""

from __future__ import annotations

import pytest
import torch

from drumline.core.errors import UserError
from drumline.parallel.pipeline.schedule import Shape
from drumline.parallel.pipeline.stage import device_of
from drumline.parallel.world import make_grid, single_process

HERE, THERE = torch.device("cpu"), torch.device("meta")
"""The meta device stands for a second GPU."""
SHAPE = Shape(lanes=2, chunks=1, micro_batches=4, schedule="1f1b", replicas=1, over_processes=False)


def test_a_constant_lies_where_all_its_stages_are() -> None:
    grid = make_grid(single_process(HERE))
    assert device_of([0, 1], SHAPE, grid, [HERE, HERE], "table") == HERE
    assert device_of([1], SHAPE, grid, [HERE, THERE], "table") == THERE


def test_a_constant_that_two_devices_of_one_process_would_read_is_rejected() -> None:
    with pytest.raises(
        UserError, match="table is read by stages 0, 1, which one process computes on several"
    ) as told:
        device_of([0, 1], SHAPE, make_grid(single_process(HERE)), [HERE, THERE], "table")
    assert "--parallel.processes 2" in told.value.fix

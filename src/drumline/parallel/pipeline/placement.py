"""Places the tensors of a model in stages: each on the device of the stage that uses it, in the process that computes
it.

Promises: shared tensors stay shared; what another process computes goes to the meta device, without memory, under its
name. Refuses a constant that one process would have to read on two devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.parallel.grid import Grid
from drumline.parallel.pipeline.cut import Segment
from drumline.parallel.pipeline.shape import Shape


def place_stages(
    module: nn.Module,
    root: nn.Module,
    segments: Sequence[Segment],
    shape: Shape,
    grid: Grid,
    lanes: Sequence[torch.device],
    channels_last: bool,
) -> None:
    """Moves every tensor of `module`, in place. `root` is the submodule that was cut; `lanes` are the devices of this
    process's lanes. What no stage uses goes with the first stage; what is outside the root, with the last."""
    readers: dict[str, list[int]] = {}
    for segment in segments:
        for used in (*segment.parameters, *segment.buffers):
            readers.setdefault(used, []).append(segment.number)
    names = {id(tensor): name for name, tensor in (*root.named_parameters(), *root.named_buffers())}
    moved: dict[int, Tensor] = {}
    for layer in module.modules():
        for kind in (layer._parameters, layer._buffers):
            for key, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    name = names.get(id(tensor))
                    stages = [shape.stages - 1] if name is None else readers.get(name, [0])
                    device = device_of(stages, shape, grid, lanes, name or key)
                    moved[id(tensor)] = _moved(tensor, device, channels_last)
                kind[key] = moved[id(tensor)]  # type: ignore[assignment]


def device_of(
    stages: Sequence[int], shape: Shape, grid: Grid, lanes: Sequence[torch.device], name: str
) -> torch.device:
    """The device of a tensor that these stages read. (Only constants are read by several.)"""
    if not shape.over_processes:
        devices = {lanes[stage % shape.lanes] for stage in stages}
        if len(devices) > 1:
            raise UserError(
                f"parallel.split: {name} is read by stages {', '.join(map(str, stages))}, which one process computes "
                "on several devices",
                f"give --parallel.processes {shape.lanes} (each has its own), or cut so that one stage reads it",
            )
        return devices.pop()
    here = any(stage % shape.lanes == grid.place for stage in stages)
    return lanes[0] if here else torch.device("meta")


def _moved(tensor: Tensor, device: torch.device, channels_last: bool) -> Tensor:
    """The tensor on that device, of the same kind; on the meta device, without values."""
    moved = tensor.detach().to(device)
    if channels_last and tensor.ndim == 4:
        moved = moved.contiguous(memory_format=torch.channels_last)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, tensor.requires_grad)
    return moved

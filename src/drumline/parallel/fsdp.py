"""Shards a model over the processes of a world (FSDP2): each holds a part of every matrix, of its gradient and of its
optimizer state, and gathers whole blocks only while they compute.

Promises: gradients are those of DDP to float tolerance, whatever the number of processes; arithmetic is that of
autocast, because only what autocast would convert anyway travels in the low precision: the matrices of convolutions,
linear layers and attention. Vectors (norms, biases) and other matrices under mixed precision stay whole on every
process, in fp32, and their gradients travel in one message. A gradient that is not finite on one process is so on
all. The optimizer works on plain tensors, the parts held here, so fused kernels, loss scaling and clipping are those
of one process. Refuses one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.models.blocks import repeated_blocks
from drumline.parallel.by_host import GatherByHost, ReduceScatterByHost
from drumline.parallel.layout import (
    BufferMean,
    Draws,
    Passes,
    Recorded,
    micro_batches_of,
    refuse_hooked,
    used_somewhere,
)
from drumline.parallel.local import local_part
from drumline.parallel.world import World
from drumline.state.checkpoint import Groups, check_fit
from drumline.state.shards import LocalGroups, TensorShard, shard_rows

_CAST_BY_AUTOCAST = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)


def shard(module: nn.Module, world: World, precision: torch.dtype | None) -> nn.Module:
    """The same module, in place, each process with its part; rank 0's weights are everybody's. Copies of it (an
    average) are to be made before and sharded too: a sharded module cannot be copied."""
    if world.size == 1:
        raise UserError(
            "parallel.layout = fsdp shards the model over processes, and there is one",
            "give --parallel.processes 2 or more, or use --parallel.layout single",
        )
    refuse_hooked(module, "fsdp")
    for tensor in (*module.parameters(), *module.buffers()):
        world.broadcast(tensor.detach())
    whole = kept_whole(module, precision)
    for parameter in module.parameters():
        if parameter not in whole:
            # FSDP2 cuts rows out of memory as it lies; convolutions still compute in channels_last, as their input.
            parameter.data = parameter.data.contiguous()
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in _units(module):
        if any(parameter not in whole for parameter in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=whole)
    if world.device.type == "cuda" and world.backend == "gloo":
        exchange_by_host(module, world)
    return module


def exchange_by_host(module: nn.Module, world: World) -> None:
    """For a sharded module whose processes meet over gloo and compute on a GPU."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(cast(Any, GatherByHost(world)))
            part.set_custom_reduce_scatter(cast(Any, ReduceScatterByHost(world)))


def kept_whole(module: nn.Module, precision: torch.dtype | None) -> set[nn.Parameter]:
    """The parameters that are not sharded: vectors, those that several modules share, and under mixed precision the
    matrices that autocast would leave in fp32 (embeddings of positions, for one)."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, []).append(part)
    return {
        parameter
        for parameter, parts in owners.items()
        if parameter.ndim < 2
        or len(parts) > 1
        or not parameter.is_floating_point()
        or (precision is not None and not isinstance(parts[0], _CAST_BY_AUTOCAST))
    }


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Every process holds the whole parameters meanwhile, so forwards need no other process: for evaluation, where
    some have more batches than others, or none. All processes enter and leave together; nothing may be trained
    inside. FSDP does not see these forwards: it would take them for the beginning of a step, and in the next backward
    a process would gather ahead what another one, with fewer of them, does not."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    hooks = [table for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    kept = [dict(table) for table in hooks]
    for table in hooks:
        own = [key for key, hook in table.items() if _is_fsdp(hook)]
        assert own, "FSDP has no hook here"
        for key in own:
            del table[key]
    try:
        yield
    finally:
        for table, before in zip(hooks, kept, strict=True):
            table.clear()
            table.update(before)
        for part in parts:
            part.reshard()


class Held:
    """The parameters of a sharded module as this process holds them, by name: what its optimizer updates. Whole ones
    are the module's own; parts are plain tensors in the memory of the sharded ones."""

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self.sharded = {name: each for name, each in named.items() if isinstance(each, DTensor)}
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(local_part(each), requires_grad=each.requires_grad)
            if name in self.sharded
            else each
            for name, each in named.items()
        }
        self.whole = [each for name, each in named.items() if name not in self.sharded and each.requires_grad]

    def slot(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the optimizer's state as what it is: a part of one of the parameter's full shape, in the same
        memory, or a whole one."""
        parameter = self.sharded.get(name)
        if parameter is None or tensor.ndim == 0:
            return tensor
        with torch.no_grad():
            return DTensor.from_local(
                tensor,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


class ShardedExchange(Recorded):
    """Micro-batches; gradients averaged by FSDP into the parts of those who hold them; running statistics averaged
    after it. Afterwards `.grad` of what is `held` is the gradient of the global batch."""

    devices: Sequence[torch.device] = ()

    def __init__(
        self,
        module: nn.Module,
        held: Held,
        world: World,
        accumulate: int = 1,
    ) -> None:
        super().__init__(world)
        assert isinstance(module, FSDPModule)
        # FSDP divides by the number of ranks, as DDP does.
        self.weight = float(world.size)
        self.parts: Sequence[int] = (world.rank,)
        self.buffers: Callable[[], None] = BufferMean(module, world)
        self._module, self._held, self._world, self._accumulate = module, held, world, accumulate
        self._one = torch.ones((), device=world.device)
        self._is_part = {id(each): name in held.sharded for name, each in held.parameters.items()}
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._used: list[bool] | None = None

    def gradients(self, batch: Batch, passes: Passes, draws: Draws) -> None:
        """One micro-batch after the other; FSDP exchanges with the last."""
        draws.switch(0)
        self.begin()
        for parameter in self._held.sharded.values():
            parameter.grad = None  # the optimizer clears only what it holds
        for number, piece in enumerate(micro_batches_of(batch, self._accumulate)):
            self._module.set_requires_gradient_sync(number == self._accumulate - 1)
            self.both_ways(passes, piece, number)
        for name, parameter in self._held.sharded.items():
            gradient = parameter.grad
            self._held.parameters[name].grad = None if gradient is None else local_part(gradient)
        self._bring_together()

    @torch.no_grad()
    def _bring_together(self) -> None:
        """Averages the gradients of what is whole, and tells everybody of one that is not finite: the same message
        takes a number that is added to a gradient, zero or infinite."""
        found = torch.zeros((), device=self._world.device)
        if parts := [each for each in self._gradients(True) if each.numel()]:
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found, self._one)
        alarm = torch.where(found > 0, torch.inf, 0.0).reshape(1)
        # Room for each, used here or not, so that all send as much.
        pieces = [
            each.new_zeros(each.numel()) if each.grad is None else each.grad.reshape(-1)
            for each in self._held.whole
        ]
        flat = torch.cat([*(piece.float() for piece in pieces), alarm])
        self._world.all_reduce(flat).div_(self._world.size)
        *sums, alarm = flat.split([*(piece.numel() for piece in pieces), 1])
        for parameter, total in zip(self._used_somewhere(), sums, strict=True):
            if parameter is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total.view_as(parameter))
        for gradient in (*self._gradients(False), *self._gradients(True)):
            if gradient.numel():
                gradient[(0,) * gradient.ndim].add_(alarm[0])
                break

    def _used_somewhere(self) -> list[nn.Parameter | None]:
        """The whole parameters, None for those that no process used in its first step: one that a process left out
        must move with the others all the same. Asked once; later steps are taken to be alike."""
        if self._used is None:
            self._used = used_somewhere(self._held.whole, self._world)
        return [
            each if used or each.grad is not None else None
            for each, used in zip(self._held.whole, self._used, strict=True)
        ]

    def _gradients(self, parts: bool) -> list[torch.Tensor]:
        """Of the sharded parameters, or of the whole ones, as held here."""
        return [
            each.grad
            for each in self._held.parameters.values()
            if each.grad is not None and self._is_part[id(each)] is parts
        ]

    def settle(self) -> list[torch.Tensor]:
        """The module's own parameters that got no gradient."""
        for name, parameter in self._held.sharded.items():
            # FSDP settles its memory with the first forward; what is updated must be what it gathers.
            held = self._held.parameters[name]
            assert not held.numel() or held.data_ptr() == local_part(parameter).data_ptr(), name
        return [each for each in self._module.parameters() if each.requires_grad and each.grad is None]

    def norm(self) -> torch.Tensor:
        """Of parts over all processes, and of what is whole once."""
        pairs = [(each.grad, each) for each in self._held.parameters.values() if each.grad is not None]
        return self.norms([gradient for gradient, _ in pairs], [each for _, each in pairs]).norm()

    def norms(self, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """The length of each whole tensor, given those held here and the parameters they belong to: what LARS and
        LAMB go by. One message."""
        own = torch.stack(torch._foreach_norm(list(tensors)))
        return torch.where(self._mask(parameters), self._world.all_reduce(own.square()).sqrt(), own)

    def agree(self, flag: torch.Tensor) -> None:
        """Every process has seen the same: see `_bring_together`."""

    def _mask(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Which of them are parts, on the device: made once for each list."""
        key = tuple(id(each) for each in parameters)
        if key not in self._masks:
            self._masks[key] = torch.tensor([self._is_part[each] for each in key], device=self._world.device)
        return self._masks[key]


class Sharded:
    """Brings sharded states together on rank 0 and out again, one tensor at a time: no other process ever holds more
    than one whole tensor besides its parts, and that in host memory."""

    def __init__(self, world: World) -> None:
        self.world = world

    @torch.no_grad()
    def collect(self, groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
        """On rank 0 the whole state: tensors of its own as they are, others in host memory. Elsewhere nothing."""
        whole: dict[str, dict[str, torch.Tensor]] = {}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                full = self._joined(tensor) if isinstance(tensor, DTensor) else tensor
                if self.world.is_rank_zero:
                    whole.setdefault(group, {})[name] = full
        return whole

    @torch.no_grad()
    def spread(self, groups: Groups | None, live: Groups, where: Path) -> None:
        """Writes rank 0's whole state into everybody's live tensors. `where` it came from is for messages."""
        if groups is not None:
            check_fit(groups, live, where)
        for group, tensors in live.items():
            for name, tensor in tensors.items():
                full = (
                    groups[group][name].cpu().contiguous()
                    if groups is not None
                    else torch.empty(tensor.shape, dtype=tensor.dtype)
                )
                self.world.broadcast_host(full)
                first, last = self._rows(tensor)
                local_part(tensor).copy_(full[first:last] if isinstance(tensor, DTensor) else full)

    def _joined(self, tensor: DTensor) -> torch.Tensor:
        """In host memory, on rank 0, which is sent the others' rows; elsewhere nothing."""
        world, mine = self.world, local_part(tensor).contiguous()
        if not world.is_rank_zero:
            if mine.numel():
                world.isend(mine, to=0).wait()
            return torch.empty(0)
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        for rank in range(world.size):
            first, last = shard_rows(len(tensor), rank, world.size)
            rows = full[first:last]
            if rank == 0:
                rows.copy_(mine)
            elif rows.numel():
                came = torch.empty(rows.shape, dtype=rows.dtype, device=world.device)
                rows.copy_(world.irecv(came, source=rank).wait())
        return full

    def _rows(self, tensor: torch.Tensor) -> tuple[int, int]:
        return shard_rows(len(tensor), self.world.rank, self.world.size) if tensor.ndim else (0, 0)


def local_shards(groups: Groups, world: World) -> LocalGroups:
    """What this process writes of a sharded checkpoint: its parts, and on rank 0 what is whole."""
    found: LocalGroups = {}
    for group, tensors in groups.items():
        found[group] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                assert tensor.placements == (Shard(0),), tensor.placements
                found[group][name] = TensorShard(local_part(tensor), tuple(tensor.shape))
            elif world.is_rank_zero:
                found[group][name] = TensorShard(tensor, None)
    return found


def _units(module: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one after the other: those of the model inside, where it names them."""
    for part in module.modules():
        declared = getattr(part, "blocks", None)
        if callable(declared) and not isinstance(declared, nn.Module):
            return repeated_blocks(part)
    # A list itself is never called, so nothing would gather it.
    return [
        block for block in repeated_blocks(module) if not isinstance(block, nn.ModuleList | nn.ModuleDict)
    ]


def _is_fsdp(hook: Callable[..., Any]) -> bool:
    """Whether it is FSDP's own, and not the model's."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")

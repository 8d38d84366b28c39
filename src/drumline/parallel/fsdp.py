"""FSDP2: each process holds a shard of every matrix, of its gradient and of its optimizer state, and gathers whole
blocks only while they compute. Layout `fsdp`.

Promises: gradients equal DDP's to float tolerance on any number of processes; arithmetic is that of autocast, because
only what autocast would convert anyway travels in low precision: the matrices of convolutions, linear layers and
attention. Vectors (norms, biases) and, under mixed precision, all other matrices stay whole on every process, in
fp32; their gradients travel in one message. A gradient that is not finite on one process is not finite on any. The
optimizer updates plain tensors, the shards held here, so fused kernels, loss scaling and clipping are those of one
process. Rejects a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.precision import FP32, Precision
from drumline.data.feed.batch import Batch
from drumline.models.base import copy_model, repeated_blocks
from drumline.parallel.data_parallel import SingleStrategy, used_anywhere
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.reference import ReferenceCopy
from drumline.parallel.sharded import local_shard
from drumline.parallel.strategy import ForwardPass, Gathered, SetupContext, SharedBackward
from drumline.parallel.world import World
from drumline.state.checkpoint import check_fit
from drumline.state.shards import LocalGroups, TensorShard, shard_rows
from drumline.state.tensors import Groups

_CAST_BY_AUTOCAST = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention)


class FSDPStrategy(SingleStrategy):
    """Micro-batches; FSDP averages gradients into the shards, and one message averages those of whole parameters."""

    name = "fsdp"

    @classmethod
    def check(cls, recipe: Recipe, world: World) -> None:
        if world.size == 1:
            raise UserError(
                "parallel.layout = fsdp shards the model over processes, and there is only one",
                "give --parallel.processes 2 or more, or use --parallel.layout single",
            )
        super().check(recipe, world)

    def lay_out(self, context: SetupContext) -> nn.Module:
        self._reject_hooks()
        self._broadcast_weights()
        # Copies are made first: a sharded module cannot be copied. The reference stays on the host, because the
        # device may not have room for two.
        self._average = super().copy_model() if self.recipe.train.ema else None
        self._reference = ReferenceCopy(self, "FSDP", copy_model(self.module.cpu()))
        self.module.to(self.world.device)
        forward = super().lay_out(context)
        for module in (self.module, self._average):
            if module is not None:
                shard(module, self.world, self.precision)
        self.held = HeldParameters(self.module)
        self._one = torch.ones((), device=self.world.device)
        self._is_shard = {id(each): name in self.held.sharded for name, each in self.held.parameters.items()}
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._used: list[bool] | None = None
        return forward

    def copy_model(self) -> nn.Module:
        assert self._average is not None
        return self._average

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.held.parameters.items()

    def optimizer_tensor(self, name: str, tensor: Tensor) -> Tensor:
        return self.held.as_sharded(name, tensor)

    def shared_backward(self) -> SharedBackward:
        # Autograd knows only the gathered parameters, so gradients are seen in their shards, after the exchange.
        return SharedBackward({0: list(self.module.named_parameters())})

    def reference(self) -> ReferenceCopy:
        return self._reference

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        for parameter in self.held.sharded.values():
            parameter.grad = None  # the optimizer clears only what it holds
        super().gradients(batch, forward, draws)
        for name, parameter in self.held.sharded.items():
            gradient = parameter.grad
            self.held.parameters[name].grad = None if gradient is None else local_shard(gradient)
        self._exchange_whole()

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """FSDP exchanges with the last micro-batch."""
        cast(FSDPModule, self.module).set_requires_gradient_sync(last)
        yield

    @torch.no_grad()
    def _exchange_whole(self) -> None:
        """Averages the gradients of whole parameters. The same message reports a gradient that is not
        finite: it carries a number, zero or infinite, that is added to a gradient."""
        found = torch.zeros((), device=self.world.device)
        if shards := [each for each in self._gradients(True) if each.numel()]:
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found, self._one)
        alarm = torch.where(found > 0, torch.inf, 0.0).reshape(1)
        # Room for each parameter, used here or not, so that all processes send as much.
        pieces = [
            each.new_zeros(each.numel()) if each.grad is None else each.grad.reshape(-1)
            for each in self.held.whole
        ]
        flat = torch.cat([*(piece.float() for piece in pieces), alarm])
        self.world.all_reduce(flat).div_(self.world.size)
        *sums, alarm = flat.split([*(piece.numel() for piece in pieces), 1])
        for parameter, total in zip(self._used_anywhere(), sums, strict=True):
            if parameter is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(total.view_as(parameter))
        for gradient in (*self._gradients(False), *self._gradients(True)):
            if gradient.numel():
                gradient[(0,) * gradient.ndim].add_(alarm[0])
                break

    def _used_anywhere(self) -> list[nn.Parameter | None]:
        """The whole parameters, None for those that no process used in its first step: one that a process left out
        must still move with the others. Asked once; later steps are assumed to be alike."""
        if self._used is None:
            self._used = used_anywhere(self.held.whole, self.world)
        return [
            each if used or each.grad is not None else None
            for each, used in zip(self.held.whole, self._used, strict=True)
        ]

    def _gradients(self, sharded: bool) -> list[Tensor]:
        """Of the sharded parameters, or of the whole ones, as held here."""
        return [
            each.grad
            for each in self.held.parameters.values()
            if each.grad is not None and self._is_shard[id(each)] is sharded
        ]

    def unused_parameters(self) -> list[Tensor]:
        for name, parameter in self.held.sharded.items():
            # FSDP allocates with the first forward; what the optimizer updates must be what FSDP gathers.
            held = self.held.parameters[name]
            assert not held.numel() or held.data_ptr() == local_shard(parameter).data_ptr(), name
        return super().unused_parameters()

    def gradient_norm(self) -> Tensor:
        """Of shards over all processes, and of whole gradients once."""
        pairs = [(each.grad, each) for each in self.held.parameters.values() if each.grad is not None]
        return self.tensor_norms([gradient for gradient, _ in pairs], [each for _, each in pairs]).norm()

    def tensor_norms(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """One message."""
        own = torch.stack(torch._foreach_norm(list(tensors)))
        return torch.where(self._mask(parameters), self.world.all_reduce(own.square()).sqrt(), own)

    def _mask(self, parameters: Sequence[Tensor]) -> Tensor:
        """Which of them are shards, on the device. Made once for each list."""
        key = tuple(id(each) for each in parameters)
        if key not in self._masks:
            self._masks[key] = torch.tensor([self._is_shard[each] for each in key], device=self.world.device)
        return self._masks[key]

    # State: gathered and scattered one tensor at a time, so that no process but rank 0 ever holds more than one whole
    # tensor besides its shards, and that in host memory.

    @torch.no_grad()
    def gather(self, groups: Groups) -> Gathered:
        whole: Gathered = {}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                full = self._gathered(tensor) if isinstance(tensor, DTensor) else tensor
                if self.world.is_rank_zero:
                    whole.setdefault(group, {})[name] = full
        return whole

    @torch.no_grad()
    def scatter(self, groups: Groups | None, live: Groups, source: Path) -> None:
        if groups is not None:
            check_fit(groups, live, source)
        for group, tensors in live.items():
            for name, tensor in tensors.items():
                full = (
                    groups[group][name].cpu().contiguous()
                    if groups is not None
                    else torch.empty(tensor.shape, dtype=tensor.dtype)
                )
                self.world.broadcast_host(full)
                if isinstance(tensor, DTensor):
                    first, last = shard_rows(len(tensor), self.world.rank, self.world.size)
                    full = full[first:last]
                local_shard(tensor).copy_(full)

    def _gathered(self, tensor: DTensor) -> Tensor:
        """The whole tensor in host memory on rank 0, to which the others send their rows."""
        world, mine = self.world, local_shard(tensor).contiguous()
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

    def shards(self, groups: Groups) -> LocalGroups:
        """This process's shards, and on rank 0 what is whole."""
        found: LocalGroups = {}
        for group, tensors in groups.items():
            found[group] = {}
            for name, tensor in tensors.items():
                if isinstance(tensor, DTensor):
                    assert tensor.placements == (Shard(0),), tensor.placements
                    found[group][name] = TensorShard(local_shard(tensor), tuple(tensor.shape))
                elif self.world.is_rank_zero:
                    found[group][name] = TensorShard(tensor, None)
        return found

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[nn.Module]:
        # The outermost parameters of a model inside a larger module are gathered by that module.
        with gathered(self.module if model is self.model else model):
            yield model


def shard(module: nn.Module, world: World, precision: Precision) -> None:
    """Shards the module in place."""
    whole = kept_whole(module, precision)
    for parameter in module.parameters():
        if parameter not in whole:
            # FSDP2 cuts rows out of memory as it lies; convolutions still compute in channels_last, like their input.
            parameter.data = parameter.data.contiguous()
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=precision.autocast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in _units(module):
        if any(parameter not in whole for parameter in block.parameters()):
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=whole)
    if world.device.type == "cuda" and world.backend == "gloo":
        exchange_by_host(module, world)


def exchange_by_host(module: nn.Module, world: World) -> None:
    """For a sharded module whose processes share a GPU, or otherwise communicate over gloo and compute on a GPU.
    torch's own collectives would hand gloo pointers to GPU memory there, which kills the process without a
    message."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(cast(Any, GatherByHost(world)))
            part.set_custom_reduce_scatter(cast(Any, ReduceScatterByHost(world)))


def kept_whole(module: nn.Module, precision: Precision) -> set[nn.Parameter]:
    """The parameters that are not sharded: vectors, those that several modules share, and under mixed precision the
    matrices that autocast leaves in fp32, such as position embeddings."""
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
        or (precision is not FP32 and not isinstance(parts[0], _CAST_BY_AUTOCAST))
    }


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Every process holds the whole parameters, so that forwards need no other process: for evaluation, where some
    have more batches than others, or none. All processes enter and leave together; nothing may be trained inside.
    FSDP does not see these forwards: it would take them for the beginning of a step, and in the next backward a
    process would prefetch what another, with fewer forwards, does not."""
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


class HeldParameters:
    """The parameters of a sharded module as this process holds them, by name: what its optimizer updates. Whole ones
    are the module's own; shards are plain tensors in the memory of the sharded ones."""

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_parameters())
        self.sharded = {name: each for name, each in named.items() if isinstance(each, DTensor)}
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(local_shard(each), requires_grad=each.requires_grad)
            if name in self.sharded
            else each
            for name, each in named.items()
        }
        self.whole = [each for name, each in named.items() if name not in self.sharded and each.requires_grad]

    def as_sharded(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the optimizer's state as the shard of a tensor of the parameter's full shape, in the same
        memory; itself where its parameter is whole."""
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


class _ByHost:
    """What FSDP expects of a collective besides the call, whose arguments it names. The result is there on return."""

    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class GatherByHost(_ByHost):
    """All-gather by way of the host."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(self._world.all_gather_async(input_tensor, output_tensor).wait())


class ReduceScatterByHost(_ByHost):
    """Mean reduce-scatter by way of the host."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == ReduceOp.AVG, op
        parts = self._world.all_reduce(input_tensor).chunk(self._world.size)
        torch.div(parts[self._world.rank], self._world.size, out=output_tensor)


def _units(module: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one after the other: those that the model inside names, if it does."""
    for part in module.modules():
        declared = getattr(part, "blocks", None)
        if callable(declared) and not isinstance(declared, nn.Module):
            return repeated_blocks(part)
    # A list itself is never called, so nothing would gather it.
    return [
        block for block in repeated_blocks(module) if not isinstance(block, nn.ModuleList | nn.ModuleDict)
    ]


def _is_fsdp(hook: Callable[..., Any]) -> bool:
    """Whether FSDP registered it, not the model."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")

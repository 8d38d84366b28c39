"""Strict mode: the global batch in shards, each computed alone, joined in a fixed order.

Promises: parameters, buffers and everything computed from them have the same bits on any number of processes up to
the number of shards. Every shard has the same shape, starts from the same buffers (running statistics), and draws
from its own random numbers; the new buffers are the tree's mean of the shards'. Counters follow the first shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.config.rules import shard_count
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import PLAIN, SmallestBatch, WorldNorm, over_all
from drumline.parallel.strategy import ForwardPass, SetupContext, Strategy
from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.strict.ordered import Fold, OrderedSum, owned
from drumline.parallel.world import World


class StrictStrategy(Strategy):
    """The whole model in each process, without DDP: each shard's gradient is folded into a fixed tree. Its proof is
    that the bits are those of one process, so it needs no certificate."""

    name = "strict"
    lockstep: Lockstep

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        self.lockstep = Lockstep(world, shard_count(recipe))
        self.micro_batches = len(self.lockstep.own)
        self.weight = 1.0
        self.streams = self.lockstep.own

    def batch_slice(self, replica: int | None = None) -> slice:
        shards = self.lockstep.shards
        first, last = owned(shards, self.world.size)[self.world.rank if replica is None else replica]
        size = self.recipe.data.batch // shards
        return slice(first * size, last * size)

    def smallest_batch(self) -> SmallestBatch:
        batch, shards = self.recipe.data.batch, self.lockstep.shards
        samples = batch // shards
        return SmallestBatch(
            samples,
            f"run.shards = {shards} makes shards of {samples} of data.batch = {batch}",
            "use fewer --run.shards, a larger --data.batch, or --train.sync_bn",
        )

    def sync_batchnorm(self, module: nn.Module, always: bool = False) -> nn.Module:
        if self.lockstep.shards == 1:
            return module
        # torch's own SyncBatchNorm spans processes, not shards.
        kinds = PLAIN if always or self.recipe.train.sync_bn else (nn.SyncBatchNorm,)
        module = over_all(module, self.lockstep.total, kinds)
        self.lockstep.needed |= any(isinstance(layer, WorldNorm) for layer in module.modules())
        return module

    def lay_out(self, context: SetupContext) -> nn.Module:
        self._broadcast_weights()
        named = [(name, each) for name, each in self.module.named_parameters() if each.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [each for _, each in named]
        self._sum = OrderedSum(self._parameters, self.world, self.lockstep.shards)
        self._buffers = ShardBuffers(self.module, self.lockstep)
        self._never: set[int] = set()
        return self.module

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        """Buffers, too, are those of the global batch afterwards."""
        own = self.lockstep.own
        assert len(batch.labels) % len(own) == 0, (len(batch.labels), len(own))
        size = len(batch.labels) // len(own)
        shards = [
            Batch(*(tensor[index * size : (index + 1) * size] for tensor in batch))
            for index in range(len(own))
        ]
        self._buffers.begin()
        self._sum.begin()
        try:
            if self.lockstep.needed:
                self._in_lockstep(shards, forward, draws.switch)
            else:
                for index, shard in enumerate(shards):
                    draws.switch(index)
                    self._buffers.use(index)
                    self._sum.shard_begin(own[index])
                    forward.loss(shard).backward()
                    self._sum.shard_end(own[index])
        finally:
            self._buffers.restore()
        self._buffers.join()
        self._sum.finish()
        if late := self._never - self._sum.unused:
            raise UserError(
                f"run.strict: {self._names[min(late)]!r} got no gradient in the first step, and has one now",
                "use every trainable parameter in each step (multiply an unused one by 0), or continue without "
                "--run.strict",
            )
        self._sum.leave_out(self._never)

    def unused_parameters(self) -> list[Tensor]:
        """Those that no shard on any process gave a gradient; they are left out from now on."""
        idle = torch.zeros(len(self._parameters), dtype=torch.int64)
        idle[list(self._sum.unused)] = 1
        everywhere = self.world.all_gather_integers(idle).min(dim=0).values
        self._never = set(everywhere.nonzero().flatten().tolist())
        self._sum.leave_out(self._never)
        return [self._parameters[index] for index in sorted(self._never)]

    def messages(self) -> list[str]:
        shards, processes = self.lockstep.shards, self.world.size
        uneven = f"; {processes} processes share them unevenly, so some wait" if shards % processes else ""
        compiled = "; not promised for compiled models (train.compile)" if self.recipe.train.compile else ""
        return [
            f"strict: {shards} shards of {self.recipe.data.batch // shards} samples, the same bits on 1 to {shards} "
            f"processes with the same kind of device and software{uneven}{compiled}",
            *super().messages(),
        ]

    def _in_lockstep(self, shards: list[Batch], forward: ForwardPass, switch: Callable[[int], None]) -> None:
        """All shards at once, in lockstep. While one waits, its gradients are set aside: they are of the layers
        above."""
        kept: list[list[Tensor | None]] = [[None] * len(self._parameters) for _ in shards]
        current = -1

        def resume(index: int) -> None:
            nonlocal current
            if current >= 0:
                kept[current] = [parameter.grad for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, kept[index], strict=True):
                parameter.grad = gradient
            current = index
            self._buffers.use(index)
            switch(index)

        def forward_backward(shard: Batch) -> None:
            forward.loss(shard).backward()

        self.lockstep.run([partial(forward_backward, shard) for shard in shards], resume)
        kept[current] = [parameter.grad for parameter in self._parameters]
        for index, gradients in enumerate(kept):
            self._sum.shard_begin(self.lockstep.own[index])
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._sum.shard_end(self.lockstep.own[index])


class ShardBuffers:
    """The buffers of a module, one set per shard of this process. A buffer that a forward replaces instead of writing
    to it belongs to its shard, too. Buffers of layers in evaluation mode are left alone: nothing changes them."""

    def __init__(self, module: nn.Module, lockstep: Lockstep) -> None:
        self.world, self.shards, self._counts = lockstep.world, lockstep.shards, lockstep.counts
        self._slots = [
            (layer, name)
            for layer in module.modules()
            if layer.training
            for name, _ in layer.named_buffers(recurse=False)
        ]
        self._base = [layer.get_buffer(name) for layer, name in self._slots]
        self._sets = [_clones(self._base) for _ in lockstep.own]
        self._in_module: list[list[Tensor | None]] = [[*each] for each in self._sets]
        """What the module holds while each shard runs."""
        self._current = -1
        floats = [base.is_floating_point() for base in self._base]
        self._floats = [index for index, yes in enumerate(floats) if yes]
        self._counters = [index for index, yes in enumerate(floats) if not yes]
        counted = [index for index in self._counters if self._slots[index][1] != "num_batches_tracked"]
        self._sent = counted if lockstep.world.size > 1 else []
        """Counters that may depend on the data, so the first shard's are broadcast."""

    def begin(self) -> None:
        """Sets every shard's buffers to what the previous step left."""
        for each in self._sets if self._base else ():
            torch._foreach_copy_(each, self._base)
        self._in_module = [[*each] for each in self._sets]

    def use(self, index: int) -> None:
        """The module works on the buffers of this shard from now on."""
        self._remember()
        self._current = index
        for (layer, name), buffer in zip(self._slots, self._in_module[index], strict=True):
            layer._buffers[name] = buffer

    def restore(self) -> None:
        """The module works on its own buffers again."""
        self._remember()
        self._current = -1
        for (layer, name), buffer in zip(self._slots, self._base, strict=True):
            layer._buffers[name] = buffer

    @torch.no_grad()
    def join(self) -> None:
        """Sets the module's buffers to the mean over all shards, and its counters to the first shard's."""
        for mine, in_module in zip(self._sets, self._in_module, strict=True):
            for buffer, replaced in zip(mine, in_module, strict=True):
                if replaced is not None and replaced is not buffer:
                    buffer.copy_(replaced)
        for index in self._counters:
            self._base[index].copy_(self._sets[0][index])
        for index in self._sent:
            self.world.broadcast(self._base[index])
        if not self._floats:
            return
        fold: Fold[Tensor] = Fold(self.shards, _mean)
        for shard, flat in enumerate(self._everywhere()):
            fold.push((shard, shard + 1), flat)
        ((_, mean),) = fold.take()
        base = [self._base[index] for index in self._floats]
        means = mean.split([buffer.numel() for buffer in base])
        torch._foreach_copy_(base, [each.view_as(buffer) for each, buffer in zip(means, base, strict=True)])

    def _remember(self) -> None:
        """Keeps what the shard that ran has in the module: it may be in the middle of a forward."""
        if self._current >= 0:
            self._in_module[self._current] = [layer._buffers[name] for layer, name in self._slots]

    def _everywhere(self) -> Tensor:
        """The floating-point buffers of all shards, one row each."""
        rows = [torch.cat([each[index].reshape(-1) for index in self._floats]) for each in self._sets]
        return self.world.all_gather_rows(torch.stack(rows), self._counts)


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Clones that share tensors as the originals do."""
    made = {id(tensor): tensor.clone() for tensor in tensors}
    return [made[id(tensor)] for tensor in tensors]


def _mean(left: Tensor, right: Tensor, n: int, m: int) -> Tensor:
    """The mean of equal numbers is that number, so constant tables keep their values."""
    return torch.lerp(left, right, m / (n + m))

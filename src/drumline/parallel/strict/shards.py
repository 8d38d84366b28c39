"""Strict mode's way through a step: the global batch in shards, each computed alone, joined in a fixed order.

Promises: parameters, buffers and whatever is made of them have the same bits on any number of processes up to the
number of shards. Every shard has the same shape, starts from the same buffers (running statistics), and draws from
its own random numbers; the new buffers are the tree's mean of the shards'. Counters follow the first shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.parallel.layout import Draws, Everything, Passes
from drumline.parallel.strict.lockstep import Together
from drumline.parallel.strict.ordered import OrderedSum
from drumline.parallel.strict.tree import Fold


class Shards(Everything):
    """The exchange of strict mode: see `parallel/layout.py` for the plain one."""

    def __init__(self, module: nn.Module, together: Together) -> None:
        super().__init__(module)
        self.together, self.world = together, together.world
        self.weight = 1.0
        self.parts: Sequence[int] = together.own
        """Whose random numbers each part of this process's batch draws."""
        named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names, self._parameters = [name for name, _ in named], [each for _, each in named]
        self._sum = OrderedSum(self._parameters, self.world, together.shards)
        self._buffers = ShardBuffers(module, together)
        self._never: set[int] = set()

    def gradients(self, batch: Batch, passes: Passes, draws: Draws) -> None:
        """Forward and backward of this process's shards; afterwards `.grad` and all buffers are those of the global
        batch."""
        count = len(self.together.own)
        assert len(batch.labels) % count == 0, (len(batch.labels), count)
        size = len(batch.labels) // count
        shards = [
            Batch(*(tensor[place * size : (place + 1) * size] for tensor in batch)) for place in range(count)
        ]
        self._buffers.begin()
        self._sum.begin()
        try:
            if self.together.met:
                self._in_step(shards, passes, draws.switch)
            else:
                for place, shard in enumerate(shards):
                    draws.switch(place)
                    self._buffers.use(place)
                    self._sum.shard_begin(self.together.own[place])
                    passes.loss(shard).backward()
                    self._sum.shard_end(self.together.own[place])
        finally:
            self._buffers.back()
        self._buffers.join()
        self._sum.finish()
        if late := self._never - self._sum.unused:
            raise UserError(
                f"run.strict: {self._names[min(late)]!r} got no gradient in the first step, and has one now",
                "use every trainable parameter in each step (multiply what is left out at times by 0), or go on "
                "without --run.strict",
            )
        self._sum.leave_out(self._never)

    def settle(self) -> list[Tensor]:
        """After a rehearsed step: parameters that no shard anywhere gave a gradient, to be left out from now on."""
        idle = torch.zeros(len(self._parameters), dtype=torch.int64)
        idle[list(self._sum.unused)] = 1
        everywhere = self.world.all_gather_integers(idle).min(dim=0).values
        self._never = set(everywhere.nonzero().flatten().tolist())
        self._sum.leave_out(self._never)
        return [self._parameters[place] for place in sorted(self._never)]

    def buffers(self) -> None:
        """Joined with the gradients already."""

    def _in_step(self, shards: list[Batch], passes: Passes, switch: Callable[[int], None]) -> None:
        """All shards at once, in step. While one waits, its gradients are put aside: they are of all layers above."""
        kept: list[list[Tensor | None]] = [[None] * len(self._parameters) for _ in shards]
        current = -1

        def take_up(place: int) -> None:
            nonlocal current
            if current >= 0:
                kept[current] = [parameter.grad for parameter in self._parameters]
            for parameter, gradient in zip(self._parameters, kept[place], strict=True):
                parameter.grad = gradient
            current = place
            self._buffers.use(place)
            switch(place)

        def both_ways(shard: Batch) -> None:
            passes.loss(shard).backward()

        self.together.run([partial(both_ways, shard) for shard in shards], take_up)
        kept[current] = [parameter.grad for parameter in self._parameters]
        for place, gradients in enumerate(kept):
            self._sum.shard_begin(self.together.own[place])
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self._sum.shard_end(self.together.own[place])


class ShardBuffers:
    """The buffers of a module, one set for each shard of this process. A buffer that a forward replaces instead of
    writing to it is its shard's too. Those of a part that is in evaluation mode stay: nothing changes them."""

    def __init__(self, module: nn.Module, together: Together) -> None:
        self.world, self.shards, self._counts = together.world, together.shards, together.counts
        self._slots = [
            (part, name)
            for part in module.modules()
            if part.training
            for name, _ in part.named_buffers(recurse=False)
        ]
        self._base = [part.get_buffer(name) for part, name in self._slots]
        self._sets = [_clones(self._base) for _ in together.own]
        self._standing: list[list[Tensor | None]] = [[*each] for each in self._sets]
        """What the module holds while each shard runs."""
        self._current = -1
        floats = [base.is_floating_point() for base in self._base]
        self._floats = [place for place, yes in enumerate(floats) if yes]
        self._counters = [place for place, yes in enumerate(floats) if not yes]
        counted = [place for place in self._counters if self._slots[place][1] != "num_batches_tracked"]
        self._sent = counted if together.world.size > 1 else []
        """Counters that may depend on the data, so that the first shard's go to everybody."""

    def begin(self) -> None:
        """Every shard's set becomes what the step before left."""
        for each in self._sets if self._base else ():
            torch._foreach_copy_(each, self._base)
        self._standing = [[*each] for each in self._sets]

    def use(self, place: int) -> None:
        """The module works on this shard's set from now on."""
        self._leave()
        self._current = place
        for (part, name), buffer in zip(self._slots, self._standing[place], strict=True):
            part._buffers[name] = buffer

    def back(self) -> None:
        """The module has its own again."""
        self._leave()
        self._current = -1
        for (part, name), buffer in zip(self._slots, self._base, strict=True):
            part._buffers[name] = buffer

    @torch.no_grad()
    def join(self) -> None:
        """The module's own become the mean over all shards, the counters the first shard's."""
        for mine, standing in zip(self._sets, self._standing, strict=True):
            for buffer, replaced in zip(mine, standing, strict=True):
                if replaced is not None and replaced is not buffer:
                    buffer.copy_(replaced)
        for place in self._counters:
            self._base[place].copy_(self._sets[0][place])
        for place in self._sent:
            self.world.broadcast(self._base[place])
        if not self._floats:
            return
        fold: Fold[Tensor] = Fold(self.shards, _mean)
        for shard, flat in enumerate(self._everywhere()):
            fold.push((shard, shard + 1), flat)
        ((_, mean),) = fold.take()
        base = [self._base[place] for place in self._floats]
        parts = mean.split([buffer.numel() for buffer in base])
        torch._foreach_copy_(base, [part.view_as(buffer) for part, buffer in zip(parts, base, strict=True)])

    def _leave(self) -> None:
        """Remembers what the shard that ran has in its place: it may be in the middle of a forward."""
        if self._current >= 0:
            self._standing[self._current] = [part._buffers[name] for part, name in self._slots]

    def _everywhere(self) -> Tensor:
        """The floating-point buffers of all shards, a row for each."""
        rows = [torch.cat([each[place].reshape(-1) for place in self._floats]) for each in self._sets]
        return self.world.all_gather_rows(torch.stack(rows), self._counts)


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that are one stay one."""
    made = {id(tensor): tensor.clone() for tensor in tensors}
    return [made[id(tensor)] for tensor in tensors]


def _mean(left: Tensor, right: Tensor, n: int, m: int) -> Tensor:
    """Of equal numbers it is the number itself, so that constant tables keep their values."""
    return torch.lerp(left, right, m / (n + m))

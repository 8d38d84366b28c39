"""The whole model in each process, computed in micro-batches: layouts `single`, `ddp` and `dp`. FSDP builds on it.

Promises of `ddp`: running statistics are averaged after each step, so every process holds the same model between
steps and the checkpoint of one is the checkpoint of all. DDP rebuilds its buckets after its first backward; a
rehearsed step makes that happen before training, so a resumed run reduces in the same order as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from drumline.config.recipe import Recipe
from drumline.core.account import EXCHANGE, account
from drumline.data.feed.batch import Batch
from drumline.parallel.lanes import Lanes, Op, Recorder, timed
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import SmallestBatch
from drumline.parallel.reference import ReferenceModel
from drumline.parallel.strategy import ForwardPass, SetupContext, Strategy, split_batch
from drumline.parallel.world import World

# torch 2.13 renames the option. `BufferMean` replaces it, and averages over all ranks.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class SingleStrategy(Strategy):
    """One process, one device. Gradients of micro-batches accumulate."""

    name = "single"

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        self._recorder = Recorder(world.rank, world.device)

    def lay_out(self, context: SetupContext) -> nn.Module:
        self._buffer_mean = BufferMean(self.module, self.world)
        return self.module

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        draws.switch(0)
        if self._recorder.recording:
            self._recorder.start()
        for micro, piece in enumerate(split_batch(batch, self.micro_batches)):
            with self.accumulating(last=micro == self.micro_batches - 1):
                self._forward_backward(forward, piece, micro)

    def _forward_backward(self, forward: ForwardPass, piece: Batch, micro: int) -> None:
        recorder = self._recorder if self._recorder.recording else None
        loss = timed(recorder, Op.FORWARD, micro, lambda: forward.loss(piece))
        timed(recorder, Op.BACKWARD, micro, loss.backward)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch: holds back the exchange of gradients for all but the last."""
        return nullcontext()

    def average_buffers(self) -> None:
        self._buffer_mean()

    def lanes(self) -> Lanes | None:
        if self.world.size == 1 and self.micro_batches == 1:
            return None
        title = f"{self.name}, {self.world.size} process(es), {self.micro_batches} micro-batch(es)"
        names = [f"rank {rank}" for rank in range(self.world.size)]
        return Lanes(title, names, self.world, [self._recorder])


def _begin_exchange(parameter: torch.Tensor) -> None:
    account.enter(EXCHANGE)


class DDPStrategy(SingleStrategy):
    """DDP broadcasts rank 0's weights when it wraps the module, and averages gradients during backward."""

    name = "ddp"
    needs_all_gradients = True

    def lay_out(self, context: SetupContext) -> nn.Module:
        options: dict[str, Any] = {_BUFFER_OPTION: False}
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(
            super().lay_out(context), device_ids=device_ids, gradient_as_bucket_view=True, **options
        )
        # Backward reaches it last. What follows is waiting for the other processes.
        first = next(each for each in self._ddp.parameters() if each.requires_grad)
        first.register_post_accumulate_grad_hook(_begin_exchange)
        return self._ddp

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def reference(self) -> ReferenceModel:
        return ReferenceModel(
            self,
            self.name.upper(),
            hint="look for the name in `_ddp_params_and_buffers_to_ignore` of the model, which DDP does not "
            "exchange, or for a hook that reads the process's rank",
            allows_unrepeatable=True,  # several processes use DDP by default
        )


class DataParallelStrategy(SingleStrategy):
    """Copies the model to every GPU at each step and gathers the outputs on GPU 0."""

    name = "dp"
    equal_memory = False

    def lay_out(self, context: SetupContext) -> nn.Module:
        return DataParallel(super().lay_out(context))

    def smallest_batch(self) -> SmallestBatch:
        on_gpu = self.world.device.type == "cuda"
        return self._smallest(torch.cuda.device_count() if on_gpu else 1)

    def why_not_captured(self) -> str:
        return "DataParallel copies the model at each step"

    def messages(self) -> list[str]:
        return [data_parallel_message(torch.cuda.device_count()), *super().messages()]


def data_parallel_message(gpus: int) -> str:
    """What DataParallel costs."""
    if gpus < 2:
        return (
            "layout dp: DataParallel divides a batch over several GPUs; with fewer than two it has no effect"
        )
    return (
        f"layout dp: one Python process drives {gpus} GPUs; GPU 0 gathers every output and holds extra memory, and "
        f"the model is copied at each step. `--parallel.layout ddp --parallel.processes {gpus}` is faster"
    )


class BufferMean:
    """Averages the floating-point buffers (running statistics) over the processes of a world, in one message.

    Buffers of layers in evaluation mode are left alone: nothing changes them, and a mean of equal numbers may round.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self.world = world
        found = {
            id(buffer): buffer
            for layer in module.modules()
            if layer.training
            for buffer in layer.buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_meta  # those belong to other processes
        }
        self.buffers = list(found.values())

    @torch.no_grad()
    def __call__(self) -> None:
        if self.world.size == 1 or not self.buffers:
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        # Dividing after the sum keeps the values of a constant table of integers.
        self.world.all_reduce(flat).div_(self.world.size)
        means = flat.split([buffer.numel() for buffer in self.buffers])
        torch._foreach_copy_(
            self.buffers, [mean.view_as(b) for mean, b in zip(means, self.buffers, strict=True)]
        )


def used_anywhere(parameters: Sequence[nn.Parameter], world: World) -> list[bool]:
    """Which of them have a gradient on this process or another. All processes call it."""
    here = torch.tensor([each.grad is not None for each in parameters])
    found: list[bool] = world.all_gather_integers(here).any(dim=0).tolist()
    return found

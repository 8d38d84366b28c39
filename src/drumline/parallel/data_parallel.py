"""torch's two wrappers that put the whole model on every GPU: layouts `ddp` and `dp`.

Promises of `ddp`: running statistics are averaged after each step, so every process holds the same model between
steps and the checkpoint of one is the checkpoint of all. DDP rebuilds its buckets after its first backward; a
rehearsed step makes that happen before training, so a resumed run reduces in the same order as an uninterrupted one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from drumline.parallel.norm import SmallestBatch
from drumline.parallel.single import SingleStrategy

# torch 2.13 renames the option. `BufferMean` replaces it, and averages over all ranks.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DDPStrategy(SingleStrategy):
    """DDP broadcasts rank 0's weights when it wraps the module, and averages gradients during backward."""

    name = "ddp"
    label = "DDP"
    certified = True
    allows_unrepeatable = True  # it is what a run gets without asking
    needs_all_gradients = True
    mismatch_hint = (
        "look for the name in `_ddp_params_and_buffers_to_ignore` of the model, which DDP does not exchange, "
        "or for a hook that reads the process's rank"
    )

    def wrap(self, module: nn.Module) -> nn.Module:
        options: dict[str, Any] = {_BUFFER_OPTION: False}
        device_ids = [self.world.device] if self.world.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(
            module, device_ids=device_ids, gradient_as_bucket_view=True, **options
        )
        return self._ddp

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def reference_model(self) -> nn.Module:
        return self.module


class DataParallelStrategy(SingleStrategy):
    """Copies the model to every GPU at each step and gathers the outputs on GPU 0."""

    name = "dp"
    equal_memory = False
    why_no_teacher = "DataParallel would run the teacher and all losses on GPU 0"

    def wrap(self, module: nn.Module) -> nn.Module:
        return DataParallel(module)

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

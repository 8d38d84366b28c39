"""torch's DataParallel: one process drives all GPUs. Layout `dp`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from drumline.parallel.norm import SmallestBatch
from drumline.parallel.single import SingleStrategy


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

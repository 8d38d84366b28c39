"""What decides the speed of a run besides its recipe, for its lines of times: workers, cores, graph, GPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from drumline.core.machine import usable_cores
from drumline.data.sources import ArrayDataset
from drumline.training.run import Run


def speed_facts(run: Run) -> dict[str, Any]:
    """The facts about this process; those of rank 0 are written."""
    sets, world, rows = run.sets, run.world, run.strategy.batch_slice()
    facts: dict[str, Any] = {
        "workers": sets.workers.count,
        "pool": sets.workers.kind,
        "decode": sets.workers.decode,
        "arrays": isinstance(sets.train, ArrayDataset),
        "cores": usable_cores(),
        "machine_cores": psutil.cpu_count() or 1,
        "local_ranks": world.local_size,
        "torch_threads": torch.get_num_threads(),
        "eval_samples": len(sets.eval) if run.task.evaluates else 0,
        "rank_batch": len(range(run.recipe.data.batch)[rows]),
        "machine_memory_mb": psutil.virtual_memory().total / 2**20,
    }
    if world.device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(world.device),
            "captured": run.step.captured,
            "not_captured": run.not_captured,
        }
    return facts

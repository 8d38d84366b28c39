"""One rank of a user's DDP script that saves, loads and cannot write (`python -m tests.checkpoint_ranks FOLDER`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drumline import checkpoints
from drumline.core.errors import UserError

EXPECTED = {"saved": "step-1", "exists": True, "loaded": 1, "weight": 1.0, "rejected": True}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    nn.init.ones_(model.module.weight)
    found: dict[str, Any] = {}
    path = checkpoints.save(folder / "out", step=1, model=model, optimizer=optimizer)
    found["saved"], found["exists"] = path.name, path.is_dir()
    nn.init.zeros_(model.module.weight)
    loaded = checkpoints.load(folder / "out", model=model, optimizer=optimizer)
    found["loaded"], found["weight"] = loaded.step if loaded else None, model.module.weight.item()
    dist.barrier()
    (folder / "file").touch()
    try:
        checkpoints.save(folder / "file", step=1, model=model)
    except UserError as error:  # the error is on rank 0; every rank raises it
        found["rejected"] = "cannot write" in error.what
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

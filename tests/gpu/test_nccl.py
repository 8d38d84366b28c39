"""NCCL on one GPU: a group of one process that DDP steps on. NCCL rejects two ranks on one GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from drumline.config.recipe import Parallel, Recipe
from drumline.core.environment import RankInfo
from drumline.launch.network import free_port
from drumline.parallel.data_parallel import DDPStrategy
from drumline.parallel.process_group import init_process_group, pick_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_group_of_one_uses_nccl_and_ddp_steps() -> None:
    info = RankInfo(0, 1, 0, 1, 0, "127.0.0.1", free_port("127.0.0.1"), "env")
    world = init_process_group(info, pick_device("cuda", 0), "auto", 60)
    try:
        assert world.backend == "nccl"
        assert not world.shares_gpu
        module = torch.nn.Linear(4, 2).cuda()
        recipe = Recipe(parallel=Parallel(layout="ddp"))
        model = DDPStrategy(recipe, world).setup(module)
        model(torch.ones(3, 4, device="cuda")).sum().backward()
        assert module.weight.grad is not None
        total = torch.ones(5, device="cuda")
        dist.all_reduce(total)
        assert total.sum() == 5
        dist.barrier(group=world.control)
    finally:
        world.close()

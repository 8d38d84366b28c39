"""A rank that starts its training in a child forked by multiprocessing, which ends without running atexit."""

import multiprocessing
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import drumline


def work():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drumline.guard(model, optimizer)
    torch.manual_seed(dist.get_rank())
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if step == 4 and dist.get_rank() == 1:
            model.module.bias.grad.mul_(2)
        optimizer.step()
    print("done", os.getpid())


child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()

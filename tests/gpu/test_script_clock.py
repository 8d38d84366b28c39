"""`drumline.clock` on a real GPU: no synchronisation, and the device's waits named. It has not run without one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import drumline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Images(Dataset[Any]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((3, 64, 64), float(index % 7)), index % 10


def timed(seconds: float, after: float = 0.0) -> Any:
    """The verdict on 100 steps whose samples take so long, with so much time after each step."""
    loader = DataLoader(Images(seconds), 8, pin_memory=True)
    model = drumline.create_model("resnet20", classes=10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for images, labels in loader:
                loss = nn.functional.cross_entropy(
                    model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(after)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return clock.verdict()


def test_a_gpu_that_waits_for_samples_is_named_and_nothing_synchronises() -> None:
    verdict = timed(0.004)
    assert verdict.slowdowns[0].code == "workers", str(verdict)
    assert verdict.evidence.intervals[-1].mean("data_ms") > 15


def test_a_host_that_is_late_is_no_wait_for_data() -> None:
    verdict = timed(0.0, after=0.03)
    last = verdict.evidence.intervals[-1]
    assert last.mean("late_ms") > 15 > last.mean("data_ms"), str(verdict)
    assert verdict.slowdowns[0].code == "host-line"


def test_a_replayed_graph_counts_a_step_for_each_batch() -> None:
    loader = DataLoader(Images(0.0), 8, pin_memory=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    static = torch.zeros(8, 3, 64, 64, device="cuda")
    with drumline.clock(loader, model, optimizer, report=False) as clock:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(static)
        for images, _ in loader:
            static.copy_(images, non_blocking=True)
            graph.replay()
    assert clock.verdict().evidence.intervals[-1].step >= 99

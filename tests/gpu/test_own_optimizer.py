"""A user's own optimizer on a GPU: skipped steps change nothing, the host does not wait, and copies stay small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.config.learning import Optim
from drumline.core.arithmetic import CHUNK_BYTES, undone_if
from drumline.training.optim import build_optimizer
from drumline.training.own_optimizer import OwnOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SKIPPED = (0, 0, 1, 1, 0, 1, 0)


def trained(name: str, skips: bool) -> list[torch.Tensor]:
    """Parameters and state after the steps; without `skips`, the skipped ones are left out."""
    torch.manual_seed(0)
    module = nn.Linear(7, 5).cuda()
    optim = Optim(name=name, lr=0.1, weight_decay=0.01)
    ours = build_optimizer(optim, module.parameters(), torch.zeros((), device="cuda"))
    assert isinstance(ours, OwnOptimizer)
    found = torch.zeros((), device="cuda")
    ours.found_inf = found  # type: ignore[attr-defined]
    for step, skipped in enumerate(SKIPPED):
        if skipped and not skips:
            continue
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if skipped else 0.1 * (step + 1))
        found.fill_(skipped)
        if step:  # the first step creates the state, and waits
            torch.cuda.set_sync_debug_mode("error")
        ours.step()
        torch.cuda.set_sync_debug_mode("default")
    ours.undo_skipped()
    return [each.detach().cpu() for each in (*module.parameters(), *_state(ours))]


def _state(optimizer: OwnOptimizer) -> list[torch.Tensor]:
    return [tensor for slots in optimizer.state.values() for tensor in slots.values()]


@pytest.mark.parametrize("name", ["torch.optim:Adam", "torch.optim:NAdam", "tests.own_code:Counting"])
def test_a_skipped_step_changes_neither_the_weights_nor_the_counters(name: str) -> None:
    ones, others = trained(name, skips=True), trained(name, skips=False)
    assert all(map(torch.equal, ones, others))


def test_undoing_needs_one_copy_and_a_few_chunks() -> None:
    tensors = [torch.ones(1 << 25, device="cuda") for _ in range(8)]
    size = sum(each.nbytes for each in tensors)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with undone_if(torch.ones((), device="cuda"), tensors):
        for each in tensors:
            each.add_(1)
    assert torch.cuda.max_memory_allocated() - before <= size + 3 * CHUNK_BYTES + (1 << 20)
    assert all(bool((each == 1).all()) for each in tensors)

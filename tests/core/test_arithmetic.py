"""How torch computes: threads, and a context that leaves no trace."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import torch
from torch import nn

from drumline.core import arithmetic
from drumline.core.arithmetic import leave_no_trace, threads_per_process, undone_if
from drumline.core.machine import usable_cores

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_threads_divide_the_cores_among_the_processes() -> None:
    assert threads_per_process("auto", 1, env={}) == usable_cores()
    assert threads_per_process("auto", 10**6, env={}) == 1
    assert threads_per_process(5, 2, env={"OMP_NUM_THREADS": "3"}) == 5
    assert threads_per_process("auto", 10**6, env={"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_process("auto", 1, strict=True, env={"OMP_NUM_THREADS": "3"}) == 1


def test_nothing_that_happens_inside_leaves_a_trace() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    model[1].eval()
    model(torch.rand(4, 3)).sum().backward()
    own, gradients = torch.arange(3.0), [parameter.grad for parameter in model.parameters()]
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    generators = torch.get_rng_state(), random.getstate()
    with suppress(ZeroDivisionError), leave_no_trace(model, tensors=[own], devices=[CPU]):
        model.train()(torch.rand(4, 3)).sum().backward()
        model.zero_grad()
        model[0].running_mean = torch.ones(3)
        own.add_(random.random())
        raise ZeroDivisionError
    assert [layer.training for layer in model] == [True, False, True]
    assert all(
        parameter.grad is before for parameter, before in zip(model.parameters(), gradients, strict=True)
    )
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0]
        assert torch.equal(buffer, buffers[name][1])
    assert own.tolist() == [0, 1, 2]
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]


@pytest.mark.parametrize("chunk", [8, 40, 1 << 26])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_changes_are_undone_if_something_was_found_whatever_the_memory_layout(
    found: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "CHUNK_BYTES", chunk)
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(7),
        torch.zeros(0),
    ]
    before = [tensor.clone() for tensor in tensors]
    with undone_if(torch.tensor(found), tensors):
        for tensor in tensors:
            tensor.add_(1)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old if found else old + 1)

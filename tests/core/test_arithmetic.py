"""How torch computes: precision and threads."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.arithmetic import leave_no_trace, resolve_precision, threads_per_process
from drumline.core.errors import UserError
from drumline.core.machine import usable_cores

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("wanted", "dtype"), [("auto", None), ("fp32", None), ("bf16", torch.bfloat16)])
def test_precision_on_a_cpu(wanted: Any, dtype: torch.dtype | None) -> None:
    assert resolve_precision(wanted, CPU) is dtype


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        resolve_precision("fp16", CPU)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_bf16_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert resolve_precision("auto", GPU) is dtype


def test_fp16_is_not_used_where_a_loss_scaler_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_precision("auto", GPU, "stages scale apart") is None
    with pytest.raises(UserError, match=r"train.precision = fp16: stages scale apart"):
        resolve_precision("fp16", GPU, "stages scale apart")


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

"""How torch computes: precision and threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drumline.core.arithmetic import resolve_precision, threads_per_process
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

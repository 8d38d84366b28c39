"""The table of precisions, and what `auto` resolves to."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from drumline.config.recipe import PrecisionName
from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP16, FP32, PRECISIONS, Precision, autocast, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_recipes_accept_every_precision_of_the_table() -> None:
    assert get_args(PrecisionName) == ("auto", *PRECISIONS)


@pytest.mark.parametrize("precision", PRECISIONS.values())
def test_a_convolution_computes_in_the_type_of_the_precision(precision: Precision) -> None:
    image, weight = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
    with autocast(CPU, precision):
        assert torch.conv2d(image, weight).dtype == (precision.autocast_dtype or torch.float32)
        with autocast(CPU, FP32):
            assert torch.conv2d(image, weight).dtype == torch.float32


@pytest.mark.parametrize(("wanted", "precision"), [("auto", FP32), ("fp32", FP32), ("bf16", BF16)])
def test_precision_on_a_cpu(wanted: str, precision: Precision) -> None:
    assert resolve_precision(wanted, CPU) is precision


def test_fp16_on_a_cpu_is_rejected() -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        resolve_precision("fp16", CPU)


@pytest.mark.parametrize(("native", "precision"), [(True, BF16), (False, FP16)])
def test_auto_takes_bf16_where_the_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, precision: Precision
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert resolve_precision("auto", GPU) is precision


def test_fp16_is_not_used_where_a_loss_scaler_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_precision("auto", GPU, "stages scale apart") is FP32
    with pytest.raises(UserError, match=r"train.precision = fp16: stages scale apart"):
        resolve_precision("fp16", GPU, "stages scale apart")

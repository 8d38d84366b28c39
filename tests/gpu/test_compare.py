"""Two models on a GPU: times of layers by events, and the same answers as on a CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drumline.comparison.describe import judge
from drumline.comparison.measure import Side, measure
from tests.comparison.networks import Residual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_models_are_compared_and_their_layers_timed() -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    measured = measure(
        Side("A", Residual().cuda()), Side("B", partial(Residual, pool=False)().cuda()), images
    )
    assert judge(measured).findings[0].code == "max-pool"
    assert all(layer.seconds > 0 for layer in measured.a)
    assert judge(measure(Side("A", Residual().cuda()), Side("B", Residual().cuda()), images)).equal

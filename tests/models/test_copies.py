"""Copies of models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.models.copies import copy_model


def test_a_model_that_holds_a_computed_tensor_is_refused_by_name() -> None:
    old = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(UserError, match=r"'1\.weight' is a tensor computed from") as refused:
        copy_model(old)
    assert "weight_norm or spectral_norm from torch.nn.utils.parametrizations" in str(refused.value)


def test_a_parametrized_model_is_copied() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    made = copy_model(model)
    x = torch.randn(3, 4)
    assert torch.equal(made(x), model(x))
    assert made[0].parametrizations.weight.original0 is not model[0].parametrizations.weight.original0

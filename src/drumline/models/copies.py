"""Copies of models, for moving averages, checks and other devices."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from drumline.core.errors import UserError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_model(model: AnyModule) -> AnyModule:
    """A deep copy. Rejects a model that holds a computed tensor, as the old `torch.nn.utils.weight_norm` creates."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                where = f"{path}.{name}" if path else name
                raise UserError(
                    f"the model cannot be copied: '{where}' is a tensor computed from parameters",
                    fix="compute it in forward(), or replace the old torch.nn.utils functions with weight_norm or "
                    "spectral_norm from torch.nn.utils.parametrizations; train.ema and some layouts copy the model",
                )
    return copy.deepcopy(model)

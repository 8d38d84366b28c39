"""A copy of a model, for a moving average, a check or a second place."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from drumline.errors import UserError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_model(model: AnyModule) -> AnyModule:
    """A deep copy. Refuses a model that holds a computed tensor, as the old `torch.nn.utils.weight_norm` makes it."""
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                where = f"{place}.{name}" if place else name
                raise UserError(
                    f"the model cannot be copied: '{where}' is a tensor that was computed from parameters",
                    fix="compute it in forward(), or use torch.nn.utils.parametrizations.weight_norm (spectral_norm) "
                    "instead of the old torch.nn.utils functions; train.ema and some layouts copy the model",
                )
    return copy.deepcopy(model)

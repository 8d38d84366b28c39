"""Replicas of a stage add up what belongs together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.parallel.pipeline.step import GradientSum
from drumline.parallel.world import Pending


class Other:
    """Another replica, whose first step used the second of three parameters alone."""

    size = 2

    def all_gather_integers(self, mine: Tensor) -> Tensor:
        return torch.stack([mine.long(), torch.tensor([0, 1, 0])])

    def all_reduce_async(self, flat: Tensor) -> Pending:
        theirs = torch.tensor([0.0, 0.0, 5.0, 5.0])
        return Pending(flat + theirs)


def test_replicas_that_used_other_parameters_do_not_mix_their_gradients() -> None:
    names = ("first", "second", "never")
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in names})
    first, second, never = (module[name] for name in names)
    other: Any = Other()
    total = GradientSum({0: [first, second, never]}, other, module)
    first.grad = torch.ones(2)
    total.begin(0)
    total.finish()
    assert first.grad.tolist() == [1, 1]
    assert second.grad is not None
    assert second.grad.tolist() == [5, 5]
    assert never.grad is None
    never.grad = torch.ones(2)
    with pytest.raises(UserError, match="parameter never of stage 0 got no gradient in the first step"):
        total.begin(0)

"""What the certificate computes the first step with in one process, to compare it with the step of the layout.

Promises: the model has the run's present weights, and draws the random numbers that the step draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from drumline.parallel.model_draws import ModelDraws

if TYPE_CHECKING:
    from drumline.parallel.strategy import Strategy


class ReferenceModel:
    """The trained module itself, for layouts that keep it whole in each process."""

    def __init__(
        self, strategy: Strategy, title: str, *, hint: str = "", allows_unrepeatable: bool = False
    ) -> None:
        self.strategy, self.title = strategy, title
        self.hint = hint
        """What to look for first if a gradient is wrong."""
        self.allows_unrepeatable = allows_unrepeatable
        """Whether a model that does not repeat its own step is trained without a certificate instead of rejected."""

    def whole(self) -> nn.Module | None:
        """The whole model, on a process that computes the reference; None elsewhere. All processes call it, once."""
        return self.strategy.module

    def forward(self, model: nn.Module, draws: ModelDraws, step: int, micro: int, drawing: bool) -> nn.Module:
        """The model for one micro-batch. `drawing` says whether any process draws random numbers."""
        if micro == 0:
            draws.at(step)
            draws.switch(0)
        return model


class ReferenceCopy(ReferenceModel):
    """A copy of the module, made before it is divided over processes, which gets the run's weights."""

    def __init__(self, strategy: Strategy, title: str, copy: nn.Module | None) -> None:
        """`copy` is None on a process that computes no reference."""
        super().__init__(strategy, title)
        self._copy = copy

    def whole(self) -> nn.Module | None:
        strategy, copy = self.strategy, self._copy
        self._copy = None  # frees the memory after its one use
        state = {name: each for name, each in strategy.module.state_dict().items() if not each.is_meta}
        gathered = strategy.gather({"all": state})
        live = {"all": dict(copy.state_dict()) if copy is not None else {}}
        strategy.scatter(gathered if strategy.world.is_rank_zero else None, live, Path("the run itself"))
        return copy

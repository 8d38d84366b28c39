"""A layout of a user's own, as far as it needs code."""

from __future__ import annotations

from torch import nn

from drumline.data.feed.batch import Batch
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.single import SingleStrategy
from drumline.parallel.strategy import ForwardPass, split_batch


class ToyStrategy(SingleStrategy):
    """Computes every micro-batch in two halves."""

    name = "toy"
    certified = True

    @property
    def micro_batches(self) -> int:
        return 2 * self.recipe.train.accumulate

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        draws.switch(0)
        for half in split_batch(batch, self.micro_batches):
            forward.loss(half).backward()

    def reference_model(self) -> nn.Module:
        return self.module

    def messages(self) -> list[str]:
        return [f"layout toy: {self.micro_batches} halves"]

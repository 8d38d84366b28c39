"""A layout of a user's own, as far as it needs code."""

from __future__ import annotations

from drumline.config.recipe import Recipe
from drumline.data.feed.batch import Batch
from drumline.parallel.data_parallel import SingleStrategy
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.reference import ReferenceModel
from drumline.parallel.strategy import ForwardPass, split_batch
from drumline.parallel.world import World


class ToyStrategy(SingleStrategy):
    """Computes every micro-batch in two halves."""

    name = "toy"

    def __init__(self, recipe: Recipe, world: World) -> None:
        super().__init__(recipe, world)
        self.micro_batches = 2 * recipe.train.accumulate

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        draws.switch(0)
        for half in split_batch(batch, self.micro_batches):
            forward.loss(half).backward()

    def reference(self) -> ReferenceModel:
        return ReferenceModel(self, self.name)

    def messages(self) -> list[str]:
        return [f"layout toy: {self.micro_batches} halves"]

"""How the recipe spreads a step over processes: shares or shards, and what joins them again.

Promises: plain and strict mode differ here and nowhere else in `train/`; a rank's part of the global batch is the
same at every step, so shapes are fixed.
"""

from __future__ import annotations

from torch import nn

from drumline.config.recipe import Recipe
from drumline.config.rules import shard_count
from drumline.data.feed.sampler import rank_slice
from drumline.parallel.layout import Averaged, Exchange
from drumline.parallel.norm import PLAIN, WorldNorm, over_everybody, world_total
from drumline.parallel.strict.lockstep import Together
from drumline.parallel.strict.shards import Shards
from drumline.parallel.strict.tree import owned
from drumline.parallel.world import World
from drumline.train.optim import DeviceRate
from drumline.train.state import TrainState


def own_share(recipe: Recipe, rank: int, processes: int, unit: int) -> slice:
    """A rank's part of every global batch: equal shares, or in strict mode its shards."""
    batch = recipe.data.batch
    if not recipe.run.strict:
        return rank_slice(batch, rank, processes, unit)
    shards = shard_count(recipe)
    first, last = owned(shards, processes)[rank]
    return slice(first * (batch // shards), last * (batch // shards))


def prepare_shards(recipe: Recipe, world: World) -> Together | None:
    """Strict mode's shards."""
    return Together(world, shard_count(recipe)) if recipe.run.strict else None


def span_norms(module: nn.Module, recipe: Recipe, world: World, together: Together | None) -> nn.Module:
    """The module with BatchNorm over the global batch, where that is wanted."""
    if together is not None:
        if together.shards == 1:
            return module
        # torch's own SyncBatchNorm spans processes, not shards.
        return over_shards(module, together, PLAIN if recipe.train.sync_bn else (nn.SyncBatchNorm,))
    if not recipe.train.sync_bn or world.size == 1:
        return module
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return over_everybody(module, world_total(world))


def over_shards(
    module: nn.Module, together: Together, kinds: tuple[type[nn.Module], ...] = PLAIN
) -> nn.Module:
    """The module with these kinds of BatchNorm over all shards."""
    module = over_everybody(module, together.total, kinds)
    together.met |= any(isinstance(part, WorldNorm) for part in module.modules())
    return module


def prepare_exchange(recipe: Recipe, state: TrainState, world: World, together: Together | None) -> Exchange:
    """How a step's gradients come together."""
    if together is not None:
        return Shards(state.module, together)
    if state.held is not None:
        from drumline.parallel.fsdp import ShardedExchange

        exchange = ShardedExchange(state.module, state.held, world, recipe.train.accumulate)
        if isinstance(state.optimizer, DeviceRate):
            state.optimizer.norms = (
                exchange.norms
            )  # the lengths of whole tensors, not of the shards held here
        return exchange
    return Averaged(state.module, state.forward, world, recipe.train.accumulate)

"""A layout's strategy: everything that depends on how a run is laid out over processes and devices.

The training loop, checkpoints, evaluation, certificate, guards and timeline call these methods and never ask which
layout they run. A new layout is a subclass in a file of its own and one entry in `LAYOUTS` (`config/layouts.py`).

Promises: after `gradients`, `.grad` is the gradient of the global batch, however it was divided; all processes that
hold a tensor hold the same bits between steps; what is gathered for a checkpoint has the names, shapes and types of a
run in one process, so a run resumes under any layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.config.layouts import STRICT, layout_named, resolve_layout
from drumline.config.recipe import Recipe
from drumline.config.rules import process_problems, reject
from drumline.core.errors import UserError
from drumline.core.precision import Precision, resolve_precision
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds, rank_slice
from drumline.models.base import copy_model
from drumline.parallel.lanes import Lanes
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import SmallestBatch, few_samples, over_all, world_total
from drumline.parallel.reference import ReferenceModel
from drumline.parallel.strict.lockstep import Lockstep
from drumline.parallel.world import World, make_grid
from drumline.state.checkpoint import copy_into
from drumline.state.shards import LocalGroups, TensorShard
from drumline.state.tensors import Groups

Gathered = dict[str, dict[str, Tensor]]
Log = Callable[[str], None]
Prefetch = Callable[[Sequence[Batch], Callable[[Batch], Tensor]], None]
"""Called with a step's micro-batches and a function that turns one into images."""


class ForwardPass(Protocol):
    """What a step computes on a micro-batch."""

    def images(self, batch: Batch) -> Tensor:
        """The model's input."""

    def loss(self, batch: Batch) -> Tensor:
        """The scalar that backward starts from."""


def output_only(module: nn.Module, output: Any, *others: Any) -> Any:
    """Returns the cut part's output unchanged."""
    return output


@dataclass(frozen=True)
class Cut:
    """How a task's module can be computed in stages."""

    name: str = ""
    """The submodule that is cut into stages. Empty: the whole module."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its forward besides the images."""
    after: Callable[..., Any] = output_only
    """`after(module, output, *others)`: what the module returns, given the output of the part that is cut and the
    other arguments it was called with. Runs with the last stage."""
    reads_images: bool = False
    """Whether the objective reads the images too."""
    prefetch: Prefetch | None = None
    """Runs in every process before the stages compute a step's micro-batches."""

    def root(self, module: nn.Module) -> nn.Module:
        """The part of the module that is cut."""
        return module.get_submodule(self.name) if self.name else module


@dataclass(frozen=True)
class SetupContext:
    """What only some layouts need to lay a module out."""

    cut: Cut = Cut()
    image_size: int = 0
    """The side in pixels."""
    saved: Mapping[str, Any] = field(default_factory=dict)
    """The facts (see `Strategy.facts`) of the run that this one resumes."""
    log: Log = lambda text: None


@dataclass(frozen=True)
class SharedBackward:
    """A backward that several processes or threads compute together. Its gradients are seen by hooks alone."""

    parameters: Mapping[int, Sequence[tuple[str, nn.Parameter]]]
    """By pipeline stage (0 without stages): the parameters whose hooks run in this process, with their names."""
    computing: dict[int, tuple[int, Batch]] = field(default_factory=dict)
    """Thread to the stage and micro-batch that it computes at the moment."""


class Strategy(ABC):
    """One layout of a run. All processes create it and call its methods in the same order.

    Life: `check` and the constructor reject what cannot work; `place` and `sync_batchnorm` adapt a fresh model;
    `setup` lays it out; after that come the methods of a step, of the state and of the reports. A subclass must
    define `name` and `gradients`. Everything else has a default, which is right for a whole model in each process.
    """

    name = ""
    """The layout, as in `parallel.layout`."""
    needs_all_gradients = False
    """Whether every trainable parameter must get a gradient in every step."""
    equal_memory = True
    """Whether each process computes on its own device alone and holds as much memory as the others."""
    why_no_scaler = ""
    """Why scaling the loss cannot work. Empty: it can."""
    devices: Sequence[torch.device] = ()
    """Devices that this process computes on besides its own."""
    lockstep: Lockstep | None = None
    """How the shards of strict mode wait for each other."""

    module: nn.Module
    """Everything that is trained."""
    model: nn.Module
    """What is evaluated and exported: `module`, or a submodule of it."""

    def __init__(self, recipe: Recipe, world: World, places: int = 1) -> None:
        """`places` is the number of processes that hold one copy of the model together."""
        self.recipe, self.world = recipe, world
        self.grid = make_grid(world, places)
        self.micro_batches = recipe.train.accumulate
        """Pieces that a process's slice of the global batch is computed in."""
        self.weight = float(self.grid.replicas)
        """Weight of a sum of losses divided by the global batch, so that the exchange gives the mean."""
        self.streams: Sequence[int] = (world.rank,)
        """Numbers of the random streams that this process draws from: one per piece that it computes."""
        self.precision = self.resolve_precision(recipe.train.precision)

    @classmethod
    def check(cls, recipe: Recipe, world: World) -> None:
        """Raises a UserError if the recipe cannot be laid out over this many processes. Needs no process group."""
        reject(recipe, process_problems(recipe, world.size))

    @property
    def description(self) -> str:
        """The layout in one line, for the log and the certificate."""
        return f"layout {self.name} over {self.world.size} processes"

    # Batches -----------------------------------------------------------------------------------------------------

    def batch_slice(self, replica: int | None = None) -> slice:
        """The rows of every global batch that a replica computes; by default this process's replica."""
        replica = self.grid.replica if replica is None else replica
        return rank_slice(self.recipe.data.batch, replica, self.grid.replicas, self.recipe.data.mixing_unit)

    def smallest_batch(self) -> SmallestBatch:
        """The smallest batch that goes through the model at once, which BatchNorm needs to know."""
        return self._smallest(self.world.size)

    def _smallest(self, slices: int) -> SmallestBatch:
        batch, micro = self.recipe.data.batch, self.micro_batches
        samples = smallest_piece(batch, slices, micro, self.recipe.data.mixing_unit)
        if micro > 1:
            return SmallestBatch(
                samples,
                f"train.accumulate = {micro} makes micro-batches of {samples} of data.batch = {batch}",
                "use a smaller --train.accumulate, or a larger --data.batch",
            )
        return SmallestBatch.of_processes(samples, batch, slices)

    # The model ---------------------------------------------------------------------------------------------------

    def resolve_precision(self, wanted: str) -> Precision:
        """The precision that a `precision` field asks for under this layout."""
        return resolve_precision(wanted, self.world.device, self.why_no_scaler)

    def place(self, module: nn.Module) -> nn.Module:
        """A fresh model where `setup` expects it: on this process's device."""
        return to_device(module, self.recipe, self.world.device)

    def sync_batchnorm(self, module: nn.Module, always: bool = False) -> nn.Module:
        """The module with BatchNorm over the global batch, where `train.sync_bn` asks for it or `always`."""
        peers = self.grid.peers
        if peers.size == 1 or not (always or self.recipe.train.sync_bn):
            return module
        if self.world.device.type == "cuda" and not always:
            return nn.SyncBatchNorm.convert_sync_batchnorm(module)
        return over_all(module, world_total(peers))

    def setup(
        self,
        module: nn.Module,
        model: nn.Module | None = None,
        context: SetupContext = SetupContext(),  # noqa: B008
    ) -> nn.Module:
        """Lays `module` out, which is in training mode, with rank 0's weights. Returns what a step calls. `model` is
        the part that is evaluated, if not all of it."""
        self.module, self.model = module, module if model is None else model
        return self.lay_out(context)

    def lay_out(self, context: SetupContext) -> nn.Module:
        """The part of `setup` that depends on the layout."""
        return self.module

    def copy_model(self) -> nn.Module:
        """A frozen copy of the model, laid out as the model is: for a moving average. Called once, after `setup`."""
        return copy_model(self.model).eval().requires_grad_(False)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters as this process's optimizer updates them."""
        return self.module.named_parameters()

    def tensor_norms(self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """The norm of each whole tensor, given what this process holds of it and the parameters they belong to."""
        return torch.stack(torch._foreach_norm(list(tensors)))

    # A step ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        """Forward and backward of this process's slice. Afterwards `.grad` is the gradient of the global batch."""

    def average_buffers(self) -> None:  # noqa: B027
        """After the optimizer: every process that holds a buffer then holds the same."""

    def gradient_norm(self) -> Tensor:
        """The norm of the whole model's gradient."""
        gradients = [each.grad for each in self.module.parameters() if each.grad is not None]
        return nn.utils.get_total_norm(gradients, foreach=True)

    def unused_parameters(self) -> list[Tensor]:
        """After a rehearsed step: the trainable parameters of this process that got no gradient."""
        return [
            each
            for each in self.module.parameters()
            if each.requires_grad and not each.is_meta and each.grad is None
        ]

    def why_not_captured(self) -> str:
        """Why a step cannot be recorded as a CUDA graph. Empty: it can."""
        return "several processes exchange gradients outside a graph" if self.world.size > 1 else ""

    def shared_backward(self) -> SharedBackward | None:
        """Where this process cannot differentiate a loss alone: what to watch instead. None: it can."""
        return None

    # State and evaluation ----------------------------------------------------------------------------------------

    def gather(self, groups: Groups) -> Gathered:
        """On rank 0 the whole state: its own tensors as they are, others in host memory. Elsewhere nothing."""
        return {name: dict(tensors) for name, tensors in groups.items()} if self.world.is_rank_zero else {}

    def scatter(self, groups: Groups | None, live: Groups, source: Path) -> None:
        """Writes rank 0's whole state into the live tensors of all processes. Rejects a state that does not fit
        before it writes a byte; `source` is for that message."""
        if groups is not None:
            copy_into(groups, live, source)
        for group in live.values():
            for tensor in group.values():
                self.world.broadcast(tensor)

    def shards(self, groups: Groups) -> LocalGroups:
        """What this process writes of a sharded checkpoint: what is whole, rank 0 writes."""
        return {
            group: {name: TensorShard(tensor, None) for name, tensor in tensors.items()}
            if self.world.is_rank_zero
            else {}
            for group, tensors in groups.items()
        }

    def optimizer_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the optimizer's state as a part of the whole run's state; `name` is its parameter's."""
        return tensor

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[nn.Module]:
        """What to call to evaluate the model or its average. It returns None where other processes have the
        output."""
        yield model

    # Reports -----------------------------------------------------------------------------------------------------

    def reference(self) -> ReferenceModel | None:
        """How the certificate computes the first step in one process. None: the layout needs no certificate."""
        return None

    def messages(self) -> list[str]:
        """What to log about the layout when a run starts."""
        warning = few_samples(self.module, self.smallest_batch())
        return [warning] if warning else []

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's environment records, for the run that resumes from it."""
        return {}

    def lanes(self) -> Lanes | None:
        """What the timeline of a step shows. None: there is nothing to see."""
        return None

    def _broadcast_weights(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.world.broadcast(tensor.detach())

    def _reject_hooks(self) -> None:
        """A parameter that moves to a different process or device loses its hooks, and what they do to gradients."""
        for name, parameter in self.module.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UserError(
                    f"parallel.layout = {self.name}: the parameter {name} has a hook, which would be lost when the "
                    "parameter moves to where it is computed",
                    "do the same in forward or in the objective, or use --parallel.layout ddp",
                )


def strategy_class(recipe: Recipe, processes: int) -> type[Strategy]:
    """The strategy of the recipe's layout for so many processes."""
    layout = STRICT if recipe.run.strict else layout_named(resolve_layout(recipe.parallel.layout, processes))
    module, _, name = layout.strategy.partition(":")
    found: type[Strategy] = getattr(import_module(module), name)
    return found


def create_strategy(recipe: Recipe, world: World) -> Strategy:
    """The strategy of a run. All processes call it with the same recipe."""
    kind = strategy_class(recipe, world.size)
    kind.check(recipe, world)
    return kind(recipe, world)


def uses_channels_last(recipe: Recipe, device: torch.device) -> bool:
    """Whether images and convolutions use that memory format."""
    return recipe.train.channels_last and device.type == "cuda"


def to_device(module: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """The module on the device, in the recipe's memory format."""
    module = module.to(device)
    if uses_channels_last(recipe, device):
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """The batch in `count` micro-batches, as even as possible. Mixed pairs stay together."""
    if count == 1:
        return [batch]
    cuts = bounds(len(batch.labels), count, unit=2 if batch.mix.shape[1] else 1)
    return [Batch(*(tensor[first:last] for tensor in batch)) for first, last in pairwise(cuts)]


def smallest_piece(batch: int, slices: int, micro_batches: int, unit: int) -> int:
    """Samples of the smallest micro-batch of the smallest slice."""
    sizes = (each.stop - each.start for each in (rank_slice(batch, n, slices, unit) for n in range(slices)))
    return min(last - first for first, last in pairwise(bounds(min(sizes), micro_batches, unit)))

"""A model in stages: where it is cut, which process holds what, and how it is trained and evaluated. Layouts
`pipeline` (stages work on several micro-batches at a time) and `model` (stages take turns).

Promises: every process builds the same model and agrees on the cut; each keeps only the tensors of its own stages
(the others are on the meta device, without memory), under the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.config.layouts import ONE_SCALE
from drumline.config.recipe import Recipe
from drumline.core.precision import Precision
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds
from drumline.models.base import copy_model, repeated_blocks
from drumline.models.tapped import Tapped
from drumline.parallel.lanes import Lanes
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import SmallestBatch, apply_norm_mode, describe_norm, norm_count, world_total
from drumline.parallel.pipeline.cut import trace
from drumline.parallel.pipeline.profile import ProfileOptions
from drumline.parallel.pipeline.schedule import Shape, pipeline_shape
from drumline.parallel.pipeline.split import choose_cut
from drumline.parallel.pipeline.stage import (
    Segment,
    StageModule,
    TensorSpec,
    boundaries,
    describe_stages,
    lane_devices,
    parameters_by_stage,
    place_stages,
)
from drumline.parallel.pipeline.step import OwnStages, PipelineStep, StagedForward, Tail
from drumline.parallel.reference import ReferenceCopy
from drumline.parallel.strategy import (
    Cut,
    ForwardPass,
    Gathered,
    SetupContext,
    SharedBackward,
    Strategy,
    smallest_piece,
    uses_channels_last,
)
from drumline.parallel.world import World
from drumline.state.checkpoint import check_fit
from drumline.state.tensors import Groups


class PipelineStrategy(Strategy):
    """Stages over processes, each replica of the pipeline on its slice of the global batch; or over the devices of
    one process."""

    name = "pipeline"
    equal_memory = False

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.shape = _shape(recipe, world)
        self.why_no_scaler = ONE_SCALE if world.size > 1 else ""
        super().__init__(recipe, world, self.shape.places)
        self.micro_batches = self.shape.micro_batches
        self.weight = 1.0
        self.devices = lane_devices(self.shape, world.device)

    @classmethod
    def check(cls, recipe: Recipe, world: World) -> None:
        _shape(recipe, world)

    @property
    def description(self) -> str:
        shape, sizes = self.shape, self._micro_batch_sizes()
        replicas = f"{shape.replicas} replicas of " if shape.replicas > 1 else ""
        chunks = f" x {shape.chunks} chunks" if shape.chunks > 1 else ""
        size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} or {max(sizes)}"
        return (
            f"layout pipeline: {replicas}{shape.lanes} {self._where}{chunks}, {shape.schedule}, "
            f"{shape.micro_batches} micro-batch{'es' if shape.micro_batches > 1 else ''} of {size} samples"
        )

    @property
    def _where(self) -> str:
        if self.shape.over_processes:
            return "processes"
        return "virtual devices" if self.recipe.parallel.virtual else "devices"

    def smallest_batch(self) -> SmallestBatch:
        shape, batch = self.shape, self.recipe.data.batch
        samples = smallest_piece(batch, shape.replicas, shape.micro_batches, self.recipe.data.mixing_unit)
        return SmallestBatch(
            samples,
            f"parallel.micro_batches = {shape.micro_batches} makes micro-batches of {samples} of data.batch = "
            f"{batch}",
            "use fewer --parallel.micro_batches, a larger --data.batch, or --parallel.batchnorm frozen",
        )

    def _micro_batch_sizes(self, replica: int | None = None) -> list[int]:
        """Samples of each micro-batch, of one replica or of all."""
        replicas = range(self.shape.replicas) if replica is None else (replica,)
        slices = [self.batch_slice(each) for each in replicas]
        return [
            last - first
            for each in slices
            for first, last in pairwise(
                bounds(each.stop - each.start, self.shape.micro_batches, self.recipe.data.mixing_unit)
            )
        ]

    def why_not_captured(self) -> str:
        return super().why_not_captured() or "stages are computed by threads of their own"

    # The model ---------------------------------------------------------------------------------------------------

    def place(self, module: nn.Module) -> nn.Module:
        """On the host: each process takes its stages of it to its device."""
        return module

    def lay_out(self, context: SetupContext) -> nn.Module:
        recipe, shape, grid, cut = self.recipe, self.shape, self.grid, context.cut
        root = cut.root(self.module)
        self._reject_hooks()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.world.broadcast_host(tensor.detach())
        leaves = _names_of(root, repeated_blocks(self.model)) if recipe.train.gradient_checkpointing else ()
        channels_last = uses_channels_last(recipe, self.world.device)
        side, layout = context.image_size, torch.channels_last if channels_last else torch.contiguous_format
        size = max(self._micro_batch_sizes(grid.replica))
        sample = torch.empty((size, 3, side, side), device=self.world.device, memory_format=layout)
        root.train()
        traced = trace(root, cut.kwargs, sample=sample, leaves=leaves)
        options = ProfileOptions(tuple(sample.shape), self.world.device, self.precision, channels_last)
        chosen = choose_cut(
            traced,
            shape,
            recipe.parallel.split,
            options,
            self.world,
            context.saved.get("cut", ()),
            context.log,
        )
        self._why_there = chosen.why
        self.segments = traced.split(chosen.names)
        self._evaluated: Sequence[Segment] = self.segments
        if root is not self.model or cut.kwargs:
            self._evaluated = self._cut_for_evaluation(root, chosen.names, sample, leaves)
        total = world_total(grid.peers) if grid.replicas > 1 else None
        apply_norm_mode(root, recipe.parallel.batchnorm, total, shape.micro_batches)
        self._reference = StagedReference(self, cut, copy_model(self.module) if grid.ends else None)
        place_stages(self.module, root, self.segments, shape, grid, self.devices, channels_last)
        self.module.train()
        stages = {
            segment.number: segment.bind(root)
            for segment in self.segments
            if not shape.over_processes or segment.number % shape.lanes == grid.place
        }
        tail = Tail(partial(cut.after, self.module))
        own = OwnStages(
            module=self.module,
            stages=stages,
            parameters=parameters_by_stage(self.module, root, self.segments, list(stages)),
            tail=tail,
            specs=_specs([segment.bind(root) for segment in self.segments], sample, self.precision),
            devices=self.devices,
            precision=self.precision,
            reads_images=cut.reads_images,
            recomputes=recipe.train.gradient_checkpointing,
            prefetch=cut.prefetch,
        )
        self._norms = norm_count(root)
        self._step = PipelineStep(own, shape, grid)
        self.streams = self._step.streams
        return tail

    def _cut_for_evaluation(
        self, root: nn.Module, names: Sequence[str], sample: Tensor, leaves: Sequence[str]
    ) -> Sequence[Segment]:
        """The same cuts of the model alone, which evaluation calls without the arguments of the task."""
        prefix = "model." if isinstance(root, Tapped) else ""
        traced = trace(self.model, {}, sample=sample, leaves=[name.removeprefix(prefix) for name in leaves])
        return traced.split([name.removeprefix(prefix) for name in names])

    # A step ------------------------------------------------------------------------------------------------------

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        self._step.gradients(batch, forward, draws)

    def average_buffers(self) -> None:
        self._step.buffers()

    def gradient_norm(self) -> Tensor:
        """Each tensor's own norm first, in the order of the whole model: the same bits as in one process."""
        if self.grid.places == 1:
            return super().gradient_norm()
        trained = [each for each in self.module.parameters() if each.requires_grad]
        held = [each.grad for each in trained if each.grad is not None]
        norms = iter(torch._foreach_norm(held)) if held else iter(())
        zero = torch.zeros((), device=self.world.device)
        lengths = torch.stack([zero if each.grad is None else next(norms) for each in trained])
        return torch.linalg.vector_norm(self.grid.down.all_reduce(lengths))

    def shared_backward(self) -> SharedBackward:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        parameters = {
            stage: [(names[id(each)], each) for each in parameters]
            for stage, parameters in self._step.own.parameters.items()
        }
        return SharedBackward(parameters, self._step.computing)

    # State and evaluation ----------------------------------------------------------------------------------------

    def gather(self, groups: Groups) -> Gathered:
        """The first replica's state; the others hold the same."""
        if self.grid.places == 1:
            return super().gather(groups)
        if self.grid.replica:
            return {}
        flat = self.grid.down.gather_tensors(_flat(groups))
        return _nested(flat) if self.world.is_rank_zero else {}

    def scatter(self, groups: Groups | None, live: Groups, source: Path) -> None:
        if self.grid.places == 1:
            return super().scatter(groups, live, source)
        mine = _flat(live)
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
        held = [specs, *self.world.all_gather_object(specs)]
        whole = {name: spec for each in held for name, spec in each.items()}
        if groups is not None:
            like = {
                name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in whole.items()
            }
            check_fit(groups, _nested(like), source)
        loaded = _flat(groups) if groups is not None else {}
        for name in sorted(whole):
            tensor = (
                loaded[name].cpu().contiguous()
                if groups is not None
                else torch.empty(whole[name][0], dtype=whole[name][1])
            )
            self.world.broadcast_host(tensor)
            if name in mine:
                with torch.no_grad():
                    mine[name].copy_(tensor)
        return None

    @contextmanager
    def evaluation(self, model: nn.Module) -> Iterator[nn.Module]:
        yield StagedForward(model, self._evaluated, self.shape, self.grid, self.devices, self.precision)

    # Reports -----------------------------------------------------------------------------------------------------

    def reference(self) -> ReferenceCopy:
        return self._reference

    def messages(self) -> list[str]:
        sizes = self._micro_batch_sizes()
        norm = describe_norm(
            self.recipe.parallel.batchnorm,
            self._norms,
            self.shape.micro_batches,
            min(sizes),
            self.shape.replicas,
            min(sizes) < max(sizes),
        )
        stages = f"stages: {describe_stages(self.segments)}{self._why_there}"
        return [self.description, stages, *([norm] if norm else [])]

    def facts(self) -> dict[str, Any]:
        return {"cut": [segment.name for segment in self.segments[1:]]}

    def lanes(self) -> Lanes:
        shape = self.shape
        title = f"{self.name} {shape.schedule}, {shape.stages} stages, {shape.micro_batches} micro-batches"
        kind = "rank" if shape.over_processes else "device"
        names = []
        for lane in range(shape.lanes):
            own = [
                f"stage {segment.number} from {segment.name or 'the input'}"
                for segment in self.segments
                if segment.number % shape.lanes == lane
            ]
            names.append(f"{kind} {lane} ({'; '.join(own)})")
        # Lanes of other replicas have the same numbers and look alike.
        drawn = self.world if self.grid.replicas == 1 else self.grid.down
        return Lanes(title, names, drawn, self._step.recorders, self._step.lists)


class ModelStrategy(PipelineStrategy):
    """The stages of one process take turns: saves memory, not time. The batch is computed whole."""

    name = "model"

    @property
    def description(self) -> str:
        return (
            f"layout model: {self.shape.stages} stages on {self.shape.lanes} {self._where} take turns, so expect the "
            "time of one; --parallel.layout pipeline lets them work at the same time"
        )


class StagedReference(ReferenceCopy):
    """The whole model, which draws the random numbers that each stage draws."""

    def __init__(self, strategy: PipelineStrategy, cut: Cut, copy: nn.Module | None) -> None:
        super().__init__(strategy, strategy.name, copy)
        self._shape, self._segments, self._cut = strategy.shape, strategy.segments, cut

    def forward(self, model: nn.Module, draws: ModelDraws, step: int, micro: int, drawing: bool) -> nn.Module:
        if not drawing:
            return model
        grid, shape = self.strategy.grid, self._shape
        first = (grid.replica * shape.micro_batches + micro) * shape.stages
        own = ModelDraws(draws.seed, range(first, first + shape.stages), grid.world.device)
        own.active = True
        own.at(step)
        return _DrawsByStage(model, self._cut.root(model), self._segments, own)


class _DrawsByStage(nn.Module):
    """The whole model in one process, drawing at each stage the random numbers of that stage."""

    def __init__(
        self, whole: nn.Module, root: nn.Module, segments: Sequence[Segment], draws: ModelDraws
    ) -> None:
        super().__init__()
        self._whole, self._root, self._segments, self._draws = (whole,), (root,), segments, draws

    def forward(self, *inputs: Any) -> Any:
        (whole,), (root,) = self._whole, self._root
        prefix = "model." if isinstance(root, Tapped) else ""
        waiting = {segment.number for segment in self._segments[1:]}

        def begin(stage: int, *_: Any) -> None:
            if stage in waiting:  # a module may be called again
                waiting.remove(stage)
                self._draws.switch(stage)

        handles = [
            root.get_submodule(f"{prefix}{segment.name}").register_forward_pre_hook(
                partial(begin, segment.number), prepend=True
            )
            for segment in self._segments[1:]
        ]
        self._draws.switch(0)
        try:
            return whole(*inputs)
        finally:
            for handle in handles:
                handle.remove()


def _shape(recipe: Recipe, world: World) -> Shape:
    devices = torch.cuda.device_count() if world.device.type == "cuda" else 1
    return pipeline_shape(recipe, world.size, devices)


def _specs(
    stages: Sequence[StageModule], sample: Tensor, precision: Precision
) -> Callable[[int, int], Sequence[TensorSpec]]:
    @lru_cache(maxsize=16)
    def of_size(size: int) -> list[tuple[TensorSpec, ...]]:
        return boundaries(stages, sample[:1].expand(size, -1, -1, -1).contiguous(), precision)

    return lambda stage, size: of_size(size)[stage]


def _names_of(root: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    wanted = {id(module) for module in modules}
    return tuple(name for name, module in root.named_modules() if id(module) in wanted)


_SEPARATOR = "//"
"""Between the names of a group and a tensor. Names of optimizer tensors contain single slashes."""


def _flat(groups: Groups) -> dict[str, Tensor]:
    return {
        f"{group}{_SEPARATOR}{name}": tensor
        for group, each in groups.items()
        for name, tensor in each.items()
    }


def _nested(flat: Mapping[str, Tensor]) -> Gathered:
    groups: Gathered = {}
    for name, tensor in flat.items():
        group, _, rest = name.partition(_SEPARATOR)
        groups.setdefault(group, {})[rest] = tensor
    return groups

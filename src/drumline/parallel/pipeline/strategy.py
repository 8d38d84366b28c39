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
from drumline.core.errors import UserError
from drumline.core.precision import Precision
from drumline.data.feed.batch import Batch
from drumline.data.feed.sampler import bounds
from drumline.models.base import copy_model, repeated_blocks
from drumline.models.tapped import Tapped
from drumline.parallel.lanes import Lanes, Span
from drumline.parallel.model_draws import ModelDraws
from drumline.parallel.norm import SmallestBatch, apply_norm_mode, describe_norm, norm_count, world_total
from drumline.parallel.pipeline.cut import Traced, even_cuts, trace, trainable_units
from drumline.parallel.pipeline.pipelined import Chain, Pipelined, Staged, Tail
from drumline.parallel.pipeline.profile import ProfileOptions, cut_points
from drumline.parallel.pipeline.schedule import Shape, pipeline_shape
from drumline.parallel.pipeline.split import choose_split
from drumline.parallel.pipeline.stage import (
    Segment,
    StageModule,
    TensorSpec,
    boundaries,
    describe_stages,
    place_stages,
)
from drumline.parallel.strategy import Cut, ForwardPass, Gathered, Log, Strategy, smallest_piece
from drumline.parallel.world import World
from drumline.state.checkpoint import check_fit
from drumline.state.tensors import Groups


class PipelineStrategy(Strategy):
    """Stages over processes, each replica of the pipeline on its slice of the global batch; or over the devices of
    one process."""

    name = "pipeline"
    certified = True
    equal_memory = False
    staged = True
    shape: Shape

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.shape = _shape(recipe, world)
        super().__init__(recipe, world)
        self.weight = 1.0
        self.devices = _lane_devices(self.shape, world.device)

    @classmethod
    def check(cls, recipe: Recipe, world: World) -> None:
        _shape(recipe, world)

    def processes_per_replica(self) -> int:
        return self.shape.places

    @property
    def micro_batches(self) -> int:
        return self.shape.micro_batches

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

    def why_no_scaler(self) -> str:
        return ONE_SCALE if self.world.size > 1 else ""

    def why_not_captured(self) -> str:
        return super().why_not_captured() or "stages are computed by threads of their own"

    # The model ---------------------------------------------------------------------------------------------------

    def place(self, module: nn.Module) -> nn.Module:
        """On the host: each process takes its stages of it to its device."""
        return module

    def _lay_out(self, cut: Cut, image_size: int, saved: Mapping[str, Any], log: Log) -> nn.Module:
        recipe, shape, grid, root = self.recipe, self.shape, self.grid, cut.root(self.module)
        self._cut, self._log = cut, log
        self._refuse_hooks()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self.world.broadcast_host(tensor.detach())
        leaves = _names_of(root, repeated_blocks(self.model)) if recipe.train.gradient_checkpointing else ()
        sample = self._sample(max(self._micro_batch_sizes(grid.replica)), image_size)
        root.train()
        traced = trace(root, cut.kwargs, sample=sample, leaves=leaves)
        names, self._why_there = self._choose_cut(traced, root, sample, tuple(saved.get("cut", ())))
        self.segments = traced.split(names)
        self._evaluated = self._segments_to_evaluate(root, names, sample, leaves)
        total = world_total(grid.peers) if grid.replicas > 1 else None
        apply_norm_mode(root, recipe.parallel.batchnorm, total, shape.micro_batches)
        self._reference = [copy_model(self.module)] if grid.ends else []
        place_stages(self.module, root, self.segments, shape, grid, self.devices, self.channels_last)
        self.module.train()
        stages = {
            segment.number: segment.bind(root)
            for segment in self.segments
            if not shape.over_processes or segment.number % shape.lanes == grid.place
        }
        tail = Tail(partial(cut.after, self.module))
        staged = Staged(
            module=self.module,
            stages=stages,
            parameters=_by_stage(self.module, root, self.segments, stages),
            tail=tail,
            specs=_specs([segment.bind(root) for segment in self.segments], sample, self.precision),
            devices=self.devices,
            precision=self.precision,
            reads_images=cut.reads_images,
            recomputes=recipe.train.gradient_checkpointing,
            prefetch=cut.prefetch,
        )
        self._norms = norm_count(root)
        self._pipeline = Pipelined(staged, shape, grid)
        self.streams, self.computing = self._pipeline.streams, self._pipeline.computing
        return tail

    def _segments_to_evaluate(
        self, root: nn.Module, names: Sequence[str], sample: Tensor, leaves: Sequence[str]
    ) -> Sequence[Segment]:
        """The same cuts of the model alone: evaluation calls it without the arguments of the task."""
        if root is self.model and not self._cut.kwargs:
            return self.segments
        prefix = "model." if isinstance(root, Tapped) else ""
        traced = trace(self.model, {}, sample=sample, leaves=[name.removeprefix(prefix) for name in leaves])
        return traced.split([name.removeprefix(prefix) for name in names])

    def _sample(self, size: int, side: int) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.empty((size, 3, side, side), device=self.world.device).contiguous(memory_format=layout)

    def _choose_cut(
        self, traced: Traced, root: nn.Module, sample: Tensor, before: tuple[str, ...]
    ) -> tuple[tuple[str, ...], str]:
        """The modules that begin stages 1, 2, …, and why these. Rank 0 measures; all processes agree."""
        shape, split, stages = self.shape, self.recipe.parallel.split, self.shape.stages
        if split in ("even", "time"):
            units = trainable_units(traced, cut_points(traced), root)
            if shape.chunks > 1 and stages > (most := len(units)):
                raise UserError(
                    f"parallel.stages = {shape.lanes} x parallel.chunks = {shape.chunks}: {traced.name} can be cut "
                    f"into at most {most} stages",
                    "give fewer stages, use --parallel.schedule 1f1b, or name cuts inside blocks with parallel.split",
                )
            equal = even_cuts(traced, stages, units)  # refuses too many stages before anything is measured
            if split == "even":
                return equal, " (even)"
        if split != "time":
            return _named_cut(split, stages), ""
        if len(before) + 1 == stages > 1 and {*before} <= {point.name for point in traced.points}:
            return before, " (as in the run it resumes)"
        found: tuple[tuple[str, ...], str] = ((), "")
        if self.world.is_rank_zero and stages > 1:
            self._log("measuring where to cut")
            try:
                names, profile = choose_split(
                    traced,
                    root,
                    stages,
                    tuple(sample.shape),
                    ProfileOptions(self.world.device, self.precision, self.channels_last),
                    units,
                )
                noisy = ", on a noisy machine" if profile.noisy else ""
                found = names, f" (balanced by measured times{noisy})"
            except torch.OutOfMemoryError:
                found = equal, " (even: the whole model does not fit on one device to be measured)"
        agreed: tuple[tuple[str, ...], str] = self.world.broadcast_object(found)
        return agreed

    # A step ------------------------------------------------------------------------------------------------------

    def gradients(self, batch: Batch, forward: ForwardPass, draws: ModelDraws) -> None:
        self._pipeline.recording = self.recording
        self._pipeline.gradients(batch, forward, draws)

    def average_buffers(self) -> None:
        self._pipeline.buffers()

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

    def all_maximum(self, flag: Tensor) -> None:
        self.grid.down.all_reduce_max(flag)

    def stage_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return {
            stage: [(names[id(each)], each) for each in parameters]
            for stage, parameters in self._pipeline.staged.parameters.items()
        }

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
        yield Chain(model, self._evaluated, self.shape, self.grid, self.devices, self.precision)

    def reference_forward(
        self, model: nn.Module, draws: ModelDraws, step: int, micro: int, drawing: bool
    ) -> nn.Module:
        if not drawing:
            return model
        first = (self.grid.replica * self.shape.micro_batches + micro) * self.shape.stages
        own = ModelDraws(draws.seed, range(first, first + self.shape.stages), self.world.device)
        own.active = True
        own.at(step)
        return _DrawsByStage(model, self._cut.root(model), self.segments, own)

    # Reports -----------------------------------------------------------------------------------------------------

    def messages(self) -> list[str]:
        sizes = self._micro_batch_sizes()
        messages = (
            self.description,
            f"stages: {describe_stages(self.segments)}{self._why_there}",
            describe_norm(
                self.recipe.parallel.batchnorm,
                self._norms,
                self.shape.micro_batches,
                min(sizes),
                self.shape.replicas,
                min(sizes) < max(sizes),
            ),
        )
        return [message for message in messages if message]

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
        return Lanes(title, names, drawn, self._pipeline.lists)

    def spans(self) -> list[Span]:
        return self._pipeline.spans()


class ModelStrategy(PipelineStrategy):
    """The stages of one process take turns: saves memory, not time. The batch is computed whole."""

    name = "model"

    @property
    def description(self) -> str:
        return (
            f"layout model: {self.shape.stages} stages on {self.shape.lanes} {self._where} take turns, so expect the "
            "time of one; --parallel.layout pipeline lets them work at the same time"
        )


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


def _named_cut(split: str, stages: int) -> tuple[str, ...]:
    names = tuple(name.strip() for name in split.split(","))
    if not all(names):
        raise UserError(
            f"parallel.split = {split!r}: a name is empty",
            "give time, even, or the modules that begin stages 1, 2, …: --parallel.split layer2,layer3",
        )
    if len(names) + 1 != stages:
        raise UserError(
            f"parallel.split = {split}: makes {len(names) + 1} stage(s), but {stages} are needed",
            "name the module that begins each stage but the first",
        )
    return names


def _by_stage(
    module: nn.Module, root: nn.Module, segments: Sequence[Segment], stages: Mapping[int, StageModule]
) -> dict[int, list[nn.Parameter]]:
    """The parameters of this process's stages."""
    held = dict(root.named_parameters())
    found = {number: [held[name] for name in segments[number].parameters] for number in stages}
    used = {id(each) for group in found.values() for each in group}
    others = [each for each in module.parameters() if id(each) not in used and not each.is_meta]
    inside = {id(each) for each in held.values()}
    for each in others:
        found[max(stages) if id(each) not in inside else min(stages)].append(each)
    empty = [number for number, group in found.items() if not any(each.requires_grad for each in group)]
    if empty:
        where = segments[empty[0]].name or "the input"
        raise UserError(
            f"parallel.split: stage {empty[0]}, which begins at {where}, has nothing to train",
            "use fewer stages, or name cuts that leave each one something to train: --parallel.split NAMES, which "
            "`drumline plan --cuts MODEL` lists",
        )
    return found


def _specs(
    stages: Sequence[StageModule], sample: Tensor, precision: Precision
) -> Callable[[int, int], Sequence[TensorSpec]]:
    @lru_cache(maxsize=16)
    def of_size(size: int) -> list[tuple[TensorSpec, ...]]:
        return boundaries(stages, sample[:1].expand(size, -1, -1, -1).contiguous(), precision)

    return lambda stage, size: of_size(size)[stage]


def _lane_devices(shape: Shape, own: torch.device) -> list[torch.device]:
    """The devices of this process's lanes. The last is the process's own, where labels and loss are."""
    if shape.over_processes:
        return [own]
    count = torch.cuda.device_count() if own.type == "cuda" else 1
    return [torch.device("cuda", lane % count) if count > 1 else own for lane in reversed(range(shape.lanes))]


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

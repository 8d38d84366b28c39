"""From a task to its model in stages: where it is cut, which process holds what, and how it is trained and scored.

Promises: every process builds the same model and agrees on the cut; each keeps the tensors of its own stages alone
(the others are on the meta device, without memory), under the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from drumline.config.layouts import STAGED
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.feed.sampler import bounds, rank_slice
from drumline.models.copies import copy_model
from drumline.models.tapped import Tapped
from drumline.observe.display import Display
from drumline.parallel.grid import Grid
from drumline.parallel.layout import refuse_hooked
from drumline.parallel.norm import world_total
from drumline.parallel.pipeline.boundary import StageModule, TensorSpec, boundaries
from drumline.parallel.pipeline.chain import Chain
from drumline.parallel.pipeline.cut import Segment, Traced, even_cuts, trace, trainable_units
from drumline.parallel.pipeline.norm import apply_norm_mode, describe_norm, norm_count
from drumline.parallel.pipeline.pipelined import Pipelined, Staged, Tail
from drumline.parallel.pipeline.profile import choose_split, cut_points
from drumline.parallel.pipeline.settle import settle
from drumline.parallel.pipeline.shape import Shape, pipeline_shape
from drumline.parallel.world import World
from drumline.train import prepare
from drumline.train.recompute import recompute_blocks, repeated_blocks
from drumline.train.task import Cut, Task


@dataclass(frozen=True)
class Laid:
    """A task whose module lies in stages."""

    exchange: Pipelined
    chain: Callable[[nn.Module], Chain]
    """The evaluation of a model like the task's: itself, or its average."""
    twin: list[nn.Module]
    """A copy of all that is trained, on the host, where the loss is computed: the certificate compares with it, and
    takes it out."""
    segments: Sequence[Segment]
    cut: Cut
    words: tuple[str, ...]


def prepare_shape(recipe: Recipe, world: World) -> Shape | None:
    """Of the recipe's pipeline, if it has one."""
    if recipe.parallel.layout not in STAGED:
        return None
    devices = torch.cuda.device_count() if world.device.type == "cuda" else 1
    return pipeline_shape(recipe, world.size, devices)


def lay_in_stages(
    recipe: Recipe,
    task: Task,
    sets: prepare.Sets,
    grid: Grid,
    shape: Shape,
    display: Display,
    before: Sequence[str] = (),
) -> Laid:
    """Cuts the task's model and keeps this process's part. The module comes on the host, whole. `before` names where
    the run that this one goes on from was cut."""
    cut, world, root = task.cut, grid.world, task.cut.root(task.module)
    refuse_hooked(task.module, recipe.parallel.layout)
    for tensor in (*task.module.parameters(), *task.module.buffers()):
        world.broadcast_host(tensor.detach())
    leaves: tuple[str, ...] = ()
    if recipe.train.gradient_checkpointing:
        recompute_blocks(task.model)
        leaves = _names_of(root, repeated_blocks(task.model))
    sizes = _micro_sizes(recipe, grid.replica, shape, sets.unit)
    all_sizes = [
        size for replica in range(shape.replicas) for size in _micro_sizes(recipe, replica, shape, sets.unit)
    ]
    autocast = prepare.precision(recipe, world)
    sample = _sample(max(sizes), sets.transform.size, world.device, prepare.channels_last(recipe, world))
    root.train()
    traced = trace(root, cut.kwargs, sample=sample, leaves=leaves)
    names, told = _names(recipe, traced, root, shape, sample, autocast, grid, display, before)
    segments = traced.split(names)
    plain = segments
    if root is not task.model or cut.kwargs:
        prefix = "model." if isinstance(root, Tapped) else ""
        unprefixed = [name.removeprefix(prefix) for name in leaves]
        plain = trace(task.model, {}, sample=sample, leaves=unprefixed).split(
            [name.removeprefix(prefix) for name in names]
        )
    mode = recipe.parallel.batchnorm
    apply_norm_mode(root, mode, world_total(grid.peers) if grid.replicas > 1 else None, shape.micro_batches)
    twin = [copy_model(task.module)] if grid.ends else []
    lanes = _lane_devices(shape, grid)
    settle(task.module, root, segments, shape, grid, lanes, prepare.channels_last(recipe, world))
    task.module.train()
    stages = {
        segment.number: segment.bind(root)
        for segment in segments
        if not shape.over_processes or segment.number % shape.lanes == grid.place
    }
    every = [segment.bind(root) for segment in segments]
    exchange = Pipelined(
        Staged(
            module=task.module,
            stages=stages,
            parameters=_by_stage(task, segments, stages),
            tail=Tail(partial(cut.after, task.module)),
            specs=_specs(every, sample, autocast),
            devices=lanes,
            autocast=autocast,
            reads_images=cut.reads_images,
            recomputes=recipe.train.gradient_checkpointing,
            ahead=cut.ahead,
        ),
        shape,
        grid,
    )

    def chain(model: nn.Module) -> Chain:
        return Chain(model, plain, shape, grid, lanes, autocast)

    words = (
        _layout_words(recipe, shape, all_sizes),
        f"stages: {stage_words(segments)}{told}",
        describe_norm(
            mode,
            norm_count(root),
            shape.micro_batches,
            min(all_sizes),
            shape.replicas,
            min(all_sizes) < max(all_sizes),
        ),
    )
    return Laid(exchange, chain, twin, segments, cut, tuple(word for word in words if word))


def lane_names(segments: Sequence[Segment], shape: Shape) -> list[str]:
    """For pictures: what each lane computes."""
    kind = "rank" if shape.over_processes else "place"
    names = []
    for lane in range(shape.lanes):
        own = [
            f"stage {s.number} from {s.name or 'the input'}"
            for s in segments
            if s.number % shape.lanes == lane
        ]
        names.append(f"{kind} {lane} ({'; '.join(own)})")
    return names


def stage_words(segments: Sequence[Segment]) -> str:
    """Where the stages begin."""
    return " | ".join(f"{segment.number}: from {segment.name or 'the input'}" for segment in segments)


def _names(
    recipe: Recipe,
    traced: Traced,
    root: nn.Module,
    shape: Shape,
    sample: Tensor,
    autocast: torch.dtype | None,
    grid: Grid,
    display: Display,
    before: Sequence[str],
) -> tuple[tuple[str, ...], str]:
    """Where stages begin, and a word on why there. Rank 0 measures, all ranks agree."""
    split, stages = recipe.parallel.split, shape.stages
    if split in ("even", "time"):
        units = trainable_units(traced, cut_points(traced), root)
        if shape.chunks > 1 and stages > (most := len(units)):
            raise UserError(
                f"parallel.stages = {shape.lanes} x parallel.chunks = {shape.chunks}: {traced.name} can be cut into "
                f"at most {most} stages",
                "give fewer stages, use --parallel.schedule 1f1b, or name cuts inside blocks with parallel.split",
            )
        equal = even_cuts(traced, stages, units)  # refuses too many stages before anybody measures
        if split == "even":
            return equal, " (even)"
    if split != "time":
        names = tuple(name.strip() for name in split.split(","))
        if not all(names):
            raise UserError(
                f"parallel.split = {split!r}: a name is empty",
                "give time, even, or the modules that begin stages 1, 2, …: --parallel.split layer2,layer3",
            )
        if len(names) + 1 != stages:
            raise UserError(
                f"parallel.split = {split}: makes {len(names) + 1} stage(s), and there are to be {stages}",
                "name the module that begins each stage but the first",
            )
        return names, ""
    if len(before) + 1 == stages > 1 and {*before} <= {point.name for point in traced.points}:
        return tuple(before), " (as in the run it goes on from)"
    found: tuple[tuple[str, ...], str] = ((), "")
    if grid.world.is_rank_zero and stages > 1:
        display.log("measuring where to cut")
        layout = sample.is_contiguous(memory_format=torch.channels_last)
        try:
            names, profile = choose_split(
                traced,
                root,
                stages,
                tuple(sample.shape),
                grid.world.device,
                autocast,
                channels_last=layout,
                points=units,
            )
            found = names, f" (balanced by measured times{', on a noisy machine' if profile.noisy else ''})"
        except torch.OutOfMemoryError:
            found = equal, " (even: the whole model does not fit on one device to be measured)"
    shared: tuple[tuple[str, ...], str] = grid.world.broadcast_object(found)
    return shared


def _by_stage(
    task: Task, segments: Sequence[Segment], stages: Mapping[int, StageModule]
) -> dict[int, list[nn.Parameter]]:
    """The parameters of this process's stages."""
    held = dict(task.cut.root(task.module).named_parameters())
    found = {number: [held[name] for name in segments[number].parameters] for number in stages}
    used = {id(each) for group in found.values() for each in group}
    beside = [each for each in task.module.parameters() if id(each) not in used and not each.is_meta]
    inside = {id(each) for each in held.values()}
    for each in beside:
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
    every: Sequence[StageModule], sample: Tensor, autocast: torch.dtype | None
) -> Callable[[int, int], Sequence[TensorSpec]]:
    @lru_cache(maxsize=16)
    def of_size(size: int) -> list[tuple[TensorSpec, ...]]:
        return boundaries(every, sample[:1].expand(size, -1, -1, -1).contiguous(), autocast)

    return lambda stage, size: of_size(size)[stage]


def _sample(size: int, side: int, device: torch.device, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((size, 3, side, side), device=device).contiguous(memory_format=layout)


def _micro_sizes(recipe: Recipe, replica: int, shape: Shape, unit: int) -> list[int]:
    """Samples of each of a replica's micro-batches."""
    own = rank_slice(recipe.data.batch, replica, shape.replicas, unit)
    return [last - first for first, last in pairwise(bounds(own.stop - own.start, shape.micro_batches, unit))]


def _lane_devices(shape: Shape, grid: Grid) -> list[torch.device]:
    """Of this process's lanes. The last lies where the labels and the loss are: on the process's own device."""
    own = grid.world.device
    if shape.over_processes:
        return [own]
    count = torch.cuda.device_count() if own.type == "cuda" else 1
    return [
        torch.device("cuda", place % count) if count > 1 else own for place in reversed(range(shape.lanes))
    ]


def _names_of(root: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    wanted = {id(module) for module in modules}
    return tuple(name for name, module in root.named_modules() if id(module) in wanted)


def _layout_words(recipe: Recipe, shape: Shape, sizes: Sequence[int]) -> str:
    replicas = f"{shape.replicas} replicas of " if shape.replicas > 1 else ""
    where = (
        "processes" if shape.over_processes else "virtual devices" if recipe.parallel.virtual else "devices"
    )
    size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} or {max(sizes)}"
    if recipe.parallel.layout == "model":
        return (
            f"layout model: {shape.stages} stages on {shape.lanes} {where} take turns, so expect the time of one; "
            "--parallel.layout pipeline lets them work at the same time"
        )
    chunks = f" x {shape.chunks} chunks" if shape.chunks > 1 else ""
    return (
        f"layout pipeline: {replicas}{shape.lanes} {where}{chunks}, {shape.schedule}, {shape.micro_batches} "
        f"micro-batch{'es' if shape.micro_batches > 1 else ''} of {size} samples"
    )

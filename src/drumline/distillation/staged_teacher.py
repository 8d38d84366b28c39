"""A teacher in pipeline stages: over the processes of the student's pipeline, or over the devices of each process.

Promises: the outputs of the whole teacher, bit for bit. A process keeps only the tensors of its own stages; the
others are on the meta device. Over processes, a step's micro-batches go through the teacher before the student's
stages run them, and the objective reads the outputs in that order. Rejects a teacher that cannot be cut into that
many stages, and more stages than devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drumline.config.layouts import teacher_over_devices, teacher_over_processes
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.precision import Precision
from drumline.data.feed.batch import Batch
from drumline.distillation.teacher import Teacher, TeacherOutput
from drumline.observe.display import Display
from drumline.parallel.pipeline.cut import Traced, cut_points, trace
from drumline.parallel.pipeline.profile import ProfileOptions, profile
from drumline.parallel.pipeline.schedule import Shape, pipeline_shape
from drumline.parallel.pipeline.split import even_cuts, min_max_split
from drumline.parallel.pipeline.stage import Segment, place_stages
from drumline.parallel.pipeline.step import StagedForward
from drumline.parallel.strategy import Strategy
from drumline.parallel.world import Grid, World


@dataclass(frozen=True)
class StagePlan:
    """How the teachers of a run are divided."""

    shape: Shape
    grid: Grid
    devices: tuple[torch.device, ...]
    """The devices of this process's stages: one stage, or all of them."""

    def describe(self) -> str:
        """The stages, for the log."""
        if self.shape.over_processes:
            return f"in {self.shape.stages} stages over the processes of the student's pipeline"
        count = len(set(self.devices))
        where = f"{count} devices" if count > 1 else "one device"
        return f"in {self.shape.stages} stages on {where} of each process, which take turns"


def plan_teacher_stages(recipe: Recipe, strategy: Strategy) -> StagePlan | None:
    """The stages that the recipe requests for its teachers; None for whole teachers."""
    grid, world = strategy.grid, strategy.world
    if teacher_over_processes(recipe):
        if grid.places == 1:
            raise UserError(
                "distill.teacher_layout = pipeline: the student's pipeline is in one process",
                "start a process for each stage (--parallel.processes), or use --distill.teacher_layout model",
            )
        shape = pipeline_shape(recipe, world.size, devices=1)
        return StagePlan(replace(shape, chunks=1), grid, (world.device,))
    if teacher_over_devices(recipe):
        devices = stage_devices(recipe.distill.teacher_stages, recipe.parallel.virtual, world)
        return StagePlan(Shape(len(devices), 1, 1, "gpipe", world.size, False), grid, devices)
    return None


def stage_devices(stages: int | str, virtual: bool, world: World) -> tuple[torch.device, ...]:
    """The devices of a teacher in the stages of one process: GPUs that no other process uses. The last one is the
    process's own, where the loss is computed."""
    own = world.device
    count = torch.cuda.device_count() if own.type == "cuda" else 1
    mine = max(1, count // world.local_size)
    wanted = mine if isinstance(stages, str) else stages
    if isinstance(stages, str) and mine == 1:
        raise UserError(
            "distill.teacher_layout = model: needs at least two devices in the process, which has one",
            "start fewer processes than there are GPUs, or try it on one device with --distill.teacher_stages N "
            "--parallel.virtual",
        )
    if wanted > mine and not virtual:
        raise UserError(
            f"distill.teacher_stages = {wanted}: the process has only {mine} device{'s' * (mine > 1)}",
            "use fewer stages, start fewer processes on each machine, or let stages share a device with "
            "--parallel.virtual",
        )
    if own.type != "cuda":
        return (own,) * wanted
    steps = ((wanted - 1 - stage) % mine for stage in range(wanted))
    return tuple(torch.device("cuda", (own.index + step * world.local_size) % count) for step in steps)


def cut_teacher(
    module: nn.Module,
    name: str,
    taps: bool,
    stages: StagePlan,
    strategy: Strategy,
    size: int,
    display: Display,
) -> list[Segment]:
    """The stages of a teacher that is on the host in fp32, the same on all ranks. All ranks call it."""
    shape, world, recipe = stages.shape, stages.grid.world, strategy.recipe
    samples = -(-recipe.data.batch // (shape.replicas * shape.micro_batches))
    sample = torch.empty((samples, 3, size, size), device=world.device)
    try:
        traced = trace(module.eval(), {"taps": True} if taps else {}, sample=sample)
        names = even_cuts(traced, shape.stages)  # rejects too many stages
        if shape.over_processes and recipe.parallel.split != "even":
            if world.is_rank_zero:
                display.log("measuring where to cut the teacher")
                names = _balanced(traced, sample, shape.stages, strategy.precision)
            names = world.broadcast_object(names)
        return traced.split(names)
    except UserError as error:
        raise _teacher_error(
            error, f"{recipe.distill.teacher_layout} in {shape.stages} stages: teacher {name}"
        ) from error


def place_teacher(
    teacher: Teacher, cuts: Sequence[Sequence[Segment]], stages: StagePlan, channels_last: bool
) -> None:
    """Moves the teacher's tensors to the devices of their stages, and runs it there from now on."""
    forwards = []
    for module, segments in zip(teacher.modules, cuts, strict=True):
        try:
            place_stages(module, module, segments, stages.shape, stages.grid, stages.devices, channels_last)
        except UserError as error:
            raise _teacher_error(error, f"model in {stages.shape.stages} stages: a teacher") from error
        forwards.append(
            StagedForward(
                module, segments, stages.shape, stages.grid, stages.devices, teacher.precision
            ).several
        )
    teacher.use_stages(forwards)


class PipelinedTeacher:
    """A teacher in stages over processes. It runs on all micro-batches of a step first; the step, and the reference
    step of the certificate, then read the outputs in order."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self._outputs: list[TeacherOutput] = []
        self._next = 0

    def run_ahead(self, pieces: Sequence[Batch], images: Callable[[Batch], Tensor]) -> None:
        """Runs the teacher on all micro-batches of a step. Every process of a pipeline calls it."""
        self._outputs, self._next = [], 0
        shapes = [(len(piece.labels), 3, *piece.images.shape[1:3]) for piece in pieces]
        self._outputs = self.teacher.outputs_of(shapes, lambda number: images(pieces[number]))

    def __call__(self, images: Tensor, batch: Batch) -> TeacherOutput:
        output = self._outputs[self._next]
        assert len(output.logits) == len(batch.labels), (self._next, len(output.logits), len(batch.labels))
        self._next = (self._next + 1) % len(self._outputs)
        return output


def _teacher_error(error: UserError, which: str) -> UserError:
    """An error about a model in stages, in terms of the teacher."""
    return UserError(
        f"distill.teacher_layout = {which}: {error.what}",
        "use a different number of stages, or --distill.teacher_layout single",
    )


def _balanced(traced: Traced, sample: Tensor, stages: int, precision: Precision) -> tuple[str, ...]:
    """The cuts that balance the measured forward times; a teacher has no backward."""
    points = cut_points(traced)
    measured = profile(traced, ProfileOptions(tuple(sample.shape), sample.device, precision), points)
    times = [unit.forward_s for unit in measured.units]
    split = min_max_split(times, stages, crossing=measured.crossings, slack=0.01)
    return tuple(measured.units[first].name for first in split)

"""The stages, micro-batches and replicas of a recipe's pipeline on a given number of processes. Pure.

Promises: every `auto` becomes a number that depends on the recipe, the processes and the GPUs alone. Refuses what
cannot be laid out before a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError

PER_STAGE = 4
"""Micro-batches per stage by default: the stages are then busy at least four fifths of the time."""


@dataclass(frozen=True)
class Shape:
    """The shape of a pipeline."""

    lanes: int
    """Processes, or devices of one process, that work at the same time."""
    chunks: int
    """Stages on each."""
    micro_batches: int
    schedule: str
    replicas: int
    over_processes: bool

    @property
    def stages(self) -> int:
        return self.lanes * self.chunks

    @property
    def places(self) -> int:
        """Processes of one replica."""
        return self.lanes if self.over_processes else 1


def pipeline_shape(recipe: Recipe, processes: int, devices: int) -> Shape:
    """For a run of so many processes; `devices` are those that one process could spread over by itself: its GPUs, or
    the one CPU."""
    parallel = recipe.parallel
    over_processes = processes > 1
    lanes = (processes if over_processes else devices) if parallel.stages == "auto" else parallel.stages
    if over_processes and processes % lanes:
        raise UserError(
            f"parallel.stages = {lanes}: {processes} processes cannot be divided into pipelines of {lanes} stages",
            f"start {lanes}, {2 * lanes}, … processes, or give a divisor of {processes}",
        )
    if not over_processes and parallel.stages == "auto" and devices == 1:
        over = "" if parallel.layout == "model" else "--parallel.processes N (a process for each stage), or "
        raise UserError(
            f"parallel.layout = {parallel.layout}: needs at least two devices or two processes",
            f"give {over}--parallel.stages N --parallel.virtual to try it out on one device",
        )
    if not over_processes and lanes > devices and not parallel.virtual:
        over = (
            ""
            if parallel.layout == "model"
            else f"--parallel.processes {lanes} (a process for each stage), or "
        )
        raise UserError(
            f"parallel.stages = {lanes}: this process has {devices} device{'s' * (devices > 1)} for them",
            f"give {over}--parallel.virtual to let stages share a device (correct, but not faster)",
        )
    chunks = 1
    if parallel.schedule == "interleaved":
        chunks = 2 if parallel.chunks == "auto" else parallel.chunks
    replicas = processes // lanes if over_processes else 1
    return Shape(
        lanes=lanes,
        chunks=chunks,
        micro_batches=_micro_batches(recipe, lanes, replicas),
        schedule="gpipe" if parallel.layout == "model" else parallel.schedule,
        replicas=replicas,
        over_processes=over_processes,
    )


def _micro_batches(recipe: Recipe, lanes: int, replicas: int) -> int:
    parallel, data = recipe.parallel, recipe.data
    if parallel.layout == "model":
        return 1
    unit = data.mixing_unit
    most = data.batch // (replicas * unit)
    if parallel.micro_batches == "auto":
        wanted = max(1, min(PER_STAGE * lanes, most))
        return wanted if parallel.schedule != "interleaved" else max(lanes, wanted // lanes * lanes)
    if parallel.micro_batches > most:
        pairs = " (mixed samples go in pairs)" if unit == 2 else ""
        raise UserError(
            f"parallel.micro_batches = {parallel.micro_batches}: data.batch = {data.batch} leaves each of {replicas} "
            f"replica(s) only {data.batch // replicas} samples{pairs}",
            f"give at most {max(1, most)}, or a larger --data.batch",
        )
    if parallel.schedule == "interleaved" and parallel.micro_batches % lanes:
        raise UserError(
            f"parallel.micro_batches = {parallel.micro_batches}: interleaved goes in rounds of {lanes}, one for each "
            "stage",
            f"give a multiple of {lanes}, or use --parallel.schedule 1f1b",
        )
    return parallel.micro_batches

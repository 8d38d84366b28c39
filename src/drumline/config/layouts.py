"""What is impossible about a layout, as far as the recipe alone tells: part of `recipe_checks`.

Promises: a field that the chosen layout does not read is refused, not ignored; what would train something else than
was asked for is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline.config.recipe import Recipe

STAGED = ("model", "pipeline")
"""Layouts that cut the model into stages."""

WHY_NOT_SPLIT = (
    "is not offered: it splits each backward pass in two, which passes by the gradient hooks of the parameters, so "
    "gradients averaged over replicas would silently be wrong"
)
INSTEAD_OF_SPLIT = "use 1f1b, or interleaved for a smaller bubble"


ONE_SCALE = "the stages of a pipeline over processes would each scale the loss by a number of their own"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: the field, what is wrong with its value, and what to do.

    `what` reads well after the field and its value: "optim.lr = -1: too small".
    """

    field: str
    what: str
    fix: str


def splits_backward(schedule: str) -> bool:
    """Whether the name is that of a zero-bubble schedule."""
    return any(part in schedule.lower() for part in ("zero", "zb", "dualpipe"))


def not_offered(field: str, written: str) -> Problem | None:
    """Why a value that is well known elsewhere is none of this field's; None for a mere mistake."""
    if field == "parallel.schedule" and splits_backward(written):
        return Problem(field, WHY_NOT_SPLIT, INSTEAD_OF_SPLIT)
    return None


def layout_problems(recipe: Recipe, world: int) -> Iterator[Problem]:
    """`world` is the least number of processes."""
    train, layout = recipe.train, recipe.parallel.layout
    if layout in ("single", "dp", "model") and world > 1:
        yield Problem(
            "parallel.layout",
            f"runs in one process, but at least {world} are asked for",
            "use ddp or pipeline, or set parallel.processes and parallel.nodes to 1",
        )
    if layout == "dp" and train.gradient_checkpointing:
        yield Problem(
            "train.gradient_checkpointing",
            "does not go with parallel.layout = dp",
            "use ddp, or leave one of them",
        )
    if recipe.checkpoint.sharded and layout != "fsdp":
        yield Problem(
            "checkpoint.sharded", "only parallel.layout = fsdp shards the state", "leave it out, or use fsdp"
        )
    yield from _of_the_teacher(recipe)
    if layout in ("auto", "single", "dp", "ddp", "fsdp"):
        yield from _without_stages(recipe)
    if layout in STAGED:
        yield from _with_stages(recipe, world)
    if layout in (*STAGED, "fsdp"):
        yield from _not_with(recipe)


def _of_the_teacher(recipe: Recipe) -> Iterator[Problem]:
    """Where a teacher cannot lie."""
    distill, layout = recipe.distill, recipe.parallel.layout
    if distill.teacher_layout == "pipeline":
        if layout != "pipeline":
            yield Problem(
                "distill.teacher_layout",
                "lays the teacher over the processes of the student's pipeline, and "
                f"parallel.layout = {layout} has none",
                "use --parallel.layout pipeline too, or --distill.teacher_layout model",
            )
        if distill.cache:
            yield Problem(
                "distill.cache",
                "is filled by a whole teacher in each process, and distill.teacher_layout = pipeline has none",
                "leave one of them out, or use --distill.teacher_layout model",
            )
    if distill.teacher_stages != "auto" and distill.teacher_layout != "model":
        yield Problem(
            "distill.teacher_stages",
            f"distill.teacher_layout = {distill.teacher_layout} does not read it",
            "leave it out, or use --distill.teacher_layout model",
        )


def _without_stages(recipe: Recipe) -> Iterator[Problem]:
    """Fields of pipelines, where there is none."""
    parallel = recipe.parallel
    whose = f"only parallel.layout = pipeline reads it, and it is {parallel.layout}"
    if parallel.stages != "auto":
        yield Problem(
            "parallel.stages", f"parallel.layout = {parallel.layout} has no stages", "use pipeline or model"
        )
    if parallel.micro_batches != "auto":
        yield Problem("parallel.micro_batches", whose, "use train.accumulate, or --parallel.layout pipeline")
    if parallel.schedule != "1f1b":
        yield Problem("parallel.schedule", whose, "leave it out, or use --parallel.layout pipeline")
    if parallel.chunks != "auto":
        yield Problem("parallel.chunks", whose, "leave it out, or use --parallel.layout pipeline")
    cut = f"only parallel.layout = pipeline and model read it, and it is {parallel.layout}"
    if parallel.split != "time":
        yield Problem("parallel.split", cut, "leave it out, or use --parallel.layout pipeline")
    if parallel.batchnorm != "micro":
        fix = "use train.sync_bn" if parallel.batchnorm == "sync" else "leave it out, or use pipeline"
        yield Problem("parallel.batchnorm", cut, fix)
    if parallel.virtual and recipe.distill.teacher_layout != "model":
        yield Problem("parallel.virtual", cut, "leave it out, or use --parallel.layout pipeline")


def _with_stages(recipe: Recipe, world: int) -> Iterator[Problem]:
    """What pipelines and model parallelism rule out."""
    parallel, train, data = recipe.parallel, recipe.train, recipe.data
    micro = parallel.micro_batches
    # A number below 1 is told where every field's bounds are.
    stages = parallel.stages if parallel.stages == "auto" or parallel.stages > 0 else "auto"
    if isinstance(stages, int) and world > 1 and world % stages:
        yield Problem(
            "parallel.stages",
            f"{world} processes do not make whole pipelines of it",
            f"start a multiple of {stages} processes, or give a divisor of {world}",
        )
    if parallel.virtual and world > 1 and recipe.distill.teacher_layout != "model":
        yield Problem(
            "parallel.virtual",
            f"the stages of {world} processes lie on these, not on devices of one",
            "leave it out",
        )
    if parallel.layout == "model":
        if micro not in ("auto", 1):
            yield Problem(
                "parallel.micro_batches",
                "layout model computes the batch whole",
                "use --parallel.layout pipeline",
            )
        if parallel.schedule != "1f1b":
            yield Problem("parallel.schedule", "layout model has none", "use --parallel.layout pipeline")
        elif parallel.chunks != "auto":
            yield Problem("parallel.chunks", "layout model has none", "use --parallel.layout pipeline")
    if parallel.schedule == "interleaved":
        if parallel.chunks == 1:
            yield Problem("parallel.chunks", "interleaved has at least 2 on each process", "use 1f1b, or 2")
        if isinstance(stages, int) and isinstance(micro, int) and micro % stages:
            yield Problem(
                "parallel.micro_batches",
                f"interleaved goes in rounds of parallel.stages = {stages}",
                f"give a multiple, such as {-(-micro // stages) * stages}, or use 1f1b",
            )
    elif parallel.chunks != "auto" and parallel.layout == "pipeline":
        yield Problem(
            "parallel.chunks",
            f"parallel.schedule = {parallel.schedule} has one stage on each process",
            "use --parallel.schedule interleaved, or leave it out",
        )
    names = [] if parallel.split in ("even", "time") else parallel.split.split(",")
    chunks = (
        (2 if parallel.chunks == "auto" else parallel.chunks) if parallel.schedule == "interleaved" else 1
    )
    if names and isinstance(stages, int) and len(names) + 1 != stages * chunks:
        yield Problem(
            "parallel.split",
            f"makes {len(names) + 1} stage(s), and {stages * chunks} are asked for"
            + (
                f" (parallel.stages = {stages} x {chunks} chunks)"
                if chunks > 1
                else f" (parallel.stages = {stages})"
            ),
            "name the module that begins each stage but the first: one name less than stages",
        )
    if train.accumulate > 1:
        yield Problem(
            "train.accumulate", "a pipeline has micro-batches instead", "use --parallel.micro_batches"
        )
    unit = 2 if data.mixup or data.cutmix else 1
    if isinstance(micro, int) and data.batch < micro * unit:
        yield Problem(
            "parallel.micro_batches",
            f"data.batch = {data.batch} has too few samples"
            + (" (mixed ones go in pairs)" if unit == 2 else ""),
            f"give at most {data.batch // unit}, or a larger --data.batch",
        )
    if train.sync_bn:
        yield Problem(
            "train.sync_bn", "does not go with stages", "use --parallel.batchnorm sync: over all replicas"
        )
    if train.precision == "fp16" and world > 1:
        yield Problem("train.precision", ONE_SCALE, "use bf16 or fp32")
    if train.capture == "on":
        yield Problem(
            "train.capture", f"parallel.layout = {parallel.layout} is no single graph", "use auto or off"
        )


def _not_with(recipe: Recipe) -> Iterator[Problem]:
    """What needs the whole model in each process."""
    layout = recipe.parallel.layout
    if recipe.run.strict:
        yield Problem(
            "run.strict",
            f"its shards are computed by whole models, and parallel.layout = {layout} has none",
            "use ddp; a pipeline repeats its own bits without it",
        )
    if recipe.train.compile:
        yield Problem(
            "train.compile", f"does not go with parallel.layout = {layout} yet", "leave it out, or use ddp"
        )

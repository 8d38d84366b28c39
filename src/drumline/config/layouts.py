"""The layouts: a table of their strategies, what each is, and the rules that a recipe must keep under it.

Promises: a field that the chosen layout does not read is rejected, not ignored; a combination that would train a
different model is rejected with the reason. A new layout is an entry in `LAYOUTS` and a strategy class
(`parallel/strategy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drumline.core.errors import UserError
from drumline.core.precision import FP32, PRECISIONS

if TYPE_CHECKING:  # the recipe reads the names of the layouts from here
    from drumline.config.recipe import Recipe

WHY_NOT_SPLIT = (
    "not available: it splits each backward pass in two, which bypasses the gradient hooks of the parameters, so "
    "gradients averaged over replicas would silently be wrong"
)
INSTEAD_OF_SPLIT = "use 1f1b, or interleaved for a smaller bubble"
ONE_SCALE = "not supported by a pipeline over processes: each process would choose its own loss scale"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: the field, what is wrong with its value, and what to do.

    `what` reads well after the field and its value: "optim.lr = -1: too small".
    """

    field: str
    what: str
    fix: str


Rule = Callable[["Recipe", int], Iterator[Problem]]
"""The problems of a recipe under a layout, given the least number of processes."""


@dataclass(frozen=True)
class Layout:
    """One value of `parallel.layout`."""

    strategy: str
    """Its strategy, as module:class. Imported only when a run uses it."""
    summary: str
    rules: tuple[Rule, ...] = ()
    alone: str = ""
    """The layout that a single process uses instead. Empty: the same."""
    strict: bool = False
    """Whether it works with `run.strict`, which computes fixed shards of the batch with the whole model."""
    one_process: bool = False
    """Whether one process drives all devices. Otherwise a command starts one per GPU by default."""
    staged: bool = False
    """Whether the model is cut into stages."""
    shards_state: bool = False
    """Whether each process holds a shard of the state."""
    why_no_teacher: str = ""
    """Why a distillation cannot run under this layout. Empty: it can."""


def splits_backward(schedule: str) -> bool:
    """Whether the name is that of a zero-bubble schedule."""
    return any(part in schedule.lower() for part in ("zero", "zb", "dualpipe"))


def not_offered(field: str, written: str) -> Problem | None:
    """The problem of a value that other systems accept for this field; None for any other value."""
    if field == "parallel.schedule" and splits_backward(written):
        return Problem(field, WHY_NOT_SPLIT, INSTEAD_OF_SPLIT)
    if field == "data.augment" and written.lower().startswith("rand"):
        return Problem(field, "RandAugment has a field of its own", "did you mean data.randaugment=2,9?")
    return None


def layout_problems(recipe: Recipe, world: int) -> Iterator[Problem]:
    """The values that the recipe's layout does not support. `world` is the least number of processes."""
    name = recipe.parallel.layout
    layout = layout_named(name)
    if layout.one_process and world > 1:
        yield Problem(
            "parallel.layout",
            f"runs in one process, but the recipe starts at least {world}",
            "use ddp or pipeline, or set parallel.processes and parallel.nodes to 1",
        )
    if recipe.checkpoint.sharded and not layout.shards_state:
        yield Problem(
            "checkpoint.sharded", "only parallel.layout = fsdp shards the state", "remove it, or use fsdp"
        )
    if recipe.run.strict and not layout.strict:
        yield Problem(
            "run.strict",
            f"computes shards of the batch with the whole model in each process; parallel.layout = {name} does not",
            "use ddp, or remove it",
        )
    yield from _teacher(recipe)
    for rule in layout.rules:
        yield from rule(recipe, world)


def _teacher(recipe: Recipe) -> Iterator[Problem]:
    """Problems of the teacher's own layout."""
    distill, layout = recipe.distill, recipe.parallel.layout
    if distill.teacher_layout == "pipeline":
        if layout != "pipeline":
            yield Problem(
                "distill.teacher_layout",
                f"needs a student in a pipeline, and parallel.layout = {layout}",
                "use --parallel.layout pipeline too, or --distill.teacher_layout model",
            )
        if distill.cache:
            yield Problem(
                "distill.cache",
                "needs the whole teacher in each process, and distill.teacher_layout = pipeline",
                "remove one of them, or use --distill.teacher_layout model",
            )
    if distill.teacher_stages != "auto" and distill.teacher_layout != "model":
        yield Problem(
            "distill.teacher_stages",
            f"has no effect with distill.teacher_layout = {distill.teacher_layout}",
            "remove it, or use --distill.teacher_layout model",
        )


def _without_stages(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Fields that only layouts with stages read."""
    parallel = recipe.parallel
    unused = f"has no effect with parallel.layout = {parallel.layout}"
    if parallel.stages != "auto":
        yield Problem(
            "parallel.stages", f"parallel.layout = {parallel.layout} has no stages", "use pipeline or model"
        )
    if parallel.micro_batches != "auto":
        yield Problem("parallel.micro_batches", unused, "use train.accumulate, or --parallel.layout pipeline")
    if parallel.schedule != "1f1b":
        yield Problem("parallel.schedule", unused, "remove it, or use --parallel.layout pipeline")
    if parallel.chunks != "auto":
        yield Problem("parallel.chunks", unused, "remove it, or use --parallel.layout pipeline")
    if parallel.split != "time":
        yield Problem("parallel.split", unused, "remove it, or use --parallel.layout pipeline")
    if parallel.batchnorm != "micro":
        fix = "use train.sync_bn" if parallel.batchnorm == "sync" else "remove it, or use pipeline"
        yield Problem("parallel.batchnorm", unused, fix)
    if parallel.virtual and recipe.distill.teacher_layout != "model":
        yield Problem("parallel.virtual", unused, "remove it, or use --parallel.layout pipeline")


def _with_stages(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Values that do not work with stages."""
    parallel, train, data = recipe.parallel, recipe.train, recipe.data
    micro = parallel.micro_batches
    # A number below 1 is reported with the other limits.
    stages = parallel.stages if parallel.stages == "auto" or parallel.stages > 0 else "auto"
    if isinstance(stages, int) and world > 1 and world % stages:
        yield Problem(
            "parallel.stages",
            f"{world} processes cannot be divided into pipelines of {stages} stages",
            f"start a multiple of {stages} processes, or give a divisor of {world}",
        )
    if parallel.virtual and world > 1 and recipe.distill.teacher_layout != "model":
        yield Problem(
            "parallel.virtual",
            f"places the stages of one process on virtual devices, and the recipe starts {world} processes",
            "remove it",
        )
    names = [] if parallel.split in ("even", "time") else parallel.split.split(",")
    chunks = (
        (2 if parallel.chunks == "auto" else parallel.chunks) if parallel.schedule == "interleaved" else 1
    )
    if names and isinstance(stages, int) and len(names) + 1 != stages * chunks:
        yield Problem(
            "parallel.split",
            f"makes {len(names) + 1} stage(s), but the recipe has {stages * chunks}"
            + (
                f" (parallel.stages = {stages} x {chunks} chunks)"
                if chunks > 1
                else f" (parallel.stages = {stages})"
            ),
            "name the module that begins each stage but the first: one name less than stages",
        )
    if train.accumulate > 1:
        yield Problem("train.accumulate", "not supported with stages", "use --parallel.micro_batches")
    unit = data.mixing_unit
    if isinstance(micro, int) and data.batch != "auto" and data.batch < micro * unit:
        yield Problem(
            "parallel.micro_batches",
            f"data.batch = {data.batch} has too few samples"
            + (" (mixed samples stay in pairs)" if unit == 2 else ""),
            f"give at most {data.batch // unit}, or a larger --data.batch",
        )
    if train.sync_bn:
        yield Problem(
            "train.sync_bn", "not supported with stages", "use --parallel.batchnorm sync: over all replicas"
        )
    if PRECISIONS.get(train.precision, FP32).scales_loss and world > 1:
        yield Problem("train.precision", ONE_SCALE, "use bf16 or fp32")
    if train.capture == "on":
        yield Problem(
            "train.capture",
            f"not supported with parallel.layout = {parallel.layout}, which computes in several threads or processes",
            "use auto or off",
        )


def _schedule(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Schedules that do not fit the stages or the micro-batches."""
    parallel = recipe.parallel
    micro, stages = parallel.micro_batches, parallel.stages
    if parallel.schedule == "interleaved":
        if parallel.chunks == 1:
            yield Problem(
                "parallel.chunks",
                "parallel.schedule = interleaved needs at least 2 stages on each process",
                "give 2 or more, or use --parallel.schedule 1f1b",
            )
        if isinstance(stages, int) and stages > 0 and isinstance(micro, int) and micro % stages:
            yield Problem(
                "parallel.micro_batches",
                f"parallel.schedule = interleaved needs a multiple of parallel.stages = {stages}",
                f"give {-(-micro // stages) * stages}, or use --parallel.schedule 1f1b",
            )
    elif parallel.chunks != "auto":
        yield Problem(
            "parallel.chunks",
            f"parallel.schedule = {parallel.schedule} has one stage on each process",
            "use --parallel.schedule interleaved, or remove it",
        )


def _takes_turns(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Fields that stages that take turns do not read."""
    parallel = recipe.parallel
    if parallel.micro_batches not in ("auto", 1):
        yield Problem(
            "parallel.micro_batches",
            "parallel.layout = model does not divide the batch",
            "use --parallel.layout pipeline",
        )
    if parallel.schedule != "1f1b":
        yield Problem(
            "parallel.schedule",
            "has no effect with parallel.layout = model",
            "use --parallel.layout pipeline",
        )
    elif parallel.chunks != "auto":
        yield Problem(
            "parallel.chunks", "has no effect with parallel.layout = model", "use --parallel.layout pipeline"
        )


def _data_parallel(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Values that do not work with torch's DataParallel."""
    if recipe.train.gradient_checkpointing:
        yield Problem(
            "train.gradient_checkpointing",
            "does not work with parallel.layout = dp",
            "use ddp, or remove one of them",
        )


def _without_whole_models(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Values that need the whole model in each process."""
    layout = recipe.parallel.layout
    if recipe.train.compile:
        yield Problem(
            "train.compile", f"not supported with parallel.layout = {layout}", "remove it, or use ddp"
        )


LAYOUTS: dict[str, Layout] = {
    "single": Layout(
        "drumline.parallel.data_parallel:SingleStrategy",
        "one process, one device",
        (_without_stages,),
        strict=True,
        one_process=True,
    ),
    "dp": Layout(
        "drumline.parallel.data_parallel:DataParallelStrategy",
        "torch's DataParallel, one process driving all GPUs (slower, and GPU 0 needs more memory)",
        (_data_parallel, _without_stages),
        one_process=True,
        why_no_teacher="DataParallel would run the teacher and all losses on GPU 0",
    ),
    "ddp": Layout(
        "drumline.parallel.data_parallel:DDPStrategy",
        "one process per GPU, gradients averaged",
        (_without_stages,),
        alone="single",
        strict=True,
    ),
    "fsdp": Layout(
        "drumline.parallel.fsdp:FSDPStrategy",
        "as ddp, with parameters, gradients and optimizer state sharded over the processes",
        (_without_stages, _without_whole_models),
        shards_state=True,
    ),
    "model": Layout(
        "drumline.parallel.pipeline.strategy:ModelStrategy",
        "the model in stages that take turns, driven by one process (saves memory, not time)",
        (_takes_turns, _with_stages, _without_whole_models),
        one_process=True,
        staged=True,
    ),
    "pipeline": Layout(
        "drumline.parallel.pipeline.strategy:PipelineStrategy",
        "the model in stages, each on its own process or GPU, which work on several micro-batches at a time; more "
        "processes than stages make replicas",
        (_schedule, _with_stages, _without_whole_models),
        staged=True,
    ),
}
STRICT = Layout(
    "drumline.parallel.strict.strategy:StrictStrategy", "run.strict: the same bits on any number of processes"
)
_AUTO = Layout("", "ddp for several processes, else single", (_without_stages,), strict=True)


def layout_named(name: str) -> Layout:
    """The table's entry; `auto` has one of its own."""
    return _AUTO if name == "auto" else LAYOUTS[name]


def resolve_layout(name: str, processes: int) -> str:
    """The layout that a run of so many processes has. Rejects one that needs a single process."""
    if name == "auto":
        return "ddp" if processes > 1 else "single"
    if LAYOUTS[name].one_process and processes > 1:
        raise UserError(
            f"parallel.layout = {name} runs in one process, but {processes} were started",
            "use ddp or pipeline, or start one process",
        )
    return (LAYOUTS[name].alone or name) if processes == 1 else name


def teacher_over_processes(recipe: Recipe) -> bool:
    """Whether the teacher's stages are placed on the processes of the student's pipeline."""
    return recipe.distill.teacher_layout == "pipeline"


def teacher_over_devices(recipe: Recipe) -> bool:
    """Whether the teacher's stages are placed on the devices of each process."""
    return recipe.distill.teacher_layout == "model"


def uses_stages(recipe: Recipe) -> bool:
    """Whether a model or a teacher is cut into stages."""
    return (
        layout_named(recipe.parallel.layout).staged
        or teacher_over_processes(recipe)
        or teacher_over_devices(recipe)
    )

"""What is impossible in a recipe, by itself or together: pure functions of the recipe alone.

Promises: every problem names the field, what is wrong with its value, and what to do; they come in the order of
the fields, and a combination never blames a field that has a problem of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from drumline.config.layouts import STAGED, Problem, layout_problems
from drumline.config.recipe import Recipe, field_names, value_of
from drumline.config.rendezvous import parse_rendezvous
from drumline.core.errors import UserError

DEFAULT_SHARDS = 8
MAX_SIDE = 9459
"""Side of the largest square image within `data.limits.MAX_PIXELS`."""


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Every impossible value or combination, in the order of the fields. Looks at the recipe only."""
    wrong = list(_unwritable(recipe)) or list(_bounds(recipe))
    already = {problem.field for problem in wrong}
    wrong += [problem for problem in _combinations(recipe) if problem.field not in already]
    order = list(field_names(recipe))
    yield from sorted(wrong, key=lambda problem: order.index(problem.field))


def _unwritable(recipe: Recipe) -> Iterator[Problem]:
    """Values that no comparison and no file can hold."""
    for name in field_names(recipe):
        value = value_of(recipe, name)
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
            yield Problem(name, "not a finite number", "give a number that can be written out, such as 0.1")
        # A file name that is not UTF-8 reaches Python as lone surrogates, which no recipe file can hold.
        if any("\ud800" <= sign <= "\udfff" for part in parts if isinstance(part, str) for sign in part):
            yield Problem(name, "not valid UTF-8 text", "rename the file or folder, or point a link at it")


def _bounds(recipe: Recipe) -> Iterator[Problem]:
    """Values that are wrong by themselves."""
    at_least: tuple[tuple[str, float], ...] = (
        ("run.seed", 0),
        ("run.shards", 1),
        ("data.batch", 1),
        ("data.size", 1),
        ("data.workers", 0),
        ("data.erasing", 0),
        ("data.mixup", 0),
        ("data.cutmix", 0),
        ("data.holdout", 0),
        ("data.bad_limit", 0),
        ("model.classes", 2),
        ("optim.lr", 0),
        ("optim.reference_batch", 1),
        ("optim.momentum", 0),
        ("optim.weight_decay", 0),
        ("optim.eps", 0),
        ("optim.trust", 0),
        ("optim.clip", 0),
        ("optim.warmup_epochs", 0),
        ("optim.gamma", 0),
        ("optim.final_lr", 0),
        ("train.epochs", 0),
        ("train.steps", 0),
        ("train.accumulate", 1),
        ("train.label_smoothing", 0),
        ("train.ema", 0),
        ("train.eval_every", 0),
        ("train.log_every", 1),
        ("distill.r", 0),
        ("distill.a", 0),
        ("distill.initial_epochs", 0),
        ("distill.cache_top", 0),
        ("distill.teacher_stages", 1),
        ("parallel.processes", 1),
        ("parallel.stages", 1),
        ("parallel.micro_batches", 1),
        ("parallel.chunks", 1),
        ("parallel.nodes", 1),
        ("parallel.node_rank", 0),
        ("parallel.timeout", 1),
        ("parallel.threads", 1),
        ("launch.restarts", 0),
        ("launch.hang", 0),
        ("launch.min_nodes", 1),
        ("guard.every", 1),
        ("checkpoint.every_steps", 0),
        ("checkpoint.every_epochs", 0),
        ("checkpoint.keep", 1),
    )
    at_most: tuple[tuple[str, float], ...] = (
        # The short side before the evaluation's crop.
        ("data.size", int(MAX_SIDE * recipe.data.eval_crop) if 0 < recipe.data.eval_crop <= 1 else MAX_SIDE),
        ("run.seed", 2**63 - 1),
        ("data.mixup", 8),
        ("data.cutmix", 8),
        ("data.erasing", 1),
        ("data.eval_crop", 1),
        ("data.bad_limit", 1),
        # Above 3e38 the rate does not fit into a float32 tensor.
        ("optim.lr", 1e6),
        ("optim.final_lr", 1),
        # As in manifest.py: what a checkpoint may ask for. OpenMP crashes on a hundred thousand.
        ("parallel.threads", 4096),
    )
    below: tuple[tuple[str, float], ...] = (
        ("data.holdout", 1),
        ("optim.momentum", 1),
        ("train.label_smoothing", 1),
        ("train.ema", 1),
    )
    for name, low in at_least:
        value = value_of(recipe, name)
        if value != "auto" and value < low:
            yield Problem(name, "too small", f"give at least {low:g}")
    for name, high in at_most:
        value = value_of(recipe, name)
        if value != "auto" and value > high:
            yield Problem(name, "too large", f"give at most {high}")
    for name, high in below:
        if value_of(recipe, name) >= high:
            yield Problem(name, "too large", f"give less than {high}")
    if recipe.data.eval_crop <= 0:
        yield Problem("data.eval_crop", "leaves nothing to see", "give 0.875, or 1 for the whole image")
    for name in ("data.mixup", "data.cutmix"):
        if 0 < value_of(recipe, name) < 1e-3:
            yield Problem(name, "too small", "give at least 0.001, or 0 to turn it off")
    jitter, randaugment = recipe.data.jitter, recipe.data.randaugment
    if jitter and len(jitter) != 4:
        yield Problem(
            "data.jitter",
            f"has {len(jitter)} value(s)",
            "give four: brightness, contrast, saturation, hue, such as 0.4,0.4,0.4,0.1",
        )
    elif jitter and min(jitter) < 0:
        yield Problem("data.jitter", "has a strength below 0", "give 0 for what is to stay as it is")
    elif jitter and jitter[-1] > 0.5:
        yield Problem("data.jitter", "turns the hue too far", "give at most 0.5 as the last, half the circle")
    if randaugment and len(randaugment) != 2:
        yield Problem(
            "data.randaugment",
            f"has {len(randaugment)} value(s)",
            "give two: operations per sample and magnitude, such as 2,9",
        )
    elif randaugment and randaugment[0] < 1:
        yield Problem("data.randaugment", "does nothing", "give at least 1 operation, such as 2,9")
    elif randaugment and randaugment[0] > 100:
        yield Problem("data.randaugment", "leaves nothing to see", "give at most 100 operations, such as 2,9")
    elif randaugment and not 0 <= randaugment[1] <= 30:
        yield Problem("data.randaugment", "has no such magnitude", "give 0 to 30 as the second, such as 2,9")
    if recipe.distill.T != "auto" and recipe.distill.T <= 0:
        yield Problem("distill.T", "divides by nothing", "give a temperature above 0, such as 4")
    if any(weight < 0 for weight in recipe.distill.b):
        yield Problem("distill.b", "has a weight below 0", "give 0 or more for each method")
    if any(share <= 0 for share in recipe.distill.shares):
        yield Problem(
            "distill.shares", "has a weight that is not above 0", "give one above 0 for each teacher"
        )
    for name in ("data.mean", "data.std"):
        values = value_of(recipe, name)
        if len(values) not in (0, 1, 3):
            yield Problem(name, f"has {len(values)} values", "give one for grey images, three for colour")
        if not all(0 <= value <= 1 for value in values):
            yield Problem(name, "outside 0 to 1", "pixels count from 0 to 1 here: divide by 255 if need be")
    if 0 in recipe.data.std:
        yield Problem("data.std", "would divide by zero", "give values above 0")
    if not all(0 <= beta < 1 for beta in recipe.optim.betas):
        yield Problem("optim.betas", "outside 0 to 1", "give two values below 1, such as 0.9 and 0.999")
    if list(recipe.optim.milestones) != sorted(set(recipe.optim.milestones)):
        yield Problem("optim.milestones", "does not rise", "list the epochs in rising order, each once")
    if any(epoch <= 0 for epoch in recipe.optim.milestones):
        yield Problem("optim.milestones", "starts before the run", "give epochs above 0")
    name = recipe.run.name
    if not name:
        yield Problem("run.name", "the value is empty", "give a name or auto")
    elif name in (".", "..") or any(sign in name for sign in "/\\\0\r\n"):
        yield Problem("run.name", "not a plain folder name", "put the folder into run.dir")
    if len(name.encode(errors="replace")) > 255:
        yield Problem("run.name", "longer than a file system allows", "give at most 255 bytes")
    try:
        parse_rendezvous(recipe.parallel.rendezvous)
    except UserError as error:
        reason = error.what.rpartition(": ")[2]
        yield Problem("parallel.rendezvous", f"not a place to meet: {reason}", error.fix)
    if not recipe.checkpoint.resume:
        yield Problem("checkpoint.resume", "empty", "give never, auto, or the path of a run or checkpoint")


def _combinations(recipe: Recipe) -> Iterator[Problem]:
    """Values that are wrong together."""
    data, optim, train, parallel = recipe.data, recipe.optim, recipe.train, recipe.parallel
    if train.epochs == 0 and train.steps == 0:
        yield Problem("train.epochs", "trains nothing while train.steps = 0", "set one of the two above 0")
    if data.source in ("folder", "tar", "packed", "idx", "cifar10", "cifar100", "npz") and not data.path:
        yield Problem("data.path", f"data.source = {data.source} needs a path", "give its folder or file")
    if bool(data.mean) != bool(data.std):
        missing, given = ("data.std", "data.mean") if data.mean else ("data.mean", "data.std")
        yield Problem(missing, f"goes together with {given}, which is set", "set both, or neither")
    elif data.mean and len(data.mean) != len(data.std):
        yield Problem("data.std", "has not as many values as data.mean", "give one per channel in both")
    per_machine = 1 if parallel.processes == "auto" else parallel.processes
    world = per_machine * parallel.nodes
    if data.batch < world * train.accumulate and parallel.layout not in STAGED:
        yield Problem(
            "data.batch",
            f"too few samples for {world} x {train.accumulate} (processes x train.accumulate)",
            f"give at least {world * train.accumulate}, or lower the others",
        )
    yield from _strict(recipe, world)
    yield from layout_problems(recipe, world)
    if parallel.nodes > 1 and not parallel.rendezvous:
        yield Problem(
            "parallel.rendezvous",
            f"{parallel.nodes} machines need a place to meet",
            "give HOST:PORT of one of them, the same on each machine",
        )
    if parallel.node_rank != "auto" and parallel.node_rank >= parallel.nodes:
        yield Problem(
            "parallel.node_rank",
            f"not below parallel.nodes = {parallel.nodes}",
            f"number the machines from 0 to {parallel.nodes - 1}, or give auto",
        )
    yield from _supervision(recipe)
    if recipe.run.device == "cpu":
        if train.precision == "fp16":
            yield Problem("train.precision", "needs a GPU, but run.device = cpu", "use bf16 or fp32 on a CPU")
        if data.decode == "gpu":
            yield Problem("data.decode", "needs a GPU, but run.device = cpu", "use auto or cpu")
        if train.capture == "on":
            yield Problem("train.capture", "needs a GPU, but run.device = cpu", "use auto or off on a CPU")
        if parallel.backend == "nccl":
            yield Problem("parallel.backend", "needs a GPU, but run.device = cpu", "use gloo on a CPU")
    if recipe.distill.cache_top and not recipe.distill.cache:
        yield Problem("distill.cache_top", "there is no cache that could keep them", "give distill.cache too")
    if optim.nesterov and (optim.name != "sgd" or optim.momentum == 0):
        yield Problem(
            "optim.nesterov",
            f"only sgd with momentum has it, not {optim.name} with momentum {optim.momentum:g}",
            "set optim.name to sgd and optim.momentum to 0.9, or leave nesterov off",
        )
    if optim.milestones and optim.schedule != "step":
        yield Problem("optim.milestones", f"optim.schedule = {optim.schedule} has none", "set it to step")
    if recipe.checkpoint.resume == "auto" and recipe.run.name == "auto":
        yield Problem(
            "checkpoint.resume",
            "cannot tell which run while run.name = auto",
            "set run.name, or give the recipe of the run to go on with: RUN/recipe.toml checkpoint.resume=auto",
        )


def _supervision(recipe: Recipe) -> Iterator[Problem]:
    """What restarts rule out."""
    launch, parallel = recipe.launch, recipe.parallel
    if launch.restarts and parallel.nodes > 1 and recipe.run.name == "auto":
        yield Problem(
            "run.name",
            "cannot be auto where several machines restart: each must find the same run",
            "give --run.name, or --launch.restarts 0",
        )
    if launch.min_nodes == "auto":
        return
    if launch.min_nodes > parallel.nodes:
        yield Problem(
            "launch.min_nodes",
            f"more than parallel.nodes = {parallel.nodes}",
            f"give at most {parallel.nodes}, or auto",
        )
    elif launch.min_nodes < parallel.nodes and not launch.restarts:
        yield Problem(
            "launch.min_nodes",
            "only a restart can go on with fewer machines, and launch.restarts = 0",
            "add --launch.restarts N, or leave it at auto",
        )
    elif launch.min_nodes < parallel.nodes and parallel.node_rank != "auto":
        yield Problem(
            "launch.min_nodes",
            "machines numbered by parallel.node_rank are always all of them",
            "leave parallel.node_rank at auto, or launch.min_nodes",
        )


def _strict(recipe: Recipe, world: int) -> Iterator[Problem]:
    """What strict mode rules out; `world` is the least number of processes."""
    run, shards = recipe.run, shard_count(recipe)
    if not run.strict:
        if run.shards != "auto":
            yield Problem("run.shards", "only strict mode has shards", "add --run.strict, or leave it out")
        return
    if not run.deterministic:
        yield Problem("run.strict", "needs run.deterministic", "leave out --run.no-deterministic")
    if recipe.parallel.layout == "dp":
        yield Problem("parallel.layout", "dp does not go with run.strict", "use ddp, or auto")
    if recipe.train.accumulate > 1:
        yield Problem(
            "train.accumulate",
            "strict mode computes the global batch in shards instead",
            f"leave it out, and give --run.shards {world * recipe.train.accumulate} or more for smaller parts",
        )
    if world > shards:
        yield Problem(
            "run.shards",
            f"fewer shards than the {world} processes asked for",
            f"give --run.shards {world} or more; bits depend on the shards, not on the processes",
        )
    unit = 2 if recipe.data.mixup or recipe.data.cutmix else 1
    if shards > 0 and recipe.data.batch % (shards * unit):
        least = -(-recipe.data.batch // (shards * unit)) * shards * unit
        yield Problem(
            "data.batch",
            f"cannot be divided into {shards} equal shards" + (" of mixed pairs" if unit == 2 else ""),
            f"give --data.batch {least}, or other --run.shards",
        )


def shard_count(recipe: Recipe) -> int:
    """How many shards strict mode cuts the global batch into."""
    return DEFAULT_SHARDS if recipe.run.shards == "auto" else recipe.run.shards

"""What is impossible in a recipe: pure functions of the recipe alone, each rule in one place.

Every problem names the field, what is wrong with its value, and what to do. Problems come in the order of the fields,
and a combination never reports a field that has a problem of its own. The limits of single values are declared beside
the fields in `recipe.py`; the rules about layouts are in `layouts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from drumline.config.fields import WrongValue, expected, from_toml, recipe_fields, value_of
from drumline.config.layouts import Problem, layout_named, layout_problems
from drumline.config.learning import AUTO, Data, Optim
from drumline.config.recipe import Recipe
from drumline.config.rendezvous import parse_rendezvous
from drumline.config.sources import names_code, source_named
from drumline.core.errors import UserError, combined
from drumline.core.precision import FP32, PRECISIONS
from drumline.core.text import counted

DEFAULT_SHARDS = 8
MAX_SIDE = 9459
"""Side of the largest square image within `data.image.decode.MAX_PIXELS`."""


def check(recipe: Recipe) -> None:
    """Raises a `UserError` with every problem of a recipe."""
    reject(recipe, problems(recipe))


def reject(recipe: Recipe, found: Iterable[Problem]) -> None:
    """Raises a `UserError` with the problems that were found, if any."""
    wrong = [
        UserError(f"{problem.field} = {value_of(recipe, problem.field)!r}: {problem.what}", problem.fix)
        for problem in found
    ]
    if wrong:
        raise combined(wrong)


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Every impossible value or combination of values, in the order of the fields. Checks the recipe only."""
    wrong = list(_unreadable(recipe))
    if not wrong:
        wrong = [*_limits(recipe), *_texts(recipe)]
        already = {problem.field for problem in wrong}
        wrong += [problem for problem in _combinations(recipe) if problem.field not in already]
    order = list(recipe_fields())
    yield from sorted(wrong, key=lambda problem: order.index(problem.field))


def _unreadable(recipe: Recipe) -> Iterator[Problem]:
    """Values of a recipe built in Python that no file could hold. The other checks need the right types."""
    for name, field in recipe_fields().items():
        value = value_of(recipe, name)
        items = value if isinstance(value, tuple) else (value,)
        # A file name that is not UTF-8 reaches Python as lone surrogates, which no recipe file can hold.
        if any("\ud800" <= sign <= "\udfff" for item in items if isinstance(item, str) for sign in item):
            yield Problem(name, "not valid UTF-8 text", "rename the file or folder, or create a link to it")
            continue
        try:
            from_toml(field.hint, list(value) if isinstance(value, tuple) else value)
        except WrongValue:
            yield Problem(name, f"expected {expected(field.hint)}", f"for example {field.example()!r}")


def _limits(recipe: Recipe) -> Iterator[Problem]:
    """Values outside the limits that are declared beside their fields."""
    for name, field in recipe_fields().items():
        if wrong := field.check(value_of(recipe, name)):
            yield Problem(name, wrong.what, wrong.fix)


def _texts(recipe: Recipe) -> Iterator[Problem]:
    """Text that cannot be what its field needs."""
    name = recipe.run.name
    if not name:
        yield Problem("run.name", "the value is empty", "give a name or auto")
    elif name in (".", "..") or any(sign in name for sign in "/\\\0\r\n"):
        yield Problem("run.name", "not a plain folder name", "put the folder into run.dir")
    elif len(name.encode()) > 255:
        yield Problem("run.name", "longer than a file system allows", "give at most 255 bytes")
    module, _, factory = recipe.model.name.rpartition(".")
    # A part with a digit may be a tag, as in resnet50.a1_in1k.
    if module and re.fullmatch(r"[\w.]+\.([A-Z]\w*|[a-z_]+)", recipe.model.name):
        yield Problem("model.name", "has no colon", f"did you mean {module}:{factory}?")
    try:
        parse_rendezvous(recipe.parallel.rendezvous)
    except UserError as error:
        yield Problem("parallel.rendezvous", error.what, error.fix)
    if not recipe.checkpoint.resume:
        yield Problem(
            "checkpoint.resume", "the value is empty", "give never, auto, or the path of a run or checkpoint"
        )


def _combinations(recipe: Recipe) -> Iterator[Problem]:
    """Values that cannot be combined."""
    data, optim, train, parallel = recipe.data, recipe.optim, recipe.train, recipe.parallel
    if train.epochs == 0 and train.steps == 0:
        yield Problem(
            "train.epochs", "trains nothing because train.steps = 0 too", "set one of the two above 0"
        )
    if train.patience and not train.eval_every:
        yield Problem(
            "train.patience", "has no effect because train.eval_every = 0", "set train.eval_every above 0"
        )
    if train.unfreeze_epoch and not train.freeze:
        yield Problem(
            "train.unfreeze_epoch",
            "nothing is frozen",
            "name the modules to freeze until then, such as train.freeze=backbone",
        )
    if data.source != "auto" and source_named(data.source).needs_path and not data.path:
        yield Problem("data.path", f"data.source = {data.source} needs a path", "give its folder or file")
    if data.labels and data.source not in ("auto", "labels"):
        yield Problem(
            "data.labels", f"data.source = {data.source} has its own labels", "remove one of the two"
        )
    if data.folds and data.holdout:
        yield Problem(
            "data.folds", f"data.holdout = {data.holdout:g} divides the data, too", "remove one of the two"
        )
    if data.fold >= max(data.folds, 1):
        what = (
            f"data.folds = {data.folds} numbers its folds from 0 to {data.folds - 1}"
            if data.folds
            else "data.folds is 0"
        )
        yield Problem(
            "data.fold", what, "give a smaller number" if data.folds else "set data.folds, such as 5"
        )
    # The short side before the evaluation's crop has to be within the limit too.
    if data.size != "auto" and data.size > (most := int(MAX_SIDE * data.eval_crop)):
        yield Problem("data.size", "too large", f"give at most {most}")
    if list(optim.milestones) != sorted(set(optim.milestones)):
        yield Problem("optim.milestones", "not in rising order", "list the epochs in rising order, each once")
    if data.crop_scale[0] > data.crop_scale[1]:
        yield Problem(
            "data.crop_scale", "the minimum area is above the maximum", "give the smaller one first"
        )
    if data.crop_scale != Data.crop_scale and data.augment not in ("auto", "crop-flip"):
        yield Problem(
            "data.crop_scale",
            f"data.augment = {data.augment} does not resize crops",
            "set data.augment to crop-flip, or remove it",
        )
    if bool(data.mean) != bool(data.std):
        missing, given = ("data.std", "data.mean") if data.mean else ("data.mean", "data.std")
        yield Problem(missing, f"must be set because {given} is set", "set both, or neither")
    elif data.mean and len(data.mean) != len(data.std):
        yield Problem("data.std", "must have as many values as data.mean", "give one per channel in both")
    per_machine = 1 if parallel.processes == "auto" else parallel.processes
    world = per_machine * parallel.nodes
    yield from process_problems(recipe, world)
    yield from _strict(recipe, world)
    yield from layout_problems(recipe, world)
    if parallel.nodes > 1 and not parallel.rendezvous:
        yield Problem(
            "parallel.rendezvous",
            f"{parallel.nodes} machines need a rendezvous",
            "give HOST:PORT of one of them, the same on each machine",
        )
    if parallel.node_rank != "auto" and parallel.node_rank >= parallel.nodes:
        yield Problem(
            "parallel.node_rank",
            f"must be less than parallel.nodes = {parallel.nodes}",
            f"number the machines from 0 to {parallel.nodes - 1}, or give auto",
        )
    yield from _supervision(recipe)
    if data.transform and data.decode == "gpu":
        yield Problem(
            "data.decode",
            f"data.transform = {data.transform} is called on the CPU, before pixels are copied to the GPU",
            "set data.decode to auto or cpu, or remove data.transform",
        )
    if recipe.run.device == "cpu":
        if PRECISIONS.get(train.precision, FP32).needs_gpu:
            yield Problem("train.precision", "needs a GPU, but run.device = cpu", "use bf16 or fp32 on a CPU")
        if data.decode == "gpu":
            yield Problem("data.decode", "needs a GPU, but run.device = cpu", "use auto or cpu")
        if train.capture == "on":
            yield Problem("train.capture", "needs a GPU, but run.device = cpu", "use auto or off on a CPU")
        if parallel.backend == "nccl":
            yield Problem("parallel.backend", "needs a GPU, but run.device = cpu", "use gloo on a CPU")
    if train.label_smoothing and names_code(train.loss):
        yield Problem(
            "train.label_smoothing",
            f"train.loss = {train.loss} is your own loss, which gets labels without smoothing",
            "smooth the labels in your loss, or use train.loss=cross_entropy or bce",
        )
    yield from _own_optimizer(recipe)
    if recipe.distill.cache_top and not recipe.distill.cache:
        yield Problem("distill.cache_top", "has no effect without distill.cache", "give distill.cache too")
    yield from _self_taught(recipe)
    if recipe.distill.unlabelled and data.balance != "none":
        yield Problem(
            "distill.unlabelled",
            f"data.balance = {data.balance} draws by class, but images without labels have no class",
            "set data.balance to none; train.class_weights=balanced weights the classes instead",
        )
    if recipe.distill.cache and data.balance != "none":
        yield Problem(
            "distill.cache",
            f"has one output for each sample and epoch, but data.balance = {data.balance} repeats samples within an "
            "epoch, with different augmentation",
            "remove distill.cache, or set data.balance to none",
        )
    if train.class_weights == ("balanced",) and data.balance == "balanced":
        yield Problem(
            "train.class_weights",
            "has no effect because data.balance = balanced draws all classes equally often",
            "remove one of the two",
        )
    if optim.nesterov and (optim.name != "sgd" or optim.momentum == 0):
        yield Problem(
            "optim.nesterov",
            f"needs sgd with momentum, not {optim.name} with momentum {optim.momentum:g}",
            "set optim.name to sgd and optim.momentum to 0.9, or remove optim.nesterov",
        )
    if optim.milestones and optim.schedule != "step":
        yield Problem(
            "optim.milestones",
            f"optim.schedule = {optim.schedule} has no milestones",
            "set optim.schedule to step",
        )
    if recipe.checkpoint.resume == "auto" and recipe.run.name == "auto":
        yield Problem(
            "checkpoint.resume",
            "needs to know which run to resume, and run.name = auto",
            "set run.name, or use the recipe of the run: RUN/recipe.toml checkpoint.resume=auto",
        )


def _own_optimizer(recipe: Recipe) -> Iterator[Problem]:
    """Fields that do not work with the user's own optimizer, and those that work only with it."""
    optim, layout = recipe.optim, recipe.parallel.layout
    if not names_code(optim.name):
        if optim.args:
            yield Problem(
                "optim.args",
                f"only your own optimizer takes arguments, but optim.name = {optim.name}",
                "set the fields of [optim] instead (momentum, betas, eps, ...)",
            )
        return
    for key in ("momentum", "betas", "eps", "trust"):
        if getattr(optim, key) != getattr(Optim, key):
            yield Problem(
                f"optim.{key}",
                f"only built-in optimizers use it, but optim.name = {optim.name}",
                f"remove it, and set the optimizer's own argument: optim.args={key}:...",
            )
    if layout_named(layout).shards_state:
        yield Problem(
            "optim.name",
            f"with parallel.layout = {layout}, your own optimizer would treat shards of parameters as whole "
            "parameters",
            "use ddp or pipeline, or a built-in optimizer",
        )


def process_problems(recipe: Recipe, world: int) -> Iterator[Problem]:
    """Whether `world` processes can divide the global batch between them. Checked for the least number of processes
    that a recipe may have, and again for the number that was started. Pipelines have rules of their own."""
    data, accumulate, shards = recipe.data, recipe.train.accumulate, shard_count(recipe)
    least = world * accumulate * data.mixing_unit
    if recipe.run.strict and world > shards:
        yield Problem(
            "run.shards",
            f"fewer shards than processes ({world})",
            f"give --run.shards {world} or more; the bits depend on the shards, not on the processes",
        )
    elif data.batch != AUTO and data.batch < least and not layout_named(recipe.parallel.layout).staged:
        micro = f" x {accumulate} micro-batches" if accumulate > 1 else ""
        pairs = " of mixed pairs" if data.mixing_unit == 2 else ""
        yield Problem(
            "data.batch",
            f"too small for {counted(world, 'process', 'processes')}{micro}{pairs}",
            f"give at least {least}, or fewer processes or micro-batches",
        )


def _self_taught(recipe: Recipe) -> Iterator[Problem]:
    """What cannot be combined with a teacher that is trained with the student."""
    distill, train, optim = recipe.distill, recipe.train, recipe.optim
    if not distill.self_taught:
        return
    teacher = f"distill.teacher = {distill.self_taught}"
    for name in ("teacher_weights", "teacher_taps", "teacher_precision", "teacher_layout", "shares", "cache"):
        if getattr(distill, name) != getattr(type(distill)(), name):
            yield Problem(
                f"distill.{name}", f"{teacher} is trained with the student", "remove one of the two"
            )
    layout = layout_named(recipe.parallel.layout)
    if layout.staged or layout.shards_state:
        yield Problem("parallel.layout", f"{teacher} needs whole models in each process", "use ddp")
    if distill.self_taught == "ema" and not train.ema:
        yield Problem(
            "train.ema",
            f"{teacher} needs the moving average of the student",
            "set it, for example train.ema=0.999",
        )
    if distill.self_taught == "peer":
        unequal = (
            ("train.freeze", bool(train.freeze)),
            ("optim.layer_decay", optim.layer_decay != 1),
            ("optim.head_lr", optim.head_lr not in (AUTO, 1)),
        )
        for name, differs in unequal:
            if differs:
                yield Problem(
                    name, f"would affect only one of the two students of {teacher}", "remove one of the two"
                )


def _supervision(recipe: Recipe) -> Iterator[Problem]:
    """What cannot be combined with restarts."""
    launch, parallel = recipe.launch, recipe.parallel
    if launch.restarts and parallel.nodes > 1 and recipe.run.name == "auto":
        yield Problem(
            "run.name",
            "cannot be auto if several machines restart, because each must find the same run",
            "give --run.name NAME, or --launch.restarts 0",
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
            "only a restart can continue with fewer machines, and launch.restarts = 0",
            "add --launch.restarts N, or set it to auto",
        )
    elif launch.min_nodes < parallel.nodes and parallel.node_rank != "auto":
        yield Problem(
            "launch.min_nodes",
            "does not work with a fixed parallel.node_rank",
            "set parallel.node_rank or launch.min_nodes to auto",
        )


def _strict(recipe: Recipe, world: int) -> Iterator[Problem]:
    """What cannot be combined with strict mode; `world` is the least number of processes."""
    run, shards = recipe.run, shard_count(recipe)
    if not run.strict:
        if run.shards != "auto":
            yield Problem("run.shards", "only strict mode has shards", "add --run.strict, or remove it")
        return
    if not run.deterministic:
        yield Problem("run.strict", "needs run.deterministic", "remove --run.no-deterministic")
    if recipe.train.accumulate > 1:
        yield Problem(
            "train.accumulate",
            "strict mode splits the global batch into shards instead",
            f"remove it, and give --run.shards {world * recipe.train.accumulate} or more for smaller shards",
        )
    unit = recipe.data.mixing_unit
    if shards > 0 and recipe.data.batch != AUTO and recipe.data.batch % (shards * unit):
        least = -(-recipe.data.batch // (shards * unit)) * shards * unit
        yield Problem(
            "data.batch",
            f"cannot be divided into {shards} equal shards" + (" of mixed pairs" if unit == 2 else ""),
            f"give --data.batch {least}, or a different --run.shards",
        )


def shard_count(recipe: Recipe) -> int:
    """How many shards strict mode splits the global batch into."""
    return DEFAULT_SHARDS if recipe.run.shards == "auto" else recipe.run.shards

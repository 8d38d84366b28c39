"""From a recipe to a distillation task: student, helpers, teacher and objective, fitted to each other.

Promises: the student starts from the weights that `drumline train` would start from; the teacher's accuracy is
measured before the first step; what does not fit together (taps, classes, processes, a cache) is refused before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.distill.bundle import Bundle
from drumline.distill.cache.teacher import open_cached_teacher, refuse_uncacheable
from drumline.distill.choose import Chosen, choose, stage_of
from drumline.distill.gather import Gathered, OverShards, Spread
from drumline.distill.load import Loaded, load_teachers, other_views
from drumline.distill.measure import measured, score_words
from drumline.distill.method import Anatomy, Method, Needs
from drumline.distill.objective import Distillation, Part
from drumline.distill.stages import Relayed, Stages, cut_teacher, lay_teacher, plan_stages
from drumline.distill.teacher import Live, Teacher, weights_sha256
from drumline.models.base import VisionModel
from drumline.models.copies import copy_model
from drumline.models.tapped import Tapped, norm_before, with_taps
from drumline.observe.display import Display
from drumline.parallel.pipeline.cut import Segment, describe_stages
from drumline.parallel.strategy import Cut, Strategy, strategy_class
from drumline.parallel.world import World
from drumline.state.checkpoint import newest_valid, read_checkpoint
from drumline.train.model import initial_model
from drumline.train.objective import Classification
from drumline.train.plan import Plan
from drumline.train.sets import Sets
from drumline.train.task import Task, unchanged


@dataclass(frozen=True)
class Stage:
    """An initial stage to be run, or the folders of those that are done."""

    name: str = ""
    """The method whose initial stage this is; empty for the main one."""
    before: tuple[Path, ...] = ()
    """Run folders of the stages before, in their order."""


def distillation_task(
    recipe: Recipe,
    sets: Sets,
    plan: Plan,
    strategy: Strategy,
    display: Display,
    stage: Stage = Stage(),  # noqa: B008
) -> Task:
    """What `drumline distill` trains."""
    chosen = stage_of(recipe.distill, stage.name) if stage.name else choose(recipe.distill)
    grid, world = strategy.grid, strategy.world
    _refuse_misfits(recipe, chosen, stage, type(strategy))
    classes = Classes.of(sets.train)
    student, from_weights = initial_model(recipe, classes, strategy)
    stages = plan_stages(recipe, strategy)
    teachers = load_teachers(recipe, classes, world, on_host=stages is not None)
    pair = _Pair.of(recipe, chosen, student, teachers, sets.transform.size, world)
    bundle = pair.bundle(recipe.run.seed, runs_student=not stage.name or pair.reads_student, world=world)
    words = [
        *from_weights,
        *(note for each in teachers for note in each.notes),
        *pair.words,
        *_take_over(bundle, pair.bare, stage.before, world),
    ]
    cached = bool(recipe.distill.cache) and not stage.name
    if cached:
        refuse_uncacheable(recipe, pair.teacher_taps, sets.name)
    weights = weights_sha256(pair.teachers) if cached else ""
    cuts = _cuts(pair, teachers, stages, strategy, sets.transform.size, display) if stages else []
    compiled = recipe.train.compile and not cached and stages is None
    teacher = _teacher(strategy, chosen, pair, teachers, compiled)
    teacher.agree(world)
    if stages is not None:
        lay_teacher(teacher, cuts, stages, strategy.channels_last)
        words += _stages_words(teachers, stages, cuts)
    relayed = Relayed(teacher) if stages is not None and stages.shape.over_processes else None
    predictions, score = None, None
    if not (stage.name and stage.before):
        predictions = torch.full((len(sets.eval),), -1, device=world.device)
        score = measured(
            teacher, predictions, sets, recipe, strategy, speaks=grid.ends or relayed is not None
        )
        told = [score_words(teachers, score, sets.eval.labels), *other_views(recipe, sets, teachers)]
        words += told
        for line in told if cached else ():  # to be known before a cache is filled for hours
            display.log(line)
    if stage.name:
        _freeze_idle(bundle, teacher, sets.transform.size)
    # BatchNorm in helpers always spans the global batch; in the student where `train.sync_bn` asks for it.
    strategy.span_batchnorm(bundle.helpers)
    strategy.sync_batchnorm(bundle.student)
    stored = None
    if cached:
        stored = open_cached_teacher(
            recipe, teacher, _identity(teacher, teachers, weights), sets, plan, world
        )
    words += stored.messages if stored else ()
    here = relayed is not None or (grid.ends and stored is None)
    if not here:
        teacher.leave()
    objective = Distillation(
        parts=_parts(chosen, pair, bundle, torch.from_numpy(sets.train.labels), recipe.run.seed, grid.peers),
        r=chosen.r,
        classification=Classification(recipe.train.label_smoothing, len(classes)),
        source=stored or relayed or Live(teacher),
        spread=_spread(chosen, strategy),
        device=world.device,
        per_epoch=plan.per_epoch,
        teacher=teacher if here else None,
        standardise=recipe.distill.standardise,
        beside=not stored and not relayed and not pair.asking,
    )
    words.append(_method_words(chosen, stage))
    return Task(
        module=bundle,
        model=pair.bare,
        objective=objective,
        messages=tuple(words),
        teacher_predictions=predictions,
        teacher_top1=score.accuracy if score else None,
        evaluates=not stage.name,
        feed=stored.feed if stored and grid.ends else unchanged,
        spans_devices=stages is not None and len({*stages.devices, world.device}) > 1,
        cut=Cut(
            "student",
            {"taps": True} if bundle.taps else {},
            Bundle.after,
            reads_images=stored is None and relayed is None,
            prefetch=relayed.ahead if relayed else None,
        ),
    )


def _parts(
    chosen: Chosen, pair: _Pair, bundle: Bundle, labels: Tensor, seed: int, world: World
) -> list[Part]:
    """The methods with all that they need; memories are made here."""
    labels = labels.to(world.device)
    return [
        Part(
            part.name,
            part.method,
            part.weight,
            pair.needs[part.name],
            helped=part.name in bundle.helpers,
            memory=part.method.memory(labels, seed, world),
        )
        for part in chosen.parts
    ]


def _spread(chosen: Chosen, strategy: Strategy) -> Spread:
    """Where losses that relate samples find all of them."""
    spanning = any(part.method.scope == "global_batch" for part in chosen.parts)
    if strategy.lockstep is not None and spanning:
        return OverShards(strategy.lockstep)
    peers = strategy.grid.peers
    slices = [strategy.batch_slice(replica) for replica in range(peers.size)]
    return Gathered(peers, [each.stop - each.start for each in slices])


def check_fit(recipe: Recipe, student: nn.Module, teachers: list[Loaded], size: int, world: World) -> None:
    """Raises a `UserError` if a method cannot work with this student and these teachers."""
    chosen = choose(recipe.distill)
    _refuse_misfits(recipe, chosen, Stage(), strategy_class(recipe, world.size))
    _Pair.of(recipe, chosen, student, teachers, size, world).bundle(recipe.run.seed, True, world)


@dataclass(frozen=True)
class _Pair:
    """Student and teacher as the methods see them."""

    bare: nn.Module
    """The student as it is evaluated and exported."""
    student: nn.Module
    """The same, able to give the taps that are needed."""
    teachers: tuple[nn.Module, ...]
    anatomies: tuple[Anatomy, Anatomy]
    methods: Mapping[str, Method]
    needs: Mapping[str, Needs]

    @staticmethod
    def of(
        recipe: Recipe, chosen: Chosen, student: nn.Module, teachers: list[Loaded], size: int, world: World
    ) -> _Pair:
        methods = {part.name: part.method for part in chosen.parts}
        modules = tuple(each.module for each in teachers)
        wants_taps = any(not method.on_logits for method in methods.values())
        tapped, teacher = student, modules[0]
        example = torch.zeros((1, 3, size, size))
        for key in ("student_taps", "teacher_taps"):
            if getattr(recipe.distill, key) and not wants_taps:
                raise UserError(
                    f"distill.{key}: {', '.join(methods)} reads no taps",
                    "leave it out, or use another method",
                )
        if wants_taps:
            tapped = _tapped(student, "student_taps", recipe.distill.student_taps, example)
            teacher = _tapped(teacher, "teacher_taps", recipe.distill.teacher_taps, example)
        anatomies = (
            anatomy(tapped, recipe.model.name, example),
            anatomy(teacher, teachers[0].name, example),
        )
        needs = {name: method.needs(*anatomies) for name, method in methods.items()}
        if len(teachers) > 1 and any(need.teacher for need in needs.values()):
            names = ", ".join(name for name, need in needs.items() if need.teacher)
            raise UserError(
                f"distill.method = {names} reads features of one teacher, and there are {len(teachers)}",
                "use methods of logits (kd, dkd, dist) with several teachers, or give one",
            )
        return _Pair(student, tapped, (teacher, *modules[1:]), anatomies, methods, needs)

    @property
    def reads_student(self) -> bool:
        """Whether a method looks at anything of the student but its logits."""
        return any(need.student for need in self.needs.values())

    @property
    def words(self) -> list[str]:
        """Where the taps that are read lie in networks that are not ours."""
        sides = (
            ("student", self.student, self.student_taps),
            ("teacher", self.teachers[0], self.teacher_taps),
        )
        return [
            f"taps of the {side}: {', '.join(f'{tap} = {model.locations[tap]}' for tap in read)}"
            for side, model, taps in sides
            if isinstance(model, Tapped) and (read := [tap for tap in taps if tap in model.locations])
        ]

    @property
    def student_taps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tap for need in self.needs.values() for tap in need.student))

    @property
    def asking(self) -> tuple[str, ...]:
        """Methods whose helpers read the teacher."""
        return tuple(name for name, method in self.methods.items() if method.helper_asks_teacher)

    @property
    def teacher_taps(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tap for need in self.needs.values() for tap in need.teacher))

    def bundle(self, seed: int, runs_student: bool, world: World) -> Bundle:
        """Student and helpers; these start from the seed too, by other draws than the student's."""
        torch.manual_seed(seed ^ 0x68656C70)
        found = {name: method.helper(*self.anatomies) for name, method in self.methods.items()}
        helpers = {name: helper for name, helper in found.items() if helper is not None}
        made = Bundle(self.student, helpers, self.needs, self.asking, runs_student, self.anatomies[0].classes)
        return made.to(_device(self.student))


def _tapped(model: nn.Module, key: str, text: str, example: Tensor) -> nn.Module:
    try:
        return with_taps(model, text, example.to(_device(model)))
    except UserError as error:
        raise UserError(f"distill.{key}: {error.what}", error.fix) from error


def anatomy(model: nn.Module, name: str, example: Tensor) -> Anatomy:
    """A network's taps and their shapes, found by running it once, in evaluation mode and without a trace."""
    was_training = model.training
    model.eval()
    taps: Mapping[str, Tensor] = {}
    example = example.to(_device(model))
    with torch.no_grad():
        if isinstance(model, VisionModel | Tapped):
            logits, taps = model(example, taps=True)
        else:
            logits = model(example)
    model.train(was_training)
    for tap, value in taps.items():
        wanted, form = (2, "N x C") if tap == "pooled" else (4, "N x C x H x W")
        if value.ndim != wanted:
            place = (
                f" ({model.locations[tap]})" if isinstance(model, Tapped) and tap in model.locations else ""
            )
            raise UserError(
                f"{tap}{place} of {name} has shape {' x '.join(map(str, value.shape))}, and must be {form}",
                "name another place by distill.student_taps or distill.teacher_taps",
            )
    norms = {tap: norm for tap in taps if (norm := norm_before(model, tap)) is not None}
    shapes = {tap: tuple(value.shape[1:]) for tap, value in taps.items()}
    return Anatomy(name, shapes, logits.shape[1], norms)


def _device(model: nn.Module) -> torch.device:
    """Where a model lies that has not been cut: on the host, if it is to be."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _identity(teacher: Teacher, teachers: list[Loaded], weights: str) -> str:
    """What a cache knows the teacher by."""
    parts = [
        f"model={'+'.join(each.name for each in teachers)}",
        f"weights={weights}",
        f"precision={teacher.autocast or torch.float32}",
    ]
    if len(teachers) > 1:
        shares = ",".join(f"{share:g}" for share in teacher.shares)
        parts.append(f"ensemble of {teacher.rule} at T={teacher.temperature:g}, shares {shares}")
    return "; ".join(parts)


def _teacher(
    strategy: Strategy, chosen: Chosen, pair: _Pair, teachers: list[Loaded], compiled: bool
) -> Teacher:
    recipe = strategy.recipe
    distill = recipe.distill
    wanted = recipe.train.precision if distill.teacher_precision == "auto" else distill.teacher_precision
    return Teacher(
        pair.teachers,
        strategy.world.device,
        taps=pair.teacher_taps,
        autocast=strategy.precision(wanted),
        rule=distill.ensemble,
        shares=distill.shares or (1.0,) * len(teachers),
        temperature=chosen.T,
        compiled=compiled,
    )


def _cuts(
    pair: _Pair, teachers: list[Loaded], stages: Stages, strategy: Strategy, size: int, display: Display
) -> list[list[Segment]]:
    """Of each teacher, while its weights are as they were loaded: a trace knows no autocast."""
    return [
        cut_teacher(module, each.name, bool(pair.teacher_taps), stages, strategy, size, display)
        for module, each in zip(pair.teachers, teachers, strict=True)
    ]


def _stages_words(teachers: list[Loaded], stages: Stages, cuts: list[list[Segment]]) -> list[str]:
    return [
        f"teacher {each.name} {stages.words}: {describe_stages(segments)}"
        for each, segments in zip(teachers, cuts, strict=True)
    ]


def _method_words(chosen: Chosen, stage: Stage) -> str:
    terms = [f"{chosen.r:g} cross-entropy"] if chosen.r else []
    terms += [f"{part.weight:g} {part.name}" for part in chosen.parts]
    opening = f"initial stage of {stage.name}: " if stage.name else "loss = "
    tempered = any(part.method.on_logits for part in chosen.parts)
    return opening + " + ".join(terms) + (f", T = {chosen.T:g}" if tempered else "")


def _refuse_misfits(recipe: Recipe, chosen: Chosen, stage: Stage, strategy: type[Strategy]) -> None:
    """What the recipe alone, with the number of processes, rules out."""
    if strategy.why_no_teacher:
        raise UserError(
            f"parallel.layout = {strategy.name}: {strategy.why_no_teacher}", "use --parallel.layout ddp"
        )
    spanning = [part.name for part in chosen.parts if part.method.scope == "global_batch"]
    if spanning and strategy.staged:
        raise UserError(
            f"parallel.layout = {strategy.name}: {', '.join(spanning)} relates all samples of the global "
            "batch to each other, and micro-batches would hide them from each other",
            "use --parallel.layout ddp, or a method of single samples",
        )
    initial = [stage.name] if stage.name else [name for name, epochs in chosen.initial if epochs]
    if initial and strategy.staged:
        raise UserError(
            f"parallel.layout = {strategy.name}: {', '.join(initial)} has an "
            "initial stage of its own, which trains other parts of the student",
            "use --parallel.layout ddp, or another method",
        )
    if spanning and recipe.train.accumulate > 1:
        raise UserError(
            f"train.accumulate = {recipe.train.accumulate}: {', '.join(spanning)} relates all samples of the global "
            "batch to each other, and micro-batches would hide them from each other",
            "use --train.accumulate 1 with more processes or a smaller data.batch, or a method of single samples",
        )
    unmixed = [part.name for part in chosen.parts if not part.method.mixes]
    if unmixed and (recipe.data.mixup or recipe.data.cutmix):
        raise UserError(
            f"distill.method = {', '.join(unmixed)}: needs the one class or sample of an image, a mixed one has two",
            "turn data.mixup and data.cutmix off, or use another method",
        )


def _take_over(bundle: Bundle, student: nn.Module, before: tuple[Path, ...], world: World) -> list[str]:
    """Loads what initial stages left, on rank 0, which has the run folder, and gives it to every rank: the student,
    and those helpers that go on."""
    words = []
    for folder in before if world.is_rank_zero else ():
        newest, _ = newest_valid(folder / "checkpoints")
        if newest is None:
            raise UserError(
                f"{folder}: its initial stage left no sound checkpoint", "delete it and run again"
            )
        _, groups = read_checkpoint(newest)
        student.load_state_dict(groups["model"])
        ours = bundle.state_dict()
        taken = {
            name: tensor
            for name, tensor in groups.get("helpers", {}).items()
            if name in ours and ours[name].shape == tensor.shape
        }
        bundle.load_state_dict(taken, strict=False)
        helpers = f" and {len(taken)} tensors of its helpers" if taken else ""
        words.append(f"goes on from the initial stage {folder.name}: its student{helpers}")
    if before:
        for tensor in bundle.state_dict().values():
            world.broadcast(tensor)
    return words


def _freeze_idle(bundle: Bundle, teacher: Teacher, size: int) -> None:
    """Turns gradients off for what an initial stage does not train, such as the student's last layer: found by one
    backward of a copy. DDP would wait for them for ever."""
    trial = copy_model(bundle).train()
    images = torch.randn((4, 3, size, size), generator=torch.Generator().manual_seed(0)).to(teacher.device)
    taught = teacher(images)
    said = trial(images, {name: tap.float() for name, tap in taught.taps.items()})
    features = [*said.taps.values(), *(value for each in said.helped.values() for value in each.values())]
    sum(value.float().sum() for value in features if value.requires_grad).backward()
    for parameter, tried in zip(bundle.parameters(), trial.parameters(), strict=True):
        if tried.grad is None:
            parameter.requires_grad_(False)

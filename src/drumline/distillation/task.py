"""Builds the distillation task of a recipe: student, helpers, teacher and objective, fitted to each other.

Promises: the student starts from the weights that `drumline train` would start from. The teacher's accuracy is
measured before the first step. What does not fit together (taps, classes, processes, a cache) is rejected before
that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.distillation.bundle import Bundle, NetworkPair, fit_networks
from drumline.distillation.cache.teacher import open_cached_teacher, refuse_uncacheable
from drumline.distillation.objective import AcrossRanks, AcrossShards, Distillation, GlobalBatch, MethodTerm
from drumline.distillation.selection import Selection, select_initial_stage, select_methods
from drumline.distillation.stages import RelayedTeacher, Stages, cut_teacher, lay_teacher, plan_stages
from drumline.distillation.teacher import (
    LiveTeacher,
    LoadedTeacher,
    Teacher,
    agreement,
    describe_score,
    image_warnings,
    load_teachers,
    measure_teacher,
    weights_sha256,
)
from drumline.models.base import copy_model
from drumline.observe.display import Display
from drumline.parallel.pipeline.stage import Segment, describe_stages
from drumline.parallel.strategy import Cut, Strategy, strategy_class
from drumline.parallel.world import World
from drumline.state.checkpoint import newest_valid, read_checkpoint
from drumline.training.model import initial_model
from drumline.training.schedule import Plan
from drumline.training.sets import Sets
from drumline.training.task import Classification, Task, unchanged


@dataclass(frozen=True)
class Stage:
    """A stage of a distillation run: an initial one, or the main one."""

    name: str = ""
    """The method whose initial stage this is; empty for the main stage."""
    before: tuple[Path, ...] = ()
    """The run folders of the earlier stages, in order."""


def distillation_task(
    recipe: Recipe,
    sets: Sets,
    plan: Plan,
    strategy: Strategy,
    display: Display,
    stage: Stage = Stage(),  # noqa: B008
) -> Task:
    """The task of `drumline distill`."""
    selection = _select(recipe, stage)
    grid, world = strategy.grid, strategy.world
    _check_combination(recipe, selection, stage, type(strategy))
    classes = Classes.of(sets.train)
    student, student_messages = initial_model(recipe, classes, strategy)
    stages = plan_stages(recipe, strategy)
    teachers = load_teachers(recipe, classes, world, on_host=stages is not None)
    pair = fit_networks(recipe, selection, student, teachers, sets.transform.size)
    bundle = pair.bundle(recipe.run.seed, runs_student=not stage.name or bool(pair.student_taps))
    messages = [
        *student_messages,
        *(message for each in teachers for message in each.messages),
        *pair.messages,
        *_load_initial_stages(bundle, pair.model, stage.before, world),
    ]
    uses_cache = bool(recipe.distill.cache) and not stage.name
    if uses_cache:
        refuse_uncacheable(recipe, pair.teacher_taps, sets.name)
    weights = weights_sha256(pair.teachers) if uses_cache else ""
    cuts = _cuts(pair, teachers, stages, strategy, sets.transform.size, display) if stages else []
    compiled = recipe.train.compile and not uses_cache and stages is None
    teacher = _teacher(strategy, selection, pair, teachers, compiled)
    teacher.check_ranks(world)
    if stages is not None:
        lay_teacher(teacher, cuts, stages, strategy.channels_last)
        messages += [
            f"teacher {each.name} {stages.words}: {describe_stages(segments)}"
            for each, segments in zip(teachers, cuts, strict=True)
        ]
    relayed = RelayedTeacher(teacher) if stages is not None and stages.shape.over_processes else None
    predictions, score = None, None
    if not (stage.name and stage.before):
        predictions = torch.full((len(sets.eval),), -1, device=world.device)
        runs_here = grid.ends or relayed is not None
        score = measure_teacher(teacher, predictions, sets, strategy, runs_here)
        about = [describe_score(teachers, score, sets.eval.labels), *image_warnings(recipe, sets, teachers)]
        messages += about
        for line in about if uses_cache else ():  # before hours of filling a cache
            display.log(line)
    if stage.name:
        _freeze_unused(bundle, teacher, sets.transform.size)
    # BatchNorm in helpers always spans the global batch; in the student only with `train.sync_bn`.
    strategy.span_batchnorm(bundle.helpers)
    strategy.sync_batchnorm(bundle.student)
    cached = None
    if uses_cache:
        identity = _identity(teacher, teachers, weights)
        cached = open_cached_teacher(recipe, teacher, identity, sets, plan, world)
        messages += cached.messages
    needed = relayed is not None or (grid.ends and cached is None)
    if not needed:
        teacher.release()
    objective = Distillation(
        methods=_method_terms(selection, pair, bundle, sets, recipe.run.seed, grid.peers),
        r=selection.r,
        classification=Classification(recipe.train.label_smoothing, len(classes)),
        source=cached or relayed or LiveTeacher(teacher),
        global_batch=_global_batch(selection, strategy),
        device=world.device,
        per_epoch=plan.per_epoch,
        teacher=teacher if needed else None,
        standardise=recipe.distill.standardise,
        concurrent=not cached and not relayed and not pair.reading_teacher,
    )
    messages.append(_describe_loss(selection, stage))
    return Task(
        module=bundle,
        model=pair.model,
        objective=objective,
        messages=tuple(messages),
        metrics=() if predictions is None else (agreement(predictions),),
        facts={"teacher_top1": score.accuracy} if score else {},
        summary=f"teacher {score.accuracy:.2%}" if score else "",
        evaluates=not stage.name,
        feed=cached.feed if cached and grid.ends else unchanged,
        spans_devices=stages is not None and len({*stages.devices, world.device}) > 1,
        cut=Cut(
            "student",
            {"taps": True} if bundle.taps else {},
            Bundle.after,
            reads_images=cached is None and relayed is None,
            prefetch=relayed.ahead if relayed else None,
        ),
    )


def check_fit(
    recipe: Recipe, student: nn.Module, teachers: list[LoadedTeacher], sets: Sets, processes: int
) -> None:
    """Raises the `UserError` that a run would raise if a method, in any stage, does not fit student and teachers."""
    main = select_methods(recipe.distill)
    for stage in (*(Stage(name) for name, epochs in main.initial if epochs), Stage()):
        selection = _select(recipe, stage)
        _check_combination(recipe, selection, stage, strategy_class(recipe, processes))
        pair = fit_networks(recipe, selection, student, teachers, sets.transform.size)
        pair.bundle(recipe.run.seed)
        if recipe.distill.cache and not stage.name:
            refuse_uncacheable(recipe, pair.teacher_taps, sets.name)


def _select(recipe: Recipe, stage: Stage) -> Selection:
    return select_initial_stage(recipe.distill, stage.name) if stage.name else select_methods(recipe.distill)


def _method_terms(
    selection: Selection, pair: NetworkPair, bundle: Bundle, sets: Sets, seed: int, world: World
) -> list[MethodTerm]:
    """The methods with everything that they need. Creates their memories."""
    labels: Tensor = torch.from_numpy(sets.train.labels).to(world.device)
    return [
        MethodTerm(
            each.name,
            each.method,
            each.weight,
            pair.needs[each.name],
            has_helper=each.name in bundle.helpers,
            memory=each.method.memory(labels, seed, world),
        )
        for each in selection.methods
    ]


def _global_batch(selection: Selection, strategy: Strategy) -> GlobalBatch:
    """How losses that relate samples gather the global batch."""
    spanning = any(each.method.scope == "global_batch" for each in selection.methods)
    if strategy.lockstep is not None and spanning:
        return AcrossShards(strategy.lockstep)
    peers = strategy.grid.peers
    slices = [strategy.batch_slice(replica) for replica in range(peers.size)]
    return AcrossRanks(peers, [each.stop - each.start for each in slices])


def _identity(teacher: Teacher, teachers: list[LoadedTeacher], weights: str) -> str:
    """What identifies the teacher in the key of a cache. Stored in caches, so the format must not change."""
    fields = [
        f"model={'+'.join(each.name for each in teachers)}",
        f"weights={weights}",
        f"precision={teacher.precision.autocast_dtype or torch.float32}",
    ]
    if len(teachers) > 1:
        shares = ",".join(f"{share:g}" for share in teacher.shares)
        fields.append(f"ensemble of {teacher.rule} at T={teacher.temperature:g}, shares {shares}")
    return "; ".join(fields)


def _teacher(
    strategy: Strategy,
    selection: Selection,
    pair: NetworkPair,
    teachers: list[LoadedTeacher],
    compiled: bool,
) -> Teacher:
    train, distill = strategy.recipe.train, strategy.recipe.distill
    precision = train.precision if distill.teacher_precision == "auto" else distill.teacher_precision
    return Teacher(
        pair.teachers,
        strategy.world.device,
        taps=pair.teacher_taps,
        precision=strategy.resolve_precision(precision),
        rule=distill.ensemble,
        shares=distill.shares or (1.0,) * len(teachers),
        temperature=selection.T,
        compiled=compiled,
    )


def _cuts(
    pair: NetworkPair,
    teachers: list[LoadedTeacher],
    stages: Stages,
    strategy: Strategy,
    size: int,
    display: Display,
) -> list[list[Segment]]:
    """The stages of each teacher, cut before its weights are cast: tracing does not support autocast."""
    return [
        cut_teacher(module, each.name, bool(pair.teacher_taps), stages, strategy, size, display)
        for module, each in zip(pair.teachers, teachers, strict=True)
    ]


def _describe_loss(selection: Selection, stage: Stage) -> str:
    terms = [f"{selection.r:g} cross-entropy"] if selection.r else []
    terms += [f"{each.weight:g} {each.name}" for each in selection.methods]
    opening = f"initial stage of {stage.name}: " if stage.name else "loss = "
    tempered = any(each.method.on_logits for each in selection.methods)
    return opening + " + ".join(terms) + (f", T = {selection.T:g}" if tempered else "")


def _check_combination(recipe: Recipe, selection: Selection, stage: Stage, strategy: type[Strategy]) -> None:
    """Raises a `UserError` if the methods do not work with the layout or with other fields of the recipe."""
    if strategy.why_no_teacher:
        raise UserError(
            f"parallel.layout = {strategy.name}: {strategy.why_no_teacher}", "use --parallel.layout ddp"
        )
    spanning = [each.name for each in selection.methods if each.method.scope == "global_batch"]
    relates = f"{', '.join(spanning)} relates all samples of the global batch, and micro-batches would separate them"
    if spanning and strategy.staged:
        raise UserError(
            f"parallel.layout = {strategy.name}: {relates}",
            "use --parallel.layout ddp, or a method that does not relate samples",
        )
    initial = [stage.name] if stage.name else [name for name, epochs in selection.initial if epochs]
    if initial and strategy.staged:
        raise UserError(
            f"parallel.layout = {strategy.name}: {', '.join(initial)} has an initial stage, which does not train the "
            "whole student",
            "use --parallel.layout ddp, or a different method",
        )
    if spanning and recipe.train.accumulate > 1:
        raise UserError(
            f"train.accumulate = {recipe.train.accumulate}: {relates}",
            "use --train.accumulate 1 with more processes or a smaller data.batch, or a method that does not relate "
            "samples",
        )
    unmixed = [each.name for each in selection.methods if not each.method.mixes]
    if unmixed and (recipe.data.mixup or recipe.data.cutmix):
        raise UserError(
            f"distill.method = {', '.join(unmixed)}: needs one class per image, but a mixed image has two",
            "set data.mixup and data.cutmix to 0, or use a different method",
        )


def _load_initial_stages(
    bundle: Bundle, student: nn.Module, before: tuple[Path, ...], world: World
) -> list[str]:
    """Loads the student, and the helpers that continue, from the checkpoints of initial stages. Rank 0, which has the
    run folder, reads and broadcasts them."""
    messages = []
    for folder in before if world.is_rank_zero else ():
        newest, _ = newest_valid(folder / "checkpoints")
        if newest is None:
            raise UserError(f"{folder}: has no valid checkpoint", "delete the folder and repeat the command")
        _, groups = read_checkpoint(newest)
        student.load_state_dict(groups["model"])
        own = bundle.state_dict()
        taken = {
            name: tensor
            for name, tensor in groups.get("helpers", {}).items()
            if name in own and own[name].shape == tensor.shape
        }
        bundle.load_state_dict(taken, strict=False)
        helpers = f" and {len(taken)} tensors of its helpers" if taken else ""
        messages.append(f"continues from the initial stage {folder.name}: student{helpers}")
    if before:
        for tensor in bundle.state_dict().values():
            world.broadcast(tensor)
    return messages


def _freeze_unused(bundle: Bundle, teacher: Teacher, size: int) -> None:
    """Turns off gradients for parameters that an initial stage does not train, such as the student's last layer: DDP
    would wait for them forever. Finds them by one backward of a copy."""
    trial = copy_model(bundle).train()
    images = torch.randn((4, 3, size, size), generator=torch.Generator().manual_seed(0)).to(teacher.device)
    teacher_taps = {name: tap.float() for name, tap in teacher(images).taps.items()}
    output = trial(images, teacher_taps)
    helper_outputs = [value for each in output.helper_outputs.values() for value in each.values()]
    features = [*output.taps.values(), *helper_outputs]
    sum(value.float().sum() for value in features if value.requires_grad).backward()
    for parameter, tried in zip(bundle.parameters(), trial.parameters(), strict=True):
        if tried.grad is None:
            parameter.requires_grad_(False)

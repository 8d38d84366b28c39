"""Builds the task of a distillation phase: student, helpers, teacher and objective, fitted to each other.

Promises: the student starts from the weights that `drumline train` would start from. The teacher's accuracy is
measured before the first step. Mismatched taps, classes, processes or caches are rejected before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.distillation.cache.teacher import (
    CachedTeacher,
    Identity,
    check_cacheable,
    identify_teacher,
    open_cached_teacher,
)
from drumline.distillation.measure import (
    agreement_metric,
    describe_score,
    image_warnings,
    measure_teacher,
)
from drumline.distillation.objective import (
    AcrossRanks,
    AcrossShards,
    Distillation,
    GlobalBatch,
    LossTerm,
    RunTeacher,
)
from drumline.distillation.own_method import own_code
from drumline.distillation.selection import Selection, check_selection, select_methods
from drumline.distillation.self_taught import (
    PEER_SEED,
    AverageDistillation,
    MutualDistillation,
    StudentWithPeer,
    check_self_taught,
    describe_self_taught,
)
from drumline.distillation.staged_teacher import (
    PipelinedTeacher,
    cut_teacher,
    place_teacher,
    plan_teacher_stages,
)
from drumline.distillation.student import FittedNetworks, StudentWithHelpers, fit_networks
from drumline.distillation.teacher import (
    LiveTeacher,
    LoadedTeacher,
    Teacher,
    load_teachers,
)
from drumline.distillation.trial import try_own_methods
from drumline.models.base import copy_model
from drumline.observe.display import Display
from drumline.parallel.pipeline.stage import describe_stages
from drumline.parallel.strategy import Cut, Strategy, uses_channels_last
from drumline.parallel.world import World
from drumline.state.checkpoint import newest_valid, read_checkpoint
from drumline.training.metrics import Score
from drumline.training.model import initial_model
from drumline.training.schedule import Plan
from drumline.training.sets import Sets
from drumline.training.task import Classification, Task, unchanged


def distillation_task(
    recipe: Recipe,
    sets: Sets,
    plan: Plan,
    strategy: Strategy,
    display: Display,
    phase: str = "",
    previous: tuple[Path, ...] = (),
) -> Task:
    """The task of the main phase or, with `phase`, of the initial phase of that method. `previous`: the run folders
    of the earlier phases, in order."""
    selection = select_methods(recipe.distill, phase)
    check_selection(selection, recipe)
    kind = _SelfTaughtBuilder if recipe.distill.self_taught else _Builder
    return kind(recipe, sets, plan, strategy, display, selection, previous).task()


def check_fit(recipe: Recipe, student: nn.Module, teachers: list[LoadedTeacher], sets: Sets) -> None:
    """Raises the `UserError` that a run would raise if a method, in any phase, does not fit student and teachers."""
    initial = [name for name, epochs in select_methods(recipe.distill).initial if epochs]
    taught = recipe.distill.self_taught
    teachers = teachers or [LoadedTeacher(taught, "", student)]
    for phase in (*initial, ""):
        selection = select_methods(recipe.distill, phase)
        check_selection(selection, recipe)
        networks = fit_networks(recipe, selection, student, teachers, sets.transform.size)
        module = networks.with_helpers(recipe.run.seed)
        try_own_methods(networks, module, selection, sets.transform.size)
        if taught:
            check_self_taught(recipe, networks, module)
        if recipe.distill.cache and not phase:
            check_cacheable(recipe, networks.teacher_taps, sets.name)


@dataclass
class _Builder:
    """Builds a task step by step. All ranks call the methods in the same order."""

    recipe: Recipe
    sets: Sets
    plan: Plan
    strategy: Strategy
    display: Display
    selection: Selection
    previous: tuple[Path, ...]
    messages: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        recipe, strategy = self.recipe, self.strategy
        self.world, self.grid = strategy.world, strategy.grid
        self.size, self.classes = self.sets.transform.size, Classes.of(self.sets.train)
        self.caches = bool(recipe.distill.cache) and not self.selection.phase
        self.stages = plan_teacher_stages(recipe, strategy)
        wanted = recipe.distill.teacher_precision
        self.precision = strategy.resolve_precision(recipe.train.precision if wanted == "auto" else wanted)

    def task(self) -> Task:
        networks = self._networks()
        module = self._module(networks)
        try_own_methods(networks, module, self.selection, self.size)
        identity = self._identity(networks) if self.caches else None
        teacher = self._teacher(networks)
        # Over processes, its outputs on a step's micro-batches are computed ahead of the student's stages.
        over_processes = self.stages is not None and self.stages.shape.over_processes
        pipelined = PipelinedTeacher(teacher) if over_processes else None
        score, predictions = self._measure(teacher, networks, runs_here=self.grid.ends or over_processes)
        if self.selection.phase:
            _freeze_unused(module, teacher, self.size)
        # BatchNorm in helpers always spans the global batch; in the student only with `train.sync_bn`.
        self.strategy.sync_batchnorm(module.helpers, always=True)
        self.strategy.sync_batchnorm(module.student)
        cached = self._cache(teacher, identity) if identity is not None else None
        teacher_runs = over_processes or (self.grid.ends and cached is None)
        if not teacher_runs:
            teacher.release()
        objective = self._objective(
            networks,
            module,
            cached or pipelined or LiveTeacher(teacher),
            teacher if teacher_runs else None,
            concurrent=cached is None and pipelined is None,
        )
        self.messages.append(self.selection.describe())
        return Task(
            module=module,
            model=networks.model,
            objective=objective,
            messages=tuple(self.messages),
            shown=tuple(self.shown),
            metrics=() if predictions is None else (agreement_metric(predictions),),
            teacher_predictions=predictions,
            facts={"teacher_top1": score.accuracy} if score else {},
            summary=f"teacher {score.accuracy:.2%}" if score else "",
            evaluates=not self.selection.phase,
            extend_batches=cached.add_rows if cached and self.grid.ends else unchanged,
            spans_devices=self.stages is not None and len({*self.stages.devices, self.world.device}) > 1,
            cut=Cut(
                "student",
                {"taps": True} if module.taps else {},
                StudentWithHelpers.after,
                reads_images=cached is None and pipelined is None,
                prefetch=pipelined.run_ahead if pipelined else None,
            ),
        )

    def _networks(self) -> FittedNetworks:
        """Student and teachers, loaded and fitted to each other."""
        student, messages = initial_model(self.recipe, self.classes, self.world)
        student = self.strategy.place(student)
        teachers = load_teachers(self.recipe, self.classes, self.world, on_host=self.stages is not None)
        if taught := self.recipe.distill.self_taught:
            teachers = [LoadedTeacher(taught, "", student)]
        networks = fit_networks(self.recipe, self.selection, student, teachers, self.size)
        self.messages += messages
        self.messages += [message for each in teachers for message in each.messages]
        self.messages += networks.messages
        return networks

    def _module(self, networks: FittedNetworks) -> StudentWithHelpers:
        """Student and helpers, with the weights of earlier phases."""
        runs_student = not self.selection.phase or bool(networks.student_taps)
        module = networks.with_helpers(self.recipe.run.seed, runs_student)
        self.messages += _load_phases(module, networks.model, self.previous, self.world)
        return module

    def _identity(self, networks: FittedNetworks) -> Identity:
        """What identifies the teacher in the key of a cache, from its weights as they were loaded."""
        check_cacheable(self.recipe, networks.teacher_taps, self.sets.name)
        return identify_teacher(self.recipe.distill, networks.teachers, self.precision, self.selection.T)

    def _teacher(self, networks: FittedNetworks) -> Teacher:
        """The teacher, frozen, in its precision, on the devices that compute it."""
        recipe, strategy, stages = self.recipe, self.strategy, self.stages
        taps = [networks.taps_of(number) for number in range(len(networks.teachers))]
        # Cut before the weights are cast: tracing does not support autocast.
        cuts = [
            cut_teacher(each.module, each.name, bool(own), stages, strategy, self.size, self.display)
            for each, own in zip(networks.teachers, taps, strict=True)
            if stages is not None
        ]
        teacher = Teacher(
            [each.module for each in networks.teachers],
            self.world.device,
            taps=tuple(taps),
            precision=self.precision,
            rule=recipe.distill.ensemble,
            shares=recipe.distill.shares or (1.0,) * len(networks.teachers),
            temperature=self.selection.T,
            compiled=recipe.train.compile and not self.caches and stages is None,
        )
        teacher.check_ranks(self.world)
        if stages is not None:
            place_teacher(teacher, cuts, stages, uses_channels_last(recipe, strategy.world.device))
            self.messages += [
                f"teacher {each.name} {stages.describe()}: {describe_stages(segments)}"
                for each, segments in zip(networks.teachers, cuts, strict=True)
            ]
        return teacher

    def _measure(
        self, teacher: Teacher, networks: FittedNetworks, runs_here: bool
    ) -> tuple[Score | None, Tensor | None]:
        """The teacher's score, and the class that it predicts for each evaluation sample. A later initial phase does
        not measure again, and a teacher of other classes has no score."""
        if self.selection.phase and self.previous:
            return None, None
        if networks.foreign:
            self.messages.append("the teacher's accuracy is not measured: its classes differ from the data's")
            self.messages += image_warnings(self.recipe, self.sets, networks.teachers)
            return None, None
        predictions = torch.full((len(self.sets.eval),), -1, device=self.world.device)
        unrecorded = any(each.record is None for each in networks.teachers)
        score, warnings = measure_teacher(
            teacher, predictions, self.sets, self.strategy, runs_here, try_imagenet=unrecorded
        )
        messages = [
            describe_score(networks.teachers, score, self.sets.eval.labels),
            *warnings,
            *image_warnings(self.recipe, self.sets, networks.teachers),
        ]
        if self.caches:  # before hours of filling a cache
            for line in messages:
                self.display.log(line)
            self.shown += messages
        else:
            self.messages += messages
        return score, predictions

    def _cache(self, teacher: Teacher, identity: Identity) -> CachedTeacher:
        cached = open_cached_teacher(self.recipe, teacher, identity, self.sets, self.plan, self.world)
        self.messages += cached.messages
        return cached

    def _objective(
        self,
        networks: FittedNetworks,
        module: StudentWithHelpers,
        run_teacher: RunTeacher,
        teacher: Teacher | None,
        concurrent: bool,
    ) -> Distillation:
        return Distillation(
            run_teacher=run_teacher,
            teacher=teacher,
            concurrent=concurrent and not networks.reading_teacher,
            agreement=not networks.foreign,
            **self._loss(networks, module),
        )

    def _loss(self, networks: FittedNetworks, module: StudentWithHelpers) -> dict[str, Any]:
        """The arguments of an objective that do not depend on the kind of teacher."""
        return {
            "terms": self._terms(networks, module),
            "r": self.selection.r,
            "classification": Classification.of(self.recipe, self.sets),
            "global_batch": self._global_batch(),
            "device": self.world.device,
            "per_epoch": self.plan.per_epoch,
            "total": self.plan.total,
            "standardise": self.recipe.distill.standardise,
        }

    def _terms(self, networks: FittedNetworks, module: StudentWithHelpers) -> list[LossTerm]:
        """The methods with everything that they need. Creates their memories."""
        labels: Tensor = torch.from_numpy(self.sets.train.labels).to(self.world.device)
        selected = {each.name: each for each in self.selection.methods}
        terms = []
        for each in networks.methods:
            with own_code(type(each.method), "its memory"):
                memory = each.method.memory(labels, self.recipe.run.seed, self.grid.peers)
            terms.append(
                LossTerm(
                    each.name,
                    each.method,
                    selected[each.selected].weight * each.share,
                    each.needs,
                    has_helper=each.name in module.helpers,
                    memory=memory,
                    schedule=selected[each.selected].schedule,
                )
            )
        return terms

    def _global_batch(self) -> GlobalBatch:
        """How losses that relate samples gather the global batch."""
        lockstep, peers = self.strategy.lockstep, self.grid.peers
        if lockstep is not None and self.selection.relating:
            return AcrossShards(lockstep)
        slices = [self.strategy.batch_slice(replica) for replica in range(peers.size)]
        return AcrossRanks(peers, [each.stop - each.start for each in slices])


class _SelfTaughtBuilder(_Builder):
    """Builds the task of a student whose teacher is trained with it."""

    def task(self) -> Task:
        recipe, networks = self.recipe, self._networks()
        module = self._module(networks)
        check_self_taught(recipe, networks, module)
        try_own_methods(networks, module, self.selection, self.size)
        self.strategy.sync_batchnorm(module.student)
        arguments = self._loss(networks, module)
        if recipe.distill.self_taught == "ema":
            objective: Distillation = AverageDistillation(concurrent=True, **arguments)
        else:
            seeded = replace(recipe, run=replace(recipe.run, seed=recipe.run.seed ^ PEER_SEED))
            peer, _ = initial_model(seeded, self.classes, self.world)
            module = StudentWithPeer(module.student, self.strategy.place(peer))
            self.strategy.sync_batchnorm(module.peer)
            objective = MutualDistillation(**arguments)
        messages = (*self.messages, describe_self_taught(recipe), self.selection.describe())
        return Task(module, networks.model, objective, messages=messages)


def _load_phases(
    module: StudentWithHelpers, student: nn.Module, previous: tuple[Path, ...], world: World
) -> list[str]:
    """Loads the student, and the helpers that continue, from the checkpoints of earlier phases. Rank 0, which has the
    run folder, reads and broadcasts them."""
    messages = []
    for folder in previous if world.is_rank_zero else ():
        newest, _ = newest_valid(folder / "checkpoints")
        if newest is None:
            raise UserError(f"{folder}: has no valid checkpoint", "delete the folder and repeat the command")
        _, groups = read_checkpoint(newest)
        student.load_state_dict(groups["model"])
        own = module.state_dict()
        matching = {
            name: tensor
            for name, tensor in groups.get("helpers", {}).items()
            if name in own and own[name].shape == tensor.shape
        }
        module.load_state_dict(matching, strict=False)
        helpers = f" and {len(matching)} tensors of its helpers" if matching else ""
        messages.append(f"continues from the initial phase {folder.name}: student{helpers}")
    if previous:
        for tensor in module.state_dict().values():
            world.broadcast(tensor)
    return messages


def _freeze_unused(module: StudentWithHelpers, teacher: Teacher, size: int) -> None:
    """Turns off gradients for parameters that an initial phase does not train, such as the student's last layer: DDP
    would wait for them forever. Finds them by one backward of a copy."""
    trial = copy_model(module).train()
    images = torch.randn((4, 3, size, size), generator=torch.Generator().manual_seed(0)).to(teacher.device)
    teacher_taps = {name: tap.float() for name, tap in teacher(images).taps.items()}
    output = trial(images, teacher_taps)
    helper_outputs = [value for each in output.helper_outputs.values() for value in each.values()]
    features = [*output.taps.values(), *helper_outputs]
    sum(value.float().sum() for value in features if value.requires_grad).backward()
    for parameter, tried in zip(module.parameters(), trial.parameters(), strict=True):
        if tried.grad is None:
            parameter.requires_grad_(False)

"""The training loops that `distill_speed.py` compares: a hand-written one and Drumline's runs.

All get the same batches from the same feed, normalised by the same code, and start with the same weights, so the
first losses of those with a teacher are equal.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.account import DATA, within
from drumline.data.feed.batch import Batch
from drumline.data.feed.transform import IMAGENET_MEAN, IMAGENET_STD
from drumline.models import create_model
from drumline.observe.display import Display
from drumline.parallel.world import single_process
from drumline.state.weights import load_weights
from drumline.training import sets as train_sets
from drumline.training.rehearse import rehearse
from drumline.training.run import Run as TrainingRun
from drumline.training.schedule import Due
from drumline.training.sets import Normalise
from drumline.training.task import Builder

T, R, A = 4.0, 0.1, 0.9
RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: torch.device
    teacher: str
    student: str
    classes: int
    size: int
    samples: int
    batch: int
    warm: int
    steps: int
    rounds: int

    @property
    def turn(self) -> int:
        return self.warm + self.steps

    @property
    def per_epoch(self) -> int:
        return self.samples // self.batch

    @property
    def epochs(self) -> int:
        """The epochs that the turns of an arm cover."""
        return math.ceil(self.rounds * self.turn / self.per_epoch)


class Arm(Protocol):
    """A training loop, ready to step."""

    graph: bool
    """Whether the step is one CUDA graph."""
    first_loss: float

    def take(self, first: int, last: int, before: Callable[[int], None]) -> None:
        """Takes the steps from `first` to `last`; calls `before` with each index."""


class ByHand:
    """The loop as published code bases have it."""

    graph = False

    def __init__(self, recipe: Recipe, plan: Plan, channels_last: bool) -> None:
        self.recipe, self.plan, self.world = recipe, plan, single_process(plan.device)
        self.sets = train_sets.open_sets(recipe, self.world)
        self.first_loss = math.nan
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.student = _network(plan.student, plan, 0).to(plan.device, memory_format=layout).train()  # type: ignore[call-overload]
        self.teacher = _network(plan.teacher, plan, 1, recipe.distill.teacher_weights[0])
        self.teacher = self.teacher.to(plan.device, memory_format=layout).eval()  # type: ignore[call-overload]
        if recipe.train.compile:
            self.student.compile()
            self.teacher.compile()
        self.optimizer = torch.optim.SGD(
            self.student.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
        )
        mean, std = self.sets.mean, self.sets.std
        self.normalise = Normalise.build(mean, std, plan.device, channels_last)
        self.losses = 0.0
        self.top1, self.top5 = torch.zeros((), device=plan.device), torch.zeros((), device=plan.device)

    def take(self, first: int, last: int, before: Callable[[int], None]) -> None:
        with closing(
            self.sets.training(self.recipe, slice(0, self.recipe.data.batch), first, last)
        ) as batches:
            for index, batch in enumerate(batches, first):
                before(index)
                loss = self.step(batch)
                if math.isnan(self.first_loss):
                    self.first_loss = loss

    def step(self, batch: Batch) -> float:
        images, labels = self.normalise(batch.images), batch.labels
        with torch.autocast(self.plan.device.type, torch.bfloat16):
            logits = self.student(images)
            with torch.no_grad():
                taught = self.teacher(images)
            # On a GPU, autocast does this by itself, once for each loss.
            logits, taught = logits.float(), taught.float()
            divergence = F.kl_div(
                F.log_softmax(logits / T, dim=1), F.softmax(taught / T, dim=1), reduction="batchmean"
            )
            loss = R * F.cross_entropy(logits, labels) + A * T**2 * divergence
        with torch.no_grad():
            hits = logits.topk(5, dim=1).indices == labels[:, None]
            self.top1 += hits[:, :1].sum()
            self.top5 += hits.sum()
        value = loss.item()
        self.losses += value
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return value


@dataclass
class Ours:
    """A run of Drumline, stepped as its loop does, without what the loop does once per epoch: an epoch has few steps
    here."""

    run: TrainingRun
    graph: bool = False
    first_loss: float = math.nan

    @staticmethod
    def open(recipe: Recipe, build: Builder, plan: Plan, cleanup: ExitStack) -> Ours:
        run = TrainingRun(recipe, single_process(plan.device), build, cleanup)
        # A terminal can show only one live progress bar, and there are several runs.
        run.reporter.display = Display()
        return Ours(run)

    def rehearse(self) -> None:
        rehearse(self.run, self.run.single_batch(0))
        self.graph = self.run.step._graph is not None

    def take(self, first: int, last: int, before: Callable[[int], None]) -> None:
        run, reporter = self.run, self.run.reporter
        clock = reporter.clock
        clock.begin()
        reporter.pause(first)
        with closing(run.batches(first, last)) as batches:
            for index, batch in enumerate(_watched(batches), first):
                before(index)
                rate = run.plan.schedule(index)
                clock.step_begin()
                run.step(batch, index, rate)
                clock.step_end()
                if math.isnan(self.first_loss):
                    loss, _, samples = run.step.meter.sums[:3].tolist()
                    self.first_loss = loss / samples
                    reporter.log_steps(index + 1, rate)
                    # TensorBoard is imported on a background thread with the first metric: not a step's cost.
                    reporter.drain()
                    reporter.run_log.flush()
                log = (index + 1) % run.recipe.train.log_every == 0
                reporter.step_done(index + 1, rate, Due(False, False, log, False), seconds_per_step=0.01)


def _watched(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; each wait is measured."""
    while True:
        with within(DATA):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _network(name: str, plan: Plan, seed: int, weights: str = "") -> nn.Module:
    """torchvision's model where it is installed and has it, with the weights of ours."""
    torch.manual_seed(seed)
    ours = create_model(name, classes=plan.classes)
    if weights:
        load_weights(ours, weights)
    if not (has_torchvision() and plan.size == 224):
        return ours
    theirs = create_model(f"torchvision/{name}", classes=plan.classes)
    theirs.load_state_dict(ours.state_dict())
    return theirs


def has_torchvision() -> bool:
    try:
        importlib.import_module("torchvision")
    except Exception:  # an incompatible version raises nearly anything
        return False
    return True


def make_recipe(folder: Path, plan: Plan, deterministic: bool, compiled: bool) -> Recipe:
    """The recipe of every arm: Drumline's runs use all of it, the hand-written loop its data and hyperparameters."""
    return Recipe(
        run=Run(dir=str(folder / "runs"), device=plan.device.type, deterministic=deterministic),  # type: ignore[arg-type]
        data=Data(
            source="npz",
            path=str(folder / "set.npz"),
            batch=plan.batch,
            augment="shift",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        ),
        model=Model(name=plan.student),
        optim=Optim(lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, schedule="constant"),
        train=Train(
            steps=plan.rounds * plan.turn, precision="bf16", compile=compiled, log_every=50, eval_every=0
        ),
        distill=Distill(
            teacher=(plan.teacher,),
            teacher_weights=(str(folder / "teacher.safetensors"),),
            method=("kd",),
            r=R,
            a=A,
            T=T,
        ),
        parallel=Parallel(threads="auto" if plan.device.type == "cuda" else 1),
        checkpoint=Checkpoint(every_epochs=0),
    )

"""From a recipe to the things a run is made of: sets, plan, arithmetic. (The model: `prepare_model.py`.)

Promises: resolves each `auto` of data and arithmetic to a value, refuses what does not fit together before a single
step is computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from drumline.config.layouts import ONE_SCALE, STAGED
from drumline.config.recipe import Recipe
from drumline.config.rules import shard_count
from drumline.core.compiler import use_deterministic_algorithms
from drumline.core.environment import threads_asked
from drumline.core.errors import UserError
from drumline.core.machine import cores_per_process
from drumline.data.classes import Classes, describe_difference, set_words
from drumline.data.feed.bad_samples import BadSamples
from drumline.data.feed.choose import choose_workers
from drumline.data.feed.loader import Batches, Workers, batches, blank_batches, resident_batches
from drumline.data.feed.resident import ResidentSet, fits_on_device, resident_feed
from drumline.data.feed.sampler import Request, evaluation_requests, steps_per_epoch, training_requests
from drumline.data.feed.transform import Transform, make_transform, normalization
from drumline.data.sources import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    detect_source,
    open_dataset,
)
from drumline.data.sources.base import NoEvalSplit, NoTrainSplit, describe_skipped
from drumline.parallel.layout import resolve_layout
from drumline.parallel.world import World
from drumline.state.claim import claimed
from drumline.train.schedule import Schedule, build_schedule
from drumline.train.spread import own_share
from drumline.train.step import Normalise

EVALUATION_BATCH = 256
"""Largest evaluation batch. Fixed, so that a sample is always scored in the same company."""


@dataclass(frozen=True)
class Sets:
    """The training and evaluation data of a run, and how to look at them."""

    name: str
    train_spec: DatasetSpec
    eval_spec: DatasetSpec
    train: Dataset
    eval: Dataset
    transform: Transform
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: Workers
    workers_why: str
    """Why these, in words; empty where there was nothing to choose."""
    bad: tuple[BadSamples, BadSamples]
    """Broken samples met so far, of the training and of the evaluation set."""
    device: torch.device

    @cached_property
    def resident_train(self) -> ResidentSet | None:
        """The training set on the GPU, where it fits there whole."""
        return _resident(self.train, self.transform, self.device)

    @cached_property
    def resident_eval(self) -> ResidentSet | None:
        """The evaluation set on the GPU, where it fits there whole."""
        return _resident(self.eval, self.transform.for_evaluation(), self.device)

    @property
    def warnings(self) -> list[str]:
        """Warnings about files that are not images and classes without samples."""
        sides = (("training", self.train), ("evaluation", self.eval))
        return [
            f"WARNING: the {side} set has {describe_skipped(source)}"
            for side, source in (
                sides[:1] if self.train_spec.holdout else sides
            )  # a holdout has the same folders
            if isinstance(source, EncodedDataset) and source.skipped
        ] + set_words(self.train, self.eval)

    @property
    def unit(self) -> int:
        """Samples that stay together on one process: pairs, where they are mixed."""
        return 2 if self.transform.mixes else 1

    @property
    def eval_batch(self) -> int:
        return min(EVALUATION_BATCH, len(self.eval))

    def training(
        self, recipe: Recipe, world: World, first_step: int, last_step: int, blank: bool = False
    ) -> Batches:
        """This rank's batches from `first_step` on; `blank` ones for who computes no images and no labels."""
        resident = self.name == "synthetic"
        requests = self.requests(recipe, world, 0 if resident and not blank else first_step, last_step)
        if blank:
            return blank_batches(self.train, self.transform, recipe.run.seed, requests, world.device)
        if resident:
            return resident_batches(
                self.train, self.transform, recipe.run.seed, requests, first_step, world.device
            )
        return self.feed(recipe.run.seed, requests, world.device)

    def feed(self, seed: int, requests: Iterable[Request], device: torch.device) -> Batches:
        """The training batches that these requests ask for."""
        if self.resident_train is not None:
            return resident_feed(self.resident_train, seed, requests)
        return batches(
            self.train_spec, self.train, self.transform, seed, requests, self.workers, device, self.bad[0]
        )

    def requests(self, recipe: Recipe, world: World, first_step: int, last_step: int) -> Iterator[Request]:
        """What this rank's batches are made of."""
        return training_requests(
            seed=recipe.run.seed,
            samples=len(self.train),
            batch=recipe.data.batch,
            first_step=first_step,
            last_step=last_step,
            local=own_share(recipe, world.rank, world.size, self.unit),
        )

    def evaluation(self, recipe: Recipe, world: World, blank: bool = False) -> Batches:
        """This rank's evaluation batches; with `blank`, images are for others to see."""
        requests = evaluation_requests(
            samples=len(self.eval), batch=self.eval_batch, rank=world.rank, world=world.size
        )
        transform = self.transform.for_evaluation()
        if blank:
            return blank_batches(self.eval, transform, recipe.run.seed, requests, world.device)
        if self.resident_eval is not None:
            return resident_feed(self.resident_eval, recipe.run.seed, requests)
        return batches(
            self.eval_spec,
            self.eval,
            transform,
            recipe.run.seed,
            requests,
            self.workers,
            world.device,
            self.bad[1],
        )


@dataclass(frozen=True)
class Plan:
    """How long a run is, in steps."""

    total: int
    per_epoch: int
    schedule: Schedule
    eval_steps: int
    save_steps: int

    def evaluates_after(self, step: int) -> bool:
        """`step` counts finished steps."""
        return step == self.total or (self.eval_steps > 0 and step % self.eval_steps == 0)

    def saves_after(self, step: int, every_steps: int) -> bool:
        return (
            step == self.total
            or (self.save_steps > 0 and step % self.save_steps == 0)
            or (every_steps > 0 and step % every_steps == 0)
        )


def prepare_sets(recipe: Recipe, world: World, to_score: bool = False) -> Sets:
    """Opens the data and decides how it is seen. With `to_score`, the data needs no splits: without them, all of
    it is the evaluation set."""
    data = recipe.data
    again = bool(claimed())  # a start of this very run has opened the data before
    name = detect_source(data.source, data.path, again)
    train_spec = DatasetSpec(source=name, path=data.path, split="train", holdout=data.holdout)
    eval_spec = DatasetSpec(source=name, path=data.path, split="eval", holdout=data.holdout)
    try:
        train, evaluation = open_dataset(train_spec, again), open_dataset(eval_spec, again)
    except (NoEvalSplit, NoTrainSplit):
        if not to_score:
            raise
        train_spec = eval_spec = replace(eval_spec, whole=True)
        train = evaluation = open_dataset(eval_spec)
    _refuse_other_classes(train, evaluation)
    mean, std = normalization(data, train)
    transform = make_transform(data, train, mean)
    bad = (
        BadSamples("training", len(train), data.bad_limit),
        BadSamples("evaluation", len(evaluation), data.bad_limit),
    )
    count = cores_per_process(world.local_size) if data.workers == "auto" else data.workers
    # Every rank for itself, at the same time as in the run to come: machines differ, and pixels do not.
    workers, why = choose_workers(
        train_spec,
        train,
        transform,
        recipe.run.seed,
        world.device,
        count=count,
        pool=data.pool,
        # Damaged files may decode differently; which side gets one must not depend on the clock.
        decode="cpu" if recipe.run.strict and data.decode == "auto" else data.decode,
    )
    return Sets(
        name, train_spec, eval_spec, train, evaluation, transform, mean, std, workers, why, bad, world.device
    )


def prepare_plan(recipe: Recipe, samples: int, world: World) -> Plan:
    """Counts steps; refuses a batch that the data or the world cannot fill."""
    batch = recipe.data.batch
    per_epoch = steps_per_epoch(samples, batch)
    if per_epoch == 0:
        raise UserError(
            f"data.batch = {batch}: the training set has only {samples} samples",
            f"give --data.batch {samples} or less",
        )
    unit = 2 if recipe.data.mixup or recipe.data.cutmix else 1
    if recipe.run.strict and world.size > shard_count(recipe):
        raise UserError(
            f"run.shards = {recipe.run.shards}: {world.size} processes were started, and each needs a shard",
            f"give --run.shards {world.size} or more, or start fewer processes",
        )
    least = world.size * recipe.train.accumulate * unit
    if batch < least and recipe.parallel.layout not in STAGED:
        raise UserError(
            f"data.batch = {batch} cannot feed {world.size} processes x {recipe.train.accumulate} micro-batches"
            + (" of mixed pairs" if unit == 2 else ""),
            f"give --data.batch {least} or more",
        )
    total = recipe.train.steps or max(1, round(recipe.train.epochs * per_epoch))
    return Plan(
        total=total,
        per_epoch=per_epoch,
        schedule=build_schedule(recipe.optim, batch, total, per_epoch),
        eval_steps=_steps(recipe.train.eval_every, per_epoch),
        save_steps=_steps(recipe.checkpoint.every_epochs, per_epoch),
    )


def normaliser(sets: Sets, recipe: Recipe, world: World) -> Normalise:
    """The device half of the transform."""
    return Normalise.build(sets.mean, sets.std, world.device, channels_last(recipe, world))


def precision(recipe: Recipe, world: World) -> torch.dtype | None:
    """The autocast type; None computes in fp32."""
    wanted = recipe.train.precision
    several = recipe.parallel.layout in STAGED and world.size > 1
    if wanted == "fp16" and several:
        raise UserError(f"train.precision = fp16: {ONE_SCALE}", "use bf16 or fp32")
    if wanted == "auto":
        if world.device.type == "cpu":
            return None
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return None if several else torch.float16
    if wanted == "fp16" and world.device.type == "cpu":
        raise UserError("train.precision = fp16 needs a GPU", "use bf16 or fp32 on a CPU")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


def channels_last(recipe: Recipe, world: World) -> bool:
    return recipe.train.channels_last and world.device.type == "cuda"


def captures(recipe: Recipe, world: World) -> tuple[bool, str]:
    """Whether the step is recorded as a CUDA graph, and why not."""
    wanted = recipe.train.capture
    if wanted == "off":
        return False, "train.capture = off"
    reason = ""
    if world.device.type != "cuda":
        reason = "no GPU"
    elif world.size > 1:
        reason = "several processes exchange gradients outside a graph"
    elif resolve_layout(recipe.parallel.layout, world) == "dp":
        reason = "DataParallel copies the model at each step"
    elif recipe.parallel.layout in STAGED:
        reason = "stages are computed by threads of their own"
    elif recipe.distill.teacher_layout == "model" and torch.cuda.device_count() > 1:
        reason = "the teacher lies on several GPUs"
    elif recipe.train.gradient_checkpointing:
        reason = "gradient checkpointing saves and restores generator states on the host"
    if reason and wanted == "on":
        raise UserError(f"train.capture = on is not possible: {reason}", "use auto or off")
    return not reason, reason


def set_arithmetic(deterministic: bool) -> None:
    """Kernels that give the same bits each time, or the fastest ones."""
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    use_deterministic_algorithms(deterministic)
    # Filling fresh memory guards against reading it uninitialised; our kernels write before they read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def threads_per_process(
    wanted: int | str, local_size: int, strict: bool = False, env: Mapping[str, str] = os.environ
) -> int:
    """CPU threads for arithmetic: the recipe's, else the user's OMP_NUM_THREADS, else a share of the cores. Their
    number decides the order of additions, so strict mode's follows from nothing but the recipe."""
    if isinstance(wanted, int):
        return wanted
    return 1 if strict else threads_asked(env) or cores_per_process(local_size)


def _refuse_other_classes(train: Dataset, evaluation: Dataset) -> None:
    """A user's own source names the classes of each split by itself."""
    known, here = Classes.of(train), Classes.of(evaluation)
    if known.names != here.names and (len(known) != len(here) or (known.named and here.named)):
        names = set(known.names)
        unknown = [name for name in here.names if name not in names]
        raise UserError(
            f"data.source = {train.name}: the evaluation split has different classes from the training split: "
            f"{describe_difference(known, here, unknown, ('the training split', 'the evaluation split'))}",
            "give both splits the same class names in the same order",
        )


def _steps(epochs: float, per_epoch: int) -> int:
    """0 stays 0; anything above is at least one step, however short the epoch."""
    return max(1, round(epochs * per_epoch)) if epochs else 0


def _resident(source: Dataset, transform: Transform, device: torch.device) -> ResidentSet | None:
    if (
        device.type != "cuda"
        or not isinstance(source, ArrayDataset)
        or not fits_on_device(source, transform, device)
    ):
        return None
    return ResidentSet.upload(source, transform, device)

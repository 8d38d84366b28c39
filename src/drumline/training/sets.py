"""The training and evaluation sets of a run, how their images are prepared, and their broken samples.

Promises: every `auto` of the data section becomes a value; settings that do not fit together are rejected before the
first step. Every rank learns which broken samples any rank met, so a limit that is exceeded ends the run on all of
them; `broken-samples.tsv` in the run folder lists each one once, across stops and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.config.limits import named_weights
from drumline.config.recipe import Recipe
from drumline.config.sources import source_named
from drumline.core.errors import UserError
from drumline.core.files import write_bytes
from drumline.core.machine import cores_per_process
from drumline.core.text import printable
from drumline.data.classes import Classes, class_warnings, describe_difference
from drumline.data.feed.balance import Balance, ClassShares, epoch_shares
from drumline.data.feed.batch import BadSamples
from drumline.data.feed.choose import choose_workers
from drumline.data.feed.loader import Batches, LoaderWorkers, batches, blank_batches, resident_batches
from drumline.data.feed.resident import ResidentSet, fits_on_device, resident_feed
from drumline.data.feed.sampler import Request, evaluation_requests, training_requests
from drumline.data.feed.times import FeedTimes
from drumline.data.feed.transform import Transform, make_transform, normalization
from drumline.data.sources import (
    ArrayDataset,
    Dataset,
    DatasetSpec,
    EncodedDataset,
    detect_source,
    open_dataset,
    spec_of,
)
from drumline.data.sources.base import NoEvalSplit, NoTrainSplit, describe_skipped, known_labels
from drumline.parallel.strategy import uses_channels_last
from drumline.parallel.world import World
from drumline.state.folder import claimed
from drumline.training.losses import loss_weights

IMBALANCED = 10
"""A training set whose largest class has this many times the samples of its smallest is worth a line in the log."""
EVALUATION_BATCH = 256
"""Largest evaluation batch. Fixed, so that a sample is always scored together with the same others."""
DEFAULT_DATA = (
    "data.path is not set, so the data is the embedded digits; to use your own, set data.path=FOLDER"
)
BROKEN_SAMPLES = "broken-samples.tsv"


@dataclass(frozen=True)
class Sets:
    """The training and evaluation data of a run, their transform and their loader workers."""

    name: str
    train_spec: DatasetSpec
    eval_spec: DatasetSpec
    train: Dataset
    eval: Dataset
    transform: Transform
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: LoaderWorkers
    workers_why: str
    """The reason for the choice of workers; empty if there was none to make."""
    bad: tuple[BadSamples, BadSamples]
    """Broken samples met so far, of the training and of the evaluation set."""
    device: torch.device
    times: FeedTimes = field(default_factory=FeedTimes)
    """Where the feed of the training set spends its time."""

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
                sides[:1] if self.train_spec.divides else sides
            )  # both parts of divided data have the same folders
            if isinstance(source, EncodedDataset) and source.skipped
        ] + [*_remarks(self.train, self.eval), *class_warnings(self.train, self.eval)]

    @property
    def eval_batch(self) -> int:
        return min(EVALUATION_BATCH, len(self.eval))

    def training(
        self, recipe: Recipe, rows: slice, first_step: int, last_step: int, blank: bool = False
    ) -> Batches:
        """Batches from `first_step` on, of these rows of every global batch. `blank` ones have no pixels, for
        processes that compute neither images nor labels."""
        resident = self.name == "synthetic"
        requests = self.requests(recipe, rows, 0 if resident and not blank else first_step, last_step)
        if blank:
            return blank_batches(self.train, self.transform, recipe.run.seed, requests, self.device)
        if resident:
            return resident_batches(
                self.train, self.transform, recipe.run.seed, requests, first_step, self.device
            )
        return self.feed(recipe.run.seed, requests, self.device)

    def feed(self, seed: int, requests: Iterable[Request], device: torch.device) -> Batches:
        """The training batches that these requests ask for."""
        if self.resident_train is not None:
            return resident_feed(self.resident_train, seed, requests)
        return batches(
            self.train_spec,
            self.train,
            self.transform,
            seed,
            requests,
            self.workers,
            device,
            self.bad[0],
            self.times,
        )

    def requests(self, recipe: Recipe, rows: slice, first_step: int, last_step: int) -> Iterator[Request]:
        """The samples of those batches."""
        return training_requests(
            seed=recipe.run.seed,
            samples=len(self.train),
            batch=recipe.data.batch,
            first_step=first_step,
            last_step=last_step,
            local=rows,
            shares=self._shares(recipe),
        )

    def drawn_at(self, recipe: Recipe, step: int) -> NDArray[np.int64]:
        """The sample ids of a step's whole batch if a sample may come more than once in it; otherwise empty."""
        if self._shares(recipe) is None:
            return np.empty(0, np.int64)
        (request,) = self.requests(recipe, slice(None), step, step + 1)
        return request.samples

    def class_weights(self, recipe: Recipe) -> NDArray[np.float64] | None:
        """The weight of each class in the loss; None if all have the same."""
        given = recipe.train.class_weights
        if given in ((), ("none",)):
            return None
        named = None if given == ("balanced",) else named_weights(given)
        return loss_weights(self.train, recipe.data.balance, named)

    def sampling(self, recipe: Recipe) -> list[str]:
        """Lines about data that is not set, how often classes are drawn and how they are weighted."""
        default = recipe.data.source == "auto" and not recipe.data.path and self.name == "digits"
        return default * [DEFAULT_DATA] + describe_sampling(
            self.train, recipe.data.balance, self._shares(recipe), self.class_weights(recipe)
        )

    def _shares(self, recipe: Recipe) -> ClassShares | None:
        return self._epoch_shares(recipe.data.balance, recipe.data.batch, recipe.run.seed)

    @cached_property
    def _epoch_shares(self) -> Callable[[Balance, int, int], ClassShares | None]:
        """Kept here, so that it lives no longer than the data."""
        return cache(partial(epoch_shares, self.train.labels))

    def evaluation(self, recipe: Recipe, world: World, blank: bool = False) -> Batches:
        """This rank's evaluation batches; with `blank`, without pixels, for processes that do not compute images."""
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


def open_sets(recipe: Recipe, world: World, to_score: bool = False) -> Sets:
    """Opens the data and chooses its transform and workers. With `to_score`, the data needs no splits: without them,
    all of it is the evaluation set."""
    data = recipe.data
    again = bool(claimed())  # a start of this very run has opened the data before
    name = detect_source(data.source, data.path, again, data.labels)
    train_spec, eval_spec = spec_of(data, name, "train"), spec_of(data, name, "eval")
    if not to_score:
        train_spec = replace(train_spec, unlabelled=recipe.distill.unlabelled)
    try:
        train, evaluation = open_dataset(train_spec, again), open_dataset(eval_spec, again)
    except (NoEvalSplit, NoTrainSplit):
        if not to_score:
            raise
        train_spec = eval_spec = replace(eval_spec, whole=True)
        train = evaluation = open_dataset(eval_spec)
    _reject_other_classes(train, evaluation)
    mean, std = normalization(data, train)
    transform = make_transform(data, train, mean, training=not to_score)
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


@dataclass(frozen=True)
class Normalise:
    """uint8 NHWC from the loader to float NCHW for the model: (x / 255 - mean) / std per channel."""

    mean: torch.Tensor
    std: torch.Tensor
    channels_last: bool

    @staticmethod
    def build(
        mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, channels_last: bool
    ) -> Normalise:
        """Constants on the device, scaled to 0..255; one value serves all three channels."""

        def column(values: tuple[float, ...]) -> torch.Tensor:
            wide = values * 3 if len(values) == 1 else values
            return torch.tensor(wide, dtype=torch.float64).mul(255).float().view(1, 3, 1, 1).to(device)

        return Normalise(column(mean), column(std), channels_last)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        planes = images.permute(0, 3, 1, 2)
        if planes.shape[1] == 1:
            planes = planes.expand(-1, 3, -1, -1)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        # uint8 minus float promotes inside the subtraction: one pass less than converting first.
        return planes.sub(self.mean).div_(self.std).contiguous(memory_format=layout)


def normaliser(sets: Sets, recipe: Recipe) -> Normalise:
    """Turns the pixels of batches into the model's input, on the device."""
    return Normalise.build(sets.mean, sets.std, sets.device, uses_channels_last(recipe, sets.device))


def describe_sampling(
    dataset: Dataset,
    balance: Balance,
    shares: ClassShares | None,
    weights: NDArray[np.float64] | None,
) -> list[str]:
    """Lines for the log: how many images have no labels, how sampling and weights treat the largest and the smallest
    class, or that the classes are imbalanced and neither is set."""
    sizes = np.bincount(known_labels(dataset))
    most = int(sizes.argmax())
    least = int(np.where(sizes > 0, sizes, sizes.max() + 1).argmin())
    ends = [f"'{printable(dataset.classes[label])}'" for label in (most, least)]
    unlabelled = len(dataset) - int(sizes.sum())
    lines = [f"{unlabelled:,} of {len(dataset):,} training images have no labels"] * bool(unlabelled)
    if shares is not None:
        counts = shares.counts(0)
        parts = [
            f"class {name} {counts[label]:,} times ({sizes[label]:,} samples)"
            for name, label in zip(ends, (most, least), strict=True)
        ]
        lines.append(f"data.balance={balance}: an epoch draws {' and '.join(parts)}")
    if weights is not None:
        parts = [
            f"class {name} {weights[label]:.3g}" for name, label in zip(ends, (most, least), strict=True)
        ]
        lines.append(f"class weights in the training loss: {' and '.join(parts)}")
    if (
        shares is None
        and weights is None
        and not source_named(dataset.name).made_up
        and sizes[most] >= IMBALANCED * sizes[least]
    ):
        lines.append(
            f"the training set is imbalanced: class {ends[0]} has {sizes[most]:,} samples, class {ends[1]} "
            f"{sizes[least]:,} (the smallest of {np.count_nonzero(sizes):,}). To draw small classes more often, set "
            "data.balance=sqrt"
        )
    return lines


def _reject_other_classes(train: Dataset, evaluation: Dataset) -> None:
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


def _remarks(*sources: Dataset) -> list[str]:
    """The remarks of the sources, each once."""
    remarks = (
        str(each) for source in sources if isinstance(source, EncodedDataset) for each in source.remarks
    )
    return [f"WARNING: {remark}" for remark in dict.fromkeys(remarks)]


def _resident(source: Dataset, transform: Transform, device: torch.device) -> ResidentSet | None:
    if (
        device.type != "cuda"
        or not isinstance(source, ArrayDataset)
        or not fits_on_device(source, transform, device)
    ):
        return None
    return ResidentSet.upload(source, transform, device)


def gather_bad_samples(sets: tuple[BadSamples, BadSamples], world: World) -> None:
    """Merges the broken samples of all ranks. Every rank calls it; costs one small message if none is new."""
    counts = world.all_gather_floats([len(one.bad) for one in sets])
    if any(row != counts[0] for row in counts) or any(counts[0]):
        for one, others in zip(
            sets, zip(*world.all_gather_object([one.bad for one in sets]), strict=True), strict=True
        ):
            one.merge(others)


def write_bad_samples(sets: tuple[BadSamples, BadSamples], folder: Path) -> None:
    """Writes the list into the run folder, in the order of sets and ids; existing lines stay."""
    file = folder / BROKEN_SAMPLES
    before = file.read_text().splitlines() if file.exists() else []
    lines = {_key(line): line for one in sets for line in one.lines()}
    lines |= {_key(line): line for line in before}
    if len(lines) > len(before):
        write_bytes(file, "".join(f"{lines[key]}\n" for key in sorted(lines)).encode())


def _key(line: str) -> tuple[bool, int]:
    split, sample, _ = line.split("\t", 2)
    return split != "training", int(sample)


def describe_bad_samples(sets: tuple[BadSamples, BadSamples], listed: bool = True) -> list[str]:
    """Warnings about broken samples; empty if there are none."""
    where = f" (all in {BROKEN_SAMPLES})" if listed else ""
    training, evaluation = sets
    lines = []
    if training.bad:
        lines.append(
            f"WARNING: {len(training.bad):,} of {training.samples:,} training samples are broken and were replaced "
            f"by others, the same on every run{where}: {training.some()}"
        )
    if evaluation.bad:
        lines.append(
            f"WARNING: {len(evaluation.bad):,} of {evaluation.samples:,} evaluation samples are broken and were "
            f"scored as black images{where}: {evaluation.some()}"
        )
    return lines

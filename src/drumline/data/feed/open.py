"""`drumline.open_feed`: the data path of a run as an iterable for any training loop.

Promises: the pixels are Pillow's. The batches are those of `drumline train` with the same seed, whatever the number
of workers. The slices of the ranks are disjoint and cover each batch. `epoch` and `position` say how far a feed is; a
feed opened there yields the rest. Evaluation yields each sample exactly once, and as many batches on every rank.
Values that a recipe rejects raise a `UserError`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch

from drumline.config.fields import value_of
from drumline.config.learning import AutoFloat, AutoInt, Data
from drumline.config.recipe import Recipe, Run
from drumline.config.rules import problems
from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.core.machine import cores_per_process
from drumline.data.feed.balance import Balance, ClassShares, epoch_shares
from drumline.data.feed.batch import BadSamples
from drumline.data.feed.choose import choose_workers
from drumline.data.feed.loader import Batches, LoaderWorkers, batches
from drumline.data.feed.resident import ResidentSet, fits_on_device, resident_feed
from drumline.data.feed.sampler import Request, batch_part, evaluation_bounds, rank_slice
from drumline.data.feed.transform import Transform, make_transform, normalization
from drumline.data.sources import ArrayDataset, Dataset, DatasetSpec, detect_source, open_dataset, spec_of


class FeedBatch(NamedTuple):
    """One rank's slice of a batch."""

    images: torch.Tensor
    """(n, channels, size, size) uint8, in channels_last memory: a permuted view, not a copy."""
    labels: torch.Tensor
    """(n,) int64."""
    sample_ids: torch.Tensor
    """(n,) int64: positions in the dataset, the same in every epoch, on every rank and in every run."""


def open_feed(
    path: str | os.PathLike[str],
    batch: int,
    size: int | None = None,
    train: bool = True,
    rank: int | None = None,
    world: int | None = None,
    seed: int = 0,
    start: int = 0,
    *,
    epoch: int = 0,
    device: str | torch.device = "cpu",
    source: str = "auto",
    workers: AutoInt = "auto",
    pool: Literal["auto", "threads", "processes"] = "auto",
    decode: Literal["auto", "cpu", "gpu"] = "auto",
    augment: Literal["auto", "none", "shift", "shift-flip", "crop-flip"] = "auto",
    hflip: AutoFloat = "auto",
    vflip: float = 0.0,
    rotation: float = 0.0,
    crop_scale: Sequence[float] = (0.08, 1.0),
    jitter: Sequence[float] = (),
    randaugment: Sequence[int] = (),
    erasing: float = 0.0,
    transform: str = "",
    labels: str | os.PathLike[str] = "",
    holdout: float = 0.0,
    folds: int = 0,
    fold: int = 0,
    split_seed: int = 0,
    balance: Balance = "none",
    eval_crop: float = 0.875,
    resize: Literal["pillow12", "pillow13"] = "pillow12",
    interpolation: Literal["bilinear", "bicubic", "box", "lanczos"] = "bilinear",
    strict: bool = False,
    bad_limit: float = 0.01,
    exif: Literal["ignore", "apply"] = "ignore",
) -> Feed:
    """Opens a dataset for your own training loop: the pixels, order and speed of `drumline train`.

        with drumline.open_feed("photos", batch=256, size=224) as feed:
            model = drumline.create_model("resnet18", classes=len(feed.classes))
            while feed.epoch < 90:
                for images, labels, sample_ids in feed:  # one epoch
                    loss = torch.nn.functional.cross_entropy(model(images / 255), labels)
                    ...
                    state = {"epoch": feed.epoch, "start": feed.position}

    `images` is uint8 of shape (n, channels, size, size), `labels` and `sample_ids` are int64 of shape (n,).
    `open_feed("photos", batch=256, size=224, **state)` continues after the batch that was yielded last, also with a
    different `batch` or number of ranks. Leaving the loop early keeps the position: the next `for` continues the
    epoch. With torchrun, the same code gives each rank its slice of every batch.

    Args:
        path: A folder, a tar, a packed set, an .npz, ..., as for `drumline train data.path=...`. Empty: the embedded
            digits.
        batch: The global batch, over all ranks.
        size: The side of the images. None: the stored size for arrays, 224 for image files.
        train: True: shuffled and augmented, without the last incomplete batch. False: the evaluation split in its
            order, without augmentation, each sample exactly once; all of the data if it has no splits.
        rank, world: Which slice of each batch, of how many. None: those of torch.distributed, torchrun or Slurm, or
            else 0 of 1.
        seed: Decides the order and the augmentation, together with the epoch and the sample id.
        start, epoch: Where to begin: `position` and `epoch` of a feed over the same data.
        device: Where the tensors are. Batches for a GPU are copied ahead of the loop, on a side stream.
        source: The kind of data if it cannot be detected, or your own as "package.module:factory".
        workers: Threads or processes that read and decode. "auto": the cores of this machine divided by its ranks.
        pool: The kind of workers. "auto" measures both for about a second while the feed opens.
        decode: "gpu": the GPU's JPEG engine decodes the files for which it gives the same pixels.
        augment: How training images are augmented. "auto": "crop-flip" for image files, "shift-flip" for CIFAR,
            "shift" for other arrays.
        hflip: Probability of a horizontal flip. "auto": 0.5 for "shift-flip" and "crop-flip", otherwise 0.
        vflip: Probability of a vertical flip.
        rotation: Maximum random rotation in either direction, in degrees.
        crop_scale: Minimum and maximum area of the crops of "crop-flip", as fractions of the image's.
        jitter: Strengths of brightness, contrast, saturation and hue, such as (0.4, 0.4, 0.4, 0.1).
        randaugment: Operations per sample, and their magnitude, such as (2, 9).
        erasing: Probability that a rectangle of a training image is replaced by the mean colour.
        transform: Your own augmentation as "package.module:function", called as `function(image, rng)` for each
            training image with a uint8 array (height, width, channels) and its own NumPy generator.
        labels: A .csv, .tsv or .parquet file with the columns path, label and split; see data.labels.
        holdout, folds, fold, split_seed: How to set samples aside for evaluation, for data without an evaluation
            split. Pass the same values with `train=True` and `train=False`.
        balance: How often an epoch draws each class, as data.balance: "none" (each sample once), "sqrt", "balanced".
            `sample_ids` may repeat. Continue such an epoch with the same `batch`, which decides its order.
        eval_crop: Side of the evaluation crop, as a fraction of the resized short side.
        resize: Version of Pillow whose resize is reproduced, whatever version is installed.
        interpolation: Filter of the resize.
        strict: Whether a sample that cannot be read raises an error. Otherwise another sample replaces it (training),
            or a black image (evaluation).
        bad_limit: Fraction of the samples that may be broken before an error is raised.
        exif: Whether images are rotated by their EXIF orientation.

    Raises:
        UserError: An argument is wrong, or the data cannot be used. The message says what to do.
    """
    data = _checked(
        seed, source=source, path=os.fspath(path), batch=batch, size="auto" if size is None else size,
        workers=workers, pool=pool, decode=decode, augment=augment, hflip=hflip, vflip=vflip, rotation=rotation,
        crop_scale=tuple(crop_scale), jitter=tuple(jitter), randaugment=tuple(randaugment), erasing=erasing,
        transform=transform, labels=os.fspath(labels), holdout=holdout, folds=folds, fold=fold, split_seed=split_seed,
        balance=balance, eval_crop=eval_crop, resize=resize, interpolation=interpolation, strict=strict,
        bad_limit=bad_limit, exif=exif,
    )  # fmt: skip
    rank, world = _rank_and_world(rank, world)
    if train and data.batch < world:
        raise UserError(
            f"batch = {data.batch} is less than one sample for each of {world} ranks",
            f"give at least {world}: batch is the global batch",
        )
    target = _device(device)
    name = detect_source(data.source, data.path, labels=data.labels)
    spec = spec_of(data, name, "train" if train else "eval")
    spec = replace(spec, whole=not train and not spec.divides)
    dataset = open_dataset(spec)
    if train and len(dataset) < data.batch:
        raise UserError(
            f"batch = {data.batch}: the training set has only {len(dataset):,} samples",
            f"give {len(dataset)} or less",
        )
    mean = normalization(data, dataset)[0] if data.erasing else ()
    view = make_transform(data, dataset, mean, train)
    view = view if train else view.for_evaluation()
    info = read_rank_info(os.environ)
    threads = (
        cores_per_process(info.local_size if info else world) if data.workers == "auto" else data.workers
    )
    chosen, _ = choose_workers(
        spec, dataset, view, seed, target, count=threads, pool=data.pool, decode=data.decode
    )
    shares = epoch_shares(dataset.labels, data.balance, data.batch, seed) if train else None
    plan = _Plan(len(dataset), data.batch, train, seed, rank, world, shares)
    feed = Feed(spec, dataset, view, plan, chosen, target, data.bad_limit)
    feed.set_epoch(epoch, start)
    return feed


class Feed:
    """An iterable of `FeedBatch`es, opened by `open_feed`.

    One iteration yields the rest of the current epoch; the next one yields the following epoch, whose first batches
    are prefetched while an epoch ends. Close the feed, or leave its `with` block, to end its threads and processes.
    """

    def __init__(
        self,
        spec: DatasetSpec,
        dataset: Dataset,
        transform: Transform,
        plan: _Plan,
        workers: LoaderWorkers,
        device: torch.device,
        bad_limit: float,
    ) -> None:
        self._spec, self._dataset, self._transform, self._plan = spec, dataset, transform, plan
        self._workers, self._device = workers, device
        self._bad = BadSamples("training" if plan.train else "evaluation", len(dataset), bad_limit)
        self._resident: ResidentSet | None = None
        if (
            device.type == "cuda"
            and isinstance(dataset, ArrayDataset)
            and fits_on_device(dataset, transform, device)
        ):
            self._resident = ResidentSet.upload(dataset, transform, device)
        self._epoch, self._position, self._closed = 0, 0, False
        self._open: list[Batches] = []
        """The running batches, if any. Native threads must not outlive the interpreter's memory, so they also end
        when the feed is collected, or Python exits."""
        weakref.finalize(self, _close_all, self._open)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, by label."""
        return self._dataset.classes

    @property
    def samples(self) -> int:
        """The number of samples in the dataset, over all ranks."""
        return len(self._dataset)

    @property
    def rank(self) -> int:
        return self._plan.rank

    @property
    def world(self) -> int:
        return self._plan.world

    @property
    def epoch(self) -> int:
        """The current epoch. It advances when an iteration reaches the end of an epoch."""
        return self._epoch

    @property
    def position(self) -> int:
        """The number of samples of the epoch that are done, over all ranks, including the batch that was yielded
        last. `open_feed(..., epoch=feed.epoch, start=feed.position)` continues from here, also with a different
        `batch` or `world`."""
        return self._position

    @property
    def bad_samples(self) -> dict[int, str]:
        """The samples that this rank could not read so far, with the reasons. Each was replaced by another sample
        (training) or by a black image (evaluation)."""
        return dict(self._bad.bad)

    def __len__(self) -> int:
        """The number of batches in a whole epoch."""
        return len(self._plan.bounds(0)) - 1

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Moves to a position of an epoch. A loop that calls it before each epoch, as it would for a
        `DistributedSampler`, keeps the batches that are prefetched already."""
        if not 0 <= epoch < 2**32:
            raise UserError(f"epoch = {epoch} is out of range", "give 0 or more")
        if not 0 <= start <= self.samples:
            raise UserError(
                f"start = {start} is not a position in an epoch of {self.samples:,} samples",
                "give the `position` of a feed over the same data",
            )
        if self._plan.shares is not None and start % self._plan.batch:
            raise UserError(
                f"start = {start} is not a whole number of batches of {self._plan.batch}, and with balance the order "
                "of an epoch depends on the batch",
                "continue with the same batch as the feed that this position is from",
            )
        if (epoch, start) != (self._epoch, self._position):
            _close_all(self._open)
        self._epoch, self._position = epoch, start

    def __iter__(self) -> Iterator[FeedBatch]:
        epoch = self._epoch
        for first, stop in pairwise(self._plan.bounds(self._position)):
            if self._closed:
                raise UserError("the feed is closed", "open it again, at its epoch and position")
            if (self._epoch, self._position) != (epoch, first):  # moved by set_epoch or another iteration
                return
            batch = self._next() if _length(self._plan.local(first, stop)) else None
            self._position = stop
            if batch is not None:
                yield batch
        if self._epoch == epoch:
            if not self._plan.train:
                _close_all(self._open)
            self._epoch, self._position = epoch + 1, 0

    def close(self) -> None:
        """Ends the threads and processes. `epoch` and `position` stay."""
        _close_all(self._open)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next(self) -> FeedBatch:
        if not self._open:
            self._open.append(self._batches())
        try:
            images, labels, samples, *_ = next(self._open[0])
        except BaseException:
            _close_all(self._open)
            raise
        return FeedBatch(images.permute(0, 3, 1, 2), labels, samples)

    def _batches(self) -> Batches:
        requests = self._plan.requests(self._epoch, self._position)
        if self._resident is not None:
            return resident_feed(self._resident, self._plan.seed, requests)
        return batches(
            self._spec,
            self._dataset,
            self._transform,
            self._plan.seed,
            requests,
            self._workers,
            self._device,
            self._bad,
        )


@dataclass(frozen=True)
class _Plan:
    """The samples of each of a rank's batches. Its threads hold it, so it must not refer to the feed."""

    samples: int
    batch: int
    train: bool
    seed: int
    rank: int
    world: int
    shares: ClassShares | None = None

    def bounds(self, start: int) -> Sequence[int]:
        """Where the batches from `start` on begin and end."""
        if self.train:
            return range(start, self.samples + 1, self.batch)
        return evaluation_bounds(self.samples, max(self.batch, self.world), self.world, start)

    def local(self, first: int, stop: int) -> slice:
        """This rank's slice of a batch. It is empty only if fewer samples than ranks are left."""
        return rank_slice(stop - first, self.rank, self.world)

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        """This rank's requests: for all epochs to come in training, for one pass in evaluation."""
        for number in count(epoch) if self.train else (0,):
            for first, stop in pairwise(self.bounds(start)):
                batch, local = slice(first, stop), self.local(first, stop)
                if not _length(local):
                    continue
                if self.train:
                    yield batch_part(self.seed, number, self.samples, batch, local, self.shares)
                else:
                    yield Request(number, np.arange(first, stop)[local])
            start = 0


def _rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is None and world is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            info = read_rank_info(os.environ)
            rank, world = (info.rank, info.world_size) if info else (0, 1)
    if rank is None or world is None:
        raise UserError(f"rank = {rank}, world = {world}: one of them is missing", "give both, or neither")
    if not 0 <= rank < world:
        raise UserError(f"rank = {rank}, world = {world}: there is no such rank", "give 0 <= rank < world")
    return rank, world


def _checked(seed: int, **given: Any) -> Data:
    """The recipe's data section with these values, checked as in a recipe."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in given.items()}
    recipe = Recipe(run=Run(seed=seed), data=Data(**plain))
    for problem in problems(recipe):
        argument = problem.field.rpartition(".")[2]
        raise UserError(f"{argument} = {value_of(recipe, problem.field)!r}: {problem.what}", problem.fix)
    return recipe.data


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device = {device!r} is not a device", 'use "cpu", "cuda" or "cuda:N"') from error
    if target.type not in ("cpu", "cuda"):
        raise UserError(f"device = {device!r} is not supported", 'use "cpu" or "cuda", and move the tensors')
    if target.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= found:
            raise UserError(f"device = {device!r}: this machine has {found} CUDA devices", 'use "cpu"')
        return torch.device("cuda", torch.cuda.current_device() if target.index is None else target.index)
    return target


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _close_all(streams: list[Batches]) -> None:
    while streams:
        streams.pop().close()

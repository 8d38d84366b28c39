"""The feeds that feed_gpu.py and feed_cpu.py compare: a resident batch, Drumline, DataLoader, timm and DALI.

Each turn opens its feed anew. A feed gives (images, labels) on the device until it is closed, and is set up as its
documentation recommends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from drumline.data.feed.batch import BadSamples
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.sampler import training_requests
from drumline.data.feed.transform import Transform
from drumline.data.sources import DatasetSpec, EncodedDataset

CLASSES = 1000
SPARE = 8
"""Batches requested beyond the last step, so that no feed ends there."""

Feed = Generator[tuple[Tensor, Tensor], None, None]
"""Images (n, 3, size, size), uint8 or already normalised, and labels, both on the device."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how long."""

    device: torch.device
    batch: int
    size: int
    workers: int
    warm: int
    settle: int
    """Warm-up steps of the feed that balances CPU and GPU while it runs."""
    steps: int
    slow_steps: int
    """Timed steps of the feeds with worker processes, which deliver in waves: a multiple of their workers."""
    rounds: int


def synthetic(plan: Plan) -> Feed:
    """The same resident batch, endlessly."""
    shape = (plan.batch, plan.size, plan.size, 3)
    images = torch.randint(256, shape, dtype=torch.uint8, device=plan.device).permute(0, 3, 1, 2)
    labels = torch.randint(CLASSES, (plan.batch,), device=plan.device)
    while True:
        yield images, labels


def drumline(
    workers: LoaderWorkers, spec: DatasetSpec, source: EncodedDataset, transform: Transform, plan: Plan
) -> Feed:
    """The loader that `drumline train` uses."""
    bad_samples = BadSamples("training", len(source), 0.0)
    with closing(
        batches(spec, source, transform, 0, requests(source, plan), workers, plan.device, bad_samples)
    ) as feed:
        for batch in feed:
            yield batch.images.permute(0, 3, 1, 2), batch.labels


class Files(Dataset[Any]):
    """As ImageFolder, but so long that no epoch ends within a turn (starting an epoch costs the other loaders
    time)."""

    def __init__(
        self, source: EncodedDataset, length: int, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.paths = [source.where(sample) for sample in range(len(source))]
        self.labels = source.labels.tolist()
        self.length = length
        self.transform = transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        index %= len(self.paths)
        with open(self.paths[index], "rb") as file:  # noqa: PTH123 (what ImageFolder does)
            image = Image.open(file).convert("RGB")
        return (self.transform(image) if self.transform else image), self.labels[index]


def torchvision_transform(size: int) -> Callable[[Any], Tensor]:
    """torchvision's random resized crop and flip of a PIL image."""
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])  # type: ignore[no-any-return]


def torch_loader(files: Files, batch: int, workers: int, pin: bool = False) -> DataLoader[Any]:
    """torch's DataLoader with the recommended settings."""
    return DataLoader(
        files,
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=pin,
        persistent_workers=True,
        prefetch_factor=4,
        drop_last=True,
    )


def data_loader(source: EncodedDataset, plan: Plan) -> Feed:
    """torch's DataLoader with torchvision's transforms."""
    files = Files(source, _endless(plan), torchvision_transform(plan.size))
    for images, labels in torch_loader(files, plan.batch, plan.workers, pin=plan.device.type == "cuda"):
        yield images.to(plan.device, non_blocking=True), labels.to(plan.device, non_blocking=True)


def timm_loader(source: EncodedDataset, plan: Plan) -> Feed:
    """timm's loader: PIL in the workers, normalised on the GPU on a separate stream."""
    from timm.data import create_loader

    loader = create_loader(
        Files(source, _endless(plan)),
        input_size=(3, plan.size, plan.size),
        batch_size=plan.batch,
        is_training=True,
        use_prefetcher=True,
        color_jitter=None,  # type: ignore[arg-type]
        interpolation="bilinear",
        num_workers=plan.workers,
        pin_memory=plan.device.type == "cuda",
        device=plan.device,
    )
    yield from loader


def dali_loader(source: EncodedDataset, plan: Plan) -> Feed:
    """DALI: region decode on the GPU, its own resize."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    on_gpu = plan.device.type == "cuda"
    files = [source.where(sample) for sample in range(len(source))]

    @pipeline_def(batch_size=plan.batch, num_threads=plan.workers, device_id=0 if on_gpu else None, seed=0)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            files=files,
            labels=source.labels.tolist(),
            random_shuffle=True,
            initial_fill=len(files),
            name="files",
        )
        images = fn.decoders.image_random_crop(
            encoded,
            device="mixed" if on_gpu else "cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(
            images, resize_x=plan.size, resize_y=plan.size, interp_type=types.INTERP_LINEAR, antialias=True
        )
        images = fn.flip(images, horizontal=fn.random.coin_flip())
        return images, labels.gpu() if on_gpu else labels

    iterator = DALIGenericIterator(
        [pipeline()],
        ["images", "labels"],
        reader_name="files",
        auto_reset=True,
        last_batch_policy=LastBatchPolicy.DROP,
    )
    while True:
        for batch in iterator:
            yield batch[0]["images"].permute(0, 3, 1, 2), batch[0]["labels"].flatten().long()


def _endless(plan: Plan) -> int:
    return 4 * (plan.settle + plan.steps + SPARE) * plan.batch


def requests(source: EncodedDataset, plan: Plan) -> Iterable[Any]:
    """The same batches in every turn, so that one reference is enough."""
    return training_requests(
        seed=0,
        samples=len(source),
        batch=plan.batch,
        first_step=0,
        last_step=plan.settle + plan.steps + SPARE,
        local=slice(0, plan.batch),
    )

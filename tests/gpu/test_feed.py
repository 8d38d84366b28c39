"""The whole feed on a GPU: batches of `make_batch` to the bit, decoded on the CPU or on the GPU; runs that agree."""

from __future__ import annotations

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drumline
from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.data.feed import loader
from drumline.data.feed.batch import NOTHING, BadSamples, make_batch
from drumline.data.feed.choose import choose_workers, gpu_unavailable
from drumline.data.feed.loader import LoaderWorkers, batches
from drumline.data.feed.sampler import Request, evaluation_requests, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.gpu import decoder as decoder_module
from drumline.data.image.augment import Augmentation
from drumline.data.sources import Dataset, DatasetSpec, open_dataset
from drumline.parallel.world import single_process
from drumline.state.verify import verify_run
from drumline.training.loop import train
from tests.data.damage import KINDS, good_jpeg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
STRONG = Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5, fill=(1, 2, 3))
needs_engine = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(gpu_unavailable(DEVICE)),
    reason=f"needs a JPEG engine: {gpu_unavailable(DEVICE) if torch.cuda.is_available() else 'no GPU'}",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photograph-like files of every kind that the router must distinguish, and broken ones."""
    folder = tmp_path_factory.mktemp("files")
    draw = np.random.default_rng(0)
    for number in range(96):
        width, height = (int(side) for side in draw.integers(1, 400, 2))
        small = draw.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        split, label = ("val" if number % 6 == 5 else "train"), "abc"[number % 3]
        place = folder / split / label
        place.mkdir(parents=True, exist_ok=True)
        if number % 12 == 0:
            image.save(place / f"{number:03}.png")
            continue
        if number % 12 == 1:
            image = image.convert("L")
        options = {"quality": int(draw.integers(40, 98)), "progressive": number % 12 == 2}
        if image.mode == "RGB":
            options["subsampling"] = number % 3 if number % 12 < 9 else 2
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", **options)
        (place / f"{number:03}.jpg").write_bytes(buffer.getvalue())
    for kind in ("cut-in-half", "zero-filled", "web-page"):
        (folder / "train" / "a" / f"{kind}.jpg").write_bytes(KINDS[kind](good_jpeg(3)))
    return folder


def opened(folder: Path, split: str = "train") -> tuple[DatasetSpec, Dataset]:
    spec = DatasetSpec("folder", str(folder), split)  # type: ignore[arg-type]
    return spec, open_dataset(spec)


def requests(source: Dataset, batch: int = 16, epochs: int = 3) -> list[Request]:
    steps = len(source) // batch * epochs
    return list(
        training_requests(
            seed=5,
            samples=len(source),
            batch=batch,
            first_step=0,
            last_step=steps,
            local=slice(0, batch),
        )
    )


@pytest.mark.parametrize(
    "workers",
    [
        LoaderWorkers("threads", 4),
        LoaderWorkers("processes", 2),
        LoaderWorkers("threads", 0),
        pytest.param(LoaderWorkers("threads", 4, decode="gpu"), marks=needs_engine),
        pytest.param(LoaderWorkers("threads", 4, decode="both"), marks=needs_engine),
    ],
    ids=["threads", "processes", "none", "gpu", "both"],
)
@pytest.mark.parametrize(
    "transform",
    [
        Transform(64, "crop-flip", on_bad="substitute"),
        Transform(
            56, "crop-flip", on_bad="substitute", mixup=0.4, augmentation=STRONG, interpolation="bicubic"
        ),
        Transform(64, "crop-flip", on_bad="substitute", resize="pillow13", exif="apply"),
    ],
    ids=["plain", "augmented", "pillow13"],
)
def test_batches_on_the_gpu_are_those_of_make_batch(
    files: Path, workers: LoaderWorkers, transform: Transform, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.0, 0.4, 1.0, 0.1] * 20)
    if workers.decode == "both":  # however the fraction goes up and down
        monkeypatch.setattr(decoder_module, "next_fraction", lambda *_: next(shares))
        monkeypatch.setattr(decoder_module, "UNDER_WAY", 0)
        monkeypatch.setattr(decoder_module, "WINDOW", 1)
    spec, source = opened(files)
    asked, bad_samples = requests(source), BadSamples("training", len(source), 0.5)
    feed = batches(spec, source, transform, 5, iter(asked), workers, DEVICE, bad_samples)
    count = 0
    with closing(feed):
        for got, request in zip(feed, asked, strict=True):
            made = make_batch(source, replace(transform, augmentation=Augmentation()), 5, request).batch
            if transform.augmentation.active:
                from drumline.data.image.augment import apply, plan

                made = made._replace(
                    images=apply(made.images, plan(transform.augmentation, 5, request, transform.size))
                )
            for ours, theirs in zip(got, made, strict=True):
                assert ours.device == DEVICE or ours is NOTHING
                assert torch.equal(ours.cpu(), theirs)
            count += len(got.labels)
    assert count == sum(len(request.samples) for request in asked)
    assert 0 < len(bad_samples.bad) <= 3


@pytest.mark.parametrize("decode", ["cpu", pytest.param("gpu", marks=needs_engine)])
def test_images_without_labels_on_the_gpu_are_those_of_make_batch(files: Path, decode: str) -> None:
    spec = DatasetSpec("folder", str(files), "train", unlabelled=str(files / "val"))
    source, transform = open_dataset(spec), Transform(64, "crop-flip", on_bad="substitute")
    asked, bad_samples = requests(source), BadSamples("training", len(source), 0.5)
    workers = LoaderWorkers("threads", 4, decode=decode)  # type: ignore[arg-type]
    with closing(batches(spec, source, transform, 5, iter(asked), workers, DEVICE, bad_samples)) as feed:
        for got, request in zip(feed, asked, strict=True):
            made = make_batch(source, transform, 5, request).batch
            assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(got, made, strict=True))


@needs_engine
def test_most_jpegs_really_are_decoded_on_the_gpu(files: Path) -> None:
    from drumline.data.feed.loader import PinnedPool
    from drumline.data.feed.threads import threaded_batches
    from drumline.data.gpu.decoder import DeviceDecoder

    _, source = opened(files)
    transform = Transform(64, "crop-flip", on_bad="substitute")
    decoder = DeviceDecoder(len(source), transform, DEVICE)
    feed = threaded_batches(source, transform, 5, requests(source), 2, PinnedPool().take, decoder.route)  # type: ignore[arg-type]
    with closing(feed), closing(decoder):
        shares = [0 if made.undecoded is None else len(made.undecoded.slots) for made in feed]
    assert sum(shares) > 0.6 * 16 * len(shares)


@needs_engine
def test_decoding_never_overwrites_memory_that_queued_work_still_reads(files: Path) -> None:
    """nvJPEG's engine writes at once, even into memory that torch has freed behind work that has not run yet."""
    from drumline.data.feed.loader import PinnedPool
    from drumline.data.feed.threads import threaded_batches
    from drumline.data.gpu.decoder import DeviceDecoder
    from drumline.data.gpu.layout import place

    _, source = opened(files)
    transform = Transform(64, "crop-flip", on_bad="substitute")
    decoder = DeviceDecoder(len(source), transform, DEVICE)
    feed = threaded_batches(source, transform, 5, requests(source), 2, PinnedPool().take, decoder.route)  # type: ignore[arg-type]
    sums, windows = [], []
    with closing(feed), closing(decoder), torch.cuda.stream(torch.cuda.Stream()):
        made = next(feed)
        undecoded = made.undecoded
        assert undecoded is not None
        size = place(undecoded.layouts, undecoded.sizes[:, 0], undecoded.sizes[:, 1]).end
        for _ in range(20):
            images = torch.zeros((16, 64, 64, 3), dtype=torch.uint8, device=DEVICE)
            freed = torch.ones(size, dtype=torch.uint8, device=DEVICE)
            torch.cuda._sleep(20_000_000)  # about ten milliseconds
            sums.append(freed.sum())
            del freed
            decoder.fill(images, undecoded)
            windows.append(images)
        assert [int(each) for each in sums] == [size] * 20
        assert all(torch.equal(each, windows[0]) for each in windows)
        assert int(windows[0].count_nonzero()) > 0


@needs_engine
def test_the_gpu_decodes_what_the_threads_are_too_slow_for(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread cannot feed a step that does nothing; it can feed one that takes long."""
    reached = []

    class Watched(decoder_module.GpuFraction):
        def handed(self, wanted: torch.cuda.Event, ready: torch.cuda.Event) -> None:
            super().handed(wanted, ready)
            reached.append(self.value)

    monkeypatch.setattr(loader, "GpuFraction", Watched)
    spec, source = opened(files)
    transform = Transform(64, "crop-flip", on_bad="substitute")

    def walk(busy_ms: float) -> float:
        reached.clear()
        asked = requests(source, 32, epochs=100)
        feed = batches(
            spec,
            source,
            transform,
            5,
            iter(asked),
            LoaderWorkers("threads", 1, decode="both"),
            DEVICE,
            BadSamples("x", 99, 1),
        )
        with closing(feed):
            for _ in feed:
                torch.cuda._sleep(int(busy_ms * 1.5e6))
        return max(reached[40:])

    assert walk(0.0) > 0.1
    assert walk(60.0) < 0.05


@needs_engine
def test_evaluation_views_are_equal_too(files: Path) -> None:
    spec, source = opened(files, "val")
    transform = Transform(64, "none", on_bad="black")
    asked = list(evaluation_requests(samples=len(source), batch=5, rank=0, world=1))
    feed = batches(
        spec,
        source,
        transform,
        0,
        iter(asked),
        LoaderWorkers("threads", 2, decode="gpu"),
        DEVICE,
        BadSamples("x", 99, 1),
    )
    with closing(feed):
        for got, request in zip(feed, asked, strict=True):
            assert torch.equal(got.images.cpu(), make_batch(source, transform, 0, request).batch.images)


@needs_engine
def test_the_choice_of_workers_is_measured_and_explained(files: Path) -> None:
    spec, source = opened(files)
    transform = Transform(64, "crop-flip", on_bad="substitute")
    _, why = choose_workers(spec, source, transform, 0, DEVICE, count=4, pool="auto", decode="auto")
    assert "CPU" in why
    assert "GPU" in why
    assert "img/s" in why


@needs_engine
def test_runs_have_the_same_bits_wherever_images_are_decoded(files: Path, tmp_path: Path) -> None:
    base = Recipe(
        run=Run(device="cuda", dir=str(tmp_path)),
        data=Data(path=str(files), batch=16, size=64, bad_limit=0.1, randaugment=(2, 9)),
        model=Model(name="resnet18"),
        optim=Optim(lr=0.02),
        train=Train(epochs=3),
        checkpoint=Checkpoint(every_epochs=0),
    )
    hashes: dict[str, str] = {}
    for name, changes in {
        "cpu": {"decode": "cpu", "workers": 4},
        "gpu": {"decode": "gpu", "workers": 3},
        "chosen": {"decode": "auto"},
        "processes": {"decode": "cpu", "pool": "processes", "workers": 2},
    }.items():
        recipe = replace(
            base,
            run=replace(base.run, name=name),
            data=replace(base.data, **changes),  # type: ignore[arg-type]
        )
        result = train(recipe, single_process(DEVICE))
        assert result.broken_samples > 0
        hashes[name] = verify_run(tmp_path / name).state_sha256
    assert set(hashes.values()) == {hashes["cpu"]}, hashes


def test_the_feed_gives_its_memory_back(files: Path) -> None:
    spec, source = opened(files)
    transform = Transform(64, "crop-flip", on_bad="substitute")

    def walk() -> None:
        feed = batches(
            spec,
            source,
            transform,
            5,
            iter(requests(source, epochs=8)),
            LoaderWorkers("threads", 3, decode="cpu" if gpu_unavailable(DEVICE) else "gpu"),
            DEVICE,
            BadSamples("training", len(source), 0.5),
        )
        with closing(feed):
            for _ in feed:
                pass

    held = []
    for _ in range(4):
        walk()
        torch.cuda.synchronize()
        held.append((torch.cuda.memory_allocated(DEVICE) >> 20, torch.cuda.memory_reserved(DEVICE) >> 20))
    # A block that another stream has used is counted until the allocator is asked again: some batches' worth.
    assert held[-1][0] <= held[0][0] + 8, held
    assert held[-1][1] <= held[0][1] + 64, held


@pytest.mark.parametrize("path", ["files", "digits"])
@pytest.mark.parametrize("decode", ["cpu", pytest.param("gpu", marks=needs_engine)])
def test_open_feed_gives_the_same_tensors_on_the_gpu(files: Path, path: str, decode: str) -> None:
    where, size = (files, 48) if path == "files" else ("", 8)
    for training in (True, False):
        options = {
            "seed": 5,
            "train": training,
            "bad_limit": 0.5,
            "jitter": (0.4, 0.4, 0.4, 0.1),
            "workers": 4,
        }
        with (
            drumline.open_feed(where, 16, size, **options) as on_cpu,
            drumline.open_feed(where, 16, size, device="cuda", decode=decode, **options) as on_gpu,
        ):
            for ours, theirs in zip(on_gpu, on_cpu, strict=True):
                assert ours.images.is_contiguous(memory_format=torch.channels_last)
                for mine, expected in zip(ours, theirs, strict=True):
                    assert mine.device == DEVICE
                    assert torch.equal(mine.cpu(), expected)

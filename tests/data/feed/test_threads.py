"""Batches by native threads: those of `make_batch`, bit for bit, from every kind of source; and nothing stays."""

from __future__ import annotations

import gc
import io
import itertools
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from drumline.core.errors import LostError, UserError
from drumline.data.feed import threads as module
from drumline.data.feed.batch import HostBatch, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.threads import threaded_batches
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from drumline.data.sources.base import MappedFiles
from tests.data.test_native import jpeg, needs_jpeg, photo

pytestmark = needs_jpeg
SEED = 3
SAMPLES = 30
BROKEN = (4, 11, 12, 25)


def file_of(number: int, broken: bool) -> tuple[str, bytes]:
    """Formats in turn; most are JPEGs that the native part takes."""
    pixels = photo(number, 24 + number * 7 % 60, 20 + number * 11 % 50)
    if broken and number in BROKEN:
        data = jpeg(pixels)
        return "jpg", {4: data[: len(data) // 2], 11: b"", 12: b"no picture at all", 25: data[:-2]}[number]
    exif = Image.Exif()
    exif[0x0112] = 8
    other = {3: "PNG", 9: "WEBP", 17: "BMP", 22: "PNG"}.get(number)
    if other:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, other)
        return other.lower(), file.getvalue()
    if number == 6:
        file = io.BytesIO()
        Image.fromarray(pixels).convert("CMYK").save(file, "JPEG")
        return "jpg", file.getvalue()
    if number == 14:
        return "jpg", jpeg(pixels[..., 0])
    if number == 15:
        return "jpg", jpeg(pixels, exif=exif)
    return "jpg", jpeg(pixels, progressive=number == 8, subsampling=number % 3, quality=60 + number)


def write(root: Path, broken: bool) -> Path:
    for split, number in itertools.product(("train", "val"), range(SAMPLES)):
        suffix, data = file_of(number, broken)
        place = root / split / f"class{number // 10}" / f"{number:03}.{suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return root


def in_memory(path: str, split: str) -> SimpleNamespace:
    """A user's own source."""
    broken = path == "broken"

    def read(sample: int) -> bytes:
        if broken and sample == 11:
            raise FileNotFoundError("sample 11 is nowhere")
        return file_of(sample, broken)[1]

    return SimpleNamespace(
        labels=np.arange(SAMPLES) // 10, read=read, where=lambda sample: f"sample {sample}"
    )


@pytest.fixture(scope="module", params=[False, True], ids=["sound", "broken"])
def broken(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory, broken: bool) -> dict[str, DatasetSpec]:
    place = tmp_path_factory.mktemp("threads")
    folder = write(place / "photos", broken)
    with tarfile.open(place / "photos.tar", "w") as archive:
        archive.add(folder, "photos")
    pack_set("folder", str(folder), place / "packed", PackOptions(), 1, False, lambda text: None)
    return {
        "folder": DatasetSpec("folder", str(folder), "train"),
        "tar": DatasetSpec("tar", str(place / "photos.tar"), "train"),
        "packed": DatasetSpec("packed", str(place / "packed"), "train"),
        "custom": DatasetSpec(
            "tests.data.feed.test_threads:in_memory", "broken" if broken else "sound", "train"
        ),
    }


KINDS = ("folder", "tar", "packed", "custom")


def opened(spec: DatasetSpec) -> EncodedDataset:
    source = open_dataset(spec)
    assert isinstance(source, EncodedDataset)
    return source


def requests(batch: int = 7, batches: int = 9) -> list[Request]:
    """Over epochs, uneven at the end: the last batch has 3 samples."""
    draw = np.random.default_rng(8)
    order = [draw.permutation(SAMPLES) for _ in range(batch * batches // SAMPLES + 1)]
    samples = np.concatenate(order)[: batch * batches - batch + 3]
    return [Request(i // 3, samples[i * batch : (i + 1) * batch]) for i in range(batches)]


def fresh(*shape: int) -> torch.Tensor:
    # Not zeros: bytes that are never written must be visible.
    return torch.full(shape, 77, dtype=torch.uint8)


def run(
    source: EncodedDataset, transform: Transform, threads: int, wanted: Iterable[Request] | None = None
) -> Iterator[HostBatch]:
    return threaded_batches(source, transform, SEED, requests() if wanted is None else wanted, threads, fresh)


def assert_equal(found: HostBatch, expected: HostBatch) -> None:
    for ours, theirs in zip(found.batch, expected.batch, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert [bad.sample for bad in found.bad] == [bad.sample for bad in expected.bad]
    assert tuple(found.bad) == tuple(expected.bad)
    assert (found.plan is None) == (expected.plan is None)
    if found.plan and expected.plan:
        assert np.array_equal(found.plan.table, expected.plan.table)
        assert found.plan.runs == expected.plan.runs
    assert found.request.epoch == expected.request.epoch
    assert found.undecoded is None


VIEWS = {
    "training": Transform(16, "crop-flip", mixup=0.3, on_bad="substitute"),
    "evaluation": Transform(16, "crop-flip", on_bad="substitute").for_evaluation(),
    "flipped": Transform(
        16, "none", hflip=0.5, augmentation=Augmentation(vflip=0.5, rotation=30.0), on_bad="substitute"
    ),
    "cropped": Transform(14, "crop-flip", hflip=0.2, crop_scale=(0.3, 0.7), on_bad="substitute"),
    "turned": Transform(
        20, "crop-flip", exif="apply", resize="pillow13", interpolation="bicubic", on_bad="black"
    ),
    "augmented": Transform(
        12, "crop-flip", augmentation=Augmentation(randaugment=(2, 9), erasing=0.5), on_bad="substitute"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("threads", "transform"),
    [
        (1, "training"),
        (5, "training"),
        (2, "evaluation"),
        (5, "turned"),
        (3, "augmented"),
        (2, "flipped"),
        (3, "cropped"),
    ],
)
def test_threaded_batches_are_those_of_make_batch(
    specs: dict[str, DatasetSpec], kind: str, threads: int, transform: str, broken: bool
) -> None:
    source = opened(specs[kind])
    found = list(run(source, VIEWS[transform], threads))
    expected = [make_batch(source, VIEWS[transform], SEED, request) for request in requests()]
    assert len(found) == 9
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
    assert any(made.bad for made in found) == broken


def test_most_samples_are_made_without_python(
    specs: dict[str, DatasetSpec], broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above would compare Python with Python."""
    source, left = opened(specs["folder"]), set[int]()

    def counted(source: EncodedDataset, transform: Transform, seed: int, epoch: int, sample: int) -> object:
        left.add(sample)
        return original(source, transform, seed, epoch, sample)

    original = module.load_sample
    monkeypatch.setattr(module, "load_sample", counted)
    list(run(source, VIEWS["training"], 2))
    assert left == {3, 6, 9, 17, 22, *(BROKEN if broken else ())}
    left.clear()
    list(run(source, VIEWS["turned"], 2))
    assert left == {3, 6, 9, 15, 17, 22, *(BROKEN if broken else ())}


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_anywhere_gives_the_remaining_batches(specs: dict[str, DatasetSpec], kind: str) -> None:
    source, transform = opened(specs[kind]), VIEWS["training"]
    expected = [make_batch(source, transform, SEED, request) for request in requests()]
    for first in (1, 4, 8):
        found = list(run(source, transform, 2, requests()[first:]))
        assert len(found) == 9 - first
        for ours, theirs in zip(found, expected[first:], strict=True):
            assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_changing_length_and_repeated_samples_are_right(
    specs: dict[str, DatasetSpec], kind: str
) -> None:
    source = opened(specs[kind])
    draw = np.random.default_rng(1)
    wanted = [Request(epoch, draw.integers(0, SAMPLES, draw.integers(1, 12))) for epoch in range(12)]
    # As class-balanced sampling asks: the repeats of a sample have crops, and substitutes, of their own.
    repeated = np.repeat(draw.integers(0, SAMPLES, 4), 3)
    wanted.append(Request(3, repeated, np.tile(np.arange(3), 4)))
    wanted.append(Request(4, np.full(3, 11), np.arange(3)))
    for ours, request in zip(run(source, VIEWS["training"], 3, wanted), wanted, strict=True):
        assert_equal(ours, make_batch(source, VIEWS["training"], SEED, request))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_broken_sample_is_raised_where_its_batch_was_wanted_with_its_name(
    specs: dict[str, DatasetSpec], kind: str, threads: int, broken: bool
) -> None:
    source, transform = opened(specs[kind]), Transform(16, "crop-flip")
    wanted = [Request(0, np.arange(5 * i, 5 * i + 5)) for i in range(6)]
    made = run(source, transform, threads, wanted)
    if broken:
        with pytest.raises(UserError) as caught:
            next(made)
        with pytest.raises(UserError) as expected:
            make_batch(source, transform, SEED, wanted[0])
        assert (caught.value.what, caught.value.fix) == (expected.value.what, expected.value.fix)
        assert caught.value.fix
    else:
        for ours, request in zip(made, wanted, strict=True):
            assert_equal(ours, make_batch(source, transform, SEED, request))
    assert_nothing_left()


def drumline_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("drumline")]


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def assert_nothing_left(before: int | None = None) -> None:
    assert drumline_threads() == []
    deadline = time.monotonic() + 3
    while before is not None and tasks() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # a joined thread leaves /proc a moment later
    assert before is None or tasks() <= before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [0, 1, 8])
def test_closing_at_any_time_leaves_no_threads_and_no_descriptors(
    specs: dict[str, DatasetSpec], kind: str, taken: int
) -> None:
    source = opened(specs[kind])
    with closing(run(source, VIEWS["training"], 3)) as warm:  # type: ignore[type-var]
        next(warm)
    gc.collect()
    threads, before = tasks(), descriptors()
    made = run(source, VIEWS["training"], 3)
    for _ in range(taken):
        next(made)
    if taken:
        assert tasks() >= threads + 3 + module.READERS
    made.close()  # type: ignore[attr-defined]
    assert_nothing_left(threads)
    assert len(descriptors()) == len(before)


@pytest.mark.parametrize("error", [UserError("the order ended", "give more"), ZeroDivisionError()])
def test_an_error_among_the_requests_surfaces_and_leaves_nothing(
    specs: dict[str, DatasetSpec], error: Exception
) -> None:
    def ending() -> Iterator[Request]:
        yield from requests()[:6]
        raise error

    source = opened(specs["folder"])
    threads = tasks()
    with pytest.raises(type(error)) as caught:
        list(run(source, VIEWS["training"], 2, ending()))
    assert caught.value is error
    assert_nothing_left(threads)


def test_a_system_error_in_a_custom_source_is_raised() -> None:
    class Odd(EncodedDataset):
        def read(self, sample: int) -> bytes:
            if sample == 3:
                raise LookupError("a mistake in the user's code")
            return jpeg(photo(sample, 30, 20))

        def where(self, sample: int) -> str:
            return str(sample)

    source = Odd("odd", np.zeros(SAMPLES, np.int64), ("a", "b"))
    for on_bad in ("raise", "substitute"):
        transform = Transform(8, "none", on_bad=on_bad)  # type: ignore[arg-type]
        with pytest.raises(LookupError, match="a mistake"):
            list(run(source, transform, 2, [Request(0, np.arange(6))]))
    assert_nothing_left()


@pytest.mark.parametrize("on_bad", ["substitute", "black", "raise"])
def test_a_file_that_disappears_is_a_loss_and_not_substituted(
    tmp_path: Path, on_bad: Literal["substitute", "black", "raise"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.reading.PAUSES", (0.0,))
    source = opened(DatasetSpec("folder", str(write(tmp_path, broken=False)), "train"))
    Path(source.where(7)).unlink()
    with pytest.raises(LostError, match=r"007.*No such file"):
        list(run(source, Transform(16, "none", on_bad=on_bad), 2, [Request(0, np.arange(5, 10))]))


def test_a_packed_sample_whose_bytes_changed_is_not_decoded(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", broken=False)
    pack_set("folder", str(folder), tmp_path / "packed", PackOptions(), 1, False, lambda text: None)
    spec = DatasetSpec("packed", str(tmp_path / "packed"), "train")
    source = opened(spec)
    assert isinstance(source, MappedFiles)
    shard = max((tmp_path / "packed").rglob("*train*"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    at = bytes(data).index(source.read(2)) + len(source.read(2)) // 2
    del source
    data[at] ^= 1
    shard.write_bytes(data)
    source, transform = opened(spec), Transform(16, "crop-flip", on_bad="black")
    (made,) = run(source, transform, 2, [Request(0, np.arange(6))])
    assert [bad.sample for bad in made.bad] == [2]
    assert not made.batch.images[2].any()


def test_the_number_of_batches_under_way_is_bounded(specs: dict[str, DatasetSpec]) -> None:
    source, asked = opened(specs["folder"]), 0

    def endless() -> Iterator[Request]:
        nonlocal asked
        while True:
            asked += 1
            yield requests()[asked % 8]

    with closing(run(source, VIEWS["training"], 2, endless())) as made:  # type: ignore[type-var]
        for taken in range(1, 8):
            next(made)
            assert asked <= taken + module.READ_AHEAD + module.MADE_AHEAD


def test_memory_is_constant_and_slots_are_reused(
    specs: dict[str, DatasetSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, slots = opened(specs["folder"]), []
    original = module.Slot.__init__

    def counted(self: module.Slot, *arguments: object) -> None:
        slots.append(self)
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Slot, "__init__", counted)
    buffers = [torch.empty(7, 16, 16, 3, dtype=torch.uint8) for _ in range(8)]
    ring = itertools.cycle(buffers)
    endless = (requests()[i % 8] for i in itertools.count())
    process = psutil.Process()
    with closing(
        threaded_batches(source, VIEWS["training"], SEED, endless, 2, lambda *shape: next(ring))
    ) as made:
        for _ in itertools.islice(made, 40):
            pass
        gc.collect()
        addresses = {int(address) for slot in slots for address in slot.arrays.data}
        before, files = process.memory_info().rss, descriptors()
        for _ in itertools.islice(made, 250):
            pass
        gc.collect()
        grown = process.memory_info().rss - before
        assert len(slots) <= 1 + module.READ_AHEAD + module.MADE_AHEAD
        deadline = time.monotonic() + 3
        while len(descriptors()) > len(files) + 1 and time.monotonic() < deadline:
            time.sleep(0.01)  # files that are being read ahead at this moment
        assert len(descriptors()) <= len(files) + 1
        after = {int(address) for slot in slots for address in slot.arrays.data}
    assert grown < 4 << 20
    # A few buffers grow when a larger file than ever comes to their slot.
    assert len(after - addresses) < len(after) // 3


def test_buffers_can_be_reused_after_a_batch_was_taken(specs: dict[str, DatasetSpec]) -> None:
    """A ring just large enough for what is under way and the batch in hand."""
    source, transform = opened(specs["tar"]), VIEWS["training"]
    wanted = [Request(i, requests()[0].samples) for i in range(30)]
    free = [torch.full((7, 16, 16, 3), 77, dtype=torch.uint8) for _ in range(8)]
    with closing(threaded_batches(source, transform, SEED, wanted, 3, lambda *shape: free.pop(0))) as batches:
        for made, request in zip(batches, wanted, strict=True):
            assert_equal(made, make_batch(source, transform, SEED, request))
            made.batch.images.fill_(77)
            free.append(made.batch.images)

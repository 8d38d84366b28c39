"""The same batches in the same order from any kind of worker; no thread or process outlives its feed."""

from __future__ import annotations

import io
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from drumline import native
from drumline.core.errors import LostError, UserError
from drumline.data.feed.batch import BadSample, BadSamples, Batch, make_batch
from drumline.data.feed.loader import (
    RESIDENT_BATCHES,
    Batches,
    LoaderWorkers,
    _make,
    batches,
    prefetch,
    process_batches,
    resident_batches,
)
from drumline.data.feed.sampler import Request, training_requests
from drumline.data.feed.transform import Transform
from drumline.data.image.augment import Augmentation, apply
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from tests.data.test_native import needs_jpeg

CPU = torch.device("cpu")
SEED = 3
VIEW = Transform(16, "crop-flip", mixup=0.3)
NONE = LoaderWorkers("threads", 0)
BOTH = [
    pytest.param(LoaderWorkers("threads", 3), marks=needs_jpeg),
    pytest.param(LoaderWorkers("processes", 2), marks=pytest.mark.slow),
]
ALL = [NONE, *BOTH]


def named(workers: object) -> str:
    return str(workers).replace(" ", "-")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(7)):
        place = root / split / label
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        image = Image.fromarray(pixels[..., 0] if number == 5 else pixels)
        image.save(place / f"{number}.{('jpg', 'png', 'jpg', 'webp')[number % 4]}")
    return root


@pytest.fixture(scope="module")
def damaged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two broken files, samples 6 and 11."""
    root = tmp_path_factory.mktemp("damaged")
    for label in ("cat", "dog"):
        (root / "train" / label).mkdir(parents=True)
        for path in (folder / "train" / label).iterdir():
            (root / "train" / label / path.name).write_bytes(path.read_bytes())
    (root / "val").symlink_to(folder / "val")
    for bad in (root / "train" / "cat" / "6.jpg", root / "train" / "dog" / "4.jpg"):
        bad.write_bytes(bad.read_bytes()[:300])
    return root


def spec(folder: Path) -> DatasetSpec:
    return DatasetSpec("folder", str(folder), "train")


def requests(first: int = 0, last: int = 9) -> Iterator[Request]:
    return training_requests(
        seed=SEED, samples=14, batch=4, first_step=first, last_step=last, local=slice(0, 4)
    )


def load(
    folder: Path,
    workers: LoaderWorkers,
    first: int = 0,
    last: int = 9,
    transform: Transform = VIEW,
    bad_samples: BadSamples | None = None,
) -> Batches:
    source = open_dataset(spec(folder))
    bad_samples = bad_samples or BadSamples("training", len(source), 0.0)
    return batches(spec(folder), source, transform, SEED, requests(first, last), workers, CPU, bad_samples)


def same(a: Batch, b: Batch) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def workers_of(before: set[int]) -> list[psutil.Process]:
    """Processes below this one that were not there before."""
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


def feeds() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("drumline")]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Batch]:
    """Made directly, one request after the other."""
    source = open_dataset(spec(folder))
    return [make_batch(source, VIEW, SEED, request).batch for request in requests()]


def assert_loads(folder: Path, workers: LoaderWorkers, expected: list[Batch], first: int = 0) -> None:
    """The batches from `first` on, copied: a buffer may be used again."""
    found = [Batch(*(tensor.clone() for tensor in batch)) for batch in load(folder, workers, first)]
    assert len(found) == 9 - first
    assert all(same(a, b) for a, b in zip(found, expected[first:], strict=True))


@pytest.mark.parametrize(
    "workers",
    [
        NONE,
        LoaderWorkers("processes", 0),
        *(pytest.param(LoaderWorkers("threads", count), marks=needs_jpeg) for count in (1, 2, 5)),
        pytest.param(LoaderWorkers("processes", 1), marks=pytest.mark.slow),
        pytest.param(LoaderWorkers("processes", 2), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_batches_are_bit_by_bit_the_same_for_any_kind_and_number_of_workers(
    folder: Path, expected: list[Batch], workers: LoaderWorkers
) -> None:
    assert_loads(folder, workers, expected)


def test_without_the_native_part_the_batches_are_the_same(
    folder: Path, expected: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "decodes_jpeg", lambda: False)
    assert_loads(folder, NONE, expected)


@pytest.mark.parametrize("workers", ALL, ids=named)
@pytest.mark.parametrize("first", [1, 5, 8])
def test_resuming_needs_only_the_remaining_requests(
    folder: Path, expected: list[Batch], workers: LoaderWorkers, first: int
) -> None:
    assert_loads(folder, workers, expected, first)


@pytest.mark.parametrize("workers", ALL, ids=named)
def test_pixels_are_augmented_for_every_kind_of_workers(folder: Path, workers: LoaderWorkers) -> None:
    transform = Transform(
        16,
        "crop-flip",
        augmentation=Augmentation(jitter=(0.4, 0.4, 0.4, 0.1), randaugment=(2, 9), erasing=0.5),
    )
    source = open_dataset(spec(folder))
    with closing(load(folder, workers, last=4, transform=transform)) as loaded:
        for batch, request in zip(loaded, requests(last=4), strict=True):
            made = make_batch(source, transform, SEED, request)
            assert made.plan is not None
            images = apply(made.batch.images, made.plan)
            assert same(batch, made.batch._replace(images=images))
            assert not torch.equal(images, made.batch.images)


@pytest.mark.parametrize("workers", ALL, ids=named)
def test_a_broken_file_surfaces_as_the_users_error_with_its_name(
    damaged: Path, workers: LoaderWorkers
) -> None:
    before = children()
    with (
        pytest.raises(UserError, match=r"(cat/6|dog/4)\.jpg") as caught,
        closing(load(damaged, workers)) as loaded,
    ):
        list(loaded)
    assert "Traceback" not in str(caught.value)
    assert caught.value.fix
    assert feeds() == []
    assert_ended(workers_of(before))


@pytest.mark.parametrize("workers", ALL, ids=named)
@pytest.mark.parametrize("on_bad", ["substitute", "black"])
def test_broken_samples_are_replaced_and_recorded_in_the_same_way_by_all_workers(
    damaged: Path, workers: LoaderWorkers, on_bad: str
) -> None:
    transform = Transform(16, "crop-flip", on_bad=on_bad)  # type: ignore[arg-type]
    source, bad_samples = open_dataset(spec(damaged)), BadSamples("training", 14, 0.2)
    plain = BadSamples("training", 14, 0.2)
    with closing(load(damaged, workers, transform=transform, bad_samples=bad_samples)) as loaded:
        for batch, request in zip(loaded, requests(), strict=True):
            made = make_batch(source, transform, SEED, request)
            plain.add(made.bad)
            assert same(batch, made.batch)
            for slot in np.flatnonzero(np.isin(request.samples, (6, 11))):
                assert batch.images[slot].any() == (on_bad == "substitute")
                if on_bad == "black":
                    assert batch.labels[slot] == source.labels[request.samples[slot]]
    assert set(bad_samples.bad) == {6, 11}
    assert bad_samples.lines() == plain.lines()


@pytest.mark.parametrize("workers", ALL, ids=named)
def test_too_many_broken_samples_end_the_run_and_its_workers(damaged: Path, workers: LoaderWorkers) -> None:
    before = children()
    transform, bad_samples = Transform(16, "crop-flip", on_bad="substitute"), BadSamples("training", 14, 0.07)
    with (
        pytest.raises(UserError, match=r"2 of 14 training samples .* allows 1") as caught,
        closing(load(damaged, workers, transform=transform, bad_samples=bad_samples)) as loaded,
    ):
        list(loaded)
    assert "cat/6.jpg" in caught.value.what
    assert "dog/4.jpg" in caught.value.what
    assert feeds() == []
    assert_ended(workers_of(before))


@pytest.mark.slow
def test_broken_samples_found_by_a_process_are_returned_unchanged(damaged: Path) -> None:
    transform = Transform(16, "crop-flip", on_bad="black")
    source = open_dataset(spec(damaged))
    assert isinstance(source, EncodedDataset)
    with closing(
        process_batches(spec(damaged), source.digest(), transform, SEED, requests(last=4), 1)
    ) as loaded:
        for made, request in zip(loaded, requests(last=4), strict=True):
            assert tuple(made.bad) == make_batch(source, transform, SEED, request).bad
            assert all(isinstance(bad, BadSample) for bad in made.bad)
            assert made.request.keys.tolist() == request.keys.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_ends_the_processes(folder: Path, taken: int) -> None:
    with closing(load(folder, LoaderWorkers("processes", 1))) as warm:
        next(warm)
    before = children()
    loaded = load(folder, LoaderWorkers("processes", 2))
    for _ in range(taken):
        next(loaded)
    started = workers_of(before)
    assert len(started) == (2 if taken else 0)
    loaded.close()
    assert_ended(started)
    assert_ended(workers_of(before))


@needs_jpeg
@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_closing_ends_the_threads_and_frees_their_resources(folder: Path, taken: int) -> None:
    with closing(load(folder, LoaderWorkers("threads", 2))) as warm:
        next(warm)
    tasks, descriptors = _count("task"), _count("fd")
    loaded = load(folder, LoaderWorkers("threads", 2))
    for _ in range(taken):
        next(loaded)
    loaded.close()
    assert feeds() == []
    deadline = time.monotonic() + 3
    while _count("task") > tasks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _count("task") <= tasks
    assert _count("fd") <= descriptors


@pytest.mark.slow
def test_workers_end_by_themselves_after_the_last_batch(folder: Path) -> None:
    with closing(load(folder, LoaderWorkers("processes", 1))) as warm:
        next(warm)
    before = children()
    list(load(folder, LoaderWorkers("processes", 2)))
    assert_ended(workers_of(before))
    assert feeds() == []


@pytest.mark.parametrize("workers", ALL, ids=named)
def test_loading_does_not_touch_the_global_generators(folder: Path, workers: LoaderWorkers) -> None:
    """Their state belongs to the model."""
    torch.manual_seed(5)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    list(load(folder, workers))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)  # type: ignore[index]


@pytest.mark.slow
def test_workers_open_the_source_themselves(folder: Path, expected: list[Batch]) -> None:
    """A source that cannot be sent to another process is no hindrance."""
    source = open_dataset(spec(folder))
    source.unsendable = lambda: None  # type: ignore[union-attr]
    bad_samples = BadSamples("training", 14, 0.0)
    with closing(
        batches(spec(folder), source, VIEW, SEED, requests(), LoaderWorkers("processes", 1), CPU, bad_samples)
    ) as loaded:
        assert same(next(loaded), expected[0])


@pytest.mark.parametrize("place", ["gone", "another"])
def test_a_source_that_is_missing_or_changed_when_a_worker_opens_it_is_a_loss(
    folder: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.data.reading.PAUSES", (0.0,))
    source = open_dataset(spec(folder))
    assert isinstance(source, EncodedDataset)
    if place == "another":
        shutil.copytree(folder, tmp_path / place)
        (tmp_path / place / "train/cat/3.webp").unlink()
    there = DatasetSpec("folder", str(tmp_path / place), "train")
    with pytest.raises(LostError, match="does not exist" if place == "gone" else "13 samples are there now"):
        _make(there, source.digest(), VIEW, SEED, next(iter(requests())))


@pytest.mark.parametrize("workers", ALL, ids=named)
def test_an_error_among_the_requests_surfaces_after_the_batches_before_it(
    folder: Path, expected: list[Batch], workers: LoaderWorkers
) -> None:
    def ending() -> Iterator[Request]:
        yield from requests(last=3)
        raise UserError("the order ended", "give more")

    source, bad_samples, before = open_dataset(spec(folder)), BadSamples("training", 14, 0.0), children()
    loaded = batches(spec(folder), source, VIEW, SEED, ending(), workers, CPU, bad_samples)

    def consume() -> None:
        for number, batch in enumerate(loaded):
            assert same(batch, expected[number])

    with pytest.raises(UserError, match="the order ended"):
        consume()
    assert feeds() == []
    assert_ended(workers_of(before))


def test_arrays_are_made_in_the_callers_thread_whatever_the_workers() -> None:
    source = open_dataset(DatasetSpec("digits", "", "train"))
    transform, wanted = Transform(8, "shift"), [Request(0, np.arange(5)), Request(1, np.arange(7))]
    bad_samples, before = BadSamples("training", len(source), 0.0), children()
    for workers in (NONE, LoaderWorkers("threads", 3), LoaderWorkers("processes", 3)):
        loaded = batches(
            DatasetSpec("digits", "", "train"), source, transform, SEED, wanted, workers, CPU, bad_samples
        )
        for batch, request in zip(loaded, wanted, strict=True):
            assert feeds() == []
            assert same(batch, make_batch(source, transform, SEED, request).batch)
    assert_ended(workers_of(before))


@pytest.mark.parametrize("first", [0, 3, 8, 29])
def test_resident_batches_repeat_and_a_step_always_gets_the_same_one(first: int) -> None:
    source = open_dataset(DatasetSpec("synthetic", "classes=3,size=8,samples=640", "train"))
    transform = Transform(8, "none")

    def asked() -> Iterator[Request]:
        return training_requests(seed=0, samples=640, batch=4, first_step=0, last_step=50, local=slice(0, 4))

    made = [
        make_batch(source, transform, 0, request).batch
        for request in itertools.islice(asked(), RESIDENT_BATCHES)
    ]
    with closing(resident_batches(source, transform, 0, asked(), first, CPU)) as loaded:
        for step, batch in zip(range(first, first + 20), loaded, strict=False):
            assert same(batch, made[step % RESIDENT_BATCHES])


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (LoaderWorkers("threads", 0), "no workers"),
        (LoaderWorkers("threads", 1), "1 thread"),
        (LoaderWorkers("threads", 4), "4 threads"),
        (LoaderWorkers("processes", 1), "1 process"),
        (LoaderWorkers("processes", 2), "2 processes"),
    ],
)
def test_workers_are_described_as_text(workers: LoaderWorkers, text: str) -> None:
    assert str(workers).startswith(text)


@needs_jpeg
def test_memory_is_constant_over_hundreds_of_batches(tmp_path: Path) -> None:
    for split, number in itertools.product(("train", "val"), range(8)):
        place = tmp_path / split / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        (place / f"{number}.jpg").write_bytes(file.getvalue())
    source, bad_samples = open_dataset(spec(tmp_path)), BadSamples("training", 8, 0.0)
    wanted = (Request(epoch, np.arange(8)) for epoch in itertools.count())
    workers = LoaderWorkers("threads", 2)
    process = psutil.Process()
    transform = Transform(32, "crop-flip")
    with closing(
        batches(spec(tmp_path), source, transform, SEED, wanted, workers, CPU, bad_samples)
    ) as loaded:
        for _ in itertools.islice(loaded, 100):
            pass
        before, descriptors = process.memory_info().rss, _count("fd")
        for _ in itertools.islice(loaded, 500):
            pass
        assert process.memory_info().rss - before < 4 << 20
        assert _count("fd") <= descriptors + 1


def _count(what: str) -> int:
    """Threads (`task`) or descriptors (`fd`) of this process, ours and the system's."""
    return len(list(Path("/proc/self", what).iterdir()))


def assert_ended(processes: list[psutil.Process]) -> None:
    """Within a few seconds; a process that is slow to leave is not one that stays. The fork server stays."""
    deadline = time.monotonic() + 5
    processes = [process for process in processes if not _is_server(process)]
    while time.monotonic() < deadline and any(process.is_running() for process in processes):
        time.sleep(0.02)
    assert [process.pid for process in processes if process.is_running()] == []


def _is_server(process: psutil.Process) -> bool:
    """Python's own fork server and its tracker, which live until this process ends."""
    try:
        command = " ".join(process.cmdline())
        return process.ppid() == psutil.Process().pid and ("forkserver" in command or "tracker" in command)
    except psutil.NoSuchProcess:
        return False


class Source:
    """Counts; says whether it was closed, and by which thread."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        self.count, self.error = count, error
        self.given = 0
        self.closed_by: list[threading.Thread] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.given == self.count:
            if self.error:
                raise self.error
            raise StopIteration
        self.given += 1
        return self.given - 1

    def close(self) -> None:
        self.closed_by.append(threading.current_thread())


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "drumline-feed"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("ready", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_items_come_in_order_and_the_source_is_closed_once(count: int, ready: int) -> None:
    source = Source(count)
    assert list(prefetch(source, ready)) == list(range(count))
    assert len(source.closed_by) == 1
    assert feed_threads() == []


def test_items_that_are_none_or_false_are_items() -> None:
    assert list(prefetch((item for item in (None, False, 0, ())), 2)) == [None, False, 0, ()]


def test_prefetch_runs_ahead_by_the_requested_number_only() -> None:
    source = Source(100)
    with closing(prefetch(source, 3)) as items:
        assert next(items) == 0
        # Three wait in the queue, and one in the thread's hands.
        until(lambda: source.given >= 5)
        time.sleep(0.05)
        assert source.given == 5
        assert next(items) == 1
        until(lambda: source.given >= 6)
        time.sleep(0.05)
        assert source.given == 6


@pytest.mark.parametrize("error", [UserError("what", "fix"), ValueError("odd"), KeyboardInterrupt()])
def test_an_error_of_the_source_is_raised_in_place_of_its_item(error: BaseException) -> None:
    source = Source(4, error)
    items = prefetch(source, 2)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(type(error)) as caught:
        next(items)
    assert caught.value is error
    assert len(source.closed_by) == 1
    assert feed_threads() == []


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_early_ends_the_thread_and_closes_the_source_first(taken: int) -> None:
    source = Source(10**9)
    items = prefetch(source, 2)
    for _ in range(taken):
        next(items)
    (feed,) = feed_threads()
    items.close()
    assert not feed.is_alive()
    assert source.closed_by == [feed]
    assert list(items) == []


def test_an_error_at_the_consumer_ends_the_thread() -> None:
    source = Source(10**9)

    def consume() -> None:
        with closing(prefetch(source, 2)) as items:
            for item in items:
                assert item < 3

    with pytest.raises(AssertionError):
        consume()
    assert len(source.closed_by) == 1
    assert feed_threads() == []


def test_a_generators_finally_block_runs_in_its_own_thread() -> None:
    """CUDA streams and processes want to be given back where they were taken."""
    threads = []

    def generator() -> Iterator[int]:
        threads.append(threading.current_thread())
        try:
            while True:
                yield 1
        finally:
            threads.append(threading.current_thread())

    with closing(prefetch(generator(), 2)) as items:
        next(items)
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()


def test_a_prefetch_that_is_never_used_starts_no_thread() -> None:
    items = prefetch(Source(5), 2)
    assert feed_threads() == []
    items.close()
    assert feed_threads() == []

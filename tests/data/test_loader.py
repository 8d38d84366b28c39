"""The same batches in the same order, whoever makes them; and nobody stays behind."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from drumline.data.loader import RESIDENT_BATCHES, Batches, batches, default_workers, resident_batches
from drumline.data.order import Request, training_requests
from drumline.data.sources import SourceSpec, open_source
from drumline.data.views import Batch, View, make_batch
from drumline.errors import UserError
from drumline.launch.machine import usable_cores

CPU = torch.device("cpu")
SEED = 3
VIEW = View(16, "crop-flip", mixup=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(7)):
        place = root / split / label
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return root


def spec(folder: Path) -> SourceSpec:
    return SourceSpec("folder", str(folder), "train")


def requests(first: int = 0, last: int = 9) -> Iterator[Request]:
    return training_requests(
        seed=SEED, samples=14, batch=4, first_step=first, last_step=last, part=slice(0, 4)
    )


def load(folder: Path, workers: int, first: int = 0, last: int = 9) -> Batches:
    source = open_source(spec(folder))
    return batches(spec(folder), source, VIEW, SEED, requests(first, last), workers, CPU)


def same(a: Batch, b: Batch) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def workers_of(before: set[int]) -> list[psutil.Process]:
    """Processes below this one that were not there before."""
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Batch]:
    """Made directly, one request after the other."""
    source = open_source(spec(folder))
    return [make_batch(source, VIEW, SEED, request) for request in requests()]


def assert_loads(folder: Path, workers: int, expected: list[Batch], first: int = 0) -> None:
    """The batches from `first` on, copied: a buffer may be used again."""
    found = [Batch(*(tensor.clone() for tensor in batch)) for batch in load(folder, workers, first)]
    assert len(found) == 9 - first
    assert all(same(a, b) for a, b in zip(found, expected[first:], strict=True))


def test_batches_without_workers_are_those_asked_for(folder: Path, expected: list[Batch]) -> None:
    assert_loads(folder, 0, expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_are_bit_by_bit_the_same_for_any_number_of_workers(
    folder: Path, expected: list[Batch], workers: int
) -> None:
    assert_loads(folder, workers, expected)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 3])
def test_resuming_needs_only_the_requests_still_to_come(
    folder: Path, expected: list[Batch], workers: int
) -> None:
    assert_loads(folder, workers, expected, first=5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_surfaces_as_the_users_error_with_its_name(
    tmp_path: Path, folder: Path, workers: int
) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "train" / label).mkdir(parents=True)
        for path in (folder / "train" / label).iterdir():
            (tmp_path / "train" / label / path.name).write_bytes(path.read_bytes())
    (tmp_path / "val").symlink_to(folder / "val")
    bad = tmp_path / "train" / "dog" / "4.png"
    bad.write_bytes(bad.read_bytes()[:100])
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(UserError, match=r"dog/4\.png") as caught, closing(load(tmp_path, workers)) as loaded:
        list(loaded)
    assert "Traceback" not in str(caught.value)
    assert caught.value.fix
    _gone(workers_of(before))


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_closing_ends_the_workers(folder: Path, taken: int) -> None:
    with closing(load(folder, 1)) as warm:
        next(warm)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    loaded = load(folder, 2)
    for _ in range(taken):
        next(loaded)
    started = workers_of(before)
    assert len(started) == (2 if taken else 0)
    loaded.close()
    _gone(started)
    assert workers_of(before) == []


@pytest.mark.slow
def test_workers_end_by_themselves_after_the_last_batch(folder: Path) -> None:
    with closing(load(folder, 1)) as warm:
        next(warm)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    list(load(folder, 2))
    _gone(workers_of(before))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_generators_alone(folder: Path, workers: int) -> None:
    """Their state belongs to the model."""
    torch.manual_seed(5)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    list(load(folder, workers))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpys)  # type: ignore[index]


@pytest.mark.slow
def test_workers_open_the_source_themselves(folder: Path) -> None:
    """A source that cannot be sent to another process is no hindrance."""
    source = open_source(spec(folder))
    source.unsendable = lambda: None  # type: ignore[union-attr]
    with closing(batches(spec(folder), source, VIEW, SEED, requests(), 1, CPU)) as loaded:
        assert same(next(loaded), make_batch(source, VIEW, SEED, next(requests())))


@pytest.mark.slow
def test_a_source_that_is_gone_when_a_worker_opens_it_is_a_users_error(folder: Path, tmp_path: Path) -> None:
    source = open_source(spec(folder))
    gone = SourceSpec("folder", str(tmp_path / "gone"), "train")
    with (
        pytest.raises(UserError, match="gone"),
        closing(batches(gone, source, VIEW, SEED, requests(), 1, CPU)) as loaded,
    ):
        next(loaded)


@pytest.mark.parametrize("first", [0, 3, 8, 29])
def test_resident_batches_repeat_and_a_step_always_gets_the_same_one(first: int) -> None:
    source = open_source(SourceSpec("synthetic", "classes=3,size=8,samples=640", "train"))
    view = View(8, "none")

    def asked() -> Iterator[Request]:
        return training_requests(seed=0, samples=640, batch=4, first_step=0, last_step=50, part=slice(0, 4))

    made = [make_batch(source, view, 0, request) for request in itertools.islice(asked(), RESIDENT_BATCHES)]
    with closing(resident_batches(source, view, 0, asked(), first, CPU)) as loaded:
        for step, batch in zip(range(first, first + 20), loaded, strict=False):
            assert same(batch, made[step % RESIDENT_BATCHES])


def test_arrays_need_no_workers_and_files_take_every_core(folder: Path) -> None:
    arrays = open_source(SourceSpec("digits", "", "train"))
    assert default_workers(arrays, 1) == 0
    files = open_source(spec(folder))
    assert default_workers(files, 1) == usable_cores()
    assert default_workers(files, 10**6) == 1


def _gone(processes: list[psutil.Process]) -> None:
    """Within a few seconds; a process that is slow to leave is not one that stays."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(process.is_running() for process in processes):
        time.sleep(0.02)
    assert [process.pid for process in processes if process.is_running()] == []

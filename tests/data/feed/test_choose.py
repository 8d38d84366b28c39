"""The choice of workers: measured if there is one, reported as text, and rejected by field if it is impossible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline import native
from drumline.config.recipe import Data, Recipe
from drumline.core.errors import UserError
from drumline.data.feed import choose
from drumline.data.feed.choose import choose_workers
from drumline.data.feed.loader import LoaderWorkers
from drumline.data.feed.transform import Transform
from drumline.data.sources import Dataset, DatasetSpec, open_dataset
from drumline.parallel.world import single_process
from drumline.training.sets import open_sets
from tests.data.damage import encoded, good_jpeg, picture

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
VIEW = Transform(size=32, augment="crop-flip", on_bad="substitute")
needs_native = pytest.mark.skipif(
    not native.decodes_jpeg(), reason="the native part is not built with libjpeg-turbo here"
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("photos"), ".jpg")


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("drawings"), ".png")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MEASURE_S", 0.02)


def folder_of(folder: Path, suffix: str) -> Path:
    for number in range(12):
        file = folder / ("val", "train")[number % 2] / f"class{number % 3}" / f"{number}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(good_jpeg(number) if suffix == ".jpg" else encoded(picture(number), "PNG"))
    return folder


def opened(path: Path) -> tuple[DatasetSpec, Dataset]:
    spec = DatasetSpec("folder", str(path), "train")
    return spec, open_dataset(spec)


def chosen(
    path: Path, device: torch.device = CPU, transform: Transform = VIEW, **asked: Any
) -> tuple[LoaderWorkers, str]:
    return choose_workers(
        *opened(path), transform, 0, device, **{"count": 2, "pool": "auto", "decode": "auto"} | asked
    )


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring is an error."""

    def fail(make: object, ahead: int = 0) -> float:
        raise AssertionError("measured, though there is nothing to choose")

    monkeypatch.setattr(choose, "_rate", fail)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The images a second that will be measured, one after the other."""
    given: list[float] = []

    def pretend(make: Any, ahead: int = 0) -> float:
        assert make() > 0, "a rate is that of something that works"
        return given.pop(0)

    monkeypatch.setattr(choose, "_rate", pretend)
    return given


@needs_native
def test_threads_are_chosen_and_reported_with_both_figures(photos: Path, rates: list[float]) -> None:
    rates[:] = [1000.0, 900.0]
    assert chosen(photos) == (
        LoaderWorkers("threads", 2),
        "decoding by 2 threads: 1,000 img/s (2 processes: 1,800 at best)",
    )


@needs_native
@pytest.mark.parametrize(("by_threads", "kind"), [(99.0, "processes"), (101.0, "threads")])
def test_processes_are_chosen_only_if_they_promise_twice_the_speed(
    drawings: Path, rates: list[float], by_threads: float, kind: str
) -> None:
    rates[:] = [by_threads, 100.0]
    workers, reported = chosen(drawings)
    assert workers.kind == kind
    assert reported.startswith(f"decoding by 2 {kind}: ")
    assert rates == []


@needs_native
def test_a_set_of_png_files_is_measured(drawings: Path) -> None:
    workers, reported = chosen(drawings)
    assert workers.count == 2
    figures = {
        "threads": r"decoding by 2 threads: [\d,]+ img/s \(2 processes: [\d,]+ at best\)",
        "processes": r"decoding by 2 processes: [\d,]+ img/s at best \(2 threads: [\d,]+\)",
    }
    assert re.fullmatch(figures[workers.kind], reported)


def test_one_worker_is_reported_in_the_singular() -> None:
    assert [str(LoaderWorkers(kind, 1)) for kind in ("threads", "processes")] == ["1 thread", "1 process"]  # type: ignore[arg-type]
    assert [str(LoaderWorkers(kind, 3)) for kind in ("threads", "processes")] == ["3 threads", "3 processes"]  # type: ignore[arg-type]
    assert str(LoaderWorkers("threads", 0)) == "no workers"


@needs_native
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_nothing_is_measured_when_the_recipe_leaves_no_choice(photos: Path, pool: str) -> None:
    assert chosen(photos, pool=pool) == (LoaderWorkers(pool, 2), f"decoding by 2 {pool}")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unmeasured")
def test_nothing_is_measured_or_reported_without_workers(photos: Path) -> None:
    assert chosen(photos, count=0) == (LoaderWorkers("threads", 0), "")


@pytest.mark.usefixtures("unmeasured")
def test_nothing_is_measured_or_reported_without_image_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((9, 8, 8, 3), np.uint8), labels=np.arange(9) % 3)
    spec = DatasetSpec("npz", str(tmp_path / "a.npz"), "train", 0.3)
    transform = Transform(size=8, augment="none")
    found = choose_workers(spec, open_dataset(spec), transform, 0, CPU, count=2, pool="auto", decode="auto")
    assert found == (LoaderWorkers("threads", 0), "")


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRUMLINE_NATIVE", "0")
    native._loaded.cache_clear()
    yield
    native._loaded.cache_clear()


@pytest.mark.usefixtures("unmeasured", "without_native")
def test_without_the_native_part_processes_decode_and_the_reason_is_reported(photos: Path) -> None:
    found = chosen(photos)
    assert found == (
        LoaderWorkers("processes", 2),
        "decoding by 2 processes: native part turned off by DRUMLINE_NATIVE=0",
    )


@pytest.mark.usefixtures("unmeasured", "without_native")
def test_threads_without_the_native_part_are_rejected(photos: Path) -> None:
    with pytest.raises(
        UserError, match=r"^data\.pool = threads needs the native part, which is turned off"
    ) as no:
        chosen(photos, pool="threads")
    assert "use auto or processes" in no.value.fix


@pytest.mark.usefixtures("unmeasured")
def test_decoding_on_a_missing_gpu_is_rejected(photos: Path) -> None:
    with pytest.raises(
        UserError, match=r"^data\.decode = gpu is not possible: there is no GPU in this run"
    ) as no:
        chosen(photos, decode="gpu")
    assert no.value.fix == "use auto or cpu"


@pytest.mark.usefixtures("unmeasured", "without_native")
def test_decoding_on_a_gpu_without_the_native_part_is_rejected_with_that_reason(photos: Path) -> None:
    with pytest.raises(
        UserError, match=r"^data\.decode = gpu is not possible: the native part is turned off"
    ):
        chosen(photos, CUDA, decode="gpu")


@pytest.mark.usefixtures("unmeasured")
def test_decoding_on_a_gpu_requires_threads(photos: Path) -> None:
    with pytest.raises(
        UserError, match=r"^data\.decode = gpu needs threads, but data\.pool = processes"
    ) as no:
        chosen(photos, CUDA, decode="gpu", pool="processes")
    assert no.value.fix == "use data.pool auto"


@needs_native
def test_the_gpu_is_used_if_it_is_not_much_slower_than_the_cpu(
    photos: Path, rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice alone: what decodes on a GPU is in tests/gpu."""
    monkeypatch.setattr(choose, "gpu_unavailable", lambda device: "")
    monkeypatch.setattr(choose, "batches", lambda *_: iter_of_ones())
    rates[:] = [1000.0, 99.0]
    workers, reported = chosen(photos, CUDA, pool="threads")
    assert workers == LoaderWorkers("threads", 2)
    assert reported == "decoding by 2 threads: CPU 1,000 img/s, GPU 99 img/s alone"
    rates[:] = [1000.0, 101.0]
    workers, reported = chosen(photos, CUDA, pool="threads")
    assert workers == LoaderWorkers("threads", 2, decode="both")
    assert reported == (
        "decoding by 2 threads, and on the GPU what the step would wait for: CPU 1,000 img/s, GPU 101 img/s alone"
    )


def iter_of_ones() -> Any:
    class One:
        labels = (0,)

    while True:
        yield One()


@needs_native
def test_a_strict_run_stops_at_a_broken_sample_while_measuring(photos: Path, tmp_path: Path) -> None:
    for number, file in enumerate(sorted(photos.rglob("*.jpg"))):
        copy = tmp_path / file.relative_to(photos)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes()[: 300 if number == 3 else None])
    with pytest.raises(UserError, match="is truncated"):
        chosen(tmp_path, transform=replace(VIEW, on_bad="raise"))
    assert chosen(tmp_path)[0].count == 2, "else it is substituted, in the trial too"


def test_every_rank_chooses_for_its_own_machine(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of a run may differ in cores, GPUs and installed parts; the pixels do not."""

    class Second:
        """A rank that no other rank may influence."""

        rank, size, local_size, device = 1, 2, 2, CPU

    monkeypatch.setattr(choose, "MEASURE_S", 0.0)
    recipe = Recipe(data=Data(path=str(photos), workers=2))
    assert open_sets(recipe, Second()).workers.count == 2  # type: ignore[arg-type]
    assert open_sets(recipe, single_process(CPU)).workers.count == 2

"""A system that fails says nothing about a sample: it is waited for, then it is a loss, and never a substitute."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.cli import main
from drumline.config.recipe import Data, Recipe
from drumline.core.environment import CLAIMED
from drumline.core.errors import LostError, UserError
from drumline.data import reading
from drumline.data.feed.batch import BadSamples, load_sample
from drumline.data.feed.loader import LoaderWorkers, batches, process_batches
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.sources import DatasetSpec, EncodedDataset, detect_source, open_dataset, open_same
from drumline.parallel.world import single_process
from drumline.training.sets import open_sets
from tests.data.damage import good_jpeg, with_scans
from tests.data.test_native import needs_jpeg

CPU = torch.device("cpu")
VIEW = Transform(16, "crop-flip", on_bad="substitute")
REQUESTS = [Request(0, np.arange(6)), Request(1, np.arange(6)[::-1].copy())]
TRANSIENT = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EACCES]
WAYS = [
    LoaderWorkers("threads", 0),
    pytest.param(LoaderWorkers("threads", 2), marks=needs_jpeg),
    pytest.param(LoaderWorkers("processes", 2), marks=pytest.mark.slow),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("a/1", "a/2", "a/3", "b/1", "b/2", "b/3")):
        place = tmp_path / "photos" / f"{name}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(good_jpeg(number))
    return tmp_path / "photos"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.01))


@pytest.fixture(autouse=True)
def fresh_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_lost_before", False)


def opened(folder: Path) -> EncodedDataset:
    source = open_dataset(DatasetSpec("folder", str(folder), "train"))
    assert isinstance(source, EncodedDataset)
    return source


def made(folder: Path, workers: LoaderWorkers) -> tuple[list[Any], dict[int, str]]:
    """Two batches over all samples, and what was noted as broken."""
    spec, bad_samples = DatasetSpec("folder", str(folder), "train"), BadSamples("training", 6, 1.0)
    with closing(batches(spec, opened(folder), VIEW, 3, iter(REQUESTS), workers, CPU, bad_samples)) as feed:
        return list(feed), bad_samples.bad


@contextmanager
def later(act: Callable[[], object], seconds: float = 0.5) -> Iterator[None]:
    timer = threading.Timer(seconds, act)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def failing(
    monkeypatch: pytest.MonkeyPatch, number: int, name: str, times: float = float("inf")
) -> list[int]:
    """From now on opening a file of this name fails that often."""
    seen: list[int] = []
    really = os.open

    def open_(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith(name) and len(seen) < times:
            seen.append(number)
            raise OSError(number, os.strerror(number), str(path))
        return really(path, *args, **more)

    monkeypatch.setattr(reading.os, "open", open_)
    return seen


@pytest.mark.parametrize("number", TRANSIENT, ids=errno.errorcode.get)
@pytest.mark.usefixtures("hasty")
def test_a_temporary_error_changes_nothing(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(folder)
    expected = load_sample(source, VIEW, 3, 0, 1)
    seen = failing(monkeypatch, number, "a/2.jpg", times=2)
    found = load_sample(source, VIEW, 3, 0, 1)
    assert len(seen) == 2
    assert found.bad == ()
    assert (found.pixels == expected.pixels).all()


@pytest.mark.parametrize("on_bad", ["substitute", "black", "raise"])
@pytest.mark.parametrize("number", [*TRANSIENT, errno.ENOENT], ids=errno.errorcode.get)
@pytest.mark.usefixtures("hasty")
def test_a_permanent_error_is_a_loss_with_its_cause_and_never_a_substitute(
    folder: Path, number: int, on_bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(folder)
    seen = failing(monkeypatch, number, "a/2.jpg")
    with pytest.raises(LostError) as caught:
        load_sample(source, Transform(16, "crop-flip", on_bad=on_bad), 3, 0, 1)
    assert len(seen) == 3
    assert f"a/2.jpg cannot be read: {os.strerror(number)} (3 tries" in caught.value.what
    assert "--checkpoint.resume auto" in caught.value.fix
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("workers", WAYS, ids=str)
def test_a_file_missing_for_a_moment_changes_nothing_and_one_that_became_a_pipe_is_a_loss(
    folder: Path, workers: LoaderWorkers
) -> None:
    expected, _ = made(folder, LoaderWorkers("threads", 0))
    place, away, pipe = folder / "b/1.jpg", folder.parent / "away", folder.parent / "pipe"
    os.mkfifo(pipe)
    spec, bad_samples = DatasetSpec("folder", str(folder), "train"), BadSamples("training", 6, 1.0)
    asked = itertools.cycle(REQUESTS)
    with closing(batches(spec, opened(folder), VIEW, 3, asked, workers, CPU, bad_samples)) as feed:
        for step in range(60):
            if step == 2:  # each of two loader processes has scanned the folders by now
                place.rename(away)
                threading.Timer(0.5, away.rename, [place]).start()
            assert (next(feed).images == expected[step % 2].images).all()
        assert place.exists()
        place.unlink()
        pipe.rename(place)
        with pytest.raises(
            LostError, match=r"b/1\.jpg (is a pipe, not a regular file|cannot be read: No such file)"
        ):
            list(feed)
    assert bad_samples.bad == {}


def test_a_loader_process_that_sees_fewer_files_than_its_trainer_is_a_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one file less, every id after it would mean another image."""
    spec = DatasetSpec("folder", str(folder), "train")
    digest = opened(folder).digest()
    away = folder.parent / "away"
    (folder / "a/2.jpg").rename(away)
    with later(lambda: away.rename(folder / "a/2.jpg")):
        source = open_same(spec, digest)
    assert len(source) == 6
    (folder / "a/2.jpg").unlink()
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.01))
    with pytest.raises(LostError, match="has changed since the run began: 5 samples are there now"):
        open_same(spec, digest)


@needs_jpeg
def test_without_free_descriptors_native_threads_wait_and_then_are_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: no file can be opened, by C or by Python, until there is a descriptor again."""
    workers = LoaderWorkers("threads", 2)
    (expected, _), source = made(folder, workers), opened(folder)
    spec, bad_samples = DatasetSpec("folder", str(folder), "train"), BadSamples("training", 6, 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with (
            later(restore),
            closing(batches(spec, source, VIEW, 3, iter(REQUESTS), workers, CPU, bad_samples)) as feed,
        ):
            found = list(feed)
        assert all((a.images == b.images).all() for a, b in zip(found, expected, strict=True))
        assert bad_samples.bad == {}
        monkeypatch.setattr(reading, "PAUSES", (0.0, 0.01))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with (
            closing(batches(spec, source, VIEW, 3, iter(REQUESTS), workers, CPU, bad_samples)) as feed,
            pytest.raises(LostError, match="Too many open files") as caught,
        ):
            list(feed)
        assert "ulimit -n" in caught.value.fix
        assert bad_samples.bad == {}
    finally:
        restore()


@pytest.mark.usefixtures("hasty")
def test_an_image_for_which_there_is_no_memory_is_a_loss(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> None:
        raise OSError("out of memory error when reading image file")

    (folder / "a/1.jpg").write_bytes(b"")
    source = opened(folder)
    assert load_sample(source, VIEW, 3, 0, 0).bad[0].sample == 0
    (folder / "a/1.jpg").write_bytes(with_scans(good_jpeg(), 50))
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", none)
    with pytest.raises(LostError, match=r"a/1\.jpg cannot be read: Cannot allocate memory"):
        load_sample(source, VIEW, 3, 0, 0)


def made_here(path: str, split: str) -> SimpleNamespace:
    """A user's own source, whose reads fail in the way its path says."""

    def read(sample: int) -> bytes:
        if sample == 1:
            raise OSError(errno.EIO, "it broke") if path == "system" else OSError("not an image")
        return good_jpeg(sample)

    return SimpleNamespace(labels=np.array([0, 0, 1, 1]), read=read)


@pytest.mark.usefixtures("hasty")
def test_errors_of_a_custom_source_are_classified_in_the_same_way() -> None:
    name = "tests.data.test_reading:made_here"
    content, system = (open_dataset(DatasetSpec(name, path, "train")) for path in ("content", "system"))
    assert isinstance(content, EncodedDataset)
    assert isinstance(system, EncodedDataset)
    assert load_sample(content, VIEW, 3, 0, 1).bad[0].sample == 1
    with pytest.raises(LostError, match="Input/output error"):
        load_sample(system, VIEW, 3, 0, 1)


@pytest.mark.usefixtures("hasty")
def test_pack_ends_with_exit_code_1_and_verify_lists_what_cannot_be_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, errno.EIO, "a/2.jpg")
    assert main(["pack", str(folder), str(tmp_path / "packed"), "--workers", "1"]) == 1
    assert "a/2.jpg cannot be read: Input/output error" in capfd.readouterr().err
    assert not (tmp_path / "packed").exists()
    assert main(["verify", str(folder), "--workers", "1"]) == 1
    assert "BAD  unreadable (train 1)" in capfd.readouterr().out


@pytest.mark.usefixtures("hasty")
def test_a_wrong_path_is_reported_at_once_when_data_is_first_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for act in (
        lambda: detect_source("auto", str(tmp_path / "nowhere")),
        lambda: open_dataset(DatasetSpec("folder", str(tmp_path / "nowhere"), "train")),
        lambda: open_dataset(DatasetSpec("npz", str(tmp_path / "nowhere.npz"), "train")),
        lambda: open_dataset(DatasetSpec("tar", str(tmp_path / "nowhere.tar"), "train")),
    ):
        with pytest.raises(UserError, match="does not exist") as caught:
            act()
        assert not isinstance(caught.value, LostError)
    really, tries = os.scandir, 0

    def scandir(path: str) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return really(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert len(opened(folder)) == 6
    tries = -1_000
    with pytest.raises(LostError, match="Stale file handle"):
        opened(folder)


@pytest.mark.parametrize("kind", ["folder", "npz", "tar"])
def test_pipes_and_devices_are_rejected_as_data_without_waiting(tmp_path: Path, kind: str) -> None:
    place = tmp_path / f"set.{kind}"
    os.mkfifo(place)
    with pytest.raises(UserError, match=r"a pipe, not a regular file|is a file, not a folder"):
        open_dataset(DatasetSpec(kind, str(place), "train"))


def test_a_link_to_a_device_among_the_images_is_named(folder: Path) -> None:
    (folder / "a/9.jpg").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"a/9\.jpg is a link to a device, not a regular file"):
        opened(folder)
    assert main(["verify", str(folder), "--workers", "1"]) == 1


def test_a_restart_waits_for_data_that_the_run_opened_before_then_loses_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's restarts; also of a mount point that is there while the mount is not."""
    recipe = Recipe(data=Data(path=str(folder), batch=2, holdout=0.3, workers=0))
    away, claim = tmp_path / "away", tmp_path / "claimed"
    claim.write_text("a-run")
    world = single_process(CPU)
    folder.rename(away)
    started = time.monotonic()
    with pytest.raises(UserError, match="does not exist") as first:
        open_sets(recipe, world)
    assert not isinstance(first.value, LostError)
    assert time.monotonic() - started < 5
    monkeypatch.setenv(CLAIMED, str(claim))
    with later(lambda: away.rename(folder)):
        assert open_sets(recipe, world).name == "folder"
    folder.rename(away)
    folder.mkdir()
    monkeypatch.setattr(reading, "PAUSES", (0.0, 0.01))
    monkeypatch.setattr("drumline.data.sources.LONGER", (0.01,))
    with pytest.raises(LostError, match="has no class folders"):
        open_sets(recipe, world)


@pytest.mark.slow
def test_a_killed_fork_server_is_a_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, digest = DatasetSpec("folder", str(folder), "train"), opened(folder).digest()
    assert len(list(process_batches(spec, digest, VIEW, 3, REQUESTS, 1))) == 2

    def gone(*args: object) -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection rejected")

    monkeypatch.setattr("multiprocessing.forkserver.connect_to_new_process", gone)
    monkeypatch.setattr("multiprocessing.popen_forkserver.forkserver.connect_to_new_process", gone)
    with pytest.raises(LostError, match="a loader process was killed"):
        list(process_batches(spec, digest, VIEW, 3, REQUESTS, 1))


def test_a_kernel_file_whose_read_would_block_is_rejected() -> None:
    reading_end, writing_end = os.pipe()
    os.set_blocking(reading_end, False)
    try:
        with (
            FileIO(reading_end, "rb") as stream,
            pytest.raises(reading.NotRegular, match=r"a/kmsg\.jpg has no content"),
        ):
            reading._some(stream, 10, "a/kmsg.jpg")
    finally:
        os.close(writing_end)

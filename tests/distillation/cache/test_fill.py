"""Whoever fills a cache, in whatever order and however interrupted: the same bytes; a check finds others."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from drumline.core.errors import UserError
from drumline.distillation.cache import fill as fill_module
from drumline.distillation.cache import folder as cache_module
from drumline.distillation.cache.fill import chosen_chunks, fill, spot_check
from drumline.distillation.cache.folder import Cache, open_cache
from drumline.distillation.cache.rows import Rule
from drumline.parallel.world import single_process
from tests.distillation import cache_ranks
from tests.distillation.cache_ranks import CLASSES, FULL, TOP, contents, feed, filled, key, teacher
from tests.launch.ranks import ROOT, one_thread

HERE = single_process(torch.device("cpu"))
ELSEWHERE = {"device": "another", "torch": "1.0", "kernels": cache_module.DETERMINISTIC}
HALF = Rule(CLASSES, "bfloat16", pooled=cache_ranks.WIDTH)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
    with one_thread():
        yield


def test_outputs_that_are_not_finite_are_rejected_and_not_stored(tmp_path: Path) -> None:
    def broken(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, pooled = teacher()(images)
        return logits.index_fill(0, torch.tensor([3]), float("inf")), pooled

    cache = open_cache(tmp_path, key(), HERE)
    with pytest.raises(
        UserError, match="outputs for samples between 0 and 511 of epoch 0 are NaN or infinite"
    ):
        fill(cache, range(2), broken, feed, HERE)
    assert len(cache.missing(0)) == cache.blocks


def test_a_block_is_a_whole_number_of_chunks() -> None:
    assert 8192 % fill_module.CHUNK == 0
    assert cache_ranks.SMALL_BLOCK % fill_module.CHUNK == 0


@pytest.mark.parametrize("calls", [0, 1, 2, 5, 11])
def test_a_stopped_fill_resumes_to_the_same_bytes(tmp_path: Path, calls: int) -> None:
    assert filled(tmp_path / "at once", HERE)[1]
    asked = iter(range(100))
    cache, whole = filled(tmp_path / "stopped", HERE, stopping=lambda: next(asked) >= calls)
    assert not whole
    assert sum(len(cache.missing(epoch)) for epoch in range(2)) == 6 - calls // 2
    assert filled(tmp_path / "stopped", HERE)[1]
    assert contents(tmp_path / "stopped") == contents(tmp_path / "at once")


@pytest.mark.slow
def test_a_killed_fill_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    program = (
        "import time, torch; from pathlib import Path; from drumline.distillation.cache import folder as cache\n"
        "torch.set_num_threads(1)\n"
        "from drumline.parallel.world import single_process; from tests.distillation import cache_ranks\n"
        "cache.BLOCK, here = cache_ranks.SMALL_BLOCK, single_process(torch.device('cpu'))\n"
        f"cache_ranks.filled(Path({str(killed)!r}), here, range(4), stopping=lambda: time.sleep(0.2))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as run:
        while run.poll() is None and len(list(killed.glob("*/*.rows"))) < 4:
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    cache = open_cache(killed, key(), HERE)
    assert 0 < sum(len(cache.missing(epoch)) for epoch in range(4)) <= 8
    assert filled(killed, HERE, range(4))[1]
    assert filled(tmp_path / "at once", HERE, range(4))[1]
    assert contents(killed) == contents(tmp_path / "at once")


def test_temporary_files_of_a_killed_fill_are_removed(tmp_path: Path) -> None:
    cache, _ = filled(tmp_path, HERE, range(1))
    before = contents(tmp_path)
    cache.path(0, 1).unlink()
    stale = [tmp_path / "seen-1.tmp", cache.path(0, 1).with_name("block-0001.rows.0a.tmp")]
    for path in stale:
        path.touch()
    assert filled(tmp_path, HERE, range(1))[1]
    assert contents(tmp_path) == before


def test_only_missing_blocks_are_computed(tmp_path: Path) -> None:
    cache, _ = filled(tmp_path, HERE)
    before, seen = contents(tmp_path), []

    def counting(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen.append(len(images))
        return teacher()(images)

    assert fill(cache, range(2), counting, feed, HERE)
    assert seen == []
    cache.path(1, 2).unlink()
    assert fill(cache, range(2), counting, feed, HERE)
    assert seen == [256, 256]
    (cache.epoch_folder(0) / "sha256.txt").unlink()
    assert fill(cache, range(2), counting, feed, HERE)
    assert seen == [256, 256]
    assert contents(tmp_path) == before
    assert fill(cache, range(1, 3), counting, feed, HERE)
    assert len(seen) == 2 + 6


def test_an_epoch_gets_its_checksums_as_soon_as_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_module, "SYNC_EVERY", 1)
    asked = iter(range(100))
    cache, _ = filled(tmp_path, HERE, range(3), stopping=lambda: next(asked) >= 13)
    assert [cache.whole(epoch) for epoch in range(3)] == [True, True, False]


class Halted:
    """A fill in a thread of its own that stands still in the middle of its first file until it is let go."""

    def __init__(self, cache: Cache, epochs: range, monkeypatch: pytest.MonkeyPatch) -> None:
        self._on, self.in_flight, self.whole = threading.Event(), threading.Event(), False
        real = cache_module.write_file

        def write_slowly(path: Path, write: Callable[[Path], None]) -> None:
            def wait(temporary: Path) -> None:
                write(temporary)
                self.in_flight.set()
                assert self._on.wait(30)

            real(path, wait)

        def work() -> None:
            self.whole = fill(cache, epochs, teacher(), feed, HERE)

        monkeypatch.setattr(cache_module, "write_file", write_slowly)
        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert self.in_flight.wait(30)

    def let_go(self) -> bool:
        """Whether it filled everything."""
        self._on.set()
        self._thread.join(30)
        return self.whole


def test_a_second_run_is_rejected_while_the_first_one_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = filled(tmp_path / "shared", HERE, range(1))
    first = Halted(cache, range(2), monkeypatch)
    (written,) = cache.epoch_folder(1).iterdir()
    with pytest.raises(UserError) as error:
        filled(cache.folder, HERE)
    kept = list(cache.epoch_folder(1).iterdir())
    # Whoever has nothing to fill is not kept out.
    reads = fill(cache, range(1), teacher(), feed, HERE)
    assert first.let_go()
    assert kept == [written]
    assert reads
    assert error.value.what == f"distill.cache = {cache.folder}: a different run is filling it"
    assert error.value.fix == "wait for it, or use a different folder"
    assert filled(cache.folder, HERE, range(3))[1]
    assert filled(tmp_path / "alone", HERE, range(3))[1]
    assert contents(cache.folder) == contents(tmp_path / "alone")


def test_a_stopped_or_failed_fill_releases_the_lock(tmp_path: Path) -> None:
    def broken(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise RuntimeError("no teacher")

    cache = open_cache(tmp_path, key(), HERE)
    assert not fill(cache, range(1), teacher(), feed, HERE, stopping=lambda: True)
    assert list(contents(tmp_path)) == ["manifest.json"]
    with pytest.raises(RuntimeError, match="no teacher"):
        fill(cache, range(1), broken, feed, HERE)
    assert list(contents(tmp_path)) == ["manifest.json"]
    (tmp_path / cache_module.LOCK).touch()  # what kill -9 leaves
    assert filled(tmp_path, HERE, range(1))[1]
    assert cache_module.LOCK not in contents(tmp_path)


def test_blocks_that_a_different_run_filled_while_this_one_waited_are_not_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real, seen = open_cache(tmp_path, key(), HERE), fill_module.sole_filler, []

    def late(folder: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(fill_module, "sole_filler", real)
        seen.append(filled(folder, HERE)[1])
        return real(folder)

    def never(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError

    monkeypatch.setattr(fill_module, "sole_filler", late)
    assert fill(cache, range(2), never, feed, HERE)
    assert seen == [True]
    assert cache_module.LOCK not in contents(tmp_path)


def test_a_lock_file_that_its_run_has_just_removed_does_not_count_as_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path, calls = fcntl.flock, tmp_path / cache_module.LOCK, []

    def just_removed(file: IO[bytes], kind: int) -> None:
        calls.append(file)
        if len(calls) <= 2:  # at the end of the run that had it: once for good, once a third has come
            path.unlink()
        if len(calls) == 2:
            path.touch()
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", just_removed)
    with cache_module.sole_filler(tmp_path):
        assert len(calls) == 3
        assert path.exists()
        with (
            pytest.raises(UserError, match="a different run is filling it"),
            cache_module.sole_filler(tmp_path),
        ):
            pass
    assert not path.exists()


def test_a_folder_that_a_different_run_has_just_created_keeps_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cache_module.sole_filler

    def late(folder: Path) -> AbstractContextManager[None]:
        monkeypatch.setattr(cache_module, "sole_filler", real)
        open_cache(folder, key(), HERE)
        return real(folder)

    monkeypatch.setattr(cache_module, "sole_filler", late)
    with pytest.raises(UserError, match=r"run\.seed: 7 → 8"):
        open_cache(tmp_path, key(seed=8), HERE)
    assert open_cache(tmp_path, key(), HERE).key == key()


def test_a_damaged_block_of_an_incomplete_epoch_is_rejected(tmp_path: Path) -> None:
    cache, _ = filled(tmp_path, HERE, range(1))
    cache.path(0, 0).unlink()
    content = bytearray(cache.path(0, 2).read_bytes())
    content[77] ^= 8
    cache.path(0, 2).write_bytes(content)
    with pytest.raises(UserError, match=r"block-0002.rows: its checksum does not match") as error:
        filled(tmp_path, HERE, range(1))
    assert "delete this file" in error.value.fix
    cache.path(0, 2).unlink()
    assert filled(tmp_path, HERE, range(1))[1]


def test_a_disk_that_is_too_small_is_reported_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, blocks = FULL.row_bytes, 3 * 10
    needed = 10 * 1438 * row + blocks * 64
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    cache = open_cache(tmp_path, key(), HERE)

    def never(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        raise AssertionError

    with pytest.raises(UserError, match=r"needs 922 kB \(30 blocks\), but the disk has 922 kB free"):
        fill(cache, range(10), never, feed, HERE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert fill(cache, range(10), teacher(), feed, HERE)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.rows"))
    assert total == needed


def test_a_disk_that_fills_up_is_reported_and_complete_blocks_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = cache_module.write_file, []

    def full(path: Path, write: object) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        real(path, write)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_module, "write_file", full)
    with pytest.raises(UserError, match=r"cannot write .*block-0002.rows: No space left") as error:
        filled(tmp_path, HERE, range(1))
    assert "free disk space" in error.value.fix
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
    assert filled(tmp_path, HERE, range(1))[1]


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    if begun:
        open_cache(tmp_path / "cache", key(), HERE)

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot write .*cache.*: Read-only file system") as error:
        filled(tmp_path / "cache", HERE)
    assert "a writable folder" in error.value.fix


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Whole caches of two epochs, by the rule's name."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for name, rule in RULES.items():
            folder = tmp_path_factory.mktemp(name)
            assert filled(folder, HERE, rule=rule)[1]
            found[name] = contents(folder)
        torch.set_num_threads(threads)
    return found


RULES = {"full": FULL, "half": HALF, "top": TOP}


def laid_out(files: dict[str, bytes], folder: Path, rule: Rule) -> Cache:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return open_cache(folder, key(rule), HERE)


@pytest.mark.parametrize("name", RULES)
def test_a_sound_cache_passes_the_spot_check(
    tmp_path: Path, sound: dict[str, dict[str, bytes]], name: str
) -> None:
    cache = laid_out(sound[name], tmp_path, RULES[name])
    assert spot_check(cache, range(2), teacher(RULES[name]), feed, HERE, count=99) == ""


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("chunk", [0, 1])
def test_one_changed_bit_with_valid_checksums_is_detected(
    tmp_path: Path, sound: dict[str, dict[str, bytes]], name: str, chunk: int
) -> None:
    cache = laid_out(sound[name], tmp_path, RULES[name])
    request = chosen_chunks(cache, range(2), 2)[chunk]
    sample = int(request.samples[9])
    block, row = divmod(sample, cache_ranks.SMALL_BLOCK)
    rows = cache.read(request.epoch, block)[0].copy()
    rows[row, 0] ^= 1
    cache.write(request.epoch, block, rows)
    words = f"1 of {len(request.samples)} rows of epoch {request.epoch} .* first that of sample {sample};"
    with pytest.raises(UserError, match=words) as error:
        spot_check(cache, range(2), teacher(RULES[name]), feed, HERE)
    assert "a different teacher, code or machine" in error.value.what
    assert "delete this one" in error.value.fix
    elsewhere = Cache(cache.folder, cache.key, ELSEWHERE)
    word = spot_check(elsewhere, range(2), teacher(RULES[name]), feed, HERE)
    assert "filled on another, torch 1.0" in word
    assert "tolerance" in word


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_different_teacher_is_detected_with_and_without_tolerance(
    tmp_path: Path, sound: dict[str, dict[str, bytes]], name: str, elsewhere: bool
) -> None:
    cache = laid_out(sound[name], tmp_path, RULES[name])
    if elsewhere:
        cache = Cache(cache.folder, cache.key, ELSEWHERE)
    with pytest.raises(UserError, match=r"256 of 256 rows|158 of 158 rows") as error:
        spot_check(cache, range(2), teacher(RULES[name], seed=1), feed, HERE)
    largest = float(error.value.what.split("logits differ by up to ")[1].split(":")[0].split(",")[0])
    assert 0.5 < largest < 50


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("share", "passes"), [(0.5, True), (1.5, False)])
def test_the_tolerance_allows_rounding_and_nothing_larger(
    tmp_path: Path, sound: dict[str, dict[str, bytes]], name: str, share: float, passes: bool
) -> None:
    rule = RULES[name]
    here = laid_out(sound[name], tmp_path, rule)
    cache = Cache(here.folder, here.key, ELSEWHERE)
    tolerance = 1e-3 if rule.numbers is torch.float32 else 0.05
    run = teacher(rule)

    def rounding(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, pooled = run(images)
        off = share * tolerance * max(1.0, float(logits.abs().max()))
        return (logits.float() + off).to(rule.numbers), pooled

    if passes:
        spot_check(cache, range(2), rounding, feed, HERE)
    else:
        with pytest.raises(UserError, match=r"256 of 256 rows|158 of 158 rows"):
            spot_check(cache, range(2), rounding, feed, HERE)
    with pytest.raises(UserError):
        spot_check(here, range(2), rounding, feed, HERE)


def test_a_nan_output_is_never_within_tolerance(tmp_path: Path, sound: dict[str, dict[str, bytes]]) -> None:
    here = laid_out(sound["full"], tmp_path, FULL)
    cache = Cache(here.folder, here.key, ELSEWHERE)

    def broken(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, pooled = teacher()(images)
        return logits * float("nan"), pooled

    with pytest.raises(UserError, match="differ by up to inf"):
        spot_check(cache, range(2), broken, feed, HERE)


def test_features_are_compared_even_if_the_logits_match(
    tmp_path: Path, sound: dict[str, dict[str, bytes]]
) -> None:
    here = laid_out(sound["half"], tmp_path, HALF)
    run = teacher(HALF)

    def other(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, pooled = run(images)
        assert pooled is not None
        return logits, pooled + 0.5

    for cache in (here, Cache(here.folder, here.key, ELSEWHERE)):
        with pytest.raises(UserError, match=r"logits differ by up to 0, features by up to 0\.5"):
            spot_check(cache, range(2), other, feed, HERE)


def test_the_chosen_chunks_depend_on_seed_and_epochs_alone(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "a", key(), HERE)
    other = open_cache(tmp_path / "b", key(seed=8), HERE)

    def places(of: Cache, epochs: range, count: int) -> list[tuple[int, int]]:
        return [(request.epoch, int(request.samples[0])) for request in chosen_chunks(of, epochs, count)]

    assert places(cache, range(9), 3) == places(cache, range(9), 3)
    assert places(cache, range(9), 3) != places(other, range(9), 3)
    assert places(cache, range(9), 3) != places(cache, range(10), 3)
    everything = places(cache, range(3, 5), 99)
    assert sorted(everything) == [(epoch, first) for epoch in (3, 4) for first in range(0, 1438, 256)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, object]]]]:
    found = {}
    for size in (2, 3):
        folder = tmp_path_factory.mktemp(f"world{size}")
        found[size] = folder, cache_ranks.results(size, folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_any_number_of_processes_fills_the_same_folder(
    tmp_path: Path, worlds: dict[int, tuple[Path, list[dict[str, object]]]], size: int
) -> None:
    assert filled(tmp_path, HERE, range(4))[1]
    folder, ranks = worlds[size]
    assert [rank["filled"] for rank in ranks] == [True] * size
    assert contents(folder / "cache") == contents(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_stop_request_on_one_rank_stops_all_of_them(
    worlds: dict[int, tuple[Path, list[dict[str, object]]]], size: int
) -> None:
    _, ranks = worlds[size]
    assert [rank["stopped"] for rank in ranks] == [False] * size
    assert {rank["after_stop"] for rank in ranks} <= {12 - size, 12 - 2 * size + 1}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_raise_the_same_error(
    worlds: dict[int, tuple[Path, list[dict[str, object]]]], size: int
) -> None:
    _, ranks = worlds[size]
    assert {rank["checked"] for rank in ranks} == {""}
    for name, words in {
        "other_teacher": "a different teacher, code or machine",
        "other_key": "run.seed: 7 → 8",
        "unseen": "rank 1: distill.cache: ",
        "apart": "rank 1: distill.cache = ",
        "taken": "a different run is filling it",
    }.items():
        (message,) = {str(rank[name]) for rank in ranks}
        assert words in message, (name, message)
    assert cache_module.SHARED_FOLDER in str(ranks[0]["unseen"])
    assert "not the folder that rank 0 sees" in str(ranks[0]["apart"])
    assert [rank["free_again"] for rank in ranks] == [True] * size


def test_outputs_of_nondeterministic_kernels_are_compared_with_a_tolerance(
    tmp_path: Path, sound: dict[str, dict[str, bytes]]
) -> None:
    here = laid_out(sound["full"], tmp_path, RULES["full"])
    fastest = Cache(here.folder, here.key, {**here.machine, "kernels": "fastest kernels"})
    message = spot_check(fastest, range(2), teacher(RULES["full"]), feed, HERE)
    assert "fastest kernels" in message
    assert "tolerance" in message

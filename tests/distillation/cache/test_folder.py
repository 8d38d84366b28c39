"""A row gives back what was put in, a folder serves one key only, and no damaged byte is used."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.core.errors import UserError
from drumline.data.feed.sampler import Request, rank_slice, training_requests
from drumline.distillation.cache import folder as cache_module
from drumline.distillation.cache.folder import Cache, open_cache
from drumline.distillation.cache.rows import decode
from drumline.distillation.cache.teacher import (
    CachedRows,
    with_rows,
)
from drumline.parallel.world import single_process
from tests.distillation import cache_ranks
from tests.distillation.cache_ranks import CLASSES, SEED, feed, filled, key, teacher
from tests.launch.ranks import one_thread

CPU = torch.device("cpu")
HERE = single_process(CPU)
TYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
    with one_thread():
        yield


def test_opening_with_the_same_key_changes_nothing(tmp_path: Path) -> None:
    first = open_cache(tmp_path / "a" / "b", key(), HERE)
    before = cache_ranks.contents(tmp_path)
    assert open_cache(tmp_path / "a" / "b", key(), HERE) == first
    assert cache_ranks.contents(tmp_path) == before
    assert list(before) == ["a/b/manifest.json"]


def test_a_folder_with_other_files_is_rejected_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("")
    with pytest.raises(UserError, match=r"not a cache \(it has holiday.jpg") as error:
        open_cache(tmp_path, key(), HERE)
    assert "new folder" in error.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_leftovers_of_a_killed_run_count_as_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "manifest.json.0a1b2c3d.tmp").write_text("{")
    (tmp_path / "filling.lock").touch()
    assert open_cache(tmp_path, key(), HERE).key == key()


def test_a_file_instead_of_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*cache: Not a directory"):
        open_cache(tmp_path / "cache", key(), HERE)


def changed_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a whole cache of two epochs."""
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "BLOCK", cache_ranks.SMALL_BLOCK)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        assert filled(folder, HERE)[1]
        torch.set_num_threads(threads)
    return cache_ranks.contents(folder)


@pytest.fixture
def whole(tmp_path: Path, sound: dict[str, bytes]) -> Cache:
    for name, content in sound.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return open_cache(tmp_path, key(), HERE)


def requests(epochs: range = range(2), batch: int = 64) -> list[Request]:
    per_epoch = 1438 // batch
    return list(
        training_requests(
            seed=SEED,
            samples=1438,
            batch=batch,
            first_step=epochs.start * per_epoch,
            last_step=epochs.stop * per_epoch,
            local=slice(0, batch),
        )
    )


def read_all(cache: Cache) -> list[torch.Tensor]:
    return list(CachedRows(cache).for_requests(requests()))


def read_some(cache: Cache) -> None:
    """One row of each epoch is enough: no row is given out before its epoch is verified."""
    list(CachedRows(cache).for_requests([Request(0, np.array([3])), Request(1, np.array([3]))]))


def test_a_changed_byte_in_any_file_is_rejected_by_name(whole: Cache, sound: dict[str, bytes]) -> None:
    assert len(sound) == 1 + 2 * (3 + 1)
    for name, content in sound.items():
        path = whole.folder / name
        places = {0, len(content) // 2, len(content) - 1}
        if name == "epoch-00001/block-0001.rows":
            places |= set(range(len(content) - 64, len(content)))  # each byte of the trailer
        if name.endswith("txt"):
            places |= {63, 64, 65, 66, content.index(b"\n")}
        for place in places:
            changed_byte(path, place)
            with pytest.raises(UserError) as error:
                read_some(open_cache(whole.folder, key(), HERE))
            assert str(path) in error.value.what, (name, place, error.value.what)
            assert "delete this" in error.value.fix
            path.write_bytes(content)
    read_some(whole)


@pytest.mark.parametrize(("length", "reason"), [(0, "0 bytes"), (100, "100 bytes"), (None, "No such file")])
def test_a_short_or_missing_block_is_rejected_by_name(whole: Cache, length: int | None, reason: str) -> None:
    path = whole.path(1, 2)
    if length is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match=f"block-0002.rows: (has )?{reason}"):
        read_all(whole)


@pytest.mark.parametrize("more", [b"x", b"x\n"])
def test_a_list_of_checksums_with_extra_lines_is_rejected(whole: Cache, more: bytes) -> None:
    path = whole.epoch_folder(0) / "sha256.txt"
    path.write_bytes(path.read_bytes() + more)
    with pytest.raises(UserError, match=r"sha256.txt: does not list 3 blocks"):
        read_all(whole)


def test_an_intact_block_in_the_wrong_place_is_rejected(whole: Cache) -> None:
    whole.path(1, 0).write_bytes(whole.path(1, 1).read_bytes())
    with pytest.raises(UserError, match="is not block 0 of epoch 1"):
        read_all(whole)


def test_damage_is_reported_when_its_epoch_is_needed_and_not_before(whole: Cache) -> None:
    changed_byte(whole.path(1, 1), 5)
    first = list(CachedRows(whole).for_requests(requests(range(1))))
    assert len(first) == 1438 // 64
    rows = CachedRows(whole).for_requests(requests())
    for _ in first:
        next(rows)
    with pytest.raises(UserError, match=r"epoch-00001/block-0001.rows: its checksum does not match"):
        next(rows)


def test_an_epoch_that_is_not_filled_is_rejected(whole: Cache) -> None:
    with pytest.raises(UserError, match=r"epoch 2 is not filled \(sha256.txt is missing\)") as error:
        list(CachedRows(whole).for_requests(requests(range(2, 3))))
    assert "fills what is missing" in error.value.fix


def test_the_checksums_are_those_that_sha256sum_reads(whole: Cache) -> None:
    folder = whole.epoch_folder(1)
    lines = (folder / "sha256.txt").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256((folder / f'block-000{n}.rows').read_bytes()).hexdigest()}  block-000{n}.rows"
        for n in range(3)
    ]
    subprocess.run(["sha256sum", "-c", "--strict", "sha256.txt"], cwd=folder, check=True, capture_output=True)


def live(epoch: int, samples: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of samples, each computed in the chunk that it belongs to."""
    logits, pooled = torch.empty(len(samples), CLASSES), torch.empty(len(samples), cache_ranks.WIDTH)
    run = teacher()
    for first in range(0, 1438, 256):
        ids = np.arange(first, min(first + 256, 1438))
        images = next(feed([Request(epoch, ids)])).images
        images = torch.cat([images, images.new_zeros(256 - len(ids), 8, 8, 1)])
        with torch.no_grad():
            out, features = run(images)
        where = np.flatnonzero((samples >= first) & (samples < first + 256))
        assert features is not None
        logits[where], pooled[where] = out[samples[where] - first], features[samples[where] - first]
    return logits, pooled


@pytest.mark.parametrize("world", [1, 3])
def test_the_rows_of_a_request_are_the_live_outputs_bit_for_bit(whole: Cache, world: int) -> None:
    for epoch in range(2):
        for rank in range(world):
            part = rank_slice(100, rank, world)
            asked = [
                Request(epoch, request.samples[part]) for request in requests(range(epoch, epoch + 1), 100)
            ]
            stored = list(CachedRows(whole).for_requests(asked))
            assert len(stored) == len(asked)
            logits, pooled = live(epoch, np.concatenate([request.samples for request in asked]))
            back, features = decode(torch.cat(stored), whole.key.rule)
            assert torch.equal(back, logits)
            assert features is not None
            assert torch.equal(features, pooled)
    assert not torch.equal(live(0, np.arange(9))[0], live(1, np.arange(9))[0])


def test_batches_carry_the_rows_of_their_own_samples(whole: Cache) -> None:
    asked = requests(batch=100)
    batches = with_rows(feed(asked), iter(asked), whole, CPU)
    for request, batch in zip(asked, batches, strict=True):
        assert batch.samples.tolist() == request.samples.tolist()
        logits, _ = decode(batch.extra, whole.key.rule)
        if request.samples[0] % 5 == 0:
            assert torch.equal(logits, live(request.epoch, request.samples)[0])


def test_closing_early_ends_the_thread_and_the_batches(whole: Cache) -> None:
    before, source = threading.active_count(), feed(requests())
    batches = with_rows(source, requests(), whole, CPU)
    next(batches)
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(source)


def test_a_complete_cache_may_be_read_only(whole: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (whole.folder / "left behind.tmp").touch()
    for name in ("mkdir", "touch", "unlink", "replace", "write_bytes"):
        monkeypatch.setattr(Path, name, refuse)
    assert filled(whole.folder, HERE)[1]
    assert len(read_all(whole)) == len(requests())

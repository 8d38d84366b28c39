"""`drumline pack`: the same bytes however it went, the source's samples under their ids, and nothing half-written."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from drumline.cli import main as drumline
from drumline.cli.pack import main as pack
from drumline.cli.pack import summary
from drumline.core.errors import UserError
from drumline.data.image.decode import decode
from drumline.data.image.resize import resize
from drumline.data.packed import format as packed_format
from drumline.data.packed import stored
from drumline.data.packed import write as work
from drumline.data.packed.format import PackOptions, SampleKind, read_manifest
from drumline.data.packed.write import pack_set
from drumline.data.sources import ArrayDataset, DatasetSpec, EncodedDataset, open_dataset
from drumline.data.sources.packed import PackedFiles

RNG = np.random.default_rng(7)


def picture(width: int, height: int, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (height, width, 3), np.uint8)).save(file, format, **options)
    return file.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


GREY = io.BytesIO()
Image.fromarray(RNG.integers(0, 256, (9, 7), np.uint8)).save(GREY, "JPEG")
WHOLE = picture(60, 40)
CONTENTS = {
    "train/cat/1.jpg": picture(30, 20),
    "train/cat/2.png": picture(10, 25, "PNG"),
    "train/cat/sub/ünï 猫.jpg": picture(24, 24, quality=90, subsampling=2),
    "train/dog/turned.jpg": picture(20, 30, exif=exif(6)),
    "train/dog/turned.png": picture(20, 30, "PNG", exif=exif(8)),
    "train/dog/grey.jpg": GREY.getvalue(),
    "train/dog/cut.jpg": WHOLE[: len(WHOLE) // 2],
    "train/emu/empty.jpg": b"",
    "train/emu/page.jpg": b"<html>not found</html>",
    "train/emu/progressive.jpg": picture(40, 30, progressive=True),
    "val/cat/1.jpg": picture(33, 21),
    "val/emu/2.webp": picture(21, 33, "WEBP", lossless=True),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data") / "photos"
    for name, content in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "train/dog" / os.fsdecode(b"caf\xe9\n'.jpg")).write_bytes(picture(16, 12))
    return root


@pytest.fixture(scope="module")
def few(photos: Path) -> Path:
    """As few as show it: packing is killed at each of its changes on disk."""
    root = photos.parent / "few"
    for name in ("train/cat/1.jpg", "train/dog/grey.jpg", "train/emu/empty.jpg", "val/cat/1.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(CONTENTS[name])
    return root


def silent(_: str) -> None:
    pass


def packed(
    source: Path | str, out: Path, workers: int = 1, force: bool = False, kind: str = "auto", **options: Any
) -> Path:
    return pack_set(kind, str(source), out, PackOptions(**options), workers, force, silent)


def opened(folder: Path, split: str, source: str = "packed") -> Any:
    return open_dataset(DatasetSpec(source, str(folder), split))  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def error_of(call: Callable[[], Any]) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.fix
    return caught.value


# What comes out


def test_files_are_kept_byte_for_byte_under_their_ids(photos, tmp_path):
    out = packed(photos, tmp_path / "out")
    for split in ("train", "eval"):
        ours, theirs = opened(out, split), opened(photos, split, "folder")
        assert isinstance(ours, PackedFiles)
        assert isinstance(theirs, EncodedDataset)
        assert ours.classes == theirs.classes
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        for i in range(len(theirs)):
            assert ours.read(i) == theirs.read(i)
            shown = os.fsencode(theirs.where(i)).decode("utf-8", "backslashreplace")
            assert ours.where(i) == shown.replace(f"{photos}/", f"{out}:")
    assert sorted(content(out)) == sorted(
        ["manifest.json"]
        + [f"{split}{end}" for split in ("train", "eval") for end in ("-00000.bin", ".index", ".names")]
    )
    names = [opened(out, "train").where(i).removeprefix(f"{out}:") for i in range(len(opened(out, "train")))]
    assert "train/cat/sub/ünï 猫.jpg" in names
    assert "train/dog/caf\\xe9\n'.jpg" in names


def test_sizes_kinds_and_orientations_are_those_of_the_files(photos, tmp_path):
    source = opened(packed(photos, tmp_path / "out"), "train")
    for i in range(len(source)):
        name = source.where(i)
        try:
            image = Image.open(io.BytesIO(source.read(i)))
        except OSError:
            assert (source.widths[i], source.heights[i], source.kinds[i]) == (0, 0, SampleKind.OTHER)
            continue
        assert (source.widths[i], source.heights[i]) == image.size
        assert source.kinds[i] == (SampleKind.JPEG if name.endswith(".jpg") else SampleKind.OTHER)
        if source.kinds[i] == SampleKind.JPEG:
            assert source.orientations[i] == image.getexif().get(0x0112, 1)


@pytest.mark.parametrize("how", ["ignore", "apply"])
def test_raw_sets_give_the_pixels_of_the_originals(photos, tmp_path, how):
    out = packed(photos, tmp_path / "out", raw=True)
    for split in ("train", "eval"):
        ours, theirs = opened(out, split), opened(photos, split, "folder")
        for i in range(len(theirs)):
            try:
                expected = np.asarray(decode(theirs.read(i), "x", how))
            except UserError:
                assert ours.read(i) == theirs.read(i)
                assert (ours.widths[i], ours.kinds[i]) == (0, SampleKind.OTHER)
                continue
            assert ours.kinds[i] == SampleKind.RGB
            np.testing.assert_array_equal(np.asarray(decode(ours.read(i), "x", how)), expected)
            if how == "ignore":
                np.testing.assert_array_equal(ours.pixels(i), expected)


@pytest.mark.parametrize("raw", [False, True])
def test_resize_short_shrinks_by_the_exact_resize_and_leaves_small_images_alone(photos, tmp_path, raw):
    out = packed(photos, tmp_path / "out", resize_short=21, raw=raw)
    assert read_manifest(out).options == PackOptions(resize_short=21, raw=raw)
    ours, theirs = opened(out, "train"), opened(photos, "train", "folder")
    for i in range(len(theirs)):
        try:
            original = np.asarray(decode(theirs.read(i), "x"))
        except UserError:
            assert ours.read(i) == theirs.read(i)
            continue
        height, width, _ = original.shape
        if min(width, height) <= 21:
            assert raw or ours.read(i) == theirs.read(i)
            np.testing.assert_array_equal(np.asarray(decode(ours.read(i), "x")), original)
            continue
        size = (21, int(21 * height / width)) if width <= height else (int(21 * width / height), 21)
        expected = resize(original, size)
        result = np.asarray(decode(ours.read(i), "x"))
        assert (ours.widths[i], ours.heights[i]) == size == result.shape[1::-1]
        if raw:
            np.testing.assert_array_equal(result, expected)
        else:
            assert np.abs(result.astype(int) - expected).mean() < 6
            assert Image.open(io.BytesIO(ours.read(i))).layer[0][1:3] == (1, 1)  # no chroma subsampling


def test_a_resized_file_keeps_its_orientation(tmp_path):
    for name, data in (("a/1.jpg", picture(60, 90, exif=exif(6))), ("b/1.jpg", picture(9, 9))):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(data)
    source = opened(packed(tmp_path / "in", tmp_path / "out", resize_short=20), "train")
    assert source.orientations[0] == 6
    assert decode(source.read(0), "x", "ignore").size == (20, 30)
    assert decode(source.read(0), "x", "apply").size == (30, 20)


def test_a_packed_set_of_arrays_opens_as_arrays_with_the_sources_name(tmp_path):
    images = RNG.integers(0, 256, (20, 5, 6, 3), np.uint8)
    labels = np.arange(20) % 4
    np.savez(tmp_path / "set.npz", x_train=images, y_train=labels, x_test=images[:3], y_test=labels[:3])
    for options in ({}, {"raw": True}, {"shard_mb": 1}):
        out = packed(tmp_path / "set.npz", tmp_path / "out", force=True, **options)
        train, evaluation = opened(out, "train"), opened(out, "eval")
        assert isinstance(train, ArrayDataset)
        assert train.name == "npz"
        np.testing.assert_array_equal(train.images, images)
        np.testing.assert_array_equal(evaluation.images, images[:3])
        np.testing.assert_array_equal(train.labels, labels)
    grey = opened(packed("", tmp_path / "digits", kind="digits"), "eval")
    np.testing.assert_array_equal(grey.images, opened(Path(), "eval", "digits").images)
    small = opened(packed("", tmp_path / "small", kind="digits", resize_short=4), "train")
    assert small.shape == (4, 4, 1)


def test_holdout_is_stored_as_the_source_would_divide(tmp_path):
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(8):
            (tmp_path / "in" / name / f"{i}.png").write_bytes(picture(4, 4, "PNG"))
    out = packed(tmp_path / "in", tmp_path / "out", holdout=0.25)
    undivided = packed(tmp_path / "in", tmp_path / "whole")
    assert read_manifest(undivided).eval is None
    for split in ("train", "eval"):
        theirs = open_dataset(DatasetSpec("folder", str(tmp_path / "in"), split, 0.25))  # type: ignore[arg-type]
        later = open_dataset(DatasetSpec("packed", str(undivided), split, 0.25))  # type: ignore[arg-type]
        assert isinstance(theirs, EncodedDataset)
        expected = [theirs.read(i) for i in range(len(theirs))]
        assert [opened(out, split).read(i) for i in range(len(theirs))] == expected
        assert isinstance(later, EncodedDataset)
        assert [later.read(i) for i in range(len(later))] == expected


def test_a_tar_and_a_packed_set_can_be_packed(photos, tmp_path):
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", photos.parent, photos.name], check=True)
    direct = packed(photos, tmp_path / "direct", raw=True)
    from_tar = packed(tmp_path / "x.tar", tmp_path / "from_tar", raw=True)
    again = packed(direct, tmp_path / "again")
    for split in ("train", "eval"):
        shard = f"{split}-00000.bin"
        assert (
            (direct / shard).read_bytes() == (from_tar / shard).read_bytes() == (again / shard).read_bytes()
        )


# However it went


def test_shards_have_at_most_the_requested_size(tmp_path):
    (tmp_path / "in/a").mkdir(parents=True)
    for i in range(5):
        (tmp_path / f"in/a/{i}.jpg").write_bytes(os.urandom(400_000))
    (tmp_path / "in/a/9.jpg").write_bytes(os.urandom(2_000_000))
    (tmp_path / "in/b").mkdir()
    (tmp_path / "in/b/1.jpg").write_bytes(b"x")
    out = packed(tmp_path / "in", tmp_path / "out", shard_mb=1)
    assert read_manifest(out).train.shards == (800_000, 800_000, 400_000, 2_000_000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"raw": True}, {"resize_short": 16}])
def test_any_number_of_workers_gives_the_same_bytes(photos, tmp_path, options, monkeypatch):
    monkeypatch.setattr(stored, "CHUNK", 2)
    one = content(packed(photos, tmp_path / "1", workers=1, **options))
    for workers in (2, 3):
        assert content(packed(photos, tmp_path / f"{workers}", workers=workers, **options)) == one


MOMENTS = (
    (packed_format, "_append"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
)


def killed_at(moment: int, before: bool, call: Callable[[], Any]) -> bool:
    """Runs `call` in a child that dies as by kill -9 at its n-th change on disk, just before or after it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    try:
        seen = 0

        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **kwargs: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == moment and before:
                    os._exit(9)
                result = real(*args, **kwargs)
                if seen == moment:
                    os._exit(9)
                return result

            return step

        for place, name in MOMENTS:
            setattr(place, name, deadly(getattr(place, name)))
        work.COMMIT_SECONDS = 0.0
        call()
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("before", [True, False])
def test_a_pack_killed_at_any_change_on_disk_continues_to_the_same_bytes(few, tmp_path, before, monkeypatch):
    monkeypatch.setattr(
        os, "fsync", lambda _: None
    )  # for speed: a killed process loses nothing it has written
    whole = content(packed(few, tmp_path / "whole"))
    moment, killed = 0, True
    while killed:
        moment += 1
        out = tmp_path / f"out{moment}"
        killed = killed_at(moment, before, lambda out=out: packed(few, out))
        if out.exists():
            assert content(out) == whole, "under its final name it is whole"
        else:
            assert content(packed(few, out)) == whole
        assert not out.with_name(f"{out.name}.partial").exists()
    assert moment > 40


@pytest.mark.slow
def test_a_pack_killed_while_it_replaces_a_set_leaves_one_of_the_two(few, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    old = content(packed(few, tmp_path / "old", raw=True))
    new = content(packed(few, tmp_path / "new"))
    for before in (True, False):
        moment, killed = 40, True
        while killed:
            moment += 1
            out = tmp_path / f"out{moment}{before}"
            packed(few, out, raw=True)
            killed = killed_at(moment, before, lambda out=out: packed(few, out, force=True))
            places = [out, out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.replaced")]
            assert any(place.exists() and content(place) in (old, new) for place in places)
            assert content(packed(few, out, force=True)) == new
            assert not places[1].exists()
            assert not places[2].exists()


SCRIPT = """
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    from drumline.data.packed import write as work
    from drumline.data.packed import stored
    from drumline.data.packed.format import PackOptions

    def slowly(self, *args, add=work.SplitWriter.add):
        time.sleep(0.01)
        add(self, *args)

    work.SplitWriter.add, work.COMMIT_SECONDS, stored.CHUNK = slowly, 0.01, 1
    work.pack_set("folder", sys.argv[1], Path(sys.argv[2]), PackOptions(resize_short=32), 2, False, lambda text: None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pack_stopped_at_random_moments_continues_to_the_same_bytes_and_leaves_no_process(tmp_path, number):
    for i in range(60):
        file = tmp_path / f"in/{'abc'[i % 3]}/{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(40 + i, 50))
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    whole = content(packed(tmp_path / "in", tmp_path / "whole", resize_short=32))
    note = tmp_path / "out.partial" / work.PROGRESS
    moments, most = random.Random(3), 0
    for stop_after in (-1, 0, 15, 35, None):
        command = [sys.executable, script, tmp_path / "in", out]
        before = note.stat().st_mtime_ns if note.exists() else 0
        errors = (tmp_path / "errors").open("ab")
        with errors, subprocess.Popen(command, stderr=errors, start_new_session=True) as process:
            # Not before it has packed something: Ctrl-C would end an interpreter that is still starting.
            while stop_after is not None and (
                not note.exists() or note.stat().st_mtime_ns == before or noted(note) <= stop_after
            ):
                assert process.poll() is None
                time.sleep(0.01)
            children = []
            if stop_after is not None:
                time.sleep(moments.uniform(0.0, 0.05))
                children = psutil.Process(process.pid).children(recursive=True)
                if number == signal.SIGKILL:
                    process.kill()
                else:
                    os.killpg(process.pid, number)  # as a terminal sends it
            try:
                ended = process.wait(timeout=60)
                assert ended == (0 if stop_after is None else -number), (tmp_path / "errors").read_text()
            finally:
                process.kill()
        most = max(most, len(children))
        assert psutil.wait_procs(children, timeout=10)[1] == []
        assert out.exists() == (stop_after is None)
    assert most >= 3, "stopped only before its processes had started"
    assert content(out) == whole


def noted(note: Path) -> int:
    return int(json.loads(note.read_text())["splits"]["train"]["samples"])


# Errors


def test_an_existing_target_is_unchanged_without_force(photos, tmp_path):
    out = packed(photos, tmp_path / "out")
    assert "exists" in error_of(lambda: packed(photos, out)).what
    assert content(packed(photos, out, force=True, raw=True)) != {}
    assert read_manifest(out).options.raw
    other = tmp_path / "home"
    other.mkdir()
    (other / "letter").write_text("dear")
    assert "not a packed set" in error_of(lambda: packed(photos, other, force=True)).what
    (tmp_path / "file").write_text("x")
    assert "not a packed set" in error_of(lambda: packed(photos, tmp_path / "file", force=True)).what
    assert (other / "letter").read_text() == "dear"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "home", "out"]


def test_an_unfinished_pack_of_other_data_is_rejected_and_removed_with_force(photos, tmp_path, monkeypatch):
    whole = content(packed(photos, tmp_path / "whole"))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(work, "write_manifest", stop)
        with pytest.raises(KeyboardInterrupt):
            packed(photos, tmp_path / "out", raw=True)
    assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out").exists()
    error = error_of(lambda: packed(photos, tmp_path / "out"))
    assert "different options" in error.what
    assert "--force" in error.fix
    assert content(packed(photos, tmp_path / "out", force=True)) == whole
    stranger = tmp_path / "x.partial"
    stranger.mkdir()
    (stranger / "letter").write_text("dear")
    for force in (False, True):
        assert (
            "is not an unfinished packed set"
            in error_of(lambda force=force: packed(photos, tmp_path / "x", force=force)).what
        )
    assert (stranger / "letter").read_text() == "dear"


def test_a_pack_does_not_continue_after_its_source_changed(tmp_path, photos, monkeypatch):
    monkeypatch.setattr(work, "write_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "in/a").mkdir(parents=True)
    for i in range(3):
        (tmp_path / f"in/a/{i}.png").write_bytes(picture(3, 3, "PNG"))
    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path / "in", tmp_path / "out")
    (tmp_path / "in/a/7.png").write_bytes(picture(3, 3, "PNG"))
    assert "different data" in error_of(lambda: packed(tmp_path / "in", tmp_path / "out")).what


def test_source_and_target_must_not_contain_each_other(photos, tmp_path):
    for out in (photos, photos.parent):
        assert "lies inside" in error_of(lambda out=out: packed(photos, out, force=True)).what
    assert "class folders" in error_of(lambda: packed(photos, photos / "train" / "packed")).what
    link = tmp_path / "link"
    link.symlink_to(photos)
    assert "lies inside" in error_of(lambda: packed(photos, link / "x")).what


def test_a_disk_that_is_too_small_is_rejected_before_anything_is_written(photos, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(work.shutil, "disk_usage", lambda _: usage)
    error = error_of(lambda: packed(photos, tmp_path / "out"))
    assert "only 1.0 kB free" in error.what
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_the_pack_continues_once_there_is_space(photos, tmp_path, monkeypatch):
    whole = content(packed(photos, tmp_path / "whole"))
    real = work.SplitWriter.add
    room = 5

    def add(self: Any, *args: Any) -> None:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    monkeypatch.setattr(work.SplitWriter, "add", add)
    monkeypatch.setattr(work, "COMMIT_SECONDS", 0.0)
    error = error_of(lambda: packed(photos, tmp_path / "out"))
    assert "no space left" in error.what
    assert "continues" in error.fix
    monkeypatch.setattr(work.SplitWriter, "add", real)
    said: list[str] = []
    out = pack_set("auto", str(photos), tmp_path / "out", PackOptions(), 1, False, said.append)
    assert "continuing after 5 samples" in said
    assert content(out) == whole


def test_a_disk_without_space_is_reported(photos, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(small)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs rights that this user does not have")
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(work, "_estimate", lambda *_: 1)
            assert "no space left" in error_of(lambda: packed(photos, small / "out", raw=True)).what
        assert not (small / "out").exists()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_target_that_cannot_be_written_is_reported(photos, tmp_path, monkeypatch):
    def fail(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", fail)
        assert "no permission to write" in error_of(lambda: packed(photos, tmp_path / "out")).what
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in error_of(lambda: packed(photos, tmp_path / "file" / "out")).what


def test_two_packs_into_the_same_target_are_rejected(photos, tmp_path):
    with work._locked(tmp_path / "out.partial"):
        assert "another process" in error_of(lambda: packed(photos, tmp_path / "out")).what
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_ends_the_pack_with_its_name(photos, tmp_path, monkeypatch):
    def read(self: Any, sample: int) -> bytes:
        raise UserError(f"no permission to read {self.where(sample)}", fix="chmod")

    monkeypatch.setattr("drumline.data.sources.folder.FolderDataset.read", read)
    assert "1.jpg" in error_of(lambda: packed(photos, tmp_path / "out")).what


# The command


def test_the_command_prints_a_summary_and_lists_bad_samples(photos, tmp_path, capsys):
    assert pack([str(photos), str(tmp_path / "out"), "--workers=1", "--raw"]) == 0
    reported = capsys.readouterr()
    result = json.loads(reported.out.splitlines()[-1])
    assert result["train"] == 11
    assert (result["eval"], result["classes"], result["shards"], result["bad"]) == (2, 3, 2, 3)
    assert result["bytes"] == sum(len(data) for data in content(tmp_path / "out").values())
    for words in (
        "decoded pixels",
        "3 samples cannot be read",
        "cut.jpg is truncated",
        "page.jpg is a web page",
    ):
        assert words in reported.err
    assert pack([str(photos), str(tmp_path / "small"), "--resize-short", "16", "--workers", "1"]) == 0
    assert "NOT pixel-equal to the originals" in capsys.readouterr().err


def test_bad_samples_are_counted_without_decoding_when_files_are_kept(photos, tmp_path):
    result = summary(packed(photos, tmp_path / "out"))
    assert result.bad == 2  # what is cut off within its pixels has a sound header
    assert any("empty.jpg is empty" in line for line in result.bad_samples)


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--resize-shrt", "3"], "did you mean --resize-short?"),
        (["--resize", "3"], "did you mean --resize-short?"),
        (["--wrokers", "3"], "did you mean --workers?"),
        (["-raw"], "did you mean --raw?"),
        (["--zzz"], "drumline pack --help"),
        (["--raw=1"], "expected true or false"),
        (["--workers", "0"], "give at least 1"),
        (["--workers", "many"], "whole number"),
        (["--shard-mb", "0"], "give at least 1"),
        (["--shard-mb"], "needs a value"),
        (["--resize-short", "9" * 30], "give at most 65535"),
        (["--resize-short", "-3"], "give at least 0"),
        (["--holdout", "1"], "give less than 1"),
        (["--holdout", "nan"], "expected a number"),
        (["--source", "--raw"], "needs a value"),
        (["third"], "third: one argument too many"),
        (["--raww", "--workers", "x"], "did you mean --raw?"),
    ],
)
def test_wrong_arguments_are_reported_with_a_fix(words, reported, tmp_path):
    error = error_of_line(["in", "out", *words])
    assert reported in str(error)


def error_of_line(words: list[str]) -> UserError:
    with pytest.raises(UserError) as caught:
        pack(words)
    return caught.value


def test_two_wrong_arguments_are_reported_together():
    error = str(error_of_line(["in", "out", "--raww", "--workers", "x"]))
    assert "--raww" in error
    assert "--workers x" in error


def test_help_names_every_flag(capsys):
    assert drumline(["pack", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--source", "--holdout", "--raw", "--resize-short", "--shard-mb", "--workers", "--force"):
        assert flag in text


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9500, 60000])
def test_a_huge_image_is_marked_and_never_decoded(tmp_path, side):
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.png").write_bytes(bomb + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))
    source = open_dataset(DatasetSpec("folder", str(tmp_path), "train"))
    for options in (PackOptions(), PackOptions(raw=True), PackOptions(resize_short=8)):
        kept = stored.store(source, 0, options)
        assert (kept.width, kept.height, kept.kind) == (0, 0, SampleKind.OTHER)

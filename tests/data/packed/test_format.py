"""The packed set: what comes out is what went in, and damage or malice is reported by file and sample."""

from __future__ import annotations

import ctypes
import io
import json
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from drumline.core.errors import UserError
from drumline.core.files import sealed_text
from drumline.data.image.decode import decode
from drumline.data.packed.format import (
    MANIFEST,
    RECORD,
    PackedManifest,
    PackOptions,
    SampleKind,
    Split,
    SplitWriter,
    StoredSample,
    index_file,
    names_file,
    read_index,
    read_manifest,
    sealed,
    shard_file,
    write_manifest,
)
from drumline.data.sources import ArrayDataset, DatasetSpec, detect_source, open_dataset
from drumline.data.sources.divide import holdout_mask
from drumline.data.sources.packed import PackedArrays, PackedFiles

NAMES = [b"a/1.jpg", "b/ünï 猫.jpg".encode(), b"b/\xff\xfe.jpg", b"", b"c/\n.png"]
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)


def encoded(format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, format, **options)
    return file.getvalue()


def stored(
    data: bytes, kind: SampleKind = SampleKind.OTHER, width: int = 0, height: int = 0, orientation: int = 1
) -> StoredSample:
    return StoredSample(data, kind, width, height, orientation, zlib.crc32(data))


FILES = [
    stored(encoded(), SampleKind.JPEG, 5, 4),
    stored(encoded("PNG"), SampleKind.OTHER, 5, 4, 0),
    stored(PIXELS.tobytes(), SampleKind.RGB, 5, 4),
    stored(b""),
    stored(PIXELS.tobytes(), SampleKind.RGB, 5, 4, 6),
]
LABELS = [0, 1, 1, 2, 2]


def write(
    folder: Path,
    samples: list[StoredSample] = FILES,
    shard_bytes: int | None = 900,
    holds: Literal["files", "arrays"] = "files",
    evaluation: bool = True,
) -> Path:
    folder.mkdir(exist_ok=True)
    splits = {}
    for split in ("train", "eval") if evaluation else ("train",):
        with SplitWriter(folder, split, shard_bytes, Split(0, (), 0)) as writer:
            for number, sample in enumerate(samples):
                writer.add(sample, LABELS[number % 5], NAMES[number % 5] if holds == "files" else b"")
            splits[split] = sealed(folder, split, writer.commit())
    manifest = PackedManifest(
        "folder", holds, ("a", "b", "c"), PackOptions(), "job", splits["train"], splits.get("eval")
    )
    write_manifest(folder, manifest)
    return folder


def opened(folder: Path, split: Literal["train", "eval"] = "train", holdout: float = 0.0) -> Any:
    return open_dataset(DatasetSpec("packed", str(folder), split, holdout))


def error_of(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        opened(folder)
    assert caught.value.fix
    return caught.value


def test_samples_labels_and_names_are_read_from_several_shards(tmp_path):
    folder = write(tmp_path / "set")
    assert detect_source("auto", str(folder)) == "packed"
    for split in ("train", "eval"):
        source = opened(folder, split)
        assert isinstance(source, PackedFiles)
        assert len(read_manifest(folder).train.shards) > 1
        assert source.classes == ("a", "b", "c")
        assert source.labels.tolist() == LABELS
        assert [source.read(i) for i in (0, 1, 3)] == [FILES[i].data for i in (0, 1, 3)]
        assert source.where(1) == f"{folder}:b/ünï 猫.jpg"
        assert source.where(2) == f"{folder}:b/\\xff\\xfe.jpg"
        assert "sample 3" in source.where(3)
        assert source.widths.tolist() == [5, 5, 5, 0, 5]
        assert source.heights.tolist() == [4, 4, 4, 0, 4]
        assert source.kinds.tolist() == [1, 0, 2, 0, 2]


def test_pointers_point_to_the_stored_bytes_and_read_ahead_changes_nothing(tmp_path):
    source = opened(write(tmp_path / "set"))
    ids = np.array([4, 1, 3, 0, 2, 2])
    source.read_ahead(ids)
    addresses, lengths = source.pointers(ids)
    assert (addresses.dtype, lengths.dtype) == (np.uint64, np.int64)
    found = [ctypes.string_at(int(at), int(length)) for at, length in zip(addresses, lengths, strict=True)]
    assert found == [FILES[i].data for i in ids]
    assert source.sound(ids).all()
    assert source.sound_jpegs(ids).tolist() == [False, False, False, True, False, False]


def test_decode_gives_the_pixels_of_a_raw_sample(tmp_path):
    source = opened(write(tmp_path / "set"))
    np.testing.assert_array_equal(np.asarray(decode(source.read(2), "x")), PIXELS)
    np.testing.assert_array_equal(source.pixels(2), PIXELS)
    assert not source.pixels(2).flags.writeable


def test_a_raw_sample_is_rotated_by_exif_only_on_request(tmp_path):
    source = opened(write(tmp_path / "set"))
    np.testing.assert_array_equal(np.asarray(decode(source.read(4), "x")), PIXELS)
    np.testing.assert_array_equal(np.asarray(decode(source.read(4), "x", "apply")), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_are_read_as_one_array_mapped_to_the_file(tmp_path, channels):
    images = np.random.default_rng(1).integers(0, 256, (10, 6, 7, channels), np.uint8)
    kind = SampleKind.RGB if channels == 3 else SampleKind.GREY
    samples = [stored(image.tobytes(), kind, 7, 6) for image in images]
    source = opened(write(tmp_path / "set", samples, None, "arrays"))
    assert isinstance(source, ArrayDataset)
    assert source.shape == (6, 7, channels)
    np.testing.assert_array_equal(source.images, images)
    np.testing.assert_array_equal(source.take(np.array([3, 1])), images[[3, 1]])
    assert not source.images.flags.owndata
    assert not source.images.flags.writeable


def test_a_set_without_evaluation_split_is_held_out_by_the_common_rule(tmp_path):
    folder = write(tmp_path / "set", FILES * 6, evaluation=False)
    labels = opened(folder).labels
    mask = holdout_mask(labels, 0.3)
    for split, ids in (("train", np.flatnonzero(~mask)), ("eval", np.flatnonzero(mask))):
        source = opened(folder, split, 0.3)
        assert source.labels.tolist() == labels[ids].tolist()
        assert [source.read(i) for i in range(len(source))] == [opened(folder).read(int(i)) for i in ids]
        named = [i for i in range(len(source)) if int(ids[i]) % 5 != 3]
        assert [source.where(i) for i in named] == [opened(folder).where(int(ids[i])) for i in named]
    with pytest.raises(UserError, match="no evaluation split"):
        opened(folder, "eval")
    with pytest.raises(UserError, match="evaluation split of its own"):
        opened(write(tmp_path / "both"), "train", 0.3)


def test_a_changed_byte_in_a_shard_is_reported_with_sample_shard_and_offset(tmp_path):
    folder = write(tmp_path / "set", shard_bytes=None)
    shard = shard_file(folder, "train", 0)
    data = bytearray(shard.read_bytes())
    at = len(FILES[0].data) + 7
    data[at] ^= 4
    shard.write_bytes(data)
    source = opened(folder)
    assert source.read(0) == FILES[0].data
    with pytest.raises(UserError) as caught:
        source.read(1)
    for part in ("b/ünï 猫.jpg", str(shard), f"from {len(FILES[0].data)} on", "checksum"):
        assert part in caught.value.what
    assert "pack the source again" in caught.value.fix
    assert source.sound(np.arange(5)).tolist() == [True, False, True, True, True]


def test_a_changed_byte_in_an_array_is_reported_on_opening(tmp_path):
    samples = [stored(PIXELS.tobytes(), SampleKind.RGB, 5, 4)] * 5
    folder = write(tmp_path / "set", samples, None, "arrays")
    shard = shard_file(folder, "train", 0)
    data = bytearray(shard.read_bytes())
    data[130] ^= 1
    shard.write_bytes(data)
    assert "image 2" in error_of(folder).what


def test_a_truncated_missing_or_longer_shard_is_rejected_on_opening(tmp_path):
    folder = write(tmp_path / "set")
    shard = shard_file(folder, "train", 1)
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert "is truncated" in error_of(folder).what
    shard.write_bytes(data + b"x")
    assert "has grown" in error_of(folder).what
    shard.unlink()
    assert shard.name in error_of(folder).what


@given(data=st.data())
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_of_index_names_or_manifest_is_rejected(tmp_path, data):
    folder = tmp_path / "set"
    if not folder.exists():
        write(folder)
    file = data.draw(st.sampled_from([MANIFEST, "train.index", "train.names"]))
    content = bytearray((folder / file).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    old, new = content[at], data.draw(st.integers(0, 255))
    content[at] = new
    (folder / file).write_bytes(content)
    try:
        if old == new:
            opened(folder)
        else:
            assert file in error_of(folder).what or "version" in error_of(folder).what
    finally:
        content[at] = old
        (folder / file).write_bytes(content)


@pytest.mark.parametrize("file", [MANIFEST, "train.index", "train.names"])
def test_a_missing_or_truncated_file_is_rejected(tmp_path, file):
    folder = write(tmp_path / "set")
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    assert file in error_of(folder).what
    (folder / file).unlink()
    assert "unfinished" in error_of(folder).what if file == MANIFEST else file in error_of(folder).what


def forge(folder: Path, change: Any) -> Path:
    """A hostile index with the right digests: whoever made it could compute them."""
    records = np.fromfile(index_file(folder, "train"), RECORD)
    change(records)
    records.tofile(index_file(folder, "train"))
    reseal(folder)
    return folder


def reseal(folder: Path, **changes: Any) -> None:
    manifest = read_manifest(folder)
    part = sealed(folder, "train", manifest.train)
    content = {**manifest.__dict__, "train": Split(**{**part.__dict__, **changes})}
    write_manifest(folder, PackedManifest(**content))


BIG = 2**64 - 1


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("offset", 10**9, "outside their shard"),
        ("offset", BIG, "outside their shard"),
        ("offset", BIG - 100, "outside their shard"),
        ("length", 2**32 - 1, "outside their shard"),
        ("offset", -1, "outside their shard"),
        ("shard", 65535, "shard that is not there"),
        ("shard", -1, "shard that is not there"),
        ("label", 3, "beyond the 3 classes"),
        ("label", 2**32 - 1, "beyond the 3 classes"),
        ("kind", 4, "unknown kind"),
        ("orientation", 9, "unknown orientation"),
        ("width", 2**32 - 1, "more than 89478485 pixels"),
        ("height", 89478485 // 5 + 1, "more than 89478485 pixels"),
        ("width", 0, "width without height"),
        ("name_end", BIG, "names outside"),
        ("name_end", 0, "out of order"),
    ],
)
def test_a_hostile_index_is_rejected_before_anything_is_read(tmp_path, field, value, words):
    folder = write(tmp_path / "set")
    shards = read_manifest(folder).train.shards

    def change(records: Any) -> None:
        least = {"shard": len(shards), "offset": shards[records["shard"][2]] - int(records["length"][2]) + 1}
        records[field][2] = least[field] if value == -1 else value  # -1: just one too many

    forge(folder, change)
    error = error_of(folder)
    assert words in error.what
    assert "sample 2" in error.what


def test_raw_pixels_must_have_the_length_they_need(tmp_path):
    def change(records: Any) -> None:
        records["width"][2], records["height"][2] = 50, 40

    assert "raw pixels" in error_of(forge(write(tmp_path / "set"), change)).what


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 10**12},
        {"samples": -1},
        {"samples": 0},
        {"samples": "5"},
        {"shards": (10**15,)},
        {"shards": ()},
        {"names_bytes": 10**15},
        {"names_bytes": True},
        {"shards": tuple([0] * 70000)},
    ],
)
def test_a_hostile_manifest_is_rejected_without_a_large_allocation(tmp_path, changes):
    folder = write(tmp_path / "set")
    reseal(folder, **changes)
    error_of(folder)


def test_manifests_of_other_versions_and_shapes_are_rejected(tmp_path):
    folder = write(tmp_path / "set")
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    for changed, words in (
        ({**content, "version": 2}, "version 2"),
        ({**content, "format": "other"}, "not the manifest"),
        ({"format": content["format"], "version": 1}, "not a manifest of this version"),
    ):
        (folder / MANIFEST).write_text(sealed_text(changed, "sha256"))
        assert words in error_of(folder).what
    for text, words in (
        ("[]", "checksum"),
        (json.dumps(content), "checksum"),
        ("[" * 200_000, "not readable"),
    ):
        (folder / MANIFEST).write_text(text)
        assert words in error_of(folder).what


def test_unknown_fields_of_a_manifest_are_ignored(tmp_path):
    folder = write(tmp_path / "set")
    before = read_manifest(folder)
    content = json.loads((folder / MANIFEST).read_text())
    del content["sha256"]
    for record in (content, content["train"], content["options"]):
        record["added later"] = [1]
    (folder / MANIFEST).write_text(sealed_text(content, "sha256"))
    assert read_manifest(folder) == before
    assert len(opened(folder)) == before.train.samples


def test_an_array_set_whose_images_differ_is_rejected(tmp_path):
    samples = [stored(bytes(60), SampleKind.RGB, 5, 4), stored(bytes(60), SampleKind.RGB, 4, 5)]
    assert "does not fit" in error_of(write(tmp_path / "set", samples, None, "arrays")).what
    assert "does not fit" in error_of(write(tmp_path / "other", FILES, None, "arrays")).what


@given(cut=st.integers(0, 12), garbage=st.binary(max_size=50), shard_bytes=st.sampled_from([1, 700, None]))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_writer_that_continues_gives_the_same_bytes(tmp_path_factory, cut, garbage, shard_bytes):
    folder = tmp_path_factory.mktemp("sets")
    samples = FILES * 3
    whole = write(folder / "whole", samples, shard_bytes, evaluation=False)
    part = folder / "part"
    part.mkdir()
    with SplitWriter(part, "train", shard_bytes, Split(0, (), 0)) as writer:
        for number, sample in enumerate(samples[:cut]):
            writer.add(sample, LABELS[number % 5], NAMES[number % 5])
        state = writer.commit()
        writer.add(stored(b"lost" * 300), 0, b"lost")  # was written, but not yet noted
    for file in (
        index_file(part, "train"),
        names_file(part, "train"),
        shard_file(part, "train", len(state.shards) - 1),
    ):
        file.write_bytes(file.read_bytes() + garbage)
    shard_file(part, "train", 99).write_bytes(garbage)  # of a source whose files were larger then
    with SplitWriter(part, "train", shard_bytes, state) as writer:
        for number, sample in enumerate(samples[cut:], start=cut):
            writer.add(sample, LABELS[number % 5], NAMES[number % 5])
        writer.commit()
    content = {file.name: file.read_bytes() for file in part.iterdir()}
    assert content == {file.name: file.read_bytes() for file in whole.iterdir() if file.name != MANIFEST}


def test_a_writer_rejects_files_shorter_than_its_state(tmp_path):
    with SplitWriter(tmp_path, "train", None, Split(0, (), 0)) as writer:
        writer.add(FILES[0], 0, b"")
        state = writer.commit()
    shard_file(tmp_path, "train", 0).write_bytes(b"")
    with pytest.raises(UserError, match="before the interruption"):
        SplitWriter(tmp_path, "train", None, state)


def test_index_columns_are_little_endian_and_documented(tmp_path):
    folder = write(tmp_path / "set", shard_bytes=None)
    first = index_file(folder, "train").read_bytes()[40:80]
    length = len(FILES[0].data)
    assert int.from_bytes(first[:8], "little") == length
    assert int.from_bytes(first[16:20], "little") == len(FILES[1].data)
    assert read_index(folder, read_manifest(folder), "train")["offset"][1] == length


def test_large_arrays_are_checked_on_request(tmp_path, monkeypatch):
    monkeypatch.setattr("drumline.data.sources.packed.CHECKED_ON_OPENING", 10)
    folder = write(tmp_path / "set", [stored(PIXELS.tobytes(), SampleKind.RGB, 5, 4)] * 5, None, "arrays")
    source = opened(folder)
    assert isinstance(source, PackedArrays)
    source.check()
    shard = shard_file(folder, "train", 0)
    shard.write_bytes(bytes(300))
    with pytest.raises(UserError, match="image 0"):
        opened(folder).check()

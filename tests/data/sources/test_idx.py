"""idx files: names, gzip, memory mapping, and a checked header."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from drumline.core.errors import UserError
from drumline.data.sources import ArrayDataset, DatasetSpec, detect_source, open_dataset

RNG = np.random.default_rng(0)
IMAGES = {
    "train": RNG.integers(0, 256, (12, 5, 7), np.uint8),
    "t10k": RNG.integers(0, 256, (4, 5, 7), np.uint8),
}
LABELS = {"train": np.arange(12, dtype=np.uint8) % 4, "t10k": np.arange(4, dtype=np.uint8)}


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, mark: str = "-", packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        for kind, arrays in (("images", IMAGES), ("labels", LABELS)):
            data = idx_bytes(arrays[prefix])
            name = f"{prefix}-{kind}{mark}idx{arrays[prefix].ndim}-ubyte"
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return folder


def opened(path: Path, split: str) -> ArrayDataset:
    source = open_dataset(DatasetSpec("idx", str(path), split))  # type: ignore[arg-type]
    assert isinstance(source, ArrayDataset)
    return source


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("below", ["", "raw"])
def test_reads_the_arrays_that_were_written(tmp_path, mark, packed, below):
    write(tmp_path / below, mark, packed)
    assert detect_source("auto", str(tmp_path)) == "idx"
    for split, prefix in (("train", "train"), ("eval", "t10k")):
        source = opened(tmp_path, split)
        assert np.array_equal(source.images[..., 0], IMAGES[prefix])
        assert np.array_equal(source.labels, LABELS[prefix])
        assert (source.name, source.shape, source.classes) == ("idx", (5, 7, 1), ("0", "1", "2", "3"))


def test_take_gives_fresh_contiguous_images_in_the_order_asked(tmp_path):
    source = opened(write(tmp_path), "train")
    taken = source.take(np.array([7, 0, 7]))
    assert np.array_equal(taken[..., 0], IMAGES["train"][[7, 0, 7]])
    assert taken.flags.c_contiguous
    taken[:] = 0
    assert np.array_equal(source.take(np.array([7]))[0, ..., 0], IMAGES["train"][7])


def test_plain_files_are_memory_mapped_and_do_not_occupy_memory(tmp_path):
    images = opened(write(tmp_path), "train").images
    base = images
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def damage(tmp_path: Path, name: str, data: bytes) -> str:
    write(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        opened(tmp_path, "train")
    assert caught.value.fix
    return caught.value.what


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "first bytes missing"),
        (b"\x00\x00\x08", "first bytes 00 00 08"),
        (idx_bytes(LABELS["train"]), "first bytes 00 00 08 01"),
        (b"\x00\x00\x0d\x03" + idx_bytes(IMAGES["train"])[4:], "first bytes 00 00 0d 03"),
        (idx_bytes(IMAGES["train"])[:-1], "holds 419 bytes of data, its header says 12 x 5 x 7 = 420"),
        (idx_bytes(IMAGES["train"]) + b"\0", "holds more than 420 bytes"),
        (idx_bytes(IMAGES["train"][:0]), "is empty"),
        (idx_bytes(IMAGES["train"][:11]), "has 11 images"),
    ],
)
def test_refuses_damaged_image_files(tmp_path, data, words):
    what = damage(tmp_path, "train-images-idx3-ubyte", data)
    assert words in what
    assert "train-images-idx3-ubyte" in what


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(idx_bytes(IMAGES["train"]), mtime=0)[:-12], "cannot be read"),
        (b"not gzip", "cannot be read"),
        (gzip.compress(idx_bytes(IMAGES["train"])[:-1], mtime=0), "holds 419 bytes"),
        (gzip.compress(idx_bytes(IMAGES["train"]) + bytes(9), mtime=0), "holds more than 420 bytes"),
        (gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12, mtime=0), "unfolds to"),
    ],
)
def test_refuses_damaged_gzip_files(tmp_path, data, words):
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(UserError, match=words):
        opened(tmp_path, "train")


def test_refuses_a_missing_file_by_name(tmp_path):
    (write(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    assert len(opened(tmp_path, "train")) == 12
    with pytest.raises(UserError, match="lacks t10k-labels-idx1-ubyte"):
        opened(tmp_path, "eval")


def test_refuses_a_folder_without_idx_files(tmp_path):
    with pytest.raises(UserError, match="has no idx files"):
        opened(tmp_path, "train")


def test_refuses_eval_labels_beyond_the_training_classes(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(LABELS["t10k"] + 1))
    with pytest.raises(UserError, match="contains the label 4, but training labels end at 3"):
        opened(tmp_path, "eval")


def test_refuses_a_holdout_since_idx_has_a_split(tmp_path):
    with pytest.raises(UserError, match=r"data\.holdout is 0\.1"):
        open_dataset(DatasetSpec("idx", str(write(tmp_path)), "train", 0.1))


@pytest.mark.parametrize("shape", [(2**32 - 1, 2**32 - 1, 2**32 - 1), (2**31, 28, 28), (10**5, 28, 28)])
def test_a_gzip_bomb_is_refused_before_it_unfolds(tmp_path, shape):
    """A header that promises more than the stored bytes can hold, however well they are packed."""
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    bomb = bytes((0, 0, 8, 3)) + struct.pack(">3I", *shape)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bomb))
    with pytest.raises(
        UserError, match=r"unfolds to .* GiB, from .* bytes; images do not compress like that"
    ):
        opened(tmp_path, "train")

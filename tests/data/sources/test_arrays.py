"""The idx and npz sources, and the checks of arrays."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.data.sources import ArrayDataset, DatasetSpec, PooledDataset, detect_source, open_dataset
from drumline.data.sources.arrays import scale

RNG = np.random.default_rng(0)
IDX_IMAGES = {
    "train": RNG.integers(0, 256, (12, 5, 7), np.uint8),
    "t10k": RNG.integers(0, 256, (4, 5, 7), np.uint8),
}
IDX_LABELS = {"train": np.arange(12, dtype=np.uint8) % 4, "t10k": np.arange(4, dtype=np.uint8)}


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, mark: str = "-", packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        for kind, arrays in (("images", IDX_IMAGES), ("labels", IDX_LABELS)):
            data = idx_bytes(arrays[prefix])
            name = f"{prefix}-{kind}{mark}idx{arrays[prefix].ndim}-ubyte"
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data, mtime=0) if packed else data)
    return folder


def opened_idx(path: Path, split: str) -> ArrayDataset:
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
        source = opened_idx(tmp_path, split)
        assert np.array_equal(source.images[..., 0], IDX_IMAGES[prefix])
        assert np.array_equal(source.labels, IDX_LABELS[prefix])
        assert (source.name, source.shape, source.classes) == ("idx", (5, 7, 1), ("0", "1", "2", "3"))


def test_take_gives_a_contiguous_copy_in_the_requested_order(tmp_path):
    source = opened_idx(write(tmp_path), "train")
    taken = source.take(np.array([7, 0, 7]))
    assert np.array_equal(taken[..., 0], IDX_IMAGES["train"][[7, 0, 7]])
    assert taken.flags.c_contiguous
    taken[:] = 0
    assert np.array_equal(source.take(np.array([7]))[0, ..., 0], IDX_IMAGES["train"][7])


def test_plain_files_are_memory_mapped_and_do_not_occupy_memory(tmp_path):
    images = opened_idx(write(tmp_path), "train").images
    base = images
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)


def damage(tmp_path: Path, name: str, data: bytes) -> str:
    write(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        opened_idx(tmp_path, "train")
    assert caught.value.fix
    return caught.value.what


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "first bytes missing"),
        (b"\x00\x00\x08", "first bytes 00 00 08"),
        (idx_bytes(IDX_LABELS["train"]), "first bytes 00 00 08 01"),
        (b"\x00\x00\x0d\x03" + idx_bytes(IDX_IMAGES["train"])[4:], "first bytes 00 00 0d 03"),
        (idx_bytes(IDX_IMAGES["train"])[:-1], "holds 419 bytes of data, its header says 12 x 5 x 7 = 420"),
        (idx_bytes(IDX_IMAGES["train"]) + b"\0", "holds more than 420 bytes"),
        (idx_bytes(IDX_IMAGES["train"][:0]), "is empty"),
        (idx_bytes(IDX_IMAGES["train"][:11]), "has 11 images"),
    ],
)
def test_rejects_damaged_image_files(tmp_path, data, words):
    what = damage(tmp_path, "train-images-idx3-ubyte", data)
    assert words in what
    assert "train-images-idx3-ubyte" in what


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gzip.compress(idx_bytes(IDX_IMAGES["train"]), mtime=0)[:-12], "cannot be read"),
        (b"not gzip", "cannot be read"),
        (gzip.compress(idx_bytes(IDX_IMAGES["train"])[:-1], mtime=0), "holds 419 bytes"),
        (gzip.compress(idx_bytes(IDX_IMAGES["train"]) + bytes(9), mtime=0), "holds more than 420 bytes"),
        (gzip.compress(b"\x00\x00\x08\x03" + b"\xff" * 12, mtime=0), "unfolds to"),
    ],
)
def test_rejects_damaged_gzip_files(tmp_path, data, words):
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(UserError, match=words):
        opened_idx(tmp_path, "train")


def test_rejects_a_missing_file_by_name(tmp_path):
    (write(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    assert len(opened_idx(tmp_path, "train")) == 12
    with pytest.raises(UserError, match="lacks t10k-labels-idx1-ubyte"):
        opened_idx(tmp_path, "eval")


def test_rejects_a_folder_without_idx_files(tmp_path):
    with pytest.raises(UserError, match="has no idx files"):
        opened_idx(tmp_path, "train")


def test_rejects_eval_labels_beyond_the_training_classes(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(IDX_LABELS["t10k"] + 1))
    with pytest.raises(UserError, match="contains the label 4, but training labels end at 3"):
        opened_idx(tmp_path, "eval")


def test_rejects_a_holdout_because_idx_has_a_split(tmp_path):
    with pytest.raises(UserError, match=r"data\.holdout is 0\.1"):
        open_dataset(DatasetSpec("idx", str(write(tmp_path)), "train", 0.1))


@pytest.mark.parametrize("shape", [(2**32 - 1, 2**32 - 1, 2**32 - 1), (2**31, 28, 28), (10**5, 28, 28)])
def test_a_gzip_bomb_is_rejected_before_it_unfolds(tmp_path, shape):
    """A header that promises more than the stored bytes can hold, however well they are packed."""
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    bomb = bytes((0, 0, 8, 3)) + struct.pack(">3I", *shape)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bomb))
    with pytest.raises(
        UserError, match=r"unfolds to .* GiB, from .* bytes; images do not compress like that"
    ):
        opened_idx(tmp_path, "train")


RNG = np.random.default_rng(2)
GREY = RNG.integers(0, 256, (12, 6, 5), np.uint8)
RGB = RNG.integers(0, 256, (12, 6, 5, 3), np.uint8)
LABELS = np.arange(12) % 3


def opened_npz(path: Path, split: str = "train", holdout: float = 0.0) -> ArrayDataset:
    assert detect_source("auto", str(path)) == "npz"
    source = open_dataset(DatasetSpec("npz", str(path), split, holdout))  # type: ignore[arg-type]
    assert isinstance(source, ArrayDataset)
    return source


def save(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "set.npz", **arrays)
    return folder / "set.npz"


def error_of(path: Path, split: str = "train", holdout: float = 0.0) -> UserError:
    with pytest.raises(UserError) as caught:
        opened_npz(path, split, holdout)
    assert str(path) in caught.value.what
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
    ],
)
@pytest.mark.parametrize("label_shape", [(-1,), (-1, 1)])
def test_reads_both_styles_of_names(tmp_path, names, label_shape):
    labels = LABELS.astype(np.uint8).reshape(label_shape)
    path = save(tmp_path, **dict(zip(names, (RGB, labels, RGB[:4] ^ 255, labels[:4]), strict=True)))
    train, evaluation = opened_npz(path), opened_npz(path, "eval")
    assert np.array_equal(train.images, RGB)
    assert np.array_equal(evaluation.images, RGB[:4] ^ 255)
    assert train.labels.tolist() == LABELS.tolist()
    assert train.labels.dtype == np.int64
    assert evaluation.classes == train.classes == ("0", "1", "2")


def test_medmnist_val_arrays_are_left_alone(tmp_path):
    pair = {"train_images": GREY, "train_labels": LABELS, "test_images": GREY[:3], "test_labels": LABELS[:3]}
    path = save(tmp_path, **pair, val_images=GREY[:5], val_labels=LABELS[:5])
    assert len(opened_npz(path, "eval")) == 3


def test_holdout_divides_images_and_labels_together(tmp_path):
    path = save(tmp_path, images=GREY, labels=LABELS)
    train, evaluation = opened_npz(path, "train", 0.25), opened_npz(path, "eval", 0.25)
    rows = {image.tobytes(): int(label) for image, label in zip(GREY, LABELS, strict=True)}
    together = [
        *zip(train.images, train.labels, strict=True),
        *zip(evaluation.images, evaluation.labels, strict=True),
    ]
    assert len(together) == len({image.tobytes() for image, _ in together}) == 12
    assert all(rows[image.tobytes()] == label for image, label in together)
    assert np.bincount(evaluation.labels).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (GREY, GREY[..., None]),
        (GREY[..., None], GREY[..., None]),
        (GREY[:, None], GREY[..., None]),
        (RGB, RGB),
        (RGB.transpose(0, 3, 1, 2), RGB),
    ],
    ids=["NHW", "NHW1", "N1HW", "NHWC", "NCHW"],
)
def test_accepts_each_unambiguous_shape(tmp_path, images, expected):
    source = opened_npz(save(tmp_path, images=images, labels=LABELS))
    assert np.array_equal(source.images, expected)
    assert source.images.flags.c_contiguous


@pytest.mark.parametrize(
    ("images", "words", "fix"),
    [
        (RGB / 255, "is float64, but images must be uint8", "x * 255"),
        (RGB.astype(np.int64), "is int64", "astype(np.uint8)"),
        (RGB.reshape(12, -1), "not a stack of images", "reshape"),
        (np.zeros((12, 3, 8, 3), np.uint8), "may be NHWC or NCHW", "pad"),
        (np.zeros((12, 8, 8, 4), np.uint8), "no axis of 1 or 3 channels", "RGB"),
        (RGB[:0], "is empty", "at least one"),
    ],
)
def test_rejects_other_images_with_the_line_that_converts_them(tmp_path, images, words, fix):
    error = error_of(save(tmp_path, images=images, labels=LABELS[: len(images)]))
    assert words in error.what
    assert fix in error.fix


@pytest.mark.parametrize(
    ("labels", "words", "fix"),
    [
        (LABELS.astype(float), "is float64, but labels must be integers", "return_inverse"),
        (np.array(list("abcabcabcabc")), "must be integers", "return_inverse"),
        (np.eye(3)[LABELS], "one row of numbers for each image", "argmax"),
        (LABELS[:11], "has 11 labels for 12 images", "equally long"),
        (LABELS - 1, "contains the label -1", "0 to K-1"),
        (LABELS + 1, "no sample has the label 0", "return_inverse"),
        (LABELS * 2, "goes up to 4, but no sample has the label 1", "return_inverse"),
        (LABELS * 2**60, "contains the label", "0 to K-1"),
        (LABELS.reshape(12, 1, 1), "not one label for each image", "reshape"),
        (np.array(3), "not one label for each image", "reshape"),
    ],
)
def test_rejects_other_labels(tmp_path, labels, words, fix):
    error = error_of(save(tmp_path, images=GREY, labels=labels))
    assert words in error.what
    assert fix in error.fix


def test_rejects_eval_labels_that_training_lacks(tmp_path):
    path = save(tmp_path, x_train=GREY, y_train=LABELS, x_test=GREY, y_test=LABELS + 1)
    assert "label 3, but there are 3 classes (0 to 2)" in error_of(path, "eval").what


def test_rejects_objects_without_unpickling_them(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "owned").touch, ()

    path = save(tmp_path, images=GREY, labels=np.array([Trap()] * 12, dtype=object))
    assert "without unpickling" in error_of(path).what
    assert not (tmp_path / "owned").exists()


def test_rejects_unknown_names_and_lists_them(tmp_path):
    assert "holds X, y" in error_of(save(tmp_path, X=GREY, y=LABELS)).what


@pytest.mark.parametrize("size", [0, 10, 100, 400])
def test_rejects_damaged_files(tmp_path, size):
    path = save(tmp_path, images=GREY, labels=LABELS)
    path.write_bytes(path.read_bytes()[:size])
    error_of(path)


def test_rejects_a_pickle_or_a_single_array_named_npz(tmp_path):
    path = tmp_path / "set.npz"
    path.write_bytes(pickle.dumps({"images": 1}))
    assert "without unpickling" in error_of(path).what
    with path.open("wb") as file:
        np.save(file, GREY)
    assert "one array without a name" in error_of(path).what


def test_rejects_a_flipped_bit(tmp_path):
    path = save(tmp_path, images=GREY, labels=LABELS)
    data = bytearray(path.read_bytes())
    data[250] ^= 1
    path.write_bytes(data)
    assert "CRC" in error_of(path).what


def test_rejects_eval_without_split_or_holdout_and_holdout_beside_a_split(tmp_path):
    assert "has no evaluation split" in error_of(save(tmp_path, images=GREY, labels=LABELS), "eval").what
    path = save(tmp_path, x_train=GREY, y_train=LABELS, x_test=GREY, y_test=LABELS)
    assert "evaluation split of its own" in error_of(path, "train", 0.1).what


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_dataset(DatasetSpec("npz", str(tmp_path / "no.npz"), "train"))


def npz_of(path, name, header, data=b"", compression=zipfile.ZIP_STORED):
    """An .npz whose one array has this header, whatever it says."""
    body = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{name}.npy", body)
        labels = io.BytesIO()
        np.save(labels, LABELS)
        archive.writestr("labels.npy", labels.getvalue())
    return path


def header(shape, dtype="|u1"):
    return f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".ljust(100).encode() + b"\n"


@pytest.mark.parametrize(
    "text",
    [
        header((10**12, 8, 8)),
        header((10**30, 8, 8)),
        header((-1, 8, 8)),
        header("'x'"),
        header((12, 8, 8), "|O"),
        header((12, 8, 8), "<U100000000"),
        b"(" * 5000,
        b"[" * 60000,
        b"__import__('os').system('touch owned')\n",
        b"\xff" * 100,
    ],
)
def test_a_false_header_allocates_no_array(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    path = npz_of(tmp_path / "set.npz", "images", text, bytes(12 * 64))
    assert "images cannot be read" in error_of(path).what
    assert not (tmp_path / "owned").exists()


def test_a_file_that_unfolds_to_more_than_the_memory_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 22, total=1 << 30))
    data = bytes(2 << 20)
    path = npz_of(tmp_path / "set.npz", "images", header((2, 1024, 1024)), data, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert "images unfolds to 0.0 GiB, from 2," in error_of(path).what
    assert "in each of 3 processes; 0.0 GiB of memory are free" in error_of(path).what
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr("drumline.data.sources.arrays.TRUSTED_SIZE", 1 << 20)
    assert "images do not compress like that" in error_of(path).what


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 30))
def test_a_damaged_npz_is_read_or_rejected_but_never_breaks(tmp_path, place, value, cut):
    path = save(tmp_path, images=GREY, labels=LABELS)
    broken = bytearray(path.read_bytes())
    broken[place % len(broken)] = value
    path.write_bytes(broken[: len(broken) - cut])
    with suppress(UserError):
        open_dataset(DatasetSpec("npz", str(path), "train"))


def arrays(source: str, path: str = "", split: str = "train") -> ArrayDataset:
    found = open_dataset(DatasetSpec(source, path, split))  # type: ignore[arg-type]
    assert isinstance(found, ArrayDataset)
    return found


def test_digits_are_the_1797_of_the_repository_by_hash():
    train, evaluation = arrays("digits"), arrays("digits", split="eval")
    assert (len(train), len(evaluation)) == (1438, 359)
    assert train.shape == (8, 8, 1)
    images, labels = np.empty((1797, 8, 8, 1), np.uint8), np.empty(1797, np.uint8)
    held = np.arange(1797) % 5 == 4
    images[held], images[~held] = evaluation.images, train.images
    labels[held], labels[~held] = evaluation.labels, train.labels
    values = ((images.astype(int) * 16 + 254) // 255).astype(np.uint8)
    known = "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    assert hashlib.sha256(values.tobytes()).hexdigest() == known
    known = "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"
    assert hashlib.sha256(labels.tobytes()).hexdigest() == known
    assert train.classes == tuple("0123456789")


def test_digits_scale_can_be_undone():
    values = np.arange(17, dtype=np.uint8)
    assert ((scale(values).astype(int) * 16 + 254) // 255 == values).all()
    assert scale(values)[[0, 16]].tolist() == [0, 255]


def test_digits_are_small_and_carry_their_licence():
    folder = Path(sys.modules["drumline.data.sources.arrays"].FILE).parent
    assert (folder / "digits.npz").stat().st_size < 100_000
    assert "CC BY 4.0" in (folder / "DIGITS_LICENSE.txt").read_text()


def test_synthetic_is_the_same_every_time_by_hash():
    source = arrays("synthetic", "classes=5,size=8,samples=40")
    digest = hashlib.sha256(source.take(np.arange(40)).tobytes() + source.labels.tobytes()).hexdigest()
    assert digest == "976b6a52b55e1dd30615f29e5728d2986ced44bcf682b504c7292c91341f5a9e"


def test_synthetic_defaults_and_sizes():
    assert len(arrays("synthetic")) == 2048
    assert (arrays("synthetic").shape, len(arrays("synthetic").classes)) == ((32, 32, 3), 10)
    source = arrays("synthetic", "classes=7, size=16, samples=50", split="eval")
    assert (len(source), source.shape, len(source.classes)) == (5, (16, 16, 3), 7)


def test_synthetic_splits_share_patterns_but_no_image():
    train, evaluation = arrays("synthetic"), arrays("synthetic", split="eval")
    assert not {image.tobytes() for image in train.images} & {image.tobytes() for image in evaluation.images}
    means = np.stack([train.images[train.labels == label].mean(axis=0) for label in range(10)])
    distance = ((evaluation.images[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == evaluation.labels).all()


def test_synthetic_imagenet_size_takes_little_memory_and_time():
    start = time.monotonic()
    source = arrays("synthetic", "classes=1000,size=224,samples=1281167")
    assert isinstance(source, PooledDataset)
    assert len(source) == 1281167
    assert source.images.nbytes <= 64 << 20
    ids = np.array([0, 445, 1281166, 3])
    assert source.take(ids).shape == (4, 224, 224, 3)
    assert np.array_equal(source.take(ids)[0], source.take(ids)[1])
    assert source.labels[0] == source.labels[445]
    assert not np.array_equal(source.take(ids)[0], source.take(ids)[3])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("clases=3", "no 'clases'; classes?"),
        ("size", "size is ''"),
        ("size=0", "size is '0'"),
        ("classes=1", "at least 2"),
        ("samples=1e6", "'1e6'"),
        ("samples=-5", "'-5'"),
        ("samples=²", "'²'"),
    ],
)
def test_synthetic_rejects_other_sizes(path, words):
    with pytest.raises(UserError) as caught:
        arrays("synthetic", path)
    assert words in caught.value.what
    assert caught.value.fix

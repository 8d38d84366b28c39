"""Sources that need no files (digits, synthetic, a user's own), detection, and channel statistics."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.core.errors import UserError
from drumline.data.sources import (
    ArrayDataset,
    DatasetSpec,
    EncodedDataset,
    PooledDataset,
    channel_statistics,
    detect_source,
    open_dataset,
)
from drumline.data.sources.arrays import scale


def arrays(source: str, path: str = "", split: str = "train") -> ArrayDataset:
    found = open_dataset(DatasetSpec(source, path, split))  # type: ignore[arg-type]
    assert isinstance(found, ArrayDataset)
    return found


# digits


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


# synthetic


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
def test_synthetic_refuses_other_sizes(path, words):
    with pytest.raises(UserError) as caught:
        arrays("synthetic", path)
    assert words in caught.value.what
    assert caught.value.fix


# a user's own


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module and gives a function that opens one of its factories."""

    def write(code: str, split: str = "train", factory: str = "make"):
        name = f"own_{hashlib.sha256((str(tmp_path) + code).encode()).hexdigest()[:12]}"
        (tmp_path / f"{name}.py").write_text(
            "import numpy as np, torch\nfrom types import SimpleNamespace as S\n" + code
        )
        return open_dataset(DatasetSpec(f"{name}:{factory}", "some path", split))  # type: ignore[arg-type]

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def test_own_arrays_get_path_and_split(own):
    source = own(
        "def make(path, split):\n"
        "    assert path == 'some path' and split == 'train'\n"
        "    return S(images=np.full((6, 4, 4), 7, np.uint8), labels=[0, 1, 2, 0, 1, 2], classes=['a', 'b', 'c'])\n"
    )
    assert isinstance(source, ArrayDataset)
    assert (source.shape, source.classes) == ((4, 4, 1), ("a", "b", "c"))
    assert source.name.endswith(":make")


@pytest.mark.parametrize(
    "images",
    [
        "torch.arange(96, dtype=torch.uint8).reshape(2, 3, 4, 4)",
        "list(torch.arange(96, dtype=torch.uint8).reshape(2, 3, 4, 4))",
        "torch.arange(96, dtype=torch.uint8).reshape(2, 3, 4, 4).numpy()",
    ],
)
def test_own_tensors_are_converted_once(own, images):
    source = own(
        f"def make(path, split):\n    return S(images={images}, labels=list(torch.tensor([0, 1])))\n"
    )
    assert isinstance(source, ArrayDataset)
    assert type(source.images) is np.ndarray
    assert source.images[1, 2, 3, 1] == torch.arange(96).reshape(2, 3, 4, 4)[1, 1, 2, 3]
    assert source.classes == ("0", "1")


def test_own_files_are_read_and_named(own):
    source = own(
        "class Mine:\n"
        "    labels = np.array([1, 0], np.int16)\n"
        "    def read(self, sample): return bytearray([sample])\n"
        "def make(path, split): return Mine()\n"
    )
    assert isinstance(source, EncodedDataset)
    assert source.read(1) == b"\x01"
    assert source.where(1).endswith(":make sample 1")
    assert source.labels.dtype == np.int64


def test_own_eval_without_classes_takes_them_from_training(own):
    code = (
        "def make(path, split):\n"
        "    n = {'train': 5, 'eval': 2}[split]\n"
        "    return S(images=np.zeros((n, 4, 4), np.uint8), labels=np.arange(n))\n"
    )
    assert own(code, "eval").classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(): pass", "has no callable 'make'"),
        ("1 / 0", "importing own_[0-9a-f]+ raised ZeroDivisionError"),
        ("def make(path, split): raise KeyError('gone')", "raised KeyError: 'gone'"),
        ("def make(path): pass", "unexpected keyword argument 'split'"),
        ("def make(path, split): return S(images=np.zeros((2, 4, 4), np.uint8))", "without labels"),
        ("def make(path, split): return S(labels=[0, 1])", "without labels and images"),
        ("def make(path, split): return S(labels=[0, 1], read=b'')", "read is a bytes"),
        ("def make(path, split): return S(images=torch.rand(2, 3, 4, 4), labels=[0, 1])", "float32"),
        (
            "def make(path, split): return S(images=torch.zeros(2, 4, 4).bfloat16(), labels=[0, 1])",
            "BFloat16",
        ),
        (
            "def make(path, split): return S(images=[np.zeros((2, 2)), np.zeros((3, 3))], labels=[0, 1])",
            "images",
        ),
        (
            "def make(path, split): return S(images=np.zeros((2, 4, 4), np.uint8), labels=[0])",
            "1 labels for 2",
        ),
        ("def make(path, split): return S(images=np.zeros((2, 4, 4), np.uint8), labels=[0, 2])", "label 1"),
        (
            "def make(path, split): return S(images=np.zeros((2, 4, 4), np.uint8), labels=[0, 1], classes=['a'])",
            "contains the label 1, but there are 1 classes",
        ),
        (
            "def make(path, split): return S(images=np.zeros((2, 4, 4), np.uint8), labels=[0, 1], classes='aa')",
            "names a class twice",
        ),
        ("def make(path, split): return S(labels=[], read=print)", "is empty"),
    ],
)
def test_own_mistakes_are_reported_with_the_factorys_name(own, code, words):
    with pytest.raises(UserError, match=words) as caught:
        own(code)
    assert "own_" in caught.value.what
    assert caught.value.fix


def test_own_read_must_give_bytes_and_its_missing_file_is_named(own):
    source = own(
        "class Mine:\n"
        "    labels = [0, 1]\n"
        "    def where(self, sample): return f'image {sample}'\n"
        "    def read(self, sample): return 'text' if sample else open('/nowhere/x.png').read()\n"
        "def make(path, split): return Mine()\n"
    )
    with pytest.raises(UserError, match="image 0 cannot be read"):
        source.read(0)
    with pytest.raises(UserError, match="returned a str"):
        source.read(1)


def test_a_module_that_is_not_there_is_a_user_error():
    with pytest.raises(UserError, match="importing no_such_module_here raised ModuleNotFoundError") as caught:
        open_dataset(DatasetSpec("no_such_module_here:make", "", "train"))
    assert "PYTHONPATH" in caught.value.fix


# detection


def test_auto_is_resolved_by_the_path(tmp_path):
    assert detect_source("auto", "") == "digits"
    assert detect_source("auto", str(tmp_path)) == "folder"
    assert detect_source("synthetic", "size=8") == "synthetic"
    assert detect_source("pack.mod:make", "x") == "pack.mod:make"
    with pytest.raises(UserError, match="does not exist"):
        detect_source("auto", str(tmp_path / "no"))
    (tmp_path / "a.zip").write_bytes(b"")
    with pytest.raises(UserError, match=r"neither a folder nor an \.npz or \.tar"):
        detect_source("auto", str(tmp_path / "a.zip"))


def test_unknown_sources_are_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean cifar10"):
        detect_source("cifar-10", "x")
    with pytest.raises(UserError, match="unknown"):
        open_dataset(DatasetSpec(":", "x", "train"))


# statistics


def test_channel_statistics_are_exact_for_any_chunk(monkeypatch):
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (37, 9, 11, 3), np.uint8)
    source = ArrayDataset("x", images, np.zeros(37, np.int64), ("a",))
    mean, std = channel_statistics(source)
    flat = images.reshape(-1, 3).astype(np.float64) / 255
    assert np.allclose(mean, flat.mean(axis=0), rtol=1e-12)
    assert np.allclose(std, flat.std(axis=0), rtol=1e-12)
    assert all(type(value) is float for value in mean + std)
    monkeypatch.setattr("drumline.data.sources.base.CHUNK_BYTES", 1000)
    assert channel_statistics(source) == (mean, std)


def test_channel_statistics_count_repeated_images_as_often_as_they_are_shown():
    rng = np.random.default_rng(4)
    pooled = PooledDataset("x", rng.integers(0, 256, (3, 4, 4, 1), np.uint8), np.zeros(8, np.int64), ("a",))
    whole = ArrayDataset("x", pooled.take(np.arange(8)), pooled.labels, pooled.classes)
    assert channel_statistics(pooled) == channel_statistics(whole)


def test_channel_statistics_of_digits_are_known():
    mean, std = channel_statistics(arrays("digits"))
    assert (round(mean[0], 4), round(std[0], 4)) == (0.305, 0.3764)


def test_channel_statistics_refuse_a_constant_channel():
    images = np.random.default_rng(5).integers(0, 256, (4, 4, 4, 3), np.uint8)
    images[..., 2] = 9
    with pytest.raises(UserError, match="channel 2 has the same value") as caught:
        channel_statistics(ArrayDataset("x", images, np.zeros(4, np.int64), ("a",)))
    assert "data.std" in caught.value.fix

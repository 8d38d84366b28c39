"""A user's own source: `package.module:factory`."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from drumline.core.errors import UserError
from drumline.data.sources import (
    ArrayDataset,
    DatasetSpec,
    EncodedDataset,
    open_dataset,
)


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


def test_a_factory_of_arrays_gets_path_and_split(own):
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
def test_tensors_of_a_custom_source_are_converted_once(own, images):
    source = own(
        f"def make(path, split):\n    return S(images={images}, labels=list(torch.tensor([0, 1])))\n"
    )
    assert isinstance(source, ArrayDataset)
    assert type(source.images) is np.ndarray
    assert source.images[1, 2, 3, 1] == torch.arange(96).reshape(2, 3, 4, 4)[1, 1, 2, 3]
    assert source.classes == ("0", "1")


def test_files_of_a_custom_source_are_read_and_named(own):
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


def test_classes_of_the_evaluation_split_default_to_those_of_training(own):
    code = (
        "def make(path, split):\n"
        "    n = {'train': 5, 'eval': 2}[split]\n"
        "    return S(images=np.zeros((n, 4, 4), np.uint8), labels=np.arange(n))\n"
    )
    assert own(code, "eval").classes == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(): pass", "has nothing called make"),
        ("1 / 0", "importing own_[0-9a-f]+ failed with ZeroDivisionError"),
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
def test_mistakes_in_a_factory_are_reported_with_its_name(own, code, words):
    with pytest.raises(UserError, match=words) as caught:
        own(code)
    assert "own_" in caught.value.what
    assert caught.value.fix


def test_read_must_return_bytes_and_a_missing_file_is_named(own):
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
    with pytest.raises(UserError, match="there is no module no_such_module_here") as caught:
        open_dataset(DatasetSpec("no_such_module_here:make", "", "train"))
    assert "PYTHONPATH" in caught.value.fix

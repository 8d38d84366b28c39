"""CIFAR: both editions of both sets, and pickles that try to run something."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import resource
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.data.sources import ArrayDataset, DatasetSpec, detect_source, open_dataset
from drumline.data.sources.cifar import PlainArray, read_plain_pickle

RNG = np.random.default_rng(1)
PER_FILE = 4
FILES10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
PLANES10 = {name: RNG.integers(0, 256, (PER_FILE, 3072), np.uint8) for name in FILES10}
LABELS10 = {name: RNG.integers(0, 10, PER_FILE).tolist() for name in FILES10}
PLANES100 = {name: RNG.integers(0, 256, (PER_FILE, 3072), np.uint8) for name in ("train", "test")}
LABELS100 = {name: RNG.integers(0, 100, PER_FILE).tolist() for name in ("train", "test")}


def python2(value: object) -> bytes:
    """A pickle as Python 2 wrote it (the published files): all text and array data as byte strings."""
    out = io.BytesIO()
    out.write(b"\x80\x02")

    def short(data: bytes) -> bytes:
        return (
            b"U" + bytes([len(data)]) + data
            if len(data) < 256
            else b"T" + len(data).to_bytes(4, "little") + data
        )

    def save(item: object) -> None:
        if isinstance(item, dict):
            out.write(b"}(")
            for key, entry in item.items():
                save(key)
                save(entry)
            out.write(b"u")
        elif isinstance(item, list):
            out.write(b"](")
            for entry in item:
                save(entry)
            out.write(b"e")
        elif isinstance(item, str):
            out.write(short(item.encode()))
        elif isinstance(item, int):
            out.write(b"J" + item.to_bytes(4, "little", signed=True))
        elif isinstance(item, np.ndarray):
            out.write(
                b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
                + short(b"b")
                + b"\x87R(K\x01"
            )
            save(item.shape[0])
            save(item.shape[1])
            out.write(b"\x86cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|"))
            out.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + short(item.tobytes()) + b"tb")

    save(value)
    return out.getvalue() + b"."


def protocol(number: int):
    return lambda value: pickle.dumps(value, protocol=number)


WRITERS = {"python2": python2, **{f"protocol {n}": protocol(n) for n in (2, 3, 4, 5)}}


def write10(folder: Path, dump=python2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES10:
        (folder / name).write_bytes(
            dump({"data": PLANES10[name], "labels": LABELS10[name], "batch_label": name})
        )
    (folder / "batches.meta").write_bytes(dump({"label_names": [f"class {i}" for i in range(10)]}))
    return folder


def write10_binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES10:
        rows = np.concatenate([np.array(LABELS10[name], np.uint8)[:, None], PLANES10[name]], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("".join(f"class {i}\n" for i in range(10)) + "\n")
    return folder


def write100(folder: Path, dump=python2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        record = {"data": PLANES100[name], "fine_labels": LABELS100[name], "coarse_labels": [0] * PER_FILE}
        (folder / name).write_bytes(dump(record))
    (folder / "meta").write_bytes(dump({"fine_label_names": [f"class {i}" for i in range(100)]}))
    return folder


def write100_binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        fine = np.array(LABELS100[name], np.uint8)[:, None]
        (folder / f"{name}.bin").write_bytes(
            np.concatenate([fine * 0 + 19, fine, PLANES100[name]], axis=1).tobytes()
        )
    return folder


def opened(source: str, path: Path, split: str = "train") -> ArrayDataset:
    found = open_dataset(DatasetSpec(source, str(path), split))  # type: ignore[arg-type]
    assert isinstance(found, ArrayDataset)
    return found


def check(source: ArrayDataset, planes: list[np.ndarray], labels: list[int]) -> None:
    """Published layout: 1,024 red, then green, then blue values, each in rows."""
    stacked = np.concatenate(planes)
    assert source.shape == (32, 32, 3)
    assert source.labels.tolist() == labels
    assert source.images.flags.c_contiguous
    for sample, y, x, channel in ((0, 0, 0, 0), (1, 3, 30, 1), (len(stacked) - 1, 31, 31, 2)):
        assert source.images[sample, y, x, channel] == stacked[sample, 1024 * channel + 32 * y + x]


@pytest.mark.parametrize("dump", WRITERS.values(), ids=WRITERS.keys())
@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar10_pickles(tmp_path, dump, below):
    write10(tmp_path / below, dump)
    assert detect_source("auto", str(tmp_path)) == "cifar10"
    check(
        opened("cifar10", tmp_path),
        [PLANES10[name] for name in FILES10[:5]],
        [label for name in FILES10[:5] for label in LABELS10[name]],
    )
    check(opened("cifar10", tmp_path, "eval"), [PLANES10["test_batch"]], LABELS10["test_batch"])
    assert opened("cifar10", tmp_path).classes == tuple(f"class {i}" for i in range(10))


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path, below):
    write10_binary(tmp_path / below)
    assert detect_source("auto", str(tmp_path)) == "cifar10"
    check(
        opened("cifar10", tmp_path),
        [PLANES10[name] for name in FILES10[:5]],
        [label for name in FILES10[:5] for label in LABELS10[name]],
    )
    assert opened("cifar10", tmp_path, "eval").classes[9] == "class 9"


@pytest.mark.parametrize("dump", WRITERS.values(), ids=WRITERS.keys())
def test_cifar100_pickles_use_fine_labels(tmp_path, dump):
    write100(tmp_path / "cifar-100-python", dump)
    assert detect_source("auto", str(tmp_path)) == "cifar100"
    check(opened("cifar100", tmp_path), [PLANES100["train"]], LABELS100["train"])
    check(opened("cifar100", tmp_path, "eval"), [PLANES100["test"]], LABELS100["test"])
    assert opened("cifar100", tmp_path).classes[99] == "class 99"


def test_cifar100_binary_uses_fine_labels_and_numbers_unnamed_classes(tmp_path):
    write100_binary(tmp_path)
    assert detect_source("auto", str(tmp_path)) == "cifar100"
    check(opened("cifar100", tmp_path, "eval"), [PLANES100["test"]], LABELS100["test"])
    assert opened("cifar100", tmp_path).classes == tuple(str(i) for i in range(100))


def test_two_sets_in_one_folder_are_not_guessed_between(tmp_path):
    write10(tmp_path / "cifar-10-batches-py")
    write100(tmp_path / "cifar-100-python")
    with pytest.raises(UserError, match="cifar10 and cifar100"):
        detect_source("auto", str(tmp_path))
    assert len(opened("cifar10", tmp_path)) == 5 * PER_FILE
    assert len(opened("cifar100", tmp_path)) == PER_FILE


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.mark.parametrize("number", [0, 2, 4, 5])
def test_a_hostile_pickle_is_rejected_by_name_and_runs_nothing(tmp_path, number):
    write10(tmp_path)
    marker = tmp_path / "owned"
    record = {"data": PLANES10["test_batch"], "labels": [0] * PER_FILE, "x": Hostile(marker)}
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(record, protocol=number))
    with pytest.raises(UserError) as caught:
        opened("cifar10", tmp_path)
    assert f"{os.system.__module__}.system" in caught.value.what
    assert "data_batch_3" in caught.value.what
    assert "do not trust" in caught.value.fix
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins\neval",
        "builtins\ngetattr",
        "numpy\nload",
        "numpy.core.multiarray\nscalar",
        "numpy\ndtype.type",
    ],
)
def test_names_beyond_plain_arrays_are_rejected(name):
    with pytest.raises(UserError, match=name.replace("\n", r"\.")):
        read_plain_pickle(f"c{name}\n.".encode(), "here")


def test_dotted_names_cannot_reach_out_of_an_admitted_one():
    attack = b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93."
    assert "STACK_GLOBAL" in [op.name for op, *_ in pickletools.genops(attack)]
    with pytest.raises(UserError, match=r"numpy\.ndarray\.__init__"):
        read_plain_pickle(attack, "here")


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(b"Pnumber\n.", id="persistent id"),
        pytest.param(b"K\x01Q.", id="binary persistent id"),
        pytest.param(b"\x82\x01.", id="extension registry"),
        pytest.param(b"\x80\x05\x97.", id="out-of-band buffer"),
        pytest.param(b"(inumpy\ndtype\n.", id="INST"),
        pytest.param(b"cnumpy\ndtype\n)\x81.", id="NEWOBJ"),
        pytest.param(b"\x80\x04\x8f.", id="set"),
        pytest.param(b"cnumpy\ndtype\nN}U\x04callNs\x86b.", id="attributes of a function"),
        pytest.param(b"cnumpy\ndtype\n}U\x04callNsb.", id="dictionary of a function"),
    ],
)
def test_nothing_but_plain_data_is_unpickled(attack):
    with pytest.raises(UserError, match="here is not a readable pickle"):
        read_plain_pickle(attack, "here")
    array = read_plain_pickle(pickle.dumps({"a": np.arange(3, dtype=np.uint8)}), "here")["a"]
    assert array.integers("here").tolist() == [0, 1, 2]


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1])
def test_a_truncated_pickle_is_rejected(tmp_path, cut):
    write10(tmp_path)
    whole = (tmp_path / "test_batch").read_bytes()
    (tmp_path / "test_batch").write_bytes(whole[:cut])
    with pytest.raises(UserError, match="test_batch is not a readable pickle"):
        opened("cifar10", tmp_path, "eval")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1, 2], "holds a list, not a dictionary"),
        ({"pixels": 1}, "lacks 'data' or 'labels'; it holds pixels"),
        ({"data": PLANES10["test_batch"][:, :3071], "labels": [0] * 4}, r"shape \(4, 3071\)"),
        ({"data": PLANES10["test_batch"].astype(np.int16), "labels": [0] * 4}, "int16"),
        ({"data": PLANES10["test_batch"].astype(float), "labels": [0] * 4}, "plain array of integers"),
        ({"data": np.array([{}] * 4), "labels": [0] * 4}, "plain array of integers"),
        ({"data": PLANES10["test_batch"], "labels": [0] * 3}, "3 labels for 4 images"),
        ({"data": PLANES10["test_batch"], "labels": [0, 1, 2, 10]}, "label 10, not 0 to 9"),
        ({"data": PLANES10["test_batch"], "labels": [0, 1, 2, -1]}, "label -1"),
        ({"data": PLANES10["test_batch"], "labels": ["a"] * 4}, "not a list of whole numbers"),
    ],
)
def test_wrong_contents_are_rejected(tmp_path, record, words):
    write10(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(record, protocol=4))
    with pytest.raises(UserError, match=words):
        opened("cifar10", tmp_path, "eval")


@pytest.mark.parametrize("number", [2, 4, 5])
def test_arrays_keep_byte_order_and_memory_order(number):
    value = np.array([[1, 2, 300], [4, 5, -6]], ">i4")
    for array in (value, np.asfortranarray(value)):
        read = read_plain_pickle(pickle.dumps({"a": array}, protocol=number), "here")["a"]
        assert isinstance(read, PlainArray)
        assert read.integers("here").tolist() == value.tolist()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(value=st.dictionaries(st.text(), PLAIN, max_size=4), number=st.integers(0, 5))
def test_plain_data_is_read_as_by_python(value, number):
    written = pickle.dumps(value, protocol=number)
    assert read_plain_pickle(written, "here") == value
    assert read_plain_pickle(pickletools.optimize(written), "here") == value


@settings(max_examples=300)
@given(
    number=st.integers(0, 5),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 40),
)
def test_a_damaged_pickle_is_read_or_rejected_and_never_breaks(number, changes, cut):
    whole = {
        "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "labels": [1, 2, 3],
        "x": b"abc",
        "y": (1.5, None),
    }
    broken = bytearray(pickle.dumps(whole, protocol=number))
    for place, value in changes:
        broken[place % len(broken)] = value
    with suppress(UserError):
        found = read_plain_pickle(bytes(broken[: len(broken) - cut]), "here")
        for item in found.values():
            if isinstance(item, PlainArray):
                item.integers("here")


@settings(max_examples=300)
@given(
    codes=st.lists(
        st.sampled_from([bytes([code]) for code in range(256)] + [b"K\x01", b"U\x01a", b"q\x00", b"h\x00"])
    )
)
def test_any_string_of_instructions_is_read_or_rejected(codes):
    with suppress(UserError):
        read_plain_pickle(b"".join(codes) + b".", "here")


def laughs(levels, hide=b""):
    """A tuple of two tuples of two tuples ...: each memoized once, 2^levels when written out or hashed."""
    return b"K\x01" + b"".join(hide + b"\x94h" + bytes([level]) + b"\x86" for level in range(levels))


BOMBS = {
    "remembered at four billion": b"\x80\x02}r\xff\xff\xff\xff.",
    "eight exabytes": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "a frame of eight exabytes": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f}.",
    "a key of 2^200 parts": b"\x80\x04}" + laughs(200) + b"K\x01s.",
    "a key of 2^200 parts, behind a list that adds nothing": b"\x80\x04}" + laughs(200, b"(e") + b"K\x01s.",
    "a key of 2^200 parts, behind a dictionary that adds nothing": b"\x80\x04}"
    + laughs(200, b"(u")
    + b"K\x01s.",
    "a key of 2^200 parts, under what is popped": b"\x80\x04}" + laughs(200, b"N0") + b"K\x01s.",
    "text of 2^200 parts": b"\x80\x04c_codecs\nencode\n" + laughs(200) + b"U\x06latin1\x86R.",
    "one text, encoded again and again": b"\x80\x02(c_codecs\nencode\nq\x00X\x00\x00\x01\x00"
    + b"a" * 65536
    + b"q\x01U\x01aq\x02"
    + b"h\x00h\x01h\x02\x86R" * 16384
    + b"l.",
    "a number of a million digits": b"L" + b"9" * 10**6 + b"L\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_neither_time_nor_memory(name):
    limit, began = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), limit[1]))
    try:
        with suppress(UserError):
            assert read_plain_pickle(BOMBS[name], "here") == {}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("shape", [(10**6,) * 8, (2**63,), (1,) * 10**5, (laughs,), [3, 4], (3.0, 4)])
def test_an_array_of_an_impossible_shape_is_rejected(shape):
    array = PlainArray()
    array.raw, array.shape = bytes(12), shape
    array.dtype = read_plain_pickle(pickle.dumps({"a": np.zeros(1, np.uint8)}), "here")["a"].dtype
    with pytest.raises(UserError, match="not a plain array of integers") as caught:
        array.integers("here")
    assert len(str(caught.value)) < 300


def test_binary_files_of_wrong_size_are_rejected(tmp_path):
    write10_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(bytes(3072))
    with pytest.raises(UserError, match=r"data_batch_2.bin has 3072 bytes, not a multiple of 3073"):
        opened("cifar10", tmp_path)


def test_a_missing_file_is_named(tmp_path):
    (write10(tmp_path) / "data_batch_4").unlink()
    with pytest.raises(UserError, match="data_batch_4 is missing"):
        opened("cifar10", tmp_path)


def test_wrong_class_names_are_rejected(tmp_path):
    (write10_binary(tmp_path) / "batches.meta.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match="does not name 10 different classes"):
        opened("cifar10", tmp_path)


@pytest.mark.parametrize("source", ["cifar10", "cifar100"])
def test_the_error_for_a_folder_without_files_names_them(tmp_path, source):
    with pytest.raises(UserError, match=f"has no {source} files") as caught:
        opened(source, tmp_path)
    assert "cifar-10" in caught.value.fix

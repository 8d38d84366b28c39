"""Tensor files: the library's own bytes, every header distrusted, what is hashed is what is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.files import CorruptError, open_regular, read_small
from drumline.state import tensors as tensor_file
from drumline.state.tensors import read_tensors, verify_file, write_tensors

TENSORS = {
    "b.weight": torch.arange(6.0).reshape(2, 3),
    "a.half": torch.tensor([1.5, -2.0]).bfloat16(),
    "grün": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "byte": torch.tensor([3], dtype=torch.uint8),
    "wide": torch.tensor([0.1], dtype=torch.float64),
}


def file_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), places: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_library_reads_what_we_write_and_we_what_it_writes(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    size, sha256 = write_tensors(tmp_path / "ours", TENSORS, metadata)
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs", metadata)
    content = (tmp_path / "ours").read_bytes()
    assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    ours = read_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        for read in (ours[name], theirs[name]):
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read, tensor)


def test_the_loaded_tensors_no_longer_depend_on_the_file(tmp_path: Path) -> None:
    """A mapped file would show what somebody writes into it after it was verified."""
    path = tmp_path / "w"
    write_tensors(path, TENSORS)
    loaded = read_tensors(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(loaded["b.weight"], TENSORS["b.weight"])


def test_what_changes_between_looking_and_loading_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file passes, and is exchanged before the next read: those other bytes are the ones that are hashed."""
    path = tmp_path / "w"
    size, sha256 = write_tensors(path, TENSORS)
    verify_file(path, size, sha256)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="checksum does not match"):
        read_tensors(path, size, sha256)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "header cannot be parsed"),
        (b"[]", b"", "not a table"),
        (b"\xff", b"", "header cannot be parsed"),
        (b"[" * 100_000, b"", "header cannot be parsed"),
        (b'{"a": 1' + b"0" * 5000 + b"}", b"", "header cannot be parsed"),
        (b'{"a": {}, "a": {}}', b"", "a name appears twice"),
        ({"a": 1}, b"", "no valid offsets"),
        ({"a": entry(places=None)}, b"", "no valid offsets"),
        ({"a": entry(places=[0, True])}, b"\0" * 8, "no valid offsets"),
        ({"a": entry(places=[-8, 0])}, b"", "no valid offsets"),
        ({"a": entry(places=[0, 10**30])}, b"", "no valid offsets"),
        (
            {"a": entry(shape=[10**12], places=[0, 4 * 10**12])},
            b"\0" * 8,
            "offsets of tensor .* do not match",
        ),
        ({"a": entry(shape=[2**40, 2**40, 2**40])}, b"\0" * 8, "offsets of tensor .* do not match"),
        ({"a": entry(shape=[-2])}, b"\0" * 8, "no valid shape"),
        ({"a": entry(shape=[2.0])}, b"\0" * 8, "no valid shape"),
        ({"a": entry(shape="2")}, b"\0" * 8, "no valid shape"),
        ({"a": entry(shape=[1] * 1000)}, b"\0" * 8, "no valid shape"),
        ({"a": entry(dtype="F4")}, b"\0" * 8, "unknown type"),
        ({"a": entry(dtype=["F32"])}, b"\0" * 8, "unknown type"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, "offsets of tensor .* do not match"),
        ({"a": entry(places=[8, 16])}, b"\0" * 16, "offsets of tensor .* do not match"),
        ({"a": entry()}, b"\0" * 9, "belong to no tensor"),
        ({"a": entry()}, b"\0" * 7, "offsets of tensor .* do not match"),
        ({}, b"\0", "belong to no tensor"),
    ],
)
def test_a_wrong_header_is_rejected_with_file_and_reason(
    tmp_path: Path, header: Any, data: bytes, words: str
) -> None:
    with pytest.raises(CorruptError, match=words) as caught:
        read_tensors(file_of(tmp_path / "w", header, data))
    assert str(tmp_path / "w") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0", b"\xff" * 8, struct.pack("<Q", 1 << 60) + b"{}"])
def test_a_header_longer_than_the_file_takes_no_memory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(CorruptError, match="not a safetensors file"):
        read_tensors(tmp_path / "w")


def test_a_file_larger_than_the_memory_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of a stranger: 1 PB that take no disk."""
    file_of(tmp_path / "w", {})
    os.truncate(tmp_path / "w", 1 << 43)
    with pytest.raises(CorruptError, match=r"8,192\.0 GiB do not fit into .* of free memory"):
        read_tensors(tmp_path / "w")


def test_a_tensor_in_an_odd_place_is_read_all_the_same(tmp_path: Path) -> None:
    """Other writers may put a byte in front of a float."""
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [1], [1, 5])}
    found = read_tensors(file_of(tmp_path / "w", header, b"\x05" + struct.pack("<f", 1.5)))
    assert (found["a"].item(), found["b"].item()) == (5, 1.5)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "loop", "nul"])
def test_a_path_that_is_no_regular_file_is_rejected_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w"
    if kind == "link":
        write_tensors(tmp_path / "there", TENSORS)
        path.symlink_to(tmp_path / "there")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path = Path(f"{path}\0")
    words = {"link": "is a link", "loop": "is a link", "nul": "null"}.get(kind, "not a regular file")
    with pytest.raises(CorruptError, match=words), open_regular(path):
        pass


def test_a_small_file_that_is_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"x")
    os.truncate(tmp_path / "m", 1 << 40)
    with pytest.raises(CorruptError, match="more than the limit of 100"):
        read_small(tmp_path / "m", 100)


_PLACES = st.one_of(st.none(), st.lists(st.integers(-2, 20), max_size=3))
_ENTRIES = st.one_of(
    st.none(),
    st.integers(),
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F64", "U8", "I64", "BOOL", "F9", None, 3]),
            "shape": st.one_of(st.none(), st.lists(st.integers(-1, 4), max_size=3)),
            "data_offsets": _PLACES,
        },
    ),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=3), _ENTRIES, max_size=3), data=st.binary(max_size=20))
def test_any_header_is_read_as_the_library_does_or_rejected(
    tmp_path: Path, header: dict[str, Any], data: bytes
) -> None:
    path = file_of(tmp_path / "w", header, data)
    try:
        ours = read_tensors(path)
    except CorruptError:
        return
    theirs = safetensors.torch.load(path.read_bytes())
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (ours[name].dtype, ours[name].shape) == (theirs[name].dtype, theirs[name].shape)
        assert ours[name].numpy().tobytes() == theirs[name].numpy().tobytes()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.integers(0, 3))
def test_a_damaged_file_without_a_checksum_is_read_or_rejected_but_never_breaks(
    tmp_path: Path, place: int, bit: int, cut: int
) -> None:
    path = tmp_path / "w"
    path.unlink(missing_ok=True)
    write_tensors(path, TENSORS)
    content = bytearray(path.read_bytes())
    content[place % (len(content) // 2)] ^= 1 << bit
    path.write_bytes(content[: len(content) - cut])
    with suppress(CorruptError):
        read_tensors(path)


def test_a_disk_that_changes_what_is_written_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is of the memory, not of what the disk gives back."""
    honest = tensor_file._write

    def lying(file: Any, content: memoryview) -> None:
        changed = bytearray(content)
        if changed:
            changed[-1] ^= 1
        honest(file, memoryview(changed))

    monkeypatch.setattr(tensor_file, "_write", lying)
    size, sha256 = write_tensors(tmp_path / "w", TENSORS)
    with pytest.raises(CorruptError, match="checksum does not match"):
        verify_file(tmp_path / "w", size, sha256)

"""A checkpoint is whole or it is refused by name; nothing is overwritten; the newest sound one is used."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.state import checkpoint
from drumline.state.checkpoint import (
    begin_folder,
    checkpoints,
    copy_into,
    newest_valid,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from drumline.state.fingerprint import state_sha256
from drumline.state.manifest import Position, read_manifest

RECIPE = '[optim]\nlr = 1e-07\nname = "grün"\n'
FILES = ("model.safetensors", "optimizer.safetensors", "average.safetensors", "manifest.json")


def groups(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    model = {
        "conv.weight": torch.randn(4, 3, 3, 3),
        "bn.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(5).bfloat16(),
        "wide": torch.randn(2, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    return {"model": model, "optimizer": {"m/conv.weight": torch.randn(4, 3, 3, 3)}, "average": dict(model)}


def write(folder: Path, step: int = 3, seed: int = 0) -> Path:
    position = Position(step, per_epoch=10, best_step=2, best_value=0.1 + 0.2, scaler={"scale": 65536.0})
    return write_checkpoint(folder, groups(seed), position, RECIPE, {"threads": 2, "host": "ä", "eps": 1e-08})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(tmp_path)


def test_what_is_read_is_what_was_written(saved: Path) -> None:
    manifest, found = read_checkpoint(saved)
    assert saved.name == "step-3"
    assert manifest.position == Position(3, 10, 2, 0.1 + 0.2, {"scale": 65536.0})
    assert manifest.recipe == RECIPE
    assert manifest.environment == {"threads": 2, "host": "ä", "eps": 1e-08}
    assert manifest.state_sha256 == state_sha256(groups())
    assert sorted(path.name for path in saved.iterdir()) == sorted(FILES)
    assert found.keys() == groups().keys()
    for group, tensors in groups().items():
        assert found[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name], tensor)


def test_any_tool_can_load_the_model_under_plain_names(saved: Path) -> None:
    assert torch.equal(
        load_file(saved / "model.safetensors")["conv.weight"], groups()["model"]["conv.weight"]
    )


def test_an_optimizer_without_state_is_saved_too(tmp_path: Path) -> None:
    """SGD without momentum has nothing to keep."""
    path = write_checkpoint(tmp_path, {**groups(), "optimizer": {}}, Position(1, 1), "", {})
    assert read_checkpoint(path)[1]["optimizer"] == {}


def positions(path: Path) -> Iterator[int]:
    """First and last byte, the header of a safetensors file, and places all over."""
    size = path.stat().st_size
    yield from {0, 1, 7, 8, 9, 20, size // 3, size // 2, size - 2, size - 1}
    yield from range(11, size, max(1, size // 23))


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_rejected_naming_the_file(saved: Path, name: str) -> None:
    path = saved / name
    whole = path.read_bytes()
    for number, place in enumerate(positions(path)):
        for bit in {number % 8, 5}:
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            with pytest.raises(CorruptError, match=name):
                verify_checkpoint(saved)
            with pytest.raises(CorruptError, match=name):
                read_checkpoint(saved)
    path.write_bytes(whole)
    verify_checkpoint(saved)


def test_any_flipped_bit_of_the_manifest_is_rejected(saved: Path) -> None:
    """In every byte, those bits that could leave the meaning alone (1e-07 is 1E-07), and all bits of some."""
    path = saved / "manifest.json"
    whole = path.read_bytes()
    assert b"e-08" in whole
    assert rb"\u00e4" in whole
    accepted = []
    for place in range(len(whole)):
        for bit in (0, 5) if place % 11 else range(8):
            broken = bytearray(whole)
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            try:
                read_manifest(saved)
            except CorruptError:
                continue
            accepted.append((place, bit))
    assert accepted == []


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_file_is_rejected_by_name(saved: Path, name: str) -> None:
    path = saved / name
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptError, match=name):
            verify_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [b"\0", b"\n", b" " * 100])
def test_extra_bytes_are_rejected_by_name(saved: Path, name: str, more: bytes) -> None:
    with (saved / name).open("ab") as file:
        file.write(more)
    with pytest.raises(CorruptError, match=name):
        verify_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_rejected_by_name(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(CorruptError, match=name):
        verify_checkpoint(saved)


def test_a_file_of_another_checkpoint_is_rejected(saved: Path, tmp_path: Path) -> None:
    """The same size, sound in itself, and still not what was saved here."""
    other = write(tmp_path, 4, seed=1)
    shutil.copyfile(other / "model.safetensors", saved / "model.safetensors")
    with pytest.raises(CorruptError, match=r"model\.safetensors: its checksum does not match"):
        verify_checkpoint(saved)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "7", '{"format": 1}', "\ufeff{}"])
def test_a_manifest_that_is_something_else_is_rejected(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        read_manifest(saved)


def test_a_checkpoint_of_another_format_is_rejected_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    path = write(tmp_path)
    monkeypatch.undo()
    with pytest.raises(CorruptError, match="format 3, this version reads formats up to 2"):
        read_manifest(path)


def test_a_file_where_a_checkpoint_should_be_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "step-5").write_text("not a folder")
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        verify_checkpoint(tmp_path / "step-5")


def test_a_step_is_never_overwritten(saved: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(FileExistsError):
        write(tmp_path, 3, seed=1)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_every_file_is_durable_before_the_final_name_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a name may be on disk whose bytes are not, unless they were synced first."""
    events: list[str] = []
    sync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        events.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path)
    named = next(place for place, event in enumerate(events) if event.endswith(".tmp -> step-3"))
    before = {
        event.partition(".json.")[0] for event in events[:named]
    }  # the manifest has a temporary name first
    assert before - {"manifest"} == {*FILES, events[named].removesuffix(" -> step-3")}
    assert events[named + 1 :] == [tmp_path.name]


def test_an_incomplete_checkpoint_of_the_same_step_does_not_block_a_save(tmp_path: Path) -> None:
    """Its writer may only be frozen, and go on."""
    stale = begin_folder(tmp_path, 3)
    (stale / "average.safetensors").write_text("half")
    assert sorted(path.name for path in write(tmp_path).iterdir()) == sorted(FILES)
    assert [path.name for path in stale.iterdir()] == ["average.safetensors"]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, save = [], checkpoint.write_tensors

    def fails(path: Path, tensors: dict[str, torch.Tensor], metadata: None) -> tuple[int, str]:
        calls.append(path)
        written = save(path, tensors, metadata)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    monkeypatch.setattr(checkpoint, "write_tensors", fails)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_finished_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write(tmp_path, step)
    (tmp_path / "step-11.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_the_newest_valid_one_is_used_and_the_others_are_explained(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    assert newest_valid(tmp_path) == (tmp_path / "step-4", [])
    (tmp_path / "step-4" / "optimizer.safetensors").unlink()
    with (tmp_path / "step-3" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    found, complaints = newest_valid(tmp_path)
    assert found == tmp_path / "step-2"
    assert [reason.rpartition("/")[2].split(":")[0] for reason in complaints] == [
        "optimizer.safetensors",
        "model.safetensors",
    ]
    assert "100 bytes" in complaints[1]


def test_without_a_valid_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, [])
    (write(tmp_path) / "manifest.json").unlink()
    found, complaints = newest_valid(tmp_path)
    assert found is None
    assert len(complaints) == 1


def test_loading_writes_into_the_live_tensors(saved: Path) -> None:
    live = {
        group: {name: torch.zeros_like(t) for name, t in tensors.items()}
        for group, tensors in groups(1).items()
    }
    places = [tensor.data_ptr() for tensors in live.values() for tensor in tensors.values()]
    copy_into(read_checkpoint(saved)[1], live, saved)
    assert [tensor.data_ptr() for tensors in live.values() for tensor in tensors.values()] == places
    assert state_sha256(live) == state_sha256(groups())


def test_a_live_state_that_does_not_fit_is_rejected_with_the_name(saved: Path) -> None:
    loaded = read_checkpoint(saved)[1]
    live = groups()
    live["model"]["extra.bias"] = torch.zeros(1)
    with pytest.raises(
        UserError, match=r"its model does not fit \(1 names differ, the first is 'extra.bias'\)"
    ):
        copy_into(loaded, live, saved)
    live = groups()
    live["optimizer"]["m/conv.weight"] = torch.zeros(9, 3, 3, 3)
    with pytest.raises(UserError, match=r"'m/conv.weight' has shape \(4, 3, 3, 3\), the model has \(9"):
        copy_into(loaded, live, saved)
    live = groups()
    live["model"]["conv.weight"] = live["model"]["conv.weight"].half()
    with pytest.raises(UserError, match=r"'conv.weight' has type torch.float32, the model has torch.float16"):
        copy_into(loaded, live, saved)
    del loaded["average"]
    with pytest.raises(UserError, match="its average does not fit"):
        copy_into(loaded, groups(), saved)


def test_a_manifest_reads_as_plain_json(saved: Path) -> None:
    content = json.loads((saved / "manifest.json").read_text())
    assert content["position"]["step"] == 3
    assert set(content["files"]) == set(FILES) - {"manifest.json"}

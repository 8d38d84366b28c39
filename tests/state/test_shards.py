"""Many write, one seals, and what they wrote is one checkpoint or none."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_sealed, write_sealed
from drumline.state import shards
from drumline.state.checkpoint import begin_folder, checkpoints, read_checkpoint, write_checkpoint
from drumline.state.manager import CheckpointManager
from drumline.state.manifest import MANIFEST, Position
from drumline.state.shards import LocalGroups, TensorShard, seal_shards, shard_rows, write_shards
from drumline.state.tensors import file_sha256, write_tensors

POSITION = Position(step=5, per_epoch=10)
RECIPE = "[run]\nseed = 1\n"
WEIGHT, BIAS = torch.arange(15.0).reshape(5, 3), torch.tensor([1.5])


def local(rank: int, world: int) -> LocalGroups:
    first, last = shard_rows(5, rank, world)
    parts = {"weight": TensorShard(WEIGHT[first:last], (5, 3))}
    whole = {"bias": TensorShard(BIAS, None), "count": TensorShard(torch.tensor(3), None)}
    steps = {"step/weight": TensorShard(torch.tensor(2.0), None)} if not rank else {}
    return {
        "model": parts | (whole if not rank else {}),
        "optimizer": {"slot/weight": TensorShard(-WEIGHT[first:last], (5, 3))} | steps,
    }


def written(folder: Path, world: int = 3, **options: Any) -> Path:
    temporary = begin_folder(folder, 5)
    for rank in reversed(range(world)):
        write_shards(temporary, rank, world, local(rank, world))
    memory = {"memory": {"bank": torch.ones(2)}}
    return seal_shards(temporary, world, POSITION, RECIPE, {}, whole=memory, **options)


@given(rows=st.integers(0, 40), world=st.integers(1, 12))
def test_the_shares_of_rows_cover_them_in_order(rows: int, world: int) -> None:
    shares = [shard_rows(rows, rank, world) for rank in range(world)]
    assert [row for first, last in shares for row in range(first, last)] == list(range(rows))
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(world)] if rows else []
    assert [last - first for first, last in shares][: len(chunks)] == chunks


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_pieces_join_to_what_a_plain_checkpoint_holds(tmp_path: Path, world: int) -> None:
    manifest, groups = read_checkpoint(written(tmp_path / "pieces", world))
    plain = {
        "model": {"weight": WEIGHT, "bias": BIAS, "count": torch.tensor(3)},
        "optimizer": {"slot/weight": -WEIGHT, "step/weight": torch.tensor(2.0)},
        "memory": {"bank": torch.ones(2)},
    }
    assert {group: set(tensors) for group, tensors in groups.items()} == {g: set(t) for g, t in plain.items()}
    for group, tensors in plain.items():
        assert all(torch.equal(groups[group][name], tensor) for name, tensor in tensors.items())
    other = read_checkpoint(write_checkpoint(tmp_path / "plain", plain, POSITION, RECIPE, {}))[0]
    assert manifest.state_sha256 == other.state_sha256
    assert other.format == 1
    assert '"pieces"' not in (tmp_path / "plain" / "step-5" / MANIFEST).read_text()


def test_nothing_stands_under_the_name_before_it_is_sealed_and_no_receipt_after(tmp_path: Path) -> None:
    temporary = begin_folder(tmp_path, 5)
    write_shards(temporary, 0, 2, local(0, 2))
    assert checkpoints(tmp_path) == []
    write_shards(temporary, 1, 2, local(1, 2))
    assert checkpoints(tmp_path) == []
    path = seal_shards(temporary, 2, POSITION, RECIPE, {})
    assert not temporary.exists()
    assert {each.suffix for each in path.iterdir()} == {".safetensors", ".json"}
    assert not list(path.glob("receipt*"))


def test_the_seal_waits_for_a_slow_process(tmp_path: Path) -> None:
    temporary = begin_folder(tmp_path, 5)
    write_shards(temporary, 0, 2, local(0, 2))
    late = threading.Timer(0.3, write_shards, (temporary, 1, 2, local(1, 2)))
    late.start()
    path = seal_shards(temporary, 2, POSITION, RECIPE, {}, patience_s=20)
    late.join()
    read_checkpoint(path)


def test_a_process_that_never_writes_leaves_no_checkpoint(tmp_path: Path) -> None:
    temporary = begin_folder(tmp_path, 5)
    write_shards(temporary, 0, 2, local(0, 2))
    with pytest.raises(OSError, match=r"waiting for the shards of rank\(s\) \[1\]"):
        seal_shards(temporary, 2, POSITION, RECIPE, {}, patience_s=0.2)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_says_why_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = begin_folder(tmp_path, 5)
    write_shards(temporary, 0, 2, local(0, 2))

    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(shards, "write_tensors", full)
    with pytest.raises(OSError, match="no room"):
        write_shards(temporary, 1, 2, local(1, 2))
    monkeypatch.undo()
    with pytest.raises(OSError, match="rank 1: no room"):
        seal_shards(temporary, 2, POSITION, RECIPE, {})
    assert list(tmp_path.iterdir()) == []


def test_shards_of_different_states_are_rejected(tmp_path: Path) -> None:
    temporary = begin_folder(tmp_path, 5)
    write_shards(temporary, 0, 2, local(0, 2))
    other = {**local(1, 2), "optimizer": {}}
    write_shards(temporary, 1, 2, other)
    with pytest.raises(OSError, match="different states"):
        seal_shards(temporary, 2, POSITION, RECIPE, {})


def test_a_failed_save_in_pieces_counts_and_the_next_one_succeeds(tmp_path: Path) -> None:
    notes: list[str] = []
    manager = CheckpointManager(tmp_path / "checkpoints", 1, RECIPE, {}, lambda: None, notes.append)
    temporary = manager.begin_sharded(POSITION)
    assert temporary is not None
    (temporary / "receipt-1.json").write_text('{"failed": "rank 1: no room"}')
    manager.save_sharded(temporary, local(0, 2), 2, POSITION, {})
    with pytest.raises(UserError, match="no room"):
        manager.wait()
    assert manager.failures == 1
    for step in (6, 7):
        at = replace(POSITION, step=step)
        temporary = manager.begin_sharded(at, must=True)
        assert temporary is not None
        manager.save_sharded(temporary, local(0, 2), 2, at, {})
        write_shards(temporary, 1, 2, local(1, 2))
    manager.close()
    assert manager.failures == 0
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-7"]
    assert "no room" in notes[0]


def test_a_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    written(tmp_path)
    manager = CheckpointManager(tmp_path, 3, RECIPE, {}, lambda: None)
    assert manager.begin_sharded(POSITION) is None
    with pytest.raises(FileExistsError):
        begin_folder(tmp_path, 5)
    manager.close()


def resealed(path: Path, change: Any) -> None:
    """A manifest with a right seal and wrong content."""
    content = read_sealed(path / MANIFEST, 2)
    change(content)
    write_sealed(path / MANIFEST, content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["pieces"].update(count=2), "does not list the shard model.shard-0-of-2"),
        (lambda c: c["pieces"].update(count=0), "count"),
        (lambda c: c["pieces"].update(count=10**9), "count"),
        (lambda c: c["pieces"].update(shapes={}), "shapes"),
        (lambda c: c["pieces"]["shapes"]["model"].update(weight=[-1, 3]), "shape of .* is not valid"),
        (lambda c: c["pieces"]["shapes"]["model"].update(weight=[5, 4]), "shape"),
        (lambda c: c["pieces"]["shapes"]["model"].update(bias=[1]), "'bias' is missing|has shape"),
        (lambda c: c["pieces"]["shapes"]["model"].pop("weight"), "not sharded"),
        (
            lambda c: c["files"].pop("model.shard-1-of-3.safetensors"),
            "does not list the shard model.shard-1-of-3",
        ),
        (
            lambda c: c["files"].update({"model.safetensors": c["files"]["memory.safetensors"]}),
            "not a file of",
        ),
        (lambda c: c["files"].update({"other.shard-0-of-3.safetensors": {}}), "not a file of a checkpoint"),
        (lambda c: c.update(format=1), "not a file of a checkpoint"),
        (lambda c: c.update(format=3), "format 3"),
    ],
)
def test_a_table_that_does_not_fit_its_pieces_is_rejected(tmp_path: Path, change: Any, words: str) -> None:
    path = written(tmp_path)
    resealed(path, change)
    with pytest.raises(CorruptError, match=words):
        read_checkpoint(path)


def test_a_piece_with_other_rows_is_rejected_whatever_its_checksum(tmp_path: Path) -> None:
    path = written(tmp_path)
    name = "model.shard-1-of-3.safetensors"
    (path / name).unlink()
    write_tensors(path / name, {"weight": WEIGHT[:1]})
    size, sha256 = file_sha256(path / name)
    resealed(path, lambda content: content["files"].update({name: {"bytes": size, "sha256": sha256}}))
    with pytest.raises(CorruptError, match="its shard of 'weight' has shape"):
        read_checkpoint(path)


def test_pieces_that_changed_places_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    one, two = (path / f"model.shard-{rank}-of-3.safetensors" for rank in (1, 2))
    shutil.move(one, path / "kept")
    shutil.move(two, one)
    shutil.move(path / "kept", two)
    with pytest.raises(CorruptError):
        read_checkpoint(path)

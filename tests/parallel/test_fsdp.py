"""Sharded training gives what one process gives; sharded checkpoints are checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.recipe import Parallel, Recipe
from drumline.core.errors import UserError
from drumline.core.files import CorruptError
from drumline.core.precision import BF16, FP32
from drumline.parallel.fsdp import kept_whole
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.state.checkpoint import copy_into, read_checkpoint, verify_checkpoint, write_checkpoint
from drumline.state.fingerprint import fingerprint
from drumline.state.shards import shard_rows
from drumline.state.verify import verify_run
from drumline.state.weights import load_weights, resolve_weights
from tests.launch.ranks import one_thread
from tests.parallel import fsdp_ranks as ranks
from tests.training import tiny

pytestmark = pytest.mark.slow
SIZES = (2, 3)
State = dict[str, dict[str, torch.Tensor]]


def farthest(one: State, other: State) -> float:
    """The largest difference of two states; they must have the same names."""
    assert {g: set(each) for g, each in one.items()} == {g: set(each) for g, each in other.items()}
    return max(
        float((one[group][name].double() - other[group][name].double()).abs().max())
        for group in one
        for name in one[group]
    )


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for size in SIZES for name in ranks.OPTIMS if size == 2 or name in ranks.FEW],
)
def test_three_clipped_and_averaged_steps_are_those_of_one_process(name: str, size: int) -> None:
    with one_thread():
        expected = ranks.reference(ranks.Odd(), ranks.OPTIMS[name], ema=0.7, clip=0.1, accumulate=2)
    found = ranks.results(size)[0][name]
    # Adam's first steps divide a gradient by its own size: rounding of a tiny one is a tiny share of the rate.
    assert farthest(found, expected) < (2e-6 if name in ("sgd", "lars") else 2e-5)


def test_with_batch_norm_every_tensor_is_that_of_ddp() -> None:
    found = ranks.results(2)[0]
    assert farthest(found["fsdp"], found["ddp"]) < 2e-6


def test_recomputed_blocks_give_the_same() -> None:
    found = ranks.results(2)[0]
    assert farthest(found["recomputed"], found["third"]) < 1e-6


def test_exchanges_by_way_of_the_host_give_the_same() -> None:
    found = ranks.results(2)[0]
    assert farthest(found["by host"], found["third"]) == 0.0


def test_a_process_may_evaluate_more_batches_than_another() -> None:
    for rank, found in enumerate(ranks.results(2)):
        assert len(found["scored"]) == 1 + rank
        assert max(found["scored"]) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_steps_after_an_evaluation_in_which_a_rank_has_no_batch_are_the_same(size: int) -> None:
    found = ranks.results(size)[0]
    assert farthest(found["uneven"], found["not scored"]) == 0.0


def test_a_parameter_that_one_process_leaves_out_moves_alike_on_all() -> None:
    one, other = ranks.results(2)
    assert one["extra"].any()
    assert torch.equal(one["extra"], other["extra"])
    assert one["unused"] is None


def test_mixed_precision_is_that_of_autocast_and_the_state_stays_fp32() -> None:
    found = ranks.results(2)[0]
    for name in ("bf16 norm", "bf16 odd"):
        sharded, ddp = found[name]
        assert farthest(sharded, ddp) < 1e-6
        assert found[f"{name} kinds"]["model"] <= {"torch.float32", "torch.int64"}
        assert found[f"{name} kinds"]["gradient"] == {"torch.float32"}


def test_vectors_shared_ones_and_what_autocast_leaves_alone_are_kept_whole() -> None:
    model = ranks.Odd()
    whole = {name for name, each in model.named_parameters() if each in kept_whole(model, FP32)}
    assert "one.weight" in whole
    assert "body.0.1.weight" in whole
    assert "head.bias" in whole
    assert "map" not in whole
    assert "head.weight" not in whole
    low = {name for name, each in model.named_parameters() if each in kept_whole(model, BF16)}
    assert low - whole == {"map"}


@pytest.mark.parametrize("size", SIZES)
def test_each_process_holds_its_rows_and_no_more(size: int) -> None:
    shapes = dict(ranks.Odd().state_dict())
    for rank, found in enumerate(ranks.results(size)):
        assert found["idle"] == []
        for name, held in found["sharded"].items():
            first, last = shard_rows(len(shapes[name]), rank, size)
            assert held == (last - first, *shapes[name].shape[1:])


@pytest.mark.parametrize("size", SIZES)
def test_lengths_are_of_whole_tensors_and_the_same_everywhere(size: int) -> None:
    found = ranks.results(size)
    assert found[0]["norm"] == pytest.approx(found[0]["joined norm"], rel=1e-6)
    assert len({each["norm"] for each in found}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_an_infinite_gradient_in_one_part_holds_every_process(size: int) -> None:
    for found in ranks.results(size):
        assert found["found"] == 1
        assert not found["moved"]


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_in_pieces_holds_the_state_of_its_step(size: int, tmp_path: Path) -> None:
    found = ranks.results(size)[0]
    manifest, groups = read_checkpoint(Path(found["folder"]) / "checkpoints" / "step-3")
    assert torch.equal(groups.pop("memory")["bank"], torch.arange(7.0))
    assert farthest(groups, found["saved"]) == 0
    assert manifest.sharding is not None
    assert manifest.sharding.count == size
    # The state's hash is that of a plain checkpoint of the same tensors.
    plain = {**found["saved"], "memory": {"bank": torch.arange(7.0)}}
    written = write_checkpoint(tmp_path, plain, manifest.position, ranks.RECIPE, {})
    assert read_checkpoint(written)[0].state_sha256 == manifest.state_sha256


@pytest.mark.parametrize("size", SIZES)
def test_a_run_goes_on_from_pieces_with_the_same_bits(size: int) -> None:
    found = ranks.results(size)[0]
    assert farthest(found["resumed"]["checkpoints"][1], found["saved"]) == 0
    assert farthest(found["went on"], found["went on, resumed"]) == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_run_goes_on_with_more_processes_from_the_same_tensors(size: int) -> None:
    """From a plain checkpoint of one to two, from two in pieces to three."""
    loaded, live = ranks.results(size)[0]["resumed"]["earlier"]
    loaded.pop("memory", None)
    assert farthest(loaded, live) == 0


def test_pieces_go_on_in_one_process() -> None:
    found = ranks.results(2)[0]
    with one_thread():
        step = ranks.plain_step(ranks.Odd(), single_process(tiny.CPU), ranks.OPTIMS["adamw"], ema=0.7)
        checkpoint = Path(found["folder"]) / "checkpoints" / "step-3"
        copy_into(read_checkpoint(checkpoint)[1], step.state.tensors(), checkpoint)
        ranks.take(step, 3, 4, rehearse=False)
        assert farthest(ranks.whole_state(step), found["went on"]) < 2e-5


@pytest.mark.parametrize("size", SIZES)
def test_the_witness_writes_down_whole_tensors_and_finds_no_drift(size: int) -> None:
    found = ranks.results(size)[0]
    assert found["findings"] == []
    lines = dict(line.rsplit(" ", 1) for line in found["record"].splitlines())
    groups = {"parameter": "model", "optimizer": "optimizer", "average": "average", "gradient": "gradient"}
    for said, group in groups.items():
        for name, tensor in found["went on"][group].items():
            assert lines[f"4 {said} {name}"] == f"{int(fingerprint(tensor)) % 2**64:016x}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made = Path(ranks.results(2)[0]["folder"]) / "checkpoints" / "step-3"
    return Path(shutil.copytree(made, tmp_path / "run" / "checkpoints" / "step-3"))


def test_weights_load_from_pieces_by_run_checkpoint_or_file(checkpoint: Path) -> None:
    saved = ranks.results(2)[0]["saved"]["model"]
    for path in (checkpoint, checkpoint.parents[1], checkpoint / "model.shard-1-of-2.safetensors"):
        model = ranks.Odd()
        nn.init.zeros_(model.head.weight)
        assert resolve_weights(path).is_file()
        load_weights(model, path)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_pieces_verify_as_a_checkpoint(checkpoint: Path) -> None:
    found = verify_run(checkpoint.parents[1])
    assert found.sound
    assert found.step == 3


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_piece_that_is_missing_changed_or_too_many_is_rejected(checkpoint: Path, tmp_path: Path) -> None:
    piece = checkpoint / "model.shard-1-of-2.safetensors"
    whole = piece.read_bytes()
    cases: dict[str, Any] = {
        "is missing": piece.unlink,
        "checksum does not match": lambda: damaged(piece),
        "were written": lambda: piece.write_bytes(whole[:-4]),
        "does not list it": lambda: shutil.copy(piece, checkpoint / "model.shard-2-of-3.safetensors"),
    }
    for words, harm in cases.items():
        harm()
        for look in (verify_checkpoint, read_checkpoint):
            with pytest.raises(CorruptError, match=words):
                look(checkpoint)
        for stray in checkpoint.glob("*-of-3.safetensors"):
            stray.unlink()
        piece.write_bytes(whole)
    read_checkpoint(checkpoint)


def test_one_process_is_rejected() -> None:
    with pytest.raises(UserError, match="there is only one"):
        create_strategy(Recipe(parallel=Parallel(layout="fsdp")), single_process(tiny.CPU))

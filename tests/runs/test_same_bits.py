"""Same recipe, same bits: twice, with any number of loader workers, killed and resumed, on 1, 2 and 3 processes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.runs.command import TINY, begin, drumline, kill_when, metrics, result, sha256, train

pytestmark = pytest.mark.slow


def killed_after(folder: Path, name: str, step: int, *words: str) -> None:
    """A run that is killed a moment after it has saved checkpoint `step`."""
    saved = folder / "runs" / name / "checkpoints" / f"step-{step}"
    begun = begin("train", *TINY, f"run.name={name}", *words, folder=folder)
    kill_when(saved.exists, begun, then=random.uniform(0, 0.3))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_killed_and_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(
    processes: int, tmp_path: Path
) -> None:
    here = f"parallel.processes={processes}"
    train(tmp_path, "whole", here)
    killed_after(tmp_path, "killed", random.choice([7, 14, 21, 28]), here)
    resumed = train(tmp_path, "killed", here, "checkpoint.resume=auto")
    assert resumed["finished"]
    assert "resumed from" in (tmp_path / "runs/killed/log.txt").read_text()
    assert sha256(tmp_path, "killed") == sha256(tmp_path, "whole")
    texts = [(tmp_path / f"runs/{name}/fingerprints.txt").read_bytes() for name in ("whole", "killed")]
    assert texts[0] == texts[1]
    for kind in ("train", "eval"):
        lines = [metrics(tmp_path, name, kind) for name in ("whole", "killed")]
        assert [(line["step"], line["loss"]) for line in lines[0]] == [
            (line["step"], line["loss"]) for line in lines[1]
        ]


def test_balanced_sampling_gives_the_same_bits_on_1_2_and_3_processes_and_resumed(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), (120, 40, 10, 4))
    images = draw.integers(0, 256, (len(labels), 8, 8), np.uint8)
    np.savez(tmp_path / "rare.npz", images=images, labels=labels)
    words = (
        "data.source=npz",
        "data.path=rare.npz",
        "data.holdout=0.1",
        "data.batch=24",
        "data.balance=balanced",
        "train.class_weights=1:2,3:0.5",
        "data.mixup=0.2",
        "run.strict=true",
        "run.shards=6",
        "train.steps=15",
    )
    train(tmp_path, "one", *words, "checkpoint.keep=9")
    train(tmp_path, "two", *words, "parallel.processes=2")
    resumed = ("checkpoint.resume=runs/one/checkpoints/step-7", "parallel.processes=3")
    train(tmp_path, "three", *words, *resumed)
    assert sha256(tmp_path, "one") == sha256(tmp_path, "two") == sha256(tmp_path, "three")
    log = (tmp_path / "runs/two/log.txt").read_text()
    assert (
        "data.balance=balanced: an epoch draws class '0' 36 times (108 samples) and class '3' 36 times" in log
    )
    assert "class weights in the training loss: class '0'" in log
    assert "came twice" not in log


def test_two_runs_and_any_number_of_workers_give_the_same_bits(tmp_path: Path) -> None:
    mixed = ("data.mixup=0.2", "data.cutmix=1", "train.ema=0.9", "train.epochs=1", "parallel.processes=2")
    hashes = set()
    for name, workers in (("none", 0), ("one", 1), ("four", 4)):
        train(tmp_path, name, *mixed, f"data.workers={workers}")
        hashes.add(sha256(tmp_path, name))
    assert len(hashes) == 1


def test_the_saved_recipe_repeats_the_run(tmp_path: Path) -> None:
    train(tmp_path, "first", "train.epochs=1", "optim.name=adamw", "optim.lr=0.002", "data.workers=1")
    again = result(drumline("train", "runs/first/recipe.toml", folder=tmp_path))
    assert again["run"].endswith("digits-resnet8-1")
    assert sha256(tmp_path, "digits-resnet8-1") == sha256(tmp_path, "first")


def test_a_corrupt_newest_checkpoint_is_skipped_with_a_warning(tmp_path: Path) -> None:
    train(tmp_path, "whole")
    train(tmp_path, "short", "train.steps=58", "checkpoint.keep=99")
    newest = tmp_path / "runs/short/checkpoints/step-58/optimizer.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    assert drumline("verify", "runs/short", folder=tmp_path).returncode == 1
    done = drumline("train", *TINY, "run.name=short", "checkpoint.resume=auto", folder=tmp_path)
    assert result(done)["finished"]
    assert "does not verify and is not used" in done.stderr
    assert "optimizer.safetensors" in done.stderr
    assert sha256(tmp_path, "short") == sha256(tmp_path, "whole")

"""Training works: accuracy on the embedded digits, evaluation on any world, golden losses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.runs.command import TINY, completed, drumline, environment, metrics, result, sha256, train
from tests.training.test_model import RECORD, weights

pytestmark = pytest.mark.slow

LEARN = (
    "data.source=digits",
    "data.batch=64",
    "model.name=resnet8x4",
    "train.epochs=8",
    "optim.warmup_epochs=1",
    "optim.nesterov=true",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `learnt`, made by one process."""
    folder = tmp_path_factory.mktemp("learn")
    train(folder, "learnt", recipe=LEARN)
    return folder


def test_one_process_learns_the_digits_to_97_percent(trained: Path) -> None:
    score = metrics(trained, "learnt", "eval")[-1]
    assert score["samples"] == 359
    assert score["top1"] >= 0.97


@pytest.mark.parametrize("more", [(), ("parallel.processes=2",), ("--repeat", "2")], ids=str)
def test_a_default_that_a_command_or_a_file_sets_is_not_replaced_by_the_weights_own(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    given = weights(tmp_path, replace(RECORD, size=8, mean=(0.5,) * 3, std=(0.5,) * 3))
    (tmp_path / "mine.toml").write_text('[data]\nresize = "pillow12"\n')
    words = ("train", "mine.toml", f"finetune={given}", "data.eval_crop=0.875", "run.name=a", *TINY[:2])
    found = result(drumline(*words, "train.steps=1", *more, folder=tmp_path))
    name = found["runs"][1]["run"] if "--repeat" in more else found["run"]
    for again in (False, True):
        if again:
            result(drumline("resume", name, folder=tmp_path))
        data = tomllib.loads((tmp_path / name / "recipe.toml").read_text())["data"]
        kept = {key: data[key] for key in ("eval_crop", "resize", "interpolation", "size")}
        assert kept == {"eval_crop": 0.875, "resize": "pillow12", "interpolation": "bicubic", "size": 8}


def test_two_processes_learn_the_digits_to_97_percent(tmp_path: Path) -> None:
    found = train(tmp_path, "two", "parallel.processes=2", recipe=LEARN)
    assert found["samples"] == 359
    assert found["top1"] >= 0.97


def test_evaluation_gives_the_same_counts_on_1_2_and_3_processes(trained: Path) -> None:
    words = ("eval", "runs/learnt", "parallel.threads=1", "--per-class")
    found = [
        result(
            drumline(
                *words,
                f"parallel.processes={n}",
                f"--predictions={n}.csv",
                f"--confusion=matrix-{n}.csv",
                folder=trained,
            )
        )
        for n in (1, 2, 3)
    ]
    assert found[0]["samples"] == 359  # a prime: nothing divides it
    assert sum(one["correct"] for one in found[0]["per_class"]) == found[0]["correct"]
    assert found == [found[0]] * 3
    for name in ("{}.csv", "matrix-{}.csv"):
        files = [(trained / name.format(n)).read_text() for n in (1, 2, 3)]
        assert files == [files[0]] * 3


def test_a_run_its_checkpoint_and_its_weights_have_the_same_score(trained: Path) -> None:
    last = sorted((trained / "runs/learnt/checkpoints").iterdir(), key=lambda p: int(p.name.split("-")[1]))[
        -1
    ]
    recipe = "runs/learnt/recipe.toml"
    checkpoint = result(drumline("eval", str(last.relative_to(trained)), folder=trained))
    weights = result(
        drumline("eval", recipe, "model.weights=runs/learnt/weights/last.safetensors", folder=trained)
    )
    logged = metrics(trained, "learnt", "eval")[-1]
    assert checkpoint["correct"] == weights["correct"] == logged["correct"]


def test_a_changed_checkpoint_is_not_scored(trained: Path, tmp_path: Path) -> None:
    source = trained / "runs/learnt/checkpoints"
    step = sorted(source.iterdir())[0]
    copy = tmp_path / step.name
    copy.mkdir()
    for file in step.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(content))
    done = drumline("eval", str(copy), "data.source=digits", "model.name=resnet8x4", folder=tmp_path)
    assert done.returncode == 2
    assert "checksum does not match" in done.stderr


def test_the_run_folder_holds_every_documented_file(trained: Path) -> None:
    run = trained / "runs/learnt"
    names = {path.name for path in run.iterdir()}
    assert {"recipe.toml", "environment.json", "metrics.jsonl", "log.txt", "checkpoints", "weights"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert {path.name for path in (run / "weights").iterdir()} == {
        "last.safetensors",
        "best.safetensors",
        "sha256.txt",
    }
    environment = json.loads((run / "environment.json").read_text())
    assert environment["packages"]["torch"]
    last = load_file(run / "weights" / "last.safetensors")
    assert "conv1.weight" in last
    times = metrics(trained, "learnt", "times")[-1]
    assert len(times["data_ms"]) == len(times["compute_ms"]) == len(times["step_ms"]) == 1
    assert 0 < times["compute_ms"][0] <= times["step_ms"][0]


def test_uneven_slices_train_like_one_process(tmp_path: Path) -> None:
    """50 samples over 3 processes; without BatchNorm the loss is that of one process, to rounding."""
    words = ("data.batch=50", "train.steps=12", "train.log_every=1", "train.eval_every=0", "optim.lr=0.01")
    (tmp_path / "plain.py").write_text((Path(__file__).parent / "plain.py").read_text())
    one = train(tmp_path, "one", *words, "model.name=plain:network")
    three = train(tmp_path, "three", *words, "model.name=plain:network", "parallel.processes=3")
    assert one["samples"] == three["samples"] == 359
    losses = [[line["loss"] for line in metrics(tmp_path, name, "train")] for name in ("one", "three")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_finished_run_resumed_reports_its_score_again(tmp_path: Path) -> None:
    first = train(tmp_path, "done", "train.epochs=1", "train.ema=0.9")
    before = sha256(tmp_path, "done")
    again = train(tmp_path, "done", "train.epochs=1", "train.ema=0.9", "checkpoint.resume=auto")
    assert again["correct"] == first["correct"]
    assert sha256(tmp_path, "done") == before
    assert len(metrics(tmp_path, "done", "eval")) == 1


def test_gradient_checkpointing_and_accumulation_run_from_the_command_line(tmp_path: Path) -> None:
    plain = ("train.steps=6", "train.eval_every=0")
    train(tmp_path, "plain", *plain)
    train(tmp_path, "recomputed", *plain, "train.gradient_checkpointing=true")
    assert sha256(tmp_path, "recomputed") == sha256(tmp_path, "plain")
    found = train(tmp_path, "accumulated", *plain, "train.accumulate=3", "parallel.processes=2")
    assert found["finished"]


OWN = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, classes, unused=False, outputs=0):
        super().__init__()
        self.head = nn.Linear(64, outputs or classes)
        if unused:
            self.forgotten = nn.Linear(3, 3)
    def forward(self, x):
        return self.head(x.mean(dim=1).flatten(1))

def unused(classes):
    return Own(classes, unused=True)

def few(classes):
    return Own(classes, outputs=3)

def frozen(classes):
    return Own(classes).requires_grad_(False)
"""


@pytest.mark.parametrize(
    ("name", "processes", "code", "said"),
    [
        ("unused", 2, 2, "got no gradient: forgotten.weight, forgotten.bias"),
        ("unused", 1, 0, "WARNING: 2 trainable parameter(s) got no gradient: forgotten.weight"),
        ("few", 1, 2, "the data has 10 classes"),
        ("frozen", 1, 2, "no trainable parameters"),
    ],
)
def test_a_custom_model_that_cannot_be_trained_is_reported(
    name: str, processes: int, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "random.py").write_text("raise RuntimeError('shadowed')\n")
    words = (f"model.name=own:{name}", "train.steps=4", f"parallel.processes={processes}", "data.batch=32")
    done = completed([str(Path(sys.executable).parent / "drumline"), "train", *words], tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_diverged_run_is_reported_and_has_no_best_score(tmp_path: Path) -> None:
    words = ("model.name=resnet8", "data.batch=64", "train.steps=6", "optim.lr=1e6", "guard.action=warn")
    done = drumline("train", *words, folder=tmp_path)
    found = result(done)
    assert found["loss"] is None
    assert found["best_top1"] is None
    assert "the run has diverged" in done.stderr


def test_a_run_continues_after_the_reader_of_its_output_exits(tmp_path: Path) -> None:
    words = "data.batch=48 model.name=resnet8 train.epochs=1 run.name=x"
    line = f"{sys.executable} -m drumline train {words} 2>&1 | head -1"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment(), timeout=120, check=False)
    assert (tmp_path / "runs/x/checkpoints/step-29").exists()
    assert "finished" in (tmp_path / "runs/x/log.txt").read_text()


def test_changed_weights_are_reported_and_not_scored(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(trained / "runs/learnt", copy)
    content = bytearray((copy / "weights/best.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "weights/best.safetensors").write_bytes(bytes(content))
    assert drumline("verify", "runs/copy", folder=tmp_path).returncode == 1
    done = drumline("eval", "runs/copy", folder=tmp_path)
    assert done.returncode == 2
    assert "best.safetensors: does not match its checksum" in done.stderr

"""Whole runs on a GPU: the same bits with and without a CUDA graph, twice, and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.parallel.world import single_process
from drumline.report.page import PAGE
from drumline.report.read import read_run
from drumline.state.checkpoint import checkpoints
from drumline.state.verify import verify_run
from drumline.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BASE = Recipe(
    run=Run(device="cuda"),
    data=Data(source="digits", batch=64, size=32),
    model=Model(name="resnet8"),
    optim=Optim(lr=0.05),
    train=Train(steps=30, eval_every=0),
    checkpoint=Checkpoint(every_epochs=0),
)


def sha256(recipe: Recipe, folder: Path, name: str) -> str:
    recipe = replace(recipe, run=replace(recipe.run, dir=str(folder), name=name))
    train(recipe, single_process(torch.device("cuda", 0)))
    return verify_run(folder / name).state_sha256


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": Optim(name="adamw", lr=1e-3)},
        {"optim": Optim(name="lars", lr=0.5)},
        {"optim": Optim(name="lamb", lr=1e-2, clip=1.0)},
        {"train": Train(steps=30, eval_every=0, precision="fp16")},
        {"train": Train(steps=30, eval_every=0, precision="fp16"), "optim": Optim(name="lamb", lr=1e-2)},
        {"train": Train(steps=30, eval_every=0, precision="fp32", accumulate=3)},
        {"train": Train(steps=30, eval_every=0, ema=0.9, label_smoothing=0.1)},
        {"data": Data(source="digits", batch=64, size=32, mixup=0.3, cutmix=1.0)},
        {
            "model": Model(name="vgg11_bn"),
            "data": Data(source="digits", batch=16, size=64),
            "optim": Optim(lr=0.005),
        },
        {"model": Model(name="mobilenet_v2"), "data": Data(source="digits", batch=16, size=64)},
    ],
    ids=[
        "sgd",
        "adamw",
        "lars",
        "lamb",
        "fp16",
        "fp16-lamb",
        "fp32-accumulate",
        "ema",
        "mix",
        "vgg",
        "mobilenet",
    ],
)
def test_a_captured_step_gives_the_same_bits(changes: dict[str, object], tmp_path: Path) -> None:
    recipe = replace(BASE, **changes)  # type: ignore[arg-type]
    off = replace(recipe, train=replace(recipe.train, capture="off"))
    on = replace(recipe, train=replace(recipe.train, capture="on"))
    captured = sha256(on, tmp_path, "on")
    assert captured == sha256(off, tmp_path, "off")
    assert captured == sha256(on, tmp_path, "again")


@pytest.mark.parametrize("model", ["resnet18", "cifar/mobilenet_v2_half", "cifar/shufflenet_v1"])
def test_two_runs_give_the_same_bits(model: str, tmp_path: Path) -> None:
    recipe = replace(BASE, model=Model(name=model), train=replace(BASE.train, steps=10))
    assert sha256(recipe, tmp_path, "a") == sha256(recipe, tmp_path, "b")


def test_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    recipe = replace(
        BASE,
        model=Model(name="vgg11_bn"),
        data=replace(BASE.data, batch=32, mixup=0.2),
        train=replace(BASE.train, steps=25, precision="fp16", ema=0.9),
        checkpoint=Checkpoint(every_steps=10, every_epochs=0, keep=5),
    )
    whole = sha256(recipe, tmp_path, "whole")
    half = checkpoints(tmp_path / "whole" / "checkpoints")[0]
    resumed = replace(recipe, checkpoint=replace(recipe.checkpoint, resume=str(half)))
    assert half.name == "step-10"
    assert sha256(resumed, tmp_path, "resumed") == whole


def test_gradient_checkpointing_gives_the_same_bits_and_takes_less_memory(tmp_path: Path) -> None:
    recipe = replace(
        BASE,
        model=Model(name="resnet50"),
        data=replace(BASE.data, size=96, batch=128),
        train=replace(BASE.train, steps=5, capture="off"),
    )
    peaks = []
    hashes = []
    for name, on in (("plain", False), ("recompute", True)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        hashes.append(
            sha256(replace(recipe, train=replace(recipe.train, gradient_checkpointing=on)), tmp_path, name)
        )
        peaks.append(torch.cuda.max_memory_allocated())
    assert hashes[0] == hashes[1]
    assert peaks[1] < 0.85 * peaks[0]


def test_data_parallel_runs(tmp_path: Path) -> None:
    recipe = replace(BASE, parallel=replace(BASE.parallel, layout="dp"))
    assert sha256(recipe, tmp_path, "dp")


def test_a_compiled_run_learns(tmp_path: Path) -> None:
    recipe = replace(
        BASE, train=replace(BASE.train, steps=220, compile=True), run=replace(BASE.run, dir=str(tmp_path))
    )
    assert train(recipe, single_process(torch.device("cuda", 0))).metrics["top1"] > 0.9


@pytest.mark.parametrize("model", ["torchvision/resnet18", "timm/resnet18", "timm/vit_tiny_patch16_224"])
def test_models_of_other_libraries_train_and_capture(model: str, tmp_path: Path) -> None:
    pytest.importorskip(model.split("/")[0], reason="the library that has the model is not installed")
    size = 224 if "224" in model else 64
    recipe = replace(
        BASE, model=Model(name=model), data=replace(BASE.data, size=size), train=replace(BASE.train, steps=6)
    )
    off = replace(recipe, train=replace(recipe.train, capture="off"))
    assert sha256(recipe, tmp_path, "captured") == sha256(off, tmp_path, "off")


def test_a_captured_run_on_photographs_with_workers_gives_the_same_bits(tmp_path: Path) -> None:
    """Loader processes and the thread that pins memory are at work while the step is captured and replayed."""
    for part, count in (("train", 40), ("val", 8)):
        for label in ("a", "b"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng([number, ord(label)]).integers(0, 256, (96, 80, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    photos = Data(source="folder", path=str(tmp_path / "photos"), batch=16, size=64, workers=4)
    on = replace(BASE, data=photos, train=replace(BASE.train, steps=23, capture="on"))
    off = replace(on, train=replace(on.train, capture="off"))
    captured = sha256(on, tmp_path, "on")
    assert captured == sha256(off, tmp_path, "off")
    assert captured == sha256(replace(on, data=replace(photos, workers=0)), tmp_path, "no-workers")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [("reads_the_device", "(it waits for the GPU inside the step"), ("waits_for_the_device", "(CUDA error")],
)
def test_a_model_that_cannot_be_captured_trains_without_a_graph(
    factory: str, reason: str, tmp_path: Path
) -> None:
    """The run continues without a graph and logs why, dropout included. A host read is detected beforehand, a wait
    only when the capture fails."""
    recipe = replace(BASE, model=Model(name=f"tests.gpu.test_runs:{factory}"))
    off = replace(recipe, train=replace(recipe.train, capture="off"))
    assert sha256(recipe, tmp_path, "plain") == sha256(off, tmp_path, "off")
    assert f"the model cannot be captured {reason}" in (tmp_path / "plain" / "log.txt").read_text()


class Uncapturable(torch.nn.Module):
    def __init__(self, classes: int, *, reads: bool) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, classes)
        self.dropout = torch.nn.Dropout(0.5)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(x).mean(dim=(2, 3))
        if self.reads:
            x = x * (1.0 if x.sum().item() < 1e9 else 2.0)
        else:
            torch.cuda.synchronize()
        return self.head(x)


def reads_the_device(classes: int) -> torch.nn.Module:
    return Uncapturable(classes, reads=True)


def waits_for_the_device(classes: int) -> torch.nn.Module:
    return Uncapturable(classes, reads=False)


def test_a_captured_run_leaves_its_page(tmp_path: Path) -> None:
    recipe = replace(BASE, train=Train(steps=30), run=replace(BASE.run, dir=str(tmp_path), name="page"))
    train(recipe, single_process(torch.device("cuda", 0)))
    run = read_run(tmp_path / "page")
    assert run.report is not None
    assert int(run.report.right.sum()) == run.best["correct"]
    text = (tmp_path / "page" / PAGE).read_text()
    assert "✓ finished" in text
    assert "computing" in text
    assert "Worst mistakes" in text

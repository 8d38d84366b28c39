"""Layouts on a GPU, as a user starts them: stages that share it, in one process and in several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.runs.command import drumline, metrics, result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPE = (
    "data.source=synthetic",
    "data.size=32",
    "data.batch=64",
    "model.classes=10",
    "train.steps=8",
    "train.capture=off",
    "train.ema=0.9",
    "optim.clip=1",
)


def final(tmp_path: Path, name: str, *words: str) -> str:
    """The hash that a run ends with."""
    result(drumline("train", *RECIPE, f"run.name={name}", *words, folder=tmp_path))
    return str(result(drumline("verify", f"runs/{name}", folder=tmp_path))["state_sha256"])


@pytest.mark.parametrize("model", ["resnet18", "vgg8"])
def test_stages_give_the_bits_of_accumulation(model: str, tmp_path: Path) -> None:
    words = (f"model.name={model}",)
    staged = ("parallel.layout=pipeline", "parallel.micro_batches=4", "parallel.split=even")
    plain = final(tmp_path, "plain", *words, "train.accumulate=4")
    virtual = (*staged, "parallel.virtual=true")
    assert final(tmp_path, "virtual", *words, *virtual, "parallel.stages=2") == plain
    interleaved = (*virtual, "parallel.stages=2", "parallel.schedule=interleaved")
    assert final(tmp_path, "interleaved", *words, *interleaved) == plain
    assert final(tmp_path, "processes", *words, *staged, "parallel.processes=2") == plain
    assert "bit for bit" in (tmp_path / "runs/virtual/log.txt").read_text()
    assert (tmp_path / "runs/virtual/timeline.svg").exists()


def test_dropout_draws_the_same_on_virtual_devices_and_in_processes(tmp_path: Path) -> None:
    """By stages, so not as the whole model draws."""
    words = ("model.name=mobilenet_v2", "parallel.layout=pipeline", "parallel.micro_batches=4")
    cut = ("parallel.split=even", "parallel.stages=2")
    virtual = final(tmp_path, "virtual", *words, *cut, "parallel.virtual=true")
    assert final(tmp_path, "processes", *words, *cut, "parallel.processes=2") == virtual


def test_replicas_of_a_pipeline_and_sharded_models_give_the_bits_of_ddp(tmp_path: Path) -> None:
    """Without clipping: FSDP adds up the length of a gradient from its parts, in another order."""
    words = ("model.name=resnet18", "optim.clip=0", "parallel.processes=2")
    plain = final(tmp_path, "plain", *words, "train.accumulate=2")
    assert final(tmp_path, "sharded", *words, "train.accumulate=2", "parallel.layout=fsdp") == plain
    staged = (
        "parallel.layout=pipeline",
        "parallel.stages=2",
        "parallel.micro_batches=2",
        "parallel.split=even",
    )
    assert final(tmp_path, "grid", *words[:2], "parallel.processes=4", *staged) == plain


@pytest.mark.parametrize(
    "words",
    [
        "model.name=mobilenet_v2 train.accumulate=2 data.mixup=0.2",
        "model.name=resnet18 train.compile=true train.precision=bf16",
        "model.name=resnet18 train.precision=fp16 run.deterministic=false",
        "model.name=resnet50 data.batch=16 run.deterministic=false train.precision=fp32 train.sync_bn=true",
    ],
)
def test_ddp_passes_its_certificate(words: str, tmp_path: Path) -> None:
    """Two processes that share a GPU; dropout and pairs, compiled, scaled, and with kernels that do not repeat."""
    final(tmp_path, "run", *words.split(), "parallel.processes=2")
    assert json.loads((tmp_path / "runs/run/certificate.json").read_text())["passes"] is True
    assert "WARNING: no certificate" not in (tmp_path / "runs/run/log.txt").read_text()
    assert "predicted: " in (tmp_path / "runs/run/timeline.svg").read_text()


def test_a_student_in_stages_learns_from_a_teacher_in_stages(tmp_path: Path) -> None:
    final(tmp_path, "teacher", "model.name=resnet14")
    words = ("distill", *RECIPE, "model.name=resnet8", "distill.teacher_weights=runs/teacher")
    hashes = set()
    for name, layout in (
        ("plain", ("train.accumulate=4",)),
        (
            "one",
            (
                "parallel.layout=pipeline",
                "parallel.stages=2",
                "parallel.virtual=true",
                "parallel.micro_batches=4",
            ),
        ),
        ("two", ("parallel.layout=pipeline", "parallel.processes=2", "parallel.micro_batches=4")),
        (
            "both",
            (
                "parallel.layout=pipeline",
                "parallel.processes=2",
                "parallel.micro_batches=4",
                "distill.teacher_layout=pipeline",
            ),
        ),
    ):
        result(drumline(*words, *layout, f"run.name={name}", folder=tmp_path))
        hashes.add(result(drumline("verify", f"runs/{name}", folder=tmp_path))["state_sha256"])
    assert len(hashes) == 1


def test_a_checkpoint_resumes_under_any_layout(tmp_path: Path) -> None:
    """With the same bits where the arithmetic is the same; otherwise with the same loss to float tolerance."""
    words = ("model.name=resnet18", "checkpoint.every_steps=4", "train.log_every=1")
    staged = ("parallel.layout=pipeline", "parallel.micro_batches=4", "parallel.split=even")
    whole = final(tmp_path, "whole", *words, *staged, "parallel.processes=2")
    resume = "checkpoint.resume=runs/whole/checkpoints/step-4"
    assert final(tmp_path, "again", *words, *staged, "parallel.processes=2", resume) == whole
    assert final(tmp_path, "single", *words, "train.accumulate=4", resume) == whole
    sharded = ("parallel.layout=fsdp", "parallel.processes=2", "train.accumulate=2")
    final(tmp_path, "sharded", *words, *sharded, resume)
    one, other = (
        [line["loss"] for line in metrics(tmp_path, name, "train") if line["step"] == 5]
        for name in ("whole", "sharded")
    )
    assert len(one) == 1
    assert one == pytest.approx(other, rel=1e-3)


def test_a_transformer_of_timm_in_stages_gives_the_bits_of_accumulation(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    words = ("model.name=timm/vit_tiny_patch16_224", "data.size=224", "data.batch=16", "train.steps=3")
    plain = final(tmp_path, "plain", *words, "train.accumulate=4")
    staged = ("parallel.layout=pipeline", "parallel.micro_batches=4", "parallel.split=even")
    assert final(tmp_path, "staged", *words, *staged, "parallel.processes=2") == plain
    assert "bit for bit" in (tmp_path / "runs/staged/log.txt").read_text()

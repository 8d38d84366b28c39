"""Guards and fingerprints on a GPU: a captured step is watched like a plain one, and nothing waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.state import chain
from drumline.state.compare import compare
from tests.runs.command import drumline, result

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SMALL = ("data.source=digits", "data.batch=64", "train.steps=12", "guard.every=4", "train.precision=bf16")
OWN = """
import torch
from torch import nn

class Exploding(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        return x * torch.where(self.calls >= 6, float("inf"), 1.0)
"""


def test_fingerprints_of_a_captured_run_equal_those_of_a_plain_one_including_gradients(
    tmp_path: Path,
) -> None:
    for capture in ("on", "off"):
        words = ("model.name=resnet8", f"run.name={capture}", f"train.capture={capture}")
        result(drumline("train", *SMALL, *words, folder=tmp_path))
    runs = tmp_path / "runs"
    assert compare(runs / "on", runs / "off").equal
    assert (runs / "on" / chain.FILE).read_bytes() == (runs / "off" / chain.FILE).read_bytes()
    assert all("gradient" in record.groups for record in chain.read_whole(runs / "on" / chain.FILE)[0])


@pytest.mark.parametrize("capture", ["on", "off"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb"])
def test_a_gradient_that_is_not_finite_is_named_with_its_step(
    capture: str, optimizer: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ("model.name=own:Exploding", f"train.capture={capture}", "run.name=x", f"optim.name={optimizer}")
    done = drumline("train", *SMALL, *words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "guard [non-finite]: the gradient of step 6 is NaN or infinite" in done.stderr
    assert (tmp_path / "runs/x/offending-step-6-rank-0.safetensors").exists()


def test_with_fp16_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ("model.name=own:Exploding", "train.precision=fp16", "run.name=x")
    done = drumline("train", *SMALL[:-1], *words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "guard [non-finite]: the loss of step 6 is NaN or infinite" in done.stderr

"""What becomes of a run whose certificate cannot be made."""

from __future__ import annotations

import errno
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drumline.config.recipe import Checkpoint, Data, Model, Parallel, Recipe, Run, Train
from drumline.parallel.norm import WorldNorm
from drumline.parallel.world import single_process
from drumline.training import prove
from drumline.training.certificate import Certificate
from drumline.training.loop import train


def test_a_model_that_one_device_cannot_hold_is_trained_without_a_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(prove, "reference", full)
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="run", device="cpu"),
        data=Data(source="digits", batch=24),
        model=Model(name="resnet8"),
        train=Train(steps=2, eval_every=0),
        parallel=Parallel(
            layout="pipeline", stages=2, virtual=True, micro_batches=2, split="even", threads=1
        ),
        checkpoint=Checkpoint(every_epochs=0),
    )
    assert train(recipe, single_process(torch.device("cpu"))).finished
    told = json.loads((tmp_path / "run" / prove.FILE).read_text())
    assert told["passes"] is None
    assert "does not fit" in told["words"]
    assert "WARNING: no certificate" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_disk_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prove, "write_text", full)
    shown: list[str] = []
    logged: list[str] = []

    def note(text: str, show: bool = True) -> None:
        (shown if show else logged).append(text)

    prove._log_uncertified("layout ddp over 2 processes", tmp_path, note)
    prove._conclude(Certificate((), 2, "DDP", "layout ddp over 2 processes"), tmp_path, note)
    told = f"WARNING: the certificate is not stored, No space left on device: {tmp_path / prove.FILE}"
    passed = "DDP check passed: gradients match one process"
    assert shown == [told, f"WARNING: no certificate: {prove.TOO_LARGE}", told, passed]
    assert logged == ["certificate: "]


@pytest.mark.parametrize(
    ("model", "meets", "ends"),
    [
        (nn.BatchNorm2d(3), False, False),
        (nn.Sequential(nn.SyncBatchNorm(3)), False, True),
        (nn.Sequential(WorldNorm(3)), False, True),
        (nn.BatchNorm2d(3), True, True),
    ],
)
def test_none_gives_up_while_others_wait_for_it(model: nn.Module, meets: bool, ends: bool) -> None:
    """Which of several processes has no room is known to itself alone."""
    step: Any = SimpleNamespace(objective=SimpleNamespace(meets=meets))

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) if ends else nullcontext():
        assert prove._fits(full, prove._communicates(model, step)) is None

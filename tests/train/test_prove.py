"""What becomes of a run whose certificate cannot be made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.launch.world import alone
from drumline.recipe import Checkpoint, Data, Model, Parallel, Recipe, Run, Train
from drumline.train import prove
from drumline.train.loop import train


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
    assert train(recipe, alone(torch.device("cpu"))).finished
    told = json.loads((tmp_path / "run" / prove.FILE).read_text())
    assert told["passes"] is None
    assert "does not fit" in told["words"]
    assert "WARNING: no certificate" in (tmp_path / "run" / "log.txt").read_text()

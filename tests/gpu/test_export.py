"""Exported files on a GPU: every format answers like the model there, and moves between devices if it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import UserError
from drumline.inference.export.export import export_model
from drumline.inference.export.load import ExportedModel
from drumline.inference.model import load_model, load_trained
from tests.inference.export.test_export import ENDINGS, IMAGES, NETS, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def exported(model: Path, kind: Any, **options: Any) -> dict[str, Any]:
    out = model.with_name("out" + ENDINGS[kind])
    return export_model(model, kind, out, images=IMAGES, device="cuda", trust=True, **options)


@pytest.mark.parametrize("name", ["resnet8", f"{NETS}:ViT"])
@pytest.mark.parametrize("kind", ["pt2", "torchscript", "aoti", "safetensors"])
def test_a_file_exported_for_the_gpu_answers_as_the_model_does_there(
    name: str, kind: str, tmp_path: Path
) -> None:
    model = weights(tmp_path, name)
    report = exported(model, kind)
    assert (report["top1_agreement"], report["device"]) == (1.0, "cuda")
    loaded = load_model(report["file"], trust=True)
    if isinstance(loaded, ExportedModel):
        assert loaded.device.type == "cuda"
    wanted = load_trained(model, device="cuda", trust=True).probabilities(IMAGES)
    assert torch.allclose(loaded.probabilities(IMAGES), wanted, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchscript_runs_on_both_devices(device: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    model = weights(tmp_path, f"{NETS}:ViT")
    export_model(model, "torchscript", out, images=IMAGES, device=device, trust=True)
    here, there = (load_model(out, device=place, trust=True) for place in ("cpu", "cuda"))
    assert (here.device.type, there.device.type) == ("cpu", "cuda")
    assert load_model(out, trust=True).device.type == device
    assert torch.allclose(there.probabilities(IMAGES), here.probabilities(IMAGES), atol=1e-3)


@pytest.mark.parametrize("kind", ["pt2", "aoti"])
def test_a_graph_for_the_gpu_does_not_run_on_the_cpu(kind: str, tmp_path: Path) -> None:
    file = exported(weights(tmp_path, "resnet8"), kind)["file"]
    with pytest.raises(UserError, match="was exported for cuda, not for cpu"):
        load_model(file, device="cpu", trust=True)

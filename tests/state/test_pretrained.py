"""Published weights by name: found in the caches of their libraries, or an error that names the file."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import save

from drumline.core.errors import UserError
from drumline.models import create_model
from drumline.models.registry import IMAGENET
from drumline.state import pretrained
from drumline.state.pretrained import TORCHVISION, Published, pretrained_file, pretrained_record
from drumline.state.weights import load_weights, resolve_weights


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("torchvision", "timm", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)

    def offline(*args: Any, **named: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", offline)
    return tmp_path


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "mobilenet_v2") -> Path:
    """A file in torch.hub's cache, as the published weights of a model."""
    saved = folder / "file.pth"
    torch.manual_seed(0)
    torch.save(create_model(name, 1000).state_dict(), saved)
    digest = hashlib.sha256(saved.read_bytes()).hexdigest()[:8]
    file = folder / "torch" / "hub" / "checkpoints" / f"{name}-{digest}.pth"
    file.parent.mkdir(parents=True)
    saved.rename(file)
    table = {**TORCHVISION, name: (Published("IMAGENET1K_V1", file.name, 256),)}
    monkeypatch.setattr(pretrained, "TORCHVISION", table)
    return file


def test_every_built_in_model_of_torchvision_has_published_weights() -> None:
    assert set(TORCHVISION) == set(IMAGENET)
    for sets in TORCHVISION.values():
        assert [each.name for each in sets] == [f"IMAGENET1K_V{n}" for n in range(1, len(sets) + 1)]


def test_a_cached_file_of_torchvision_loads_without_torchvision(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cached(caches, monkeypatch)
    for name in ("torchvision:mobilenet_v2", "torchvision:mobilenet_v2.IMAGENET1K_V1"):
        assert resolve_weights(name) == file
    report = load_weights(create_model("mobilenet_v2", 5), resolve_weights(name), strict_head=False)
    assert report.reinitialised == ("classifier.1.weight", "classifier.1.bias")


def test_a_damaged_file_is_an_error(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cached(caches, monkeypatch)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged: its SHA-256 does not begin with"):
        pretrained_file("torchvision:mobilenet_v2")


def test_a_file_without_a_checksum_in_its_name_loads(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cached(caches, monkeypatch)
    for name in ("mobilenet_v2_1k_224_ema.pth", "mobilenet_v2-finetuned.pth", "mobilenet-v2.pth"):
        file = file.rename(file.with_name(name))
        table = {**TORCHVISION, "mobilenet_v2": (Published("IMAGENET1K_V1", name, 256),)}
        monkeypatch.setattr(pretrained, "TORCHVISION", table)
        assert pretrained_file("torchvision:mobilenet_v2") == file


def test_the_record_says_how_torchvision_prepares_images() -> None:
    first, second = (pretrained_record(f"torchvision:resnet50.IMAGENET1K_V{n}") for n in (1, 2))
    assert (first.model, first.size, first.interpolation) == ("resnet50", 224, "bilinear")
    assert first.mean == (0.485, 0.456, 0.406)
    assert (first.eval_crop, second.eval_crop) == (224 / 256, 224 / 232)
    assert pretrained_record("torchvision:resnet50") == second


def test_a_missing_file_is_named_with_its_place(caches: Path) -> None:
    checkpoints = caches / "torch" / "hub" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "resnet50-0676ba61.pth").touch()
    with pytest.raises(
        UserError, match=r"resnet50-11ad3fa6.pth is missing and cannot be downloaded"
    ) as caught:
        pretrained_file("torchvision:resnet50")
    assert str(checkpoints) in caught.value.what
    assert "/resnet50-11ad3fa6.pth on a machine with a network" in caught.value.fix
    assert "torchvision:resnet50.IMAGENET1K_V1 is already in that folder" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("torchvision:", "names no model", "torchvision:resnet50"),
        ("torchvision:resnet50.V9", "no such weights", "torchvision:resnet50.IMAGENET1K_V1"),
        ("torchvision:resnet51", "need torchvision", "did you mean torchvision:resnet50"),
        ("torchvision:convnext_tiny", "torchvision is not installed", "path of a weights file"),
        ("timm:convnext_tiny", "timm is not installed", "path of a weights file"),
    ],
)
def test_a_name_that_cannot_be_resolved_is_an_error_with_a_fix(name: str, what: str, fix: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        pretrained_file(name)
    assert fix in caught.value.fix


def hugging_face(folder: Path, repository: str, config: dict[str, Any] | None) -> Path:
    """A file in Hugging Face's cache, where snapshots link to blobs."""
    cache = folder / "hf" / "hub" / f"models--{repository.replace('/', '--')}"
    for each in ("refs", "blobs", "snapshots/abc"):
        (cache / each).mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")

    def link(name: str, blob: str, content: bytes) -> Path:
        (cache / "blobs" / blob).write_bytes(content)
        file = cache / "snapshots" / "abc" / name
        file.symlink_to(Path("..", "..", "blobs", blob))
        return file

    if config is not None:
        link("config.json", "0" * 40, json.dumps(config).encode())
    weights = save(dict(create_model("resnet18", 10).state_dict()))
    return link("model.safetensors", hashlib.sha256(weights).hexdigest(), weights)


def test_weights_of_timm_in_the_cache_bring_their_images(caches: Path) -> None:
    images = {"input_size": [3, 288, 288], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.95}
    config = {"num_classes": 10, "pretrained_cfg": images | {"interpolation": "bicubic"}}
    file = hugging_face(caches, "timm/resnet18.a1_in1k", config)
    record = pretrained_record("timm:resnet18.a1_in1k")
    assert (record.model, record.outputs, record.size) == ("timm/resnet18", 10, 288)
    assert (record.mean, record.std, record.eval_crop) == ((0.5,) * 3, (0.25,) * 3, 0.95)
    assert record.interpolation == "bicubic"
    assert pretrained_file("timm:resnet18.a1_in1k") == file
    (file.parent / "config.json").write_text("{")
    with pytest.raises(UserError, match="not a timm configuration"):
        pretrained_record("timm:resnet18.a1_in1k")


def test_a_file_of_hugging_face_has_the_checksum_that_names_its_blob(caches: Path) -> None:
    file = hugging_face(caches, "timm/resnet18.a1_in1k", {"pretrained_cfg": {}})
    blob = file.resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(UserError, match="is damaged: its SHA-256 does not begin with"):
        pretrained_file("timm:resnet18.a1_in1k")


def test_a_cached_revision_that_is_not_main_is_not_taken(caches: Path) -> None:
    file = hugging_face(caches, "timm/resnet18.a1_in1k", {"pretrained_cfg": {}})
    (file.parents[2] / "refs" / "main").unlink()
    with pytest.raises(UserError, match="timm is not installed"):
        pretrained_file("timm:resnet18.a1_in1k")


def test_an_installed_timm_says_where_its_weights_are(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for timm, which the tests do not need."""
    images = {"hf_hub_id": "timm/", "input_size": (3, 240, 240), "interpolation": "bicubic", "crop_pct": 1.0}
    known = SimpleNamespace(architecture="resnet18", tag="b2_in1k", to_dict=lambda: images)
    package, models = ModuleType("timm"), ModuleType("timm.models")
    vars(models).update(is_model="resnet18".__eq__, get_pretrained_cfg=lambda name: known)
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    file = hugging_face(caches, "timm/resnet18.b2_in1k", None)
    assert pretrained_record("timm:resnet18").size == 240
    assert pretrained_file("timm:resnet18") == file
    file.unlink()
    with pytest.raises(UserError, match=r"model.safetensors of timm/resnet18.b2_in1k is not in"):
        pretrained_file("timm:resnet18")

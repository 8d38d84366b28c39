"""Distillation with images without labels: what counts, the same bits in any setup, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.distillation.run import distill
from drumline.models import create_model
from drumline.parallel.world import single_process
from tests.distillation.nets import wakened
from tests.runs.command import drumline, metrics, result, sha256

RECIPE = (
    "data.path=photos",
    "data.holdout=0.25",
    "data.size=8",
    "data.batch=8",
    "model.name=resnet8",
    "optim.schedule=constant",
    "parallel.threads=1",
    "train.eval_every=0",
    "train.log_every=1",
    "distill.teacher=resnet8",
    "distill.teacher_weights=teacher.safetensors",
    "distill.unlabelled=others",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """16 photos of two classes, of which 4 are for evaluation, 12 images without labels, and a teacher."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(5)
    for number in range(28):
        kind = f"photos/{'ab'[number % 2]}" if number < 16 else f"others/{number % 3}"
        (tmp_path / kind).mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (12, 9, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / kind / f"{number}.jpg")
    torch.manual_seed(5)
    state = wakened(create_model("resnet8", classes=2)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "teacher.safetensors")
    return tmp_path


def run(*words: str) -> None:
    distill(Recipe.from_args([*RECIPE, *words]), single_process(torch.device("cpu")))


def test_cross_entropy_and_accuracy_are_those_of_the_labelled_images_and_the_methods_count_all(
    home: Path,
) -> None:
    """With a rate of 0 and a student that looks at each image alone, an epoch of three steps with images without
    labels has the cross-entropy and the accuracy of one step with the labelled images."""
    still = ("optim.lr=0", "data.augment=none", "model.name=tests.distillation.nets:alone", "distill.r=1")
    run(*still, "run.name=joined", "train.steps=3", "train.log_every=3")
    run(*still, "run.name=alone", "train.steps=1", "data.batch=12", "distill.unlabelled=")
    (joined,), (alone,) = metrics(home, "joined", "train"), metrics(home, "alone", "train")
    assert "12 of 24 training images have no labels" in (home / "runs/joined/log.txt").read_text()
    assert joined["ce"] == pytest.approx(alone["ce"], rel=1e-5)
    assert joined["top1"] == alone["top1"]
    assert joined["loss"] == pytest.approx(joined["ce"] + 0.9 * joined["kd"], rel=1e-5)
    assert joined["kd"] != pytest.approx(alone["kd"], rel=1e-3)


@pytest.mark.slow
def test_a_strict_run_has_the_same_bits_cached_resumed_and_on_two_processes(home: Path) -> None:
    strict = (*RECIPE, "run.strict=true", "run.shards=2")
    result(drumline("distill", *strict, "run.name=one", "train.steps=8", "data.workers=0", folder=home))
    other = (*strict, "run.name=two", "parallel.processes=2", "data.workers=1")
    result(drumline("distill", *other, "distill.cache=cache", "train.steps=4", folder=home))
    result(drumline("distill", *other, "train.steps=8", "checkpoint.resume=auto", folder=home))
    assert sha256(home, "one") == sha256(home, "two")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("distill.method=dkd",), "dkd: needs the class of every image"),
        (("distill.method=crd,kd",), "crd: needs the class of every image"),
        (("data.balance=sqrt",), "draws by class, but images without labels have no class"),
        (("distill.unlabelled=photos",), "contains data.path photos"),
    ],
)
def test_what_needs_every_label_is_rejected(home: Path, words: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError, match=what):
        run(*words, "train.steps=1")


def test_weights_of_classes_mixing_and_relating_methods_work(home: Path) -> None:
    run(
        "run.name=all",
        "train.steps=2",
        "data.mixup=0.4",
        "train.class_weights=balanced",
        "distill.method=dist,kd",
    )
    assert all(np.isfinite(line["loss"]) for line in metrics(home, "all", "train"))

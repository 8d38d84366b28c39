"""A dry run finds every error that would end the run, prints what would happen, and writes no file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.cli import main
from drumline.data.classes import Classes
from drumline.models import create_model
from drumline.state.checkpoint import write_checkpoint
from drumline.state.manifest import Position
from drumline.state.weights import export_tensors
from tests.training.test_evaluate_weights import RECORD


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0, command: str = "train") -> str:
    """The stderr of a dry run."""
    before = sorted(Path().rglob("*"))
    assert main([command, *words, "--dry-run"]) == code
    assert sorted(Path().rglob("*")) == before, "nothing is written"
    said = capsys.readouterr()
    assert said.out.startswith(("[run]", "# "))
    return said.err


def photos() -> None:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = Path("photos", split, name)
            folder.mkdir(parents=True)
            for number in range(6):
                Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")


def saved(name: str) -> None:
    folder = Path("runs", name)
    write_checkpoint(
        folder / "checkpoints", {"model": {}, "optimizer": {}}, Position(30, 10), "", {"threads": 1}
    )
    (folder / "recipe.toml").write_text('[model]\nname = "resnet8"\n')


def test_a_dry_run_prints_what_would_happen(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    words = (
        "data.path=photos",
        "data.batch=5",
        "train.epochs=3",
        "model.name=resnet8",
        "data.size=32",
        "parallel.processes=2",
    )
    assert dry(capsys, *words, "run.device=cpu").splitlines() == [
        "data: folder photos, 12 samples to train, 12 to evaluate, 2 classes; 6 steps of 5 samples, 2 per epoch",
        "chosen for 12 training samples, from scratch: optim.lr=0.0039 optim.warmup_epochs=0.15",
        "model: resnet8, 77,522 parameters",
        "processes: 2 on the CPU",
        "run folder: a new one, runs/photos-resnet8-N",
        "nothing was started",
    ]


def test_data_that_is_not_chosen_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = "data.path is not set, so the data is the embedded digits; to use your own, set data.path=FOLDER\n"
    assert line in dry(capsys, "model.name=resnet8")
    assert line not in dry(capsys, "model.name=resnet8", "data.source=digits")


@pytest.mark.parametrize("epoch", [2, 3])
def test_modules_that_are_never_unfrozen_are_named(epoch: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.name=resnet8", "train.epochs=3", "train.freeze=stem", f"train.unfreeze_epoch={epoch}")
    warning = "train.unfreeze_epoch=3 has no effect because the run ends after 3 epochs: give a smaller one"
    assert (warning in dry(capsys, *words)) == (epoch == 3)


def test_the_recipe_that_is_printed_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.toml").write_text("[optim]\nlr = 0.5\n")
    for words in (["r.toml", "optim.lr=0.25"], ["again.toml"]):
        assert main(["train", *words, "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert "lr = 0.25" in printed
        Path("again.toml").write_text(printed)


def test_a_run_that_would_be_resumed_shows_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    saved("x")
    said = dry(capsys, "run.name=x", "checkpoint.resume=auto", "data.batch=143")
    assert "run folder: runs/x, resumed from runs/x/checkpoints/step-30\n" in said
    said = dry(capsys, "run.name=y", "checkpoint.resume=auto")
    assert "run folder: runs/y (new)\n" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("data.path=nowhere",), ("data.path nowhere does not exist",)),
        (("data.path=empty",), ("empty has no class folders",)),
        (("data.batch=5000",), ("data.batch = 5000: the training set has only 1438 samples",)),
        (("model.name=resnet19",), ("model.name: there is no model 'resnet19'", "did you mean resnet18")),
        (("model.weights=gone.pt",), ("model.weights = gone.pt: no such file or folder",)),
        (
            ("finetune=resnet50",),
            ("= resnet50: no such file or folder", "did you mean torchvision:resnet50?"),
        ),
        (("run.name=x",), ("run.name = x: runs/x already holds a run", "--checkpoint.resume auto")),
        (
            ("run.name=x", "checkpoint.resume=auto", "data.batch=287"),
            ("step-30 has 10 steps per epoch, this recipe has 5", "(data.batch) the run was started with"),
        ),
        (
            ("run.name=y", "checkpoint.resume=runs/x", "data.batch=143", "train.epochs=2"),
            ("step-30 is at step 30, the recipe ends at 20", "raise train.epochs"),
        ),
        (("checkpoint.resume=runs/gone",), ("checkpoint.resume = runs/gone", "does not exist")),
        (("run.dir=file/runs",), ("run.dir = file/runs", "is not a folder")),
        (("data.path=nowhere", "model.weights=gone.pt"), ("nowhere does not exist", "gone.pt: no such file")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_would_end_the_run_ends_the_dry_run(
    words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    saved("x")
    Path("empty").mkdir()
    Path("file").touch()
    said = dry(capsys, *words, code=2)
    for part in parts:
        assert part in said
    assert "Traceback" not in said


def test_a_teacher_that_is_not_there_ends_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = dry(capsys, "distill.teacher_weights=gone", code=2, command="distill")
    assert "distill.teacher_weights = gone: no such file or folder" in said


def test_code_that_a_file_names_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.py").write_text("raise SystemExit('owned')\n")
    Path("r.toml").write_text('[model]\nname = "evil:net"\n[data]\nsource = "evil:load"\n')
    said = dry(capsys, "r.toml")
    assert "data: evil:load; not opened" in said
    assert "model: evil:net; not built" in said


def weights(
    file: str, model: str = "resnet8", classes: tuple[str, ...] = ("cat", "dog"), nan: bool = False
) -> str:
    module = create_model(model, classes=len(classes))
    if nan:
        with torch.no_grad():
            next(module.parameters()).view(-1)[0] = torch.nan
    record = replace(RECORD, model=model, outputs=len(classes), classes=Classes(classes, named=True))
    export_tensors(module.state_dict(), file, record)
    return file


ON_PHOTOS = ("data.path=photos", "data.batch=4", "model.name=resnet8", "run.device=cpu")


def test_weights_and_sizes_are_checked_as_the_run_checks_them(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    other = weights("other.safetensors", "resnet14")
    said = dry(capsys, *ON_PHOTOS, f"model.weights={other}", code=2)
    assert "model.name = resnet8, but model.weights = other.safetensors holds weights of resnet14" in said
    nan = weights("nan.safetensors", nan=True)
    assert "NaN" in dry(capsys, *ON_PHOTOS, f"model.weights={nan}", code=2)
    birds = weights("birds.safetensors", classes=("owl", "tit", "auk"))
    said = dry(capsys, *ON_PHOTOS, f"model.weights={birds}")
    assert "weights from birds.safetensors" in said
    assert "birds.safetensors has different classes" in said
    assert main(["train", *ON_PHOTOS, "data.size=99999", "--dry-run"]) == 2
    assert "data.size=99999: too large" in capsys.readouterr().err


def test_a_teacher_is_checked_as_the_run_checks_it(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    good, birds = weights("good.safetensors"), weights("birds.safetensors", classes=("owl", "tit", "auk"))
    words = (*ON_PHOTOS, "data.size=8")
    said = dry(capsys, *words, f"distill.teacher_weights={good}", command="distill")
    assert "teacher: resnet8 (good.safetensors)" in said
    said = dry(capsys, *words, f"distill.teacher_weights={birds}", command="distill", code=2)
    assert "birds.safetensors has different classes" in said
    misfit = (f"distill.teacher_weights={good}", "distill.teacher=resnet14")
    assert "does not fit" in dry(capsys, *words, *misfit, command="distill", code=2)
    said = dry(
        capsys,
        *words,
        f"distill.teacher_weights={good}",
        "distill.method=attention",
        "distill.student_taps=stage1=nowhere",
        command="distill",
        code=2,
    )
    assert "distill.student_taps: stage1=nowhere: ResNet has no module 'nowhere'" in said


def test_warnings_about_the_data_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    shutil.rmtree("photos/val/dog")
    assert "WARNING: the evaluation set has no samples of these classes" in dry(capsys, *ON_PHOTOS)
    shutil.rmtree("photos/train/dog")
    assert "WARNING: the training set has only one class, 'cat'" in dry(capsys, *ON_PHOTOS)


def test_eval_checks_data_and_weights(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    good, nan = weights("good.safetensors"), weights("nan.safetensors", nan=True)
    said = dry(capsys, good, "data.path=photos", command="eval")
    assert "12 images to score, 2 classes" in said
    assert said.endswith("nothing was started\n")
    assert "nope does not exist" in dry(capsys, good, "data.path=nope", command="eval", code=2)
    assert "NaN" in dry(capsys, nan, "data.path=photos", command="eval", code=2)


def test_what_is_frozen_and_the_rates_are_shown_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data.source=digits", "data.batch=128", "model.name=resnet8", "optim.lr=0.1")
    said = dry(capsys, *words, "train.freeze=stem,layer1", "train.unfreeze_epoch=2", "optim.head_lr=10")
    assert (
        "frozen until step 22: stem, layer1: 5,136 of 78,042 parameters; 3 layers with running statistics in "
        "evaluation mode; 72,906 are trained"
    ) in said
    assert "WARNING: the frozen modules keep random weights because model.weights is empty" in said
    assert "learning rates: 0.1 (18 tensors), 1 (2 tensors)" in said
    assert "did you mean layer1?" in dry(capsys, *words, "train.freeze=layr1", code=2)
    assert "freezes the whole model" in dry(capsys, *words, "train.freeze=backbone,fc", code=2)


def test_a_cifar_network_on_photographs_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    said = dry(capsys, "data.path=photos", "model.name=resnet8x4")
    assert (
        "WARNING: resnet8x4 was designed for 32 px, and 224 px take 49 times as long; set data.size=64 "
        "(or model.name=resnet18)"
    ) in said
    for words in (("model.name=resnet8x4", "data.size=224"), ("model.name=resnet18",)):
        assert "designed for" not in dry(capsys, "data.path=photos", *words)
    assert "cifar/resnet18 was designed for" in dry(capsys, "data.path=photos", "model.name=cifar/resnet18")
    assert "designed for" not in dry(capsys, "data.source=digits", "model.name=resnet8x4")


def test_the_rate_of_the_classifier_in_fine_tuning_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    file = weights("w.safetensors")
    words = ("data.path=photos", "model.name=resnet8", f"finetune={file}", "optim.lr=0.1")
    assert "optim.head_lr=1: the classifier is kept" in dry(capsys, *words)
    digits = ("data.source=digits", *words[1:])
    assert "optim.head_lr=3: the classifier is new" in dry(capsys, *digits)
    assert "the classifier is" not in dry(capsys, *words, "optim.head_lr=2")
    assert "nope does not exist" in dry(capsys, "data.path=nope", *words[1:], code=2)

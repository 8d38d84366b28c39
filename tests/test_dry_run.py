"""A dry run finds what would end the run, says what would happen, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from drumline.cli import main
from drumline.state.checkpoint import Position, write_checkpoint


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0, command: str = "train") -> str:
    """What a dry run says on stderr."""
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


def test_what_would_happen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    photos()
    words = (
        "data.path=photos",
        "data.batch=5",
        "train.epochs=3",
        "model.name=resnet8",
        "parallel.processes=2",
    )
    assert dry(capsys, *words, "run.device=cpu").splitlines() == [
        "data: folder photos, 12 samples to train, 12 to evaluate, 2 classes; 6 steps of 5 samples, 2 per epoch",
        "model: resnet8, 77,522 parameters",
        "processes: 2 on the CPU",
        "run folder: a new one, runs/photos-resnet8-N",
        "nothing was started",
    ]


def test_the_recipe_that_is_printed_is_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.toml").write_text("[optim]\nlr = 0.5\n")
    for words in (["r.toml", "optim.lr=0.25"], ["again.toml"]):
        assert main(["train", *words, "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert "lr = 0.25" in printed
        Path("again.toml").write_text(printed)


def test_a_run_that_would_go_on_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    saved("x")
    said = dry(capsys, "run.name=x", "checkpoint.resume=auto")
    assert "run folder: runs/x, resumed from runs/x/checkpoints/step-30\n" in said
    said = dry(capsys, "run.name=y", "checkpoint.resume=auto")
    assert "run folder: runs/y\n" in said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("data.path=nowhere",), ("data.path nowhere does not exist",)),
        (("data.path=empty",), ("empty has no class folders",)),
        (("data.batch=5000",), ("data.batch = 5000: the training set has only 1438 samples",)),
        (("model.name=resnet19",), ("model.name = resnet19: there is no model", "did you mean resnet18")),
        (("model.weights=gone.pt",), ("model.weights = gone.pt: no such file or folder",)),
        (("run.name=x",), ("run.name = x: runs/x already holds a run", "--checkpoint.resume auto")),
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

"""The public API: what `import drumline` offers, and that the examples run."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import drumline
from tests.runs.command import completed, result
from tests.runs.command import drumline as command

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
NAMES = {
    *(
        "GuardError",
        "Recipe",
        "UserError",
        "__version__",
        "checkpoints",
        "clock",
        "create_model",
        "distill",
        "evaluate",
        "export_model",
    ),
    *("guard", "load_model", "open_feed", "resize", "train"),
}


def test_every_public_name_is_listed_found_and_documented() -> None:
    assert set(dir(drumline)) == set(drumline.__all__) == NAMES
    for name in NAMES - {"__version__"}:
        thing = getattr(drumline, name)
        assert inspect.getdoc(thing), name
        assert inspect.ismodule(thing) == (name == "checkpoints"), name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        drumline.trian  # type: ignore[attr-defined]  # noqa: B018


def test_a_list_in_place_of_a_recipe_or_a_path_has_a_fix() -> None:
    for function in (drumline.train, drumline.distill):
        with pytest.raises(drumline.UserError, match=r"not a list\n  fix: .*Recipe\.from_args"):
            function(["data.path=photos"])
    for given in (["runs/photos"], drumline.Recipe()):
        with pytest.raises(drumline.UserError, match=r"evaluate takes a path and settings, not a "):
            drumline.evaluate(given)


def test_no_package_hides_a_function() -> None:
    """`import drumline.X.y` makes X an attribute of drumline: no package may have the name of a function."""
    packages = {path.name for path in (ROOT / "src" / "drumline").iterdir() if path.is_dir()}
    assert not packages & NAMES


def test_importing_drumline_imports_no_torch() -> None:
    code = "import sys, drumline; drumline.Recipe; drumline.UserError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_loop_is_short() -> None:
    lines = (ROOT / "examples" / "own_loop.py").read_text().splitlines()
    assert len(lines) < 60
    assert ast.get_docstring(ast.parse("\n".join(lines)))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(96):
        folder = tmp_path / "photos" / "train" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (70, 66), (number, 255 - number, 99)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.mark.slow
def test_the_example_loop_killed_on_two_ranks_resumes_to_the_same_weights(
    photos: Path, tmp_path: Path
) -> None:
    script = (ROOT / "examples" / "own_loop.py").read_text()
    script = script.replace(
        "BATCH, SIZE, SAVE_EVERY = 2, 64, 64, 10", "BATCH, SIZE, SAVE_EVERY = 2, 16, 32, 2"
    )
    assert "16, 32, 2" in script
    dying = "step += 1\n                if step == 7:\n                    os._exit(9)"
    for name, text in (("whole", script), ("killed", script.replace("step += 1", dying)), ("again", script)):
        folder = tmp_path / ("whole" if name == "whole" else "killed")
        folder.mkdir(exist_ok=True)
        (folder / "loop.py").write_text(text)
        done = completed([*TORCHRUN, "loop.py", str(photos)], folder)
        assert (done.returncode == 0) == (name != "killed"), done.stderr[-3000:]
    ends = [drumline.checkpoints.verify(tmp_path / name / "own-loop") for name in ("whole", "killed")]
    assert ends[0].state_sha256 == ends[1].state_sha256
    assert ends[0].sound


@pytest.mark.slow
def test_the_example_trains_distils_scores_and_predicts(tmp_path: Path) -> None:
    done = completed([sys.executable, str(ROOT / "examples" / "train_and_predict.py")], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    teacher, student, black = done.stdout.splitlines()
    assert teacher.startswith("teacher: ")
    alone, again = student.removeprefix("student: ").split("; scored again: ")
    assert alone == again
    assert black.startswith("a black image is a ")


def test_a_function_returns_what_its_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [
        "data.source=digits",
        "model.name=resnet8",
        "train.steps=2",
        "parallel.threads=1",
        "run.name=a",
    ]
    metrics = drumline.train(drumline.Recipe.from_args(settings))
    printed = result(command("train", *settings[:-1], "run.name=b", folder=tmp_path))
    ignored = ("run", "images_per_s")
    assert {k: v for k, v in metrics.items() if k not in ignored} == {
        k: v for k, v in printed.items() if k not in ignored
    }
    score = drumline.evaluate("runs/a", "parallel.threads=1")
    assert score["correct"] == metrics["correct"]
    with pytest.raises(drumline.UserError, match="does not exist"):
        drumline.evaluate("runs/none")

"""A user's own augmentation, loss, model arguments and optimizer in whole runs: the same bits, and known to later
commands."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

import drumline as package
from tests import own_code
from tests.runs.command import TINY, drumline, kill_when, result, sha256, train
from tests.runs.command import begin as start

OWN = (
    "data.transform=own_code:noisy",
    "train.loss=own_code:focal",
    "model.name=own_code:net",
    "model.args=width:6,dropout:0.1,norm:true",
    "optim.lr=0.01",
)
NADAM = ("optim.name=torch.optim:NAdam", "optim.args=momentum_decay:0.01")
SHORT = (
    "train.steps=12",
    "train.eval_every=0",
    "checkpoint.every_steps=5",
    "optim.schedule=constant",
    "optim.warmup_epochs=0",  # `auto` depends on the length of the run
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(own_code.__file__, tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_strict_run_of_own_code_has_the_same_bits_on_two_processes(folder: Path) -> None:
    strict = (*OWN, *NADAM, *SHORT, "run.strict=true", "run.shards=4", "data.mixup=0.2")
    train(folder, "one", *strict)
    train(folder, "two", *strict, "parallel.processes=2")
    assert sha256(folder, "one") == sha256(folder, "two")


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [NADAM, ("optim.name=own_code:Counting", "optim.weight_decay=0.01", "train.freeze=0")],
    ids=str,
)
def test_a_killed_and_resumed_run_of_own_code_ends_with_the_same_bits(
    optimizer: tuple[str, ...], folder: Path
) -> None:
    words = (*OWN, *optimizer, *SHORT, *(("train.unfreeze_epoch=0.2",) if "freeze" in optimizer[-1] else ()))
    train(folder, "whole", *words)
    saved = folder / "runs/killed/checkpoints/step-5"
    run = start("train", *TINY, *words, "run.name=killed", "train.steps=400", folder=folder)
    kill_when(saved.exists, run)
    for newer in (folder / "runs/killed/checkpoints").glob("step-*"):
        if newer != saved:
            shutil.rmtree(newer)
    again = train(folder, "killed", *words, "checkpoint.resume=auto")
    assert again["finished"]
    assert sha256(folder, "killed") == sha256(folder, "whole")


def test_later_commands_build_the_model_with_its_arguments(folder: Path) -> None:
    words = (
        *OWN,
        "optim.name=torch.optim:RMSprop",
        "train.steps=2",
        "train.eval_every=0",
        "parallel.threads=1",
    )
    trained = train(folder, "run", *words, "model.name=resnet8", "model.args=stem:imagenet")
    (folder / "own_code.py").unlink()  # only training needs it
    scored = result(drumline("eval", "runs/run", folder=folder))
    assert scored["top1"] == trained["top1"]
    file = "runs/run/weights/last.safetensors"
    assert result(drumline("eval", file, "data.source=digits", folder=folder))["top1"] == trained["top1"]
    assert package.load_model(folder / file).model.stem == "imagenet"
    done = drumline(
        "distill",
        *TINY,
        "train.steps=2",
        "train.eval_every=0",
        "distill.teacher_weights=runs/run",
        "train.loss=bce",
        folder=folder,
    )
    assert result(done)["finished"], done.stderr


def test_an_unkeyed_augmentation_is_reported_and_strict_mode_rejects_it(folder: Path) -> None:
    words = ("train", *TINY, "train.steps=2", "train.eval_every=0", "data.transform=own_code:by_random")
    done = drumline(*words, folder=folder)
    assert result(done)["finished"]
    assert "WARNING: data.transform own_code:by_random: it draws from Python's `random`" in done.stderr
    rejected = drumline(*words, "run.strict=true", folder=folder)
    assert rejected.returncode == 2
    assert "fix: draw every random number from its second argument" in rejected.stderr


def test_a_dry_run_finds_the_mistakes_in_own_code_at_once(folder: Path) -> None:
    mistakes = ("data.transform=own_code:nosy", "train.loss=own_code:averaged", "optim.name=own_code:Hidden")
    done = drumline("train", *TINY, *mistakes, "--dry-run", folder=folder)
    assert done.returncode == 2
    for words in (
        "has nothing called nosy",
        "returned a tensor of shape ()",
        "keeps calls in its attributes",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    (folder / "recipe.toml").write_text('[train]\nloss = "own_code:averaged"\n')
    done = drumline("train", "recipe.toml", "--dry-run", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "train.loss: own_code:averaged; not imported, because that would run its code" in done.stderr


def test_the_page_about_own_code_works_as_it_stands(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/own-code.md").read_text()
    (module,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(module)
    words = shlex.split(command.replace("\\\n", ""))[1:]
    done = result(drumline(*words, "run.device=cpu", folder=tmp_path))
    assert done["finished"]
    assert done["top1"] > 0.9

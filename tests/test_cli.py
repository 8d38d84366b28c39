"""The command as a person types it: help that teaches, mistakes told plainly, results for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs.command import drumline, environment
from tests.wrong_commands import WRONG_COMMANDS

COMMANDS = ("train", "eval", "verify", "doctor", "demo")
IN_A_PROCESS = WRONG_COMMANDS[:: max(1, len(WRONG_COMMANDS) // 22)]
"""At least 20 of the table, in processes of their own; the whole table runs in tests/test_arguments.py."""


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_A_PROCESS, ids=lambda case: case.name)
def test_a_wrong_command_line_gets_one_plain_message_and_exit_code_2(case: object, tmp_path: Path) -> None:
    case.write_files(tmp_path)  # type: ignore[attr-defined]
    done = drumline("train", *case.argv, folder=tmp_path)  # type: ignore[attr-defined]
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in case.must_contain:  # type: ignore[attr-defined]
        assert part in done.stderr
    assert done.stdout == ""


def test_at_least_20_wrong_command_lines_are_tried_as_processes() -> None:
    assert len(IN_A_PROCESS) >= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_that_teaches(command: str, tmp_path: Path) -> None:
    done = drumline(command, "--help", folder=tmp_path, COLUMNS="80")
    assert done.returncode == 0
    assert "drumline " + command in done.stdout
    assert len(done.stdout.splitlines()) >= 3


def test_the_help_of_eval_shows_evaluations(tmp_path: Path) -> None:
    done = drumline("eval", "--help", folder=tmp_path, COLUMNS="80")
    assert done.stdout.startswith("usage: drumline eval [RUN | CHECKPOINT | WEIGHTS | RECIPE.toml]")
    examples = done.stdout.partition("examples:\n")[2].strip().splitlines()
    assert len(examples) == 5
    assert max(map(len, examples)) <= 80
    assert all(example.strip().startswith("drumline eval ") for example in examples)
    assert not any("optim." in example or "train." in example for example in examples)


def test_demo_explains_itself_wherever_help_is_asked_for(tmp_path: Path) -> None:
    done = drumline("demo", "train.epochs=1", "--help", folder=tmp_path)
    assert done.stdout.startswith("usage: drumline demo")
    assert done.returncode == 0


def test_help_lists_every_command_and_is_quick(tmp_path: Path) -> None:
    begun = time.perf_counter()
    done = drumline("--help", folder=tmp_path)
    assert time.perf_counter() - begun < 3
    assert all(command in done.stdout for command in COMMANDS)


def test_parsing_a_command_line_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys; from drumline.cli import main; main(['train', '--dry-run']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_a_dry_run_prints_the_resolved_recipe_and_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[optim]\nlr = 0.5\n")
    done = drumline("train", "r.toml", "optim.lr=0.25", "--dry-run", folder=tmp_path)
    assert done.returncode == 0
    assert "lr = 0.25" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]
    (tmp_path / "again.toml").write_text(done.stdout)
    assert "lr = 0.25" in drumline("train", "again.toml", "--dry-run", folder=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("trian",), ("no command 'trian'", "drumline train")),
        (("eval",), ("eval needs a model",)),
        (("eval", "runs/nothing"), ("runs/nothing does not exist",)),
        (("verify",), ("verify takes one run folder",)),
        (("verify", "nowhere"), ("nowhere does not exist",)),
        (("verify", "."), ("holds no checkpoint",)),
        (("doctor", "--everything"), ("--models",)),
        (("train", "model.name=resnet19"), ("resnet19", "resnet18")),
        (("train", "data.path=nowhere"), ("nowhere",)),
        (("train", "run.device=cuda"), ("run.device = cuda", "drumline doctor")),
        (("train", "parallel.rendezvous=env://"), ("RANK and WORLD_SIZE are not set",)),
        (("train", "parallel.interface=nothing0", "parallel.processes=2"), ("nothing0", "does not exist")),
        (("train", "checkpoint.resume=runs/nothing"), ("runs/nothing does not exist",)),
        (("train", "model.weights=nowhere.pt"), ("nowhere.pt",)),
        (("train", "data.holdout=0.1"), ("data.holdout",)),
        (("train", "model.classes=5"), ("the data has 10 classes",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
@pytest.mark.slow
def test_mistakes_beyond_the_recipe_are_told_plainly(
    words: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path
) -> None:
    if "run.device=cuda" in words:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has the GPU whose absence is tested")
    done = drumline(*words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not list(tmp_path.glob("runs/*")), "nothing may be left behind"


@pytest.mark.slow
def test_doctor_examines_this_machine(tmp_path: Path) -> None:
    done = drumline("doctor", folder=tmp_path)
    assert done.returncode in (0, 1)
    for word in ("torch", "gloo", "interface", "open files", "memory"):
        assert word in done.stdout.lower()
    listed = drumline("doctor", "--models", folder=tmp_path)
    assert "resnet50" in listed.stdout
    assert "cifar/shufflenet_v2" in listed.stdout


@pytest.mark.slow
def test_the_demo_trains_with_two_processes_and_verifies(tmp_path: Path) -> None:
    done = drumline("demo", "train.epochs=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["sound"]
    assert "state sha256: " in done.stdout
    assert "2 processes" in done.stderr

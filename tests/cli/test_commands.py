"""The command as a person types it: help that teaches, mistakes told plainly, results for scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.data.damage import good_jpeg
from tests.runs.command import completed, drumline, environment
from tests.wrong_commands import WRONG_COMMANDS

COMMANDS = ("train", "distill", "eval", "pack", "verify", "plan", "doctor", "demo")
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
    assert done.stdout.startswith("usage: drumline eval PATH [section.key=value ...]")
    assert len(done.stdout.splitlines()) < 60
    examples = done.stdout.partition("examples:\n")[2].strip().splitlines()
    assert len(examples) == 6
    assert max(map(len, examples)) <= 80
    assert all(example.strip().startswith("drumline eval ") for example in examples)
    assert not any("optim." in example or "train." in example for example in examples)


def test_demo_explains_itself_wherever_help_is_asked_for(tmp_path: Path) -> None:
    done = drumline("demo", "train.epochs=1", "--help", folder=tmp_path)
    assert done.stdout.startswith("usage: drumline demo")
    assert done.returncode == 0


def test_help_lists_every_command_and_is_quick(tmp_path: Path) -> None:
    begun = time.perf_counter()
    done = completed([sys.executable, "-m", "drumline", "--help"], tmp_path)
    assert time.perf_counter() - begun < 3
    assert all(command in done.stdout for command in COMMANDS)


def test_parsing_a_command_line_does_not_import_torch(tmp_path: Path) -> None:
    code = "import sys; from drumline.config.arguments import parse; parse(['optim.lr=1'], 'train', ''); "
    code += "import drumline; assert drumline.__version__[0].isdigit(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


MISTAKES = [
    (("trian",), ("no command 'trian'", "drumline train")),
    (("eval",), ("eval needs a model",)),
    (("eval", "runs/nothing"), ("runs/nothing does not exist",)),
    (("verify",), ("verify takes a run folder, a checkpoint or a data set first",)),
    (("verify", "nowhere"), ("nowhere does not exist",)),
    (("verify", "nowhere", "--list", "x"), ("nowhere does not exist", "a data set")),
    (("verify", "."), (". has no class folders", "train/CLASS/IMAGE")),
    (("verify", ".", "--lst", "x"), ("verify does not know '--lst'", "did you mean --list?")),
    (("verify", ".", "--list"), ("verify --list wants a value", "--list FILE")),
    (
        ("verify", ".", "--list", "no/such/list.tsv"),
        ("--list no/such/list.tsv cannot be written", "a folder"),
    ),
    (("verify", ".", "--list", "."), ("--list . cannot be written", "a folder")),
    (("verify", ".", "--workers=none"), ("verify --workers none", "give 1 or more")),
    (("verify", ".", "--source", "flder"), ("flder",)),
    (("pack",), ("pack takes SOURCE and OUT", "drumline pack photos photos.packed")),
    (("pack", "photos"), ("it was given photos",)),
    (("pack", "nowhere", "out"), ("nowhere",)),
    (("pack", "a", "b", "--worker", "3"), ("--worker: pack has no such flag", "did you mean --workers?")),
    (("pack", "a", "b", "--zzz"), ("--zzz: pack has no such flag", "drumline pack --help")),
    (("pack", "a", "b", "--workers", "many"), ("--workers many: expected a whole number", "--workers 8")),
    (("pack", "a", "b", "--holdout", "2"), ("--holdout 2: expected a number from 0", "--holdout 0.1")),
    (("pack", "a", "b", "--raw=yes"), ("--raw=yes: takes no value",)),
    (("pack", "a", "b", "--shard-mb"), ("--shard-mb: needs a value", "--shard-mb 1024")),
    (("pack", "a", "b", "--lo", "--shard-mb", "0"), ("--lo: pack has", "--shard-mb 0: expected a whole")),
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
    (("evaluate",), ("no command 'evaluate'", "did you mean `drumline eval`?")),
    (("fit",), ("no command 'fit'", "did you mean `drumline train`?")),
    (("zzz",), ("no command 'zzz'", "use one of: train, distill, eval, ")),
    (("train", "model.name=vit_b_16"), ("model.name: there is no model 'vit_b_16'", "torchvision/vit_b_16")),
    (("train", "data.path=nowhere", "--dry-run"), ("data.path nowhere does not exist",)),
]


@pytest.mark.parametrize(("words", "parts"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
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
    left = [path for path in tmp_path.rglob("*") if path != tmp_path / "runs"]
    assert not left, "nothing may be left behind"


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
def test_the_demo_teaches_with_two_processes_verifies_and_compares(tmp_path: Path) -> None:
    done = drumline("demo", "train.epochs=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "state sha256: " in done.stdout
    assert "2 processes" in done.stderr
    for command in ("train model.name=resnet8x4", "train model.name=resnet8 ", "distill model.name=resnet8 "):
        assert f"$ drumline {command}" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"teacher_top1", "alone_top1", "taught_top1", "agreement"} < result.keys()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"run"')]
    assert [line["top1"] for line in lines] == [
        result[f"{name}_top1"] for name in ("teacher", "alone", "taught")
    ]
    assert sorted(path.name for path in (tmp_path / "runs" / "demo-1").iterdir()) == [
        "alone",
        "taught",
        "teacher",
    ]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(300):
        file = tmp_path / "photos" / ("val", "train")[number % 3 > 0] / f"class{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(good_jpeg(number, 200, 160))
    return tmp_path / "photos"


def interrupted(*words: str, folder: Path) -> str:
    """What a command says that gets Ctrl-C, as its whole process group does, once its helpers are at work."""
    command = subprocess.Popen(
        [sys.executable, "-m", "drumline", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    me, helpers, deadline = psutil.Process(command.pid), list[psutil.Process](), time.monotonic() + 60
    while len(helpers) < 4:  # a resource tracker, the fork server, and two that it forked
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline
        helpers = me.children(recursive=True)
        time.sleep(0.005)
    os.killpg(command.pid, signal.SIGINT)
    out, told = command.communicate(timeout=60)
    _, left = psutil.wait_procs(helpers, timeout=10)
    assert not left
    assert (command.returncode, out) == (130, ""), told
    assert "Traceback" not in told
    return told


@pytest.mark.slow
def test_an_interrupted_pack_leaves_nothing_broken_and_goes_on(photos: Path, tmp_path: Path) -> None:
    words = ("pack", "photos", "out", "--raw", "--workers", "2")
    assert "stopped; the same command goes on where it was" in interrupted(*words, folder=tmp_path)
    assert not (tmp_path / "out").exists()
    done = drumline(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    packed = json.loads(done.stdout.splitlines()[-1])
    assert (packed["train"], packed["eval"], packed["bad"]) == (200, 100, 0)
    assert not (tmp_path / "out.partial").exists()
    checked = drumline("verify", "out", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout.splitlines()[-1])["samples"] == 300
    again = drumline(*words, folder=tmp_path)
    assert again.returncode == 2
    assert "out exists" in again.stderr
    assert "--force" in again.stderr


@pytest.mark.slow
def test_an_interrupted_verify_writes_nothing(photos: Path, tmp_path: Path) -> None:
    words = ("verify", "photos", "--list", "found.tsv", "--workers", "2")
    interrupted(*words, folder=tmp_path)
    assert not (tmp_path / "found.tsv").exists()


@pytest.mark.slow
def test_verify_of_data_answers_in_words_in_json_and_by_its_exit_code(photos: Path, tmp_path: Path) -> None:
    sound = drumline("verify", "photos", folder=tmp_path)
    assert sound.returncode == 0, sound.stderr
    assert json.loads(sound.stdout.splitlines()[-1])["bad"] == 0
    victim = photos / "train" / "class0" / "4.jpg"
    victim.write_bytes(victim.read_bytes()[:500])
    broken = drumline("verify", "photos", "--list", "found.tsv", folder=tmp_path)
    assert broken.returncode == 1
    assert "BAD  truncated (train" in broken.stdout
    assert "photos/train/class0/4.jpg" in (tmp_path / "found.tsv").read_text()
    found = json.loads(broken.stdout.splitlines()[-1])
    assert (found["bad"], found["kinds"], found["splits"]) == (
        1,
        {"truncated": 1},
        {"train": 200, "eval": 100},
    )

"""The command as a person types it: mistakes reported plainly, results for scripts."""

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
from PIL import Image

from drumline.cli import main
from tests.data.damage import good_jpeg
from tests.runs.command import completed, drumline, environment
from tests.wrong_commands import WRONG_COMMANDS, WrongCommand


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The message of a command line that must end with exit code 2."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", WRONG_COMMANDS[::8], ids=lambda case: case.name)
def test_a_wrong_command_line_gets_one_plain_message_and_exit_code_2(
    case: WrongCommand, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample; tests/config/test_arguments.py reads the whole table."""
    case.write_files(tmp_path)
    said = mistake(capsys, "train", *case.argv)
    assert all(part in said for part in case.must_contain)


@pytest.mark.slow
def test_wrong_command_lines_end_processes_in_the_same_way(tmp_path: Path) -> None:
    for case in (WRONG_COMMANDS[0], WRONG_COMMANDS[-1]):
        done = drumline("train", *case.argv, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        assert all(part in done.stderr for part in case.must_contain)


def test_help_is_quick(tmp_path: Path) -> None:
    begun = time.perf_counter()
    done = completed([sys.executable, "-m", "drumline", "train", "--help"], tmp_path)
    assert time.perf_counter() - begun < 3
    assert "usage: drumline train" in done.stdout


def test_no_help_imports_torch(tmp_path: Path) -> None:
    code = "import sys, drumline; from drumline.cli import COMMANDS, main; assert drumline.__version__[0].isdigit();"
    code += "[main([command, '--help']) for command in COMMANDS]; print('torch' in sys.modules)"
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
    (("verify",), ("verify needs PATH", "drumline verify PATH")),
    (("verify", "nowhere"), ("nowhere does not exist",)),
    (("verify", "nowhere", "--list", "x"), ("nowhere does not exist", "a data set")),
    (("verify", "."), (". has no class folders", "train/CLASS/IMAGE")),
    (("verify", ".", "--lst", "x"), ("--lst: verify has no such option", "did you mean --list?")),
    (("verify", ".", "--list"), ("--list: needs a value", "--list NAME")),
    (
        ("verify", ".", "--list", "no/such/list.tsv"),
        ("--list no/such/list.tsv cannot be written", "a folder"),
    ),
    (("verify", ".", "--list", "."), ("--list . cannot be written", "a folder")),
    (("verify", ".", "--workers=none"), ("--workers=none: expected a whole number", "--workers auto")),
    (("verify", ".", "--source", "flder"), ("flder",)),
    (("pack",), ("pack needs DATA and OUT", "drumline pack DATA OUT")),
    (("pack", "photos"), ("pack needs DATA and OUT, not only photos",)),
    (("pack", "nowhere", "out"), ("nowhere",)),
    (("pack", "a", "b", "--worker", "3"), ("--worker: pack has no such option", "did you mean --workers?")),
    (("pack", "a", "b", "--zzz"), ("--zzz: pack has no such option", "drumline pack --help")),
    (("pack", "a", "b", "--workers", "many"), ("--workers many: expected a whole number", "--workers auto")),
    (("pack", "a", "b", "--holdout", "2"), ("--holdout 2: too large", "give less than 1")),
    (("pack", "a", "b", "--raw=yes"), ("--raw=yes: expected true or false",)),
    (("pack", "a", "b", "--shard-mb"), ("--shard-mb: needs a value", "--shard-mb 1024")),
    (("pack", "a", "b", "--lo", "--shard-mb", "0"), ("--lo: pack has", "--shard-mb 0: too small")),
    (("doctor", "--everything"), ("--everything: doctor has no such option", "drumline doctor --help")),
    (("compare", "a"), ("compare needs A and B, not only a",)),
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
    (("zzz",), ("no command 'zzz'", "use one of: train, distill, resume, ")),
    (("train", "model.name=vit_b_16"), ("model.name: there is no model 'vit_b_16'", "torchvision/vit_b_16")),
    (("train", "data.path=nowhere", "--dry-run"), ("data.path nowhere does not exist",)),
]


@pytest.mark.parametrize(("argv", "parts"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_mistakes_beyond_the_recipe_are_reported_plainly(
    argv: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "run.device=cuda" in argv:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has the GPU whose absence is tested")
    assert main(argv) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err
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
    done = drumline("demo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shorter than the demo's own" not in done.stderr
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


def test_the_demo_can_print_commands_to_run_one_by_one(tmp_path: Path) -> None:
    done = drumline("demo", "--dry-run", "data.batch=32", folder=tmp_path)
    commands = [line for line in done.stderr.splitlines() if line.startswith("$ drumline ")]
    assert len(commands) == 4
    assert all("data.batch=32" in line and "--dry-run" not in line for line in commands[:3])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(300):
        file = tmp_path / "photos" / ("val", "train")[number % 3 > 0] / f"class{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(good_jpeg(number, 200, 160))
    return tmp_path / "photos"


def interrupted(*words: str, folder: Path) -> str:
    """The output of a command that gets Ctrl-C, with its whole process group, once its helpers are running."""
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
def test_an_interrupted_pack_leaves_no_broken_set_and_can_be_continued(photos: Path, tmp_path: Path) -> None:
    words = ("pack", "photos", "out", "--raw", "--workers", "2")
    assert "stopped; the same command continues where it was" in interrupted(*words, folder=tmp_path)
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
    Image.new("RGB", (4000, 3000)).save(tmp_path / "large.jpg")
    for number in range(60):  # seconds of work, so that the interrupt comes before the end
        (photos / "train" / "class0" / f"large{number}.jpg").hardlink_to(tmp_path / "large.jpg")
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

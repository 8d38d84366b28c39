"""`drumline why --measure`, `--sweep` and `--apply`: what they print, and that nothing of the short runs remains."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from drumline import cli
from drumline.cli import trials
from tests import warm
from tests.runs.command import drumline, environment, result, still_running

OWN = """
import time
import torch

class SlowUpdate(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.04)
        return super().step(closure)
"""
SLOW = (
    *("data.source=digits", "data.batch=16", "model.name=resnet8", "parallel.threads=1"),
    *("optim.name=own:SlowUpdate", "optim.lr=0.01"),
)
"""Most of a step is an update that does not depend on the batch."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user works."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def why(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The result of a command, and what it printed. Nothing may remain of it where the user works."""
    before = _files(folder)
    done = drumline("why", *words, folder=folder)
    found = result(done)
    assert _files(folder) == before
    return found, done.stdout


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


@pytest.mark.slow
def test_a_measurement_names_the_change_and_applies_it(folder: Path) -> None:
    found, printed = why(folder, "--measure", "--apply", "--seconds=0.5", *SLOW)
    assert found["arms"].keys() == {"synthetic", "cached", "cold"}
    assert found["arms"]["cached"] > 0 < found["arms"]["synthetic"]
    assert found["arms"]["cold"] is None, "the digits are in memory"
    (small,) = [each for each in found["findings"] if each["code"] == "small-batch"]
    assert small["flag"] == "data.batch=64"
    applied = found["applied"]
    assert applied["flag"] == small["flag"]
    assert applied["measured"] > applied["before"]
    assert applied["command"] == found["command"].replace(" data.batch=16", "") + " data.batch=64"
    assert applied["command"] in printed


@pytest.mark.slow
def test_a_change_is_applied_to_a_run_that_is_finished(folder: Path) -> None:
    drumline("train", *SLOW, "run.name=a", "train.steps=40", "train.eval_every=0.2", folder=folder)
    found, printed = why(folder, "runs/a", "--apply", "--trust", "--seconds=0.5")
    applied = found["applied"]
    assert applied["code"] in {each["code"] for each in found["findings"] if each["flag"]}
    assert applied["before"] > 0 < applied["measured"]
    assert "predicted" in printed
    assert f"runs/a/recipe.toml --trust {applied['flag']}" in applied["command"]
    untrusted = drumline("why", "runs/a", "--apply", folder=folder)
    assert untrusted.returncode == 2
    assert "add --trust" in untrusted.stderr


@pytest.mark.slow
def test_files_are_measured_cold_and_cached_or_it_is_said_why_not(folder: Path) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (48, 48)).save(stream, "JPEG")
    for split, count in (("train", 160), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                (folder / "photos" / split / name / f"{number}.jpg").write_bytes(stream.getvalue())
    words = ("data.path=photos", "data.size=32", "data.batch=8", "model.name=resnet8", "parallel.threads=1")
    found, printed = why(folder, "--measure", "--seconds=0.5", *words)
    assert found["arms"]["cached"] > 0 < found["arms"]["synthetic"]
    assert found["arms"]["cold"] or found["notes"]
    assert "files in memory" in printed
    assert "files on disk" in printed


@pytest.mark.slow
def test_a_sweep_measures_every_combination_and_gives_reasons_for_those_that_fail(folder: Path) -> None:
    words = ("batch=32,9000", "data.source=digits", "model.name=resnet8", "parallel.threads=1")
    found, printed = why(folder, "--sweep", "--seconds=0.5", *words)
    good, bad = found["rows"]
    assert good["settings"] == {"data.batch": "32"}
    assert good["images_per_s"] > 0
    assert good["memory_mb"] > 0 < good["cores"]
    assert bad["problem"].startswith("data.batch = 9000: the training set has only")
    assert found["best"] == found["knee"] == good
    assert "best, knee" in printed


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_an_interrupted_sweep_shows_its_rows_and_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    run, children, trial = begin_sweep(folder)
    try:
        os.kill(run.pid, number)
        done = run.finish(120)
    finally:
        run.kill()
    assert done.returncode == 130, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["settings"] for row in found["rows"]] == [{"data.batch": "9000"}]
    assert "interrupted after 1 of 2 combinations" in done.stderr
    assert not still_running(children, 10)
    assert not trial.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_short_run_ends_with_a_sweep_that_is_killed(folder: Path) -> None:
    run, children, trial = begin_sweep(folder)
    os.kill(run.pid, signal.SIGKILL)
    run.finish(120)
    assert not still_running(children, 10)
    shutil.rmtree(trial)


def begin_sweep(folder: Path) -> tuple[warm.Started, list[psutil.Process], Path]:
    """A sweep whose second combination trains, that short run's processes, and its folder."""
    words = ("why", "--sweep", "batch=9000,32", "--seconds=60", "model.name=resnet8", "parallel.threads=1")
    run = warm.Started([sys.executable, "-m", "drumline", *words], folder, environment())
    metrics, deadline = set[Path](), time.monotonic() + 120
    while "data.batch=9000" not in run.output()[1] or not metrics:
        assert time.monotonic() < deadline, run.output()
        children = psutil.Process(run.pid).children(recursive=True)
        metrics = {path for child in children for path in files_of(child) if path.name == "metrics.jsonl"}
        time.sleep(0.05)
    (file,) = metrics
    assert file.parents[1].name.startswith("drumline-why-")
    return run, children, file.parents[1]


def files_of(process: psutil.Process) -> list[Path]:
    """The files that a process has open."""
    try:
        return [Path(each.path) for each in process.open_files()]
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--measure", "data.pth=photos"), "did you mean data.path=photos?"),
        (("--measure", "data.path=nowhere"), "nowhere does not exist"),
        (("--measure", "--sweep"), "leave one of them out"),
        (("--sweep", "wrkers=1,2"), "did you mean data.workers=1,2?"),
        (("--sweep", "workers=1,2", "data.path=nowhere"), "nowhere does not exist"),
        (("--measure", "--seconds=0"), "--seconds"),
        (("--measure", "parallel.nodes=2", "parallel.rendezvous=a:1"), "add parallel.nodes=1"),
        (("--measure", "--repeat=2"), "--repeat"),
    ],
)
def test_a_command_that_cannot_be_measured_is_rejected_at_once(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["why", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_teachers_cache_is_never_filled_by_a_short_run(tmp_path: Path) -> None:
    words = ["distill.teacher=resnet8", f"distill.cache={tmp_path / 'cache'}"]
    with pytest.raises(ValueError, match="is not filled yet"):
        trials.command_of(words)
    (tmp_path / "cache").mkdir()
    assert trials.command_of(words)[0].job == "distill"


def test_initial_phases_are_not_measured() -> None:
    fsp = ["distill.teacher=resnet8", "distill.method=fsp"]
    assert trials.command_of(fsp)[0].arguments[-1] == "distill.initial_epochs=0"


def test_a_run_folder_stands_for_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[data]\nbatch = 16\n")
    command, recipe = trials.command_of([str(tmp_path), "data.workers=1"])
    assert command.arguments == (str(tmp_path / "recipe.toml"), "data.workers=1")
    assert recipe.data.batch == 16


def test_the_options_of_why_are_not_passed_to_the_runs() -> None:
    words = ["--sweep", "batch=1,2", "--seconds", "3", "r.toml", "--apply", "--trust", "--seconds=4"]
    assert trials.split(words) == (
        ["--sweep", "--seconds", "3", "--apply", "--seconds=4"],
        ["batch=1,2", "r.toml", "--trust"],
    )

"""`--repeat`: one run for each seed, continued by the same command; at the end, mean and standard deviation."""

from __future__ import annotations

import json
import signal
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.cli import main
from drumline.cli.repeat import recipes
from drumline.config.recipe import Checkpoint, Data, Parallel, Recipe, Run
from drumline.core.errors import UserError
from drumline.launch import start
from tests.runs.command import begin, drumline, result, sha256, train, wait_until

SHORT = (
    "run.device=cpu",
    "data.source=digits",
    "data.batch=64",
    "model.name=resnet8",
    "train.steps=3",
    "optim.warmup_epochs=0",
    "optim.lr=0.1",
    "data.workers=0",
    "parallel.threads=1",
    "run.name=r",
)


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[None]:
    """A command sets it for its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def test_each_run_has_a_seed_and_a_name_of_its_own() -> None:
    given = Recipe(run=Run(name="photos", seed=7))
    found = recipes(given, 3)
    assert [(each.run.seed, each.run.name) for each in found] == [
        (7, "photos-seed7"),
        (8, "photos-seed8"),
        (9, "photos-seed9"),
    ]
    assert recipes(given, 1) == [given]
    automatic = recipes(Recipe(data=Data(source="synthetic")), 2)
    assert [each.run.name for each in automatic] == ["synthetic-resnet18-seed0", "synthetic-resnet18-seed1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel": Parallel(nodes=2, rendezvous="a:1")}, "--repeat 2: works only on one machine"),
        ({"checkpoint": Checkpoint(resume="runs/a")}, "not from checkpoint.resume = runs/a"),
        ({"run": Run(name="r", seed=2**63 - 1)}, "run.seed"),
    ],
)
def test_what_cannot_be_repeated_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipes(replace(Recipe(run=Run(name="r")), **change), 2)


def test_ranks_of_another_launcher_cannot_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="without torchrun"):
        recipes(Recipe(run=Run(name="r")), 2)


def test_the_same_command_runs_what_is_missing_and_prints_the_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SHORT, "--repeat", "2"]) == 0
    capfd.readouterr()
    logs = {path: path.read_text() for path in Path("runs").glob("*/log.txt")}
    assert sorted(path.parent.name for path in logs) == ["r-seed0", "r-seed1"]
    assert main(["train", *SHORT, "--repeat", "3"]) == 0
    out, err = capfd.readouterr()
    assert {path: path.read_text() for path in logs} == logs, "finished runs are not touched"
    assert "run 2 of 3: seed 1, runs/r-seed1, is already finished" in err
    found = json.loads(out.splitlines()[-1])
    values = [run["top1"] for run in found["runs"]]
    assert [(run["run"], run["seed"]) for run in found["runs"]] == [(f"runs/r-seed{n}", n) for n in range(3)]
    assert found["finished"] is True
    assert found["top1"] == {
        "mean": pytest.approx(statistics.fmean(values)),
        "std": pytest.approx(statistics.stdev(values)),
        "min": min(values),
        "max": max(values),
    }
    shown = f"top-1 at the end {statistics.fmean(values):.2%} ± {statistics.stdev(values):.2%}"
    assert shown in err
    assert main(["runs"]) == 0
    assert shown in capfd.readouterr().out, "drumline runs groups them"
    assert main(["train", *SHORT, "--repeat", "3", "optim.lr=0.2"]) == 2
    assert (
        "runs/r-seeds.toml: the earlier runs have different settings: optim.lr: 0.1 -> 0.2"
        in capfd.readouterr().err
    )


def test_a_run_of_the_same_name_that_repeat_did_not_start_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/r-seed1").mkdir(parents=True)
    Path("runs/r-seed1/recipe.toml").write_text("[optim]\nlr = 3\n")
    assert main(["train", *SHORT, "--repeat=2"]) == 2
    assert "runs/r-seed1 contains a run that --repeat did not start" in capfd.readouterr().err
    assert not Path("runs/r-seed0").exists()


def test_a_run_that_fails_or_is_stopped_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ends: list[Any] = [
        UserError("the disk is full", "free space"),
        {"finished": False, "stopped_by": "SIGTERM"},
    ]

    def end(recipe: Recipe, job: str, **given: object) -> dict[str, Any]:
        ended = ends.pop(0)
        if isinstance(ended, UserError):
            raise ended
        assert isinstance(ended, dict)
        return ended

    monkeypatch.setattr(start, "start", end)
    assert main(["train", *SHORT, "--repeat=2"]) == 2
    err = capfd.readouterr().err
    assert "seed 0 did not finish; repeat the command to continue with it" in err
    assert "the disk is full" in err
    assert main(["train", *SHORT, "--repeat=2"]) == 128 + signal.SIGTERM
    out, err = capfd.readouterr()
    assert json.loads(out.splitlines()[-1])["finished"] is False
    assert "stopped at seed 0; repeat the command to continue with it" in err
    assert ends == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", *SHORT, "--repeat", "0"], "--repeat 0: too small"),
        (["train", *SHORT, "--repeat", "many"], "expected a whole number"),
        (["resume", "r", "--repeat", "2"], "resume continues one run"),
    ],
)
def test_wrong_numbers_are_explained(
    argv: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capfd.readouterr().err


def test_a_dry_run_shows_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SHORT, "--repeat", "2", "--dry-run"]) == 0
    out, err = capfd.readouterr()
    assert 'name = "r-seed0"' in out
    assert "runs/r-seed0 (new)" in err
    assert "2 runs, with run.seed 0 to 1" in err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_ctrl_c_ends_all_runs_and_the_same_command_continues_with_the_same_bits(tmp_path: Path) -> None:
    """On two processes, which a launcher supervises."""
    words = (*SHORT, "train.steps=120", "parallel.processes=2", "checkpoint.every_steps=10")
    run = begin("train", *words, "--repeat", "2", folder=tmp_path)
    wait_until((tmp_path / "runs/r-seed0/checkpoints/step-20").exists, run)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["finished"] is False
    assert "stopped at seed 0" in err
    assert not (tmp_path / "runs/r-seed1").exists()
    found = result(drumline("train", *words, "--repeat", "2", folder=tmp_path))
    assert [run["state"] for run in found["runs"]] == ["finished", "finished"]
    for seed in (0, 1):
        train(tmp_path, f"alone{seed}", f"run.seed={seed}", recipe=words)
        assert sha256(tmp_path, f"alone{seed}") == sha256(tmp_path, f"r-seed{seed}")

"""`train.patience`: a run stops after the same step with the same bits, on several processes, killed or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs.command import drumline, metrics, result, sha256, train

pytestmark = pytest.mark.slow

IMPATIENT = (
    "data.source=digits",
    "data.batch=48",
    "model.name=resnet8",
    "optim.lr=0.1",
    "train.epochs=9",
    "train.eval_every=0.2",
    "train.patience=2",
    "checkpoint.best=loss",
    "checkpoint.every_steps=2",
    "checkpoint.keep=100",
    "parallel.threads=1",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the run `whole`, which stopped early, and its result."""
    folder = tmp_path_factory.mktemp("early")
    return folder, train(folder, "whole", recipe=IMPATIENT)


def test_a_run_stops_once_its_metric_has_not_improved(stopped: tuple[Path, dict[str, Any]]) -> None:
    folder, found = stopped
    lines = metrics(folder, "whole", "eval")
    losses = [line["loss"] for line in lines]
    best = losses.index(min(losses))
    assert len(lines) == best + 3
    assert all(min(losses[i - 2 : i]) < min(losses[: i - 2]) for i in range(3, len(losses))), "not before"
    assert (found["finished"], found["step"]) == (True, lines[-1]["step"])
    assert found["step"] < 9 * 29
    assert (found["best_metric"], found["best_value"], found["best_top1"]) == ("loss", min(losses), None)
    since = lines[best]["epoch"]
    assert found["stopped_early"] == f"loss has not improved since epoch {since:.4g} (2 evaluations)"
    log = (folder / "runs/whole/log.txt").read_text()
    assert f"finished: stopped early after epoch {found['epoch']:.4g}: {found['stopped_early']}" in log
    (listed,) = json.loads(drumline("runs", "runs/whole", folder=folder).stdout.splitlines()[-1])
    assert (listed["state"], listed["best_value"]) == ("finished", min(losses))


def test_a_run_that_was_killed_before_stops_after_the_same_step_with_the_same_bits(
    stopped: tuple[Path, dict[str, Any]],
) -> None:
    """Its folder after a kill: the newest checkpoint lies between the two evaluations that are not the best."""
    folder, found = stopped
    shutil.copytree(folder / "runs/whole", folder / "runs/killed")
    for checkpoint in (folder / "runs/killed/checkpoints").iterdir():
        if int(checkpoint.name.partition("-")[2]) >= found["step"] - 1:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "runs/killed/weights")
    again = result(drumline("resume", "runs/killed", folder=folder))
    assert (again["step"], again["stopped_early"]) == (found["step"], found["stopped_early"])
    assert sha256(folder, "killed") == sha256(folder, "whole")


def test_a_run_that_stopped_early_says_so_when_it_is_resumed_and_trains_on_with_more_patience(
    stopped: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = stopped
    shutil.copytree(folder / "runs/whole", folder / "runs/resumed")
    done = drumline("resume", "runs/resumed", folder=folder)
    again = result(done)
    assert f"already finished: {found['stopped_early']}" in done.stderr
    assert "To train longer: drumline resume runs/resumed train.patience=0" in done.stderr
    assert {name: again[name] for name in ("step", "loss", "top1", "stopped_early", "best_value")} == {
        name: found[name] for name in ("step", "loss", "top1", "stopped_early", "best_value")
    }
    on = result(drumline("resume", "runs/resumed", "train.patience=0", "train.epochs=4", folder=folder))
    assert found["step"] < 4 * 29
    assert (on["step"], on["stopped_early"]) == (4 * 29, "")


def test_another_metric_starts_to_count_anew(stopped: tuple[Path, dict[str, Any]]) -> None:
    folder, found = stopped
    shutil.copytree(folder / "runs/whole", folder / "runs/other")
    done = drumline("resume", "runs/other", "checkpoint.best=top1", "train.epochs=4", folder=folder)
    assert "checkpoint.best: loss -> top1: earlier evaluations no longer count as best" in done.stderr
    later = result(done)
    assert later["best_metric"] == "top1"
    assert later["best_epoch"] * 29 > found["step"]


def test_all_processes_stop_after_the_same_step(tmp_path: Path) -> None:
    one, two = (
        train(tmp_path, name, "run.strict=true", "run.shards=2", *words, recipe=IMPATIENT)
        for name, words in (("one", ()), ("two", ("parallel.processes=2",)))
    )
    assert one["stopped_early"]
    assert (one["step"], one["stopped_early"]) == (two["step"], two["stopped_early"])
    assert sha256(tmp_path, "one") == sha256(tmp_path, "two")

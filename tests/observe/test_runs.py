"""`drumline runs` and `drumline resume`: every run is listed with what it reached, and continues where it stopped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import main
from drumline.cli.runs import repeat_lines, table
from drumline.core import lock
from drumline.observe.runs import RunSummary, differences, find_runs, repeats, statistics_of, summarize

DIGITS = (
    "run.device=cpu",
    "data.source=digits",
    "model.name=resnet8",
    "data.workers=0",
    "parallel.threads=1",
)


def run_folder(path: Path, log: str = "", metrics: str = "", recipe: str = "[optim]\nlr = 0.1\n") -> Path:
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe)
    (path / "log.txt").write_text(log)
    (path / "metrics.jsonl").write_text(metrics)
    return path


START = "2026-01-02 10:00:00  started: drumline train\n"
EVALS = (
    '{"kind": "eval", "step": 10, "epoch": 1.0, "top1": 0.5, "loss": 1.5}\n'
    '{"kind": "eval", "step": 20, "epoch": 2.0, "top1": 0.4, "loss": 1.7}\n'
)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("finished: top-1 40.00%", "finished"),
        ("stopped: SIGTERM after step 3 of 9", "stopped"),
        ("failed: out of memory", "failed"),
        ("saved checkpoint step-20", "killed"),
    ],
)
def test_the_end_of_the_log_says_how_a_run_ended(tmp_path: Path, end: str, state: str) -> None:
    found = summarize(run_folder(tmp_path / "a", START + f"2026-01-02 10:01:30  {end}\n    more\n", EVALS))
    assert (found.state, found.seconds) == (state, 90)
    assert (found.top1, found.loss, found.best_top1, found.best_epoch) == (0.4, 1.7, 0.5, 1.0)
    assert (found.step, found.epoch) == (20, 2.0)


def test_the_best_evaluation_is_the_one_that_the_run_found_best(tmp_path: Path) -> None:
    """By its own metric, of the averaged weights if there are any, and not by a value that the run rejected."""
    lines = [
        {"epoch": 1.0, "top1": 0.5, "loss": 1.5, "average_loss": 2.5, "best": True},
        {"epoch": 2.0, "top1": 0.4, "loss": 1.7, "average_loss": 1.25, "best": True},
        {"epoch": 3.0, "top1": 0.9, "loss": 0.1, "average_loss": None, "best": False},
    ]
    text = "".join(json.dumps({"kind": "eval", "step": 1} | line) + "\n" for line in lines)
    found = summarize(run_folder(tmp_path / "a", START, text, '[checkpoint]\nbest = "loss"\n'))
    assert (found.best_metric, found.best_value, found.best_top1, found.best_epoch) == (
        "loss",
        1.25,
        None,
        2.0,
    )
    assert "  loss 1.2500 at 2  " in table([found], [{}], 1000)[1]
    found = summarize(run_folder(tmp_path / "b", START, text))
    assert (found.best_metric, found.best_value, found.best_epoch) == ("top1", 0.4, 2.0)
    by_loss = text.replace('"best": ', '"best_metric": "loss", "best": ')
    found = summarize(run_folder(tmp_path / "d", START, by_loss))
    assert (found.best_metric, found.best_value, found.best_epoch) == ("top1", None, None), "resumed since"
    never = text.replace("true", "false")
    assert summarize(run_folder(tmp_path / "c", START, never)).best_value is None


def test_finished_runs_that_differ_only_in_their_seed_are_grouped() -> None:
    def run(name: str, top1: float | None = 0.5, state: str = "finished", **settings: Any) -> RunSummary:
        own = {"run.name": name, "optim.lr": 0.1} | {f"run.{key}": value for key, value in settings.items()}
        return RunSummary(name, state, top1=top1, best_value=top1, best_epoch=1.0, settings=own)

    runs = [
        run("a0", 0.5, seed=0),
        run("a1", 0.7, seed=1),
        run("again1", 0.7, seed=1),
        run("strict0", seed=0, strict=True),
        run("a2", state="stopped", seed=2),
    ]
    (group,) = repeats(runs)
    assert [each.path for each in group] == ["a0", "a1"]
    lines = repeat_lines(group)
    assert lines[1] == "a0 and 1 more that differ in run.seed: mean ± standard deviation"
    assert lines[2] == "  top-1 at the end 60.00% ± 14.14% (50.00% to 70.00%)"
    assert repeats(runs[1:]) == []
    folds = [run(f"fold{fold}") for fold in range(3)]
    folds = [replace(one, settings={**(one.settings or {}), "data.fold": n}) for n, one in enumerate(folds)]
    assert repeats(folds) == []
    assert repeats(folds, "data.fold") == [folds]
    assert "fold0 and 2 more that differ in data.fold" in repeat_lines(folds, "data.fold")[1]
    assert statistics_of([0.5, None]) is None, "nothing is said about runs of which some have no score"


def test_the_pause_before_a_resume_is_no_running_time(tmp_path: Path) -> None:
    log = (
        START + "2026-01-02 10:00:10  stopped: SIGINT after step 3\n" + START.replace("10:00:00", "11:00:00")
    )
    log += "2026-01-02 11:00:05  finished: top-1 40.00%\n"
    found = summarize(run_folder(tmp_path / "a", log))
    assert (found.state, found.seconds) == ("finished", 15)


def test_a_run_whose_folder_is_locked_is_running(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", START)
    assert summarize(folder).state == "killed"
    held = lock.acquire(folder)
    assert summarize(folder).state == "running"
    held.close()
    assert summarize(folder).state == "killed"


def test_damaged_files_do_not_hide_a_run(tmp_path: Path) -> None:
    (run_folder(tmp_path / "a", recipe="no [toml") / "metrics.jsonl").write_bytes(
        b'{"kind": "eval"\n[1]\n\xff\n'
    )
    (run_folder(tmp_path / "b") / "log.txt").unlink()
    found = find_runs([tmp_path])
    assert sorted(run.path for run in found) == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert {run.state for run in found} == {"killed"}
    readable = RunSummary("c", "finished", settings={"optim.lr": 0.3})
    assert differences([*found, readable])[2] == {"optim.lr": 0.3}, "compared with b, not with a"
    assert [run.settings for run in found if run.path.endswith("a")] == [None]
    assert any(line.endswith("recipe.toml cannot be read") for line in table(found, differences(found), 1000))
    assert all(math.isnan(run.started) for run in found)


def test_only_settings_that_differ_are_listed() -> None:
    runs = [
        RunSummary("a", "finished", settings={"optim.momentum": 0.9, "run.name": "a", "data.size": 32}),
        RunSummary(
            "b",
            "finished",
            settings={"optim.momentum": 0.8, "run.name": "b", "data.size": 32, "new.field": 1},
        ),
    ]
    assert differences(runs) == [{"optim.momentum": 0.9}, {"optim.momentum": 0.8, "new.field": 1}]
    assert differences(runs[:1]) == [{}]
    lines = table(runs, differences(runs), 1000)
    assert lines[1].endswith("0:00"), "the default is left out"
    assert lines[2].endswith("optim.momentum=0.8  new.field=1")


def test_settings_that_a_run_may_choose_come_last_and_steps_hide_epochs() -> None:
    both = {
        "optim.lr": 0.017,
        "train.epochs": 27.0,
        "data.mean": [0.5],
        "model.weights": "a",
        "train.steps": 0,
    }
    runs = [
        RunSummary("a", "finished", settings=both),
        RunSummary("b", "finished", settings=both | {"train.steps": 9}),
    ]
    varied = [dict(run.settings or {}) for run in runs]
    _, one, two = table(runs, varied, 1 << 16)
    assert one.endswith("  model.weights=a  optim.lr=0.017  train.epochs=27  data.mean=0.5")
    assert two.endswith("  model.weights=a  train.steps=9  optim.lr=0.017  data.mean=0.5"), "steps decide"


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_settings_are_wrapped_at_the_width_of_the_terminal(width: int) -> None:
    settings = {f"data.{name}": 0.25 for name in ("erasing", "holdout", "mixup", "cutmix")}
    lines = table([RunSummary("runs/a", "finished", settings=settings)], [settings], width)
    assert " ".join(lines).count("=0.25") == 4
    assert all(len(line) <= width for line in lines)
    assert all(lines)


def test_a_stopped_run_is_listed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *DIGITS, "train.steps=2", "run.name=a"]) == 0
    capsys.readouterr()
    assert main(["resume", "runs/a", "train.steps=4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (Path(result["run"]).resolve(), result["step"]) == (tmp_path / "runs/a", 4)
    assert main(["runs"]) == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["path"], found["state"], found["step"]) == ("runs/a", "finished", 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["resume"], "resume needs a run"),
        (["resume", "train.steps=4"], "resume needs a run"),
        (["resume", "nowhere"], "nowhere does not exist"),
        (["resume", "empty"], "empty is not a run folder"),
        (["resume", "a", "run.name=b"], "run.name=b: resume continues the run in its own folder"),
        (["resume", "a", "--checkpoint.resume", "never"], "--checkpoint.resume: resume continues"),
        (["resume", "a/weights"], "a/weights is a part of a run"),
        (["runs", "nowhere"], "there is no folder nowhere"),
        (["runs", "empty"], "empty has no runs"),
        (["continue", "a"], "did you mean `drumline resume`?"),
    ],
)
def test_wrong_commands_are_explained(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    (run_folder(Path("a")) / "weights").mkdir()
    assert main(argv) == 2
    assert message in capsys.readouterr().err

"""Trackers get what a run logs, in processes of their own, and cost a run nothing whatever they do."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import psutil
import pytest

import drumline
from drumline.cli import train
from drumline.config.recipe import TRACKERS as NAMES
from drumline.core import lock
from drumline.core.errors import UserError
from drumline.observe import tracker_process as module
from drumline.observe import trackers
from drumline.observe.run_log import RunLog
from drumline.observe.tracker_process import TrackerError, describe
from drumline.observe.trackers import RUN_ID, TRACKERS, RunFacts, check_installed

RECIPE = {"optim": {"lr": 0.1, "milestones": (30, 60)}, "data": {"path": ""}}
FAKE = """
import json, os, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent
MODE = (HERE / "mode").read_text()


def record(**what):
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\\n")


def do(what):
    if MODE == f"fail in {what}":
        raise ValueError(f"cannot {what} https://me:password@example.org\\nsecond line")
    if MODE == f"hang in {what}":
        child = subprocess.Popen(["sleep", "600"])
        record(pids=[os.getpid(), child.pid])
        time.sleep(600)


class Run:
    def log(self, numbers, step):
        do("log")
        record(call="log", numbers=numbers, step=step)

    def finish(self):
        do("finish")
        record(call="finish")


def init(project, name, **options):
    print("noise on stdout", flush=True)
    print("noise on stderr", file=sys.stderr, flush=True)
    os.write(1, b"noise on 1")
    do("init")
    ours = sorted(name for name in os.environ if name.startswith("DRUMLINE_"))
    record(call="init", project=project, name=name, options=options, asked=sys.stdin.read(), ours=ours)
    return Run()
"""


class Fake:
    """A package `trackio` that records its calls, fails or hangs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "trackio.py").write_text(FAKE)
        self.mode("record")

    def mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def calls(self) -> list[dict[str, Any]]:
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, key: str) -> Any:
        return _wait(lambda: next((call[key] for call in self.calls() if key in call), None))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a tracker may take long to start."""
    monkeypatch.setattr(module, "SILENT_S", 120)
    monkeypatch.setattr(module, "FINISH_S", 120)


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    folder = tmp_path_factory.mktemp("fake")
    monkeypatch.syspath_prepend(folder)
    yield Fake(folder)
    for call in Fake(folder).calls():
        for pid in call.get("pids", ()):
            _wait(lambda pid=pid: not _alive(pid))  # left behind otherwise


def _log(folder: Path, shown: list[str], names: tuple[str, ...] = ("trackio",)) -> RunLog:
    return RunLog(folder, shown.append, names, RunFacts("photos", str(folder), RECIPE))


def test_the_recipe_knows_the_names_of_all_trackers() -> None:
    assert tuple(TRACKERS) == NAMES


def test_a_tracker_gets_the_recipe_the_numbers_with_their_step_and_how_the_run_ended(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRUMLINE_SECRET", "secret")
    shown: list[str] = []
    with _log(tmp_path, shown, ("tensorboard", "trackio")).begin() as run_log:
        run_log.metric("train", step=7, epoch=0.5, loss=2.5, name="a", shares=[0.5, 0.5], done=True)
        run_log.metric("eval", step=9, loss=math.nan)
        run_log.ended("finished", {"best/top1": 0.5})
    opened, first, second, best, end = fake.calls()
    known = (tmp_path / RUN_ID).read_text().strip()
    assert (opened["project"], opened["name"]) == ("drumline", f"photos-{known[:6]}")
    assert opened["options"]["config"] == json.loads(json.dumps(RECIPE))
    assert opened["ours"] == [], "the secret and the place in the run stay here"
    assert opened["asked"] == "", "it must not wait for an answer"
    assert (first["step"], first["numbers"]) == (7, {"train/loss": 2.5})
    assert (second["step"], math.isnan(second["numbers"]["eval/loss"])) == (9, True)
    assert (best["step"], best["numbers"]) == (9, {"best/top1": 0.5})
    assert end == {"call": "finish"}
    assert list(tmp_path.glob("events.out.tfevents.*")), "beside TensorBoard"
    (line,) = shown
    assert line in (tmp_path / "log.txt").read_text()
    assert line == f"trackio: run photos-{known[:6]}; to see it: trackio show --project drumline"
    assert capfd.readouterr() == ("", ""), "its noise would break the display and the JSON line"


def test_a_resumed_run_continues_the_run_of_its_tracker_and_a_different_one_does_not(
    fake: Fake, tmp_path: Path
) -> None:
    for folder, step in (("a", 1), ("a", 2), ("b", 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        with _log(tmp_path / folder, []).begin() as run_log:
            run_log.metric("train", step=step, loss=1.0)
    first, resumed, other = (call for call in fake.calls() if call["call"] == "init")
    assert first["name"] == resumed["name"] != other["name"]
    assert resumed["options"]["resume"] == "allow"


def test_a_run_that_was_killed_at_its_end_is_ended_when_it_is_resumed(fake: Fake, tmp_path: Path) -> None:
    with _log(tmp_path, []).begin() as run_log:
        run_log.metric("train", step=1, loss=1.0)
    before = len(fake.calls())
    with _log(tmp_path, []).begin(1) as run_log:
        run_log.ended("finished", {"best/top1": 0.5})
    assert [call["call"] for call in fake.calls()[before:]] == ["init", "log", "finish"]


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_reported_once_and_is_off(fake: Fake, tmp_path: Path, where: str) -> None:
    fake.mode(f"fail in {where}")
    shown: list[str] = []
    with _log(tmp_path, shown).begin() as run_log:
        for step in range(20):
            run_log.metric("train", step=step, loss=1.0)
            if where != "finish":
                time.sleep(0.02)
        run_log.flush()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20
    (warning,) = (text for text in shown if text.startswith("WARNING"))
    assert warning == (
        f"WARNING: trackio is off: ValueError: cannot {where} https://example.org second line; "
        "metrics.jsonl has all metrics"
    ), "on one line, without the password"
    assert warning in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_hangs_holds_up_nothing_and_is_killed_with_what_it_has_started(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    fake.mode(f"hang in {where}")
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    monkeypatch.setattr(module, "FINISH_S", 0.6)
    shown: list[str] = []
    with _log(tmp_path, shown).begin() as run_log:
        run_log.metric("train", step=0, loss=1.0)
        if where != "finish":
            fake.wait_for("pids")
        began = time.perf_counter()
        for step in range(1, 200):
            run_log.metric("train", step=step, loss=1.0)
        run_log.flush()
        assert time.perf_counter() - began < 5, "it hangs for 600 s"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200
        if where == "finish":  # on a busy machine, it must not be killed before it gets there
            _wait(lambda: len(fake.calls()) > 200)
            monkeypatch.setattr(module, "FINISH_S", 5)
    assert shown[-2:] == [
        f"waiting for trackio to finish, for at most {module.FINISH_S:g} s",
        f"WARNING: trackio is off: did not finish within {module.FINISH_S:g} s; metrics.jsonl has all metrics",
    ]
    _wait(lambda: not any(_alive(pid) for pid in fake.wait_for("pids")))


def test_a_tracker_that_takes_nothing_misses_entries_and_memory_stays_bounded(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES", 1000)
    tracker = module.TrackerProcess("trackio", lambda text: None)
    tracker.open(RunFacts("photos", str(tmp_path), RECIPE))
    fake.wait_for("call")
    os.kill(tracker._process.pid, signal.SIGSTOP)
    for step in range(3000):  # more than the pipe holds
        tracker.write(1.0, step, {"train/loss": 1.0})
    assert len(tracker._waiting) < 1200
    os.kill(tracker._process.pid, signal.SIGCONT)
    with pytest.raises(TrackerError, match=rf"fell behind and missed {tracker._missed:,} entries"):
        tracker.finish("finished", {})
    steps = [call["step"] for call in fake.calls() if call["call"] == "log"]
    assert steps == list(range(3000 - tracker._missed)), "whole lines, in order"


def test_a_run_that_is_killed_is_recorded_as_failed_and_leaves_no_process(fake: Fake, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from drumline.observe.run_log import RunLog\n"
        f"sys.path.insert(0, {str(fake.folder)!r})\n"
        f"log = RunLog(Path({str(tmp_path)!r}), trackers=('trackio',)).begin()\n"
        "log.metric('train', step=1, loss=1.0); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", program])
    assert _wait(lambda: [call for call in fake.calls() if call["call"] == "log"])
    (tracker,) = psutil.Process(run.pid).children()
    run.kill()
    run.wait()
    assert _wait(lambda: fake.calls()[-1]["call"] == "finish")
    assert _wait(lambda: not _alive(tracker.pid))


def test_a_run_that_another_process_has_taken_over_is_left_to_it(fake: Fake, tmp_path: Path) -> None:
    held = lock.acquire(tmp_path)
    run_log = _log(tmp_path, []).begin()
    run_log.metric("train", step=1, loss=1.0)
    _wait(lambda: len(fake.calls()) == 2)
    (tmp_path / lock.FILE).write_text("{}")
    run_log.metric("train", step=2, loss=1.0)
    with pytest.raises(lock.Superseded):
        run_log.close()
    held.close()
    time.sleep(0.3)
    assert [call["call"] for call in fake.calls()] == ["init", "log"], "neither numbers nor an end"


def test_none_leaves_only_the_files_of_the_run(tmp_path: Path) -> None:
    with _log(tmp_path, [], ("none",)).begin() as run_log:
        run_log.metric("train", step=1, loss=1.0)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "fingerprints.txt",
        "log.txt",
        "metrics.jsonl",
    ]


def test_a_tracker_that_is_not_installed_ends_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # W&B's own default folder in a working directory: not the package
    monkeypatch.setattr(trackers, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    with pytest.raises(
        UserError, match=r"run\.trackers = tensorboard,wandb: wandb cannot be imported"
    ) as caught:
        check_installed(["tensorboard", "wandb"])
    assert caught.value.fix == "pip install wandb, or remove it from run.trackers"
    check_installed(["tensorboard"])
    check_installed(["none"])
    arguments = ["data.source=digits", "model.name=resnet8", "run.trackers=wandb", f"run.dir={tmp_path}"]
    with pytest.raises(UserError, match="wandb cannot be imported"):
        train.main([*arguments, "--dry-run"])
    with pytest.raises(UserError, match="wandb cannot be imported"):
        drumline.train(drumline.Recipe.from_args(arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"], "no run folder"


@pytest.mark.parametrize("wrong", ["wnadb", "none,wandb", "wandb,wandb"])
def test_an_unknown_tracker_is_an_error(wrong: str) -> None:
    with pytest.raises(UserError, match=r"run\.trackers"):
        drumline.Recipe.from_args([f"run.trackers={wrong}"])


def test_an_error_is_one_short_line() -> None:
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert len(describe(ValueError("x" * 10_000))) == 600


@pytest.mark.slow
def test_a_run_reports_its_recipe_its_metrics_and_its_best_score(fake: Fake, tmp_path: Path) -> None:
    settings = [
        "data.source=digits",
        "model.name=resnet8",
        "train.steps=29",
        "data.batch=48",
        "optim.lr=0.05",
    ]
    out = [f"run.dir={tmp_path}", "run.name=tracked", "run.trackers=trackio", "parallel.threads=1"]
    result = drumline.train(drumline.Recipe.from_args([*settings, *out]))
    opened, *logged, end = fake.calls()
    assert opened["name"].startswith("tracked-")
    assert opened["options"]["config"]["optim"]["lr"] == 0.05
    lines = [json.loads(line) for line in (tmp_path / "tracked" / "metrics.jsonl").read_text().splitlines()]
    assert [call["step"] for call in logged[:-1]] == [line["step"] for line in lines]
    assert {name.partition("/")[0] for call in logged for name in call["numbers"]} == {
        "train",
        "eval",
        "times",
        "best",
    }
    assert logged[-1]["numbers"] == {"best/top1": result["best_top1"], "best/epoch": 1.0}
    assert end == {"call": "finish"}


def _real_run(folder: Path, name: str) -> list[str]:
    """A run that is resumed, with a library itself."""
    shown: list[str] = []
    for step, keep in ((1, None), (2, 1)):
        with _log(folder, shown, (name,)).begin(keep) as run_log:
            run_log.metric("train", step=step, loss=1 / step)
            run_log.ended("stopped" if step == 1 else "finished", {"best/top1": 0.5})
    assert not [text for text in shown if text.startswith("WARNING")]
    return shown


def test_wandb_offline_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    shown = _real_run(tmp_path, "wandb")
    found = []
    for file, line in zip(sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")), shown, strict=True):
        assert str(file.parent) in line
        for content in _leveldb_records(file.read_bytes()):
            found.append(Record())
            found[-1].ParseFromString(content)
    numbers = {
        each.history.step.num: {
            "/".join(item.nested_key) or item.key: item.value_json for item in each.history.item
        }
        for each in found
        if each.HasField("history")
    }
    assert {step: float(values["train/loss"]) for step, values in numbers.items()} == {1: 1.0, 2: 0.5}
    (known,) = {each.run.run_id for each in found if each.HasField("run")}
    assert known == (tmp_path / RUN_ID).read_text().strip()
    assert [each.exit.exit_code for each in found if each.HasField("exit")] == [255, 0]
    configs = [
        {one.key: one.value_json for one in each.run.config.update} for each in found if each.HasField("run")
    ]
    assert json.loads(configs[0]["optim"]) == {"lr": 0.1, "milestones": [30, 60]}
    assert not any(each.HasField("environment") and each.environment.args for each in found)


def test_mlflow_with_a_file_store_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    _real_run(tmp_path, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("drumline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("photos", "FINISHED")
    assert run.data.params == {"optim.lr": "0.1", "optim.milestones": "[30, 60]", "data.path": ""}
    assert run.data.metrics["best/top1"] == 0.5
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 0.5)]


def test_trackio_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    _real_run(tmp_path, "trackio")
    code = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage\n"
        "run = trackio.Api().runs('drumline')[0]; rows = SQLiteStorage.get_logs('drumline', run.name)\n"
        "print(json.dumps([run.name, run.config, rows], default=str))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, config, history = json.loads(done.stdout.splitlines()[-1])
    assert name == f"photos-{(tmp_path / RUN_ID).read_text()[:6]}"
    assert config["optim"] == {"lr": 0.1, "milestones": [30, 60]}
    assert [row["train/loss"] for row in history if "train/loss" in row] == [1.0, 0.5]
    assert [row["step"] for row in history if "train/loss" in row] == [1, 2]


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which has the log format of LevelDB: blocks of 32 KiB, parts with 7 bytes each of
    checksum, length and kind (whole, first, middle, last)."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait(condition: Any, seconds: float = 30.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)
    return found

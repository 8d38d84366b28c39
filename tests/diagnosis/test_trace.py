"""A run as a trace: valid by Chrome's trace event format, nested, in order, aligned between ranks, and complete."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from drumline.diagnosis.trace import FEED, RUN, STEPS, Records, read_records, trace_events, trace_json
from tests.runs.command import drumline, result

Event = dict[str, Any]
FIELDS = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {
        "name": str,
        "cat": str,
        "pid": int,
        "tid": int,
        "args": dict,
        "ts": (int, float),
        "dur": (int, float),
    },
    "C": {"name": str, "pid": int, "tid": int, "ts": (int, float), "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": (int, float), "s": str, "args": dict},
}
"""What the format demands of each kind of event that a trace has."""


def check(events: list[Event]) -> None:
    """Against the format: fields, order, and nesting."""
    for event in events:
        fields = FIELDS[event["ph"]]
        assert event.keys() == fields.keys() | {"ph"}, event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] != "i" or event["s"] in "gpt"
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert tracks.keys() <= named
    for slices in tracks.values():
        open_until: list[float] = []
        last = 0.0
        for event in slices:
            assert event["ts"] >= last, "in the order of time"
            last, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 0.2:  # tenths of microseconds are rounded
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.2, f"not inside the slice around it: {event}"
            open_until.append(end)


def slices(events: list[Event], pid: int, tid: int) -> list[Event]:
    return [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) == (pid, tid)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    drumline(
        *("train", "data.source=digits", "data.batch=48", "model.name=resnet8", "train.epochs=2"),
        *("parallel.processes=2", "parallel.threads=1", "run.name=a"),
        folder=folder,
    )
    return folder / "runs" / "a"


@pytest.mark.slow
def test_the_command_writes_a_valid_trace_with_all_tracks_of_all_ranks(run: Path) -> None:
    done = drumline("why", str(run), "--trace", "out.json", folder=run.parent)
    assert result(done)["trace"] == "out.json"
    document = json.loads((run.parent / "out.json").read_text())
    events = document["traceEvents"]
    check(events)
    for rank in (0, 1):
        assert len(slices(events, rank, RUN)) >= 3
        assert len(slices(events, rank, STEPS)) > 100
        assert slices(events, rank, FEED)
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert {"images/s", "loss", "learning rate", "cores", "memory (MB)", "host (ms of a step)"} <= names
    instants = " ".join(event["name"] for event in events if event["ph"] == "i")
    assert "best: top1 0." in instants
    assert "saved checkpoint" in instants
    assert "finished" in instants


@pytest.mark.slow
def test_the_steps_of_a_window_are_the_same_on_all_ranks_and_at_the_same_time(run: Path) -> None:
    events = trace_events(read_records(run))
    steps = [
        {each["name"]: each for each in slices(events, rank, STEPS) if each["name"].startswith("step ")}
        for rank in (0, 1)
    ]
    assert len(steps[0]) == 40, "20 in each of two epochs"
    assert steps[0].keys() == steps[1].keys()
    for name, one in steps[0].items():
        # A step ends with an exchange, so both ranks end it at nearly the same time.
        other = steps[1][name]
        assert abs(one["ts"] + one["dur"] - other["ts"] - other["dur"]) < 0.5e6
    parts = {each["name"] for each in slices(events, 0, STEPS)}
    assert {"data", "forward", "backward", "exchange", "optimizer", "log"} <= parts


@pytest.mark.slow
def test_a_damaged_record_is_an_error_with_a_fix(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "trace.jsonl").write_text('{"kind":"window","step":5}\n')
    done = drumline("why", "copy", "--trace", "out.json", folder=tmp_path)
    assert done.returncode == 2
    assert "has a record that cannot be read" in done.stderr
    assert "fix: remove" in done.stderr
    assert not (tmp_path / "out.json").exists()


def times(at: float, **more: Any) -> dict[str, Any]:
    given = {"time": at, "kind": "times", "step": 10, "epoch": 1.0, "steps": 10, "images_per_s": 1.0}
    return {**given, "step_ms": [100.0, 90.0], **more}


def test_an_interval_has_its_save_its_steps_and_its_evaluation() -> None:
    line = times(1000.0, host_evaluation_ms=[20.0, 30.0], host_checkpoint_ms=[10.0, 0.0])
    events = trace_events(Records("r", [line]))
    check(events)
    found = [(each["name"], each["ts"], each["dur"]) for each in slices(events, 0, RUN)]
    assert found == [
        ("saving", 0.0, 0.1e6),
        ("steps 1 to 10", 0.1e6, 1e6),
        ("evaluation", 1.1e6, 0.2e6),
    ]


def test_intervals_that_seem_to_overlap_do_not() -> None:
    """A line in the middle of an epoch is written a little after its interval."""
    lines = [times(1000.0), times(1000.5, step=20), times(1000.4, step=30)]
    check(trace_events(Records("r", lines)))


def test_a_part_that_lasts_over_the_end_of_a_step_lies_in_both() -> None:
    window = {
        "kind": "window",
        "step": 3,
        "rank": 0,
        "time": 5.0,
        "end_us": 400,
        "steps": [[0, 1], [100, 2], [300, 3]],
        "tracks": {"host": [[0, "data"], [50, "log"], [150, "forward"]], "feed": [[20, "make"]]},
    }
    events = trace_events(Records("r", [], [window]))
    check(events)
    found = [(each["name"], each["ts"], each["dur"]) for each in slices(events, 0, STEPS)]
    assert found == [
        ("step 2", 0.0, 100.0),
        ("data", 0.0, 50.0),
        ("log", 50.0, 50.0),
        ("step 3", 100.0, 200.0),
        ("log", 100.0, 50.0),
        ("forward", 150.0, 150.0),
    ]
    assert [(each["ts"], each["dur"]) for each in slices(events, 0, FEED)] == [(20.0, 380.0)]


def test_on_a_gpu_the_device_has_its_own_track() -> None:
    line = times(
        1000.0,
        gpu="H200",
        data_ms=[20.0, 0.0],
        copy_ms=[5.0, 0.0],
        compute_ms=[70.0, 90.0],
        late_ms=[10.0, 0.0],
    )
    events = trace_events(Records("r", [line]))
    check(events)
    found = [each["name"] for each in slices(events, 0, 4)]
    assert found[0] == "computing, 70 %, in 10 steps"
    assert found[1:] == [
        "copying, 5.0 %, in 10 steps",
        "waiting for data, 15 %, in 10 steps",
        "waiting for the host, 10 %, in 10 steps",
    ]


def test_a_log_from_another_time_zone_is_shifted() -> None:
    scored = {"time": 10_000.0, "kind": "eval", "step": 5, "epoch": 1.0, "top1": 0.5, "best_metric": "top1"}
    log = [
        (2_790.0, "started: drumline train"),
        (2_800.0, "epoch 1: loss 1"),
        (2_801.0, "saved checkpoint step-5"),
    ]
    events = trace_events(Records("r", [scored], log=log))
    check(events)
    at = {each["name"]: each["ts"] for each in events if each["ph"] == "i"}
    assert at["evaluation: top1 0.5"] - at["started: drumline train"] == 10e6


def test_a_run_without_records_has_an_empty_trace() -> None:
    assert json.loads(trace_json(Records("r", []))) == {
        "traceEvents": [],
        "displayTimeUnit": "ms",
        "otherData": {"run": "r"},
    }


def test_values_that_are_not_numbers_become_no_counter() -> None:
    lines = [times(1000.0, memory_mb=[None, 5.0], own_cores=[float("nan"), 1.0])]
    lines += [{"time": 1000.0, "kind": "train", "step": 1, "epoch": 0.1, "loss": None, "lr": 0.1}]
    events = trace_events(Records("r", lines))
    check(events)
    json.loads(trace_json(Records("r", lines)), parse_constant=lambda name: pytest.fail(name))

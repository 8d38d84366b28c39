"""What a run records for its page, and what a failure of that costs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.parallel.world import single_process
from drumline.report.page import PAGE
from drumline.report.read import read_run
from drumline.report.record import BATCH, FACTS, FOLDER, MISTAKES, read_evaluation, read_sheet
from drumline.training.page import RunPage
from tests.runs import command
from tests.runs.command import drumline, metrics, train

pytestmark = pytest.mark.slow
SHORT = (*command.TINY, "train.epochs=1", "run.strict=true", "run.shards=2", "data.mixup=0.3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the run `one` of one process and the run `two` of two."""
    made = tmp_path_factory.mktemp("runs")
    train(made, "one", recipe=SHORT)
    train(made, "two", "parallel.processes=2", recipe=SHORT)
    return made


@pytest.mark.parametrize(("name", "shown"), [("one", "1 process"), ("two", "2 processes")])
def test_a_run_leaves_its_page_and_the_predictions_of_its_best_evaluation(
    folder: Path, name: str, shown: str
) -> None:
    run = folder / "runs" / name
    text = (run / PAGE).read_text()
    assert "✓ finished" in text
    assert shown in text
    (score,) = metrics(folder, name, "eval")
    found = read_evaluation(run)
    assert found is not None
    assert found.step == score["step"]
    assert int((found.labels == found.predictions).sum()) == score["correct"]
    assert len(found.labels) == score["samples"]
    mistakes, batch = (read_sheet(run / FOLDER / each) for each in (MISTAKES, BATCH))
    assert mistakes is not None
    assert batch is not None
    wrong = found.labels != found.predictions
    assert mistakes.tiles[0].probability == pytest.approx(found.probabilities[wrong].max() / 2**24)
    assert len(batch.tiles) == 24
    assert any("%" in tile.label for tile in batch.tiles)  # 70% 3, 30% 8
    assert json.loads((run / FOLDER / FACTS).read_text())["train_samples"] == 1438


def test_the_predictions_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    alone, pair = (read_evaluation(folder / "runs" / name) for name in ("one", "two"))
    assert alone is not None
    assert pair is not None
    assert np.array_equal(alone.predictions, pair.predictions)
    assert np.array_equal(alone.probabilities, pair.probabilities)


def test_a_resumed_run_has_the_whole_story(folder: Path) -> None:
    train(folder, "again", recipe=SHORT)
    train(folder, "again", "train.epochs=2", "checkpoint.resume=auto", recipe=SHORT)
    run = read_run(folder / "runs" / "again")
    assert [event.kind for event in run.events] == ["started", "finished", "started", "resumed", "finished"]
    assert run.report is not None
    assert len(run.evals) == 2


def test_a_report_that_fails_is_one_warning(folder: Path) -> None:
    """A file in the place of its folder."""
    train(folder, "lost", "train.steps=8", recipe=SHORT)
    run = folder / "runs" / "lost"
    for file in (run / FOLDER).iterdir():
        file.unlink()
    (run / FOLDER).rmdir()
    (run / FOLDER).write_text("in the way")
    done = drumline("train", *SHORT, "run.name=lost", "checkpoint.resume=auto", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING: the report of this run is not written") == 1
    assert (run / "log.txt").read_text().count("WARNING: the report of this run is not written") == 1
    assert json.loads(done.stdout.splitlines()[-1])["finished"] is True


OWN_LOSS = """
from torch.nn.functional import cross_entropy

calls = 0

def loss(logits, labels):
    global calls
    calls += 1
    if calls > 25:
        raise ValueError("boom")
    return cross_entropy(logits, labels, reduction="none")
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_the_page_of_a_failed_run_says_so(folder: Path, processes: int) -> None:
    (folder / "own.py").write_text(OWN_LOSS)
    more = ("train.loss=own:loss", "train.log_every=5", "data.mixup=0", f"parallel.processes={processes}")
    done = drumline("train", *SHORT, f"run.name=failed-{processes}", *more, folder=folder)
    assert done.returncode != 0
    text = (folder / "runs" / f"failed-{processes}" / PAGE).read_text()
    assert "✗ failed" in text
    assert "boom" in text


class Counting(RunPage):
    """Counts its pages instead of writing them. Each takes 20 ms."""

    def _write(self) -> None:
        self.facts["pages"] += 1
        time.sleep(0.02)


def test_pages_take_at_most_a_hundredth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.training.page.EXPECTED_S", 0.0001)
    sets: Any = None
    page = Counting(
        tmp_path, sets, single_process(torch.device("cpu")), 0, None, print, lambda: True, {"pages": 0}
    )
    seen: Any = None
    for step in range(20):
        page.evaluated(step, seen, best=False)
        time.sleep(0.02)
    assert page.facts["pages"] == 1  # the next one would be due after 2 s
    page.close(print)
    assert page.facts["pages"] == 2


def test_a_page_that_fails_in_the_background_is_reported_by_the_loop_and_not_into_a_closed_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a run is closed before its page."""
    monkeypatch.setattr("drumline.training.page.EXPECTED_S", 0.0001)
    crashed: list[object] = []
    monkeypatch.setattr("threading.excepthook", crashed.append)
    said: list[str] = []
    open_log = True

    def log(text: str) -> None:
        assert open_log
        said.append(text)

    (tmp_path / FOLDER).write_text("in the way")
    sets: Any = None
    page = RunPage(tmp_path, sets, single_process(torch.device("cpu")), 0, None, log, lambda: True, {})
    seen: Any = None
    page.evaluated(1, seen, best=False)
    open_log = False
    time.sleep(0.2)
    assert not said
    late: list[str] = []
    page.close(late.append)
    assert not crashed
    assert len(late) == 1
    assert "WARNING: the report of this run is not written" in late[0]


def test_a_distilled_run_records_what_its_teacher_predicts(folder: Path) -> None:
    more = ("distill.teacher_weights=runs/one", "run.name=taught", "train.steps=8", "parallel.processes=2")
    done = drumline("distill", *command.TINY, *more, "train.epochs=1", folder=folder)
    assert done.returncode == 0, done.stderr
    score = metrics(folder, "taught", "eval")[-1]
    found = read_evaluation(folder / "runs" / "taught")
    teacher = read_evaluation(folder / "runs" / "one")
    assert found is not None
    assert teacher is not None
    assert found.teacher is not None
    assert found.teacher.min() >= 0
    assert score["agreement"] == pytest.approx(np.mean(found.predictions == found.teacher))
    assert "The student predicts the teacher" in (folder / "runs" / "taught" / PAGE).read_text()
    assert np.mean(found.teacher == teacher.predictions) > 0.98

"""A page has everything that a run recorded, is valid, loads nothing, and shows text from outside as text."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from drumline.report.page import page, read_runs, write_page
from drumline.report.record import EVALUATION, FACTS, FOLDER, MISTAKES, read_evaluation, read_sheet
from tests.report.run_folder import make_run

VOID = {"meta", "link", "br", "img"}


class Document(HTMLParser):
    """Checks that every element is closed, and collects what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.urls: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "srcset", "data", "poster"):
                self.urls.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert tag not in VOID
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def document(*runs: Path) -> tuple[str, Document]:
    text = page(read_runs(runs))
    return text, Document(text)


def test_the_page_of_a_run_has_every_section_and_loads_nothing(tmp_path: Path) -> None:
    text, found = document(make_run(tmp_path / "a", teacher=True))
    sections = [
        "learning",
        "speed",
        "confusions",
        "mistakes",
        "classes",
        "confidence",
        "teacher",
        "images",
        "proof",
        "recipe",
    ]
    assert [each for each in found.ids if each in sections] == sections
    assert len(found.ids) == len(set(found.ids))
    assert all(url.startswith(("#", "data:image/")) for url in found.urls)
    assert "url(http" not in text
    assert "import" not in text.partition("<style>")[2].partition("</style>")[0]
    assert len(text) < 300_000
    assert "resnet8 (78 k parameters) learned 3 classes of photos from 600 images" in found.text
    assert "it is right on 50.0% of 300 images" in found.text
    assert "★ best: epoch 5" in found.text
    assert "drumline train data.path=photos" in found.text
    assert "abcdef" in found.text


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "</style><b>",
        "\x1b[31m",
        "\udcff",
        "\u202eabc",
        "&amp;",
    ],
)
def test_names_from_outside_stay_text(tmp_path: Path, evil: str) -> None:
    lines = (
        f"2026-01-02 10:00:00  started: {evil}".encode("utf-8", "replace").decode(),
        "2026-01-02 10:00:01  WARNING: x",
    )
    run = make_run(
        tmp_path / "a", (evil, "dog", "newt"), log=lines, recipe={"model.name": '"<b>"'}, teacher=True
    )
    text, found = document(run)
    honest, _ = document(make_run(tmp_path / "b", ("cat", "dog", "newt"), log=lines, teacher=True))
    assert found.tags.count("script") == 1
    assert found.tags.count("img") == honest.count("<img")
    assert found.tags.count("b") == honest.count("<b>") + honest.count("<b ")
    assert not any(sign in text for sign in "\x1b\udcff\u202e")
    assert "<b>" in found.text


def test_every_missing_file_costs_its_part_alone(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole")
    names = [str(file.relative_to(whole)) for file in sorted(whole.rglob("*")) if file.is_file()]
    for number, name in enumerate(names):
        for content in (None, b'{"kind": "times", "step_ms": 3}\n[1]\n{"kind": "eval"}\n\xff\x00{'):
            run = tmp_path / f"{number}"
            shutil.copytree(whole, run)
            if content is None:
                (run / name).unlink()
            else:
                (run / name).write_bytes(content)
            _, found = document(run)
            assert "speed" in found.ids
            shutil.rmtree(run)


def test_a_recorded_evaluation_that_the_log_does_not_have_is_not_shown(tmp_path: Path) -> None:
    """After a resume from an earlier step."""
    run = make_run(tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:6]) + "\n")
    _, found = document(run)
    assert "confusions" not in found.ids
    assert "mistakes" not in found.ids


def test_the_predictions_of_a_step_that_was_trained_again_and_is_not_the_best_are_not_shown(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "a")
    assert "confusions" in document(run)[1].ids
    lines = (run / "metrics.jsonl").read_text().splitlines()
    again = [
        line.replace('"best": true', '"best": false') if '"step": 50' in line else line for line in lines
    ]
    (run / "metrics.jsonl").write_text("\n".join(again) + "\n")
    assert "confusions" not in document(run)[1].ids


def test_odd_facts_cost_the_summary_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / FOLDER / FACTS).write_text('{"parameters": [], "train_samples": "many", "epochs": {}}')
    _, found = document(run)
    assert {"summary", "confusions", "recipe"} <= {*found.ids}


def test_of_many_classes_the_most_confused_ones_are_shown(tmp_path: Path) -> None:
    names = tuple(f"class {number}" for number in range(100))
    text, found = document(make_run(tmp_path / "a", names))
    assert "Confusion matrix of the 20 classes that are confused most" in found.text
    assert "All 100 classes" in found.text
    assert "top-5" in found.text
    assert len(text) < 300_000


def test_the_page_does_not_grow_with_very_many_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", tuple(f"kind {n}" for n in range(100)))
    assert "All 100 classes" in document(run)[1].text
    monkeypatch.setattr("drumline.report.quality.FOLDED", 30)
    text, found = document(run)
    assert "The 30 worst classes" in found.text
    assert text.count('class="meter"') == 24 + 30


def test_interruptions_are_counted(tmp_path: Path) -> None:
    log = (
        "2026-01-02 10:00:00  started: a",
        "2026-01-02 10:00:05  epoch 1: loss 2",
        "2026-01-02 10:01:00  started: b",
        "2026-01-02 10:01:01  WARNING: 1 sample is broken",
        "2026-01-02 10:01:05  stopped: SIGTERM after step 20",
        "2026-01-02 10:02:00  started: c",
        "2026-01-02 10:02:30  finished: top-1 50%",
    )
    _, found = document(make_run(tmp_path / "a", log=log))
    assert "3 starts: 1 kill, 1 stop, 1 warning." in found.text


def test_runs_side_by_side_show_what_differs(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, seed=number, recipe={"optim.lr": f"0.{number + 1}"})
        for number, name in enumerate("abc")
    ]
    text, found = document(*runs)
    assert [each for each in found.ids if each in ("results", "learning", "settings", "classes")] == [
        "results",
        "learning",
        "settings",
        "classes",
    ]
    assert "optim.lr" in found.text
    assert "model.name" not in found.text
    assert "52.00% ★" in found.text
    assert text.count('class="line c3"') >= 5


def test_the_same_run_gives_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.report.page.now", lambda: "now")
    run = make_run(tmp_path / "a")
    first = write_page(run).read_bytes()
    assert write_page(run).read_bytes() == first


def test_a_copied_folder_is_enough_and_torch_is_not_imported(tmp_path: Path) -> None:
    make_run(tmp_path / "a").rename(tmp_path / "b")
    script = "import sys; from drumline.cli import main; main(['report', 'b']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "b" / "report.html").stat().st_size > 50_000


def test_damaged_records_count_as_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    readers = {
        EVALUATION: lambda: read_evaluation(run),
        MISTAKES: lambda: read_sheet(run / FOLDER / MISTAKES),
    }
    for name, read in readers.items():
        file = run / FOLDER / name
        content = file.read_bytes()
        assert read() is not None
        for cut in range(0, len(content), max(1, len(content) // 40)):
            file.write_bytes(content[:cut])
            assert read() is None
    file.write_bytes(content.replace(b"image/png", b"image/svg+xml"))
    assert read_sheet(file) is None
    file.write_bytes(content.replace(b'"width": 16', b'"width": 1e9'))
    assert read_sheet(file) is None


@pytest.mark.parametrize(
    "column",
    [
        {"labels": np.array([0, 2_000_000_000], np.int32)},
        {"predictions": np.array([0, 2_000_000_000], np.int32)},
        {"probabilities": np.array([0, 2**30], np.int32)},
        {"probabilities": np.array([-5, 0], np.int32)},
        {"step": np.arange(2)},
        {"other": np.arange(2)},
    ],
    ids=str,
)
def test_numbers_that_no_evaluation_has_count_as_missing(
    tmp_path: Path, column: dict[str, np.ndarray]
) -> None:
    """A class of two thousand million would take all memory."""
    run = make_run(tmp_path / "a")
    sound = {"step": np.array(50), **dict.fromkeys(("labels", "predictions", "probabilities"), np.arange(2))}
    for columns, readable in ((sound, True), (sound | column, False)):
        np.savez(run / FOLDER / EVALUATION, **columns)  # type: ignore[arg-type]
        assert (read_evaluation(run) is not None) is readable


def test_an_array_that_claims_to_be_huge_counts_as_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    array = BytesIO()
    np.save(array, np.arange(2))
    claimed = array.getvalue().replace(b"(2,), }" + 15 * b" ", b"(888888888888888,), }".ljust(22))
    assert claimed != array.getvalue()
    with zipfile.ZipFile(run / FOLDER / EVALUATION, "w") as file:
        for name in ("step", "labels", "predictions", "probabilities"):
            file.writestr(f"{name}.npy", claimed)
    assert read_evaluation(run) is None

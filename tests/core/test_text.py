"""Untrusted names cannot control a terminal, however they reach it."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from pathlib import Path

import pytest

from drumline.cli import main
from drumline.core.errors import LostError, UserError
from drumline.core.text import (
    counted,
    duration,
    either,
    loss_text,
    message,
    percent,
    printable,
    rate,
    wrapped,
)
from drumline.launch.failure import FILE, read_failure, record_failure, render_failure
from drumline.observe.display import PlainDisplay
from drumline.observe.text_log import append_entry, say
from tests.data.damage import good_jpeg

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\ud800\r"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\ud800\r"


def test_control_characters_are_written_out_and_our_own_lines_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a\nb\tc") == r"a\nb\tc"
    assert message(f"first {HOSTILE}\n\tsecond") == f"first {SHOWN}\n\tsecond"
    assert printable("naïve 写真 🙂") == "naïve 写真 🙂"


def test_errors_are_printable_as_text_and_keep_what_they_quote_and_travel_whole() -> None:
    for kind, code in ((UserError, 2), (LostError, 1)):
        error = kind(f"{HOSTILE} is wrong", f"rename {HOSTILE}")
        assert str(error) == f"{SHOWN} is wrong\n  fix: rename {SHOWN}"
        assert error.what == f"{HOSTILE} is wrong"
        assert error.exit_code == code
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), back.what, back.fix) == (kind, error.what, error.fix)


@pytest.mark.parametrize(
    ("error", "code"), [(UserError(HOSTILE), 2), (LostError(HOSTILE), 1), (RuntimeError(HOSTILE), 1)], ids=str
)
def test_what_a_worker_leaves_for_its_launcher_is_printable(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    record_failure(error, 0)
    failure = read_failure(tmp_path / "error.json")
    assert failure is not None
    assert failure.exit_code == code
    assert render_failure(failure).replace("\n", "").isprintable()
    assert SHOWN in render_failure(failure)


def test_the_display_the_log_and_the_launcher_show_control_characters_written_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    PlainDisplay(stream).log(f"class {HOSTILE}")
    assert stream.getvalue() == f"class {SHOWN}\n"
    (tmp_path / "log.txt").touch()
    append_entry(tmp_path, f"lost {HOSTILE}\nfix: none")
    assert f"lost {SHOWN}\n    fix: none\n" in (tmp_path / "log.txt").read_text()
    say(HOSTILE)
    assert capfd.readouterr().err == f"{SHOWN}\n"


def test_commands_show_hostile_names_written_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\x1b]0;owned\x07"
    for place in (
        tmp_path / "data/a/1.jpg",
        tmp_path / f"data/{name}/2.jpg",
        tmp_path / f"data/{name}/{name}.jpg",
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(good_jpeg(len(str(place))))
    (tmp_path / f"data/{name}/{name}.jpg").write_bytes(b"")
    assert main(["verify", str(tmp_path / "data"), "--workers", "1"]) == 1
    assert main(["pack", str(tmp_path / "data"), str(tmp_path / f"packed {name}"), "--workers", "1"]) == 0
    os.mkfifo(tmp_path / f"data/{name}/3.jpg")
    for words in (
        ["pack", str(tmp_path / "data"), str(tmp_path / "other")],
        ["eval", str(tmp_path / f"{name}.safetensors")],
        ["verify", str(tmp_path / f"data/{name}/3.jpg")],
        ["train", f"data.path={tmp_path}/{name}", f"model.name={name}"],
        [name],
    ):
        assert main(words) == 2, words
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert r"\x1b[2J" in out
    assert r"\x1b[2J" in err
    assert json.loads(out.splitlines()[-1])


def test_long_lines_break_between_words_and_never_inside_a_command() -> None:
    text = "drumline: this is wrong\n  fix: give another name, or continue with `drumline train x` instead"
    lines = wrapped(text, 40).splitlines()
    assert lines == [
        "drumline: this is wrong",
        "  fix: give another name, or continue",
        "    with `drumline train x` instead",
    ]
    assert wrapped("a" * 50 + " `b c`", 20).splitlines() == ["a" * 50, "  `b c`"]


def test_counts_and_choices_read_like_english() -> None:
    assert (counted(1, "class", "classes"), counted(1200, "step")) == ("1 class", "1,200 steps")
    assert [either(names) for names in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a or b", "a, b or c"]


def test_rates_are_grouped_by_thousands() -> None:
    assert rate(1234.4, "img") == "1,234 img/s"
    assert rate(3.21, "img") == "3.2 img/s"


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0031, "0.3 %"), (0, "0.0 %"), (0.0994, "9.9 %"), (0.0996, "10 %"), (1, "100 %")]
)
def test_percentages_have_a_decimal_only_below_ten(fraction: float, text: str) -> None:
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.34567, "2.3457"), (0.0, "0.0000"), (2.5e-5, "2.50e-05"), (123456.0, "1.23e+05"), (math.nan, "nan")],
)
def test_a_loss_is_readable_at_any_size(value: float, text: str) -> None:
    assert loss_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3599.7, "1:00:00"), (5025, "1:23:45"), (100000, "1 d 3 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

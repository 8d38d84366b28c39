"""The page in a real browser: no errors, no requests, both themes, the keyboard, a phone, print, and a live run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.report.page import page, read_runs
from drumline.report.serve import PageServer
from tests.report.browser import PROGRAM, Browser
from tests.report.run_folder import make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (the package `chromium` of Debian)"),
]
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


def written(folder: Path, *runs: Path) -> str:
    file = folder / "page.html"
    file.write_text(page(read_runs(runs)), encoding="utf-8")
    return file.as_uri()


def test_a_page_opens_without_errors_and_without_requests(browser: Browser, tmp_path: Path) -> None:
    url = written(tmp_path, make_run(tmp_path / "a", teacher=True))
    browser.open(url)
    assert browser.run("document.querySelectorAll('figure svg').length") >= 6
    assert browser.run("document.querySelector('.picture').getBoundingClientRect().width") == 96
    assert browser.complaints() == []
    assert browser.requests() == [url]


def test_it_is_dark_if_the_system_is_and_the_button_overrides_it(browser: Browser, tmp_path: Path) -> None:
    url = written(tmp_path, make_run(tmp_path / "a"))
    colours = []
    for scheme in ("light", "dark"):
        browser.media(scheme)
        browser.open(url)
        colours.append(browser.run(BACKGROUND))
    assert colours[0] != colours[1]
    browser.run("document.getElementById('theme').click()")  # light
    assert browser.run(BACKGROUND) == colours[0]
    browser.run("document.getElementById('theme').click()")
    assert browser.run(BACKGROUND) == colours[1]
    browser.run("localStorage.clear()")
    browser.media("dark", "print")
    assert browser.run(BACKGROUND) == "rgb(255, 255, 255)"
    browser.media()
    assert browser.pdf().startswith(b"%PDF")


def test_it_works_without_its_script(browser: Browser, tmp_path: Path) -> None:
    url = written(tmp_path, make_run(tmp_path / "a"))
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    colours = []
    for scheme in ("light", "dark"):
        browser.media(scheme)
        browser.open(url)
        colours.append(browser.run(BACKGROUND))
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    browser.media()
    assert colours[0] != colours[1]
    assert browser.run("document.getElementById('theme').offsetWidth") == 0  # a button that would do nothing
    assert browser.run("document.querySelector('svg.plot').getBoundingClientRect().width") > 200


def test_the_keyboard_reaches_everything_and_reads_values_off_a_chart(
    browser: Browser, tmp_path: Path
) -> None:
    browser.open(written(tmp_path, make_run(tmp_path / "a")))
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(60):
        browser.press("Tab")
        seen.add(browser.run("document.activeElement.tagName.toLowerCase()"))
    assert {"a", "button", "svg", "summary", "div"} <= seen
    browser.run("document.querySelector('svg.plot').focus()")
    for _ in range(2):
        browser.press("ArrowRight")
    assert "epoch 2" in browser.run("document.querySelector('.tip').textContent")
    assert "training 1" in browser.run("document.querySelector('.tip').textContent")
    browser.press("End")
    assert "epoch 6" in browser.run("document.querySelector('.tip').textContent")
    browser.press("Escape")
    assert browser.run("document.querySelector('.tip')") is None
    browser.run("document.querySelector('summary').focus()")
    browser.press("Enter")
    assert browser.run("document.querySelector('details').open") is True
    assert browser.complaints() == []


def test_a_phone_scrolls_tables_not_the_page(browser: Browser, tmp_path: Path) -> None:
    names = tuple(f"a rather long name of class {number}" for number in range(30))
    browser.size(360, 740, mobile=True)
    browser.open(written(tmp_path, make_run(tmp_path / "a", names)))
    assert browser.run("document.documentElement.scrollWidth") == 360
    browser.size(1280, 900)


def test_a_long_class_name_leaves_the_numbers_in_sight(browser: Browser, tmp_path: Path) -> None:
    browser.size(1280, 900)
    browser.open(written(tmp_path, make_run(tmp_path / "a", ("x" * 200, "short", "other"))))
    widths = "[...document.querySelectorAll('tbody th')].map(each => each.getBoundingClientRect().width)"
    assert browser.run(f"Math.max(...{widths})") < 500


def test_three_runs_share_their_charts(browser: Browser, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=number) for number, name in enumerate("abc")]
    browser.open(written(tmp_path, *runs))
    assert browser.run("document.querySelectorAll('figure:first-of-type path.line').length") >= 3
    assert browser.run("document.querySelectorAll('#results tbody tr').length") == 3
    strokes = browser.run(
        "[...document.querySelector('svg.plot').querySelectorAll('path.line')]"
        ".map((path) => getComputedStyle(path).stroke + path.getAttribute('stroke-dasharray')).join('|')"
    )
    assert len(set(strokes.split("|"))) == 3
    assert browser.complaints() == []


def test_a_live_page_updates_itself_in_place(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with PageServer([run], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            browser.open(server.url)
            mark = "document.querySelector('details').open = true; window.same = document.querySelector('#recipe')"
            browser.run(mark)
            line = {
                "kind": "eval",
                "step": 70,
                "epoch": 7.0,
                "top1": 0.91,
                "loss": 0.1,
                "samples": 300,
                "best": True,
            }
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            browser.wait(lambda: "91.0%" in browser.run("document.querySelector('.tiles').textContent"))
            assert browser.run("document.querySelector('details').open") is True
            assert browser.run("window.same === document.querySelector('#recipe')") is True  # not replaced
            assert browser.complaints() == []
            assert {url.partition("?")[0] for url in browser.requests()} == {server.url}
        finally:
            server.shutdown()
            thread.join()
    browser.wait(lambda: "stopped" in browser.run("document.querySelector('.live').textContent"))

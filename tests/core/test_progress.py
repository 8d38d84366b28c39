"""How fast something goes, how long it still takes, and the live line below a notebook's cell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from drumline.core.progress import Pace, in_notebook


def test_the_time_left_follows_the_recent_speed() -> None:
    pace = Pace()
    assert pace.seconds_left(0, 1000) is None
    for second in range(200):
        pace.update(second, second)
    for second in range(200, 300):
        pace.update(second, 200 + (second - 200) * 10)
    assert pace.seconds_left(299, 2190) == pytest.approx(100)
    assert pace.seconds_left(309, 2190) == pytest.approx(90), "it counts down between updates"
    assert pace.seconds_left(9999, 2190) == 0


def test_many_updates_a_second_still_look_back_half_a_minute() -> None:
    pace = Pace()
    for tick in range(20_000):
        speed = 5 if tick % 100 == 0 else 1
        pace.update(tick / 100, tick * 2 + speed)
    left = pace.seconds_left(199.99, 2 * 19_999 + 2000)
    assert left == pytest.approx(10, rel=0.02)
    assert len(pace._seen) <= 40


def test_a_pause_does_not_slow_the_speed_down() -> None:
    pace = Pace()
    for second in range(10):
        pace.update(second, second * 10)
    pace.pause()
    pace.update(1000, 100)
    assert pace.seconds_left(1000, 200) == pytest.approx(10)
    pace.update(1001, 110)
    assert pace.seconds_left(1001, 210) == pytest.approx(10)


def test_a_resumed_run_counts_from_where_it_began() -> None:
    pace = Pace()
    pace.update(50, 10_000)
    pace.update(60, 10_100)
    assert pace.seconds_left(60, 10_200) == pytest.approx(10)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that runs code in a kernel and returns the messages that its cell shows."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    # A kernel under pytest does not show what child processes print; elsewhere it does.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    manager, client = start_new_kernel(cwd=str(folder), env=env)

    def run(code: str) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        reply = client.execute_interactive(code, timeout=120, output_hook=shown.append)
        assert reply["content"]["status"] == "ok", reply["content"]
        return [
            {"type": message["msg_type"], **message["content"]}
            for message in shown
            if message["msg_type"] in ("stream", "display_data", "update_display_data", "execute_result")
        ]

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_test_runs_in_no_notebook() -> None:
    assert not in_notebook()


def test_a_live_line_is_replaced_in_place_and_erased(cell: Any) -> None:
    code = (
        "import time\n"
        "from drumline.core import progress\n"
        "for _ in progress.progress(range(6), 'checking'):\n"
        "    time.sleep(0.5)\n"
    )
    shown = cell(code)
    first, *updates = shown
    assert first["type"] == "display_data"
    assert {each["type"] for each in updates} == {"update_display_data"}
    assert len({each["transient"]["display_id"] for each in shown}) == 1
    lines = [each["data"]["text/plain"] for each in shown]
    assert any("checking" in line and "/6" in line for line in lines)
    assert lines[-1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_notebook_trains_on_one_process_and_on_several(cell: Any, processes: int) -> None:
    shown = cell(
        "import drumline\n"
        "recipe = drumline.Recipe.from_args(['data.source=digits', 'model.name=resnet8', 'train.epochs=1',\n"
        f"    'parallel.threads=1', 'parallel.processes={processes}'])\n"
        "drumline.train(recipe)['finished']"
    )
    assert shown[-1]["type"] == "execute_result"
    assert shown[-1]["data"]["text/plain"] == "True"
    text = "".join(each.get("text", "") or each.get("data", {}).get("text/plain", "") for each in shown)
    assert "epoch 1: loss" in text
    assert "Traceback" not in text
    assert "\x1b[2K" not in text, "control characters of a terminal"

"""Runs inside a real Jupyter kernel: a live line below the cell, results beside it, nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from drumline.core.notebook import in_notebook


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

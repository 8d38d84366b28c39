"""Runs inside a real Jupyter kernel: a live line below the cell, results beside it, nothing else."""

from __future__ import annotations

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
    manager, client = start_new_kernel(cwd=str(folder))

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

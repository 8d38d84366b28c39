"""A launch with real processes, for tests: its messages, its duration, the processes that are still alive."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drumline.config.recipe import Launch, Parallel
from drumline.launch.launcher import launch
from drumline.launch.network import free_port
from tests.launch.job import is_running, wait_for

HERE = Path(__file__).parent


def hello(processes: int) -> str:
    """The first message of a launcher on one machine: the network interface that it chose."""
    return f"{processes} process{'es' * (processes > 1)} here, network interface lo (127.0.0.1)"


class Run:
    """One launch: its messages, its duration, the processes that are still alive."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.seconds = 0.0

    def command(self, mode: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / "job.py"), str(self.folder), mode, *arguments]

    def launch(
        self,
        mode: str,
        *arguments: str,
        processes: int = 2,
        supervision: Launch | None = None,
        **parallel: Any,
    ) -> int:
        begin = time.monotonic()
        outcome = launch(
            self.command(mode, *arguments),
            Parallel(**parallel),
            processes,
            self.lines.append,
            threads=3,
            supervision=supervision,
        )
        self.seconds = time.monotonic() - begin
        assert self.lines.pop(0) == hello(processes)
        return outcome.exit_code

    def launcher(
        self, mode: str, *arguments: str, processes: int = 2, ready: int = 2, **wanted: Any
    ) -> subprocess.Popen[str]:
        """A launcher in a process of its own, whose first `ready` workers are running."""
        request = {"command": self.command(mode, *arguments), "processes": processes, **wanted}
        process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher_process.py"), json.dumps(request)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(ready):
            if not wait_for(self.folder / f"ready-{rank}"):
                process.kill()
                raise AssertionError(f"rank {rank} did not start: {process.communicate()[1]}")
        return process

    def report(self, rank: int) -> dict[str, Any]:
        found = json.loads((self.folder / f"report-{rank}").read_text())
        assert isinstance(found, dict)
        return found

    def survivors(self, seconds: float = 1.0) -> list[str]:
        """Processes of this run that are still alive, up to `seconds` later."""
        deadline = time.monotonic() + seconds
        while True:
            alive = [p.name for p in self.folder.glob("pid-*") if is_running(int(p.read_text()))]
            if not alive or time.monotonic() >= deadline:
                return alive
            time.sleep(0.02)

    def two_launchers(self, mode: str) -> tuple[list[int], list[str]]:
        """The launchers of two machines, both here; returns their exit codes and messages."""
        parallel = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port('127.0.0.1')}", "timeout": 60.0}
        launchers = [self.launcher(mode, processes=1, ready=0, parallel=parallel) for _ in range(2)]
        try:
            outputs = [launcher.communicate(timeout=60)[1] for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
        return [launcher.returncode for launcher in launchers], outputs

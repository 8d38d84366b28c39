"""Runs a script of `scripts/` on some ranks over gloo and returns what each rank printed."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from drumline.launch.network import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Outcome:
    """How each rank ended, and what it printed."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def quiet(self) -> bool:
        """Ended well, and no guard printed anything."""
        return not any(self.codes) and not any("drumline guard" in text for text in self.err)

    def finding(self, rank: int = 0) -> str:
        """The last finding on the stderr of a rank."""
        text = self.err[rank]
        assert "drumline guard [" in text, text[-3000:]
        return text[text.rindex("drumline guard [") :]


def run_script(name: str, size: int, *argv: str, seconds: float = 60) -> Outcome:
    """On `size` ranks; with one, without torch.distributed unless the script starts it."""
    return run_scripts(name, size, [argv], seconds)[0]


def run_scripts(name: str, size: int, argvs: Sequence[Sequence[str]], seconds: float = 60) -> list[Outcome]:
    """A script with each of these arguments, all at the same time: scripts that hang mostly wait."""
    with tempfile.TemporaryDirectory() as root:
        requests = [_request(name, size, argv, Path(root, str(n)), seconds) for n, argv in enumerate(argvs)]
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(requests) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        return [
            Outcome(
                code,
                [Path(request["folder"], f"{rank}.out").read_text() for rank in range(size)],
                [Path(request["folder"], f"{rank}.err").read_text() for rank in range(size)],
            )
            for request, code in zip(requests, codes, strict=True)
        ]


def _request(name: str, size: int, argv: Sequence[str], folder: Path, seconds: float) -> dict[str, Any]:
    folder.mkdir()
    environment = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return {
        "script": str(SCRIPTS / name),
        "argv": list(argv),
        "size": size,
        "folder": str(folder),
        "environment": environment,
        "seconds": seconds,
    }


@cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.guards.server"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process

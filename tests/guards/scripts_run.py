"""Runs a script of `scripts/` on some ranks over gloo and hands back what each rank printed."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drumline.launch.network import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Outcome:
    """What became of each rank."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def quiet(self) -> bool:
        """Ended well, and no guard said a word."""
        return not any(self.codes) and not any("drumline guard" in text for text in self.err)

    def finding(self, rank: int = 0) -> str:
        """What the guards said on a rank: the last finding on its stderr."""
        text = self.err[rank]
        assert "drumline guard [" in text, text[-3000:]
        return text[text.rindex("drumline guard [") :]


def run_script(name: str, size: int, *words: str, seconds: float = 60) -> Outcome:
    """On `size` ranks; with one, without torch.distributed unless the script starts it."""
    environment = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "script": str(SCRIPTS / name),
            "words": words,
            "size": size,
            "folder": folder,
            "environment": environment,
            "seconds": seconds,
        }
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        out = [Path(folder, f"{rank}.out").read_text() for rank in range(size)]
        err = [Path(folder, f"{rank}.err").read_text() for rank in range(size)]
        return Outcome(codes, out, err)


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

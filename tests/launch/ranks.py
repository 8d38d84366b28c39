"""Starts real processes over gloo for a test: each runs `python -m MODULE FOLDER` as one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from drumline.launch.network import free_port

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, size: int, folder: Path | str, seconds: float = 120) -> None:
    """Returns when all have ended well; what they found they leave in `folder`."""
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            env={**os.environ, **common, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)

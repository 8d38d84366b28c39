"""Starts real processes over gloo for a test: each runs `python -m MODULE FOLDER` as one rank."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from drumline.launch.network import free_port
from tests import warm

ROOT = Path(__file__).parents[2]


@contextmanager
def one_thread() -> Iterator[None]:
    """As the ranks have, for what is compared with them bit by bit: the number decides the order of additions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def results_of(
    module: str, size: int, prepare: Callable[[Path], None] = lambda folder: None, seconds: float = 120
) -> list[dict[str, Any]]:
    """What every rank of a world of `size` left in its `RANK.pt`, in rank order. `prepare` may put something into
    their folder first. Started once for all of pytest-xdist's workers: the first that needs them starts them."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"drumline-ranks-{run}" / f"{module}-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    user = folder.parent / f"user-{os.getpid()}"
    user.touch()
    atexit.register(_leave, user)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            prepare(folder)
            run_ranks(module, size, folder, seconds)
            (folder / "done").touch()
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _leave(user: Path) -> None:
    """The last worker deletes the results."""
    user.unlink(missing_ok=True)
    if not any(user.parent.glob("user-*")):
        shutil.rmtree(user.parent, ignore_errors=True)


def run_ranks(module: str, size: int, folder: Path | str, seconds: float = 120) -> None:
    """Returns when all ranks have succeeded; their results are in `folder`."""
    common = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, "-m", module, str(folder)]
    ranks = [warm.Started(command, ROOT, {**os.environ, **common, "RANK": str(rank)}) for rank in range(size)]
    try:
        done = [rank.finish(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in done] == [0] * size, "\n".join(rank.stderr for rank in done)

"""Runs user scripts as ranks: imports torch once, then forks a process per rank and script. `python -m` this module;
each line on stdin is a JSON list of requests that run at the same time, each line on stdout the answer."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # DDP imports it, for seconds
import torch.distributed
import torch.distributed.optim
import torch.nn.parallel

import drumline.guards.script.watch  # noqa: F401


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what torch imported need not be searched by each guard
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def serve(requests: list[dict]) -> list[list[int]]:
    """The exit code of each rank of each request; -9 for one that took too long."""
    children = {
        _fork(request, rank, Path(request["folder"])): (number, rank)
        for number, request in enumerate(requests)
        for rank in range(request["size"])
    }
    codes = [[-9] * request["size"] for request in requests]
    until = time.monotonic() + max(request["seconds"] for request in requests)
    while children and time.monotonic() < until:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            number, rank = children.pop(pid)
            codes[number][rank] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def _fork(request: dict, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    for descriptor, name in ((1, f"{rank}.out"), (2, f"{rank}.err")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, descriptor)
    os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(folder)
    sys.argv = [request["script"], *request["argv"]]
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # What an interpreter does when it ends, less its teardown.
    import atexit

    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

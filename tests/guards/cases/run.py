"""Runs cases on some ranks over gloo, many in one process each, and prints one JSON line: name -> findings.

python -m tests.guards.cases.run WORLD [NAME... | held-out]
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it, for seconds
import torch.distributed as dist
import torch.distributed.optim
import torch.nn.parallel

import drumline.guards.script.watch
from drumline.guards.finding import GuardError
from tests.guards.cases.common import CASES, Case

MODULES = (
    "mistakes_data",
    "mistakes_gradients",
    "mistakes_ranks",
    "healthy_data",
    "healthy_loops",
    "reported",
    "frozen",
    "held_out",
    "held_out_more",
)
SECONDS = 240.0


def load() -> dict[str, Case]:
    """All cases, by name."""
    for module in MODULES:
        importlib.import_module(f"tests.guards.cases.{module}")
    return CASES


def run_cases(size: int, names: list[str]) -> dict[str, Any]:
    """For each case: `stopped` and `warned` (guards, on any rank), `error`, `seconds`. Two groups of ranks share the
    cases, because ranks often wait for each other."""
    with tempfile.TemporaryDirectory() as root:
        gc.collect()
        gc.freeze()  # the guards need not search torch's own objects
        children, groups = [], [names[::2], names[1::2]]
        for number, group in enumerate(groups):
            folder = Path(root, str(number))
            folder.mkdir()
            children += [_fork(rank, size, group, folder) for rank in range(size)]
        until = time.monotonic() + SECONDS
        while children and time.monotonic() < until:
            children = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
            time.sleep(0.02)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            ranks = [_read(Path(root, str(number), str(rank))) for rank in range(size)]
            found |= {name: _joined([one.get(name) for one in ranks]) for name in group}
    return {name: found[name] for name in names}


def _joined(said: list[dict[str, Any] | None]) -> dict[str, Any]:
    got = [one for one in said if one is not None]
    return {
        "stopped": sorted({code for one in got for code in one["stopped"]}),
        "warned": sorted({code for one in got for code in one["warned"]}),
        "error": "".join(one["error"] for one in got) or ("" if len(got) == len(said) else "did not end"),
        "text": "".join(dict.fromkeys(one["text"] for one in got)),
        "seconds": max((one["seconds"] for one in got), default=0.0),
    }


def _read(path: Path) -> dict[str, Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {one["name"]: one for one in map(json.loads, lines)}


def _fork(rank: int, size: int, names: list[str], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        with (folder / f"{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        os.chdir(folder)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        # Connections to a TCPStore take 5 s now and then, if the machine cannot look up names. Each guard opens two.
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        with (folder / str(rank)).open("w") as out:
            for number, name in enumerate(names):
                print(json.dumps({"name": name, **_one(CASES[name])}), file=out, flush=True)
                store.set(f"done/{number}/{rank}", "")
                store.wait([f"done/{number}/{other}" for other in range(size)], timedelta(seconds=30))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _one(case: Case) -> dict[str, Any]:
    began, error, stopped = time.monotonic(), "", []
    text = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stderr(text):
        try:
            case.run()
        except GuardError as stop:
            stopped = [stop.finding.guard]
            print(stop, file=text)
        except Exception:
            error = traceback.format_exc()
        for watch in list(drumline.guards.script.watch.OPEN):
            try:
                watch.close()
            except GuardError as stop:
                stopped = [*stopped, stop.finding.guard]
                print(stop, file=text)
            except Exception:
                error += traceback.format_exc()
    gc.collect()
    said = re.findall(r"drumline guard \[([a-z-]+)\]", text.getvalue())
    return {
        "stopped": stopped,
        "warned": [code for code in said if code not in stopped],
        "error": error,
        "text": text.getvalue(),
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    cases = load()
    asked = sys.argv[2:]
    chosen = asked or [name for name, case in cases.items() if not case.held_out]
    if asked == ["held-out"]:
        chosen = [name for name, case in cases.items() if case.held_out]
    print(json.dumps(run_cases(int(sys.argv[1]), chosen)))

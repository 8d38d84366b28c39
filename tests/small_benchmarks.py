"""Runs benchmarks with `--small`, each in a process of its own that is forked from one with torch imported, as
are the runs that it starts by `python -m drumline`.

    python -m tests.small_benchmarks FOLDER NAME ...

Leaves in FOLDER/NAME what the script writes, and its `stdout`, `stderr` and exit `code`. Two run at a time.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

import torch._dynamo  # nearly all of them import it, for seconds

import drumline.cli
import drumline.training.loop  # noqa: F401
from tests import warm

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXTRA = {"copy_overlap": ("--out", "timelines"), "layouts": ("--log", "log.jsonl")}
"""Options by which some write more of what they do."""


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    sys.path.insert(0, str(BENCHMARKS))
    torch.set_num_threads(1)
    warm.fork_drumline()
    running: dict[int, str] = {}
    while names or running:
        while names and len(running) < 2:
            name = names.pop(0)
            (folder / name).mkdir()
            running[start(name, folder / name)] = name
        pid, status = os.wait()
        (folder / running.pop(pid) / "code").write_text(str(os.waitstatus_to_exitcode(status)))


def start(name: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.chdir(folder)
    for descriptor, file in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [str(BENCHMARKS / f"{name}.py"), "--small", *EXTRA.get(name, ())]
    code: object = 1
    try:
        code = importlib.import_module(name).main() or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()

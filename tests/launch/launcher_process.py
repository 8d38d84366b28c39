"""A launcher in a process of its own, for tests that signal or kill it: `python launcher_process.py JSON`.

The JSON holds `command`, `processes`, `threads`, `grace`, and the fields of `recipe.Parallel` (`parallel`) and of
`recipe.Launch` (`supervision`) to set. `hurry` shortens what a lost machine is waited for. `clock` sets the wall
clock of this process forward by so many seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time

# torch reads this when it is loaded; see `drumline.launch.launcher`.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from drumline.config.recipe import Launch, Parallel
from drumline.core.errors import UserError
from drumline.launch import cluster
from drumline.launch import nodes as members
from drumline.launch.launcher import launch


def main() -> int:
    wanted = json.loads(sys.argv[1])
    if skew := wanted.get("clock"):
        right = time.time
        time.time = lambda: right() + skew
    if wanted.get("hurry"):
        cluster.SILENT_SECONDS = cluster.FILE_SILENT_SECONDS = 2.0
        cluster.FILE_PACE = 0.25
        members.LAST_CALL_SECONDS = 1.0
    try:
        return launch(
            wanted["command"],
            Parallel(**wanted.get("parallel", {})),
            wanted["processes"],
            lambda line: print(line, file=sys.stderr, flush=True),
            threads=wanted.get("threads", 1),
            supervision=Launch(**wanted["supervision"]) if "supervision" in wanted else None,
            grace=wanted.get("grace", 60.0),
        ).exit_code
    except UserError as error:
        print(f"mistake: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Runs a recipe from Python: in this process if one is enough, through the launcher otherwise.

Promises: returns the final metrics as the command line would print them; raises instead of ending the process;
works in a script without `if __name__ == "__main__"`, in a notebook and outside the main thread, because workers run
`python -m drumline` on a recipe file and never import the caller's script.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from drumline.config.recipe import Recipe
from drumline.config.rules import check
from drumline.config.toml import dump_recipe
from drumline.core.errors import LostError, UserError
from drumline.core.text import json_line, message
from drumline.launch.failure import Failure, render_failure
from drumline.launch.worker import call, connect, explained, launch_workers, resolve_processes


def start(recipe: Recipe, job: str = "train") -> dict[str, Any]:
    """Runs a recipe and returns the final metrics. `job` is "train" or "distill".

    `finished` is False in the result if a signal stopped the run (Ctrl-C, or the interrupt button of a notebook): it
    has saved and can be resumed. Raises `UserError` for a mistake, `RuntimeError` with the traceback of the worker
    that failed otherwise.
    """
    check(recipe)
    info, processes = resolve_processes(recipe)
    if processes:
        return _launch(recipe, job, processes)
    world = connect(info, recipe)
    try:
        result: dict[str, Any] = json.loads(json_line(call(job, recipe, world).as_dict()))
        return result
    except Exception as error:
        if (clearer := explained(error)) is error:
            raise
        raise clearer from error
    finally:
        world.close()


def _launch(recipe: Recipe, job: str, processes: int) -> dict[str, Any]:
    # Workers find modules where this process does.
    path = {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(dump_recipe(recipe))
        argv = [job, str(file), "--trust"]
        outcome = launch_workers(argv, recipe, processes, _say, variables=path, returns_result=True)
    if outcome.failure is not None:
        raise _error(outcome.failure)
    if outcome.result:
        result: dict[str, Any] = json.loads(outcome.result)
        return result
    if outcome.exit_code == 0:  # another machine has rank 0
        return {}
    raise KeyboardInterrupt("the workers were stopped before they saved")


def _error(failure: Failure) -> Exception:
    if failure.user:
        kind = LostError if failure.lost else UserError
        return kind(failure.message, failure.fix, failure.code)
    return RuntimeError(render_failure(failure))


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(message(line), file=sys.stderr, flush=True)

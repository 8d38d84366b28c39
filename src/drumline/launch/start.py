"""Runs a recipe, from the command line or from Python: in this process if one is enough, through the launcher
otherwise.

Promises: the same command works alone, under our launcher, torchrun, srun or with variables set by hand. torch is
imported only where this process needs it: to train, to look for a GPU, or to count the GPUs. From Python, a run
returns the final metrics as the command line would print them, and raises instead of ending the process; it works in
a script without `if __name__ == "__main__"`, in a notebook and outside the main thread, because workers run
`python -m drumline` on a recipe file and never import the caller's script.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drumline.config.fields import recipe_fields, value_of
from drumline.config.layouts import layout_named, uses_stages
from drumline.config.recipe import Recipe
from drumline.config.rendezvous import parse_rendezvous, variables_missing
from drumline.config.rules import check
from drumline.config.toml import dump_recipe
from drumline.core.environment import RankInfo, read_rank_info
from drumline.core.errors import LostError, UserError
from drumline.core.machine import usable_cores
from drumline.core.text import json_line, message
from drumline.launch.failure import Failure, render_failure
from drumline.launch.supervisor import Outcome
from drumline.observe.text_log import say

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def run(
    argv: Sequence[str],
    recipe: Recipe,
    job: str,
    options: Mapping[str, Any] = NO_OPTIONS,
    given: Collection[str] = (),
) -> int:
    """Runs a job and returns the exit code. `argv` is the command line that does the same in a different process;
    `options` are those of the job, by name; `given` are the fields that the user has set."""
    with without_garbage_collection():
        info, processes = resolve_processes(recipe)
    if processes:
        return launch_workers(argv, recipe, processes, say).exit_code
    with without_garbage_collection():
        from drumline.launch.worker import work

    return work(info, recipe, job, options, given)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For the first import of torch. What it creates stays until the process ends; scanning that for garbage, during
    the import, afterwards and at exit, takes time and finds none."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def start(
    recipe: Recipe,
    job: str = "train",
    options: Mapping[str, Any] = NO_OPTIONS,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Runs a recipe and returns the final metrics. `job` is "train", "distill" or "eval", with options of its own.
    `given` are the fields that the user has set, also those that have their defaults.

    `finished` is False in the result if a signal stopped the run (Ctrl-C, or the interrupt button of a notebook): it
    has saved and can be resumed. Raises `UserError` for a mistake, `RuntimeError` with the traceback of the worker
    that failed otherwise.
    """
    check(recipe)
    info, processes = resolve_processes(recipe)
    if processes:
        return _launch(recipe, job, processes, options, given)

    from drumline.launch.worker import call, connect, explained

    world = connect(info, recipe)
    try:
        result: dict[str, Any] = json.loads(json_line(call(job, recipe, world, options, given).as_dict()))
        return result
    except Exception as error:
        if (clearer := explained(error)) is error:
            raise
        raise clearer from error
    finally:
        world.close()


def resolve_processes(recipe: Recipe) -> tuple[RankInfo | None, int]:
    """This process's rank if a launcher started it, and the number of workers to launch here; 0: run in this
    process."""
    for name, value in cuda_settings(recipe).items():
        os.environ.setdefault(name, value)
    info = read_rank_info(os.environ)
    rendezvous = parse_rendezvous(recipe.parallel.rendezvous).kind
    if info is not None and info.started_by == "slurm" and rendezvous in ("tcp", "file"):
        info = None  # one task per machine, each the launcher of its machine
    if info is not None:
        return info, 0
    if rendezvous == "env":
        raise variables_missing()
    device: str = recipe.run.device
    if device == "cuda" or (device == "auto" and recipe.parallel.processes == "auto"):
        from drumline.parallel.process_group import resolve_device_type  # imports torch

        device = resolve_device_type(device)
    processes = local_processes(recipe, device)
    launched = processes > 1 or recipe.parallel.nodes > 1 or recipe.launch.restarts > 0
    return None, processes if launched else 0


def local_processes(recipe: Recipe, device_type: str) -> int:
    """The number of processes on this machine."""
    if recipe.parallel.processes != "auto":
        return recipe.parallel.processes
    if device_type == "cpu" or layout_named(recipe.parallel.layout).one_process:
        return 1

    import torch

    return max(1, torch.cuda.device_count())


def launch_workers(
    argv: Sequence[str],
    recipe: Recipe,
    processes: int,
    say: Callable[[str], None],
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    returns_result: bool = False,
) -> Outcome:
    """Launches this machine's workers and waits for their end. `variables` are added to their environment."""
    from drumline.launch.launcher import launch

    wanted = recipe.parallel.threads
    threads = max(1, usable_cores() // processes) if wanted == "auto" else wanted
    return launch(
        [sys.executable, "-P", "-m", "drumline", *argv],
        recipe.parallel,
        processes,
        say,
        threads=threads,
        supervision=recipe.launch,
        run_dir=recipe.run.dir,
        variables=variables,
        returns_result=returns_result,
    )


def cuda_settings(recipe: Recipe) -> dict[str, str]:
    """Variables that CUDA and its libraries read when they start, so before the first CUDA call."""
    settings = {}
    if recipe.run.deterministic:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # NVLink's in-switch reduction adds in an order that differs between calls.
        settings["NCCL_NVLS_ENABLE"] = "0"
    if uses_stages(recipe):
        # Each lane of a pipeline uses five streams. A GPU has eight queues by default, and streams that share a queue
        # wait for each other.
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    return settings


def _launch(
    recipe: Recipe, job: str, processes: int, options: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    unset = {
        name
        for name, field in recipe_fields().items()
        if value_of(recipe, name) == field.default and name not in given
    }
    # Workers find modules where this process does.
    path = {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(dump_recipe(recipe, omit=unset))
        argv = [job, str(file), "--trust"]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            argv += [flag] * value if isinstance(value, bool) else [f"{flag}={value}"]
        outcome = launch_workers(argv, recipe, processes, _print, variables=path, returns_result=True)
    if outcome.failure is not None:
        raise _error(outcome.failure)
    if outcome.result:
        result: dict[str, Any] = json.loads(outcome.result)
        if (
            result.get("stopped_by") and outcome.exit_code > 128
        ):  # the workers got SIGTERM from their launcher
            result["stopped_by"] = signal.Signals(outcome.exit_code - 128).name
        return result
    if outcome.exit_code == 0:  # another machine has rank 0
        return {}
    raise KeyboardInterrupt("the workers were stopped before they saved")


def _error(failure: Failure) -> Exception:
    if failure.user:
        kind = LostError if failure.lost else UserError
        return kind(failure.message, failure.fix, failure.code)
    return RuntimeError(render_failure(failure))


def _print(line: str) -> None:
    if sys.stderr is not None:
        print(message(line), file=sys.stderr, flush=True)

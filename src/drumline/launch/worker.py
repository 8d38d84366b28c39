"""Runs a job on the processes the recipe asks for, and is what each of those processes runs.

Promises: the same command works alone, under our launcher, torchrun, srun or hand-set variables; an error is
shown once, by the rank that had it; the result is printed by rank 0 alone. A job is named, not passed, so
nothing but words travels to another process.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

import torch

from drumline.config.layouts import layout_named, uses_stages
from drumline.config.recipe import Recipe
from drumline.config.rendezvous import parse_rendezvous, variables_missing
from drumline.core import heartbeat
from drumline.core.environment import RankInfo, read_rank_info
from drumline.core.errors import LostError, UserError
from drumline.core.machine import raise_descriptor_limit, usable_cores
from drumline.core.parent import die_with_parent
from drumline.core.result import print_result
from drumline.core.text import message
from drumline.launch.failure import record_failure
from drumline.launch.network import choose_interface, listening_address, socket_variables
from drumline.launch.stacks import answer_signal
from drumline.observe.text_log import say
from drumline.parallel.process_group import init_world, pick_device, resolve_device_type
from drumline.parallel.world import World, single_process
from drumline.state.claim import claimed, restart_recipe, restart_resume


def run(words: Sequence[str], recipe: Recipe, job: str) -> int:
    """Runs `job` ("module:function", called with recipe and world) and returns the exit code. `words` is the
    command line that does the same in another process."""
    for name, value in cuda_settings(recipe).items():
        os.environ.setdefault(name, value)
    device_type = resolve_device_type(recipe.run.device)
    info = read_rank_info(os.environ)
    rendezvous = parse_rendezvous(recipe.parallel.rendezvous).kind
    if info is not None and info.started_by == "slurm" and rendezvous in ("tcp", "file"):
        info = None  # one task per machine, each to be the launcher of its machine
    if info is None:
        if rendezvous == "env":
            raise variables_missing()
        processes = local_processes(recipe, device_type)
        if processes > 1 or recipe.parallel.nodes > 1 or recipe.launch.restarts:
            return _launch(words, recipe, processes)
    return _work(info, recipe, device_type, job)


def local_processes(recipe: Recipe, device_type: str) -> int:
    """How many processes this machine starts."""
    if recipe.parallel.processes != "auto":
        return recipe.parallel.processes
    if device_type == "cpu" or layout_named(recipe.parallel.layout).one_process:
        return 1
    return max(1, torch.cuda.device_count())


def _launch(words: Sequence[str], recipe: Recipe, processes: int) -> int:
    from drumline.launch.launcher import launch

    wanted = recipe.parallel.threads
    threads = max(1, usable_cores() // processes) if wanted == "auto" else wanted
    return launch(
        [sys.executable, "-P", "-m", "drumline", *words],
        recipe.parallel,
        processes,
        say,
        threads=threads,
        care=recipe.launch,
        run_dir=recipe.run.dir,
    )


def _work(info: RankInfo | None, recipe: Recipe, device_type: str, job: str) -> int:
    """One process of the run."""
    ours = info is not None and info.started_by == "drumline"
    listen = None
    if ours:
        die_with_parent()
        heartbeat.connect(os.environ)
        answer_signal(os.environ)
    elif info is not None and info.world_size > 1:
        listen = _heed_parallel(info, recipe)
    raise_descriptor_limit()
    world = single_process(pick_device(device_type, info.local_rank if info else 0))
    try:
        world = init_world(info, device_type, recipe.parallel.backend, recipe.parallel.timeout, listen)
        if name := claimed():
            recipe = restart_recipe(
                recipe,
                name,
                world.broadcast_object(restart_resume(recipe, name) if world.is_rank_zero else ""),
            )
        module, function = job.split(":")
        result = getattr(importlib.import_module(module), function)(recipe, world)
    except BaseException as error:
        if info is None or (info.world_size == 1 and not ours):
            raise
        return _leave(error, info.rank, world)
    if ours:
        _ignore_stops()
    if world.is_rank_zero:
        print_result(asdict(result))
    world.close()
    stopped_by = getattr(result, "stopped_by", "")
    code = 128 + signal.Signals[stopped_by] if stopped_by else 0
    if world.size > 1:
        _end(code)
    return code


def _end(code: int) -> NoReturn:
    """Ends a rank that is done without taking the interpreter down: gloo's threads outlive their group, and one that
    wants Python then aborts the process (rare; seen with torch 2.13), which would count as a loss."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _ignore_stops() -> None:
    """A request that comes now has nothing left to stop, and must not give a finished run the exit code of a stopped
    one. The launcher still kills when it is asked again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _heed_parallel(info: RankInfo, recipe: Recipe) -> str:
    """What our launcher would have done, for processes that somebody else started. Gives the address to listen at."""
    machines = 2 if info.world_size > info.local_size else 1
    interface = choose_interface(recipe.parallel.interface, info.master_addr, machines=machines)
    variables, notes = socket_variables(interface, os.environ, forced=recipe.parallel.interface != "auto")
    os.environ.update(variables)
    if recipe.parallel.processes not in ("auto", info.local_size):
        notes.append(
            f"parallel.processes = {recipe.parallel.processes} is not heeded: {info.started_by} started "
            f"{info.local_size} here"
        )
    if info.rank == 0:
        for note in (f"network interface {interface}", *notes):
            say(note)
        return listening_address(info.master_addr, interface)
    return interface.address


def _leave(error: BaseException, rank: int, world: World) -> int:
    """Ends a failed rank: says why unless the launcher will, and does not wait for threads that may hang."""
    error = _explained(error, world)
    code = error.exit_code if isinstance(error, UserError) else 1
    if not record_failure(error, rank) and world.claim_failure():
        story = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        print(message(f"drumline: rank {rank}: {story}"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explained(error: BaseException, world: World) -> BaseException:
    """A wait for the others that ran out, in words that do not blame the rank that waited."""
    if isinstance(error, torch.distributed.DistError | RuntimeError) and "timed out" in str(error).lower():
        return LostError(
            f"waited in vain for the other ranks ({str(error).strip().splitlines()[0]})",
            "a rank hangs or is far slower than this one: see what each process does (py-spy dump --pid PID), or "
            "raise --parallel.timeout",
        )
    return error


def cuda_settings(recipe: Recipe) -> dict[str, str]:
    """Variables that CUDA and its libraries read when they start, so before the first CUDA call."""
    settings = {}
    if recipe.run.deterministic:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        # NVLink's in-switch reduction adds in an order that differs between calls.
        settings["NCCL_NVLS_ENABLE"] = "0"
    if uses_stages(recipe):
        # Each place has five streams. CUDA gives a GPU eight queues unless told otherwise, and streams that share
        # one wait for each other.
        settings["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    return settings

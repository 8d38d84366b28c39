"""One process of a run: connects to the others, runs its job, and ends.

Promises: an error is shown once, by the rank that had it; only rank 0 prints the result. A job is passed to other
processes by name.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from drumline.config.fields import with_values
from drumline.config.recipe import Recipe
from drumline.core import heartbeat
from drumline.core.environment import RankInfo
from drumline.core.errors import PEER_LOST, LostError, UserError
from drumline.core.machine import raise_descriptor_limit
from drumline.core.processes import die_with_parent
from drumline.core.text import json_line, message, print_result
from drumline.launch.failure import record_failure
from drumline.launch.hang import answer_signal
from drumline.launch.network import choose_interface, listening_address, socket_variables
from drumline.launch.start import NO_OPTIONS
from drumline.launch.workers import RESULT
from drumline.observe.text_log import say
from drumline.parallel.process_group import init_world, pick_device, resolve_device_type
from drumline.parallel.world import World, single_process
from drumline.state.folder import claimed, restart_recipe, restart_resume

JOBS = {
    "train": "drumline.training.loop:train",
    "distill": "drumline.distillation.run:distill",
    "eval": "drumline.training.evaluate:evaluate_weights",
}
"""The function of each job, called with recipe and world, and with the options of its own."""


def work(
    info: RankInfo | None,
    recipe: Recipe,
    job: str,
    options: Mapping[str, Any] = NO_OPTIONS,
    given: Collection[str] = (),
) -> int:
    """Runs a job in this process; returns the exit code, or ends the process if it is a rank. `given` are the fields
    that the user has set."""
    ours = info is not None and info.started_by == "drumline"
    if ours:
        die_with_parent()
        heartbeat.connect(os.environ)
        answer_signal(os.environ)
    device_type = resolve_device_type(recipe.run.device)
    world = single_process(pick_device(device_type, info.local_rank if info else 0))
    try:
        world = connect(info, recipe)
        result = call(job, recipe, world, options, given)
    except BaseException as error:
        if info is None or (info.world_size == 1 and not ours):
            raise
        return _fail(error, info.rank, world)
    if ours:
        _ignore_stops()
    if world.is_rank_zero:
        _publish(result.as_dict())
    world.close()
    stopped_by = getattr(result, "stopped_by", "")
    code = 128 + signal.Signals[stopped_by] if stopped_by else 0
    if world.size > 1:
        _exit(code)
    return code


def connect(info: RankInfo | None, recipe: Recipe) -> World:
    """Connects to the other processes of the run."""
    listen = None
    if info is not None and info.started_by != "drumline" and info.world_size > 1:
        listen = _choose_network(info, recipe)
    raise_descriptor_limit()
    device_type = resolve_device_type(recipe.run.device)
    return init_world(info, device_type, recipe.parallel.backend, recipe.parallel.timeout, listen)


def call(
    job: str,
    recipe: Recipe,
    world: World,
    options: Mapping[str, Any] = NO_OPTIONS,
    given: Collection[str] = (),
) -> Any:
    """Calls the function of a job. A restart continues in the run folder that the first start has claimed."""
    if name := claimed():
        mode = world.broadcast_object(restart_resume(recipe, name) if world.is_rank_zero else "")
        recipe = restart_recipe(recipe, name, mode)
    from drumline.training.model import resolve_model

    decided = world.broadcast_object(
        resolve_model(recipe, images=job != "eval", given=given) if world.is_rank_zero else {}
    )
    recipe = with_values(recipe, decided)
    module, function = JOBS[job].split(":")
    return getattr(importlib.import_module(module), function)(recipe, world, **options)


def _publish(result: dict[str, Any]) -> None:
    """Writes the result for the launcher if it asks for it, prints it otherwise."""
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json_line(result))
    else:
        print_result(result)


def _exit(code: int) -> NoReturn:
    """Ends a rank without shutting down the interpreter: gloo's threads outlive their group, and one that needs
    Python then aborts the process (rare; seen with torch 2.13), which would count as a loss."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _ignore_stops() -> None:
    """A stop request that comes now has nothing left to stop, and must not change the exit code of a finished run.
    The launcher still kills at a second request."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _choose_network(info: RankInfo, recipe: Recipe) -> str:
    """Chooses the network interface, as our launcher would, for processes that another launcher started. Returns the
    address to listen at."""
    machines = 2 if info.world_size > info.local_size else 1
    interface = choose_interface(recipe.parallel.interface, info.master_addr, machines=machines)
    variables, lines = socket_variables(interface, os.environ, forced=recipe.parallel.interface != "auto")
    os.environ.update(variables)
    if recipe.parallel.processes not in ("auto", info.local_size):
        lines.append(
            f"parallel.processes = {recipe.parallel.processes} is ignored: {info.started_by} started "
            f"{info.local_size} here"
        )
    if info.rank == 0:
        for line in (f"network interface {interface}", *lines):
            say(line)
        return listening_address(info.master_addr, interface)
    return interface.address


def _fail(error: BaseException, rank: int, world: World) -> NoReturn:
    """Ends a failed rank: prints the error unless the launcher will, and does not wait for threads that may hang."""
    error = explained(error)
    code = error.exit_code if isinstance(error, UserError) else 1
    if not record_failure(error, rank) and world.claim_failure():
        text = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
        print(message(f"drumline: rank {rank}: {text}"), file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def explained(error: BaseException) -> BaseException:
    """A timeout of torch while waiting for other ranks, as an error that does not blame the rank that waited."""
    if isinstance(error, torch.distributed.DistError | RuntimeError) and "timed out" in str(error).lower():
        return LostError(
            f"timed out waiting for the other ranks ({str(error).strip().splitlines()[0]})",
            "a rank hangs or is far slower than this one: see what each process does (py-spy dump --pid PID), or "
            "raise --parallel.timeout",
            code=PEER_LOST,
        )
    return error

"""Starts this machine's worker processes on torch's elastic launcher, watches them, and says how they ended.

Promises: workers are given arguments and environment, nothing else; a stop request reaches each worker once
and leaves it time to save; one failing rank ends the run within seconds, on every machine, with the cause
shown once; no worker outlives the launcher. Refuses to guess: what cannot meet is a `UserError`.

Exit codes: 0 when every worker ended with 0; 2 after a user's mistake, 1 after any other failure. After a
stop request the workers' own code is passed on (0 when they saved and left with 0); workers that had to be
killed give 128 + the signal, as a shell would.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drumline.errors import UserError
from drumline.launch.environment import LAUNCHER
from drumline.launch.failure import FILE
from drumline.launch.machine import raise_descriptor_limit
from drumline.launch.network import Interface, choose_interface, is_this_machine, socket_variables
from drumline.launch.rendezvous import Rendezvous, parameters, parse_rendezvous, variables_missing
from drumline.launch.watch import GRACE_SECONDS, Watch, signals_end_us
from drumline.recipe import Parallel


def launch(
    command: Sequence[str],
    parallel: Parallel,
    processes: int,
    announce: Callable[[str], None],
    *,
    threads: int,
    grace: float = GRACE_SECONDS,
) -> int:
    """Runs `processes` copies of `command` here, as this machine's part of the run, and gives the exit code.

    `threads` becomes OMP_NUM_THREADS unless the user has set it. `grace` is how long workers may take to save
    after a stop request. `announce` is given each line meant for the user. Main thread only: it takes over
    SIGINT, SIGTERM and SIGHUP until it returns.
    """
    rendezvous = _meeting_place(parallel)
    several = parallel.nodes > 1
    interface = choose_interface(parallel.interface, rendezvous.host or None, machines=parallel.nodes)
    sockets, notes = socket_variables(interface, os.environ, forced=parallel.interface != "auto")
    # What torch's native code warns of (a peer that is gone, a name that does not resolve) comes as an error too.
    defaults = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables = defaults | dict(os.environ) | sockets | {LAUNCHER: str(os.getpid())}
    raise_descriptor_limit()
    for note in notes:
        announce(note)
    announce(f"{processes} process{'es' * (processes > 1)} here, network interface {interface}")
    if several:
        announce(f"waiting for {parallel.nodes} machines at {rendezvous}")
    errors = _ErrorFiles()
    with _environment(variables), _quiet_torch(), contextlib.closing(errors), signals_end_us():
        handler, hosts_store = _meet(rendezvous, parallel, interface)
        spec = WorkerSpec(
            role="drumline",
            local_world_size=processes,
            entrypoint=command[0],
            # torch's launcher expands $-macros in arguments; ours are meant as they are.
            args=tuple(argument.replace("$", "$$") for argument in command[1:]),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=0.5 if rendezvous.kind == "file" else 0.1,
            local_addr=interface.address,
        )
        if handler.get_backend() == "static":
            spec.master_addr, spec.master_port = rendezvous.host, rendezvous.port
        host = f"{socket.gethostname()} ({interface.address})" if several else ""
        watch = Watch(spec, errors, announce=announce, grace=grace, host=host)
        try:
            return watch.finish()
        except (RendezvousError, DistError) as error:
            raise _did_not_meet(rendezvous, parallel, error) from error
        finally:
            handler.shutdown()
            if watch.leave(hosts_store) and rendezvous.kind == "file":
                Path(rendezvous.path).unlink(missing_ok=True)


def _meeting_place(parallel: Parallel) -> Rendezvous:
    """The rendezvous of the recipe, refused where a launcher has no use for it."""
    rendezvous = parse_rendezvous(parallel.rendezvous)
    if rendezvous.kind == "env":
        raise variables_missing()
    if rendezvous.kind == "tcp" and parallel.nodes == 1 and not is_this_machine(rendezvous.host):
        raise UserError(
            f"parallel.rendezvous = {rendezvous} is another machine, but parallel.nodes is 1",
            "add --parallel.nodes N, the same on each machine",
        )
    return rendezvous


def _meet(rendezvous: Rendezvous, parallel: Parallel, interface: Interface) -> tuple[RendezvousHandler, bool]:
    """Opens the meeting place: hosts the store where that is ours to do, joins it otherwise. Gives which."""
    node_rank = None if parallel.node_rank == "auto" else parallel.node_rank
    if rendezvous.kind == "tcp" and node_rank is None:
        ours = is_this_machine(rendezvous.host)
    else:
        ours = rendezvous.kind == "local" or (rendezvous.kind == "tcp" and node_rank == 0)
    # Two launchers on one machine both find the address theirs; the one that comes second joins the first.
    for is_host in (True, False) if ours and parallel.nodes > 1 else (ours,):
        try:
            handler = get_rendezvous_handler(
                parameters(
                    rendezvous,
                    nodes=parallel.nodes,
                    node_rank=node_rank,
                    address=interface.address,
                    is_host=is_host,
                    timeout=parallel.timeout,
                )
            )
            return handler, is_host
        except (RendezvousConnectionError, DistError) as error:
            failure = error
    raise _did_not_meet(rendezvous, parallel, failure) from failure


def _did_not_meet(rendezvous: Rendezvous, parallel: Parallel, error: Exception) -> UserError:
    """A rendezvous that failed, in the user's terms."""
    if isinstance(error, RendezvousClosedError):
        fix = (
            f"delete {rendezvous.path} or give another"
            if rendezvous.kind == "file"
            else "start all machines again"
        )
        return UserError(f"the rendezvous {rendezvous} belongs to an earlier run that has ended", fix)
    reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    if "EADDRINUSE" in reason[0]:
        return UserError(
            f"another program on this machine holds the port of {rendezvous}",
            "give another port in --parallel.rendezvous, the same on each machine",
        )
    if parallel.nodes == 1:
        return UserError(
            f"cannot open {rendezvous} for the processes to meet ({reason[0]})", "see `drumline doctor`"
        )
    return UserError(
        f"{parallel.nodes} machines did not meet at {rendezvous} within {parallel.timeout:g} s ({reason[0]})",
        "start the same command on each machine, check that the port is free and open between them, "
        "or number them with --parallel.node_rank",
    )


class _ErrorFiles(LogsSpecs):
    """Leaves the workers' output on the terminal and gives each a file for its error."""

    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="drumline-"))
        files = {local_rank: str(self._folder / f"{local_rank}.json") for local_rank in envs}
        for local_rank, env in envs.items():
            env[FILE] = files[local_rank]
        return LogsDest(stdouts=dict.fromkeys(envs, ""), stderrs=dict.fromkeys(envs, ""), error_files=files)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment that workers inherit, for the duration."""
    before = dict(os.environ)
    os.environ.update(variables)
    # We handle signals ourselves; torch would turn the first one into an exception.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keeps the elastic launcher's log lines off the terminal: we say what happened, once. Setting LOGLEVEL
    brings them back."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torchelastic-events-null")]
    before = [logger.propagate for logger in loggers]
    quiet = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(quiet)
        logger.propagate = "LOGLEVEL" in os.environ
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(quiet)

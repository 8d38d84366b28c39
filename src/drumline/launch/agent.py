"""Starts this machine's worker processes on torch's elastic launcher, watches them, and says how they ended.

Promises: workers are given arguments and environment, nothing else; a stop request reaches each worker once
and leaves it time to save; one failing rank restarts the run or ends it within seconds, on every machine, with the
cause shown once; no worker outlives the launcher. Refuses to guess: what cannot meet is a `UserError`.

Exit codes: 0 when every worker ended with 0; 2 after a user's mistake, 1 after any other failure. After a
stop request the workers' own code is passed on (0 when they saved and left with 0); workers that had to be
killed give 128 + the signal, as a shell would.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch.distributed import DistError, FileStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from drumline.errors import UserError
from drumline.launch.environment import LAUNCHER
from drumline.launch.handout import Handout
from drumline.launch.hang import Limits
from drumline.launch.listen import host_store, reach_store
from drumline.launch.machine import raise_descriptor_limit
from drumline.launch.meeting import Meeting, Numbered
from drumline.launch.network import (
    Interface,
    choose_interface,
    is_this_machine,
    listening_address,
    socket_variables,
)
from drumline.launch.rendezvous import Rendezvous, parse_rendezvous, run_id, variables_missing
from drumline.launch.watch import GRACE_SECONDS, Care, Watch, signals_end_us
from drumline.observe.story import LauncherNotes
from drumline.recipe import Launch, Parallel

KEEP_ALIVE = 3
"""Seconds between two signs of life in torch's rendezvous, which drops a machine after three that did not come."""

FILE_PACE = 5
"""The same, and between two of our own, where machines meet at a file."""


def launch(
    command: Sequence[str],
    parallel: Parallel,
    processes: int,
    announce: Callable[[str], None],
    *,
    threads: int,
    care: Launch | None = None,
    grace: float = GRACE_SECONDS,
    run_dir: str = "",
) -> int:
    """Runs `processes` copies of `command` here, as this machine's part of the run, and gives the exit code.

    `care` says how they are watched over (None: neither restarts nor a limit of silence). `threads` becomes
    OMP_NUM_THREADS unless the user has set it. `grace` is how long workers may take to save after a stop request.
    `announce` is given each line meant for the user; what happens to the workers is also written to log.txt of their
    run folder below `run_dir`. Main thread only: it takes over SIGINT, SIGTERM and SIGHUP until it returns.
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
    care = care or Launch(hang=0.0)
    least = parallel.nodes if care.min_nodes == "auto" else min(care.min_nodes, parallel.nodes)
    handout = Handout()
    record = LauncherNotes(announce, lambda: _run_folder(run_dir, handout.claim.read()))
    with _environment(variables), _quiet_torch(), contextlib.closing(handout), signals_end_us():
        try:
            handler, hosts_store = _meet(rendezvous, parallel, interface, least)
        except (RendezvousError, DistError, OSError) as error:
            raise _did_not_meet(rendezvous, parallel, error) from error
        spec = WorkerSpec(
            role="drumline",
            local_world_size=processes,
            entrypoint=command[0],
            # torch's launcher expands $-macros in arguments; ours are meant as they are.
            args=tuple(argument.replace("$", "$$") for argument in command[1:]),
            rdzv_handler=handler,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=interface.address,
        )
        host = f"{socket.gethostname()} ({interface.address})" if several else ""
        watch = Watch(
            spec,
            handout,
            announce=record,
            grace=grace,
            host=host,
            care=Care(
                restarts=care.restarts,
                limits=Limits(care.hang, parallel.timeout),
                pace=FILE_PACE if rendezvous.kind == "file" else 1.0,
            ),
        )
        if isinstance(handler, Meeting):
            handler.on_wait = lambda: announce(
                "the run is under way without this machine: it joins at the next restart"
            )
        try:
            return watch.finish()
        except (RendezvousError, DistError) as error:
            raise _did_not_meet(rendezvous, parallel, error) from error
        finally:
            handler.shutdown()
            if watch.leave(hosts_store) and rendezvous.kind == "file":
                Path(rendezvous.path).unlink(missing_ok=True)


def _run_folder(run_dir: str, name: str) -> Path | None:
    """The folder that the workers write to; None as long as they have none."""
    return Path(run_dir) / name if run_dir and name else None


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


def _meet(
    rendezvous: Rendezvous, parallel: Parallel, interface: Interface, least: int
) -> tuple[RendezvousHandler, bool]:
    """Opens the meeting place: keeps the store where that is ours to do, reaches it otherwise. Gives which."""
    node_rank = None if parallel.node_rank == "auto" or parallel.nodes == 1 else parallel.node_rank
    name, timeout = run_id(rendezvous), parallel.timeout
    if rendezvous.kind == "file":
        if node_rank is not None:
            raise UserError(
                f"parallel.node_rank = {node_rank} needs HOST:PORT; a file numbers the machines by itself",
                "leave parallel.node_rank at auto, or meet at HOST:PORT",
            )
        return _meeting(FileStore(rendezvous.path), name, parallel, interface, least), False
    if rendezvous.kind == "local":
        return _meeting(host_store(interface.address, 0, timeout), name, parallel, interface, least), True
    host, port = rendezvous.host, rendezvous.port
    if node_rank is not None:
        keeps, clients = node_rank == 0, parallel.nodes

        def numbered_store() -> TCPStore:
            if keeps:
                return host_store(listening_address(host, interface), port, timeout, clients=clients)
            return reach_store(host, port, timeout, clients=clients)

        return Numbered(numbered_store, name, node_rank, parallel.nodes), keeps
    try:
        if is_this_machine(host):
            store = host_store(listening_address(host, interface), port, timeout)
            return _meeting(store, name, parallel, interface, least), True
    except OSError as error:
        # Two launchers on one machine both find the address theirs; the one that comes second joins the first.
        if error.errno != errno.EADDRINUSE or parallel.nodes == 1:
            raise
    return _meeting(reach_store(host, port, timeout), name, parallel, interface, least), False


def _meeting(store: Store, name: str, parallel: Parallel, interface: Interface, least: int) -> Meeting:
    return Meeting.at(
        store,
        name,
        interface.address,
        nodes=parallel.nodes,
        least=least,
        timeout=parallel.timeout,
        # A file store keeps all that was ever written to it.
        keep_alive=FILE_PACE if isinstance(store, FileStore) else KEEP_ALIVE,
    )


def _did_not_meet(rendezvous: Rendezvous, parallel: Parallel, error: Exception) -> UserError:
    """A rendezvous that failed, in the user's terms."""
    if isinstance(error, RendezvousClosedError):
        fix = (
            f"delete {rendezvous.path} or give another"
            if rendezvous.kind == "file"
            else "start all machines again"
        )
        return UserError(f"the rendezvous {rendezvous} belongs to an earlier run that has ended", fix)
    inner = error.__cause__ or error
    reason = str(inner).strip().splitlines() or [type(inner).__name__]
    if isinstance(inner, OSError) and inner.errno == errno.EADDRINUSE:
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

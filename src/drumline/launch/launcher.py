"""Launches this machine's workers: chooses the network interface, opens the rendezvous, and runs the supervisor.

Promises: it starts the workers without importing torch; they get arguments and environment, and rank 0 the socket of
the workers' store, nothing else; a stop request reaches each worker once and leaves it
time to save; one failing rank restarts the run or ends it within seconds, on every machine, with the cause shown
once; no worker outlives the launcher. One machine needs neither network nor secret. Machines that cannot connect
raise a `UserError`.

Exit codes: 0 finished; 2 a user's mistake; 1 any other failure; 128 + the signal if a signal stopped the run and it
saved; 137 if the workers were killed before they saved.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from drumline.config.recipe import Launch, Parallel
from drumline.config.rendezvous import Rendezvous, parse_rendezvous, variables_missing
from drumline.core import lock
from drumline.core.environment import LAUNCHER
from drumline.core.errors import UserError
from drumline.core.machine import listening_socket, raise_descriptor_limit
from drumline.launch import cluster as clusters
from drumline.launch.cluster import Cluster, Contact, NotConnected, RendezvousBackend
from drumline.launch.hang import Limits
from drumline.launch.hub import Client, Hub, Server
from drumline.launch.messages import SECRET, not_a_launcher, shared_secret
from drumline.launch.network import (
    Interface,
    choose_interface,
    is_this_machine,
    listening_address,
    socket_variables,
)
from drumline.launch.nodes import Node
from drumline.launch.shared_folder import SharedFolder
from drumline.launch.supervisor import GRACE_SECONDS, Outcome, Policy, Supervisor
from drumline.launch.workers import WorkerEnvironment
from drumline.observe.run_log import METRICS
from drumline.observe.text_log import LauncherLog

LEAVE_SECONDS = 10.0
"""How long the machine with the hub waits for the others to stop their workers and leave."""


def launch(
    command: Sequence[str],
    parallel: Parallel,
    processes: int,
    say: Callable[[str], None],
    *,
    threads: int,
    supervision: Launch | None = None,
    grace: float = GRACE_SECONDS,
    run_dir: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
    returns_result: bool = False,
) -> Outcome:
    """Runs `processes` copies of `command` here, as this machine's part of the run.

    `supervision` sets restarts and how long a worker may be silent (None: neither). `threads` becomes OMP_NUM_THREADS
    unless the user has set it. `grace` is how long workers may take to save after a stop request. `say` gets each
    line for the user; lines about the workers are also written to log.txt of their run folder below `run_dir`.
    `variables` are added to the environment of the workers. `returns_result`: rank 0's result is part of the outcome
    instead of being printed. In the main thread, handles SIGINT, SIGTERM and SIGHUP until it returns; in other
    threads it cannot.
    """
    rendezvous = _rendezvous(parallel)
    interface = choose_interface(parallel.interface, rendezvous.host or None, machines=parallel.nodes)
    sockets, lines = socket_variables(interface, os.environ, forced=parallel.interface != "auto")
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # Warnings of torch's native code (a lost peer, a name that does not resolve) also come as errors.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    common = defaults | dict(os.environ) | dict(variables) | sockets | {LAUNCHER: str(os.getpid())}
    common.pop(SECRET, None)  # workers do not need it
    raise_descriptor_limit()
    for line in (*lines, f"{processes} process{'es' * (processes > 1)} here, network interface {interface}"):
        say(line)
    supervision = supervision or Launch(hang=0.0)
    with contextlib.ExitStack() as cleanup:
        store = cleanup.enter_context(_store_socket(rendezvous, interface, parallel))
        environment = cleanup.enter_context(contextlib.closing(WorkerEnvironment(store, returns_result)))
        log = LauncherLog(say, lambda: _run_folder(run_dir, environment.claim.read()))
        cleanup.callback(log.close)
        host = f"{socket.gethostname()} ({interface.address})" if parallel.nodes > 1 else ""
        if parallel.nodes > 1:
            say(f"waiting for {parallel.nodes} machines at {rendezvous}")
        backend = _backend(rendezvous, parallel, supervision, interface)
        cleanup.callback(backend.close)
        limit, pace = _silence(rendezvous, parallel.nodes)
        node = _node(parallel, processes, host, interface.address, store)
        cluster = Cluster(Contact(backend, node, rendezvous=str(rendezvous), limit=limit, pace=pace), host)
        cleanup.callback(_leave, cluster, backend)
        supervisor = Supervisor(
            command,
            common,
            environment,
            cluster,
            log=log,
            host=host,
            policy=Policy(supervision.restarts, Limits(supervision.hang, parallel.timeout), grace),
        )
        try:
            outcome = replace(supervisor.run(), result=environment.result())
        except NotConnected as error:
            raise _not_connected(rendezvous, parallel, error) from error
        folder = _run_folder(run_dir, environment.claim.read())
    if outcome.exit_code and folder is not None and log.writes:
        _write_page(folder, log.start, say)
    return outcome


def _write_page(folder: Path, start: tuple[str, int], say: Callable[[str], None]) -> None:
    """The page of a run whose workers could not write it to the end."""
    if lock.is_held(folder) or lock.is_past(folder, *start) or not (folder / METRICS).exists():
        return
    try:
        from drumline.report.page import write_page  # most runs end without it

        write_page(folder)
    except Exception as error:
        say(f"WARNING: the report of {folder} is not written ({type(error).__name__}: {error})")


def _node(parallel: Parallel, processes: int, host: str, address: str, store: socket.socket) -> Node:
    """What this launcher reports about itself at first."""
    return Node(
        id=secrets.token_hex(16),
        host=host,
        address=address,
        pid=os.getpid(),
        nodes=parallel.nodes,
        processes=processes,
        port=int(store.getsockname()[1]),
        number=-1 if parallel.node_rank == "auto" else parallel.node_rank,
        launch_id=secrets.token_hex(16),
    )


def _run_folder(run_dir: str, name: str) -> Path | None:
    """The folder that the workers write to; None as long as they have none."""
    return Path(run_dir) / name if run_dir and name else None


def _rendezvous(parallel: Parallel) -> Rendezvous:
    """The rendezvous of the recipe. Rejects one that a launcher cannot use."""
    rendezvous = parse_rendezvous(parallel.rendezvous)
    if rendezvous.kind == "env":
        raise variables_missing()
    if rendezvous.kind == "tcp" and parallel.nodes == 1 and not is_this_machine(rendezvous.host):
        raise UserError(
            f"parallel.rendezvous = {rendezvous} is another machine, but parallel.nodes is 1",
            "add --parallel.nodes N, the same on each machine",
        )
    return rendezvous


def _store_socket(rendezvous: Rendezvous, interface: Interface, parallel: Parallel) -> socket.socket:
    """The socket of the workers' store, used if this is the first machine. A run on one machine has it at the given
    port."""
    address, port = interface.address, 0
    if rendezvous.kind == "tcp" and parallel.nodes == 1:
        address, port = listening_address(rendezvous.host, interface), rendezvous.port
    try:
        return listening_socket(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(rendezvous) from error
        raise UserError(
            f"cannot open a port on {interface} for the workers' store ({error.strerror or error})",
            "see `drumline doctor`",
        ) from error


def _backend(
    rendezvous: Rendezvous, parallel: Parallel, supervision: Launch, interface: Interface
) -> Hub | Client | SharedFolder:
    """Opens the rendezvous: hosts the hub if this machine is the first, connects to it otherwise."""
    if parallel.nodes == 1:
        return Hub(1, 1, math.inf)
    wanted = supervision.min_nodes
    least = parallel.nodes if wanted == "auto" else min(wanted, parallel.nodes)
    limit, _ = _silence(rendezvous, parallel.nodes)
    if rendezvous.kind == "local":
        raise UserError(
            f"parallel.nodes = {parallel.nodes} needs parallel.rendezvous",
            "add --parallel.rendezvous HOST:PORT, the same on each machine",
        )
    secret = shared_secret(os.environ)
    if rendezvous.kind == "file":
        if parallel.node_rank != "auto":
            raise UserError(
                f"parallel.node_rank = {parallel.node_rank} needs HOST:PORT: a file numbers the machines itself",
                "leave parallel.node_rank at auto, or set parallel.rendezvous to HOST:PORT",
            )
        return SharedFolder(rendezvous.path, secret, parallel.nodes, least, limit)
    host, port, numbered = rendezvous.host, rendezvous.port, parallel.node_rank != "auto"
    if parallel.node_rank == 0 or (not numbered and is_this_machine(host)):
        try:
            address = listening_address(host, interface)
            return Server(parallel.nodes, least, limit, secret, address, port)
        except OSError as error:
            # For two launchers on one machine the address is local to both; the second connects to the first.
            if numbered or error.errno != errno.EADDRINUSE:
                raise _port_taken(rendezvous, error) from error
    return Client(host, port, str(rendezvous), secret)


def _silence(rendezvous: Rendezvous, nodes: int) -> tuple[float, float]:
    """The silence that counts as a loss, and the time between two exchanges: longer for many machines, whose replies
    are longer too."""
    if nodes == 1:
        return math.inf, clusters.FILE_PACE
    if rendezvous.kind == "file":
        return clusters.FILE_SILENT_SECONDS, clusters.FILE_PACE
    pace = min(max(clusters.PACE, nodes / 32), 2.0)
    return max(clusters.SILENT_SECONDS, 5 * pace), pace


def _leave(cluster: Cluster, backend: RendezvousBackend) -> None:
    """Leaves the run. The machine with the hub waits for the others to leave first."""
    cluster.leave()
    if isinstance(backend, Hub):
        deadline = time.monotonic() + LEAVE_SECONDS
        while backend.still_here() and time.monotonic() < deadline:
            time.sleep(0.05)


def _port_taken(rendezvous: Rendezvous, error: OSError | None = None) -> UserError:
    if error is not None and error.errno != errno.EADDRINUSE:
        return UserError(
            f"cannot listen at {rendezvous} ({error.strerror or error})",
            "give an address of machine 0 in --parallel.rendezvous, the same on each machine",
        )
    return UserError(
        f"another program on this machine uses the port of {rendezvous}",
        "give a different port in --parallel.rendezvous, the same on each machine",
        code="port-in-use",
    )


def _not_connected(rendezvous: Rendezvous, parallel: Parallel, error: NotConnected) -> UserError:
    """A rendezvous that failed, in the user's terms."""
    if error.code == "ended":
        return UserError(f"the run at {rendezvous} has ended", "start all machines again")
    if error.code == "not-a-launcher":
        return not_a_launcher(str(rendezvous), str(error))
    return UserError(
        f"{parallel.nodes} machines did not connect to {rendezvous} within {parallel.timeout:g} s ({error})",
        "start the same command on each machine, check that the port is free and open between them, "
        "or number them with --parallel.node_rank",
        code="rendezvous-timeout",
    )

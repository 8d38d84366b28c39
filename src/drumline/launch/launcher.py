"""Starts this machine's part of a run: chooses the network interface, meets the other machines' launchers, and hands
over to `watch.py`.

Promises: workers are given arguments and environment, nothing else; a stop request reaches each worker once
and leaves it time to save; one failing rank restarts the run or ends it within seconds, on every machine, with the
cause shown once; no worker outlives the launcher. One machine needs neither network nor secret. Machines that cannot
meet get a `UserError`.

Exit codes: 0 when every worker ended with 0; 2 after a user's mistake, 1 after any other failure. After a
stop request the workers' own code is passed on (0 when they saved and left with 0); workers that had to be
killed give 128 + the signal, as a shell would.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import DistError, TCPStore

from drumline.config.recipe import Launch, Parallel
from drumline.config.rendezvous import Rendezvous, parse_rendezvous, variables_missing
from drumline.core.environment import LAUNCHER
from drumline.core.errors import UserError
from drumline.core.listen import host_store
from drumline.core.machine import raise_descriptor_limit
from drumline.launch import contact as contacts
from drumline.launch.contact import Contact, Transport
from drumline.launch.hang import Limits
from drumline.launch.hub import Client, Hub, Server
from drumline.launch.joining import OVER, NotMet
from drumline.launch.network import (
    Interface,
    choose_interface,
    is_this_machine,
    listening_address,
    socket_variables,
)
from drumline.launch.nodes import Member, Round
from drumline.launch.secret import VARIABLE as SECRET
from drumline.launch.secret import shared_secret
from drumline.launch.shared_folder import SharedFolder
from drumline.launch.signed import not_a_launcher
from drumline.launch.supervisor import GRACE_SECONDS, Care, Watch
from drumline.launch.worker_environment import Handout
from drumline.observe.text_log import LauncherLog

LEAVE_SECONDS = 10.0
"""How long the machine with the hub waits for the others to stop their workers and take leave."""


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
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # What torch's native code warns of (a peer that is gone, a name that does not resolve) comes as an error too.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    variables = defaults | dict(os.environ) | sockets | {LAUNCHER: str(os.getpid())}
    variables.pop(SECRET, None)  # workers have no use for it
    raise_descriptor_limit()
    for note in notes:
        announce(note)
    announce(f"{processes} process{'es' * (processes > 1)} here, network interface {interface}")
    care = care or Launch(hang=0.0)
    store = _workers_store(rendezvous, interface, parallel)
    host = f"{socket.gethostname()} ({interface.address})" if several else ""
    launch_id = secrets.token_hex(16)
    alone = Round(1, launch_id, 0, "", (launch_id,), (processes,), interface.address, store.port)
    contact: Contact | None = None
    with contextlib.ExitStack() as cleanup:
        handout = cleanup.enter_context(contextlib.closing(Handout()))
        record = LauncherLog(announce, lambda: _run_folder(run_dir, handout.claim.read()))
        cleanup.callback(record.close)
        if several:
            announce(f"waiting for {parallel.nodes} machines at {rendezvous}")
            transport = _transport(rendezvous, parallel, care, interface)
            cleanup.callback(transport.close)
            member = Member(
                id=secrets.token_hex(16),
                host=host,
                address=interface.address,
                pid=os.getpid(),
                nodes=parallel.nodes,
                processes=processes,
                port=store.port,
                number=-1 if parallel.node_rank == "auto" else parallel.node_rank,
                launch_id=launch_id,
            )
            limit, pace = _silence(rendezvous, parallel.nodes)
            contact = Contact(transport, member, place=str(rendezvous), limit=limit, pace=pace)
            cleanup.callback(_leave, contact, transport)
        watch = Watch(
            command,
            processes,
            variables,
            handout,
            alone=alone,
            contact=contact,
            announce=record,
            grace=grace,
            host=host,
            care=Care(restarts=care.restarts, limits=Limits(care.hang, parallel.timeout)),
        )
        try:
            return watch.finish()
        except NotMet as error:
            raise _did_not_meet(rendezvous, parallel, str(error)) from error


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


def _workers_store(rendezvous: Rendezvous, interface: Interface, parallel: Parallel) -> TCPStore:
    """The store at which the workers meet, should this be the first machine. One machine that was given a port keeps
    it there."""
    address, port = interface.address, 0
    if rendezvous.kind == "tcp" and parallel.nodes == 1:
        address, port = listening_address(rendezvous.host, interface), rendezvous.port
    try:
        return host_store(address, port, parallel.timeout)
    except (OSError, DistError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise _port_taken(rendezvous) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot open a port on {interface} for the processes to meet ({reason[0]})",
            "see `drumline doctor`",
        ) from error


def _transport(
    rendezvous: Rendezvous, parallel: Parallel, care: Launch, interface: Interface
) -> Server | Client | SharedFolder:
    """Opens the meeting place: keeps the hub where that is ours to do, reaches it otherwise."""
    least = parallel.nodes if care.min_nodes == "auto" else min(care.min_nodes, parallel.nodes)
    limit, _ = _silence(rendezvous, parallel.nodes)
    if rendezvous.kind == "local":
        raise UserError(
            f"parallel.nodes = {parallel.nodes}, but the machines have no place to meet",
            "add --parallel.rendezvous HOST:PORT, the same on each machine",
        )
    secret = shared_secret(os.environ)
    if rendezvous.kind == "file":
        if parallel.node_rank != "auto":
            raise UserError(
                f"parallel.node_rank = {parallel.node_rank} needs HOST:PORT; a file numbers the machines by itself",
                "leave parallel.node_rank at auto, or meet at HOST:PORT",
            )
        return SharedFolder(rendezvous.path, secret, parallel.nodes, least, limit)
    host, port, numbered = rendezvous.host, rendezvous.port, parallel.node_rank != "auto"
    if parallel.node_rank == 0 or (not numbered and is_this_machine(host)):
        try:
            address = listening_address(host, interface)
            return Server(Hub(parallel.nodes, least, limit), secret, address, port)
        except OSError as error:
            # Two launchers on one machine both find the address theirs; the one that comes second joins the first.
            if numbered or error.errno != errno.EADDRINUSE:
                raise _port_taken(rendezvous, error) from error
    return Client(host, port, str(rendezvous), secret)


def _silence(rendezvous: Rendezvous, nodes: int) -> tuple[float, float]:
    """The silence that counts as a loss, and the time between two exchanges: longer for many machines, whose answers
    are longer too."""
    if rendezvous.kind == "file":
        return contacts.FILE_SILENT_SECONDS, contacts.FILE_PACE
    pace = min(max(contacts.PACE, nodes / 32), 2.0)
    return max(contacts.SILENT_SECONDS, 5 * pace), pace


def _leave(contact: Contact, transport: Transport) -> None:
    """Takes leave of the other machines. The one with the hub lets the others go first, so that they never find it
    gone."""
    contact.leave(2.0)
    if isinstance(transport, Server):
        deadline = time.monotonic() + LEAVE_SECONDS
        while transport.still_here() and time.monotonic() < deadline:
            time.sleep(0.05)


def _port_taken(rendezvous: Rendezvous, error: OSError | None = None) -> UserError:
    if error is not None and error.errno != errno.EADDRINUSE:
        return UserError(
            f"cannot listen at {rendezvous} ({error.strerror or error})",
            "give an address of machine 0 in --parallel.rendezvous, the same on each machine",
        )
    return UserError(
        f"another program on this machine holds the port of {rendezvous}",
        "give another port in --parallel.rendezvous, the same on each machine",
    )


def _did_not_meet(rendezvous: Rendezvous, parallel: Parallel, reason: str) -> UserError:
    """A rendezvous that failed, in the user's terms."""
    if reason == OVER:
        return UserError(f"the run at {rendezvous} has ended", "start all machines again")
    mark = "the program there is not a Drumline launcher: "
    if reason.startswith(mark):
        return not_a_launcher(str(rendezvous), reason.removeprefix(mark))
    return UserError(
        f"{parallel.nodes} machines did not meet at {rendezvous} within {parallel.timeout:g} s ({reason})",
        "start the same command on each machine, check that the port is free and open between them, "
        "or number them with --parallel.node_rank",
    )

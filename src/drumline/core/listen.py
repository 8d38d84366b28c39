"""The key-value stores that processes meet at, listening on one address and no other.

torch's TCPStore listens on every interface of the machine when left to itself. Promises: a store made here can be
reached through the address it was given and nowhere else; a port that somebody holds is an `OSError`.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at a numeric address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port of a run that has just ended is free again at once; one that is listened on stays refused.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def host_store(address: str, port: int, timeout: float, *, clients: int | None = None) -> TCPStore:
    """A store kept by this process at a numeric address; port 0 takes a free one. With `clients`, waits until that
    many processes (this one included) have come, as long as `timeout` seconds."""
    with listening_socket(address, port) as listener:
        port = int(listener.getsockname()[1])
        descriptor = listener.detach()
    return TCPStore(
        address,
        port,
        clients,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=clients is not None,
        master_listen_fd=descriptor,
    )


def reach_store(host: str, port: int, timeout: float, *, clients: int | None = None) -> TCPStore:
    """The store that another process keeps there."""
    return TCPStore(
        host, port, clients, False, timedelta(seconds=timeout), wait_for_workers=clients is not None
    )

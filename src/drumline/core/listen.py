"""Key-value stores for the rendezvous of processes, each listening on one address only.

By default, torch's TCPStore listens on every interface of the machine. Promises: a store created here can be reached
through the given address and no other; a port in use raises `OSError`.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at a numeric address; port 0 chooses a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port of a run that has just ended can be used at once; one with a listener is still rejected.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def host_store(address: str, port: int, timeout: float, *, clients: int | None = None) -> TCPStore:
    """A store hosted by this process at a numeric address; port 0 chooses a free one. With `clients`, waits up to
    `timeout` seconds until that many processes (including this one) have connected."""
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
    """The store that another process hosts at this address."""
    return TCPStore(
        host, port, clients, False, timedelta(seconds=timeout), wait_for_workers=clients is not None
    )

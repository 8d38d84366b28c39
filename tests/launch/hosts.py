"""Two hosts on one machine: network namespaces with a cable between them, and no name service.

`two_hosts()` creates them, returns for each its address and the command prefix that runs a program there, and
always removes them. `why_not()` returns what is missing if that is impossible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """How to run a program on the host, its address, and the name of its interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def why_not() -> str | None:
    """Why two hosts cannot be created here; None if they can."""
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's `ip`"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"drumline-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    entered = subprocess.run(
        ["ip", "netns", "exec", name, "true"], capture_output=True, text=True, check=False
    )
    _ip("netns", "del", name)
    return (
        None if entered.returncode == 0 else f"network namespaces cannot be entered: {entered.stderr.strip()}"
    )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """10.77.0.1 and 10.77.0.2, each with a loopback of its own, joined by a veth pair."""
    names = [f"drumline-{os.getpid()}-{letter}" for letter in "ab"]
    hosts = [
        Host(("ip", "netns", "exec", name), f"10.77.0.{i}", f"cable{i}") for i, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        first, second = hosts
        _ip("link", "add", first.interface, "netns", names[0], "type", "veth",
            "peer", "name", second.interface, "netns", names[1])  # fmt: skip
        for name, host in zip(names, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", name, "link", "set", host.interface, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut(host: Host) -> None:
    """Pulls the host's cable; it keeps its address."""
    _ip("-n", host.prefix[-1], "link", "set", host.interface, "down")


def mend(host: Host) -> None:
    """Plugs it in again."""
    _ip("-n", host.prefix[-1], "link", "set", host.interface, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

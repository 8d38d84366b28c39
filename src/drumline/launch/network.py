"""The network interface of a run.

Promises: one machine uses loopback, so it needs no network and no name service; several machines use the interface
whose route reaches the rendezvous, found without sending a packet. Rejects an interface that does not exist or has no
address, and lists those that do.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from drumline.core.errors import UserError

ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation: the route to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """A network interface and the address at which others reach it; empty if it has none."""

    name: str
    address: str
    up: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def loopback(self) -> bool:
        """Whether it reaches this machine only."""
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback


def interfaces() -> list[Interface]:
    """Every interface of this machine with its first address, IPv4 before IPv6."""
    states = psutil.net_if_stats()
    return [
        Interface(name, next(iter(found), ""), name in states and states[name].isup)
        for name, found in _addresses().items()
    ]


def loopback() -> Interface:
    """The interface that needs no network."""
    for interface in interfaces():
        if interface.loopback and interface.up:
            return interface
    raise UserError("this machine's loopback interface is down", "bring it up: ip link set lo up")


def interface_for(host: str) -> Interface:
    """The interface that routes to `host`, with its source address. Sends nothing: connecting a UDP socket only asks
    the kernel for a route."""
    family, address = _resolve(host)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise UserError(
                f"no network interface reaches {host} ({error.strerror})",
                f"check the network, or name one with --parallel.interface ({_listing()})",
            ) from error
        ours = probe.getsockname()[0]
    states = psutil.net_if_stats()
    for name, found in _addresses().items():
        if ours in found:
            return Interface(name, ours, states[name].isup)
    raise UserError(
        f"the address {ours}, which reaches {host}, belongs to no interface",
        f"name one with --parallel.interface ({_listing()})",
    )


def choose_interface(wanted: str, rendezvous_host: str | None, *, machines: int = 1) -> Interface:
    """The interface for this run. `auto`: loopback for one machine, otherwise the one that reaches the rendezvous, or
    the default route if the rendezvous is a file."""
    if wanted != "auto":
        named = {interface.name: interface for interface in interfaces()}
        if wanted not in named or not named[wanted].address:
            state = "has no address" if wanted in named else "does not exist"
            raise UserError(
                f"parallel.interface = {wanted}: this interface {state} here", f"use {_listing()}, or auto"
            )
        if not named[wanted].up:
            raise UserError(
                f"parallel.interface = {wanted}: this interface is down", f"bring it up, or use {_listing()}"
            )
        return named[wanted]
    if machines == 1:
        return loopback()
    if not rendezvous_host:
        return _outward()
    chosen = interface_for(rendezvous_host)
    # Debian maps the machine's own name to 127.0.1.1 in its hosts file; other machines cannot reach that.
    if chosen.loopback and not _means_loopback(rendezvous_host):
        return _outward()
    return chosen


def is_this_machine(host: str) -> bool:
    """Whether `host` is one of our own addresses."""
    ours = {address for found in _addresses().values() for address in found}
    return any(address in ours or ipaddress.ip_address(address).is_loopback for _, address in _resolve(host))


def listening_address(host: str, interface: Interface) -> str:
    """The address at which other machines reach this one under the name `host`: the address of the name, or that of
    the interface if the name resolves to loopback here."""
    ours = {address for found in _addresses().values() for address in found}
    for _, address in _resolve(host):
        if address in ours and (_means_loopback(host) or not ipaddress.ip_address(address).is_loopback):
            return address
    return interface.address


def free_port(address: str) -> int:
    """A TCP port at `address` on which no program listens right now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def socket_variables(
    interface: Interface, env: Mapping[str, str], forced: bool
) -> tuple[dict[str, str], list[str]]:
    """The variables that make gloo and NCCL use this interface, and messages about them.

    A variable that the user has set is kept, unless `forced` (the recipe names the interface).
    """
    # NCCL takes a bare name as a prefix (eth1 would also match eth10); "=" asks for the exact name.
    wanted = {"GLOO_SOCKET_IFNAME": interface.name, "NCCL_SOCKET_IFNAME": f"={interface.name}"}
    variables, lines = {}, []
    for name, value in wanted.items():
        theirs = env.get(name)
        if theirs and theirs.lstrip("=") != interface.name:
            if not forced:
                lines.append(f"{name}={theirs} is set and is kept (auto would choose {interface.name})")
                continue
            lines.append(f"{name}={theirs} is set, but --parallel.interface {interface.name} overrides it")
        variables[name] = value
    return variables, lines


def _outward() -> Interface:
    """The interface of the default route, or the only one besides loopback."""
    try:
        return interface_for(ELSEWHERE)
    except UserError:
        reachable = [i for i in interfaces() if i.up and i.address and not i.loopback]
        if len(reachable) == 1:
            return reachable[0]
        raise UserError(
            "cannot tell which network interface reaches the other machines",
            f"name it with --parallel.interface ({_listing()})",
        ) from None


def _addresses() -> dict[str, list[str]]:
    """Addresses by interface name, IPv4 first, without link-local IPv6 (which needs a scope)."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        v4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
        v6 = [entry.address for entry in entries if entry.family == socket.AF_INET6]
        found[name] = v4 + [address for address in v6 if not address.startswith("fe80")]
    return found


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The numeric addresses of a host, IPv4 first."""
    try:
        answers = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except OSError as error:
        raise UserError(
            f"the host name {host!r} does not resolve here ({error.strerror})",
            "give an IP address, or add the name to the hosts file",
        ) from error
    pairs = {(family, str(where[0])) for family, _, _, _, where in answers}
    return sorted(pairs, key=lambda pair: (pair[0] != socket.AF_INET, pair[1]))


def _means_loopback(host: str) -> bool:
    """Whether the user gave a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listing() -> str:
    """The interfaces to choose from, for messages."""
    return (
        ", ".join(f"{i.name} ({i.address})" for i in interfaces() if i.address and i.up)
        or "none has an address"
    )

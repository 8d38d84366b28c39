"""Choosing the interface, on this machine's real ones and on made-up ones."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from drumline.core.errors import UserError
from drumline.launch import network
from drumline.launch.network import (
    Interface,
    choose_interface,
    free_port,
    interface_for,
    interfaces,
    is_this_machine,
    socket_variables,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """lo, eth0 with two addresses, an interface without one, and one that is down."""

    def entry(address: str) -> SimpleNamespace:
        return SimpleNamespace(address=address, family=socket.AF_INET6 if ":" in address else socket.AF_INET)

    addresses = {
        "lo": [entry("127.0.0.1"), entry("::1")],
        "eth0": [entry("fe80::1%eth0"), entry("fd00::5"), entry("10.1.0.5"), entry("10.2.0.5")],
        "bare": [],
        "off": [entry("10.3.0.5")],
    }
    states = {name: SimpleNamespace(isup=name != "off") for name in addresses}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


def test_interfaces_are_listed_with_their_first_address(machine: None) -> None:
    assert interfaces() == [
        Interface("lo", "127.0.0.1", True),
        Interface("eth0", "10.1.0.5", True),
        Interface("bare", "", True),
        Interface("off", "10.3.0.5", False),
    ]


def test_loopback_routes_over_loopback() -> None:
    assert interface_for("127.0.0.1").loopback
    assert interface_for("localhost").loopback


def test_one_machine_uses_loopback_and_needs_no_network(machine: None) -> None:
    assert choose_interface("auto", None) == Interface("lo", "127.0.0.1", True)


def test_several_machines_use_the_address_that_reaches_the_rendezvous(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _route(monkeypatch, "10.2.0.5")
    assert choose_interface("auto", "10.2.0.9", machines=2) == Interface("eth0", "10.2.0.5", True)
    assert choose_interface("auto", None, machines=2) == Interface("eth0", "10.2.0.5", True)


def test_a_name_that_means_loopback_here_is_not_offered_to_others(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_resolve", lambda host: [(socket.AF_INET, "127.0.1.1")])
    monkeypatch.setattr(network, "_outward", lambda: Interface("eth0", "10.1.0.5", True))
    _route(monkeypatch, "127.0.0.1")
    assert choose_interface("auto", "thisbox", machines=2).name == "eth0"
    assert choose_interface("auto", "127.0.0.1", machines=2).name == "lo"


def test_without_a_route_the_only_interface_outward_is_taken(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _route(monkeypatch, None)
    assert choose_interface("auto", None, machines=2).name == "eth0"
    both = [Interface("eth0", "10.1.0.5", True), Interface("eth1", "10.4.0.5", True)]
    monkeypatch.setattr(network, "interfaces", lambda: both)
    with pytest.raises(UserError, match="cannot tell which") as caught:
        choose_interface("auto", None, machines=2)
    assert "eth1 (10.4.0.5)" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "state"), [("eth7", "does not exist"), ("bare", "has no address"), ("off", "is down")]
)
def test_a_chosen_interface_that_cannot_work_is_rejected_with_a_list_of_those_that_can(
    machine: None, name: str, state: str
) -> None:
    with pytest.raises(UserError, match=f"parallel.interface = {name}: this interface {state}") as caught:
        choose_interface(name, None)
    assert "lo (127.0.0.1), eth0 (10.1.0.5)" in caught.value.fix
    assert "off" not in caught.value.fix


def test_a_forced_interface_is_taken(machine: None) -> None:
    assert choose_interface("eth0", None) == Interface("eth0", "10.1.0.5", True)


def test_our_own_addresses_are_ours(machine: None) -> None:
    assert is_this_machine("10.2.0.5")
    assert is_this_machine("127.0.0.1")
    assert is_this_machine("::1")
    assert not is_this_machine("10.2.0.6")


def test_a_host_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UserError, match="'nowhere' does not resolve"):
        interface_for("nowhere")


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port("127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_gloo_and_nccl_get_the_interface_and_the_users_own_settings_are_kept() -> None:
    eth0 = Interface("eth0", "10.1.0.5", True)
    everything = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert socket_variables(eth0, {}, forced=False) == (everything, [])
    assert socket_variables(eth0, {"NCCL_SOCKET_IFNAME": "eth0"}, forced=False) == (everything, [])
    variables, notes = socket_variables(eth0, {"NCCL_SOCKET_IFNAME": "ib0"}, forced=False)
    assert variables == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert notes == ["NCCL_SOCKET_IFNAME=ib0 is set and is kept (auto would choose eth0)"]
    variables, notes = socket_variables(eth0, {"NCCL_SOCKET_IFNAME": "ib0"}, forced=True)
    assert variables == everything
    assert "overrides it" in notes[0]


def _route(monkeypatch: pytest.MonkeyPatch, source: str | None) -> None:
    """Makes the kernel answer route questions with this source address; None: unreachable."""

    class Probe:
        def __init__(self, *arguments: object) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *arguments: object) -> None: ...

        def connect(self, where: tuple[str, int]) -> None:
            if source is None:
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            assert source is not None
            return source, 4242

    monkeypatch.setattr(network.socket, "socket", Probe)

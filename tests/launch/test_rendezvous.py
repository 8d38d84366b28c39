"""Meeting places: what is accepted, what it means to torch, what is refused."""

from __future__ import annotations

import pytest

from drumline.errors import UserError
from drumline.launch.rendezvous import Rendezvous, parameters, parse_rendezvous, run_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Rendezvous("local")),
        ("gpu5:29500", Rendezvous("tcp", "gpu5", 29500)),
        ("tcp://10.0.0.1:29500", Rendezvous("tcp", "10.0.0.1", 29500)),
        ("[::1]:29500", Rendezvous("tcp", "::1", 29500)),
        ("tcp://[fd00::2]:29500", Rendezvous("tcp", "fd00::2", 29500)),
        ("file:///shared/meet", Rendezvous("file", path="/shared/meet")),
        ("env://", Rendezvous("env")),
    ],
)
def test_every_form_is_read(text: str, expected: Rendezvous) -> None:
    assert parse_rendezvous(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu5", "the port is missing"),
        ("tcp://gpu5", "the port is missing"),
        ("gpu5:0", "not a port"),
        ("gpu5:99999", "not a port"),
        ("gpu5:http", "not a host and a port"),
        ("::1:29500", "not a host and a port"),
        ("a b:29500", "not a host and a port"),
        ("file://shared/meet", "must be absolute"),
        ("file://", "must be absolute"),
        ("env://RANK", "takes nothing"),
        ("etcd://gpu5:2379", "etcd:// is not known"),
    ],
)
def test_nonsense_is_refused_with_the_forms_that_work(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        parse_rendezvous(text)
    assert "HOST:PORT" in caught.value.fix


def test_every_machine_derives_the_same_run_id() -> None:
    same = {run_id(parse_rendezvous(text)) for text in ("GPU5:29500", "tcp://gpu5:29500", " gpu5:29500 ")}
    assert len(same) == 1
    assert run_id(parse_rendezvous("gpu5:29501")) not in same


def _parameters(text: str, nodes: int = 2, node_rank: int | None = None, is_host: bool = True) -> object:
    return parameters(
        parse_rendezvous(text),
        nodes=nodes,
        node_rank=node_rank,
        address="10.0.0.9",
        is_host=is_host,
        timeout=42.4,
    )


def test_each_form_means_one_rendezvous_of_torch() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    def facts(found: object) -> tuple[object, ...]:
        assert isinstance(found, RendezvousParameters)
        return found.backend, found.endpoint, found.min_nodes, found.max_nodes, found.config

    assert facts(_parameters("", nodes=1)) == (
        "c10d", "127.0.0.1:0", 1, 1, {"timeout": 42, "is_host": True, "join_timeout": 42, "read_timeout": 42},
    )  # fmt: skip
    assert facts(_parameters("gpu5:29500", is_host=False)) == (
        "c10d", "gpu5:29500", 2, 2, {"timeout": 42, "is_host": False, "join_timeout": 42, "read_timeout": 42},
    )  # fmt: skip
    numbered = facts(_parameters("[fd00::2]:29500", node_rank=1))
    assert numbered == ("static", "[fd00::2]:29500", 2, 2, {"timeout": 42, "rank": 1})
    assert facts(_parameters("file:///shared/meet")) == (
        "c10d", "/shared/meet", 2, 2, {"timeout": 42, "store_type": "file", "join_timeout": 42},
    )  # fmt: skip


def test_a_file_cannot_number_the_machines_as_the_user_wants() -> None:
    with pytest.raises(UserError, match=r"parallel\.node_rank = 1 needs HOST:PORT"):
        _parameters("file:///shared/meet", node_rank=1)

"""The text of parallel.rendezvous: what is accepted, what is rejected."""

from __future__ import annotations

import pytest

from drumline.config.rendezvous import Rendezvous, parse_rendezvous
from drumline.core.errors import UserError


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
        ("env://RANK", "nothing may follow"),
        ("etcd://gpu5:2379", "etcd:// is not supported"),
    ],
)
def test_other_text_is_rejected_with_the_accepted_forms(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        parse_rendezvous(text)
    assert "HOST:PORT" in caught.value.fix

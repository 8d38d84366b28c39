"""Where the machines of a run meet: the text of `parallel.rendezvous`.

Every accepted form means the same address on each machine. Addresses work without host names that resolve. Text that
could only fail later is rejected: a missing port, a relative path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from drumline.core.errors import UserError

FORMS = "HOST:PORT, tcp://HOST:PORT, [IPv6]:PORT, file:///shared/path or env://"


@dataclass(frozen=True)
class Rendezvous:
    """A parsed address. `local`: this machine alone. `env`: the environment of each process has it."""

    kind: Literal["local", "tcp", "file", "env"]
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.kind == "tcp":
            return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return {"local": "this machine", "file": f"file://{self.path}", "env": "env://"}[self.kind]


def parse_rendezvous(text: str) -> Rendezvous:
    """Parses `parallel.rendezvous`; empty means this machine alone."""
    text = text.strip()
    if not text:
        return Rendezvous("local")
    scheme, separator, rest = text.rpartition("://")
    scheme = scheme if separator else "tcp"
    if scheme == "env":
        if rest:
            raise _invalid("nothing may follow env://")
        return Rendezvous("env")
    if scheme == "file":
        if not PurePosixPath(rest).is_absolute():
            raise _invalid("the path must be absolute to be the same file on every machine")
        return Rendezvous("file", path=rest)
    if scheme != "tcp":
        raise _invalid(f"{scheme}:// is not supported")
    match = re.fullmatch(
        r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/\[\]]+))(?::(?P<port>\d{1,9}))?", rest
    )
    if match is None:
        raise _invalid("not a host and a port")
    if match["port"] is None:
        raise _invalid("the port is missing")
    if not 0 < int(match["port"]) < 65536:
        raise _invalid(f"{match['port']} is not a port between 1 and 65535")
    return Rendezvous("tcp", host=(match["v6"] or match["name"]).lower(), port=int(match["port"]))


def variables_missing() -> UserError:
    """The error for `env://` in a process without a rank in its environment."""
    return UserError(
        "parallel.rendezvous = env://, but RANK and WORLD_SIZE are not set",
        "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or give HOST:PORT",
    )


def _invalid(why: str) -> UserError:
    return UserError(why, f"use {FORMS}")

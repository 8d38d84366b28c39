"""The nodes of one run (a node is one machine's launcher) and the rounds in which they start their workers. Pure.

A round is one start of all workers. Promises: the first round waits for all machines; a later one starts with at
least `least` of them, once each machine of the previous round waits or is lost; number and generation grow with each
round. Clocks of different machines are never compared: messages say how many seconds ago something happened.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from drumline.core.environment import GENERATION, LAUNCH_ID
from drumline.launch.failure import Failure, from_fields, plain

LAST_CALL_SECONDS = 5.0
"""How long a restart waits for more machines once it has as many as it needs."""

State = Literal["waiting", "running", "done", "restarting", "left"]


@dataclass(frozen=True)
class Node:
    """What a launcher reports about itself. `failure` is why it stopped the workers of its round."""

    id: str
    host: str
    address: str
    pid: int
    nodes: int
    processes: int
    port: int
    """Of the workers' store that this machine hosts if it becomes the first."""
    number: int = -1
    """`parallel.node_rank`; -1: auto."""
    state: State = "waiting"
    round: int = 0
    """The last one that it was part of."""
    launch_id: str = ""
    restarts: int = 0
    folder: str = ""
    step: int = 0
    busy: bool = False
    clock: float = 0.0
    """Its wall clock at the time of the report; shown to the user, never used."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Round:
    """One start of the workers: the machines that are part of it, in order, the number of processes of each, and the
    address of the workers' store."""

    number: int
    launch_id: str
    generation: int
    folder: str
    ids: tuple[str, ...]
    processes: tuple[int, ...]
    address: str
    port: int


@dataclass(frozen=True)
class Heard:
    """The last report of a launcher: how many seconds ago it came, and by how much the sender's clock is ahead of the
    receiver's. Not `fresh`: it has not reported since the receiver started to listen."""

    node: Node
    silent: float
    ahead: float = 0.0
    fresh: bool = True


def next_round(
    heard: Mapping[str, Heard], last: Round | None, *, nodes: int, least: int, limit: float, stable: float
) -> Round | None:
    """The round that can begin now, or None. `limit` is the silence after which a launcher counts as lost; `stable`
    is how long the same machines have been waiting."""
    live = {name: each.node for name, each in heard.items() if is_live(each, limit)}
    waiting = [m for m in live.values() if m.state == "waiting" and m.nodes == nodes]
    previous, number = (last.ids, last.number) if last is not None else ((), 0)
    for name in previous:
        if name in live and (live[name].state != "waiting" or live[name].round < number):
            return None  # is part of it, or about to be
        if name in heard and name not in live and heard[name].silent <= limit:
            return None  # too early to count it as lost
    again = [node for node in waiting if node.round > 0]
    chosen = _choose(waiting, nodes)
    complete = len(chosen) == nodes
    if not complete and not (again and len(chosen) >= least and stable >= LAST_CALL_SECONDS):
        return None
    if any(node.number >= 0 for node in chosen) and not complete:
        return None
    senior = max(again, key=lambda node: node.restarts, default=chosen[0])
    generation = max(node.restarts for node in chosen)
    if last is not None and last.launch_id == senior.launch_id:
        generation = max(generation, last.generation + 1)
    return Round(
        number=max(number, *(node.round for node in chosen)) + 1,
        launch_id=senior.launch_id,
        generation=generation,
        folder=senior.folder or next((node.folder for node in again if node.folder), ""),
        ids=tuple(node.id for node in chosen),
        processes=tuple(node.processes for node in chosen),
        address=chosen[0].address,
        port=chosen[0].port,
    )


def is_live(heard: Heard, limit: float) -> bool:
    """Whether the launcher is running, in any state."""
    return heard.fresh and heard.silent <= limit and heard.node.state != "left"


def candidates(heard: Mapping[str, Heard], limit: float) -> frozenset[str]:
    """Launchers that wait for a round."""
    return frozenset(
        name for name, each in heard.items() if is_live(each, limit) and each.node.state == "waiting"
    )


def objection(node: Node, heard: Mapping[str, Heard]) -> str:
    """Why this launcher cannot belong to the same run as the live ones; empty if it can."""
    for each in heard.values():
        other = each.node
        if other.id == node.id or not each.fresh or each.silent > 1.0 or other.state == "left":
            continue
        if other.nodes != node.nodes:
            return f"parallel.nodes is {node.nodes} here and {other.nodes} on {other.host}"
        if (other.number < 0) != (node.number < 0):
            return "parallel.node_rank is set on some machines only"
        if other.number == node.number >= 0:
            return f"parallel.node_rank = {node.number} here and on {other.host}"
    return ""


def ranks_of(round: Round, node: str) -> tuple[int, range, int]:
    """The number of this machine in a round, the ranks of its workers, and the world size."""
    index = round.ids.index(node)
    first = sum(round.processes[:index])
    return index, range(first, first + round.processes[index]), sum(round.processes)


def worker_variables(
    round: Round, index: int, ranks: Sequence[int], world: int, restarts: int
) -> list[dict[str, str]]:
    """The variables of each worker of machine `index`: those of torch's own launcher, and ours."""
    common = {
        LAUNCH_ID: round.launch_id,
        GENERATION: str(round.generation),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(index),
        "GROUP_WORLD_SIZE": str(len(round.ids)),
        "ROLE_NAME": "drumline",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": round.address,
        "MASTER_PORT": str(round.port),
        # torch's own rendezvous, in a worker that calls it, uses this to separate the keys of each start.
        "TORCHELASTIC_RESTART_COUNT": str(round.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": round.launch_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        common | {"RANK": str(rank), "LOCAL_RANK": str(local), "ROLE_RANK": str(rank)}
        for local, rank in enumerate(ranks)
    ]


def _choose(waiting: list[Node], nodes: int) -> list[Node]:
    """The nodes of the round, in order. If there are too many, those of the previous round come first."""
    if any(node.number >= 0 for node in waiting):
        numbered = {node.number: node for node in waiting if node.number >= 0}
        return [numbered[number] for number in sorted(numbered) if number < nodes]
    kept = sorted(waiting, key=lambda node: (-node.round, _order(node)))[:nodes]
    return sorted(kept, key=_order)


def _order(node: Node) -> tuple[int, int, int, str]:
    """Machines are numbered by address, launchers of one machine by process id."""
    address = ipaddress.ip_address(node.address)
    return address.version, int(address), node.pid, node.id


# As JSON.


def node_to_fields(node: Node, now: float) -> dict[str, Any]:
    """For a message: the failure's time becomes the seconds since then, by the clock that `now` is from."""
    failure = node.failure
    ago = None if failure is None else asdict(replace(failure, time=now - failure.time))
    return asdict(replace(node, failure=None)) | {"failure": ago}


def node_from_fields(content: object, now: float) -> Node:
    """A received message. Raises `ValueError` unless each field has its type and a valid value. Strips terminal
    control characters and truncates long text."""
    found = _checked(Node, content, {"failure": None})
    if not (_is_id(found["id"]) and _is_id(found["launch_id"]) and _is_name(found["folder"])):
        raise ValueError("a node with an invalid name")
    if found["state"] not in get_args(State) or not 0 < found["port"] < 65536 or found["processes"] < 1:
        raise ValueError("a node in an invalid state")
    ipaddress.ip_address(found["address"])
    failure = found["failure"]
    if failure is not None:
        failure = from_fields(failure)
        failure = replace(failure, time=now - failure.time)
    return Node(**found | {"host": plain(found["host"])[:200], "failure": failure})


def round_from_fields(content: object) -> Round:
    """The same for a round."""
    found = _checked(Round, content, {"ids": list, "processes": list})
    ids, processes = found["ids"], found["processes"]
    if not ids or len(ids) != len(processes) or not all(type(n) is int and n > 0 for n in processes):
        raise ValueError("a round without nodes")
    if not all(type(name) is str and _is_id(name) for name in [*ids, found["launch_id"]]):
        raise ValueError("a round with an invalid name")
    if not _is_name(found["folder"]) or not 0 < found["port"] < 65536:
        raise ValueError("a round with an invalid folder or port")
    ipaddress.ip_address(found["address"])
    return Round(**found | {"ids": tuple(ids), "processes": tuple(processes)})


_EXAMPLES = {
    Node: Node("", "", "", 0, 0, 0, 0),
    Round: Round(0, "", 0, "", (), (), "", 0),
}


def _checked(kind: type[Any], content: object, special: Mapping[str, type | None]) -> dict[str, Any]:
    """A dictionary with exactly the fields of this class, each of its type, or of the one in `special`; None there
    means that the caller checks it."""
    names = [field.name for field in fields(kind)]
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError("not a message of a launcher")
    for name in names:
        wanted = special.get(name, type(getattr(_EXAMPLES[kind], name)))
        if wanted is not None and type(content[name]) is not wanted:
            raise ValueError(f"{name} has the wrong type")
    return content


def _is_name(folder: str) -> bool:
    """Whether this is a plain folder name or empty: it comes from another machine and becomes part of a path."""
    return "/" not in folder and folder not in (".", "..") and plain(folder) == folder and len(folder) < 256


def _is_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None

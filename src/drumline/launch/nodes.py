"""The launchers of one run and the rounds in which they start their workers. Pure: decides, and touches nothing.

A round is one start of all workers. Promises: the first round waits for all machines; a later one goes on with at
least `least` of them, once each machine of the round before waits or is gone; number and generation rise with each
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
class Member:
    """What a launcher says of itself. `failure` holds why it stopped the workers of its round."""

    id: str
    host: str
    address: str
    pid: int
    nodes: int
    processes: int
    port: int
    """Of the store for the workers that this machine keeps, should it become the first."""
    number: int = -1
    """`parallel.node_rank`; -1: auto."""
    state: State = "waiting"
    round: int = 0
    """The last one that it took part in."""
    launch_id: str = ""
    restarts: int = 0
    folder: str = ""
    step: int = 0
    busy: bool = False
    clock: float = 0.0
    """Its wall clock when it said this; for people only."""
    failure: Failure | None = None


@dataclass(frozen=True)
class Round:
    """One start of the workers: which machines take part, in order, each with how many processes, and the address of
    the store at which the workers meet."""

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
    """What was last heard from a launcher: how long ago, and by how much its clock is ahead of that of whoever heard
    it. Not `fresh`: nothing has come from it since we listen."""

    member: Member
    silent: float
    ahead: float = 0.0
    fresh: bool = True


def next_round(
    heard: Mapping[str, Heard], last: Round | None, *, nodes: int, least: int, limit: float, settled: float
) -> Round | None:
    """The round that can begin now, or None. `limit` is the silence after which a launcher is gone; `settled`, for
    how long the same machines have been waiting."""
    live = {name: each.member for name, each in heard.items() if is_live(each, limit)}
    waiting = [m for m in live.values() if m.state == "waiting" and m.nodes == nodes]
    members_before, before = (last.ids, last.number) if last is not None else ((), 0)
    for name in members_before:
        if name in live and (live[name].state != "waiting" or live[name].round < before):
            return None  # takes part in it, or is about to
        if name in heard and name not in live and heard[name].silent <= limit:
            return None  # too early to call it gone
    again = [member for member in waiting if member.round > 0]
    chosen = _choose(waiting, nodes)
    complete = len(chosen) == nodes
    if not complete and not (again and len(chosen) >= least and settled >= LAST_CALL_SECONDS):
        return None
    if any(member.number >= 0 for member in chosen) and not complete:
        return None
    knows = max(again, key=lambda member: member.restarts, default=chosen[0])
    generation = max(member.restarts for member in chosen)
    if last is not None and last.launch_id == knows.launch_id:
        generation = max(generation, last.generation + 1)
    return Round(
        number=max(before, *(member.round for member in chosen)) + 1,
        launch_id=knows.launch_id,
        generation=generation,
        folder=knows.folder or next((member.folder for member in again if member.folder), ""),
        ids=tuple(member.id for member in chosen),
        processes=tuple(member.processes for member in chosen),
        address=chosen[0].address,
        port=chosen[0].port,
    )


def is_live(heard: Heard, limit: float) -> bool:
    """Whether the launcher takes part, in whatever state."""
    return heard.fresh and heard.silent <= limit and heard.member.state != "left"


def candidates(heard: Mapping[str, Heard], limit: float) -> frozenset[str]:
    """Launchers that wait for a round."""
    return frozenset(
        name for name, each in heard.items() if is_live(each, limit) and each.member.state == "waiting"
    )


def objection(member: Member, heard: Mapping[str, Heard]) -> str:
    """Why this launcher cannot be of the same run as the others that live; empty when it can."""
    for each in heard.values():
        other = each.member
        if other.id == member.id or not each.fresh or each.silent > 1.0 or other.state == "left":
            continue
        if other.nodes != member.nodes:
            return f"parallel.nodes is {member.nodes} here and {other.nodes} on {other.host}"
        if (other.number < 0) != (member.number < 0):
            return "parallel.node_rank is set on some machines only"
        if other.number == member.number >= 0:
            return f"parallel.node_rank = {member.number} here and on {other.host}"
    return ""


def ranks_of(round: Round, member: str) -> tuple[int, range, int]:
    """The number of this machine in a round, the ranks of its workers, and the size of the world."""
    place = round.ids.index(member)
    first = sum(round.processes[:place])
    return place, range(first, first + round.processes[place]), sum(round.processes)


def worker_variables(
    round: Round, place: int, ranks: Sequence[int], world: int, restarts: int
) -> list[dict[str, str]]:
    """What each worker of machine `place` is told: the variables of torch's own launcher, and ours."""
    common = {
        LAUNCH_ID: round.launch_id,
        GENERATION: str(round.generation),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(place),
        "GROUP_WORLD_SIZE": str(len(round.ids)),
        "ROLE_NAME": "drumline",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": round.address,
        "MASTER_PORT": str(round.port),
        # By which torch's own rendezvous, in a worker that calls it, keeps the keys of each start apart.
        "TORCHELASTIC_RESTART_COUNT": str(round.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
        "TORCHELASTIC_RUN_ID": round.launch_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return [
        common | {"RANK": str(rank), "LOCAL_RANK": str(local), "ROLE_RANK": str(rank)}
        for local, rank in enumerate(ranks)
    ]


def _choose(waiting: list[Member], nodes: int) -> list[Member]:
    """Those that take part, in order. Where there are too many, machines of the round before come first."""
    if any(member.number >= 0 for member in waiting):
        numbered = {member.number: member for member in waiting if member.number >= 0}
        return [numbered[number] for number in sorted(numbered) if number < nodes]
    kept = sorted(waiting, key=lambda member: (-member.round, _order(member)))[:nodes]
    return sorted(kept, key=_order)


def _order(member: Member) -> tuple[int, int, int, str]:
    """Machines are numbered by address, launchers of one machine by process id."""
    address = ipaddress.ip_address(member.address)
    return address.version, int(address), member.pid, member.id


# As JSON.


def member_to_fields(member: Member, now: float) -> dict[str, Any]:
    """For a message: the failure's time becomes seconds ago, by the clock that `now` is of."""
    failure = member.failure
    ago = None if failure is None else asdict(replace(failure, time=now - failure.time))
    return asdict(replace(member, failure=None)) | {"failure": ago}


def member_from_fields(content: object, now: float) -> Member:
    """What came in a message; `ValueError` unless each field has its type and a sensible value. Text is stripped of
    what a terminal would obey, and cut."""
    found = _checked(Member, content, {"failure": None})
    if not (_is_id(found["id"]) and _is_id(found["launch_id"]) and _is_name(found["folder"])):
        raise ValueError("a member with an impossible name")
    if found["state"] not in get_args(State) or not 0 < found["port"] < 65536 or found["processes"] < 1:
        raise ValueError("a member in an impossible state")
    ipaddress.ip_address(found["address"])
    failure = found["failure"]
    if failure is not None:
        failure = from_fields(failure)
        failure = replace(failure, time=now - failure.time)
    return Member(**found | {"host": plain(found["host"])[:200], "failure": failure})


def round_from_fields(content: object) -> Round:
    """The same for a round."""
    found = _checked(Round, content, {"ids": list, "processes": list})
    ids, processes = found["ids"], found["processes"]
    if not ids or len(ids) != len(processes) or not all(type(n) is int and n > 0 for n in processes):
        raise ValueError("a round of nobody")
    if not all(type(name) is str and _is_id(name) for name in [*ids, found["launch_id"]]):
        raise ValueError("a round with an impossible name")
    if not _is_name(found["folder"]) or not 0 < found["port"] < 65536:
        raise ValueError("a round in an impossible place")
    ipaddress.ip_address(found["address"])
    return Round(**found | {"ids": tuple(ids), "processes": tuple(processes)})


_EXAMPLES = {
    Member: Member("", "", "", 0, 0, 0, 0),
    Round: Round(0, "", 0, "", (), (), "", 0),
}


def _checked(kind: type[Any], content: object, special: Mapping[str, type | None]) -> dict[str, Any]:
    """A dictionary with exactly the fields of this class, each of its type; those in `special` of that one, or None
    where the caller looks for itself."""
    names = [field.name for field in fields(kind)]
    if not isinstance(content, dict) or set(content) != set(names):
        raise ValueError("not a message of ours")
    for name in names:
        wanted = special.get(name, type(getattr(_EXAMPLES[kind], name)))
        if wanted is not None and type(content[name]) is not wanted:
            raise ValueError(f"{name} is not of its type")
    return content


def _is_name(folder: str) -> bool:
    """Whether this is a plain folder name, or empty: it comes from another machine and becomes part of a path."""
    return "/" not in folder and folder not in (".", "..") and plain(folder) == folder and len(folder) < 256


def _is_id(text: str) -> bool:
    return re.fullmatch("[0-9a-f]{32}", text) is not None

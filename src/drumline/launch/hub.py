"""Where the launchers of several machines meet by HOST:PORT: one of them keeps the hub, the others connect to it.

Promises: only launchers that have the run's secret are listened to. Any other program that connects is turned away,
however many do and however slowly, and delays no launcher that has joined. Every wait has a deadline. The hub decides
rounds by its own monotonic clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass

from drumline.core.listen import listening_socket
from drumline.launch import nodes as members
from drumline.launch import signed
from drumline.launch.nodes import Heard, Member, Round, candidates, next_round, objection
from drumline.launch.secret import different_secret
from drumline.launch.signed import BadMessage, Channel, DifferentSecret, NotOurs

CALL_SECONDS = 3.0
"""Deadline of one exchange, of a connection, and of a stranger's greeting."""

IDLE_SECONDS = 60.0
"""After which a connection on which nothing comes is closed; a launcher that lives connects again."""

FORGOTTEN = 600.0
"""Seconds after which nothing is known any more of a launcher that fell silent."""

MOST_GREETING = 64
"""Connections that have not proved yet that they know the secret."""


class Unreachable(Exception):
    """No answer now; the next attempt may get one."""


@dataclass(frozen=True)
class Reply:
    """What a launcher is told: the round that counts, what was heard from each launcher, and whether the run is over.
    `strangers` have come with another secret."""

    round: Round | None
    heard: dict[str, Heard]
    over: bool = False
    refused: str = ""
    strangers: tuple[str, ...] = ()


class AwakeClock:
    """Seconds that this process was awake. While it was stopped, or its machine suspended, at most one second counts:
    a launcher that stood still cannot judge the silence of others. Read it more than once a second."""

    def __init__(self) -> None:
        self._value, self._read = 0.0, time.monotonic()
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._value += min(now - self._read, 1.0)
            self._read = now
            return self._value


class Hub:
    """What every launcher has said last, and the round that follows from it."""

    def __init__(self, nodes: int, least: int, limit: float) -> None:
        self._nodes, self._least, self._limit = nodes, least, limit
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._known: dict[str, tuple[Member, float, float]] = {}
        self._joined: dict[str, float] = {}
        self._waiting: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._round: Round | None = None
        self._strangers: list[str] = []
        self.over = False

    def exchange(self, member: Member) -> Reply:
        """Takes in what a launcher says, gives what all have said."""
        with self._lock:
            now = self._clock.now()
            self._known[member.id] = (member, now, member.clock - time.time())
            self._known = {name: each for name, each in self._known.items() if now - each[1] < FORGOTTEN}
            since = self._joined.setdefault(member.id, now)
            heard = {
                name: Heard(each, now - at, ahead=ahead) for name, (each, at, ahead) in self._known.items()
            }
            waiting = candidates(heard, self._limit)
            if waiting != self._waiting[0]:
                self._waiting = waiting, now
            settled = now - self._waiting[1]
            self._round = (
                next_round(
                    heard,
                    self._round,
                    nodes=self._nodes,
                    least=self._least,
                    limit=self._limit,
                    settled=settled,
                )
                or self._round
            )
            # A launcher that was started again has its predecessor's number; that one is silent by now.
            joining = member.round == 0 and now - since > 2.0
            refused = objection(member, heard) if joining else ""
            return Reply(self._round, heard, self.over, refused, tuple(self._strangers))

    def still_here(self) -> int:
        """Launchers that have not left, and are not gone."""
        with self._lock:
            now = self._clock.now()
            return sum(
                member.state != "left" and now - at <= self._limit for member, at, _ in self._known.values()
            )

    def turn_away(self, address: str) -> None:
        """Notes one who came with another secret."""
        with self._lock:
            if address not in self._strangers and len(self._strangers) < 8:
                self._strangers.append(address)


class Server:
    """A hub that other machines can reach. Threads of its own; `close` waits for none."""

    def __init__(self, hub: Hub, secret: bytes, address: str, port: int) -> None:
        self._hub, self._secret = hub, secret
        self._listener = listening_socket(address, port)
        self._greeting = threading.BoundedSemaphore(MOST_GREETING)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

    def exchange(self, member: Member) -> Reply:
        """For the launcher of this machine, which needs no network."""
        return self._hub.exchange(member)

    def leave(self) -> None:
        """From now on launchers are told that the run is over."""
        self._hub.over = True

    def still_here(self) -> int:
        """Launchers that have not left yet."""
        return self._hub.still_here()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno == errno.EBADF:
                    return
                time.sleep(0.1)  # out of descriptors, or a peer that is gone already
                continue
            if not self._greeting.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, str(address[0])), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection, contextlib.suppress(OSError, BadMessage, NotOurs):
            try:
                deadline = time.monotonic() + CALL_SECONDS
                channel = Channel(connection, self._secret, asks=False, deadline=deadline)
                try:
                    said = channel.receive(signed.MEMBER_LIMIT, deadline)
                except BadMessage:
                    self._hub.turn_away(address)
                    channel.refuse()
                    return
            finally:
                self._greeting.release()
            while True:
                now = time.monotonic()
                try:
                    member = members.member_from_fields(said, now)
                except ValueError as error:
                    raise BadMessage("not a member") from error
                reply = self._hub.exchange(member)
                channel.send(reply_to_fields(reply, now), now + CALL_SECONDS)
                said = channel.receive(signed.MEMBER_LIMIT, time.monotonic() + IDLE_SECONDS)


class Client:
    """The way to a hub on another machine. Used by one thread, which may wait."""

    def __init__(self, host: str, port: int, place: str, secret: bytes) -> None:
        self._address, self._place, self._secret = (host, port), place, secret
        self._channel: Channel | None = None
        self._met = False

    def exchange(self, member: Member) -> Reply:
        """Raises `Unreachable` where a later attempt may do better, `UserError` where it will not."""
        deadline = time.monotonic() + CALL_SECONDS
        try:
            if self._channel is None:
                self._channel = self._connect(deadline)
            self._channel.send(members.member_to_fields(member, time.monotonic()), deadline)
            said = self._channel.receive(signed.REPLY_LIMIT, deadline)
            reply = reply_from_fields(said, time.monotonic())
            self._met = True
            return reply
        except (OSError, BadMessage, NotOurs, DifferentSecret, ValueError) as error:
            self.close()
            if isinstance(error, DifferentSecret) and not self._met:
                raise different_secret(self._place, os.environ) from None
            if isinstance(error, NotOurs) and not self._met:
                raise signed.not_a_launcher(self._place, str(error)) from error
            raise Unreachable(_reason(error)) from error

    def leave(self) -> None:
        """Nothing to do: the hub has been told."""

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connect(self, deadline: float) -> Channel:
        connection = socket.create_connection(self._address, timeout=CALL_SECONDS)
        try:
            return Channel(connection, self._secret, asks=True, deadline=deadline)
        except (ConnectionError, TimeoutError) as error:
            connection.close()
            silent = "it does not answer" if isinstance(error, TimeoutError) else "it closes the connection"
            raise Unreachable(f"the program there is not a Drumline launcher: {silent}") from error
        except BaseException:
            connection.close()
            raise


def reply_to_fields(reply: Reply, now: float) -> dict[str, object]:
    """For a message."""
    return {
        "round": None if reply.round is None else asdict(reply.round),
        "heard": [
            [members.member_to_fields(each.member, now), each.silent, each.ahead]
            for each in reply.heard.values()
        ],
        "over": reply.over,
        "refused": reply.refused,
    }


def reply_from_fields(content: object, now: float) -> Reply:
    """What came in a message; `ValueError` for anything else."""
    match content:
        case {"round": round, "heard": [*heard], "over": bool(over), "refused": str(refused)}:
            found = {}
            for entry in heard:
                match entry:
                    case [said, float(silent), float(ahead)]:
                        member = members.member_from_fields(said, now)
                        found[member.id] = Heard(member, silent, ahead)
                    case _:
                        raise ValueError("not a reply")
            current = None if round is None else members.round_from_fields(round)
            return Reply(current, found, over, refused)
    raise ValueError("not a reply")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__

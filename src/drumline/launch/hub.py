"""The rendezvous of launchers at a hub: in memory for one machine; for several, one launcher hosts it at HOST:PORT
and the others connect to it.

Promises: only launchers with the run's secret are accepted. Any other program that connects is rejected, however many
connect and however slowly, and delays no launcher that has joined. Every wait has a deadline. The hub decides rounds
by its own monotonic clock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass

from drumline.core.machine import listening_socket
from drumline.launch import messages
from drumline.launch.messages import BadMessage, Channel, DifferentSecret, ForeignProtocol
from drumline.launch.nodes import (
    Heard,
    Node,
    Round,
    candidates,
    next_round,
    node_from_fields,
    node_to_fields,
    objection,
    round_from_fields,
)

CALL_SECONDS = 3.0
"""Deadline of one exchange, of a connection, and of a greeting."""

IDLE_SECONDS = 60.0
"""After which an idle connection is closed; a live launcher connects again."""

FORGOTTEN = 600.0
"""Seconds after which a silent launcher is forgotten."""

MOST_GREETING = 64
"""Limit of connections that have not yet proved that they know the secret."""


class Unreachable(Exception):
    """No answer now; the next attempt may get one. `code` is `not-a-launcher` if another program may listen there."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Reply:
    """The current round, the last report of each launcher, and whether the run is over. `strangers` are the addresses
    that connected with a different secret."""

    round: Round | None
    heard: dict[str, Heard]
    over: bool = False
    refused: str = ""
    strangers: tuple[str, ...] = ()


class AwakeClock:
    """Seconds that this process was awake. While it was stopped, or its machine suspended, at most one second counts:
    a launcher that did not run cannot judge the silence of others. Read it more than once a second."""

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
    """The last report of every launcher, and the round that follows from them."""

    def __init__(self, nodes: int, least: int, limit: float) -> None:
        self._nodes, self._least, self._limit = nodes, least, limit
        self._clock, self._lock = AwakeClock(), threading.Lock()
        self._known: dict[str, tuple[Node, float, float]] = {}
        self._joined: dict[str, float] = {}
        self._waiting: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._round: Round | None = None
        self._strangers: list[str] = []
        self._over = False

    def exchange(self, node: Node) -> Reply:
        """Stores the report of a launcher and returns those of all."""
        with self._lock:
            now = self._clock.now()
            self._known[node.id] = (node, now, node.clock - time.time())
            self._known = {name: each for name, each in self._known.items() if now - each[1] < FORGOTTEN}
            since = self._joined.setdefault(node.id, now)
            heard = {
                name: Heard(each, now - at, ahead=ahead) for name, (each, at, ahead) in self._known.items()
            }
            waiting = candidates(heard, self._limit)
            if waiting != self._waiting[0]:
                self._waiting = waiting, now
            stable = now - self._waiting[1]
            self._round = (
                next_round(
                    heard,
                    self._round,
                    nodes=self._nodes,
                    least=self._least,
                    limit=self._limit,
                    stable=stable,
                )
                or self._round
            )
            # A launcher that was started again has the number of its predecessor, which is silent by now.
            joining = node.round == 0 and now - since > 2.0
            refused = objection(node, heard) if joining else ""
            return Reply(self._round, heard, self._over, refused, tuple(self._strangers))

    def leave(self) -> None:
        """Replies from now on that the run is over."""
        self._over = True

    def close(self) -> None:
        """Nothing is open."""

    def still_here(self) -> int:
        """The number of launchers that have neither left nor been lost."""
        with self._lock:
            now = self._clock.now()
            return sum(
                node.state != "left" and now - at <= self._limit for node, at, _ in self._known.values()
            )

    def reject(self, address: str) -> None:
        """Records an address that connected with a different secret."""
        with self._lock:
            if address not in self._strangers and len(self._strangers) < 8:
                self._strangers.append(address)


class Server(Hub):
    """A hub that other machines can reach. It has threads of its own; `close` waits for none of them."""

    def __init__(self, nodes: int, least: int, limit: float, secret: bytes, address: str, port: int) -> None:
        super().__init__(nodes, least, limit)
        self._secret = secret
        self._listener = listening_socket(address, port)
        self._greeting = threading.BoundedSemaphore(MOST_GREETING)
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()

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
        with connection, contextlib.suppress(OSError, BadMessage, ForeignProtocol):
            try:
                deadline = time.monotonic() + CALL_SECONDS
                channel = Channel(connection, self._secret, asks=False, deadline=deadline)
                try:
                    content = channel.receive(messages.NODE_LIMIT, deadline)
                except BadMessage:
                    self.reject(address)
                    channel.reject_secret()
                    return
            finally:
                self._greeting.release()
            while True:
                now = time.monotonic()
                try:
                    node = node_from_fields(content, now)
                except ValueError as error:
                    raise BadMessage("not a node") from error
                reply = self.exchange(node)
                channel.send(reply_to_fields(reply, now), now + CALL_SECONDS)
                content = channel.receive(messages.NODE_LIMIT, time.monotonic() + IDLE_SECONDS)


class Client:
    """A connection to a hub on another machine. Used by one thread, which may wait."""

    def __init__(self, host: str, port: int, rendezvous: str, secret: bytes) -> None:
        self._address, self._rendezvous, self._secret = (host, port), rendezvous, secret
        self._channel: Channel | None = None
        self._connected = False

    def exchange(self, node: Node) -> Reply:
        """Raises `Unreachable` if a later attempt may succeed, `UserError` if not."""
        deadline = time.monotonic() + CALL_SECONDS
        try:
            if self._channel is None:
                self._channel = self._connect(deadline)
            self._channel.send(node_to_fields(node, time.monotonic()), deadline)
            reply = reply_from_fields(self._channel.receive(messages.REPLY_LIMIT, deadline), time.monotonic())
            self._connected = True
            return reply
        except (OSError, BadMessage, ForeignProtocol, DifferentSecret, ValueError) as error:
            self.close()
            if isinstance(error, DifferentSecret) and not self._connected:
                raise messages.different_secret(self._rendezvous, os.environ) from None
            if isinstance(error, ForeignProtocol) and not self._connected:
                raise messages.not_a_launcher(self._rendezvous, str(error)) from error
            raise Unreachable(_reason(error)) from error

    def leave(self) -> None:
        """Nothing to do: the hub has the report."""

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
            why = "it does not answer" if isinstance(error, TimeoutError) else "it closes the connection"
            raise Unreachable(why, "not-a-launcher") from error
        except BaseException:
            connection.close()
            raise


def reply_to_fields(reply: Reply, now: float) -> dict[str, object]:
    """For a message."""
    return {
        "round": None if reply.round is None else asdict(reply.round),
        "heard": [[node_to_fields(each.node, now), each.silent, each.ahead] for each in reply.heard.values()],
        "over": reply.over,
        "refused": reply.refused,
    }


def reply_from_fields(content: object, now: float) -> Reply:
    """A received reply. Raises `ValueError` for anything else."""
    match content:
        case {"round": round, "heard": [*heard], "over": bool(over), "refused": str(refused)}:
            found = {}
            for entry in heard:
                match entry:
                    case [content, float(silent), float(ahead)]:
                        node = node_from_fields(content, now)
                        found[node.id] = Heard(node, silent, ahead)
                    case _:
                        raise ValueError("not a reply")
            current = None if round is None else round_from_fields(round)
            return Reply(current, found, over, refused)
    raise ValueError("not a reply")


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__

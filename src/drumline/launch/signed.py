"""JSON messages that prove who wrote them, for what the launchers of a run exchange.

A message is a line: the HMAC-SHA256 of its text under the secret that the launchers share, a space, the text.
Promises: what is read is JSON, signed for the place in which it is found: connection or file, direction and turn are
part of what is signed (`context`), so that a recorded message is rejected anywhere else. Sizes are bounded before
anything is read, and every wait has a deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from drumline.core.errors import UserError

GREETING = b"drumline 1 "
OTHER_SECRET = b"drumline: a different secret\n"
MEMBER_LIMIT = 1 << 19
"""Bytes of what one launcher says of itself."""

REPLY_LIMIT = 1 << 24
"""Bytes of an answer with what all of them have said."""


class BadMessage(Exception):
    """What was read is no message, or is signed with another secret."""


class NotOurs(Exception):
    """The program at the other end does not speak our protocol."""


class DifferentSecret(Exception):
    """The launcher at the other end has another secret."""


def seal(secret: bytes, context: str, value: object) -> bytes:
    """A value as a signed line."""
    text = json.dumps(value).encode()
    return _signature(secret, context, text) + b" " + text + b"\n"


def unseal(secret: bytes, context: str, line: bytes) -> Any:
    """The value of a line that was signed for this context."""
    signature, _, text = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret, context, text)):
        raise BadMessage("not signed with this secret, for this place")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage("not JSON") from error


def _signature(secret: bytes, context: str, text: bytes) -> bytes:
    return hmac.new(secret, context.encode() + b"\n" + text, hashlib.sha256).hexdigest().encode()


class Channel:
    """One connection between two launchers. Both sides send a random greeting first, and every message is signed for
    both greetings, its direction and its number: one that was recorded does not fit any other connection."""

    def __init__(self, connection: socket.socket, secret: bytes, *, asks: bool, deadline: float) -> None:
        self._connection, self._secret, self._read = connection, secret, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(16).encode()
        self._send(GREETING + nonce + b"\n", deadline)
        theirs = self._line(256, deadline)
        if not theirs.startswith(GREETING):
            words = theirs[:40].decode("ascii", errors="replace").strip()
            raise NotOurs(f"it answers {words!r}")
        mine, other = nonce.decode(), theirs.removeprefix(GREETING).strip().decode("ascii", errors="replace")
        self._context = f"{mine} {other}" if asks else f"{other} {mine}"
        self._asks, self._sent, self._received = asks, 0, 0

    def send(self, value: object, deadline: float) -> None:
        line = seal(self._secret, self._place(self._asks, self._sent), value)
        self._sent += 1
        self._send(line, deadline)

    def receive(self, limit: int, deadline: float) -> Any:
        line = self._line(limit, deadline)
        if line == OTHER_SECRET:
            raise DifferentSecret
        value = unseal(self._secret, self._place(not self._asks, self._received), line)
        self._received += 1
        return value

    def refuse(self) -> None:
        """Says that the other side's secret is not ours."""
        self._send(OTHER_SECRET, time.monotonic() + 1)

    def close(self) -> None:
        self._connection.close()

    def _place(self, question: bool, number: int) -> str:
        return f"drumline tcp {self._context} {'question' if question else 'answer'} {number}"

    def _send(self, data: bytes, deadline: float) -> None:
        self._connection.settimeout(_left(deadline))
        self._connection.sendall(data)

    def _line(self, limit: int, deadline: float) -> bytes:
        """Up to the next line's end; what follows stays for the next call."""
        parts, size = [self._read], len(self._read)
        while b"\n" not in parts[-1]:
            if size > limit:
                raise BadMessage("too long")
            self._connection.settimeout(_left(deadline))
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the connection was closed")
            parts.append(data)
            size += len(data)
        line, end, self._read = b"".join(parts).partition(b"\n")
        return line + end


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def not_a_launcher(place: str, why: str) -> UserError:
    """Another program where the launcher of the run's first machine should be."""
    return UserError(
        f"the program at {place} is not a Drumline launcher ({why})",
        "give a free port in --parallel.rendezvous, the same on each machine, and the same version of Drumline",
    )

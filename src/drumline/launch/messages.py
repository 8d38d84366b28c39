"""Signed JSON messages between the launchers of a run, and the secret they are signed with.

A message is a line: the HMAC-SHA256 of its text under the launchers' shared secret, a space, the text. Promises: only
signed JSON is accepted, and only where it was meant for: connection or file, direction and sequence number are part
of the signed content (`context`), so a recorded message is rejected anywhere else. Sizes are limited before anything
is read, and every wait has a deadline. The secret is DRUMLINE_SECRET if set, otherwise a file in the user's
configuration folder, created at its first use; a file that other users can read is rejected. A run on one machine
needs no secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.core.errors import UserError

SECRET = "DRUMLINE_SECRET"
SHORTEST_SECRET = 16

GREETING = b"drumline 2 "
GREETING_LIMIT = 256
OTHER_SECRET = b"drumline: a different secret\n"
NODE_LIMIT = 1 << 19
"""Bytes of a launcher's message about itself."""

REPLY_LIMIT = 1 << 24
"""Bytes of a reply with the messages of all launchers."""


class BadMessage(Exception):
    """Not a message, or signed with a different secret."""


class ForeignProtocol(Exception):
    """The program at the other end does not speak our protocol."""


class DifferentSecret(Exception):
    """The launcher at the other end has a different secret."""


def sign(secret: bytes, context: str, value: object) -> bytes:
    """A value as a signed line."""
    text = json.dumps(value).encode()
    return _signature(secret, context, text) + b" " + text + b"\n"


def verify(secret: bytes, context: str, line: bytes) -> Any:
    """The value of a line that was signed for this context."""
    signature, _, text = line.rstrip(b"\n").partition(b" ")
    if not hmac.compare_digest(signature, _signature(secret, context, text)):
        raise BadMessage("not signed with this secret for this context")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage("not JSON") from error


def _signature(secret: bytes, context: str, text: bytes) -> bytes:
    return hmac.new(secret, context.encode() + b"\n" + text, hashlib.sha256).hexdigest().encode()


class Channel:
    """One connection between two launchers. Both sides first send a random greeting, and every message is signed for
    both greetings, its direction and its number: a recorded message is valid on no other connection."""

    def __init__(self, connection: socket.socket, secret: bytes, *, asks: bool, deadline: float) -> None:
        self._connection, self._secret, self._read = connection, secret, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = secrets.token_hex(16).encode()
        self._send(GREETING + nonce + b"\n", deadline)
        try:
            theirs = self._line(GREETING_LIMIT, deadline)
        except BadMessage:
            raise ForeignProtocol(f"it sends more than {GREETING_LIMIT} bytes without a newline") from None
        if not theirs.startswith(GREETING):
            text = theirs[:40].decode("ascii", errors="replace").strip()
            raise ForeignProtocol(f"it answers {text!r}")
        mine, other = nonce.decode(), theirs.removeprefix(GREETING).strip().decode("ascii", errors="replace")
        self._context = f"{mine} {other}" if asks else f"{other} {mine}"
        self._asks, self._sent, self._received = asks, 0, 0

    def send(self, value: object, deadline: float) -> None:
        line = sign(self._secret, self._message_context(self._asks, self._sent), value)
        self._sent += 1
        self._send(line, deadline)

    def receive(self, limit: int, deadline: float) -> Any:
        line = self._line(limit, deadline)
        if line == OTHER_SECRET:
            raise DifferentSecret
        value = verify(self._secret, self._message_context(not self._asks, self._received), line)
        self._received += 1
        return value

    def reject_secret(self) -> None:
        """Tells the other side that its secret differs from ours."""
        self._send(OTHER_SECRET, time.monotonic() + 1)

    def close(self) -> None:
        self._connection.close()

    def _message_context(self, question: bool, number: int) -> str:
        return f"drumline tcp {self._context} {'question' if question else 'answer'} {number}"

    def _send(self, data: bytes, deadline: float) -> None:
        self._connection.settimeout(_remaining(deadline))
        self._connection.sendall(data)

    def _line(self, limit: int, deadline: float) -> bytes:
        """Reads up to the next newline; what follows is kept for the next call."""
        parts, size = [self._read], len(self._read)
        while b"\n" not in parts[-1]:
            if size > limit:
                raise BadMessage("too long")
            self._connection.settimeout(_remaining(deadline))
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the connection was closed")
            parts.append(data)
            size += len(data)
        line, end, self._read = b"".join(parts).partition(b"\n")
        return line + end


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def not_a_launcher(rendezvous: str, why: str) -> UserError:
    """Another program listens where the launcher of the run's first machine should."""
    return UserError(
        f"the program at {rendezvous} is not a Drumline launcher of this version ({why})",
        "give a free port in --parallel.rendezvous, and use the same version of Drumline on each machine",
        code="not-a-launcher",
    )


# The secret.


def shared_secret(env: Mapping[str, str]) -> bytes:
    """The secret of this user's runs."""
    if given := env.get(SECRET):
        if len(given) < SHORTEST_SECRET:
            raise UserError(
                f"{SECRET} has {len(given)} characters and could be guessed",
                f"use at least {SHORTEST_SECRET}, the same on each machine, for example from `openssl rand -hex 32`",
            )
        return given.encode()
    path = secret_file(env)
    try:
        return _read_secret(path) if path.exists() else _create_secret(path)
    except OSError as error:
        raise UserError(
            f"cannot use {path} for the secret that the machines of a run share ({error.strerror or error})",
            f"set {SECRET} to the same random text on each machine",
        ) from error


def secret_file(env: Mapping[str, str]) -> Path:
    """The file that holds the secret."""
    base = env.get("XDG_CONFIG_HOME") or ""
    folder = Path(base) if Path(base).is_absolute() else Path(env.get("HOME") or Path.home()) / ".config"
    return folder / "drumline/secret"


def different_secret(rendezvous: str, env: Mapping[str, str]) -> UserError:
    """Two machines have different secrets."""
    return UserError(
        f"the machines at {rendezvous} have different secrets",
        f"copy {secret_file(env)} from one machine to the others (mode 600), or set {SECRET} to the same random "
        "text on each",
        code="different-secret",
    )


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if state.st_mode & 0o077 or state.st_uid != os.geteuid() or not stat.S_ISREG(state.st_mode):
            raise UserError(
                f"{path} holds a secret, and other users can read or replace it",
                f"chmod 600 {path}, as its owner; if others may have read it, delete it on each machine",
            )
        content = file.read(4096).strip()
    if len(content) < SHORTEST_SECRET:
        raise UserError(f"{path} holds no secret", "delete it; the next run creates a new one")
    return content


def _create_secret(path: Path) -> bytes:
    """Creates the file, complete or not at all. If two launchers try at once, the first one's file stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".secret-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another launcher was first
            os.link(draft, path)
    finally:
        draft.unlink()
    return _read_secret(path)

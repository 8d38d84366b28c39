"""A program that attacks a rendezvous: `python stranger.py ADDRESS PORT MARK`.

Speaks HTTP, garbage, pickles that would create the file MARK, our own protocol with a different secret, huge
messages, and holds silent connections open. Prints how many connections it made.
"""

from __future__ import annotations

import pickle
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

from drumline.launch.messages import GREETING, Channel, DifferentSecret, sign


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path(self.mark).touch, ()


def main() -> None:
    place, mark = (sys.argv[1], int(sys.argv[2])), sys.argv[3]
    made = 0

    def connect() -> socket.socket:
        nonlocal made
        made += 1
        return socket.create_connection(place, timeout=5)

    silent = []
    for _ in range(300):
        silent.append(connect())
    bomb = pickle.dumps(Bomb(mark))
    texts = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        secrets.token_bytes(4096),
        bomb,
        GREETING + b"0" * 32 + b"\n" + bomb + b"\n",
        GREETING + b"0" * 32 + b"\n" + sign(b"another secret", "drumline tcp", {"id": "x"}),
        GREETING + b"0" * 32 + b"\n" + b"[" * 400_000,
        GREETING + b"\xff" * 200 + b"\n",
        b"x" * 5_000_000,
    ]
    for text in texts:
        for _ in range(5):
            with connect() as connection:
                try:
                    connection.sendall(text)
                    connection.recv(1000)
                except OSError:
                    continue  # turned away
    for waiting in silent:
        waiting.close()
    time.sleep(0.2)
    with connect() as connection:  # our protocol, a foreign secret
        channel = Channel(connection, b"a foreign secret", asks=True, deadline=time.monotonic() + 5)
        channel.send({"id": "0" * 32}, time.monotonic() + 5)
        try:
            sys.exit(f"answered: {channel.receive(1 << 20, time.monotonic() + 5)}")
        except DifferentSecret:
            print("turned away", end=", ")
    print(f"{made} connections")


if __name__ == "__main__":
    main()

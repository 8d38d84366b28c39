"""The rendezvous of several machines at a folder on a shared disk: each launcher writes one file and reads the
others.

Promises: files appear complete; their content is signed with the run's secret for this folder and file name; a
launcher counts as live only if its file changes and contains our own id, which no file of an earlier run does. A
round is a file that can be created once, so two launchers cannot begin different rounds. No clock is read from the
disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

from drumline.core.errors import UserError
from drumline.launch.hub import AwakeClock, Reply, Unreachable
from drumline.launch.messages import NODE_LIMIT, BadMessage, sign, verify
from drumline.launch.nodes import (
    Heard,
    Node,
    Round,
    candidates,
    is_live,
    next_round,
    node_from_fields,
    node_to_fields,
    objection,
    round_from_fields,
)

NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO)


class SharedFolder:
    """The launchers' files in one folder. Used by one thread, which may wait for the disk."""

    def __init__(self, path: str, secret: bytes, nodes: int, least: int, limit: float) -> None:
        self._path, self._secret = Path(path), secret
        self._nodes, self._least, self._limit = nodes, least, limit
        self._clock = AwakeClock()
        self._turn = 0
        self._id = ""
        self._known: dict[str, tuple[int, Heard, float]] = {}
        """By id: the turn of its last report, the report, and when it came."""
        self._rounds: dict[int, Round] = {}
        self._waiting: tuple[frozenset[str], float] = (frozenset(), 0.0)
        self._strangers: set[str] = set()

    def exchange(self, node: Node) -> Reply:
        try:
            return self._exchange(node)
        except OSError as error:
            raise Unreachable(error.strerror or str(error)) from error

    def leave(self) -> None:
        """The last launcher to leave deletes the folder; until then the others can read that this one left."""
        with contextlib.suppress(OSError):
            now = self._clock.now()
            if any(is_live(self._now(name, now), self._limit) for name in self._known if name != self._id):
                return
            for path in self._path.iterdir():
                if re.fullmatch(r"\.?(node-[0-9a-f]{32}|round-\d+)\.json(\.[0-9a-f]{32})?", path.name):
                    path.unlink(missing_ok=True)
            self._path.rmdir()

    def close(self) -> None:
        """Nothing is open."""

    def _exchange(self, node: Node) -> Reply:
        if not self._path.is_dir():
            self._create()
        self._id, self._turn = node.id, self._turn + 1
        content = {
            "turn": self._turn,
            "sees": list(self._known),
            "node": node_to_fields(node, time.monotonic()),
        }
        self._write(self._file(node.id), content, once=False)
        names = [path.name for path in self._path.iterdir()]
        for name in names:
            if found := re.fullmatch(r"node-([0-9a-f]{32})\.json", name):
                self._read_node(found[1])
        now = self._clock.now()
        heard = {name: self._now(name, now) for name in self._known}
        last = self._last_round(names)
        waiting = candidates(heard, self._limit)
        if waiting != self._waiting[0]:
            self._waiting = waiting, now
        stable = now - self._waiting[1]
        proposal = next_round(
            heard, last, nodes=self._nodes, least=self._least, limit=self._limit, stable=stable
        )
        if proposal is not None and proposal.ids[0] == node.id:
            number = proposal.number
            while f"round-{number}.json" in names:  # not a valid round, or it would be the last one
                number += 1
            names.append(f"round-{number}.json")
            self._write(self._path / names[-1], asdict(replace(proposal, number=number)), once=True)
            last = self._last_round(names)
        refused = objection(node, heard) if node.round == 0 and stable > 2.0 else ""
        return Reply(last, heard, refused=refused, strangers=tuple(self._strangers))

    def _create(self) -> None:
        try:
            self._path.mkdir(exist_ok=True)
        except FileExistsError as error:
            raise UserError(
                f"parallel.rendezvous = file://{self._path}: this is a file",
                "delete it, or give a path that does not exist",
            ) from error
        except FileNotFoundError as error:
            raise UserError(
                f"parallel.rendezvous = file://{self._path}: its folder does not exist",
                "give a path in a folder that every machine sees",
            ) from error

    def _read_node(self, name: str) -> None:
        file = self._file(name)
        try:
            content = self._read(file)
            match content:
                case {"turn": int(turn), "sees": [*sees], "node": report}:
                    node = node_from_fields(report, time.monotonic())
                case _:
                    raise BadMessage("not a node")
        except FileNotFoundError:
            return
        except (BadMessage, ValueError):
            self._strangers.add(file.name)
            return
        known = self._known.get(name)
        if node.id != name or (known is not None and turn <= known[0]):
            return
        ahead = node.clock - time.time()
        if known is not None:
            ahead = max(ahead, known[1].ahead)  # the file may be old
        fresh = self._id in sees or name == self._id
        self._known[name] = (turn, Heard(node, 0.0, ahead, fresh), self._clock.now())

    def _now(self, name: str, now: float) -> Heard:
        _, heard, at = self._known[name]
        return Heard(heard.node, now - at, heard.ahead, heard.fresh)

    def _last_round(self, names: list[str]) -> Round | None:
        numbers = [int(found[1]) for name in names if (found := re.fullmatch(r"round-(\d{1,9})\.json", name))]
        self._rounds = {number: round for number, round in self._rounds.items() if number in numbers}
        for number in sorted(numbers, reverse=True):
            if number not in self._rounds:
                try:
                    round = round_from_fields(self._read(self._path / f"round-{number}.json"))
                except (BadMessage, ValueError, FileNotFoundError):
                    self._strangers.add(f"round-{number}.json")
                    continue
                if round.number != number:
                    continue
                self._rounds[number] = round
            return self._rounds[number]
        return None

    def _read(self, file: Path) -> object:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as opened:
                line = opened.read(NODE_LIMIT + 1)
        except OSError as error:
            if error.errno in NOT_A_FILE:
                raise BadMessage("not a file of a launcher") from error
            raise
        if len(line) > NODE_LIMIT:
            raise BadMessage("too long")
        return verify(self._secret, self._context(file), line)

    def _write(self, file: Path, content: object, *, once: bool) -> None:
        """`once`: only if the file does not exist yet."""
        draft = file.with_name(f".{file.name}.{self._id}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o644)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(sign(self._secret, self._context(file), content))
        if once:
            with contextlib.suppress(FileExistsError):
                os.link(draft, file)
            draft.unlink()
        else:
            draft.replace(file)

    def _file(self, name: str) -> Path:
        return self._path / f"node-{name}.json"

    def _context(self, file: Path) -> str:
        return f"drumline file {file}"

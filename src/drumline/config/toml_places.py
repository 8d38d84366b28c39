"""Where a TOML text names each of its keys: the lines that tomllib does not keep.

Promises: every key of every table is found, however it is written (`[section]` headers, dotted keys, inline
tables, quoted keys), and strings and lists over several lines do not shift the count.
Takes for granted that the text is valid: give it only what tomllib has accepted.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The line of a key, counted from 1, and its value as written there (nothing for a table's header)."""

    line: int
    written: str


def key_places(text: str) -> dict[tuple[str, ...], Place]:
    """The place of each key by its path, such as ("optim", "lr"); of several mentions the first."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.found


_QUOTED = r'"(?:\\.|[^"\\])*"|' + r"'[^']*'"
_TRIPLE_QUOTED = r'"""(?:\\.|[^\\])*?"""(?:"{0,2})|' + r"'''.*?'''(?:'{0,2})"
_KEY = re.compile(rf"(?:[\w-]+|{_QUOTED})(?:[ \t]*\.[ \t]*(?:[\w-]+|{_QUOTED}))*")
_HEADER_OPENS, _HEADER_CLOSES = re.compile(r"\[+[ \t]*"), re.compile(r"[ \t]*\]+")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_BETWEEN = re.compile(r"(?:[\s,]|#[^\n]*)*")
_SCALAR = re.compile(
    # The tail is the time of a date written with a space: 1979-05-27 07:32:00.
    rf"{_TRIPLE_QUOTED}|{_QUOTED}|[^\s,\]}}#]+(?: \d\d:[^\s,\]}}#]+)?",
    re.DOTALL,
)


class _Scanner:
    """A walk over valid TOML. Being valid, it is never looked at twice: each sign tells what must follow."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.found: dict[tuple[str, ...], Place] = {}

    def document(self) -> None:
        table: tuple[str, ...] = ()
        self._take(_BETWEEN)
        while self.position < len(self.text):
            if self.text[self.position] == "[":
                self._take(_HEADER_OPENS)
                table = self._key(below=())
                self._take(_HEADER_CLOSES)
            else:
                self._pair(table)
            self._take(_BETWEEN)

    def _pair(self, table: tuple[str, ...]) -> None:
        path = self._key(below=table)
        line = self.found[path].line
        self._take(_EQUALS)
        start = self.position
        self._value(path)
        self.found[path] = Place(line, self.text[start : self.position])

    def _value(self, path: tuple[str, ...]) -> None:
        opening = self.text[self.position]
        if opening not in "[{":
            self._take(_SCALAR)
            return
        closing = "]" if opening == "[" else "}"
        self.position += 1
        self._take(_BETWEEN)
        while self.text[self.position] != closing:
            if opening == "[":
                self._value((*path, "[]"))
            else:
                self._pair(path)
            self._take(_BETWEEN)
        self.position += 1

    def _key(self, below: tuple[str, ...]) -> tuple[str, ...]:
        """Read a key, note its line for it and for every table it opens, and return its whole path."""
        line = self.text.count("\n", 0, self.position) + 1
        node, path = tomllib.loads(f"{self._take(_KEY)} = 0"), below
        while isinstance(node, dict):
            ((part, node),) = node.items()
            path = (*path, part)
            self.found.setdefault(path, Place(line, ""))
        return path

    def _take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        assert match is not None, (pattern.pattern, self.text[self.position : self.position + 40])
        self.position = match.end()
        return match[0]

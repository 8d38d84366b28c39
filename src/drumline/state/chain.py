"""The fingerprint chain of a run: `fingerprints.txt`, which is byte for byte equal for two runs with the same bits.

After some steps, a record is written: a line `STEP GROUP NAME VALUE` for each tensor, a line with the name `*` for
each group, and a last line `STEP chain VALUE` whose value covers the whole text before it. Promises: the step and the
recipe alone decide which records there are and which of them list every tensor, so a run that was killed and resumed
leaves the same file as an uninterrupted one. Short records grow linearly with the number of steps, full ones
logarithmically. An incomplete or changed record is detected. Pure, except `read_whole` and `repair_chain`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from drumline.core.files import read_small, write_bytes
from drumline.core.text import printable

FILE = "fingerprints.txt"
HEADER = "# drumline fingerprints 1: STEP GROUP NAME VALUE; the name * is the whole group; chain covers all above\n"
GROUPS = ("ids", "gradient", "buffer", "parameter", "optimizer", "average", "scaler")
"""In causal order: samples determine gradients and statistics, which determine parameters."""
FIRST_STEPS = 3
"""The first steps, each of which is recorded: most mistakes show at once."""
WHOLE = "*"
MAX_CHAIN = 1 << 30

Values = Mapping[str, Mapping[str, int]]
"""Group to tensor to fingerprint."""


class Damaged(Exception):
    """The file is not what was written. The message names the first wrong line."""


class Torn(Damaged):
    """The last record is incomplete: the run was killed while it wrote, or is writing now."""


@dataclass(frozen=True)
class Record:
    """The fingerprints of one step. `names` is empty in a short record."""

    step: int
    groups: Mapping[str, str]
    """A value per group, in the order of `GROUPS`."""
    names: Mapping[tuple[str, str], str]
    """A value per (group, tensor)."""
    chain: str


def is_full(step: int, every: int, saving: bool) -> bool:
    """Whether a record lists every tensor. Records of the first steps and of planned checkpoints do. Of the others,
    those do whose number has at most two digits before its zeros (1 to 99, 100, 110, ... 990, 1000, 1100, ...)."""
    number = step // every if every and step % every == 0 else 0
    while number >= 100 and number % 10 == 0:
        number //= 10
    return step <= FIRST_STEPS or saving or 0 < number < 100


def record_text(step: int, values: Values, full: bool, before: str) -> tuple[str, str]:
    """The lines of a record after a chain value (empty for the first record), and its own chain value."""
    assert set(values) <= set(GROUPS), sorted(values)
    lines = []
    for group in GROUPS:
        if group not in values:
            continue
        each = [f"{printable(name)} {_hex(value)}" for name, value in sorted(values[group].items())]
        whole = hashlib.sha256("\n".join(each).encode()).hexdigest()[:16]
        lines.append(f"{step} {group} {WHOLE} {whole}\n")
        if full:
            lines += [f"{step} {group} {line}\n" for line in each]
    text = "".join(lines)
    chain = chained(before, text)
    return f"{text}{step} chain {chain}\n", chain


def chained(before: str, text: str) -> str:
    """The chain value after these lines."""
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:32]


def parse(content: bytes) -> Iterator[tuple[Record, int]]:
    """The records, each with the offset of its end. Raises `Damaged` at the first that is not intact."""
    lines = content.decode("utf-8", "replace").splitlines(keepends=True)
    if not lines or lines[0] != HEADER:
        raise Damaged("line 1: not a fingerprint file of this version")
    chain, end, start = "", len(HEADER), 1
    for number, line in enumerate(lines):
        fields = line.rstrip("\n").split(" ")
        if len(fields) != 3 or fields[1] != "chain":
            continue
        if not line.endswith("\n"):
            break
        text = "".join(lines[start:number])
        if chained(chain, text) != fields[2]:
            raise Damaged(f"lines {start + 1} to {number + 1}: changed since they were written")
        chain, start = fields[2], number + 1
        end += len((text + line).encode())
        yield _record(text, int(fields[0]), chain), end
    if start < len(lines):
        raise Torn(f"line {start + 1}: the last record is incomplete")


def read_whole(path: Path) -> tuple[list[Record], str]:
    """The complete records, and a message if an incomplete one follows. Raises `Damaged`, `CorruptError` if this is
    not a regular file, or FileNotFoundError."""
    records: list[Record] = []
    try:
        records.extend(record for record, _ in parse(read_small(path, MAX_CHAIN)))
    except Torn as reason:
        return records, str(reason)
    except ValueError as error:  # a line or a number that cannot be parsed
        raise Damaged(f"cannot be parsed: {error}") from None
    return records, ""


def repair_chain(path: Path, keep_until_step: int | None) -> tuple[str, str]:
    """Truncates the file to the records that a resumed run keeps: the complete ones up to a step. Returns their last
    chain value, and a message if the file was damaged before that step."""
    if not path.exists():
        write_bytes(path, HEADER.encode())
        return "", ""
    content, chain, kept, message = path.read_bytes(), "", len(HEADER), ""
    try:
        for record, end in parse(content):
            if keep_until_step is not None and record.step > keep_until_step:
                break
            chain, kept = record.chain, end
    except (Damaged, ValueError) as reason:
        # A run that was killed while it wrote leaves an incomplete record, of a step after the checkpoint.
        message = "" if isinstance(reason, Torn) else f"{FILE}: {reason}; the rest of the file was removed"
    whole = content[:kept] if content.startswith(HEADER.encode()) else HEADER.encode()
    if whole != content:
        write_bytes(path, whole)
    return chain, message


def first_group(a: Record, b: Record) -> str:
    """The first group, in causal order, in which two records differ."""
    return next(group for group in GROUPS if a.groups.get(group) != b.groups.get(group))


def differing_names(a: Record, b: Record, group: str) -> list[str]:
    """The tensors of a group that differ between two full records, or that only one has, sorted by name."""
    mine = {name: value for (at, name), value in a.names.items() if at == group}
    others = {name: value for (at, name), value in b.names.items() if at == group}
    return sorted(name for name in mine | others if mine.get(name) != others.get(name))


def _record(text: str, step: int, chain: str) -> Record:
    groups: dict[str, str] = {}
    names: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        at, group, rest = line.split(" ", 2)
        name, value = rest.rsplit(" ", 1)
        if int(at) != step:
            raise Damaged(f"step {step}: its record has a line of step {at}")
        if group not in GROUPS:
            raise Damaged(f"step {step}: unknown group {group[:40]!r}")
        if name == WHOLE:
            groups[group] = value
        else:
            names[group, name] = value
    return Record(step, groups, names, chain)


def _hex(value: int) -> str:
    return f"{value % 2**64:016x}"

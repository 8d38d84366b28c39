"""Broken samples of a run, agreed on by all ranks and told at the end.

Promises: every rank learns what any rank met, so a limit that is passed ends the run on all of them; the list in the
run folder (`broken-samples.tsv`) names each sample once, those met before a stop and a resume too.
"""

from __future__ import annotations

from pathlib import Path

from drumline.core.files import write_bytes
from drumline.data.feed.ledger import Ledger
from drumline.parallel.world import World

FILE = "broken-samples.tsv"


def agree(ledgers: tuple[Ledger, Ledger], world: World) -> None:
    """Brings the ranks' ledgers together. Every rank calls it; costs one small message when nothing is new."""
    counts = world.all_gather_floats([len(ledger.bad) for ledger in ledgers])
    if any(row != counts[0] for row in counts) or any(counts[0]):
        for ledger, others in zip(
            ledgers, zip(*world.all_gather_object([x.bad for x in ledgers]), strict=True), strict=True
        ):
            ledger.merge(others)


def record(ledgers: tuple[Ledger, Ledger], folder: Path) -> None:
    """Writes the list into the run folder, in the order of sets and ids; what stands there already stays."""
    file = folder / FILE
    before = file.read_text().splitlines() if file.exists() else []
    lines = {_key(line): line for ledger in ledgers for line in ledger.lines()}
    lines |= {_key(line): line for line in before}
    if len(lines) > len(before):
        write_bytes(file, "".join(f"{lines[key]}\n" for key in sorted(lines)).encode())


def _key(line: str) -> tuple[bool, int]:
    split, sample, _ = line.split("\t", 2)
    return split != "training", int(sample)


def words(ledgers: tuple[Ledger, Ledger], listed: bool = True) -> list[str]:
    """What to tell about them; nothing when all is well."""
    where = f" (all in {FILE})" if listed else ""
    training, evaluation = ledgers
    told = []
    if training.bad:
        told.append(
            f"WARNING: {len(training.bad):,} of {training.samples:,} training samples are broken and were replaced "
            f"by others, the same on every run{where}: {training.some()}"
        )
    if evaluation.bad:
        told.append(
            f"WARNING: {len(evaluation.bad):,} of {evaluation.samples:,} evaluation samples are broken and were "
            f"scored as black images{where}: {evaluation.some()}"
        )
    return told

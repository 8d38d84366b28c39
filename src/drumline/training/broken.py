"""Broken samples of a run, agreed on by all ranks and reported at the end.

Promises: every rank learns what any rank met, so a limit that is passed ends the run on all of them; the list in the
run folder (`broken-samples.tsv`) names each sample once, those met before a stop and a resume too.
"""

from __future__ import annotations

from pathlib import Path

from drumline.core.files import write_bytes
from drumline.data.feed.sample import BadSamples
from drumline.parallel.world import World

FILE = "broken-samples.tsv"


def agree(sets: tuple[BadSamples, BadSamples], world: World) -> None:
    """Merges what the ranks have found. Every rank calls it; costs one small message when nothing is new."""
    counts = world.all_gather_floats([len(one.bad) for one in sets])
    if any(row != counts[0] for row in counts) or any(counts[0]):
        for one, others in zip(
            sets, zip(*world.all_gather_object([one.bad for one in sets]), strict=True), strict=True
        ):
            one.merge(others)


def record(sets: tuple[BadSamples, BadSamples], folder: Path) -> None:
    """Writes the list into the run folder, in the order of sets and ids; what stands there already stays."""
    file = folder / FILE
    before = file.read_text().splitlines() if file.exists() else []
    lines = {_key(line): line for one in sets for line in one.lines()}
    lines |= {_key(line): line for line in before}
    if len(lines) > len(before):
        write_bytes(file, "".join(f"{lines[key]}\n" for key in sorted(lines)).encode())


def _key(line: str) -> tuple[bool, int]:
    split, sample, _ = line.split("\t", 2)
    return split != "training", int(sample)


def messages(sets: tuple[BadSamples, BadSamples], listed: bool = True) -> list[str]:
    """What to report about them; empty if there are none."""
    where = f" (all in {FILE})" if listed else ""
    training, evaluation = sets
    lines = []
    if training.bad:
        lines.append(
            f"WARNING: {len(training.bad):,} of {training.samples:,} training samples are broken and were replaced "
            f"by others, the same on every run{where}: {training.some()}"
        )
    if evaluation.bad:
        lines.append(
            f"WARNING: {len(evaluation.bad):,} of {evaluation.samples:,} evaluation samples are broken and were "
            f"scored as black images{where}: {evaluation.some()}"
        )
    return lines

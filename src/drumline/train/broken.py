"""Broken samples of a run, agreed on by all ranks and told at the end.

Promises: every rank learns what any rank met, so a limit that is passed ends the run on all of them; the list in the
run folder (`broken-samples.tsv`) names each sample once.
"""

from __future__ import annotations

from drumline.data.ledger import Ledger
from drumline.launch.world import World

FILE = "broken-samples.tsv"


def agree(ledgers: tuple[Ledger, Ledger], world: World) -> None:
    """Brings the ranks' ledgers together. Every rank calls it; costs one small message when nothing is new."""
    counts = world.gather([len(ledger.bad) for ledger in ledgers])
    if any(row != counts[0] for row in counts) or any(counts[0]):
        for ledger, others in zip(
            ledgers, zip(*world.collect([x.bad for x in ledgers]), strict=True), strict=True
        ):
            ledger.merge(others)


def words(ledgers: tuple[Ledger, Ledger]) -> list[str]:
    """What to tell about them; nothing when all is well."""
    training, evaluation = ledgers
    told = []
    if training.bad:
        told.append(
            f"WARNING: {len(training.bad):,} of {training.samples:,} training samples are broken and were replaced "
            f"by others, the same on every run: {training.some()}"
        )
    if evaluation.bad:
        told.append(
            f"WARNING: {len(evaluation.bad):,} of {evaluation.samples:,} evaluation samples are broken and were "
            f"scored as black images: {evaluation.some()}"
        )
    return told

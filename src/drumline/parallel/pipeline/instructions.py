"""What one rank of a pipeline does in one optimizer step: a list of instructions.

Promises: the executor and the simulator run the same list, in its order. Nothing is implied: every tensor that moves
is received, waited for and sent by an instruction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """`stage` and `micro` of an instruction are those of the computing it is about."""

    RECEIVE_INPUT = "receive input"
    """Makes room for what stage - 1 sends and begins to receive it; does not wait."""
    WAIT_INPUT = "wait for input"
    """The input is there (on a GPU: the computing stream waits, not the host)."""
    FORWARD = "forward"
    SEND_OUTPUT = "send output"
    """Begins to send to stage + 1; does not wait."""
    RECEIVE_GRADIENT = "receive gradient"
    """Makes room for the gradient of this stage's output, from stage + 1, and begins to receive it."""
    WAIT_GRADIENT = "wait for gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"
    """Begins to send the gradient of this stage's input to stage - 1; does not wait."""
    REDUCE = "reduce"
    """Begins to exchange the stage's gradients with the other replicas; `micro` is -1."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do. Stage 0 reads images, the last one ends in the loss: neither receives or sends there."""

    kind: Kind
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro}" if self.micro >= 0 else ""
        return f"{self.kind} of stage {self.stage}{micro}"


Lists = Sequence[Sequence[Instruction]]
"""One list for each rank of a pipeline. Stage s belongs to rank s mod ranks."""

"""What one rank of a pipeline does in one optimizer step: a list of instructions, and spans that say when it did.

Promises: the executor and the simulator run the same list, in its order. Nothing is implied: every tensor that moves
is received, waited for and sent by an instruction of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """`stage` and `micro` of an instruction are those of the computation that it serves."""

    RECEIVE_INPUT = "receive input"
    """Allocates buffers for what stage - 1 sends and starts to receive it. Does not wait."""
    WAIT_INPUT = "wait for input"
    """Waits until the input is there (on a GPU the compute stream waits, not the host)."""
    FORWARD = "forward"
    SEND_OUTPUT = "send output"
    """Starts to send to stage + 1. Does not wait."""
    RECEIVE_GRADIENT = "receive gradient"
    """Allocates buffers for the gradient of this stage's output, from stage + 1, and starts to receive it."""
    WAIT_GRADIENT = "wait for gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"
    """Starts to send the gradient of this stage's input to stage - 1. Does not wait."""
    REDUCE = "reduce"
    """Starts to sum the stage's gradients over the replicas. `micro` is -1."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do. Stage 0 receives and sends nothing at its input, nor the last stage at its output."""

    kind: Kind
    stage: int
    micro: int = -1

    def __str__(self) -> str:
        micro = f", micro-batch {self.micro}" if self.micro >= 0 else ""
        return f"{self.kind} of stage {self.stage}{micro}"


InstructionLists = Sequence[Sequence[Instruction]]
"""One list for each rank of a pipeline. Stage s belongs to rank s mod ranks."""


@dataclass(frozen=True)
class Span:
    """What a rank (`lane`) was busy with, measured or simulated. A simulated copy is a span of its sender, with the
    kind of the send. A simulated wait has a span if it took any time."""

    lane: int
    kind: Kind
    stage: int
    micro: int
    start: float
    end: float

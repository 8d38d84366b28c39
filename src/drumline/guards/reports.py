"""Reports the findings of one model's guards: on this rank or on all ranks, as a stop or a warning.

Promises: a rank that stops leaves its finding in the store first, and every rank that waits for others, or is about
to step, stops with the same one. Only the first rank prints what all ranks find.
"""

from __future__ import annotations

from drumline.guards.finding import Finding, Stopped, Teller
from drumline.guards.hang import Pulse
from drumline.guards.meeting import Absent, Meeting


class Reports:
    """The findings of one model."""

    def __init__(self, teller: Teller, meeting: Meeting, pulse: Pulse) -> None:
        self.teller, self._meeting, self._pulse = teller, meeting, pulse
        self.stopped = False

    def together(self, finding: Finding, certain: bool) -> None:
        """A finding that all ranks share: only the first rank warns."""
        if certain and self.teller.action == "stop":
            self.tell(finding)
        elif self._meeting.rank == self._meeting.ranks[0]:
            self.teller.warn(finding)

    def alone(self, finding: Finding, certain: bool) -> None:
        """A finding of this rank only."""
        (self.tell if certain else self.teller.warn)(finding)

    def tell(self, finding: Finding) -> None:
        """A certain finding: the other ranks stop with the same message."""
        if self.teller.action == "stop" and finding.guard not in self.teller.ignore:
            self.stopped = True
            self._meeting.first("alert", vars(finding))
        self.teller.tell(finding)

    def not_compared(self, step: int) -> None:
        """Not all ranks reached a comparison in time. A rank that arrives later compares by itself."""
        self.teller.warn(
            Finding(
                "waiting",
                f"ranks were not compared at step {step}: not all arrived within {self._meeting.patience:.0f} s",
                f"rank {self._meeting.rank}",
                f"step {step}",
                "ignore this if a rank is saving or evaluating; otherwise look for a step that a rank skips",
            )
        )

    def pause(self) -> None:
        """Called while waiting for other ranks: stops if one of them has stopped."""
        told = self._meeting.look("alert")
        if told is not None:
            self.stopped = True
            raise Stopped(Finding(**told))
        if self._pulse.given_up is not None:
            raise Absent
        self.stop_if_found()

    def stop_if_found(self) -> None:
        """Stops if the watching thread has found a hang."""
        if self._pulse.found is not None:
            self.stopped = True
            raise Stopped(self._pulse.found)

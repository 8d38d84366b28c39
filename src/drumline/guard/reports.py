"""How findings leave the guards of one model: this rank alone or all ranks together, as a stop or a warning.

Promises: a rank that stops leaves its finding in the store first, and every rank that waits for others, or is about
to step, stops with the same one. What all ranks find alike is printed by the first of them only.
"""

from __future__ import annotations

from drumline.guard.finding import Finding, Stopped, Teller
from drumline.guard.hang import Pulse
from drumline.guard.meeting import Absent, Meeting


class Reports:
    """The findings of one model."""

    def __init__(self, teller: Teller, meeting: Meeting, pulse: Pulse) -> None:
        self.teller, self._meeting, self._pulse = teller, meeting, pulse
        self.stopped = False

    def together(self, finding: Finding, certain: bool) -> None:
        """What all ranks found alike: the first one alone warns."""
        if certain and self.teller.action == "stop":
            self.tell(finding)
        elif self._meeting.rank == self._meeting.ranks[0]:
            self.teller.warn(finding)

    def alone(self, finding: Finding, certain: bool) -> None:
        """What this rank found by itself."""
        (self.tell if certain else self.teller.warn)(finding)

    def tell(self, finding: Finding) -> None:
        """A certain finding: the other ranks stop with the same message."""
        if self.teller.action == "stop" and finding.guard not in self.teller.ignore:
            self.stopped = True
            self._meeting.first("alert", vars(finding))
        self.teller.tell(finding)

    def not_compared(self, step: int) -> None:
        """The other ranks did not come to a comparison in time; one that comes later compares by itself."""
        self.teller.warn(
            Finding(
                "waiting",
                f"ranks were not compared at step {step}: not all of them came in {self._meeting.patience:.0f} s",
                f"rank {self._meeting.rank}",
                f"step {step}",
                "nothing, if a rank is saving or evaluating; else look for a step that a rank leaves out",
            )
        )

    def pause(self) -> None:
        """While waiting for other ranks: has one of them stopped?"""
        told = self._meeting.look("alert")
        if told is not None:
            self.stopped = True
            raise Stopped(Finding(**told))
        if self._pulse.given_up is not None:
            raise Absent
        self.stop_if_found()

    def stop_if_found(self) -> None:
        """Whether the watching thread has found that ranks wait in vain."""
        if self._pulse.found is not None:
            self.stopped = True
            raise Stopped(self._pulse.found)

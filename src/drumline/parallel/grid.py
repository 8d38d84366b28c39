"""A run's processes as replicas of a pipeline: rank = replica x places + place.

Promises: the processes of a replica have consecutive ranks, so that activations stay on one machine if possible;
`peers` are the processes that hold the same stages and see other samples. Without a pipeline every process is a
replica of its own, and all are peers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drumline.parallel.world import World, single_process


@dataclass(frozen=True)
class Grid:
    """The position of this process, and the groups it communicates with."""

    world: World
    places: int
    """Processes of one replica."""
    peers: World
    """The same place in all replicas. The rank there is the number of the replica."""
    down: World
    """This replica, for activations that travel to the loss."""
    up: World
    """This replica, for gradients that travel back. A separate group, so that the two directions never wait for each
    other."""

    @property
    def place(self) -> int:
        """The number of this process in its replica."""
        return self.world.rank % self.places

    @property
    def replica(self) -> int:
        return self.world.rank // self.places

    @property
    def replicas(self) -> int:
        return self.world.size // self.places

    @property
    def reads(self) -> bool:
        """Whether this process reads the samples of its replica: the first one does."""
        return self.place == 0

    @property
    def ends(self) -> bool:
        """Whether the loss is computed here."""
        return self.place == self.places - 1


def make_grid(world: World, places: int = 1) -> Grid:
    """Divides the world into replicas. All ranks call it."""
    assert world.size % places == 0, (world.size, places)
    if places == 1:
        single = replace(
            single_process(world.device), local_rank=world.local_rank, local_size=world.local_size
        )
        return Grid(world, 1, world, single, single)
    replicas = [list(range(first, first + places)) for first in range(0, world.size, places)]
    peers = [list(range(place, world.size, places)) for place in range(places)]
    # Over NCCL the messages of one group go one after the other, sent or received: a receive that was begun early
    # would hold up a send that others wait for, and they it (1f1b over 4 places, in a simulation of such groups).
    apart = world.backend == "nccl"
    onward = [(place, (place + 1) % places) for place in range(places if apart else 0)]
    back = [(receiver, sender) for sender, receiver in onward]
    return Grid(world, places, world.split(peers), world.split(replicas, onward), world.split(replicas, back))

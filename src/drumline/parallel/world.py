"""The processes of a run: `World` is what communicates between ranks, and `Grid` divides a world into replicas.

The only module that calls torch.distributed's collectives. Promises: every method also works in a world of one, which
needs no process group; small control messages use gloo on the CPU and never touch the GPU's stream; the first rank
that fails records it where the others can see it, so an error is shown once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from drumline.core.account import waiting
from drumline.parallel.values import decode, encode

FAILED = "drumline/failed"


class Pending:
    """A transfer in progress. `wait` returns the received tensor; on a GPU it blocks the current stream, not the
    host."""

    def __init__(
        self, tensor: torch.Tensor, work: dist.Work | None = None, into: torch.Tensor | None = None
    ) -> None:
        self._tensor, self._work, self._into = tensor, work, tensor if into is None else into

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            with waiting():
                self._work.wait()
            self._work = None
            if self._into is not self._tensor:  # received in host memory
                self._into.copy_(self._tensor)
        return self._into

    def is_completed(self) -> bool:
        """Whether the transfer is done. Never blocks."""
        if self._work is not None and self._work.is_completed():
            self.wait()
        return self._work is None


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, and how to communicate with them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    shares_gpu: bool = False
    """Whether two of the processes compute on the same GPU."""
    store: dist.Store | None = None
    control: dist.ProcessGroup | None = None
    """A gloo group for host messages; None in a world of one."""
    group: dist.ProcessGroup | None = None
    """The group of a subset of the run's processes; None means all of them."""
    links: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict, compare=False)
    """Two-process groups by (sender, receiver), for messages that must not queue behind others."""
    timeout: timedelta | None = None
    """How long to wait for a message before it is an error; None: torch's default."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and the display."""
        return self.rank == 0

    # Tensors.

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over all ranks, in place."""
        if self.size > 1:
            with waiting():
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_async(self, tensor: torch.Tensor) -> Pending:
        """Starts an element-wise sum over all ranks, in place."""
        if self.size == 1:
            return Pending(tensor)
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over all ranks, in place."""
        if self.size > 1:
            with waiting():
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Starts sending a contiguous tensor to a rank, which receives it with the same tag. Do not change the tensor
        before the transfer is done."""
        assert tensor.is_contiguous(), "only a contiguous tensor can be sent"
        staged = self._staged(tensor)
        group, to = self._link(self.rank, to)
        return Pending(staged, dist.isend(staged, group=group, group_dst=to, tag=tag))

    def irecv(self, into: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Starts receiving the tensor that a rank sends with this tag. Messages arrive in the order they are sent."""
        staged = torch.empty_like(into, device="cpu") if self._needs_host(into) else into
        group, source = self._link(source, self.rank)
        return Pending(staged, dist.irecv(staged, group=group, group_src=source, tag=tag), into)

    def all_gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, concatenated in rank order. `counts` has the number of rows of each rank."""
        if self.size == 1:
            return rows
        assert len(rows) == counts[self.rank], (len(rows), counts, self.rank)
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in counts]
        with waiting():
            dist.all_gather(received, padded, group=self.group)
        return torch.cat([each[:count] for each, count in zip(received, counts, strict=True)])

    def all_to_all_async(self, send: torch.Tensor, rows: int, theirs: Sequence[int]) -> Pending:
        """Starts sending `send[q]`, `rows` rows, to each rank q. Receives the rows that every rank sends to this one,
        in rank order; `theirs` has their numbers."""
        assert send.shape[:2] == (self.size, rows), (send.shape, rows)
        width = send.shape[2]
        staged = self._staged(send)
        received = staged.new_empty((sum(theirs), width))
        work = dist.all_to_all_single(
            received.view(-1),
            staged.view(-1),
            [count * width for count in theirs],
            [rows * width] * self.size,
            group=self.group,
            async_op=True,
        )
        return self._unstaged(received, work, send.device)

    def all_gather_async(self, shard: torch.Tensor, into: torch.Tensor) -> Pending:
        """Starts gathering every rank's shard, in rank order, into one tensor."""
        whole = torch.empty_like(into, device="cpu") if self._needs_host(shard) else into
        # torch 2.13 renames it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(whole, self._staged(shard.contiguous()), group=self.group, async_op=True)
        return self._unstaged(whole, work, into.device)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's tensor to every rank, in place."""
        if self.backend == "nccl" and not tensor.is_cuda:  # such as a counter of the user's own optimizer
            return self.broadcast_host(tensor)
        if self.size > 1:
            with waiting():
                dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def _link(self, sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int]:
        """The group for messages from `sender` to `receiver`, and the rank of the other process in it."""
        other = receiver if sender == self.rank else sender
        link = self.links.get((sender, receiver))
        return (self.group, other) if link is None else (link, int(other > self.rank))

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory that the backend can read: gloo transfers host memory only."""
        return tensor.cpu() if self._needs_host(tensor) else tensor

    def _needs_host(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and self.backend == "gloo"

    @staticmethod
    def _unstaged(tensor: torch.Tensor, work: dist.Work, device: torch.device) -> Pending:
        if tensor.device == device:
            return Pending(tensor, work)
        with waiting():
            work.wait()
        return Pending(tensor.to(device))

    # Host messages.

    def broadcast_host(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copies one rank's tensor in host memory to every rank, in place."""
        if self.size > 1:
            with waiting():
                dist.broadcast(tensor, group=self.control, group_src=source)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's (small) value, on every rank. Encoded as JSON: `values.py` lists the supported types."""
        if self.size == 1:
            return value
        text = encode(value) if self.is_rank_zero else b""
        length = self.broadcast_host(torch.tensor([len(text)])).item()
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.is_rank_zero else None
        if content is None:
            content = torch.empty(int(length), dtype=torch.uint8)
        return decode(self.broadcast_host(content).numpy().tobytes())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's (small) value, in rank order, on every rank. Encoded as JSON: `values.py` lists the supported
        types."""
        if self.size == 1:
            return [value]
        text = encode(value)
        lengths = self.all_gather_integers(torch.tensor([len(text)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        received = self._all_gather_host(padded)
        return [
            decode(each[:length].numpy().tobytes()) for each, length in zip(received, lengths, strict=True)
        ]

    def all_gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's list of numbers, in rank order, on every rank. All lists have the same length."""
        return [
            row.tolist() for row in self._all_gather_host(torch.tensor(list(values), dtype=torch.float64))
        ]

    def all_gather_integers(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's int64 vector, stacked in rank order, on every rank."""
        return torch.stack(self._all_gather_host(values.to("cpu", torch.int64)))

    def _all_gather_host(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [tensor]
        received = [torch.empty_like(tensor) for _ in range(self.size)]
        with waiting():
            dist.all_gather(received, tensor, group=self.control)
        return received

    def gather_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """On rank 0, the tensors of all ranks in host memory (its own unchanged); empty elsewhere. If several ranks
        have a tensor of the same name, the lowest rank's is used."""
        if self.size == 1:
            return dict(tensors)
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        whole = dict(tensors) if self.is_rank_zero else {}
        by_rank = self.all_gather_object(specs)
        seen = set(by_rank[0])
        for rank, listed in enumerate(by_rank[1:], 1):
            for name, (shape, dtype) in listed.items():
                if name in seen:
                    continue
                seen.add(name)
                if self.is_rank_zero:
                    whole[name] = torch.empty(shape, dtype=dtype)
                    with waiting():
                        dist.recv(whole[name], group=self.control, group_src=rank)
                elif self.rank == rank:
                    dist.send(tensors[name].detach().cpu().contiguous(), group=self.control, group_dst=0)
        return whole

    def all_reduce_max_async(self, values: torch.Tensor) -> dist.Work | None:
        """Starts an element-wise maximum of a host tensor over all ranks, in place, and does not wait."""
        if self.size == 1:
            return None
        return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control, async_op=True)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.size > 1:
            with waiting():
                dist.barrier(group=self.control)

    def claim_failure(self) -> bool:
        """Records this rank as the first that failed. False if another rank was first: that error is the cause, and
        this one (most likely a broken connection) follows from it."""
        if self.store is None:
            return True
        try:
            return self.store.compare_set(FAILED, "", f"{self.rank}").decode() == f"{self.rank}"
        except dist.DistError:  # the process that hosts the store is gone, so it failed first
            return False

    # Groups.

    def split(self, groups: Sequence[Sequence[int]], links: Sequence[tuple[int, int]] = ()) -> World:
        """The group that this rank belongs to, as a world of its own. Every rank calls it with the same disjoint
        groups, each in ascending order. `links` are (sender, receiver) ranks within a group whose messages use a
        process group of their own."""
        mine = next(group for group in groups if self.rank in group)
        single = replace(single_process(self.device), local_rank=self.local_rank, local_size=self.local_size)
        if self.size == 1 or all(len(group) == 1 for group in groups):
            return single
        new_group = partial(dist.new_group, timeout=self.timeout)
        made = [(new_group(list(group)), new_group(list(group), backend="gloo")) for group in groups]
        pairs = [{link: new_group([group[rank] for rank in link]) for link in links} for group in groups]
        index, rank = list(groups).index(mine), list(mine).index(self.rank)
        if len(mine) == 1:
            return single
        group, control = made[index]
        world = replace(self, rank=rank, size=len(mine), group=group, control=control, links=pairs[index])
        world._open_links()
        return world

    def _open_links(self) -> None:
        """Sends a message through each link, one after the other. NCCL connects two processes at their first message
        and blocks both hosts until it has: within a step, a receive that starts early would keep its host from
        sending what the other process needs to reach that message (1f1b on two GPUs, from the first instruction)."""
        for sender, receiver in self.links:
            if self.rank == sender:
                self.isend(torch.zeros(1, device=self.device), to=receiver).wait()
            elif self.rank == receiver:
                self.irecv(torch.zeros(1, device=self.device), source=sender).wait()

    def close(self) -> None:
        """Destroys the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


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


def single_process(device: torch.device) -> World:
    """A world of one."""
    return World(rank=0, size=1, local_rank=0, local_size=1, device=device, backend="none")

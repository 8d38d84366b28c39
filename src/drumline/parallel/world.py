"""The processes of a run, as one value that is handed to whoever needs to talk to the others.

The only file that calls torch.distributed's collectives. Promises: a world of one needs no process group and
every method works on it; small control messages travel over gloo on the CPU, so they never touch the GPU's
stream; a failing rank leaves its message where the others can find it, so the error is shown once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from drumline.core.environment import LAUNCH_ID, Place, to_env
from drumline.core.errors import LostError, UserError
from drumline.core.listen import host_store, reach_store
from drumline.parallel.values import decode, encode

FAILED = "drumline/failed"


class Pending:
    """A message on its way. `wait` gives what came; on a GPU it makes the current stream wait, not the host."""

    def __init__(
        self, tensor: torch.Tensor, work: dist.Work | None = None, into: torch.Tensor | None = None
    ) -> None:
        self._tensor, self._work, self._into = tensor, work, tensor if into is None else into

    def wait(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._into is not self._tensor:  # it came to the host
                self._into.copy_(self._tensor)
        return self._into

    def over(self) -> bool:
        """Whether there is nothing left to wait for; never waits itself."""
        if self._work is not None and self._work.is_completed():
            self.wait()
        return self._work is None


@dataclass(frozen=True)
class World:
    """Who we are among how many, and how to reach the others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    shares_gpu: bool = False
    """Whether two of the processes compute on one GPU."""
    store: dist.Store | None = None
    control: dist.ProcessGroup | None = None
    """A gloo group for host messages; None in a world of one."""
    group: dist.ProcessGroup | None = None
    """Of a part of the run's processes; None: all of them."""
    links: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict, compare=False)
    """Groups of two, by sender and receiver, for messages that are not to wait for those of others."""
    timeout: timedelta | None = None
    """After which a message that does not come is an error; None: torch's own."""

    @property
    def first(self) -> bool:
        """Whether this is the process that draws and writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_later(self, tensor: torch.Tensor) -> Pending:
        """Starts an element-wise sum over all ranks, in place."""
        if self.size == 1:
            return Pending(tensor)
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def send_later(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Starts to send a contiguous tensor to a rank, which receives it by the same tag. The tensor must stay as it
        is until it has been waited for."""
        assert tensor.is_contiguous(), "only what lies densely in memory can be sent"
        through = self._through(tensor)
        group, to = self._link(self.rank, to)
        work = dist.isend(through, group=group, group_dst=to, tag=tag)
        return Pending(through, work)

    def receive_later(self, into: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Starts to receive what a rank sends by this tag. What is sent in one order is received in that order."""
        through = torch.empty_like(into, device="cpu") if self._by_host(into) else into
        group, source = self._link(source, self.rank)
        work = dist.irecv(through, group=group, group_src=source, tag=tag)
        return Pending(through, work, into)

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The rows of all ranks, one below the other in rank order. `counts` are the ranks' numbers of rows, known to
        each beforehand, so nobody has to ask."""
        if self.size == 1:
            return rows
        assert len(rows) == counts[self.rank], (len(rows), counts, self.rank)
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def exchange_later(self, send: torch.Tensor, rows: int, theirs: Sequence[int]) -> Pending:
        """Starts to send `send[q]`, `rows` rows, to each process q. What comes: every process's rows for us, in rank
        order; `theirs` says how many."""
        assert send.shape[:2] == (self.size, rows), (send.shape, rows)
        width = send.shape[2]
        through = self._through(send)
        came = through.new_empty((sum(theirs), width))
        work = dist.all_to_all_single(
            came.view(-1),
            through.view(-1),
            [count * width for count in theirs],
            [rows * width] * self.size,
            group=self.group,
            async_op=True,
        )
        return self._back(came, work, send.device)

    def gather_later(self, piece: torch.Tensor, into: torch.Tensor) -> Pending:
        """Starts to gather every process's piece, in rank order, into a tensor that is theirs together."""
        whole = torch.empty_like(into, device="cpu") if self._by_host(piece) else into
        # torch 2.13 renames it.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(whole, self._through(piece.contiguous()), group=self.group, async_op=True)
        return self._back(whole, work, into.device)

    def _link(self, sender: int, receiver: int) -> tuple[dist.ProcessGroup | None, int]:
        """The group that carries between the two, one of whom we are, and the other's rank there."""
        other = receiver if sender == self.rank else sender
        link = self.links.get((sender, receiver))
        return (self.group, other) if link is None else (link, int(other > self.rank))

    def _through(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the backend can take it from: gloo exchanges host memory only."""
        return tensor.cpu() if self._by_host(tensor) else tensor

    def _by_host(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and self.backend == "gloo"

    @staticmethod
    def _back(tensor: torch.Tensor, work: dist.Work, device: torch.device) -> Pending:
        if tensor.device == device:
            return Pending(tensor, work)
        work.wait()
        return Pending(tensor.to(device))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def broadcast_host(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """One rank's tensor in host memory on every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.control, group_src=source)
        return tensor

    def hand_over(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """On rank 0, the tensors of all ranks in host memory (its own as they are); on others, nothing. Where several
        have a name, the first one's is taken."""
        if self.size == 1:
            return dict(tensors)
        mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        whole = dict(tensors) if self.first else {}
        everybody = self.collect(mine)
        seen = set(everybody[0])
        for rank, listed in enumerate(everybody[1:], 1):
            for name, (shape, dtype) in listed.items():
                if name in seen:
                    continue
                seen.add(name)
                if self.first:
                    whole[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(whole[name], group=self.control, group_src=rank)
                elif self.rank == rank:
                    dist.send(tensors[name].detach().cpu().contiguous(), group=self.control, group_dst=0)
        return whole

    def share(self, value: Any) -> Any:
        """Rank 0's (small) value on every rank. It travels as JSON: `values.py` says what can."""
        if self.size == 1:
            return value
        text = encode(value) if self.first else b""
        length = self.broadcast_host(torch.tensor([len(text)])).item()
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.first else None
        if content is None:
            content = torch.empty(int(length), dtype=torch.uint8)
        return decode(self.broadcast_host(content).numpy().tobytes())

    def collect(self, value: Any) -> list[Any]:
        """Every rank's (small) value, in rank order, on every rank. It travels as JSON: `values.py` says what can."""
        if self.size == 1:
            return [value]
        text = encode(value)
        lengths = self.gather_integers(torch.tensor([len(text)])).flatten().tolist()
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(theirs, mine, group=self.control)
        return [decode(each[:length].numpy().tobytes()) for each, length in zip(theirs, lengths, strict=True)]

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's short list of numbers, on every rank, in rank order."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        if self.size == 1:
            return [mine.tolist()]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self.control)
        return [row.tolist() for row in theirs]

    def gather_integers(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's int64 vector, stacked in rank order, on every rank."""
        mine = values.to("cpu", torch.int64)
        if self.size == 1:
            return mine[None]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self.control)
        return torch.stack(theirs)

    def maximum_later(self, values: torch.Tensor) -> dist.Work | None:
        """Starts an element-wise maximum of a host tensor over all ranks, in place, and does not wait."""
        if self.size == 1:
            return None
        return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control, async_op=True)

    def barrier(self) -> None:
        """Waits for every rank."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def claim_failure(self) -> bool:
        """Marks this rank as the first that failed. False when another one was first: its error is the cause,
        ours (a broken connection, most likely) only follows from it."""
        if self.store is None:
            return True
        try:
            return self.store.compare_set(FAILED, "", f"{self.rank}").decode() == f"{self.rank}"
        except dist.DistError:  # whoever held the store is gone, so it was first
            return False

    def part(self, parts: Sequence[Sequence[int]], links: Sequence[tuple[int, int]] = ()) -> World:
        """The part of these processes that we belong to, as a world of its own. All ranks call it with the same
        parts, which share nobody and are in ascending order. `links` are ranks in a part, sender and receiver, whose
        messages travel apart from all others."""
        mine = next(part for part in parts if self.rank in part)
        single = replace(alone(self.device), local_rank=self.local_rank, local_size=self.local_size)
        if self.size == 1 or all(len(part) == 1 for part in parts):
            return single
        new_group = partial(dist.new_group, timeout=self.timeout)
        made = [(new_group(list(part)), new_group(list(part), backend="gloo")) for part in parts]
        pairs = [{link: new_group([part[rank] for rank in link]) for link in links} for part in parts]
        place, rank = list(parts).index(mine), list(mine).index(self.rank)
        if len(mine) == 1:
            return single
        group, control = made[place]
        world = replace(self, rank=rank, size=len(mine), group=group, control=control, links=pairs[place])
        world._open_links()
        return world

    def _open_links(self) -> None:
        """A message through each, one after the other. NCCL connects two processes at their first message and holds
        both hosts until it has: within a step, a receive that is begun early would keep its host from sending what
        the other needs to come to that message (1f1b on two GPUs, from the first instruction on)."""
        for sender, receiver in self.links:
            if self.rank == sender:
                self.send_later(torch.zeros(1, device=self.device), to=receiver).wait()
            elif self.rank == receiver:
                self.receive_later(torch.zeros(1, device=self.device), source=sender).wait()

    def close(self) -> None:
        """Leaves the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def alone(device: torch.device) -> World:
    """A world of one."""
    return World(rank=0, size=1, local_rank=0, local_size=1, device=device, backend="none")


def choose_backend(wanted: str, device: torch.device, shared: bool) -> str:
    """nccl when each process has a GPU to itself, gloo otherwise; what the user asked for if it exists."""
    if wanted == "auto":
        return "nccl" if device.type == "cuda" and not shared and dist.is_nccl_available() else "gloo"
    available = {
        "nccl": dist.is_nccl_available(),
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
    }
    if not available[wanted]:
        have = ", ".join(name for name, yes in available.items() if yes)
        raise UserError(
            f"parallel.backend = {wanted}: this torch was built without it", f"use one of: {have}, or auto"
        )
    if wanted == "nccl" and device.type != "cuda":
        raise UserError(
            "parallel.backend = nccl: moves data between GPUs, and this run has none", "use gloo, or auto"
        )
    if wanted == "nccl" and shared:
        raise UserError(
            "parallel.backend = nccl: several processes share a GPU, which NCCL refuses",
            "use gloo (auto does), or as many processes as GPUs",
        )
    return wanted


def join(
    place: Place | None, device_type: str, backend: str, timeout: float, listen: str | None = None
) -> World:
    """Meets the other processes named by `place`; None is a world of one. `device_type` is cpu or cuda. `listen` is
    the address at which rank 0 keeps the store they meet at, where no launcher keeps it; None: that of `place`."""
    device = pick_device(device_type, place.local_rank if place else 0)
    if place is None or place.world_size == 1:
        return alone(device)
    return meet(place, device, backend, timeout, listen)


def meet(
    place: Place, device: torch.device, backend: str, timeout: float, listen: str | None = None
) -> World:
    """Makes the process group."""
    os.environ.update(to_env(place))
    limit = timedelta(seconds=timeout)
    try:
        rank, size = place.rank, place.world_size
        store = _open_store(place, timeout, listen)
        shared = device.type == "cuda" and _share_a_gpu(store, device, rank, size)
        chosen = choose_backend(backend, device, shared)
        dist.init_process_group(
            chosen,
            timeout=limit,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            device_id=device if chosen == "nccl" else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        raise LostError(
            f"rank {place.rank} of {place.world_size} could not meet the others at "
            f"{place.master_addr}:{place.master_port} within {timeout:g} s ({_first_line(error)})",
            "check that every process was started, that the port is open, and the network interface "
            "(`drumline doctor`, --parallel.interface)",
        ) from error
    control = dist.new_group(backend="gloo", timeout=limit)
    return World(
        rank=place.rank,
        size=place.world_size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        device=device,
        backend=chosen,
        shares_gpu=shared,
        store=store,
        control=control,
        timeout=limit,
    )


def _open_store(place: Place, timeout: float, listen: str | None) -> dist.Store:
    """The store of this start of the processes: a launcher's, in which earlier starts may have left their keys, or
    rank 0's."""
    kept = place.started_by == "drumline" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 and not kept:
        store = host_store(listen or place.master_addr, place.master_port, timeout)
    else:
        store = reach_store(place.master_addr, place.master_port, timeout)
    # The id of the launch is known to our own processes alone: what others may write into the store is not read.
    start = f"{os.environ.get(LAUNCH_ID, '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"start/{start}", store)


def _share_a_gpu(store: dist.Store, device: torch.device, rank: int, size: int) -> bool:
    """Asks everybody for the identity of their GPU: indices alone mislead where each task sees only its own."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    return len({store.get(f"gpu/{other}") for other in range(size)}) < size


def pick_device(device_type: str, local_rank: int) -> torch.device:
    """This process's own device, made current, so that nothing lands on GPU 0 by default."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def resolve_device_type(wanted: str) -> str:
    """`auto` to cuda or cpu; cuda without a GPU is refused."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device = cuda, but torch sees no GPU", "see `drumline doctor`, or use --run.device cpu"
        )
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

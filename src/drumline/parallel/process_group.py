"""How a process joins its run: device, backend, store and process group become a `World`.

Promises: a single process needs no network; NCCL is used only where every process has a GPU of its own. A rendezvous
that fails raises `LostError`, with the address and the time it waited. A store is reached through the given address
only, where torch's TCPStore by default listens on every interface; a port in use raises `OSError`.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from drumline.core.environment import LAUNCH_ID, STORE_SOCKET, RankInfo, to_env
from drumline.core.errors import PEER_LOST, LostError, UserError
from drumline.core.machine import listening_socket
from drumline.parallel.world import World, single_process


def init_world(
    info: RankInfo | None, device_type: str, backend: str, timeout: float, listen: str | None = None
) -> World:
    """Connects to the other processes; a world of one without `info`. `device_type` is cpu or cuda. `listen` is the
    address at which rank 0 hosts the store if no launcher does; None: the master address of `info`."""
    device = pick_device(device_type, info.local_rank if info else 0)
    if info is None or info.world_size == 1:
        return single_process(device)
    return init_process_group(info, device, backend, timeout, listen)


def init_process_group(
    info: RankInfo, device: torch.device, backend: str, timeout: float, listen: str | None = None
) -> World:
    """Creates the process group."""
    os.environ.update(to_env(info))
    limit = timedelta(seconds=timeout)
    try:
        rank, size = info.rank, info.world_size
        store = _open_store(info, timeout, listen)
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
            f"rank {info.rank} of {info.world_size} could not reach the other ranks at "
            f"{info.master_addr}:{info.master_port} within {timeout:g} s ({_first_line(error)})",
            "check that every process was started, that the port is open, and the network interface "
            "(`drumline doctor`, --parallel.interface)",
            code=PEER_LOST,
        ) from error
    control = dist.new_group(backend="gloo", timeout=limit)
    return World(
        rank=info.rank,
        size=info.world_size,
        local_rank=info.local_rank,
        local_size=info.local_size,
        device=device,
        backend=chosen,
        shares_gpu=shared,
        store=store,
        control=control,
        timeout=limit,
    )


def choose_backend(wanted: str, device: torch.device, shared: bool) -> str:
    """`auto`: nccl if each process has a GPU of its own, gloo otherwise. Rejects a backend that cannot work here."""
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
            f"parallel.backend = {wanted}: this build of torch does not include it",
            f"use one of: {have}, or auto",
        )
    if wanted == "nccl" and device.type != "cuda":
        raise UserError(
            "parallel.backend = nccl: NCCL transfers data between GPUs, and this run has none",
            "use gloo, or auto",
        )
    if wanted == "nccl" and shared:
        raise UserError(
            "parallel.backend = nccl: several processes share a GPU, which NCCL does not support",
            "use gloo (auto does), or as many processes as GPUs",
        )
    return wanted


def pick_device(device_type: str, local_rank: int) -> torch.device:
    """This process's own device, made current, so that nothing is allocated on GPU 0 by default."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def resolve_device_type(wanted: str, field: str = "run.device") -> str:
    """Resolves `auto` to cuda or cpu. Rejects cuda without a GPU; `field` is what the user set."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{field} = cuda, but torch sees no GPU", f"see `drumline doctor`, or use --{field} cpu"
        )
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def host_store(listener: socket.socket, timeout: float) -> dist.TCPStore:
    """A store hosted by this process at a listening socket, which it closes with itself."""
    address, port = listener.getsockname()[:2]
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(
        address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _open_store(info: RankInfo, timeout: float, listen: str | None) -> dist.Store:
    """The key-value store of this start of the processes. Rank 0 hosts it, at the socket that our launcher opened if
    there is one; torchrun hosts it itself, and it may still hold the keys of earlier starts."""
    inherited = os.environ.get(STORE_SOCKET)
    if info.rank == 0 and inherited:
        listener = socket.socket(fileno=os.dup(int(inherited)))  # a later process group finds the socket too
        store = host_store(listener, timeout)
    elif info.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = host_store(listening_socket(listen or info.master_addr, info.master_port), timeout)
    else:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(info.master_addr, info.master_port, None, False, limit, wait_for_workers=False)
    # Only our own processes know the id of the launch, so keys that another program writes are never read.
    start = f"{os.environ.get(LAUNCH_ID, '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"start/{start}", store)


def _share_a_gpu(store: dist.Store, device: torch.device, rank: int, size: int) -> bool:
    """Compares the ids of the GPUs of all ranks. Indices are not enough where each task sees only its own GPU."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    return len({store.get(f"gpu/{other}") for other in range(size)}) < size


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

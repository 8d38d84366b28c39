"""The rank of this process and the launcher that started it, read from environment variables.

Promises: the same program runs alone, under our own launcher, torchrun, Slurm's srun, or with torch's variables set
by hand. Pure: reads only the given mapping. Rejects an incomplete set of variables and names the missing one, so that
no process runs alone by accident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drumline.core.errors import UserError

LAUNCHER = "DRUMLINE_LAUNCHER"
"""Set by our launcher for its workers: the launcher's process id."""

TRIAL = "DRUMLINE_TRIAL"
"""Set by `drumline why` for its short runs: its process id."""

LAUNCH_ID = "DRUMLINE_LAUNCH_ID"
"""Set by our launcher for its workers: random hexadecimal digits, one value per launch, the same on every machine."""

GENERATION = "DRUMLINE_GENERATION"
"""Set by our launcher for its workers: how many times they have been restarted, the same on every machine."""


CLAIMED = "DRUMLINE_CLAIMED"
"""Set by our launcher for its workers: the file with the name of the run folder."""

STORE_SOCKET = "DRUMLINE_STORE"
"""Set by our launcher for rank 0: the file descriptor of the socket at which rank 0 hosts the workers' store."""


@dataclass(frozen=True)
class RankInfo:
    """The rank of one process in the run, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int
    master_addr: str
    master_port: int
    started_by: Literal["drumline", "torchrun", "slurm", "env"]


def read_rank_info(env: Mapping[str, str]) -> RankInfo | None:
    """The rank of this process, or None if no launcher started it.

    torch's own variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) take precedence over Slurm's, so torchrun
    inside a Slurm job counts as torchrun.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torch_rank_info(env)
    if "SLURM_PROCID" in env:
        return _slurm_rank_info(env)
    return None


def thread_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """Settings for OpenMP, to be applied before torch is imported: idle threads release their core at once. By
    default they spin, and on a busy machine steps then take many times as long (measured by
    benchmarks/cpu_wait_policy.py). Empty if the user has set a policy."""
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    return {} if any(name in env for name in chosen) else {"OMP_WAIT_POLICY": "passive"}


def threads_asked(env: Mapping[str, str]) -> int:
    """The user's OMP_NUM_THREADS, or 0. torchrun sets it to 1 if the user did not, so 1 under torchrun is ignored."""
    first = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    count = int(first) if first.isascii() and first.isdigit() else 0
    by_torchrun = "TORCHELASTIC_RUN_ID" in env and LAUNCHER not in env
    return 0 if by_torchrun and count == 1 else count


def to_env(info: RankInfo) -> dict[str, str]:
    """The variables for `init_process_group(init_method="env://")` and torch's tools."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_size),
        "GROUP_RANK": str(info.node_rank),
        "MASTER_ADDR": info.master_addr,
        "MASTER_PORT": str(info.master_port),
    }


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list: `node01` of `node[01-03,07],gpu5`."""
    head = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", node_list.strip())
    if head is None:
        raise UserError(
            f"cannot read the Slurm node list {node_list!r}", "set MASTER_ADDR to the first host's name"
        )
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", head.group())


def slurm_port(job: int, step: int) -> int:
    """10000 + (31 * job + step) mod 20000: the same on every task, below the kernel's ephemeral range, and different
    for consecutive jobs and for steps that share a machine."""
    return 10000 + (31 * job + step) % 20000


def tasks_on_node(layout: str, node: int) -> int:
    """Tasks on one node of Slurm's `2(x3),1`: two on each of the first three nodes, one on the next."""
    first = 0
    for part in layout.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UserError(f"cannot read the Slurm task layout {layout!r}", "start the tasks with srun")
        first += int(match[2] or 1)
        if node < first:
            return int(match[1])
    raise UserError(f"the Slurm task layout {layout!r} has no node {node}", "start the tasks with srun")


def _torch_rank_info(env: Mapping[str, str]) -> RankInfo:
    """Variables as torchrun and our launcher set them, or four of them set by hand.

    Without LOCAL_RANK, all ranks are on this machine if the address is loopback; otherwise each machine has one rank.
    """
    rank, world = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise UserError(
            f"RANK = {rank} does not fit WORLD_SIZE = {world}",
            f"number the processes 0 to {max(world, 1) - 1}",
        )
    address, port = _text(env, "MASTER_ADDR"), _integer(env, "MASTER_PORT")
    together = address == "localhost" or address == "::1" or address.startswith("127.")
    local_rank = _integer(env, "LOCAL_RANK", rank if together else 0)
    local_size = _integer(env, "LOCAL_WORLD_SIZE", world if together else local_rank + 1)
    node = _integer(env, "GROUP_RANK", _integer(env, "NODE_RANK", 0 if together else rank // local_size))
    started_by: Literal["drumline", "torchrun", "env"] = "env"
    if LAUNCHER in env:
        started_by = "drumline"
    elif "TORCHELASTIC_RUN_ID" in env:
        started_by = "torchrun"
    return RankInfo(rank, world, local_rank, local_size, node, address, port, started_by)


def _slurm_rank_info(env: Mapping[str, str]) -> RankInfo | None:
    """A task of an srun step; None for a single task and for the batch script itself.

    sbatch gives its script SLURM_PROCID=0 and the job's SLURM_NTASKS although no other task exists yet; only srun
    sets SLURM_STEP_ID. MASTER_ADDR and MASTER_PORT are kept if a job script sets them.
    """
    if env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env:
        return None
    counter = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    world = _integer(env, counter)
    if world == 1:
        return None
    node = _integer(env, "SLURM_NODEID")
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if "MASTER_ADDR" in env:
        address = env["MASTER_ADDR"]
    else:
        step_list = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in env else "SLURM_JOB_NODELIST"
        address = first_host(_text(env, step_list if step_list in env else "SLURM_NODELIST"))
    derived = (
        0
        if "MASTER_PORT" in env
        else slurm_port(_integer(env, "SLURM_JOB_ID"), _integer(env, "SLURM_STEP_ID", 0))
    )
    local_rank = _integer(env, "SLURM_LOCALID")
    return RankInfo(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=local_rank,
        local_size=tasks_on_node(layout, node) if layout else local_rank + 1,
        node_rank=node,
        master_addr=address,
        master_port=_integer(env, "MASTER_PORT", derived),
        started_by="slurm",
    )


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        present = ", ".join(
            f"{key}={env[key]}" for key in ("RANK", "WORLD_SIZE", "SLURM_PROCID") if key in env
        )
        raise UserError(
            f"this process was started as a worker ({present}), but {name} is not set",
            f"set {name}, or unset RANK and WORLD_SIZE to run alone",
        )
    return env[name]


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    if not re.fullmatch(r"\d+", text):
        raise UserError(f"{name} = {text!r} is not a whole number", f"set {name} to a number, 0 or above")
    return int(text)

"""The step time of every schedule compared with its ideal, 1 / (1 + (P - 1) / (M C)) of perfect speed.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --rounds 9 --log layouts.jsonl
    python benchmarks/layouts.py --gpu                  # virtual devices of one GPU, kernels of known duration

Each stage sleeps for a known time (8 ms forward, 16 ms backward per micro-batch; half of that if a rank has two
stages) and sends 256 KiB to the next one, through the real executor. Ranks are first threads of one process
(virtual devices), then processes over gloo. Sleeping needs no processor, so the difference from the ideal is
scheduling, transport, and the delay that the machine adds to every sleep. One rank that does the same work alone,
in the same rounds, measures that delay. A third table adds a second replica and the exchange of gradients. On a
GPU, a stage is a kernel that waits, copies between virtual devices are real, and the host runs ahead. Cases
alternate in rounds; the tables show medians. P ranks, M micro-batches, C stages per rank. Prints markdown tables.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from drumline.config.recipe import Parallel, Recipe
from drumline.core.environment import read_rank_info
from drumline.launch.network import free_port
from drumline.launch.start import cuda_settings
from drumline.parallel.pipeline.mailbox import LaneDevice, Mailbox
from drumline.parallel.pipeline.schedule import SCHEDULES
from drumline.parallel.pipeline.step import GradientSum
from drumline.parallel.pipeline.transport import ProcessTransport
from drumline.parallel.process_group import init_world
from drumline.parallel.world import Grid, World, make_grid
from harness import Parser
from pipelines import CPU, Asleep, Case, Log, machine, median_ms, turns

WITHIN = 0.05
STEPS = 2
"""Steps per measurement over processes. Rank 0 computes first and last, so its clock is enough."""


@dataclass(frozen=True)
class Plan:
    """What to measure. The ranks get it as JSON."""

    ranks: tuple[int, ...] = (2, 4)
    micro_batches: tuple[int, ...] = (4, 8, 16)
    rounds: int = 5
    forward: float = 0.008
    gradient_bytes: int = 8 * 2**20
    """Gradients of each rank, exchanged with the other replica."""
    processes: int = 4
    """Two per replica. With two processes there is one replica and no exchange."""
    limit: float = 600.0

    def cases(self) -> list[Case]:
        return [
            Case(schedule, ranks, count, self.forward, 2 * self.forward)
            for schedule in ("model", *SCHEDULES)
            for ranks in self.ranks
            for count in self.micro_batches
        ]

    def every(self) -> list[Case]:
        """All cases, and for each the rank alone."""
        return list(dict.fromkeys([*self.cases(), *map(by_itself, self.cases())]))

    def exchanges(self) -> list[Case]:
        return [
            Case(schedule, 2, self.micro_batches[0], self.forward, 2 * self.forward) for schedule in SCHEDULES
        ]


SMALL = Plan(ranks=(2,), micro_batches=(4,), rounds=1, gradient_bytes=2**20, processes=2, limit=120.0)


def by_itself(case: Case) -> Case:
    """One rank with the same sleeps, which waits for no other rank."""
    pieces, each = case.pieces * case.chunks, case.size / case.chunks
    return Case("1f1b", 1, pieces, each * case.forward, each * case.backward, case.size * case.floats)


# ---- one process, a thread for each rank


def in_threads(plan: Plan, log: Log, device: torch.device = CPU) -> dict[Case, list[float]]:
    boxes = {
        ranks: Mailbox([LaneDevice.on(device) for _ in range(ranks)]) for ranks in sorted({1, *plan.ranks})
    }
    measures = {}
    for case in plan.every():
        box = boxes[case.ranks]
        asleep = Asleep(case, dict(enumerate(box.transports)), device=device)
        asleep.step(box)
        measures[case] = partial(asleep.step, box)
    return turns(plan.rounds, measures, lambda case, seconds: log_step(log, "threads", case, seconds))


def log_step(log: Log, what: str, case: Case, seconds: float) -> None:
    log.add(what, case=asdict(case), ideal=case.ideal, seconds=seconds)


# ---- a process for each rank

ARMS = ("none", "during", "after")


def one_rank(plan: Plan, out: Path) -> None:
    """Measures every case. Rank 0 writes the seconds, one JSON line each."""
    torch.set_num_threads(1)
    world = init_world(read_rank_info(os.environ), "cpu", "gloo", 300)
    grids = {ranks: make_grid(world, ranks) for ranks in sorted({1, 2, *plan.ranks})}
    wires = {ranks: ProcessTransport(grid.down, grid.up) for ranks, grid in grids.items()}
    log = Log(str(out)) if world.is_rank_zero else Log(None)

    def steps(case: Case, asleep: Asleep | None, count: int) -> float:
        world.barrier()
        begun = time.perf_counter()
        if asleep is not None:
            for _ in range(count):
                asleep.lanes[0].run(asleep.feed, asleep.score)
        return (time.perf_counter() - begun) / count

    measures = {}
    for case in plan.every():
        grid = grids[case.ranks]
        own = {grid.place: wires[case.ranks]} if grid.replica == 0 else None
        asleep = Asleep(case, own) if own else None
        steps(case, asleep, 1)  # sends the tensor layouts, once
        measures[case] = partial(steps, case, asleep, STEPS)
    turns(plan.rounds, measures, lambda case, seconds: log_step(log, "processes", case, seconds))
    exchanges(plan, world, grids[2], wires[2], log)
    world.close()


def exchanges(plan: Plan, world: World, grid: Grid, wire: ProcessTransport, log: Log) -> None:
    """Two replicas of two ranks: a step without an exchange, with an exchange of each stage as soon as it is
    complete, and with all exchanges after a rank has finished computing."""

    def step(asleep: Asleep, sums: GradientSum, own: Sequence[int], arm: str) -> list[float]:
        world.barrier()
        begun = time.perf_counter()
        (lane,) = asleep.lanes
        begin = sums.begin if arm == "during" else lambda stage: None
        if arm != "alone":
            lane.run(asleep.feed, asleep.score, reduce=begin)
        if arm in ("after", "alone"):
            for stage in own:
                sums.begin(stage)
        sums.finish()
        ended = time.perf_counter()
        moments = world.all_gather_floats([begun, ended])
        first = min(start for start, _ in moments)
        return [max(end for _, end in moments[place::2]) - first for place in range(2)]

    found: dict[tuple[str, str], list[list[float]]] = {}
    runs = {}
    for case in plan.exchanges():
        asleep = Asleep(case, {grid.place: wire}, reduces=True)
        own = list(asleep.lanes[0].stages)
        held = {stage: big(plan.gradient_bytes // len(own)) for stage in own}
        sums = GradientSum(held, grid.peers, nn.ParameterList(chain.from_iterable(held.values())))
        runs[case] = asleep, sums, own
        step(*runs[case], "during")
    for _ in range(plan.rounds):
        for case, run in runs.items():
            for arm in (*ARMS, "alone"):
                found.setdefault((case.schedule, arm), []).append(step(*run, arm))
    for (schedule, arm), ends in found.items():
        log.add("exchange", schedule=schedule, arm=arm, ends=ends)


def big(size: int) -> list[nn.Parameter]:
    """A stage's parameters for the exchange: zero gradients of `size` bytes."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.data = torch.zeros(size // 4)
    parameter.grad = torch.zeros(size // 4)
    return [parameter]


def over_processes(plan: Plan) -> list[dict[str, Any]]:
    """The measurements of the ranks; empty, with an error message, if they did not finish."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        common = {
            "WORLD_SIZE": str(plan.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, __file__, "--one-rank", json.dumps(asdict(plan)), str(out)]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(plan.processes)
        ]
        try:
            errors = [rank.communicate(timeout=plan.limit)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            errors = [f"not done after {plan.limit:.0f} s"]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.wait() for rank in ranks):
            print(f"over processes: FAILED\n{errors[0][-2000:]}", file=sys.stderr)
            return []
        return [json.loads(line) for line in out.read_text().splitlines()]


# ---- the tables


def print_steps(plan: Plan, found: dict[Case, list[float]]) -> None:
    print(
        "| schedule | P | M | ideal share | ideal, ms | measured, ms | of the ideal | relative to one rank alone |"
    )
    print("|---|---|---|---|---|---|---|---|")
    shares: list[tuple[float, float]] = []
    for case in plan.cases():
        shares.append(of_ideal(case, found))
        clock, alone = shares[-1]
        print(
            f"| {case.schedule} | {case.ranks} | {case.micro_batches} | {100 * case.ideal_share:.1f} % | "
            f"{1e3 * case.ideal:.0f} | {median_ms(found[case]):.1f} | {100 * clock:.1f} % | {100 * alone:.1f} % |"
        )
    good = [sum(share[column] >= 1 - WITHIN for share in shares) for column in range(2)]
    late = statistics.median(
        seconds / by_itself(case).work for case in plan.cases() for seconds in found[by_itself(case)]
    )
    print(
        f"\nWithin {100 * WITHIN:.0f} % of the ideal: {good[0]} of {len(shares)}; "
        f"relative to one rank alone: {good[1]}. "
        f"One rank alone takes {100 * (late - 1):.1f} % longer than it sleeps.\n",
        flush=True,
    )


def of_ideal(case: Case, found: dict[Case, list[float]]) -> tuple[float, float]:
    """The ideal as a fraction of the measured time: with the requested sleeps, and with those of one rank alone in
    the same round."""
    alone = found[by_itself(case)]
    relative = [mine / case.ideal_share / step for mine, step in zip(alone, found[case], strict=True)]
    return case.ideal / statistics.median(found[case]), statistics.median(relative)


def print_exchanges(plan: Plan, lines: Sequence[dict[str, Any]]) -> None:
    ends = {(line["schedule"], line["arm"]): line["ends"] for line in lines if line["what"] == "exchange"}
    print(
        "| schedule | without exchange, ms | as stages complete, ms | afterwards, ms | exposed | "
        "last stage finishes earlier by |"
    )
    print("|---|---|---|---|---|---|")
    for case in plan.exchanges():
        rows = [ends[case.schedule, arm] for arm in ARMS]
        step = [median_ms([max(row) for row in found]) for found in rows]
        early = median_ms([row[0] - row[1] for row in rows[1]])
        print(
            f"| {case.schedule} | {step[0]:.1f} | {step[1]:.1f} | {step[2]:.1f} | {step[1] - step[0]:.1f} ms | "
            f"{early:.1f} ms |"
        )
    each = [max(row) for (_, arm), found in ends.items() if arm == "alone" for row in found]
    print(f"\nThe exchange alone, both ranks at once: {median_ms(each):.1f} ms.")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--forward-ms", type=float, default=8.0, help="forward time of a rank; backward takes twice that"
    )
    parser.add_argument("--no-processes", action="store_true", help="only threads")
    parser.add_argument("--gpu", action="store_true", help="virtual devices of one GPU, in one process")
    parser.add_argument("--log", help="file for the measurements, as JSON lines")
    parser.add_argument("--one-rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one_rank:
        fields = json.loads(args.one_rank[0])
        tuples = {name: tuple(fields[name]) for name in ("ranks", "micro_batches")}
        one_rank(Plan(**{**fields, **tuples}), Path(args.one_rank[1]))
        return 0
    for name, value in cuda_settings(Recipe(parallel=Parallel(layout="pipeline"))).items():
        os.environ.setdefault(name, value)
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch finds no GPU here; without it, stages sleep on the CPU")
    plan = SMALL if args.small else Plan(rounds=args.rounds, forward=args.forward_ms / 1e3)
    log = Log(args.log)
    device = torch.device("cuda", 0) if args.gpu else CPU
    sleeps = f"{1e3 * plan.forward:g} + {2e3 * plan.forward:g} ms"
    print(f"{machine(device)}; stages that sleep {sleeps}; {plan.rounds} alternating rounds, medians\n")
    if args.gpu:
        print("One process, a thread and five streams per rank:\n")
        print_steps(plan, in_threads(plan, log, device))
        return 0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = in_threads(plan, log)
    torch.set_num_threads(before)
    print("One process, a thread per rank:\n")
    print_steps(plan, threads)
    if args.no_processes:
        return 0
    lines = over_processes(plan)
    if not lines:
        return 1
    for line in lines:
        log.add(**line)
    print("One process per rank, over gloo:\n")
    processes: dict[Case, list[float]] = {}
    for line in lines:
        if line["what"] == "processes":
            processes.setdefault(Case(**line["case"]), []).append(line["seconds"])
    print_steps(plan, processes)
    print(
        f"{plan.processes // 2} replica(s) of two ranks, M = {plan.micro_batches[0]}; each rank exchanges "
        f"{plan.gradient_bytes / 2**20:.0f} MiB of gradients:\n"
    )
    print_exchanges(plan, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Step time of every schedule on virtual stages against the ideal, 1 / (1 + (P - 1) / (M C)) of perfect speed.

    python benchmarks/layouts.py
    python benchmarks/layouts.py --rounds 9 --log layouts.jsonl
    python benchmarks/layouts.py --gpu                  # virtual devices of one GPU, kernels of known length

Each stage sleeps a known time (8 ms forward, 16 ms backward for a micro-batch; half of that where a rank has two
stages) and hands 256 KiB on, through the real executor: once with a thread for each rank (one process, virtual
devices), once with a process for each rank over gloo. Sleeping needs no processor, so what is missing to the ideal is
scheduling, transport, and what the machine adds to every sleep; the last is seen in one rank that does the same work
and waits for nobody, measured beside the others. A third table adds a second replica and the exchange of gradients.
On a GPU a stage is a kernel that waits, copies are real ones between virtual devices, and the host runs ahead.
Cases take turns, round after round; shown are medians. P ranks, M micro-batches, C stages on a rank. Prints markdown
tables.
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
from drumline.launch.worker import cuda_settings
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
"""Back to back, for one measurement over processes: rank 0 computes first and last, so its clock tells all."""


@dataclass(frozen=True)
class Plan:
    """What is measured; travels to the ranks as JSON."""

    ranks: tuple[int, ...] = (2, 4)
    micro_batches: tuple[int, ...] = (4, 8, 16)
    rounds: int = 5
    forward: float = 0.008
    gradient_bytes: int = 8 * 2**20
    """Of each rank, exchanged with the other replica."""
    processes: int = 4
    """Of them, two for each replica exchange gradients; with two there is one replica, and nothing to exchange."""
    limit: float = 600.0

    def cases(self) -> list[Case]:
        return [
            Case(schedule, ranks, count, self.forward, 2 * self.forward)
            for schedule in ("model", *SCHEDULES)
            for ranks in self.ranks
            for count in self.micro_batches
        ]

    def every(self) -> list[Case]:
        """With the rank that waits for nobody."""
        return list(dict.fromkeys([*self.cases(), *map(by_itself, self.cases())]))

    def exchanges(self) -> list[Case]:
        return [
            Case(schedule, 2, self.micro_batches[0], self.forward, 2 * self.forward) for schedule in SCHEDULES
        ]


SMALL = Plan(ranks=(2,), micro_batches=(4,), rounds=1, gradient_bytes=2**20, processes=2, limit=120.0)


def by_itself(case: Case) -> Case:
    """One rank with the same sleeps."""
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
    """Measures every case; rank 0 leaves the seconds, a JSON line for each."""
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
        steps(case, asleep, 1)  # layouts are told once
        measures[case] = partial(steps, case, asleep, STEPS)
    turns(plan.rounds, measures, lambda case, seconds: log_step(log, "processes", case, seconds))
    exchanges(plan, world, grids[2], wires[2], log)
    world.close()


def exchanges(plan: Plan, world: World, grid: Grid, wire: ProcessTransport, log: Log) -> None:
    """Two replicas of two ranks: a step without exchange, with one for each stage as soon as it is complete, and
    with all of them once a rank has computed everything."""

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
    """A stage's parameters as far as the exchange sees them: gradients that are there."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.data = torch.zeros(size // 4)
    parameter.grad = torch.zeros(size // 4)
    return [parameter]


def over_processes(plan: Plan) -> list[dict[str, Any]]:
    """What the ranks found; empty, with a word, if they did not finish."""
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
        clock, beside = shares[-1]
        print(
            f"| {case.schedule} | {case.ranks} | {case.micro_batches} | {100 * case.ideal_share:.1f} % | "
            f"{1e3 * case.ideal:.0f} | {median_ms(found[case]):.1f} | {100 * clock:.1f} % | {100 * beside:.1f} % |"
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
    """The ideal as a share of what was measured: with the sleeps as asked for, and as one rank alone had them in the
    same round."""
    alone = found[by_itself(case)]
    beside = [mine / case.ideal_share / step for mine, step in zip(alone, found[case], strict=True)]
    return case.ideal / statistics.median(found[case]), statistics.median(beside)


def print_exchanges(plan: Plan, lines: Sequence[dict[str, Any]]) -> None:
    ends = {(line["schedule"], line["arm"]): line["ends"] for line in lines if line["what"] == "exchange"}
    print(
        "| schedule | without, ms | as stages complete, ms | afterwards, ms | exposed | place 1 ends before |"
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
    print(f"\nThe exchange by itself, both places at once: {median_ms(each):.1f} ms.")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forward-ms", type=float, default=8.0, help="of a rank; backward takes twice that")
    parser.add_argument("--no-processes", action="store_true", help="threads alone")
    parser.add_argument("--gpu", action="store_true", help="on virtual devices of one GPU, in one process")
    parser.add_argument("--log", help="a file for JSON lines")
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
        parser.error("--gpu: torch sees no GPU here; without it stages sleep on the CPU")
    plan = SMALL if args.small else Plan(rounds=args.rounds, forward=args.forward_ms / 1e3)
    log = Log(args.log)
    device = torch.device("cuda", 0) if args.gpu else CPU
    sleeps = f"{1e3 * plan.forward:g} + {2e3 * plan.forward:g} ms"
    print(f"{machine(device)}; stages that sleep {sleeps}; {plan.rounds} rounds that take turns, medians\n")
    if args.gpu:
        print("One process, a thread and five streams for each rank:\n")
        print_steps(plan, in_threads(plan, log, device))
        return 0
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads = in_threads(plan, log)
    torch.set_num_threads(before)
    print("One process, a thread for each rank:\n")
    print_steps(plan, threads)
    if args.no_processes:
        return 0
    lines = over_processes(plan)
    if not lines:
        return 1
    for line in lines:
        log.add(**line)
    print("A process for each rank, over gloo:\n")
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

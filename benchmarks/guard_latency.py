"""How many steps pass before a guard reports each mistake: plain DDP scripts in two processes over gloo.

    python benchmarks/guard_latency.py
    python benchmarks/guard_latency.py --small      # two mistakes: a check that the script works

Runs `tests/guards/scripts/mistakes.py` once per mistake and prints the table of docs/guards.md: the first step with
the mistake, the optimizer step before which the guard reported it, and whether the script was stopped. Needs only a
CPU; takes a minute or two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.guards.scripts_run import Outcome, run_script

from harness import Parser

MISTAKES = {
    "module-call": ("`model.module(x)`", 1),
    "submodule-call": ("a submodule called directly", 1),
    "unwrapped": ("no DDP at all", 1),
    "no-sync": ("every backward under `no_sync()`", 1),
    "gradient-changed": ("a gradient changed on one rank", 1),
    "loss-parameter": ("a trained parameter outside the DDP module", 1),
    "drift": ("weights changed on one rank after wrapping", 1),
    "late-drift": ("weights changed on one rank at step 6 (ranks compare every 4)", 6),
    "rate": ("a different learning rate on one rank", 1),
    "buffers": ("BatchNorm buffers never made equal", 1),
    "same-samples": ("no DistributedSampler", 1),
    "same-ids": ("the same, with `watch.batch(ids)`", 1),
    "set-epoch": ("no `set_epoch` (6 steps per epoch)", 7),
    "unused": ("a parameter without gradient", 1),
    "outside": ("a parameter outside the optimizer", 1),
    "strangers": ("the optimizer created before a layer was replaced", 1),
    "teacher-trained": ("the teacher in the optimizer", 1),
    "teacher-gradients": ("backward through the teacher", 1),
    "teacher-train-mode": ("the teacher in train mode", 1),
    "past-end": ("cosine schedule past `T_max` = 3", 5),
    "dead-rate": ("the learning rate at 0 from step 5", 5),
    "scheduler-early": ("`scheduler.step()` before `optimizer.step()`", 1),
    "never-stepped": ("the scheduler never stepped (6 steps per epoch)", 7),
    "left-in-eval": ("`model.eval()` left on after epoch 1", 7),
    "frozen-norms": ("BatchNorm switched to eval mode after epoch 1", 7),
    "bad-batch": ("a NaN in one rank's batch at step 5", 5),
    "bad-layer": ("a layer overflows at step 5", 5),
    "bad-loss": ("the loss's gradient is NaN at step 5", 5),
}


SMALL = ("module-call", "bad-batch")


def main() -> None:
    mistakes = SMALL if Parser(__doc__).parse_args().small else tuple(MISTAKES)
    print("| mistake | guard | in effect at step | reported before step | outcome |\n|---|---|---|---|---|")
    for mistake in mistakes:
        words, begins = MISTAKES[mistake]
        outcome = run_script("mistakes.py", 2, mistake)
        guard = re.search(r"\[([a-z-]+)\]", outcome.finding(0))
        assert guard is not None
        done = "stopped" if all(outcome.codes) else "warned"
        print(f"| {words} | {guard[1]} | {begins} | {reported_at(outcome, guard[1])} | {done} |", flush=True)


def reported_at(outcome: Outcome, guard: str) -> int:
    """The optimizer step before which the guard reported. The script prints a line when it starts one."""
    text = outcome.err[0]
    before = text[: text.index(f"drumline guard [{guard}]")]
    return int(re.findall(r"begins step (\d+)", before)[-1])


if __name__ == "__main__":
    main()

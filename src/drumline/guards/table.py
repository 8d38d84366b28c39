"""The table of guards: what each finds, and the checks that both loops run.

`docs/guards.md` is written from it, and `ignore=[...]` accepts its names. Drumline's own loop (`training/guards.py`)
and a user's loop (`script/`) both call the checks of `LOCAL_CHECKS` and `RANK_CHECKS`. A user's loop also calls those
of `COMPARED` and `AT_CLOSE`. Checks that follow a loop from step to step are in `script/monitors.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drumline.guards.checks.data import (
    different_inputs,
    different_label_columns,
    different_labels,
    overlap,
    same_samples,
)
from drumline.guards.checks.drift import summed_gradients
from drumline.guards.checks.model import (
    different_copies,
    different_modes,
    different_teachers,
    not_in_optimizer,
)
from drumline.guards.checks.setup import (
    different_losses,
    different_settings,
    frozen_on_some_ranks,
    memory_elsewhere,
    memory_imbalance,
    memory_of,
    misplaced,
    shared_gpu,
)
from drumline.guards.finding import Finding, LocalCheck, LoopState, RankCheck, Reports


@dataclass(frozen=True)
class Guard:
    """One guard: its name in messages and in `ignore`, and what it finds, as Markdown."""

    name: str
    finds: str
    stops: bool = False
    """Whether it stops a user's loop if it is certain."""


LOCAL_CHECKS: tuple[LocalCheck, ...] = (not_in_optimizer, misplaced)
"""On each rank, in both loops, at every step at which ranks compare their state; with a single rank too."""
REPORTS: dict[str, Callable[[LoopState], Any]] = {"memory": memory_of}
"""What each rank reports to the checks across ranks, by name: in Drumline's own loop after its third step, in a
user's loop before its first and third step. At the other comparisons of a user's loop, each report is None."""
RANK_CHECKS: tuple[RankCheck, ...] = (memory_elsewhere, memory_imbalance)
"""Over all ranks, in both loops, at the steps at which they report (see `REPORTS`)."""
COMPARED: tuple[RankCheck, ...] = (
    same_samples,
    overlap,
    different_label_columns,
    different_settings,
    frozen_on_some_ranks,
    different_inputs,
    different_losses,
    summed_gradients,
    different_labels,
    different_teachers,
    different_modes,
    shared_gpu,
)
"""Over all ranks, in a user's loop, whenever ranks compare their state."""
AT_CLOSE: tuple[RankCheck, ...] = (different_copies, overlap, different_losses, different_teachers)
"""Over all ranks, in a user's loop, after its last step."""

GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "bypass",
            "Gradients that differ between ranks just before a step: `.module` called, a part called "
            "directly, no wrapper, `no_sync()` around the last backward, gradients changed afterwards. If "
            "weights have drifted because some steps bypassed the wrapper, this guard names the line. A "
            "trained parameter outside the wrapper only warns: it may be this rank's slice of a head that is "
            "split.",
            stops=True,
        ),
        Guard(
            "drift",
            "Parameters, optimizer state, learning rates or other numbers of the optimizer that differ "
            "between ranks. The minority is reported; with two ranks, both are. Before the first step: "
            "optimizer state that only some ranks have loaded. Weights and learning rates are compared at the "
            "end of the run too.",
            stops=True,
        ),
        Guard("modes", "A layer in train mode on one rank and in eval mode on another.", stops=True),
        Guard(
            "buffers",
            "Buffers that differ if nothing makes them equal (`broadcast_buffers=False`, no wrapper).",
        ),
        Guard(
            "rounding",
            "A difference below 1e-5 of the largest value: different machines or thread counts.",
        ),
        Guard(
            "setup",
            "A different dropout rate, layer, optimizer, autocast or `cross_entropy` setting on one rank; a "
            "parameter that is frozen on one rank only.",
        ),
        Guard(
            "inputs",
            "Inputs whose mean or standard deviation differs by a factor of 10 between ranks in each of the "
            "first 3 steps.",
        ),
        Guard(
            "same-samples",
            "Ranks that are fed the same batch twice in a row. Warns if ranks read the same samples in a "
            "different order or with different augmentation, if every rank reads the whole data set (also "
            "inside your own data sets that wrap it), if a DistributedSampler has the wrong seed, epoch or "
            "number of replicas, and if one batch is used in every step.",
            stops=True,
        ),
        Guard("set-epoch", "Two training passes over the same samples in the same random order."),
        Guard(
            "labels",
            "Labels in a different order from the loader's; data sets with the same inputs and different "
            "labels on two ranks.",
        ),
        Guard("zero-grad", "Gradients that are never zeroed (`zero_grad` is missing).", stops=True),
        Guard(
            "zero-gradients",
            "Gradients that are all zero or missing at the step although the loss has one (for "
            "example, `zero_grad` is called too late).",
            stops=True,
        ),
        Guard("stale-gradients", "Steps without a backward in between."),
        Guard("accumulation", "Several backward passes per step whose sum is not divided."),
        Guard(
            "averaging",
            "Gradients that are the sum over ranks instead of the mean: a manual `all_reduce` without "
            "division, or a second one after DDP.",
        ),
        Guard("scaler", "`optimizer.step()` with gradients that a GradScaler has scaled."),
        Guard("seed", "A random generator that is seeded again in every step."),
        Guard("clipping", "Clipping before `GradScaler.unscale_`."),
        Guard("gather", "`all_gather` or `all_reduce`, which have no gradient, on a tensor of the loss."),
        Guard(
            "loss",
            "Softmax or sigmoid before a loss that applies it; a rank with a different loss, or with a loss "
            "that stays far above the others'.",
        ),
        Guard(
            "non-finite",
            "A gradient that is not finite, before the step (on a GPU, after the third step: one step later). "
            "Names the rank and the first layer (or the batch, the loss, a parameter), and saves the batch.",
            stops=True,
        ),
        Guard(
            "hidden-nan",
            "NaN in the model's output, its gradient or the loss that something replaces before the step.",
        ),
        Guard(
            "parameters",
            "A trainable parameter without a gradient in the first step of strict DDP; a layer that was "
            "replaced after the optimizer was created; a loss that reaches no parameter in the first 3 steps. "
            "Warns about parameters without a gradient in 20 steps (or in a whole shorter run of at least 8 "
            "steps), parameters outside every optimizer, and an optimizer that is never stepped. A gradient "
            "that is removed after backward (`p.grad = None`) counts as present.",
            stops=True,
        ),
        Guard(
            "teacher",
            "A teacher that you passed and that is in train mode or in the optimizer. Warns about a teacher "
            "in train mode that you did not pass, one that differs between ranks, and a backward that reaches "
            "it. A target network that follows the model may be in train mode.",
            stops=True,
        ),
        Guard("ema", "A copy of the weights (a moving average) that differs between ranks."),
        Guard(
            "eval-mode",
            "The model trained in eval mode after it was in train mode; warns if it never was.",
            stops=True,
        ),
        Guard("frozen-norms", "BatchNorm switched to eval mode after it was trained."),
        Guard(
            "frozen",
            "A parameter with `requires_grad=False` that the optimizer still changes (momentum or weight decay with "
            "an old gradient). Warns if something else changes it, and about frozen BatchNorm layers in train mode, "
            "whose running statistics still change. A copy that follows trained weights may change.",
            stops=True,
        ),
        Guard("train-mode", "The model evaluated in train mode."),
        Guard(
            "schedule",
            "`CosineAnnealingLR` past `T_max`; a learning rate of 0 while training continues, or in every "
            "step; a scheduler that is never stepped, or stepped before the optimizer.",
        ),
        Guard(
            "steps",
            "A rank that has left its loop, skipped a step (`if not isfinite(loss): continue`) or waits in a "
            "different collective while others wait in a step. Names the rank and the skipped step, and ends "
            "every rank. Also, when the run ends, ranks with unequal numbers of steps and different weights.",
            stops=True,
        ),
        Guard(
            "waiting",
            "A rank that is busy, not hung, and keeps the others waiting; a comparison that not all ranks "
            "reached in time.",
        ),
        Guard(
            "evaluation",
            "Samples counted twice (padding) or left out, and how many; a `count` that is a total over all "
            "ranks instead of this rank's own.",
            stops=True,
        ),
        Guard(
            "device",
            "A teacher or buffer that is not on the rank's device; memory on another rank's GPU.",
            stops=True,
        ),
        Guard("shared-gpu", "Two ranks on one GPU."),
        Guard("memory", "One GPU much fuller than the others."),
    )
}
"""The guards of a user's loop, in the order of docs/guards.md."""


def findings(checks: tuple[RankCheck, ...], reports: Reports) -> list[Finding]:
    """What these checks find."""
    return [finding for check in checks if (finding := check(reports)) is not None]

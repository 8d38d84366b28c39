"""Rules about a GPU: launches, copies, clocks, power; and about the teacher and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.account import BACKWARD, COMPUTE, FORWARD, OPTIMIZER, TEACHER
from drumline.core.text import percent
from drumline.diagnosis.figures import Figures, ms
from drumline.diagnosis.rules.host import own_line
from drumline.diagnosis.slowdown import Slowdown

BEHIND = 0.7
"""Fraction of the steps that the GPU begins before the host has started all their work: the host is not ahead."""
HOST_FILLS = 0.8
"""The host's part of a step, as a fraction of the GPU's, above which the GPU waits for launches."""
IDLE_WORTH = 0.1
"""Fraction of the time in which the GPU does nothing."""
COPY_WORTH = 0.05
TEACHER_WORTH, OPTIMIZER_WORTH = 0.25, 0.2
HELD_BACK = 0.3
"""Fraction of the readings in which temperature or power holds the clock back."""
LAUNCHING = (COMPUTE, TEACHER, FORWARD, BACKWARD, OPTIMIZER)
"""What the host does to start a step's work."""
FUSED = ("torch.optim:SGD", "torch.optim:Adam", "torch.optim:AdamW", "torch.optim:Adagrad")


def launch_bound(figures: Figures) -> Iterator[Slowdown]:
    """The GPU idles inside the step, between kernels that Python launches one by one."""
    if not figures.on_gpu or figures.fact("captured") or figures.mean("behind") < BEHIND:
        return
    launching = sum(figures.mean(f"host_{part}_ms") for part in LAUNCHING)
    compute = figures.mean("compute_ms")
    if launching < HOST_FILLS * compute:
        return
    idle = 1 - figures.mean("gpu_use") if figures.known("gpu_use") else 0.0
    if figures.known("gpu_use") and idle < IDLE_WORTH:
        return
    text = (
        f"the GPU waits for launches: the host needs {ms(launching)} to launch a step's kernels, the GPU "
        f"{ms(compute)} to run them"
    )
    text += f"; the GPU is busy for {percent(1 - idle)} of the time" if figures.known("gpu_use") else ""
    why_not = figures.fact("not_captured", "")
    text += f"; no CUDA graph: {why_not}" if why_not else ""
    if where := own_line(figures):
        text += f"; in your own code, the host is most often at {where}"
    flag = figures.flag("train.capture", "auto") if figures.setting("train.capture") == "off" else ""
    flag = flag or figures.flag("train.compile", True)
    yield figures.slowdown(
        "launch", text, idle * compute, flag, "capture or compile the step, or use a larger batch"
    )


def copies(figures: Figures) -> Iterator[Slowdown]:
    copy = figures.mean("copy_ms")
    if copy < COPY_WORTH * figures.step_ms:
        return
    text = (
        f"copies to the GPU take {percent(copy / figures.step_ms)} of each step ({ms(copy)}) and do not overlap with "
        "computation"
    )
    fix = "augment less on the GPU, or copy smaller batches (images are copied as uint8)"
    if figures.fact("pinned") is False:
        text += ": batches are not pinned"
        fix = "DataLoader(pin_memory=True) and .to(device, non_blocking=True)"
    yield figures.slowdown("copy", text, copy, fix=fix)


def held_back(figures: Figures) -> Iterator[Slowdown]:
    """Clocks that are throttled by temperature or the power limit."""
    for name, code, why in (
        ("gpu_hot", "thermal", "temperature"),
        ("gpu_capped", "power", "power limit"),
    ):
        values, clocks = figures.get(name), figures.get("gpu_clock")
        rank = max(range(figures.ranks), key=lambda each: values[each])
        if values[rank] < HELD_BACK or not clocks[rank]:
            continue
        of = f" of rank {rank}" if figures.ranks > 1 else ""
        text = (
            f"the GPU{of} is throttled by its {why} for {percent(values[rank])} of the time: its clock is at "
            f"{percent(clocks[rank])} of its maximum"
        )
        if code == "thermal":
            text += f", at {figures.get('gpu_celsius')[rank]:.0f} °C"
            fix = "improve its cooling"
        else:
            watts, limit = figures.get("gpu_watts")[rank], figures.get("gpu_watts_limit")[rank]
            text += f", at {watts:.0f} of {limit:.0f} W"
            fix = "raise the limit if the card allows it (nvidia-smi -pl); otherwise the card cannot do more"
        yield figures.slowdown(code, text, 0.0, fix=fix)


def teacher(figures: Figures) -> Iterator[Slowdown]:
    """The teacher is computed again in each epoch."""
    taken = _part(figures, TEACHER)
    if taken < TEACHER_WORTH * figures.step_ms or figures.setting("distill.cache"):
        return
    text = f"the teacher takes {figures.share(taken)}: without it, the speed would be {figures.speed_without(taken)}"
    flag = figures.flag("distill.cache", "teacher-cache")
    fix = "the next run fills the cache with the teacher's outputs; later runs with the same data read them from it"
    yield figures.slowdown("teacher", text, taken, flag, fix if flag else "use a smaller teacher")


def optimizer(figures: Figures) -> Iterator[Slowdown]:
    taken = _part(figures, OPTIMIZER)
    if taken < OPTIMIZER_WORTH * figures.step_ms:
        return
    name = figures.setting("optim.name")
    unfused = figures.fact("fused") is False
    flag, fix = "", "use a larger batch, which needs fewer updates per epoch"
    if name in FUSED and "fused" not in " ".join(figures.setting("optim.args")):
        given = ",".join((*figures.setting("optim.args"), "fused:true"))
        flag, unfused = figures.flag("optim.args", given), True
    elif unfused:
        fix = "create the optimizer with fused=True"
    elif figures.recipe is not None:
        return  # the built-in optimizers are fused: `small-batch` says what helps
    text = f"the optimizer takes {percent(taken / figures.step_ms)} of each step ({ms(taken)})"
    text += ": it is not fused" if unfused else ""
    yield figures.slowdown("optimizer", text, 0.0, flag, fix)


RULES = (launch_bound, copies, held_back, teacher, optimizer)


def _part(figures: Figures, part: str) -> float:
    """A part of the step on the device, or on the host if that is the device."""
    name = f"device_{part}_ms" if figures.on_gpu else f"host_{part}_ms"
    return figures.mean(name)

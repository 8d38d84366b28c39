"""Rules about the host: what the loop does besides computing, inside and between steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drumline.config.sources import names_code
from drumline.core.account import BETWEEN_STEPS, COMPUTE, DATA, EXCHANGE, GUARDS, LOG, OTHER
from drumline.core.text import percent
from drumline.diagnosis.figures import HOST_PARTS, Figures, ms
from drumline.diagnosis.slowdown import Slowdown

LOG_WORTH, GUARDS_WORTH = 0.05, 0.08
"""Fractions of a step that logging and guards may take."""
MANY = 30
"""Fingerprints whose mean is known well, also on a busy machine."""
STALL_WORTH = 0.12
"""Fraction of a step in which the loop neither runs, nor wants to run, nor waits for data or another process."""
FIXED_WORTH = 0.3
"""Fraction of a step that does not depend on the batch."""
QUEUE_WORTH = 0.25
"""Fraction of its time that the loop waits for a core."""
OVERCOMMITTED = 2.0
"""Threads that compute, for each core."""
OWN_LINE_WORTH = 0.1
"""Fraction of the samples that find the loop in one line of the user's code, above which the line is named."""
LARGER = 4
"""The advised batch, in batches of now."""
OVERHEAD_SURE = 0.6
"""An evaluation does less for each image, so a smaller difference shows nothing."""
SMALL_BATCH = 32
"""Samples per process and step above which a batch is not small."""
LATE_WORTH = 0.08
"""Fraction of the time for which a GPU waits for the host between two steps."""


def logging(figures: Figures) -> Iterator[Slowdown]:
    taken = _critical(figures, LOG)
    if _unimportant(figures, taken, LOG_WORTH):
        return
    every = figures.setting("train.log_every") or 0
    rarer = max(50, 10 * every)
    text = f"logging takes {figures.share(taken)}" + (f", with a line every {_steps(every)}" if every else "")
    saved = taken * (1 - every / rarer) if every else taken
    flag = figures.flag("train.log_every", rarer) if every else ""
    yield figures.slowdown(
        "logging",
        text,
        saved,
        flag,
        "log less often, and do not read values from the device just to log them",
    )


def guards(figures: Figures) -> Iterator[Slowdown]:
    """Only what rarer fingerprints would save: those of the first steps and of saves stay."""
    every, steady = figures.setting("guard.every"), figures.steady
    if not every:
        return
    first, last = steady[0].step - steady[0].steps, steady[-1].step
    regular = last // every - first // every
    # The mean of many waits for a core as often as the rest of a step does.
    taken = max(figures.get("host_guards_ms")) if regular >= MANY else _critical(figures, GUARDS)
    if _unimportant(figures, taken, GUARDS_WORTH):
        return
    saves = sum(each.get("host_checkpoint_ms")[0] > 0 for each in steady)
    saved = taken * regular / max(1, regular + saves) * (1 - every / max(100, 10 * every))
    if saved < GUARDS_WORTH * figures.step_ms:
        return
    yield figures.slowdown(
        "guards",
        f"guards take {figures.share(taken)}, with fingerprints every {_steps(every)}",
        saved,
        figures.flag("guard.every", max(100, 10 * every)),
        "take fingerprints less often",
    )


def stalled(figures: Figures) -> Iterator[Slowdown]:
    """The loop sleeps inside a step: it waits for something that is neither data nor another process. On a GPU the
    host may wait for the device."""
    if figures.on_gpu:
        return
    stall = min(stalled_ms(figures, rank) for rank in range(figures.ranks))
    if not _stalls(figures):
        return
    where = own_line(figures)
    parts = [part for part in HOST_PARTS if part not in (DATA, EXCHANGE)]
    longest = max(parts, key=lambda part: figures.mean(f"host_{part}_ms"))
    text = (
        f"the loop sleeps for {figures.share(stall)}: it neither computes nor waits for data or another "
        f"process. The longest part is {longest} ({ms(figures.mean(f'host_{longest}_ms'))})"
    )
    named = figures.own_code("train.loss", "model.name", "optim.name", "distill.method")
    if where:
        text += f"; most of it at {where}"
    elif named:
        text += f"; your own code in the step: {', '.join(named)}"
    fix = "look there for a sleep, a request, a print, a file or a lock, and move it out of the step"
    yield figures.slowdown("stall", text, stall, fix=fix)


def own_loss(figures: Figures) -> Iterator[Slowdown]:
    """The loop is often found in one line of the user's own loss, which should take little beside a model. How much
    would be saved is not known: its backward costs time too."""
    loss = figures.setting("train.loss")
    if figures.on_gpu or not loss or not names_code(loss) or _stalls(figures):
        return
    where = own_line(figures)
    if f" in {loss.rpartition(':')[2]} (" not in where:
        return
    fix = "compute it for the whole batch at once, without Python loops, .item(), prints and requests"
    yield figures.slowdown("loss", f"the loop is in one line of your own loss, {where}", fix=fix)


def late_host(figures: Figures) -> Iterator[Slowdown]:
    """The device waits for the host although its batch is ready."""
    late = figures.mean("late_ms")
    if not figures.on_gpu or late < LATE_WORTH * figures.step_ms:
        return
    between = (LOG, GUARDS, OTHER, COMPUTE)
    longest = max(between, key=lambda part: figures.mean(f"host_{part}_ms"))
    text = (
        f"the GPU waits for the host for {figures.share(late)}, although its batch is ready. The longest part of "
        f"the host's work between two steps is {longest} ({ms(figures.mean(f'host_{longest}_ms'))})"
    )
    if where := own_line(figures):
        text += f"; in your own code, the host is most often at {where}"
    yield figures.slowdown(
        "late-host",
        text,
        late,
        fix="look for .item(), print or file access in your own code between two steps",
    )


def small_batch(figures: Figures) -> Iterator[Slowdown]:
    """Much of a step does not depend on its batch. On a GPU, the host only starts the work."""
    rank_batch = figures.fact("rank_batch", figures.batch / figures.ranks)
    if figures.on_gpu or rank_batch > SMALL_BATCH:
        return
    passes = figures.mean("host_forward_ms") + figures.mean("host_backward_ms")
    launching = passes * _overhead(figures, rank_batch)
    fixed = figures.fixed_ms + launching
    if fixed < FIXED_WORTH * figures.step_ms:
        return
    text = (
        f"a step of {rank_batch:.0f} images{' per process' if figures.ranks > 1 else ''} takes "
        f"{ms(figures.step_ms)}, of which {ms(fixed)} ({percent(fixed / figures.step_ms)}) does not depend on the "
        f"batch size: {ms(figures.fixed_ms)} for the optimizer, logging and Python"
    )
    if launching:
        text += f", and {ms(launching)} in forward and backward that evaluations in large batches avoid"
    yield figures.slowdown(
        "small-batch",
        text,
        fixed * (1 - 1 / LARGER),
        figures.larger_batch(LARGER),
        "use a larger batch, and adapt the learning rate (optim.lr_scaling)",
    )


def too_many_threads(figures: Figures) -> Iterator[Slowdown]:
    """More threads compute than there are cores, so they wait for each other."""
    cores, threads = figures.cores, int(figures.fact("torch_threads", 0))
    if figures.on_gpu or not cores or not threads:
        return
    workers = 0 if figures.fact("arrays") else int(figures.fact("workers", 0))
    all_threads = (threads + workers) * figures.local_ranks
    own_share = max(1, cores // figures.local_ranks)
    if all_threads < OVERCOMMITTED * cores + figures.local_ranks or max(threads, workers) <= own_share:
        return
    text = f"{all_threads} threads compete for {cores} cores: {threads} compute threads"
    text += f" and {workers} workers" if workers else ""
    text += f" in each of {figures.local_ranks} processes" if figures.local_ranks > 1 else ""
    if figures.known("queued_cores"):
        queued = sum(figures.get("queued_cores"))
        text += f"; on average, {queued:.1f} of them wait for a core"
    if threads > own_share:
        flag = figures.flag("parallel.threads", own_share)
    else:
        flag = figures.flag("data.workers", own_share)
    yield figures.slowdown("threads", text, 0.0, flag, f"use at most {own_share} per process")


def busy_machine(figures: Figures) -> Iterator[Slowdown]:
    """Other programs use the cores."""
    if not _waits_for_core(figures):
        return
    others, queued = figures.other_cores, figures.mean("loop_queued")
    text = (
        f"other programs use {others:.1f} of {figures.fact('machine_cores', figures.cores)} cores: the loop waits "
        f"for a core for {percent(queued)} of the time"
    )
    saved = queued * figures.wall_ms * others / max(others + figures.own_cores, 1e-9)
    yield figures.slowdown("machine-busy", text, saved, fix="stop them, or run them elsewhere")


RULES = (
    logging,
    guards,
    stalled,
    own_loss,
    late_host,
    small_batch,
    too_many_threads,
    busy_machine,
)


def _stalls(figures: Figures) -> bool:
    stall = min(stalled_ms(figures, rank) for rank in range(figures.ranks))
    return stall >= STALL_WORTH * figures.step_ms


def stalled_ms(figures: Figures, rank: int) -> float:
    """How long this rank's loop sleeps in a step without a known reason: what is left of the whole time without its
    time on a core and in the queue for one, and without all that may sleep with a reason."""
    if not figures.known("loop_cores", "loop_queued"):
        return 0.0
    wall = figures.whole.walls[rank]
    awake = figures.get("loop_cores")[rank] + figures.get("loop_queued")[rank]
    asleep = wall * (1 - min(1.0, awake))
    known = sum(figures.part(rank, part) for part in (DATA, EXCHANGE, *BETWEEN_STEPS))
    if figures.fact("torch_threads", 1) > 1:  # it waits for the threads that compute with it
        of_others = figures.get("own_cores")[rank] - figures.get("loop_cores")[rank]
        queued = figures.get("queued_cores")[rank] - figures.get("loop_queued")[rank]
        known += wall * max(0.0, of_others + queued)
    return max(0.0, asleep - known)


def _overhead(figures: Figures, batch: float) -> float:
    """The fraction of forward that larger batches save, by the speed of evaluations, whose batches are large. 0 if it
    is not known: they also read and score, so it is a lower bound."""
    samples = figures.fact("eval_samples", 0)
    evaluations = [each for each in figures.steady if max(each.get("host_evaluation_ms")) > 0]
    forward = min(figures.get("host_forward_ms"))
    if not samples or not evaluations or not forward or _stalls(figures):
        return 0.0
    total = sum(each.mean("host_evaluation_ms") * each.steps for each in evaluations)
    image_ms = total / len(evaluations) / samples * figures.ranks
    overhead = 1 - batch * image_ms / forward
    return overhead if overhead >= OVERHEAD_SURE else 0.0


def own_line(figures: Figures, rank: int | None = None) -> str:
    """The line of the user's own code that the loop is in most often, if it is there often enough."""
    looks = defaultdict[tuple[int, str], float](float)
    for each in figures.steady:  # each names the line of its own
        places = zip(each.facts.get("own_code", ()), each.get("own_code_share"), strict=False)
        for number, (place, share) in enumerate(places):
            if place and rank in (None, number):
                looks[number, place] += share * each.steps
    (_, place), seen = max(looks.items(), key=lambda item: item[1], default=((0, ""), 0.0))
    share = seen / figures.whole.steps
    return f"{place} ({percent(share)} of the time)" if share >= OWN_LINE_WORTH else ""


def _critical(figures: Figures, part: str) -> float:
    """The largest time of a part on any rank, which the others wait for; on a busy machine without its part of
    waiting for a core."""
    if not figures.machine_is_busy:
        return max(figures.get(f"host_{part}_ms"))
    times = zip(figures.get(f"host_{part}_ms"), figures.get("loop_queued"), strict=True)
    return max(taken * (1 - min(1.0, queued)) for taken, queued in times)


def _unimportant(figures: Figures, taken: float, worth: float) -> bool:
    """On a GPU, what the host does between two steps costs at most what the device waits for it."""
    cost = min(taken, figures.mean("late_ms")) if figures.on_gpu else taken
    return cost < worth * figures.step_ms


def _steps(every: int) -> str:
    return f"{every} steps" if every > 1 else "step"


def _waits_for_core(figures: Figures) -> bool:
    """Whether other programs keep the loop from running, which makes every part of a step longer."""
    return figures.machine_is_busy and figures.mean("loop_queued") >= QUEUE_WORTH

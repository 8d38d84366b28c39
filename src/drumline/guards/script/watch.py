"""`guard` and `Watch`: hooks on the model and its optimizers call every check at the right moment.

    watch = drumline.guard(model, optimizer)

Promises: everything happens in hooks of the model and the optimizer, before the optimizer changes a parameter. On a
GPU no step after the third waits: whether gradients were finite is known one step later (`nonfinite.py`). Rejects
sharded parameters.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drumline.core.errors import UserError
from drumline.guards.checks.data import miscounted
from drumline.guards.finding import Finding, GuardError, LoopState
from drumline.guards.script import taps
from drumline.guards.script.comparison import RankComparison, linger
from drumline.guards.script.forwards import inner_of, wrapper_of
from drumline.guards.script.hang import HangMonitor
from drumline.guards.script.monitors import Monitors, is_scaled
from drumline.guards.script.nonfinite import BadStep, GradientCheck, investigate
from drumline.guards.script.parameters import UNREACHED_STEPS, capturing, held_by, with_hooks
from drumline.guards.script.peers import TIMEOUT_SECONDS, Action, PeerTimeout, Reporter, peers_of
from drumline.guards.table import LOCAL_CHECKS

_COMPARED_STEPS = (1, 2, 3, 10, 30)
"""Steps at which ranks compare for any value of `every`."""
_EVALUATION_SECONDS = 60.0
OPEN: list[Watch] = []
"""The guards that are open, oldest first."""


def guard(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    teacher: nn.Module | Sequence[nn.Module] | None = None,
    scheduler: Any = None,
    loader: Any = None,
    action: Action = "stop",
    every: int = 100,
    hang_seconds: float = 30.0,
    folder: str | Path = "drumline-replay",
    ignore: Collection[str] = (),
) -> Watch:
    """Watches a training loop until `close`, or until the process ends.

    Call it on every rank, after wrapping the model and creating the optimizer, before the first step.

    Args:
        model: The model as the loop calls it, usually wrapped in DDP.
        optimizer: The optimizer, or all of them.
        teacher: Modules that must stay in eval mode and untrained.
        scheduler: The learning-rate scheduler; found automatically if the optimizer has only one.
        loader: The training loader; its length is the length of an epoch.
        action: "stop" raises `drumline.GuardError` on every rank if a mistake is certain, and warns if it may be
            intended. "warn" only warns. Each guard reports once.
        every: Ranks compare at steps 1, 2, 3, 10, 30, every `every` steps, and when the guard closes.
        hang_seconds: If nothing moves for this long and a rank has left the loop or skipped a step, the process is
            ended. 0 disables this check.
        folder: Where the batch of a step with non-finite gradients is saved.
        ignore: Guards that never report.
    """
    optimizers = [
        with_hooks(one, "guard") for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)
    ]
    teachers = [] if teacher is None else [teacher] if isinstance(teacher, nn.Module) else list(teacher)
    if not optimizers or every < 1:
        raise UserError(
            f"guard: {len(optimizers)} optimizers, every={every}",
            "give at least one optimizer and every=1 or more",
        )
    for name, parameter in inner_of(model).named_parameters():
        if isinstance(parameter, DTensor) or isinstance(model, FullyShardedDataParallel):
            raise UserError(
                f"guard: parameter '{name}' is sharded",
                "use drumline.guard with DDP or a single process, where each rank has a whole copy",
            )
    return Watch(
        model, optimizers, teachers, scheduler, loader, action, ignore, every, hang_seconds, Path(folder)
    )


class Watch:
    """The guards of one model. Created by `guard`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        teachers: list[nn.Module],
        scheduler: Any,
        loader: Any,
        action: Action,
        ignore: Collection[str],
        every: int,
        hang_seconds: float,
        folder: Path,
    ) -> None:
        wrapper = wrapper_of(model)
        self._peers = peers_of(wrapper.process_group if wrapper is not None else None)
        self._peers.timeout = max(TIMEOUT_SECONDS, 4 * hang_seconds)
        self._reporter = Reporter(action, ignore, self._peers)
        self._hang = HangMonitor(self._peers, hang_seconds, self._reporter.report, action == "stop")
        self._monitors = Monitors(
            model, teachers, optimizers, scheduler, loader, self._peers, self._reporter, self._hang
        )
        self._comparison = RankComparison(self._peers, self._monitors)
        self._gradients = GradientCheck()
        self._optimizers, self._every, self._folder = optimizers, every, folder
        self._evaluations = 0
        self._given_up = self._joined = self._failed = False
        self._parameters = list(self._monitors.model.parameters())
        self._version_after_step = -1
        self._handles = [
            handle
            for one in optimizers
            for handle in (
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            )
        ]
        self._excepthook = sys.excepthook
        sys.excepthook = self._explain
        atexit.register(self._at_exit)
        # A child forked by multiprocessing exits without running atexit.
        self._finalizer = Finalize(None, self._at_exit, exitpriority=100)
        self._open = True
        OPEN.append(self)
        taps.listen(self._monitors)
        self._hang.start()

    def batch(self, ids: torch.Tensor | Iterable[int]) -> None:
        """Optional: the sample ids of this step's batch, so that samples that ranks share are found by id."""
        self._monitors.gives_ids(ids.tolist() if isinstance(ids, torch.Tensor) else map(int, ids))

    def evaluated(self, count: int, *, of: int) -> None:
        """Optional, after an evaluation, on every rank: how many samples this rank counted, and how many there
        are."""
        self._evaluations += 1
        self._hang.move()
        key = f"evaluation/{self._evaluations}"
        if count == of:
            self._peers.post(f"{key}/{self._peers.rank}", count)
            return
        counts = self._peers.gather(key, count, self._poll, seconds=_EVALUATION_SECONDS)
        self._reporter.report(miscounted(self._peers.ranks, counts, of, f"evaluation {self._evaluations}"))

    def close(self) -> None:
        """Compares the ranks for the last time and stops watching. Called automatically at exit."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        self._hang.finish()
        try:
            if not self._reporter.is_done("non-finite"):
                for bad in self._gradients.remaining():
                    self._report_nonfinite(bad)
            self._compare_last()
        finally:
            self._remove_hooks()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._gradients.discard()  # the loop has already failed
            self._failed = True
        self.close()

    def _at_exit(self) -> None:
        error = sys.exc_info()[1]  # raised in a child of multiprocessing
        self._failed |= error is not None and not (isinstance(error, SystemExit) and not error.code)
        try:
            self.close()
        except GuardError as stop:
            print(stop, file=sys.stderr, flush=True)

    def _compare_last(self) -> None:
        """Compares runs that end before the next comparison, in bounded time, because a rank may be gone."""
        if self._peers.size == 1:
            return
        steps = self._monitors.steps
        try:
            if self._reporter.stopped:
                linger(self._peers, "stopped")  # the others read why before the store may end
            elif steps[0] and not (self._failed or self._given_up or self._joined):
                untouched = self._parameter_version() == self._version_after_step
                for finding in self._comparison.compare_last(self._optimizers, steps, untouched):
                    self._reporter.report_once(finding)
        except RuntimeError as error:
            if isinstance(error, GuardError):
                raise
            # the store ended with the process that held it

    def _remove_hooks(self) -> None:
        """Ends every hook and reports what is known only at the end."""
        OPEN.remove(self)
        taps.unlisten(self._monitors)
        self._monitors.check_last(complete=not (self._failed or self._reporter.stopped))
        self._monitors.close()
        for handle in self._handles:
            handle.remove()
        if sys.excepthook == self._explain:
            sys.excepthook = self._excepthook

    def _poll(self) -> None:
        """Called while waiting for other ranks: stops if one of them has stopped or the waiting is hopeless."""
        self._reporter.stop_with_others()
        if self._hang.given_up is not None:
            raise PeerTimeout
        self._stop_if_hanging()

    def _stop_if_hanging(self) -> None:
        if self._hang.found is not None:
            self._reporter.stop(self._hang.found)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or capturing():
            return
        self._hang.move()
        self._stop_if_hanging()
        number = self._optimizers.index(optimizer)
        step = self._monitors.steps[number] + 1
        # With a closure, gradients are computed inside the step.
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if number == 0:
            self._monitors.check_step(step)
        compares = step in _COMPARED_STEPS or step % self._every == 0
        if number == 0:
            for finding in self._monitors.frozen.before_step(step, compares):
                self._reporter.report(finding)
        loop = self._monitors.state(step) if compares or step == UNREACHED_STEPS else None
        if closure is None:
            self._check_finite(number, step)
            self._monitors.check_gradients(number, step, loop)
        if loop is not None:
            for check in LOCAL_CHECKS:
                self._reporter.report(check(loop))
        wrapper = self._monitors.forwards.wrapper
        joined = wrapper is not None and wrapper._join_config.enable
        self._hang.paused, self._joined = joined, self._joined or joined
        if loop is not None and compares and closure is None and not (joined or self._given_up):
            self._compare_ranks(number, step, loop)

    def _check_finite(self, number: int, step: int) -> None:
        # Reported once: non-finite parameters make every later step bad, to be searched and saved again.
        if self._reporter.is_done("non-finite"):
            return
        optimizer = self._optimizers[number]
        held = [] if is_scaled(optimizer) else held_by(optimizer)
        calls, ids = self._monitors.forwards.calls, self._monitors.ids
        for bad in self._gradients.check(number, held, step, calls, ids):
            self._report_nonfinite(bad)

    def _report_nonfinite(self, bad: BadStep) -> None:
        finding = investigate(bad, self._monitors.model, self._peers, self._poll, self._folder)
        self._reporter.report(finding)

    def _compare_ranks(self, number: int, step: int, loop: LoopState) -> None:
        if self._peers.size == 1:
            return
        try:
            self._hang.comparing = True
            optimizer = self._optimizers[number]
            for finding in self._comparison.compare(f"{number}/{step}", optimizer, loop, step, self._poll):
                self._reporter.report_once(finding)
        except PeerTimeout:
            self._given_up = self._hang.given_up is not None
            self._reporter.report(
                Finding(
                    "waiting",
                    f"ranks were not compared at step {step}: not all arrived within {self._peers.timeout:.0f} s",
                    f"rank {self._peers.rank}",
                    f"step {step}",
                    "ignore this if a rank is saving or evaluating; otherwise check for a step that a rank skips",
                )
            )
        finally:
            self._hang.comparing = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._monitors.stepped(self._optimizers.index(optimizer))
        self._version_after_step = self._parameter_version()

    def _parameter_version(self) -> int:
        """A number that changes if a parameter is written."""
        return sum(parameter._version for parameter in self._parameters)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error such as a closed connection is often caused by another rank: prints which one."""
        self._excepthook(kind, error, trace)
        self._failed = True
        if issubclass(kind, GuardError) or not issubclass(kind, Exception) or not self._open:
            return
        if self._peers.size == 1:
            return
        text = self._hang.explain()
        if text:
            print(text, file=sys.stderr, flush=True)

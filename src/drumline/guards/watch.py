"""`guard`: one line in a script of one's own, and all guards watch it.

    watch = drumline.guard(model, optimizer)

Promises: everything happens in hooks of the model and the optimizer, before the optimizer changes a parameter. On a
GPU no step after the third waits: whether gradients were finite is learnt one step later (`delayed.py`). Refuses
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
from drumline.guards import closing, devices, taps
from drumline.guards.beside import Beside
from drumline.guards.contents import length_of
from drumline.guards.counts import miscounted
from drumline.guards.delayed import Bad, Finiteness, Hidden
from drumline.guards.finding import Action, Stopped, Teller
from drumline.guards.forwards import Forwards, inner_of, wrapper_of
from drumline.guards.hang import Pulse
from drumline.guards.heard import Heard
from drumline.guards.losses import Losses, hidden
from drumline.guards.meeting import PATIENCE as PATIENCE_SECONDS
from drumline.guards.meeting import Absent, meeting_of
from drumline.guards.modes import Modes, gradient_marks, trained_teacher
from drumline.guards.nonfinite import investigate
from drumline.guards.parameters import PATIENCE, Parameters
from drumline.guards.probes import Probes, capturing
from drumline.guards.rates import Rates
from drumline.guards.reading import Reading
from drumline.guards.reports import Reports
from drumline.guards.rounds import Rounds, Sources
from drumline.guards.seeds import Seeds

_FIRST = 3
_EARLY = (1, 2, 3, 10, 30)
"""Steps at which ranks compare whatever `every` is."""
OPEN: list[Watch] = []
"""The guards that watch now, oldest first."""


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

    Call it on every rank, after wrapping the model and making the optimizer, before the first step. `action` is what
    a finding does: "stop" raises `drumline.guards.Stopped` on every rank if the mistake is certain and prints a
    warning if it may be meant; "warn" only prints. Each guard reports once; `ignore` names guards that never report.
    Ranks compare at steps 1, 2, 3, 10, 30, `every` so many, and when the guard closes. When nothing moves for
    `hang_seconds` and a rank has left the loop or skipped a step, the process is ended (0: do not watch for it). A
    batch with non-finite gradients is kept in `folder`.
    """
    optimizers = [
        _with_hooks(one) for one in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)
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
                "guards watch DDP and single processes: whole copies",
            )
    return Watch(
        model,
        optimizers,
        teachers,
        scheduler,
        loader,
        Teller(action, ignore),
        every,
        hang_seconds,
        Path(folder),
    )


def _with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer, or the one inside it that takes the steps: PostLocalSGDOptimizer has no hooks of its own."""
    inner = getattr(optimizer, "optim", None)
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    if isinstance(inner, Optimizer):
        return _with_hooks(inner)
    raise UserError(
        f"guard: {type(optimizer).__name__} never calls Optimizer.__init__, so it has no hooks",
        "pass the torch optimizer inside it",
    )


class Watch:
    """The guards of one model. Made by `guard`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        teachers: list[nn.Module],
        scheduler: Any,
        loader: Any,
        teller: Teller,
        every: int,
        hang_seconds: float,
        folder: Path,
    ) -> None:
        self.inner = inner_of(model)
        wrapper = wrapper_of(model)
        self.meeting = meeting_of(wrapper.process_group if wrapper is not None else None)
        self.teller, self.every, self.folder = teller, every, folder
        self.optimizers, self.teachers, self.loader = optimizers, teachers, loader
        self.steps = [0] * len(optimizers)
        self.ids: list[int] = []
        self.evaluations = 0
        self.finite, self.hidden, self.seeds = Finiteness(), Hidden(), Seeds()
        self._used = self._apart = self._joined = self._failed = False
        self._version, self._parameters = -1, list(self.inner.parameters())
        self.pulse = Pulse(self.meeting, hang_seconds, self.teller.warn, self.teller.action == "stop")
        self.reports = Reports(teller, self.meeting, self.pulse)
        self.meeting.patience = max(PATIENCE_SECONDS, 4 * hang_seconds)
        self.forwards = Forwards(
            model, self.inner, self.meeting.size > 1, self._forward, self.pulse.passed, self._backward
        )
        self.modes = Modes(self.inner, teachers)
        self.reading, self.probes = Reading(), Probes(len(optimizers))
        self.losses = Losses(self.probes)
        self.beside = Beside(self.inner, model, teachers, optimizers)
        self.parameters = Parameters(self.inner, optimizers, self.forwards, self.beside)
        sources = Sources(
            self.forwards, self.modes, self.reading, self.losses, self.beside, self.probes, self.pulse
        )
        self.rounds = Rounds(self.meeting, sources, self.inner, teachers)
        self._heard = Heard(sources, self.hidden, self.parameters, optimizers, self.rounds)
        self.teacher_marks = gradient_marks(self._taught())
        self.rates = Rates(optimizers[0], scheduler, length_of(loader))
        self._handles = [
            handle
            for one in optimizers
            for handle in (
                one.register_step_pre_hook(self._before_step),
                one.register_step_post_hook(self._after_step),
            )
        ]
        self._hook = sys.excepthook
        sys.excepthook = self._explain
        atexit.register(self._at_exit)
        # A child forked by multiprocessing exits without running atexit.
        self._finalizer = Finalize(None, self._at_exit, exitpriority=100)
        self._open = True
        OPEN.append(self)
        taps.listen(self._heard)
        self.pulse.start()

    def batch(self, ids: torch.Tensor | Iterable[int]) -> None:
        """Optional: the sample ids of this step's batch, so that samples shared by ranks are seen by id."""
        if self._used:
            self._forget()
        self.ids.extend(ids.tolist() if isinstance(ids, torch.Tensor) else map(int, ids))

    def evaluated(self, count: int, *, of: int) -> None:
        """Optional, after an evaluation, on every rank: how many samples this rank counted, `of` how many in all."""
        self.evaluations += 1
        self.pulse.move()
        if count == of:
            self.meeting.post(f"evaluation/{self.evaluations}/{self.meeting.rank}", count)
            return
        counts = self.meeting.gather(f"evaluation/{self.evaluations}", count, self.reports.pause, seconds=60)
        finding = miscounted(self.meeting.ranks, counts, of, f"evaluation {self.evaluations}")
        if finding is not None:
            self.reports.tell(finding)

    def close(self) -> None:
        """Ends the watching; done by itself when the process ends."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        self.pulse.finish()
        try:
            if not self.teller.has_told("non-finite"):
                for bad in self.finite.left():
                    self._non_finite(bad)
            self._compare_last()
        finally:
            self._take_off()

    def _at_exit(self) -> None:
        error = sys.exc_info()[1]  # raised in a child of multiprocessing
        self._failed |= error is not None and not (isinstance(error, SystemExit) and not error.code)
        try:
            self.close()
        except Stopped as stop:
            print(stop, file=sys.stderr, flush=True)

    def _compare_last(self) -> None:
        """Runs that end before the next comparison are compared here; in bounded time, since a rank may be gone."""
        if self.meeting.size == 1:
            return
        try:
            if self.reports.stopped:
                closing.linger(self.meeting, "stopped")  # the others read why, before the store may go
            elif self.steps[0] and not (self._failed or self._apart or self._joined):
                self._meet_last()
        except RuntimeError as error:
            if isinstance(error, Stopped):
                raise
            # the store went with the process that kept it

    def _meet_last(self) -> None:
        untouched = closing.versions(self._parameters) == self._version
        for finding, certain in closing.compare_last(self.rounds, self.optimizers, self.steps, untouched):
            self.reports.together(finding, certain)

    def _take_off(self) -> None:
        """Ends every hook and thread."""
        OPEN.remove(self)
        taps.unlisten(self._heard)
        finding = self.rates.at_close(self.steps[0], self.reading.passes)
        for warning in (
            finding,
            *(() if self._failed or self.reports.stopped else self.parameters.at_close(self.steps)),
        ):
            if warning is not None:
                self.teller.warn(warning)
        self.forwards.close()
        self.probes.close()
        self.beside.close()
        for handle in self._handles:
            handle.remove()
        if sys.excepthook == self._explain:
            sys.excepthook = self._hook

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.finite.forget()  # what went wrong is known already
            self._failed = True
        self.close()

    def _forward(self) -> None:
        """A forward of the model begins."""
        self.pulse.move()
        trains = torch.is_grad_enabled()
        self.reading.forward(trains)
        finding = self.modes.forward(trains, self.steps[0])
        if finding is not None:
            self.teller.warn(finding)
        if trains:
            if self._used:
                self._forget()
            self.seeds.forward(self.steps[0])
            self.pulse.phase, self.pulse.backward = "step", False
            self.rates.forward()

    def _backward(self) -> None:
        """Backward has begun."""
        self.pulse.move()
        self.pulse.backward = True

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or capturing():
            return
        self.pulse.move()
        self.reports.stop_if_found()
        number = self.optimizers.index(optimizer)
        step = self.steps[number] + 1
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        meets = step in _EARLY or step % self.every == 0
        if number == 0 and step == 1:
            self._search()
        if number == 0:
            self._look(step)
        if closure is None:
            self._look_at_gradients(number, optimizer, step, meets)
        joined = self.forwards.wrapper is not None and self.forwards.wrapper._join_config.enable
        self.pulse.paused, self._joined = joined, self._joined or joined
        if joined or self._apart:
            return
        try:
            self.pulse.meets = True
            if meets and self.meeting.size > 1 and closure is None:
                key = f"{number}/{step}"
                for finding, certain in self.rounds.meet(key, step, optimizer, self.ids, self.reports.pause):
                    self.reports.together(finding, certain)
            if number == 0 and step in (1, _FIRST):
                for found in devices.check(self.inner, self.teachers, self.meeting, step, self.reports.pause):
                    self.reports.alone(*found)
        except Absent:
            self._apart = self.pulse.given_up is not None
            self.reports.not_compared(step)
        finally:
            self.pulse.meets = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self.optimizers.index(optimizer)
        self.steps[number] += 1
        if number == 0:
            self.pulse.stepped(self.steps[0])
            self.losses.stepped()
            self.reading.stepped()
        self._version = closing.versions(self._parameters)
        self.pulse.phase = "between"
        self.pulse.move()
        self._used = True
        if len(self.optimizers) == 1:
            self._forget()
        if self.steps[number] == _FIRST:
            self.forwards.settle()

    def _forget(self) -> None:
        """A new step begins: at once with one optimizer, which frees the batch; else with the next forward, since
        several optimizers may use one backward."""
        self._used = False
        self.forwards.stepped()
        self.ids.clear()

    def _search(self) -> None:
        """What the script keeps beside the model."""
        self.beside.search()
        if self.rates.scheduler is None and len(self.beside.schedulers) == 1:
            self.rates.follow(self.beside.schedulers[0])

    def _look(self, step: int) -> None:
        """What host memory alone tells, every step."""
        # A fused optimizer unscales by itself, with what the loss scaler hands it.
        self.losses.uses_scaler |= any(hasattr(one, "found_inf") for one in self.optimizers)
        self.losses.before_step(self.pulse.passes)
        for warning in (
            self.rates.look(step),
            self.seeds.look(step),
            self.modes.frozen_norms(step),
            self.reading.look(step),
            *self.losses.findings,
        ):
            if warning is not None:
                self.teller.warn(warning)
        self.losses.findings.clear()
        for found in (self.modes.look(step), self.beside.in_train_mode(step) if step in (2, 3) else None):
            if found is not None:
                self.reports.alone(*found)

    def _look_at_gradients(self, number: int, optimizer: Optimizer, step: int, meets: bool) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # A fused optimizer is called by the loss scaler even for a step that it will skip.
        scaled = getattr(optimizer, "found_inf", None) is not None
        # Warned of once: what has spoilt the parameters makes every later step bad, to be searched and saved again.
        if not self.teller.has_told("non-finite"):
            for bad in self.finite.look(number, [] if scaled else held, step, self.forwards.calls, self.ids):
                self._non_finite(bad)
        if number == 0 and not scaled and not self.losses.uses_scaler:
            at = self.hidden.look(step, self.forwards.calls, held)
            if at is not None:
                self.teller.warn(
                    hidden("NaN in the model's output or its gradient was replaced before the step", at)
                )
        found = self.probes.before_step(number, optimizer, step, self.forwards.gradient_arrived)
        reached = self.parameters.reached(number, held, step)
        if meets or step == PATIENCE:
            taught = self._taught()
            everything = [p for one in self.optimizers for group in one.param_groups for p in group["params"]]
            trained = trained_teacher(taught, everything, self.teacher_marks, step)
            found += [trained] if trained is not None else []
            found += self.parameters.placed(optimizer, list(taught.values()), step)
        for finding, certain in (*found, *([reached] if reached is not None else [])):
            self.reports.alone(finding, certain)

    def _taught(self) -> dict[str, nn.Parameter]:
        """The teachers' parameters, by name."""
        several = len(self.teachers) > 1
        return {
            f"{place}.{name}" if several else name: parameter
            for place, teacher in enumerate(self.teachers)
            for name, parameter in teacher.named_parameters()
        }

    def _non_finite(self, bad: Bad) -> None:
        self.reports.tell(investigate(bad, self.inner, self.meeting, self.reports.pause, self.folder))

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error such as a closed connection is often another rank's doing: says whose."""
        self._hook(kind, error, trace)
        self._failed = True
        if issubclass(kind, Stopped) or not issubclass(kind, Exception) or not self._open:
            return
        if self.meeting.size == 1:
            return
        text = self.pulse.explain()
        if text:
            print(text, file=sys.stderr, flush=True)

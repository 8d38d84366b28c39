"""`guard`: one line in a script of one's own, and all guards watch it.

    watch = drumline.guard(model, optimizer)

Promises: everything happens in hooks of the model and the optimizer, before the optimizer changes a parameter. On a
GPU no step after the third waits: whether gradients were finite is learnt one step later (`delayed.py`). Refuses
sharded parameters.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drumline.errors import UserError
from drumline.guard import devices
from drumline.guard.counts import miscounted
from drumline.guard.delayed import Bad, Finiteness
from drumline.guard.finding import Action, Finding, Stopped, Teller
from drumline.guard.forwards import Forwards, inner_of, wrapper_of
from drumline.guard.gradients import outside, strangers, without_gradient
from drumline.guard.hang import Beat, Pulse, judge
from drumline.guard.meeting import Absent, meeting_of
from drumline.guard.modes import Modes, gradient_marks, trained_teacher
from drumline.guard.nonfinite import finding_of, keep_batch, locate
from drumline.guard.passes import end_passes, passes_over
from drumline.guard.rates import Rates
from drumline.guard.rounds import Rounds

_FIRST = 3
_PATIENCE = 20
_WARNINGS = ("buffers", "rounding")
_VERDICT_SECONDS = 10.0


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
) -> Watch:
    """Watches a training loop until `close`, or until the process ends.

    Call it on every rank, after wrapping the model and making the optimizer, before the first step. `action` is what
    a finding does: "stop" raises `drumline.guard.Stopped` on every rank, "warn" prints it once per guard. Ranks
    compare at steps 1 to 3 and `every` so many. When nothing moves for `hang_seconds` and a rank has left the loop,
    the process is ended (0: do not watch for it). A batch with non-finite gradients is kept in `folder`.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
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
        model, optimizers, teachers, scheduler, loader, Teller(action), every, hang_seconds, Path(folder)
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
        self.finite = Finiteness(self.inner)
        self._used = False
        self._apart = False
        self.never_reached: list[dict[int, str]] = [{} for _ in optimizers]
        self.pulse = Pulse(self.meeting, hang_seconds, self.teller.warn, self.teller.action == "stop")
        self.forwards = Forwards(
            model, self.inner, self.meeting.size > 1, self._forward, self.pulse.passed, self._backward
        )
        self.rounds = Rounds(self.meeting, self.forwards, self.inner, teachers)
        self.modes = Modes(self.inner, teachers)
        self.teacher_marks = gradient_marks(self._taught())
        length = len(loader) if hasattr(loader, "__len__") else None
        self.rates = Rates(optimizers[0], scheduler, length)
        self.passes = passes_over(loader)
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
        atexit.register(self.close)
        self._open = True
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
        counts = self.meeting.gather(f"evaluation/{self.evaluations}", count, self._pause, seconds=60)
        finding = miscounted(self.meeting.ranks, counts, of, f"evaluation {self.evaluations}")
        if finding is not None:
            self._tell(finding)

    def close(self) -> None:
        """Ends the watching; done by itself when the process ends."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.close)
        try:
            if not self.teller.has_told("non-finite"):
                for bad in self.finite.left():
                    self._non_finite(bad)
        finally:
            self._take_off()

    def _take_off(self) -> None:
        """Ends every hook and thread."""
        self.pulse.finish()
        finding = self.rates.at_close(self.steps[0])
        if finding is not None:
            self.teller.warn(finding)
        self.forwards.close()
        for handle in self._handles:
            handle.remove()
        if self.passes is not None:
            end_passes(self.loader, self.passes)
        if sys.excepthook == self._explain:
            sys.excepthook = self._hook

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.finite.forget()  # what went wrong is known already
        self.close()

    def _forward(self) -> None:
        """A forward of the model begins."""
        self.pulse.move()
        if torch.is_grad_enabled():
            if self._used:
                self._forget()
            self.pulse.phase, self.pulse.backward = "step", False
            self.rates.forward()

    def _backward(self) -> None:
        """Backward has begun."""
        self.pulse.move()
        self.pulse.backward = True

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or (
            torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        ):
            return
        self.pulse.move()
        self._pause_if_found()
        number = self.optimizers.index(optimizer)
        step = self.steps[number] + 1
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        meets = step <= _FIRST or step % self.every == 0
        if number == 0:
            self._look(step)
        if closure is None:
            self._look_at_gradients(number, optimizer, step, meets)
        joined = self.forwards.wrapper is not None and self.forwards.wrapper._join_config.enable
        self.pulse.paused = joined
        if joined or self._apart:
            return
        try:
            self.pulse.meets = True
            if meets and self.meeting.size > 1 and closure is None:
                for finding in self.rounds.meet(f"{number}/{step}", step, optimizer, self.ids, self._pause):
                    self._tell_together(finding)
            if number == 0 and step in (1, _FIRST):
                self._look_at_devices(step)
        except Absent:
            self._apart = True
        finally:
            self.pulse.meets = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self.optimizers.index(optimizer)
        self.steps[number] += 1
        if number == 0:
            self.pulse.stepped(self.steps[0])
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

    def _look(self, step: int) -> None:
        """What host memory alone tells, every step."""
        for finding in (self.modes.look(step), self.rates.look(step)):
            if finding is not None:
                self._tell(finding)
        for finding in (self.modes.frozen_norms(step), self.passes.look(step) if self.passes else None):
            if finding is not None:
                self.teller.warn(finding)

    def _look_at_gradients(self, number: int, optimizer: Optimizer, step: int, meets: bool) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # A fused optimizer is called by the loss scaler even for a step that it will skip.
        scaled = getattr(optimizer, "found_inf", None) is not None
        # Warned of once: what has spoilt the parameters makes every later step bad, to be searched and saved again.
        if not self.teller.has_told("non-finite"):
            for bad in self.finite.look(number, [] if scaled else held, step, self.forwards.calls, self.ids):
                self._non_finite(bad)
        if meets or step == _PATIENCE:
            self._look_at_parameters(number, optimizer, step)
        if step <= _PATIENCE:
            reached = self.never_reached[number]
            if step == 1:
                names = {id(p): name for name, p in self.inner.named_parameters()}
                reached.update({id(p): names[id(p)] for p in held if id(p) in names and p.requires_grad})
            for parameter in held:
                if parameter.grad is not None:
                    reached.pop(id(parameter), None)
            self._unreached(number, step)

    def _unreached(self, number: int, step: int) -> None:
        """DDP demands a gradient for each parameter in each step unless told otherwise; others may take time."""
        wrapper = self.forwards.wrapper
        names = list(self.never_reached[number].values())
        if not names:
            return
        strict = wrapper is not None and not wrapper.find_unused_parameters and not wrapper.static_graph
        if strict and len(self.optimizers) == 1 and self.forwards.wrapped_calls and step == 1:
            self._tell(without_gradient(names, 1))
        elif step == _PATIENCE:
            finding = without_gradient(names, _PATIENCE)
            unused = wrapper is not None and wrapper.find_unused_parameters
            (self.teller.warn if unused else self._tell)(finding)

    def _look_at_parameters(self, number: int, optimizer: Optimizer, step: int) -> None:
        everything = [p for one in self.optimizers for group in one.param_groups for p in group["params"]]
        model = dict(self.inner.named_parameters())
        taught = self._taught()
        finding = trained_teacher(taught, everything, self.teacher_marks, step)
        if finding is not None:
            self._tell(finding)
        known = {id(p) for p in (*model.values(), *taught.values())}
        missing = outside(model, everything, taught.values(), step)
        for place, group in enumerate(optimizer.param_groups):
            strange = [at for at, p in enumerate(group["params"]) if id(p) not in known and p.grad is None]
            # Alone they may be a loss's own, used later; beside a parameter that nobody trains they were its place.
            if strange and (missing is not None or step == _PATIENCE):
                shapes = [tuple(group["params"][at].shape) for at in strange]
                self._tell(strangers(place, strange, shapes, step))
        if missing is not None:
            self._tell(missing)

    def _taught(self) -> dict[str, nn.Parameter]:
        """The teachers' parameters, by name."""
        several = len(self.teachers) > 1
        return {
            f"{place}.{name}" if several else name: parameter
            for place, teacher in enumerate(self.teachers)
            for name, parameter in teacher.named_parameters()
        }

    def _non_finite(self, bad: Bad) -> None:
        step, calls, rank = bad.step, bad.calls, self.meeting.rank
        verdict = locate(calls, dict(self.inner.named_parameters()), bad.parameter)
        key = f"non-finite/{step}"
        verdicts = self.meeting.gather(key, verdict, self._pause, seconds=_VERDICT_SECONDS)
        finding = Finding(
            **self.meeting.first(f"{key}/said", vars(finding_of(self.meeting.ranks, verdicts, step)))
        )
        path = keep_batch(self.folder, step, rank, calls, finding, bad.ids)
        saved = f"{finding.fix}; batch of each rank saved, here {path}"
        self._tell(Finding(finding.guard, finding.what, finding.where, finding.since, saved))

    def _look_at_devices(self, step: int) -> None:
        own = devices.home(self.inner.parameters())
        if own is None or self.meeting.size == 1:
            return
        tensors: dict[str, torch.Tensor] = {}
        for place, one in enumerate(self.teachers):
            label = "teacher" if len(self.teachers) == 1 else f"teacher {place}"
            tensors.update({f"{label} parameter '{name}'": p for name, p in one.named_parameters()})
        tensors.update({f"buffer '{name}'": buffer for name, buffer in self.inner.named_buffers()})
        finding = devices.misplaced(own, tensors, self.meeting.rank, self.meeting.size)
        if finding is not None:
            self._tell(finding)
        if own.type == "cuda":
            reports = self.meeting.gather(f"devices/{step}", devices.report(own), self._pause)
            ranks = self.meeting.ranks
            finding = devices.trespass(ranks, reports)
            if finding is not None:
                self._tell(finding)
            for warning in (devices.shared(ranks, reports), devices.imbalance(ranks, reports)):
                if warning is not None:
                    self.teller.warn(warning)

    def _tell_together(self, finding: Finding) -> None:
        """What all ranks found alike: warned of by the first one alone."""
        if self.teller.action == "stop" and finding.guard not in _WARNINGS:
            self._tell(finding)
        elif self.meeting.rank == self.meeting.ranks[0]:
            self.teller.warn(finding)

    def _tell(self, finding: Finding) -> None:
        if self.teller.action == "stop":
            self._publish(finding)
        self.teller.tell(finding)

    def _publish(self, finding: Finding) -> None:
        """So that the other ranks stop with the same words."""
        self.meeting.first("alert", vars(finding))

    def _pause(self) -> None:
        """While waiting for other ranks: has one of them stopped?"""
        told = self.meeting.look("alert")
        if told is not None:
            raise Stopped(Finding(**told))
        if self.pulse.given_up is not None:
            raise Absent
        self._pause_if_found()

    def _pause_if_found(self) -> None:
        if self.pulse.found is not None:
            raise Stopped(self.pulse.found)

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error such as a closed connection is often another rank's doing: says whose."""
        self._hook(kind, error, trace)
        if issubclass(kind, Stopped) or not issubclass(kind, Exception) or not self._open:
            return
        if self.meeting.size == 1:
            return
        try:
            time.sleep(1.5)
            told = self.meeting.look("alert")
            beats = self.pulse.beats()
        except RuntimeError:  # the store went with the process that kept it; what was last read must do
            told, beats = None, self.pulse.last
        if told is not None:
            print(f"another rank stopped:\n{Finding(**told)}", file=sys.stderr, flush=True)
            return
        beats[self.meeting.rank] = Beat(self.pulse.steps, self.pulse.phase, waits=True)
        verdict = judge(beats, 0.0)
        if verdict is not None and verdict.hopeless:
            print(verdict.finding, file=sys.stderr, flush=True)

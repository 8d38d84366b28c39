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
from drumline.guards.checks.datasets import length_of
from drumline.guards.checks.evaluation import miscounted
from drumline.guards.checks.modes import Modes
from drumline.guards.checks.rates import Rates
from drumline.guards.checks.seeds import Seeds
from drumline.guards.finding import Action, GuardError, Reporter
from drumline.guards.script import closing, taps
from drumline.guards.script.comparison import FIRST_STEPS, Comparison, Monitors, compare_devices
from drumline.guards.script.discovery import Discovery
from drumline.guards.script.forwards import Forwards, inner_of, wrapper_of
from drumline.guards.script.hang import HangMonitor
from drumline.guards.script.loaders import Loaders
from drumline.guards.script.losses import Losses
from drumline.guards.script.nonfinite import BadStep, GradientCheck, HiddenNaN
from drumline.guards.script.parameters import UNREACHED_STEPS, Parameters
from drumline.guards.script.probes import Probes, capturing
from drumline.guards.script.rendezvous import (
    TIMEOUT_SECONDS,
    RankReporter,
    RendezvousTimeout,
    rendezvous_of,
)
from drumline.guards.script.replay import investigate

_COMPARED_STEPS = (1, 2, 3, 10, 30)
"""Steps at which ranks compare whatever `every` is."""
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
        scheduler: The learning-rate scheduler; found by itself if the optimizer has only one.
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
                "use drumline.guard with DDP or a single process, where each rank has a whole copy",
            )
    reporter = Reporter(action, ignore)
    return Watch(model, optimizers, teachers, scheduler, loader, reporter, every, hang_seconds, Path(folder))


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
    """The guards of one model. Created by `guard`."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        teachers: list[nn.Module],
        scheduler: Any,
        loader: Any,
        reporter: Reporter,
        every: int,
        hang_seconds: float,
        folder: Path,
    ) -> None:
        self._model = inner_of(model)
        wrapper = wrapper_of(model)
        self._rendezvous = rendezvous_of(wrapper.process_group if wrapper is not None else None)
        self._rendezvous.timeout = max(TIMEOUT_SECONDS, 4 * hang_seconds)
        self._reporter, self._every, self._folder = reporter, every, folder
        self._ranks = RankReporter(reporter, self._rendezvous)
        self._optimizers, self._teachers = optimizers, teachers
        self._steps = [0] * len(optimizers)
        self._ids: list[int] = []
        self._evaluations = 0
        self._used = self._given_up = self._joined = self._failed = False
        self._parameter_version, self._parameter_list = -1, list(self._model.parameters())
        self._gradients, self._hidden, self._seeds = GradientCheck(), HiddenNaN(), Seeds()
        self._hang = HangMonitor(self._rendezvous, hang_seconds, reporter.warn, reporter.action == "stop")
        self._forwards = Forwards(
            model,
            self._model,
            self._rendezvous.size > 1,
            self._on_forward,
            self._hang.passed,
            self._on_backward,
        )
        self._modes = Modes(self._model, teachers)
        self._loaders, self._probes = Loaders(), Probes(len(optimizers))
        self._losses = Losses(self._probes)
        self._discovery = Discovery(self._model, model, teachers, optimizers)
        self._parameters = Parameters(self._model, optimizers, self._forwards, self._discovery)
        monitors = Monitors(
            self._forwards,
            self._modes,
            self._loaders,
            self._losses,
            self._discovery,
            self._probes,
            self._hang,
        )
        self._comparison = Comparison(self._rendezvous, monitors, self._model, teachers)
        self._listener = taps.Listener(monitors, self._hidden, self._parameters, optimizers, self._comparison)
        self._rates = Rates(optimizers[0], scheduler, length_of(loader))
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
        taps.listen(self._listener)
        self._hang.start()

    def batch(self, ids: torch.Tensor | Iterable[int]) -> None:
        """Optional: the sample ids of this step's batch, so that samples that ranks share are found by id."""
        if self._used:
            self._new_step()
        self._ids.extend(ids.tolist() if isinstance(ids, torch.Tensor) else map(int, ids))

    def evaluated(self, count: int, *, of: int) -> None:
        """Optional, after an evaluation, on every rank: how many samples this rank counted, and how many there
        are."""
        self._evaluations += 1
        self._hang.move()
        key = f"evaluation/{self._evaluations}"
        if count == of:
            self._rendezvous.post(f"{key}/{self._rendezvous.rank}", count)
            return
        counts = self._rendezvous.gather(key, count, self._poll, seconds=_EVALUATION_SECONDS)
        finding = miscounted(self._rendezvous.ranks, counts, of, f"evaluation {self._evaluations}")
        if finding is not None:
            self._ranks.report(finding)

    def close(self) -> None:
        """Compares the ranks for the last time and stops watching. Called by itself when the process ends."""
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
        if self._rendezvous.size == 1:
            return
        try:
            if self._ranks.stopped:
                closing.linger(self._rendezvous, "stopped")  # the others read why before the store may end
            elif self._steps[0] and not (self._failed or self._given_up or self._joined):
                untouched = closing.versions(self._parameter_list) == self._parameter_version
                for found in closing.compare_last(self._comparison, self._optimizers, self._steps, untouched):
                    self._ranks.from_all_ranks(*found)
        except RuntimeError as error:
            if isinstance(error, GuardError):
                raise
            # the store ended with the process that held it

    def _remove_hooks(self) -> None:
        """Ends every hook and reports what is known only at the end."""
        OPEN.remove(self)
        taps.unlisten(self._listener)
        warnings = [self._rates.at_close(self._steps[0], self._loaders.passes)]
        if not (self._failed or self._ranks.stopped):
            warnings += self._parameters.at_close(self._steps)
        for warning in warnings:
            if warning is not None:
                self._reporter.warn(warning)
        self._forwards.close()
        self._probes.close()
        self._discovery.close()
        for handle in self._handles:
            handle.remove()
        if sys.excepthook == self._explain:
            sys.excepthook = self._excepthook

    def _on_forward(self) -> None:
        """A forward pass of the model begins."""
        self._hang.move()
        trains = torch.is_grad_enabled()
        self._loaders.forward(trains)
        finding = self._modes.forward(trains, self._steps[0])
        if finding is not None:
            self._reporter.warn(finding)
        if trains:
            if self._used:
                self._new_step()
            self._seeds.forward(self._steps[0])
            self._hang.phase, self._hang.backward = "step", False
            self._rates.forward()

    def _on_backward(self) -> None:
        """Backward has begun."""
        self._hang.move()
        self._hang.backward = True

    def _poll(self) -> None:
        """Called while waiting for other ranks: stops if one of them has stopped or the waiting is hopeless."""
        self._ranks.raise_if_stopped()
        if self._hang.given_up is not None:
            raise RendezvousTimeout
        self._ranks.raise_for(self._hang.found)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or capturing():
            return
        self._hang.move()
        self._ranks.raise_for(self._hang.found)
        number = self._optimizers.index(optimizer)
        step = self._steps[number] + 1
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        compares = step in _COMPARED_STEPS or step % self._every == 0
        if number == 0 and step == 1:
            self._discovery.search()
            if self._rates.scheduler is None and len(self._discovery.schedulers) == 1:
                self._rates.follow(self._discovery.schedulers[0])
        if number == 0:
            self._check_host(step)
        if closure is None:
            self._check_gradients(number, optimizer, step, compares)
        wrapper = self._forwards.wrapper
        joined = wrapper is not None and wrapper._join_config.enable
        self._hang.paused, self._joined = joined, self._joined or joined
        if joined or self._given_up:
            return
        self._compare_ranks(number, optimizer, step, compares and closure is None)

    def _compare_ranks(self, number: int, optimizer: Optimizer, step: int, compares: bool) -> None:
        try:
            self._hang.comparing = True
            if compares and self._rendezvous.size > 1:
                key = f"{number}/{step}"
                for found in self._comparison.compare(key, step, optimizer, self._ids, self._poll):
                    self._ranks.from_all_ranks(*found)
            if number == 0 and step in (1, FIRST_STEPS):
                for found in compare_devices(self._model, self._teachers, self._rendezvous, step, self._poll):
                    self._ranks.from_this_rank(*found)
        except RendezvousTimeout:
            self._given_up = self._hang.given_up is not None
            self._ranks.not_compared(step)
        finally:
            self._hang.comparing = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        number = self._optimizers.index(optimizer)
        self._steps[number] += 1
        if number == 0:
            self._hang.stepped(self._steps[0])
            self._losses.stepped()
            self._loaders.stepped()
        self._parameter_version = closing.versions(self._parameter_list)
        self._hang.phase = "between"
        self._hang.move()
        self._used = True
        if len(self._optimizers) == 1:
            self._new_step()
        if self._steps[number] == FIRST_STEPS:
            self._forwards.unwatch_parts()

    def _new_step(self) -> None:
        """A new step begins: at once with one optimizer, which frees the batch; otherwise with the next forward pass,
        because several optimizers may use one backward."""
        self._used = False
        self._forwards.stepped()
        self._ids.clear()

    def _check_host(self, step: int) -> None:
        """The checks that need no device, in every step."""
        # A fused optimizer unscales by itself, with values that the loss scaler hands it.
        self._losses.uses_scaler |= any(hasattr(one, "found_inf") for one in self._optimizers)
        self._losses.before_step(self._hang.passes)
        for warning in (
            self._rates.check(step),
            self._seeds.check(step),
            self._modes.frozen_norms(step),
            self._loaders.check(step),
            *self._losses.findings,
        ):
            if warning is not None:
                self._reporter.warn(warning)
        self._losses.findings.clear()
        teacher = self._discovery.in_train_mode(step) if step in (2, 3) else None
        for found in (self._modes.check(step), teacher):
            if found is not None:
                self._ranks.from_this_rank(*found)

    def _check_gradients(self, number: int, optimizer: Optimizer, step: int, compares: bool) -> None:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # The loss scaler calls a fused optimizer even for a step that it will skip.
        scaled = getattr(optimizer, "found_inf", None) is not None
        # Reported once: parameters that are spoilt make every later step bad, to be searched and saved again.
        if not self._reporter.is_done("non-finite"):
            checked = [] if scaled else held
            for bad in self._gradients.check(number, checked, step, self._forwards.calls, self._ids):
                self._report_nonfinite(bad)
        if number == 0 and not scaled and not self._losses.uses_scaler:
            hidden = self._hidden.check(step, self._forwards.calls, held)
            if hidden is not None:
                self._reporter.warn(hidden)
        found = self._probes.before_step(number, optimizer, step, self._forwards.has_gradient)
        reached = self._parameters.reached(number, held, step)
        if compares or step == UNREACHED_STEPS:
            trained = self._discovery.trained_teacher(step)
            found += [trained] if trained is not None else []
            found += self._parameters.held(optimizer, step)
        for finding, certain in (*found, *([reached] if reached is not None else [])):
            self._ranks.from_this_rank(finding, certain)

    def _report_nonfinite(self, bad: BadStep) -> None:
        self._ranks.report(investigate(bad, self._model, self._rendezvous, self._poll, self._folder))

    def _explain(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error such as a closed connection is often caused by another rank: prints which one."""
        self._excepthook(kind, error, trace)
        self._failed = True
        if issubclass(kind, GuardError) or not issubclass(kind, Exception) or not self._open:
            return
        if self._rendezvous.size == 1:
            return
        text = self._hang.explain()
        if text:
            print(text, file=sys.stderr, flush=True)

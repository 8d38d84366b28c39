"""`RunGuards`: calls the checks around each step of a run, and ends the run or warns (`guard.action`).

Promises: every finding is reported on all ranks at the same step, with what, where, since when and what to do. With
`warn` each guard reports once and the run continues. The state is checked before it is saved or evaluated, so no
checkpoint holds a state that a guard would have stopped. Waits for the device only after the first steps, before
evaluations and before saves; fingerprints in between are compared a step later.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.data.feed.batch import Batch
from drumline.guards.checks.frozen import (
    followers,
    frozen_parameters,
    frozen_statistics,
    moved_parameters,
    moved_statistics,
)
from drumline.guards.checks.model import left_in_eval, not_in_model
from drumline.guards.checks.nonfinite import first_parameter
from drumline.guards.finding import Finding, LoopState, Reports
from drumline.guards.run.fingerprints import FingerprintMonitor, Key, Named
from drumline.guards.run.nonfinite import advice, agree, nonfinite_finding, save_batch
from drumline.guards.table import LOCAL_CHECKS, RANK_CHECKS, REPORTS, findings
from drumline.state.chain import FIRST_STEPS, is_full
from drumline.state.folder import resume_command
from drumline.training.replay import find_origin
from drumline.training.run import Run
from drumline.training.state import TrainState


class RunGuards:
    """The guards of one run. The loop calls `begin` before the first step, `before` and `after` around each step."""

    def __init__(self, run: Run) -> None:
        self.run, self.gate = run, run.step.gate
        self.monitor = FingerprintMonitor(
            lambda: state_tensors(run.state),
            run.world,
            run.reporter.run_log,
            self.gate,
            run.strategy.grid.places,
            lambda step: run.sets.drawn_at(run.recipe, step),
        )
        self.monitor.watched = frozen_tensors(run.state.module) if run.task.evaluates else frozenset()
        self.first_step = run.position.step
        """Steps done before this run, if it is resumed."""
        self.monitor.agreed = self.first_step
        self.reported: set[str] = set()
        """Guards that have reported. The same on every rank."""
        self._led: set[str] = set()
        """Frozen tensors that follow trained ones, such as a momentum encoder's. The same on every rank."""
        self._own: list[Finding] = []
        self._modes = {name: part.training for name, part in run.state.module.named_modules()}
        self._samples = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Before the first step. All ranks call it."""
        if self.gate is not None:
            self.gate.begin()
        self._report_own(self._own_findings("before the first step"))

    def before(self, index: int) -> None:
        """At the beginning of a step: reads one flag."""
        if not self.run.state.module.training and "eval-mode" not in self.reported:
            finding = left_in_eval(self.run.state.module, {"": True}, f"step {index + 1:,}")
            assert finding is not None
            self.report(finding)

    def after(self, done: int, batch: Batch, saving: bool, evaluating: bool = False) -> None:
        """After `done` steps, the last of them on `batch`. Takes fingerprints if this step is due, and compares those
        of the step before. If the state is about to be saved or evaluated, compares at once."""
        self._samples = batch.samples if self.run.strategy.grid.reads else batch.samples[:0]
        if self.monitor.pending:
            self._compare()
        every, first = self.run.recipe.guard.every, self.first_step
        planned = done <= FIRST_STEPS or saving or done % every == 0
        early = done <= max(FIRST_STEPS, first + FIRST_STEPS)
        if planned or early or evaluating:
            record = ("full" if is_full(done, every, saving) else "short") if planned else ""
            self._check(done, record, wait=early or saving or evaluating)
        if done == first + FIRST_STEPS:
            self._compare_reports(done)

    def before_save(self, step: int) -> None:
        """Checks the state that is about to be saved."""
        if self.monitor.pending:
            self._compare()
        if self.monitor.last != step:
            self._check(step, "", wait=True)

    def poll(self, done: int) -> int:
        """The step whose gradients were not finite, or 0. Never waits."""
        if self.gate is None or "non-finite" in self.reported:
            return 0
        return self.gate.poll(done)

    def alarm(self, step: int) -> None:
        """A step's gradients were not finite. All ranks call this together and find out why."""
        if "non-finite" in self.reported:
            return
        run = self.run
        enter(Phase.STARTING)  # repeating a step may take long
        batch = run.single_batch(step - 1)
        rank, origin, theirs = agree(find_origin(run.step, batch, step - 1), batch, run.world)
        saved = ""
        if run.folder is not None:
            folder = run.folder.path
            saved = save_batch(folder, theirs, step, rank, resume_command(run.recipe, folder))
        saved = run.world.broadcast_object(saved)
        value = "loss" if self.gate is not None and self.gate.scaled else "gradient"
        fix = f"{advice(run.step.precision, origin)}. {saved}"
        self.report(nonfinite_finding(step, rank, run.world.size, origin, theirs.samples, value, fix))

    def end(self) -> None:
        """After the last step."""
        if self.monitor.pending:
            self._compare()
        gate = self.gate
        if gate is not None and gate.once and (skipped := gate.skipped):
            self.run.log(f"WARNING: {skipped:,} step(s) changed nothing: their gradients were not finite")

    def report(self, finding: Finding) -> None:
        """Ends the run, or warns once per guard. Every rank calls it with the same finding."""
        if self.run.recipe.guard.action == "stop":
            raise as_error(finding)
        if finding.guard not in self.reported:
            self.reported.add(finding.guard)
            details = "; ".join(f"{label}: {text}" for label, text in finding.details())
            self.run.log(f"WARNING: guard [{finding.guard}]: {finding.what}; {details}; fix: {finding.fix}")

    def _check(self, done: int, record: str, wait: bool) -> None:
        self._own = self._own_findings(f"step {done:,}")
        if wait and "non-finite" not in self.reported:
            self._own += self._overflow(done)
        self.monitor.take(done, self._samples, record, len(self._own))
        if wait:
            self._compare()

    def _compare(self) -> None:
        result = self.monitor.compare()
        if result.nonfinite_step:
            self.alarm(result.nonfinite_step)
        for finding in result.findings:
            self.report(finding)
        if result.moved and "frozen" not in self.reported:
            self._report_moved(result.moved, result.since)
        if result.own_findings:
            self._report_own(self._own)

    def _report_moved(self, moved: tuple[Key, ...], since: str) -> None:
        """Reports frozen tensors that have changed. All ranks call it with the same tensors."""
        module, world = self.run.state.module, self.run.world
        if names := [name for _, name in moved if name not in self._led]:
            self._led.update(*world.all_gather_object(followers(module, names)))
        parameters = [name for group, name in moved if group == "parameter" and name not in self._led]
        statistics = [name for group, name in moved if group == "buffer" and name not in self._led]
        if parameters:
            self.report(moved_parameters(parameters, since, by_optimizer=False))
        if statistics:
            self.report(moved_statistics(statistics, since, "train.freeze"))

    def _compare_reports(self, step: int) -> None:
        """The rank checks of both loops, after the first steps."""
        world, loop = self.run.world, self._loop_state(f"step {step:,}")
        messages = world.all_gather_object({name: report(loop) for name, report in REPORTS.items()})
        for finding in findings(RANK_CHECKS, Reports(range(world.size), messages, step)):
            self.report(finding)

    def _report_own(self, own: list[Finding]) -> None:
        """Reports the findings that single ranks have. All ranks call it."""
        seen: set[tuple[str, str]] = set()
        world = self.run.world
        for rank, theirs in enumerate(world.all_gather_object(own)):
            for finding in theirs:
                if (finding.guard, finding.what) not in seen:
                    seen.add((finding.guard, finding.what))
                    where = f"rank {rank} of {world.size}, {finding.where}".removesuffix(", ")
                    self.report(replace(finding, where=where) if world.size > 1 else finding)

    def _own_findings(self, since: str) -> list[Finding]:
        state, loop = self.run.state, self._loop_state(since)
        found = [
            *(check(loop) for check in LOCAL_CHECKS),
            foreign_parameters(loop, state.optimizer),
            left_in_eval(state.module, self._modes, since),
        ]
        return [each for each in found if each is not None and each.guard not in self.reported]

    def _loop_state(self, since: str) -> LoopState:
        """The run as the checks of both loops see it."""
        run, state, strategy = self.run, self.run.state, self.run.strategy
        device = run.world.device
        # The layout may use other devices. What other processes of a replica hold is on the meta device here.
        others = {*strategy.devices, *([torch.device("meta")] if strategy.grid.places > 1 else [])}
        tensors = {
            f"{group} '{name}'": tensor
            for (group, name), tensor in self.monitor.tensors().items()
            if tensor.device not in others
        }
        for index, tensor in enumerate(run.step.objective.live()):
            tensors[f"tensor {index} of the objective"] = tensor
        return LoopState(
            rank=run.world.rank,
            device=device,
            parameters=dict(state.strategy.named_parameters()),
            held=[p for group in state.optimizer.param_groups for p in group["params"]],
            tensors=tensors,
            since=since,
            in_run=True,
            equal_memory=device.type == "cuda" and strategy.equal_memory and not run.task.spans_devices,
        )

    def _overflow(self, step: int) -> list[Finding]:
        """A parameter that the update has left non-finite although the gradients were finite. The next step would
        show it, but the state is evaluated or saved first. Waits for the device."""
        name = first_parameter(dict(self.run.state.module.named_parameters()))
        if name is None:
            return []
        what = f"parameter {name!r} is NaN or infinite after step {step:,}: the update overflowed"
        return [Finding("non-finite", what, repr(name), f"step {step:,}", advice(self.run.step.precision))]


def as_error(finding: Finding) -> UserError:
    """The error that ends a run with a finding."""
    lines = [f"guard [{finding.guard}]: {finding.what}"]
    lines += [f"  {label}: {text}" for label, text in finding.details()]
    return UserError("\n".join(lines), f"{finding.fix}; to continue anyway, use --guard.action warn")


def foreign_parameters(loop: LoopState, optimizer: torch.optim.Optimizer) -> Finding | None:
    """Tensors in the optimizer that are not in the model."""
    known = {id(parameter) for parameter in loop.parameters.values()}
    foreign = {
        f"param_groups[{number}]['params'][{index}]": p
        for number, group in enumerate(optimizer.param_groups)
        for index, p in enumerate(group["params"])
        if id(p) not in known
    }
    return not_in_model("foreign-parameter", foreign, loop.since) if foreign else None


def frozen_tensors(module: torch.nn.Module) -> frozenset[Key]:
    """The tensors of a module that must not change during training, by their names in fingerprints."""
    return frozenset(
        [
            *(("parameter", name) for name in frozen_parameters(module)),
            *(("buffer", name) for name in frozen_statistics(module)),
        ]
    )


def state_tensors(state: TrainState) -> Named:
    """The tensors that a run's fingerprints are taken of: parameters, gradients, saved buffers, optimizer, average
    and loss scale."""
    module, groups = state.module, state.tensors()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named: Named = {("parameter", name): parameter for name, parameter in parameters.items()}
    named |= {
        ("gradient", name): parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    named |= {
        ("buffer", name): tensor for name, tensor in module.state_dict().items() if name not in parameters
    }
    named |= {("optimizer", name): tensor for name, tensor in groups["optimizer"].items()}
    named |= {("average", name): tensor for name, tensor in groups.get("average", {}).items()}
    scale = getattr(state.scaler, "_scale", None) if state.scaler.is_enabled() else None
    if scale is not None:
        named["scaler", "scale"] = scale
    return named

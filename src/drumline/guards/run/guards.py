"""`RunGuards`: calls the checks around each step of a run, and ends the run or warns (`guard.action`).

Promises: every finding is reported on all ranks at the same step, with what, where, since when and what to do. With
`warn` each guard reports once and the run continues. The state is checked before it is saved or evaluated, so no
checkpoint holds a state that a guard would have stopped. Waits for the device only after the first steps, before
evaluations and before saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.core.precision import Precision
from drumline.data.feed.batch import Batch
from drumline.guards.checks.devices import (
    LEAST_BYTES,
    memory_elsewhere,
    memory_imbalance,
    memory_of,
    misplaced,
)
from drumline.guards.checks.modes import left_in_eval
from drumline.guards.checks.nonfinite import Origin, first_parameter
from drumline.guards.checks.parameters import not_in_model, not_in_optimizer
from drumline.guards.finding import Finding
from drumline.guards.run.fingerprints import FingerprintMonitor
from drumline.guards.run.nonfinite import NonFiniteGate, advice, agree, nonfinite_finding, save_batch
from drumline.parallel.world import World
from drumline.state.chain import FIRST_STEPS, is_full
from drumline.state.folder import resume_command


@dataclass(frozen=True)
class Guarded:
    """What the loop hands to its guards."""

    recipe: Recipe
    world: World
    module: nn.Module
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    """The model's parameters as this process holds them: shards of a sharded model."""
    optimizer: torch.optim.Optimizer
    gate: NonFiniteGate | None
    monitor: FingerprintMonitor
    repeat: Callable[[int], tuple[Batch, Origin | None]]
    """Repeats a step on this rank: its batch, and the first non-finite value in it. All ranks call it."""
    objective_tensors: Callable[[], Iterable[torch.Tensor]]
    log: Callable[[str], None]
    folder: Path | None
    """The run folder, on rank 0."""
    first_step: int
    """Steps done before this run, if it is resumed."""
    precision: Precision
    reads: bool
    """Whether this rank reads samples."""
    one_gpu_each: bool
    """Whether each process uses only its own GPU, and about as much memory as the others."""
    devices: frozenset[torch.device] = field(default_factory=frozenset)
    """Devices of the model besides the rank's own."""


class RunGuards:
    """The guards of one run. The loop calls `begin` before the first step, `before` and `after` around each step."""

    def __init__(self, run: Guarded) -> None:
        self.run, self.monitor = run, run.monitor
        self.monitor.agreed = run.first_step
        self.reported: set[str] = set()
        """Guards that have reported. The same on every rank."""
        self._own: list[Finding] = []
        self._modes = {name: part.training for name, part in run.module.named_modules()}
        self._samples = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Before the first step. All ranks call it."""
        if self.run.gate is not None:
            self.run.gate.begin()
        self._report_own(self._own_findings("before the first step"))

    def before(self, index: int) -> None:
        """At the beginning of a step: reads one flag."""
        if not self.run.module.training and "eval-mode" not in self.reported:
            finding = left_in_eval(self.run.module, {"": True}, f"step {index + 1:,}")
            assert finding is not None
            self.report(finding)

    def after(self, done: int, batch: Batch, saving: bool, evaluating: bool = False) -> None:
        """After `done` steps, the last of them on `batch`. Takes fingerprints if this step is due, and compares those
        of the step before. If the state is about to be saved or evaluated, compares at once."""
        self._samples = batch.samples if self.run.reads else batch.samples[:0]
        if self.monitor.pending:
            self._compare()
        every, first = self.run.recipe.guard.every, self.run.first_step
        planned = done <= FIRST_STEPS or saving or (every > 0 and done % every == 0)
        early = done <= max(FIRST_STEPS, first + FIRST_STEPS)
        if planned or early or evaluating:
            record = ("full" if is_full(done, every, saving) else "short") if planned else ""
            self._check(done, record, wait=early or saving or evaluating)
        if done == first + FIRST_STEPS and self.run.one_gpu_each:
            self._check_memory(f"step {done:,}")

    def before_save(self, step: int) -> None:
        """Checks the state that is about to be saved."""
        if self.monitor.pending:
            self._compare()
        if self.monitor.last != step:
            self._check(step, "", wait=True)

    def poll(self, done: int) -> int:
        """The step whose gradients were not finite, or 0. Never waits."""
        gate = self.run.gate
        return gate.poll(done) if gate is not None and "non-finite" not in self.reported else 0

    def alarm(self, step: int) -> None:
        """A step's gradients were not finite. All ranks call this together and find out why."""
        if "non-finite" in self.reported:
            return
        run = self.run
        enter(Phase.STARTING)  # repeating a step may take long
        batch, mine = run.repeat(step - 1)
        rank, origin, theirs = agree(mine, batch, run.world)
        saved = ""
        if run.folder is not None:
            saved = save_batch(run.folder, theirs, step, rank, resume_command(run.recipe, run.folder))
        saved = run.world.broadcast_object(saved)
        value = "loss" if run.gate is not None and run.gate.scaled else "gradient"
        fix = f"{advice(run.precision)}. {saved}"
        self.report(nonfinite_finding(step, rank, run.world.size, origin, theirs.samples, value, fix))

    def end(self) -> None:
        """After the last step."""
        if self.monitor.pending:
            self._compare()
        gate = self.run.gate
        if gate is not None and gate.once and (skipped := gate.skipped):
            self.run.log(f"WARNING: {skipped:,} step(s) changed nothing: their gradients were not finite")

    def report(self, finding: Finding) -> None:
        """Ends the run, or warns once per guard. Every rank calls it with the same finding."""
        if self.run.recipe.guard.action == "stop":
            raise as_error(finding)
        if finding.guard not in self.reported:
            self.reported.add(finding.guard)
            details = "; ".join(f"{label}: {text}" for label, text in _details(finding))
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
        if result.own_findings:
            self._report_own(self._own)

    def _check_memory(self, since: str) -> None:
        world = self.run.world
        reports = world.all_gather_object(memory_of(world.device, whole_device=False))
        ranks = range(world.size)
        for finding in (
            memory_elsewhere(ranks, reports, since, any_gpu=True),
            memory_imbalance(ranks, reports, since, LEAST_BYTES),
        ):
            if finding is not None:
                self.report(finding)

    def _report_own(self, own: list[Finding]) -> None:
        """Reports the findings that single ranks have. All ranks call it."""
        seen: set[tuple[str, str]] = set()
        world = self.run.world
        for rank, findings in enumerate(world.all_gather_object(own)):
            for finding in findings:
                if (finding.guard, finding.what) not in seen:
                    seen.add((finding.guard, finding.what))
                    where = f"rank {rank} of {world.size}, {finding.where}".removesuffix(", ")
                    self.report(replace(finding, where=where) if world.size > 1 else finding)

    def _own_findings(self, since: str) -> list[Finding]:
        run = self.run
        found: list[Finding | None] = [
            *optimizer_findings(run.parameters(), run.optimizer, since),
            misplaced_tensors(run, self.monitor.tensors(), since),
            left_in_eval(run.module, self._modes, since),
        ]
        return [each for each in found if each is not None and each.guard not in self.reported]

    def _overflow(self, step: int) -> list[Finding]:
        """A parameter that the update has left non-finite although the gradients were finite. The next step would
        show it, but the state is evaluated or saved first. Waits for the device."""
        name = first_parameter(dict(self.run.module.named_parameters()))
        if name is None:
            return []
        what = f"parameter {name!r} is NaN or infinite after step {step:,}: the update overflowed"
        return [Finding("non-finite", what, repr(name), f"step {step:,}", advice(self.run.precision))]


def as_error(finding: Finding) -> UserError:
    """The error that ends a run with a finding."""
    lines = [f"guard [{finding.guard}]: {finding.what}"]
    lines += [f"  {label}: {text}" for label, text in _details(finding)]
    return UserError("\n".join(lines), f"{finding.fix}; to continue anyway, use --guard.action warn")


def optimizer_findings(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, since: str
) -> list[Finding | None]:
    """Trainable parameters that no optimizer holds, and tensors in the optimizer that are not in the model."""
    named = dict(parameters)
    every = {id(parameter) for parameter in named.values()}
    held = {
        f"param_groups[{number}]['params'][{index}]": p
        for number, group in enumerate(optimizer.param_groups)
        for index, p in enumerate(group["params"])
    }
    foreign = {name: p for name, p in held.items() if id(p) not in every}
    fix = (
        "create parameters in the model's constructor and do not replace them; change their values by copy_ under "
        "no_grad"
    )
    return [
        not_in_optimizer(named, held.values(), since, fix),
        not_in_model("foreign-parameter", foreign, since) if foreign else None,
    ]


def misplaced_tensors(
    run: Guarded, tensors: dict[tuple[str, str], torch.Tensor], since: str
) -> Finding | None:
    """Tensors of the run that are neither on the rank's own device nor on one that its layout uses."""
    device = run.world.device
    named = {
        f"{group} '{name}'": tensor
        for (group, name), tensor in tensors.items()
        if tensor.device not in run.devices
    }
    named |= {f"tensor {index} of the objective": t for index, t in enumerate(run.objective_tensors())}
    fix = "let the run move the model: no .cuda(), .cpu() or .to(device) in its constructor or forward"
    return misplaced(named, device, run.world.rank, since, fix)


def _details(finding: Finding) -> list[tuple[str, str]]:
    return [(label, text) for label, text in (("where", finding.where), ("since", finding.since)) if text]

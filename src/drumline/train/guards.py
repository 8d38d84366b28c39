"""What looks for silent mistakes while a run trains, and says them: `guard.action` decides whether it ends with them.

Promises: every finding is told on all ranks at the same step, with what, where, since when and what to do; with
`warn` each guard speaks once and the run goes on. Before a save everything is looked at, so no checkpoint holds a
state that a guard would have stopped, and before an evaluation, so none is scored. Nothing here waits for the device
but after the first steps, before evaluations and before saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from drumline.core.errors import UserError
from drumline.core.heartbeat import Phase, enter
from drumline.data.feed.batch import Batch
from drumline.guards.finding import Finding
from drumline.state.chain import FIRST_STEPS, is_full
from drumline.state.folder import resume_command
from drumline.train import culprit
from drumline.train.finite import advice
from drumline.train.placed import memory_findings, memory_row, placed_findings
from drumline.train.run import Run
from drumline.train.witness import Witness, state_tensors


class Guards:
    """Those of one run. `begin` comes after the rehearsal, `before` and `after` around each step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.told: set[str] = set()
        """Guards that have spoken. The same on every rank."""
        self.witness = Witness(
            lambda: state_tensors(run.state),
            run.world,
            run.reporter.run_log,
            run.step.finite,
            run.strategy.grid.places,
        )
        self.witness.agreed = run.position.step
        self._one_gpu_each = (
            run.world.device.type == "cuda" and run.strategy.equal_memory and not run.task.spans_devices
        )
        # What other processes of a pipeline hold is on the meta device here.
        self._stage_devices = {*run.strategy.devices, torch.device("meta")}
        self._own: list[Finding] = []
        self._modes = {name: part.training for name, part in run.state.module.named_modules()}
        self._samples = torch.empty(0, dtype=torch.int64)

    def begin(self) -> None:
        """Before the first step: what the rehearsal left. All ranks call it."""
        if self.run.step.finite is not None:
            self.run.step.finite.begin()
        self._tell_own(self._own_findings("before the first step"))

    def before(self, index: int) -> None:
        """At the beginning of a step: looks at one flag."""
        if not self.run.state.module.training and "eval-mode" not in self.told:
            self.tell(self._in_eval(self.run.state.module, "", f"step {index + 1:,}"))

    def after(self, done: int, batch: Batch, saving: bool, evaluating: bool = False) -> None:
        """After `done` steps, the last of them on `batch`. Starts a look where it is time for one, and reads the one
        that was started a step before. Where the state is about to be saved or scored, it is read at once."""
        self._samples = batch.samples if self.run.strategy.grid.reads else batch.samples[:0]
        if self.witness.waiting:
            self._read()
        every = self.run.recipe.guard.every
        planned = done <= FIRST_STEPS or saving or (every > 0 and done % every == 0)
        close = done <= max(FIRST_STEPS, self.run.position.step + FIRST_STEPS)
        if planned or close or evaluating:
            full = is_full(done, every, saving)
            now = close or saving or evaluating
            self._look(done, ("full" if full else "short") if planned else "", wait=now)
        if done == self.run.position.step + FIRST_STEPS and self._one_gpu_each:
            rows = self.run.world.all_gather_object(memory_row(self.run.world))
            for finding in memory_findings(rows, f"step {done:,}"):
                self.tell(finding)

    def before_save(self, step: int) -> None:
        """Reads what is on its way, and looks at what would be saved."""
        if self.witness.waiting:
            self._read()
        if self.witness.last != step:
            self._look(step, "", wait=True)

    def poll(self, done: int) -> int:
        """Whether gradients were not finite: the step, or 0. Never waits."""
        finite = self.run.step.finite
        return finite.poll(done) if finite is not None and "non-finite" not in self.told else 0

    def alarm(self, step: int) -> None:
        """A step's gradients were not finite. All ranks come here together, and learn why."""
        if "non-finite" in self.told:
            return
        run = self.run
        enter(Phase.STARTING)  # going through a step again may take long
        batch = run.single_batch(step - 1)
        mine = culprit.examine(run.step, batch, step - 1)
        rank, found, theirs = culprit.agree(mine, batch, run.world)
        saved = ""
        if run.folder is not None:
            saved = culprit.keep_batch(
                run.folder.path, theirs, step, rank, resume_command(run.recipe, run.folder.path)
            )
        saved = run.world.broadcast_object(saved)
        finite = run.step.finite
        what = "loss" if finite is not None and finite.scaled else "gradient"
        self.tell(
            culprit.not_finite(step, rank, found, theirs, saved, run.world, what, advice(run.step.autocast))
        )

    def end(self) -> None:
        """After the last step."""
        if self.witness.waiting:
            self._read()
        finite = self.run.step.finite
        if finite is not None and finite.once and (held := finite.held):
            self.run.log(f"WARNING: {held:,} step(s) changed nothing, since their gradients were not finite")

    def tell(self, finding: Finding) -> None:
        """Ends the run, or warns once per guard. Every rank is given the same finding."""
        if self.run.recipe.guard.action == "stop":
            raise as_error(finding)
        if finding.guard not in self.told:
            self.told.add(finding.guard)
            said = "; ".join(f"{word}: {text}" for word, text in _details(finding))
            self.run.log(f"WARNING: guard [{finding.guard}]: {finding.what}; {said}; fix: {finding.fix}")

    def _look(self, done: int, writes: str, wait: bool) -> None:
        own = self._own_findings(f"step {done:,}")
        if wait and "non-finite" not in self.told:
            own += culprit.parameter_findings(self.run.state, done, advice(self.run.step.autocast))
        self.witness.look(done, self._samples, writes, len(own))
        self._own = own
        if wait:
            self._read()

    def _read(self) -> None:
        seen = self.witness.read()
        if seen.not_finite:
            self.alarm(seen.not_finite)
        for finding in seen.findings:
            self.tell(finding)
        if seen.troubled:
            self._tell_own(self._own)

    def _tell_own(self, own: list[Finding]) -> None:
        """What ranks found for themselves. All ranks call it."""
        seen: set[tuple[str, str]] = set()
        for rank, findings in enumerate(self.run.world.all_gather_object(own)):
            for finding in findings:
                if (finding.guard, finding.what) not in seen:
                    seen.add((finding.guard, finding.what))
                    where = f"rank {rank} of {self.run.world.size}, {finding.where}".removesuffix(", ")
                    self.tell(replace(finding, where=where) if self.run.world.size > 1 else finding)

    def _own_findings(self, since: str) -> list[Finding]:
        state = self.run.state
        found = optimizer_findings(state.strategy.named_parameters(), state.optimizer, since)
        found += placed_findings(
            state_tensors(state),
            self.run.step.objective.live(),
            self.run.world.device,
            since,
            self._stage_devices,
        )
        for name, part in state.module.named_modules():
            if self._modes.get(name, False) and not part.training:
                found.append(self._in_eval(part, name, since))
                break
        return [finding for finding in found if finding.guard not in self.told]

    def _in_eval(self, part: nn.Module, name: str, since: str) -> Finding:
        which = f"layer {name!r} ({type(part).__name__})" if name else f"the model ({type(part).__name__})"
        return Finding(
            "eval-mode",
            f"{which} was left in eval mode: dropout is off there, and statistics do not move",
            where=which,
            since=since,
            fix="look for eval() in forward, in a hook or in the objective, and call train() after it; a layer that "
            "is to stay in eval mode keeps itself there in its own train()",
        )


def as_error(finding: Finding) -> UserError:
    """The finding as the message a run ends with."""
    lines = [f"guard [{finding.guard}]: {finding.what}"]
    lines += [f"  {word}: {text}" for word, text in _details(finding)]
    return UserError("\n".join(lines), f"{finding.fix}; to continue anyway, use --guard.action warn")


def optimizer_findings(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, since: str
) -> list[Finding]:
    """Trainable parameters that no optimizer moves, and those it moves that are not in the model. `parameters` are
    the model's, as this process holds them."""
    every = {id(parameter): (name, parameter) for name, parameter in parameters}
    named = {
        key: name
        for key, (name, parameter) in every.items()
        if parameter.requires_grad and not parameter.is_meta  # belongs to another process
    }
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    outside = [name for key, name in named.items() if key not in held]
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in every]
    found = []
    if outside:
        found.append(
            Finding(
                "parameters",
                f"{len(outside)} trainable parameter(s) are not in the optimizer and never change: {_some(outside)}",
                where=_some(outside),
                since=since,
                fix="make parameters in the model's constructor and do not put new ones in their place; values are "
                "changed by copy_ under no_grad",
            )
        )
    if foreign:
        shapes = _some([f"one of shape {tuple(parameter.shape)}" for parameter in foreign])
        found.append(
            Finding(
                "foreign-parameter",
                f"the optimizer holds {len(foreign)} parameter(s) that are not in the model: {shapes}",
                where=shapes,
                since=since,
                fix="do not replace or delete parameters after the model is built: the optimizer keeps the old ones",
            )
        )
    return found


def _details(finding: Finding) -> list[tuple[str, str]]:
    return [(word, text) for word, text in (("where", finding.where), ("since", finding.since)) if text]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

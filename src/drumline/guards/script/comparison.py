"""The comparison of all ranks just before some steps (1, 2, 3 and every N), and after the last one.

Promises: one small message per rank when all is well; the fingerprints of every tensor only if something differs. All
ranks reach the same findings, because all decide from the same messages. Running statistics may differ between two
broadcasts of DDP, so buffers are compared only if nothing makes them equal, and then only warn. Without DDP,
gradients may differ if the script averages the weights after the step: the next comparison decides. After the last
step all waits are bounded, and weights that the script changed since (to save the best ones) are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from drumline.guards.checks.data import INPUT_STEPS, input_scales
from drumline.guards.checks.drift import (
    ROUNDING,
    batch_fingerprint,
    difference,
    different_gradients,
    different_rates,
    digest,
    distance,
    drifted,
    fingerprints,
    rounding,
    sample_of,
    state_on_some_ranks,
    stepped_around,
)
from drumline.guards.checks.nonfinite import tensors_in
from drumline.guards.checks.setup import settings_of
from drumline.guards.finding import Finding, LoopState, Reports, rank_names
from drumline.guards.script.discovery import has_averager
from drumline.guards.script.hang import RankStatus, skipped_step, unequal_steps
from drumline.guards.script.monitors import FIRST_STEPS, Monitors
from drumline.guards.script.peers import Peers, PeerTimeout
from drumline.guards.table import AT_CLOSE, COMPARED, RANK_CHECKS, REPORTS, findings

_REPORTED_STEPS = (1, FIRST_STEPS)
"""The steps at which ranks report what `RANK_CHECKS` read."""
_MOST_IDS = 4096
_SAMPLE_SECONDS = 30.0
_CLOSING_SECONDS = 10.0
_LINGER_SECONDS = 3.0
_DRIFT = {
    "parameters": (
        "parameter",
        "change weights before wrapping in DDP (it copies rank 0's to all), or equally on every rank",
    ),
    "optimizer": (
        "optimizer state",
        "load the optimizer's state and set learning rates equally on every rank",
    ),
}
"""For each kind of tensor: its name and the fix."""

Named = Mapping[str, torch.Tensor]


class RankComparison:
    """Compares the ranks of one model."""

    def __init__(self, peers: Peers, monitors: Monitors) -> None:
        self._peers, self._monitors, self._forwards = peers, monitors, monitors.forwards
        self._agreed_at = 0
        """The last step before which all ranks agreed."""
        self._averages = False
        self._last_batch: int | None = None
        self._inputs: list[list[tuple[float, float]]] = []
        """The scales of the inputs in the first steps."""
        self._suspect: Finding | None = None

    def compare(
        self, key: str, optimizer: Optimizer, loop: LoopState, step: int, poll: Callable[[], None]
    ) -> list[Finding]:
        """The findings of all ranks together, before a step."""
        tensors = self._tensors(optimizer)
        mine = {kind: fingerprints(named) for kind, named in tensors.items()}
        message = self._message(optimizer, loop, step)
        message["digests"] = {kind: digest(values) for kind, values in mine.items()}
        try:
            messages = self._peers.gather(f"{key}/message", message, poll)
        except PeerTimeout:
            self._peers.post(f"{key}/fingerprints/{self._peers.rank}", mine)  # for a rank that is late
            raise
        reports = Reports(self._peers.ranks, messages, step)
        checks = (*COMPARED, *RANK_CHECKS) if step in _REPORTED_STEPS else COMPARED
        return findings(checks, reports) + self._differences(key, reports, mine, tensors, poll)

    def compare_last(
        self, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
    ) -> list[Finding]:
        """The findings after the last step; none if a rank does not arrive in time. `untouched`: the weights are
        those after the last step."""
        message = self._last_message(optimizers, steps, untouched)
        messages = self._peers.gather("closing", message, lambda: None, seconds=_CLOSING_SECONDS)
        found = []
        if all(one is not None for one in messages):
            reports = Reports(self._peers.ranks, messages, messages[0]["steps"][0])
            drift = self._last_drift(optimizers[0], reports)
            found = [*([drift] if drift is not None else []), *findings(AT_CLOSE, reports)]
        linger(self._peers, "closing/read")
        return found

    def _averages_weights(self) -> bool:
        """Whether the script averages the weights now and then, so that ranks differ on purpose in between."""
        return self._averages or self._monitors.exchanged or has_averager()

    def _message(self, optimizer: Optimizer, loop: LoopState, step: int) -> dict[str, Any]:
        """What this rank reports before a step."""
        monitors, losses, calls = self._monitors, self._monitors.losses, self._forwards.calls
        inputs = list(tensors_in([(call.args, call.kwargs) for call in calls]))
        batches = [self._last_batch, batch_fingerprint(inputs) if calls else None]
        self._last_batch = batches[1]
        if step <= INPUT_STEPS:
            self._inputs.append(input_scales(inputs))
        settings = settings_of(monitors.model, optimizer, [call.autocast for call in calls])
        reported = step in _REPORTED_STEPS
        return {
            **{name: report(loop) if reported else None for name, report in REPORTS.items()},
            "batches": batches,
            "arrived": [float(value) for call in calls for value in call.largest_gradients],
            "ids": monitors.ids[:_MOST_IDS],
            "seen": self._forwards.evidence(),
            "modes": monitors.modes.flags(),
            "setup": settings | {"cross_entropy": "; ".join(sorted(losses.settings))},
            "data": monitors.loaders.summary(),
            "loss": losses.level(),
            "kinds": losses.kinds[-3:],
            "teachers": monitors.discovery.teachers(),
            "sample": monitors.probes.sample(),
            "classes": losses.classes,
            "divided": any(root.factors or root.sums for root in losses.roots),
            "frozen": [name for name, p in loop.parameters.items() if not p.requires_grad],
            "passes": monitors.hang.history(),
            "inputs": self._inputs if step <= INPUT_STEPS else [],
        }

    def _differences(
        self,
        key: str,
        reports: Reports,
        mine: Mapping[str, Mapping[str, int]],
        tensors: Mapping[str, Named],
        poll: Callable[[], None],
    ) -> list[Finding]:
        """Tensors that are not the same on all ranks."""
        differing = [kind for kind in mine if len({one.get(kind) for one in reports.of("digests")}) > 1]
        if self._suspect is not None and "parameters" not in differing:
            self._averages = True  # gradients differed and weights do not: the script averages them
        suspect, self._suspect = self._suspect, None
        if not differing:
            self._agreed_at = reports.step
            self._forwards.agreed()
            return []
        if "parameters" in differing:
            certain = not self._averages_weights()
            skipped = self._skipped(reports)
            if skipped is not None:
                return [replace(skipped, certain=self._forwards.wrapper is not None and certain)]
            if suspect is not None:
                return [replace(suspect, certain=certain)]
        everyones = self._peers.gather(f"{key}/fingerprints", {kind: mine[kind] for kind in differing}, poll)
        found = []
        for kind in ("gradients", "parameters", "optimizer", "buffers"):
            if kind in differing:
                values = [one.get(kind, {}) for one in everyones]
                finding = self._difference(key, kind, values, reports, tensors[kind], poll)
                found += [finding] if finding is not None else []
        return found

    def _difference(
        self,
        key: str,
        kind: str,
        values: Sequence[Mapping[str, int]],
        reports: Reports,
        tensors: Named,
        poll: Callable[[], None],
    ) -> Finding | None:
        """The first tensor of a kind that differs, given every rank's fingerprints."""
        if kind == "optimizer" and reports.step == 1:
            loaded = state_on_some_ranks(reports.ranks, values)
            if loaded is not None:
                return replace(loaded, certain=self._forwards.wrapper is not None)
        if kind == "optimizer":  # state that only some ranks have is split between them
            common = set.intersection(*(set(each) for each in values))
            values = [{name: each[name] for name in each if name in common} for each in values]
        differs = difference(values)
        if differs is None:
            return None
        name, accused = differs
        # A parameter outside the model may be this rank's own slice of a head that is split between ranks.
        outside = "['params']" in name
        if kind == "optimizer" and outside:
            return None  # its gradients are compared already
        sample = sample_of(tensors.get(name))
        samples = self._peers.gather(f"{key}/sample-{kind}", sample, poll, seconds=_SAMPLE_SECONDS)
        apart = distance([each for each in samples if each is not None])
        ranks = [self._peers.ranks[index] for index in accused]
        finding = self._explained(kind, name, ranks, apart, reports)
        if kind == "gradients" and self._averages:
            return None
        unwrapped = not any(one["wrapped"] for one in reports.of("seen"))
        if finding.guard == "bypass" and unwrapped and reports.step < FIRST_STEPS:
            self._suspect = finding
            return None
        certain = finding.guard in ("bypass", "drift") and not outside
        return replace(finding, certain=certain and not self._averages_weights())

    def _explained(self, kind: str, name: str, accused: list[int], apart: float, reports: Reports) -> Finding:
        """Why a tensor of one kind differs between ranks."""
        seen = reports.of("seen")
        ranks = "every rank" if len(accused) == self._peers.size > 2 else rank_names(accused)
        since = reports.since + (f" (equal at step {self._agreed_at})" if self._agreed_at else "")
        where = f"'{name}' on {ranks}, by {apart:.1e} of its largest value"
        if 0 < apart < ROUNDING:
            return rounding(kind, name, ranks, apart, since)
        if kind == "gradients":
            outside = name.startswith("param_groups")
            return different_gradients(name, accused, seen, reports.step, outside)
        if kind == "buffers":
            return Finding(
                "buffers",
                "buffers differ between ranks and nothing makes them equal: each rank evaluates a different model",
                where,
                since,
                "wrap with broadcast_buffers=True, use SyncBatchNorm, or average them before evaluating and saving",
            )
        tensor, fix = _DRIFT[kind]
        return stepped_around(seen, name, since) or drifted(tensor, name, ranks, where, since, fix)

    def _skipped(self, reports: Reports) -> Finding | None:
        """Ranks that differ because one of them skipped a step after they last agreed."""
        statuses = {
            rank: RankStatus(reports.step - 1, "step", passes=passes)
            for rank, passes in zip(reports.ranks, reports.of("passes"), strict=True)
        }
        skipped = skipped_step(statuses, self._agreed_at + 1)
        if skipped is None or not self._agreed_at:
            return None
        what, fix = skipped
        return Finding("steps", what, f"noticed at {reports.since}", f"after step {self._agreed_at}", fix)

    def _last_message(
        self, optimizers: Sequence[Optimizer], steps: Sequence[int], untouched: bool
    ) -> dict[str, Any]:
        """What this rank reports after the last step."""
        monitors = self._monitors
        tensors = self._tensors(optimizers[0])["parameters"]
        return {
            "steps": list(steps),
            "parameters": fingerprints(tensors) if untouched else None,
            "copies": monitors.discovery.copies(),
            "teachers": monitors.discovery.teachers(),
            "data": monitors.loaders.summary(),
            "loss": monitors.losses.level(),
            "kinds": [],
            "passes": monitors.hang.history(),
            "rates": {
                f"param_groups[{index}]['lr']"
                + (f" of optimizer {number}" if len(optimizers) > 1 else ""): float(group["lr"])
                for number, one in enumerate(optimizers)
                for index, group in enumerate(one.param_groups)
                if "lr" in group
            },
            "seen": self._forwards.evidence(in_step=False),
        }

    def _last_drift(self, optimizer: Optimizer, reports: Reports) -> Finding | None:
        """Parameters, learning rates or numbers of steps that differ after the last step."""
        ranks, agreed_at, seen = reports.ranks, self._agreed_at, reports.of("seen")
        values = reports.of("parameters")
        known = all(value is not None for value in values)
        differs = difference(values) if known else None
        certain = known and all(one["wrapped"] for one in seen) and not self._averages_weights()
        unequal, rates = unequal_steps(reports, agreed_at, certain), different_rates(reports)
        if unequal is not None and (differs is not None or not known):
            return unequal
        if differs is None or unequal is not None:
            return rates
        name, accused = differs
        named = rank_names([ranks[index] for index in accused])
        sample = sample_of(self._tensors(optimizer)["parameters"].get(name))
        samples = self._peers.gather("closing/sample", sample, lambda: None, seconds=_CLOSING_SECONDS)
        apart = distance([one for one in samples if one is not None])
        since = f"between steps {agreed_at} and {reports.step}"
        if rates is not None:
            rates = replace(rates, where=f"{rates.where}; parameter '{name}' differs too")
        elif 0 < apart < ROUNDING:
            return rounding("parameters", name, named, apart, "after the last step")
        fix = "check for code that changes weights or gradients on one rank only; a smaller every= finds the step"
        drift = drifted("parameter", name, f"{named} after the last step", f"'{name}'", since, fix)
        found = stepped_around(seen, name, since) or rates or drift
        return replace(found, certain=not self._averages_weights())

    def _tensors(self, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that ranks compare, by kind."""
        wrapper, model = self._forwards.wrapper, self._monitors.model
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        excluded = {
            id(tensor)
            for teacher in self._monitors.teachers
            for tensor in (*teacher.parameters(), *teacher.buffers())
        }
        parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if name not in ignored and id(parameter) not in excluded
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        own = {id(p) for name, p in model.named_parameters() if name in ignored}
        gradients: dict[str, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        sharded = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, float | int) or key == "lr":
                    state[f"param_groups[{number}]['{key}']"] = torch.as_tensor(float(value))
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in own:
                    continue
                name = names.get(id(parameter), f"param_groups[{number}]['params'][{index}]")
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
                if not sharded:
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, torch.Tensor):
                            state[f"{key} of {name}"] = value
        found = {"parameters": parameters, "gradients": gradients, "optimizer": state}
        if wrapper is None or not wrapper.broadcast_buffers:
            found["buffers"] = {
                name: buffer
                for name, buffer in model.named_buffers()
                if name not in ignored and id(buffer) not in excluded
            }
        return found


def linger(peers: Peers, key: str) -> None:
    """The store may live in this process: waits a moment for the other ranks to arrive here too."""
    peers.post(f"{key}/{peers.rank}", True)
    until = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < until:
        if all(peers.read(f"{key}/{rank}") for rank in peers.ranks):
            return
        time.sleep(0.01)

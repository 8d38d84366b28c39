"""The comparison of all ranks just before some steps (1, 2, 3 and every N): same state, same gradients, different
samples.

Promises: one small message per rank when all is well; the fingerprints of every tensor only if something differs. All
ranks reach the same finding, because all decide from the same messages. Running statistics may differ between two
broadcasts of DDP, so buffers are compared only if nothing makes them equal, and then only warn. Without DDP,
gradients may differ if the script averages the weights after the step: the next comparison decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.checks.datasets import different_label_columns
from drumline.guards.checks.devices import (
    LEAST_BYTES_OF_DEVICE,
    home,
    memory_elsewhere,
    memory_imbalance,
    memory_of,
    misplaced,
    shared_gpu,
)
from drumline.guards.checks.drift import (
    ROUNDING,
    batch_fingerprint,
    difference,
    different_gradients,
    digest,
    distance,
    drifted,
    fingerprints,
    rounding,
    sample_of,
    state_on_some_ranks,
    stepped_around,
)
from drumline.guards.checks.modes import Modes, different_modes
from drumline.guards.checks.nonfinite import tensors_in
from drumline.guards.checks.samples import equal_batches, overlap, same_ids, same_inputs
from drumline.guards.checks.settings import (
    different_inputs,
    different_labels,
    different_losses,
    different_scales,
    different_settings,
    frozen_on_some_ranks,
    input_scales,
    settings_of,
    summed_gradients,
)
from drumline.guards.checks.steps import RankStatus, skipped_step
from drumline.guards.finding import Finding, Found, rank_names
from drumline.guards.script.discovery import Discovery, different_teachers, has_averager
from drumline.guards.script.forwards import Forwards
from drumline.guards.script.hang import HangMonitor
from drumline.guards.script.loaders import Loaders
from drumline.guards.script.losses import Losses
from drumline.guards.script.probes import Probes
from drumline.guards.script.rendezvous import Rendezvous, RendezvousTimeout

FIRST_STEPS = 3
_MOST_IDS = 4096
_SAMPLE_SECONDS = 30.0
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


@dataclass(frozen=True)
class Monitors:
    """What observes one model; the source of the messages."""

    forwards: Forwards
    modes: Modes
    loaders: Loaders
    losses: Losses
    discovery: Discovery
    probes: Probes
    hang: HangMonitor


class Comparison:
    """Compares the ranks of one model."""

    def __init__(
        self, rendezvous: Rendezvous, monitors: Monitors, model: nn.Module, teachers: Sequence[nn.Module]
    ) -> None:
        self.rendezvous, self.monitors, self.model = rendezvous, monitors, model
        self.forwards = monitors.forwards
        self._excluded = {
            id(tensor) for teacher in teachers for tensor in (*teacher.parameters(), *teacher.buffers())
        }
        self.agreed_at = 0
        """The last step before which all ranks agreed."""
        self.exchanged = False
        """The script has exchanged weights itself."""
        self._averages = False
        self._equal_batches: list[int] = []
        self._last_batch: int | None = None
        self._suspect: Finding | None = None
        self._steps_with_different_inputs = 0

    def averages(self) -> bool:
        """Whether the script averages the weights now and then, so that ranks differ on purpose in between."""
        return self._averages or self.exchanged or has_averager()

    def compare(
        self, key: str, step: int, optimizer: Optimizer, ids: Sequence[int], poll: Callable[[], None]
    ) -> list[Found]:
        """The findings of all ranks together."""
        tensors = self.tensors(optimizer)
        mine = {kind: fingerprints(named) for kind, named in tensors.items()}
        message = self._message(step, optimizer, ids)
        message["digests"] = {kind: digest(values) for kind, values in mine.items()}
        try:
            messages = self.rendezvous.gather(f"{key}/message", message, poll)
        except RendezvousTimeout:
            self.rendezvous.post(
                f"{key}/fingerprints/{self.rendezvous.rank}", mine
            )  # for a rank that is late
            raise
        ranks = self.rendezvous.ranks
        found = self._same_samples(messages, step)
        summaries = [one["data"] for one in messages]
        for warning in (
            overlap(ranks, summaries, step),
            different_label_columns(ranks, summaries, step),
            different_settings(ranks, [one["setup"] for one in messages], step),
            frozen_on_some_ranks(ranks, [one["trained"] for one in messages], self._names(), step),
            self._different_inputs([one["inputs"] for one in messages], step),
            different_losses(ranks, messages, step),
            summed_gradients(ranks, messages, step),
            different_labels(ranks, messages, step),
            different_teachers(ranks, [one["teachers"] for one in messages], step),
        ):
            if warning is not None:
                found.append((warning, False))
        modes = different_modes(ranks, [one["modes"] for one in messages], step)
        found += [(modes, True)] if modes else []
        return found + self._differences(key, messages, mine, tensors, step, poll)

    def _message(self, step: int, optimizer: Optimizer, ids: Sequence[int]) -> dict[str, Any]:
        """What this rank reports to the others."""
        monitors, calls = self.monitors, self.forwards.calls
        inputs = list(tensors_in([(call.args, call.kwargs) for call in calls]))
        batch = batch_fingerprint(inputs) if calls else None
        repeated, self._last_batch = batch is not None and batch == self._last_batch, batch
        losses = monitors.losses
        settings = settings_of(self.model, optimizer, [call.autocast for call in calls])
        return {
            "batch": batch,
            "same": repeated,
            "arrived": [float(value) for call in calls for value in call.largest_gradients],
            "ids": list(ids)[:_MOST_IDS],
            "seen": self.forwards.evidence(),
            "modes": monitors.modes.flags(),
            "setup": settings | {"cross_entropy": "; ".join(sorted(losses.settings))},
            "data": monitors.loaders.summary(),
            "loss": losses.level(),
            "kinds": losses.kinds[-3:],
            "teachers": monitors.discovery.teachers(),
            "sample": monitors.probes.sample(),
            "classes": losses.classes,
            "divided": any(root.factors or root.sums for root in losses.roots),
            "trained": "".join(str(int(p.requires_grad)) for p in self.model.parameters()),
            "passes": monitors.hang.history(),
            "inputs": input_scales(inputs) if step <= FIRST_STEPS else [],
        }

    def _differences(
        self,
        key: str,
        messages: Sequence[Mapping[str, Any]],
        mine: Mapping[str, Mapping[str, int]],
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        step: int,
        poll: Callable[[], None],
    ) -> list[Found]:
        """Tensors that are not the same on all ranks."""
        differing = [kind for kind in mine if len({one["digests"].get(kind) for one in messages}) > 1]
        if self._suspect is not None and "parameters" not in differing:
            self._averages = True  # gradients differed and weights do not: the script averages them
        suspect, self._suspect = self._suspect, None
        if not differing:
            self.agreed_at = step
            self.forwards.agreed()
            return []
        skipped = self._skipped(messages, step) if "parameters" in differing else None
        if skipped is not None:
            return [(skipped, self.forwards.wrapper is not None and not self.averages())]
        if suspect is not None and "parameters" in differing:
            return [(suspect, not self.averages())]
        full = {kind: mine[kind] for kind in differing}
        everyones = self.rendezvous.gather(f"{key}/fingerprints", full, poll)
        seen = [one["seen"] for one in messages]
        found: list[Found] = []
        for kind in ("gradients", "parameters", "optimizer", "buffers"):
            if kind not in differing:
                continue
            values = [one.get(kind, {}) for one in everyones]
            if kind == "optimizer" and step == 1:
                loaded = state_on_some_ranks(self.rendezvous.ranks, values)
                if loaded is not None:
                    found.append((loaded, self.forwards.wrapper is not None))
                    continue
            if kind == "optimizer":  # state that only some ranks have is split between them
                common = set.intersection(*(set(each) for each in values))
                values = [{name: each[name] for name in each if name in common} for each in values]
            differs = difference(values)
            if differs is None:
                continue
            name, accused = differs
            if kind == "optimizer" and "['params']" in name:
                continue  # of a parameter outside the model, whose gradients are compared already
            sample = sample_of(tensors[kind].get(name))
            samples = self.rendezvous.gather(f"{key}/sample-{kind}", sample, poll, seconds=_SAMPLE_SECONDS)
            apart = distance([each for each in samples if each is not None])
            ranks = [self.rendezvous.ranks[index] for index in accused]
            finding = self._finding(kind, name, ranks, apart, seen, step)
            if kind == "gradients" and self._averages:
                continue
            if finding.guard == "bypass" and not any(one["wrapped"] for one in seen) and step < FIRST_STEPS:
                self._suspect = finding
                continue
            # A parameter outside the model may be this rank's own slice of a head that is split between ranks.
            certain = finding.guard in ("bypass", "drift") and "['params']" not in name
            found.append((finding, certain and not self.averages()))
        return found

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def _different_inputs(self, scales: Sequence[Any], step: int) -> Finding | None:
        """Inputs on different scales, in each of the first steps."""
        pair = different_scales(scales)
        self._steps_with_different_inputs += pair is not None
        if pair is None or self._steps_with_different_inputs != FIRST_STEPS:
            return None
        return different_inputs(self.rendezvous.ranks, scales, pair, step)

    def _skipped(self, messages: Sequence[Mapping[str, Any]], step: int) -> Finding | None:
        """Ranks that differ because one of them skipped a step after they last agreed."""
        statuses = {
            rank: RankStatus(step - 1, "step", passes=one["passes"])
            for rank, one in zip(self.rendezvous.ranks, messages, strict=True)
        }
        skipped = skipped_step(statuses, self.agreed_at + 1)
        if skipped is None or not self.agreed_at:
            return None
        what, fix = skipped
        return Finding("steps", what, f"noticed at step {step}", f"after step {self.agreed_at}", fix)

    def _finding(
        self, kind: str, name: str, accused: list[int], apart: float, seen: list[Mapping[str, Any]], step: int
    ) -> Finding:
        """A tensor of one kind that differs between ranks."""
        ranks = "every rank" if len(accused) == self.rendezvous.size > 2 else rank_names(accused)
        since = f"step {step}" + (f" (equal at step {self.agreed_at})" if self.agreed_at else "")
        where = f"'{name}' on {ranks}, by {apart:.1e} of its largest value"
        if 0 < apart < ROUNDING:
            return rounding(kind, name, ranks, apart, since)
        if kind == "gradients":
            return different_gradients(name, accused, seen, step, outside=name.startswith("param_groups"))
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

    def _same_samples(self, messages: Sequence[Mapping[str, Any]], step: int) -> list[Found]:
        found = same_ids(self.rendezvous.ranks, messages, step)
        if found is None:
            now = equal_batches([one["batch"] for one in messages])
            both = [index for index in now if index in self._equal_batches]
            self._equal_batches = now
            found = same_inputs(self.rendezvous.ranks, messages, both, step)
        return [] if found is None else [found]

    def tensors(self, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that ranks compare, by kind."""
        wrapper = self.forwards.wrapper
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name not in ignored and id(parameter) not in self._excluded
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        own = {id(p) for name, p in self.model.named_parameters() if name in ignored}
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
        found: dict[str, dict[str, torch.Tensor]] = {}
        found.update(parameters=parameters, gradients=gradients, optimizer=state)
        if wrapper is None or not wrapper.broadcast_buffers:
            found["buffers"] = {
                name: buffer
                for name, buffer in self.model.named_buffers()
                if name not in ignored and id(buffer) not in self._excluded
            }
        return found


def compare_devices(
    model: nn.Module,
    teachers: Sequence[nn.Module],
    rendezvous: Rendezvous,
    step: int,
    poll: Callable[[], None],
) -> Iterator[Found]:
    """Tensors and memory of all ranks that are on the wrong device."""
    own = home(model.parameters())
    if own is None or rendezvous.size == 1:
        return
    tensors: dict[str, torch.Tensor] = {}
    for number, teacher in enumerate(teachers):
        label = "teacher" if len(teachers) == 1 else f"teacher {number}"
        tensors |= {f"{label} parameter '{name}'": p for name, p in teacher.named_parameters()}
    tensors |= {f"buffer '{name}'": b for name, b in model.named_buffers() if b.device.type != "cpu"}
    found = misplaced(tensors, own, rendezvous.rank, "step 1")
    if found is not None:
        yield found, True
    if own.type == "cuda":
        ranks = rendezvous.ranks
        reports = rendezvous.gather(f"devices/{step}", memory_of(own, whole_device=True), poll)
        found = memory_elsewhere(ranks, reports, "step 1", any_gpu=False)
        if found is not None:
            yield found, True
        since = f"step {FIRST_STEPS}"
        for warning in (
            shared_gpu(ranks, reports),
            memory_imbalance(ranks, reports, since, LEAST_BYTES_OF_DEVICE),
        ):
            if warning is not None:
                yield warning, False

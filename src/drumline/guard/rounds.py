"""The meeting of all ranks just before some steps (1, 2, 3 and every N): same state, same gradients, other samples.

Promises: one small message per rank when all is well; the numbers of every tensor only when something differs; all
ranks come to the same finding, since all decide from the same words. DDP's running statistics may differ between two
broadcasts, so buffers are only compared where nothing ever equalises them, and then only worth a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guard.bypass import evidence, local_gradients
from drumline.guard.compare import apart, difference, digest, glance, numbers, sample_of, sharing, twins
from drumline.guard.finding import Finding
from drumline.guard.forwards import Forwards, tensors_in
from drumline.guard.meeting import Meeting

_ROUNDING = 1e-5
_KINDS = {"parameters": "parameter", "optimizer": "optimizer state", "buffers": "buffer"}
_MOST_IDS = 4096


class Rounds:
    """Compares the ranks of one model."""

    def __init__(
        self, meeting: Meeting, forwards: Forwards, model: nn.Module, but: Sequence[nn.Module]
    ) -> None:
        self.meeting, self.forwards, self.model = meeting, forwards, model
        self.teachers = {
            id(tensor) for teacher in but for tensor in (*teacher.parameters(), *teacher.buffers())
        }
        self.agreed_at = 0
        self.twins: list[int] = []

    def meet(
        self, key: str, step: int, optimizer: Optimizer, ids: Sequence[int], pause: Callable[[], None]
    ) -> list[Finding]:
        """What the ranks find together: to be stopped for, or, where the name says so, warned of."""
        tensors = self._tensors(optimizer)
        mine = {kind: numbers(named) for kind, named in tensors.items()}
        calls = self.forwards.calls
        batch = glance(tensors_in((calls[0].args, calls[0].kwargs))) if calls else None
        word = {
            "digests": {kind: digest(values) for kind, values in mine.items()},
            "batch": batch,
            "ids": list(ids)[:_MOST_IDS],
            "seen": evidence(self.forwards),
        }
        words = self.meeting.gather(f"{key}/word", word, pause)
        found = self._same_samples(words, step)
        differing = [kind for kind in mine if len({one["digests"].get(kind) for one in words}) > 1]
        if differing:
            full = {kind: mine[kind] for kind in differing}
            everyones = self.meeting.gather(f"{key}/numbers", full, pause)
            order = [
                kind for kind in ("gradients", "parameters", "optimizer", "buffers") if kind in differing
            ]
            for kind in order:
                place = difference([one.get(kind, {}) for one in everyones])
                if place is None:
                    continue
                name, accused = place
                sample = sample_of(tensors[kind].get(name))
                samples = self.meeting.gather(f"{key}/sample-{kind}", sample, pause)
                ranks = [self.meeting.ranks[at] for at in accused]
                seen = [one["seen"] for one in words]
                found.append(self._differ(kind, name, ranks, apart(samples), seen, step))
        else:
            self.agreed_at = step
        return found

    def _differ(
        self, kind: str, name: str, ranks: list[int], far: float, seen: list[Mapping[str, Any]], step: int
    ) -> Finding:
        told = (
            "every rank"
            if len(ranks) == self.meeting.size > 2
            else f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks))
        )
        since = f"step {step}" + (f" (equal at step {self.agreed_at})" if self.agreed_at else "")
        where = f"'{name}' on {told}, by {far:.1e} of its largest value"
        if 0 < far < _ROUNDING:
            return Finding(
                "rounding",
                f"ranks' {kind} differ by rounding",
                where,
                since,
                "nothing to mend if machines or thread counts differ; they will not give the same bits",
            )
        if kind == "gradients":
            return local_gradients(name, ranks, seen, step, foreign=name.startswith("param_groups"))
        if kind == "buffers":
            return Finding(
                "buffers",
                "buffers differ between ranks and nothing makes them equal again: each rank evaluates another model",
                where,
                since,
                "wrap with broadcast_buffers=True, use SyncBatchNorm, or average them before evaluating and saving",
            )
        fix = {
            "parameters": "change weights before wrapping in DDP (it copies rank 0's to all), or on every rank alike",
            "optimizer": "load the optimizer's state and set rates on every rank alike",
        }[kind]
        what = f"ranks have drifted apart: {_KINDS[kind]} '{name}' differs on {told}"
        return Finding("drift", what, where, since, fix)

    def _same_samples(self, words: Sequence[Mapping[str, Any]], step: int) -> list[Finding]:
        ranks = self.meeting.ranks
        fix = "give the loader a DistributedSampler (or cut the data by rank), and seed shuffling alike on all ranks"
        common = sharing([one["ids"] for one in words])
        if common is not None:
            first, second, count = common
            where = f"ranks {ranks[first]} and {ranks[second]} share {count} sample ids of one step"
            return [Finding("same-samples", "two ranks are fed the same samples", where, f"step {step}", fix)]
        now = twins([one["batch"] for one in words])
        both = [place for place in now if place in self.twins]
        self.twins = now
        if not both:
            return []
        where = f"ranks {', '.join(str(ranks[place]) for place in both)} got equal inputs twice in a row"
        return [
            Finding("same-samples", "ranks are fed the same samples", where, f"step {max(1, step - 1)}", fix)
        ]

    def _tensors(self, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        wrapper = self.forwards.wrapper
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name not in ignored and id(parameter) not in self.teachers
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        gradients: dict[str, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        sharded = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
        for number, group in enumerate(optimizer.param_groups):
            state[f"param_groups[{number}]['lr']"] = torch.as_tensor(float(group["lr"]))
            for place, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"param_groups[{number}]['params'][{place}]")
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
                if name not in ignored and id(buffer) not in self.teachers
            }
        return found

"""The meeting of all ranks just before some steps (1, 2, 3 and every N): same state, same gradients, other samples.

Promises: one small message per rank when all is well; the numbers of every tensor only when something differs; all
ranks come to the same finding, since all decide from the same messages. DDP's running statistics may differ between
two broadcasts, so buffers are only compared where nothing ever equalises them, and then only worth a warning. Without
DDP, gradients may differ if the script averages the weights after the step: the next comparison decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drumline.guards.beside import Beside, averagers, unlike_teachers
from drumline.guards.bypass import evidence, local_gradients, rank_names, stepped_around
from drumline.guards.compare import (
    apart,
    difference,
    digest,
    far_apart,
    glance,
    levels,
    numbers,
    sample_of,
    sharing,
    twins,
)
from drumline.guards.contents import unlike_parts
from drumline.guards.finding import Finding
from drumline.guards.forwards import Forwards, tensors_in
from drumline.guards.hang import Beat, Pulse, skipped_step
from drumline.guards.losses import Losses
from drumline.guards.meeting import Absent, Meeting
from drumline.guards.modes import Modes, unlike_modes
from drumline.guards.probes import Probes
from drumline.guards.reading import Reading, overlap
from drumline.guards.setups import (
    setup_of,
    summed,
    unlike_inputs,
    unlike_labels,
    unlike_losses,
    unlike_setups,
    unlike_trained,
)

ROUNDING = 1e-5
_KINDS = {"parameters": "parameter", "optimizer": "optimizer state", "buffers": "buffer"}
_MOST_IDS = 4096
_FIRST = 3
_SAMPLE_SECONDS = 30.0


@dataclass(frozen=True)
class Sources:
    """Where the messages come from."""

    forwards: Forwards
    modes: Modes
    reading: Reading
    losses: Losses
    beside: Beside
    probes: Probes
    pulse: Pulse


Found = tuple[Finding, bool]
"""A finding, and whether it is certain: only then a script is stopped."""


def _unloaded(ranks: Sequence[int], values: Sequence[Mapping[str, int]]) -> Finding | None:
    """Before the first step: some ranks have optimizer state and others have none."""
    has = [any(" of " in name for name in each) for each in values]
    if all(has) or not any(has):
        return None
    with_state, without = (
        rank_names([rank for rank, one in zip(ranks, has, strict=True) if one is wanted])
        for wanted in (True, False)
    )
    return Finding(
        "drift",
        f"the optimizer has state (momentum, averages) on {with_state} and none on {without}: ranks will take "
        "different steps",
        without,
        "step 1",
        "call optimizer.load_state_dict on every rank",
    )


def rounding(kind: str, place: str, far: float, since: str) -> Finding:
    """A difference that is no mistake."""
    return Finding(
        "rounding",
        f"ranks' {kind} differ by rounding",
        f"{place}, by {far:.1e} of its largest value",
        since,
        "nothing to do if machines or thread counts differ; they will not give the same bits",
    )


class Rounds:
    """Compares the ranks of one model."""

    def __init__(
        self, meeting: Meeting, sources: Sources, model: nn.Module, but: Sequence[nn.Module]
    ) -> None:
        self.meeting, self.forwards, self.model = meeting, sources.forwards, model
        self.sources = sources
        self.teachers = {
            id(tensor) for teacher in but for tensor in (*teacher.parameters(), *teacher.buffers())
        }
        self.agreed_at = 0
        self.twins: list[int] = []
        self.last_batch: int | None = None
        self.suspect: Finding | None = None
        self.averages = False
        self.exchanged = False
        """The script has exchanged weights itself."""
        self._scaled = 0

    def averaged(self) -> bool:
        """Whether the script averages the weights now and then: ranks differ on purpose in between."""
        return self.averages or self.exchanged or averagers()

    def meet(
        self, key: str, step: int, optimizer: Optimizer, ids: Sequence[int], pause: Callable[[], None]
    ) -> list[Found]:
        """What the ranks find together."""
        tensors = self._tensors(optimizer)
        mine = {kind: numbers(named) for kind, named in tensors.items()}
        calls = self.forwards.calls
        given = list(tensors_in([(call.args, call.kwargs) for call in calls]))
        batch = glance(given) if calls else None
        arrived = [float(value) for call in calls for value in call.output_gradients]
        sources = self.sources
        word = {
            "digests": {kind: digest(values) for kind, values in mine.items()},
            "batch": batch,
            "same": batch is not None and batch == self.last_batch,
            "arrived": arrived,
            "ids": list(ids)[:_MOST_IDS],
            "seen": evidence(self.forwards),
            "modes": sources.modes.flags(),
            "setup": setup_of(self.model, optimizer, calls)
            | {"cross_entropy": "; ".join(sorted(sources.losses.settings))},
            "data": sources.reading.summary(),
            "loss": sources.losses.level(),
            "kinds": sources.losses.kinds[-3:],
            "teachers": sources.beside.states(),
            "sample": sources.probes.sample(),
            "renamed": sources.losses.renamed,
            "divided": any(root.scaled or root.sums for root in sources.losses.roots),
            "trained": "".join(str(int(p.requires_grad)) for p in self.model.parameters()),
            "passes": sources.pulse.history(),
            "inputs": levels(given) if step <= _FIRST else [],
        }
        self.last_batch = batch
        try:
            words = self.meeting.gather(f"{key}/word", word, pause)
        except Absent:
            self.meeting.post(f"{key}/numbers/{self.meeting.rank}", mine)  # for a rank that comes later
            raise
        ranks = self.meeting.ranks
        found = self._same_samples(words, step)
        said = [one["data"] for one in words]
        for doubtful in (
            overlap(ranks, said, step),
            unlike_parts(ranks, said, step),
            unlike_setups(ranks, [one["setup"] for one in words], step),
            unlike_trained(ranks, [one["trained"] for one in words], self._names(), step),
            self._unlike_inputs([one["inputs"] for one in words], step),
            unlike_losses(ranks, words, step),
            summed(ranks, words, step),
            unlike_labels(ranks, words, step),
            unlike_teachers(ranks, [one["teachers"] for one in words], step),
        ):
            if doubtful is not None:
                found.append((doubtful, False))
        modes = unlike_modes(ranks, [one["modes"] for one in words], step)
        found += [(modes, True)] if modes else []
        return found + self._differences(key, words, mine, tensors, step, pause)

    def _differences(
        self,
        key: str,
        words: Sequence[Mapping[str, Any]],
        mine: Mapping[str, Mapping[str, int]],
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        step: int,
        pause: Callable[[], None],
    ) -> list[Found]:
        """Tensors that are not the same on all ranks."""
        differing = [kind for kind in mine if len({one["digests"].get(kind) for one in words}) > 1]
        if self.suspect is not None and "parameters" not in differing:
            self.averages = True  # gradients differed, weights do not: the script averages them
        suspect, self.suspect = self.suspect, None
        if not differing:
            self.agreed_at = step
            self.forwards.agreed()
            return []
        skipped = self._skipped(words, step) if "parameters" in differing else None
        if skipped is not None:
            return [(skipped, self.forwards.wrapper is not None and not self.averaged())]
        if suspect is not None and "parameters" in differing:
            return [(suspect, not self.averaged())]
        found: list[Found] = []
        full = {kind: mine[kind] for kind in differing}
        everyones = self.meeting.gather(f"{key}/numbers", full, pause)
        for kind in ("gradients", "parameters", "optimizer", "buffers"):
            if kind not in differing:
                continue
            values = [one.get(kind, {}) for one in everyones]
            if kind == "optimizer" and step == 1:
                unloaded = _unloaded(self.meeting.ranks, values)
                if unloaded is not None:
                    found.append((unloaded, self.forwards.wrapper is not None))
                    continue
            if kind == "optimizer":  # a state that only some ranks have is split between them
                common = set.intersection(*(set(each) for each in values))
                values = [{name: each[name] for name in each if name in common} for each in values]
            place = difference(values)
            if place is None:
                continue
            name, accused = place
            if kind == "optimizer" and "['params']" in name:
                continue  # of a parameter beside the model, whose gradients are compared already
            sample = sample_of(tensors[kind].get(name))
            samples = self.meeting.gather(f"{key}/sample-{kind}", sample, pause, seconds=_SAMPLE_SECONDS)
            samples = [each for each in samples if each is not None]
            ranks = [self.meeting.ranks[at] for at in accused]
            seen = [one["seen"] for one in words]
            finding = self._differ(kind, name, ranks, apart(samples), seen, step)
            if kind == "gradients" and self.averages:
                continue
            if finding.guard == "bypass" and not any(one["wrapped"] for one in seen) and step < 3:
                self.suspect = finding
                continue
            # A parameter beside the model may be this rank's own part of a head that is split.
            certain = finding.guard in ("bypass", "drift") and "['params']" not in name
            found.append((finding, certain and not self.averaged()))
        return found

    def _names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def _unlike_inputs(self, said: Sequence[Any], step: int) -> Finding | None:
        """Inputs on different scales, in each of the first steps."""
        pair = far_apart(said)
        self._scaled += pair is not None
        return (
            unlike_inputs(self.meeting.ranks, said, pair, step) if pair and self._scaled == _FIRST else None
        )

    def _skipped(self, words: Sequence[Mapping[str, Any]], step: int) -> Finding | None:
        """Ranks that differ because one of them skipped a step after they last agreed."""
        beats = {
            rank: Beat(step - 1, "step", passes=one["passes"])
            for rank, one in zip(self.meeting.ranks, words, strict=True)
        }
        skipped = skipped_step(beats, self.agreed_at + 1)
        if skipped is None or not self.agreed_at:
            return None
        return Finding(
            "steps", skipped[0], f"noticed at step {step}", f"after step {self.agreed_at}", skipped[1]
        )

    def _differ(
        self, kind: str, name: str, ranks: list[int], far: float, seen: list[Mapping[str, Any]], step: int
    ) -> Finding:
        told = "every rank" if len(ranks) == self.meeting.size > 2 else rank_names(ranks)
        since = f"step {step}" + (f" (equal at step {self.agreed_at})" if self.agreed_at else "")
        where = f"'{name}' on {told}, by {far:.1e} of its largest value"
        if 0 < far < ROUNDING:
            return rounding(kind, f"'{name}' on {told}", far, since)
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
        around = stepped_around(seen, name, since)
        if around is not None:
            return around
        fix = {
            "parameters": "change weights before wrapping in DDP (it copies rank 0's to all), or on every rank alike",
            "optimizer": "load the optimizer's state and set rates on every rank alike",
        }[kind]
        what = f"ranks have drifted apart: {_KINDS[kind]} '{name}' differs on {told}"
        return Finding("drift", what, where, since, fix)

    def _same_samples(self, words: Sequence[Mapping[str, Any]], step: int) -> list[Found]:
        ranks = self.meeting.ranks
        fix = "give the loader a DistributedSampler (or cut the data by rank), and seed shuffling alike on all ranks"
        common = sharing([one["ids"] for one in words])
        if common is not None:
            first, second, count = common
            where = f"ranks {ranks[first]} and {ranks[second]} share {count} sample ids of one step"
            return [
                (
                    Finding("same-samples", "two ranks are fed the same samples", where, f"step {step}", fix),
                    True,
                )
            ]
        now = twins([one["batch"] for one in words])
        both = [place for place in now if place in self.twins]
        self.twins = now
        if not both:
            return []
        where = f"ranks {', '.join(str(ranks[place]) for place in both)} got equal inputs twice in a row"
        finding = Finding(
            "same-samples", "ranks are fed the same samples", where, f"step {max(1, step - 1)}", fix
        )
        # The same batch in every step is an attempt to overfit it; equal inputs with different gradients at the
        # output may have different labels.
        repeats = any(words[place]["same"] for place in both)
        equal = len({tuple(words[place]["arrived"]) for place in both}) < len(both)
        drawn = [words[place]["data"] for place in both]
        known = all(one is not None and one["ids"] for one in drawn)
        read = known and len({tuple(one["ids"]) for one in drawn}) < len(both)
        return [(finding, not repeats and (equal or read))]

    def _tensors(self, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        wrapper = self.forwards.wrapper
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if name not in ignored and id(parameter) not in self.teachers
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
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in own:
                    continue
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

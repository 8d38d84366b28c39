"""Takes fingerprints of a run after chosen steps, compares the ranks, and writes the chain.

Promises: taking them costs two small kernels a tensor and never waits; they are read a step later (at once after the
first steps and before a save), on all ranks at the same step. Ranks that differ are told by tensor, group and rank,
the majority being right. What is written depends on the step and the recipe alone: looks beyond the plan (after a
resume, at a save on request) compare and write nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from drumline.core.host_copy import HostCopy
from drumline.guards.finding import Finding
from drumline.observe.run_log import RunLog
from drumline.parallel.local import is_sharded, local_shard, shard_span
from drumline.parallel.world import World
from drumline.state.chain import GROUPS, record_text
from drumline.state.fingerprint import fingerprint, fingerprints_of, first_difference
from drumline.train.finite import Finite
from drumline.train.state import TrainState

Named = dict[tuple[str, str], torch.Tensor]
"""(group, name) to tensor."""

_FIX = {
    "gradient": "call the wrapped model in every forward, on all ranks; look for hooks that change gradients on some",
    "buffer": "look for code that writes a buffer on some ranks only, or one that counts what a rank itself has seen",
    "parameter": "look for code that changes weights on some ranks only, or calls the model past its DDP wrapper",
    "optimizer": "look for code that changes the optimizer's state on some ranks only",
    "average": "look for code that changes the averaged weights on some ranks only",
    "scaler": "look for code that changes the loss scale on some ranks only",
}


@dataclass(frozen=True)
class Seen:
    """What all ranks found when a look was read. The same on every rank."""

    step: int
    findings: tuple[Finding, ...]
    not_finite: int
    """The step whose gradients were not finite; 0 when all were."""
    troubled: bool
    """Whether a rank has findings of its own to tell."""


class Witness:
    """Of one run on one rank. `tensors` says what is fingerprinted."""

    def __init__(
        self,
        tensors: Callable[[], Named],
        world: World,
        run_log: RunLog,
        finite: Finite | None = None,
        places: int = 1,
    ) -> None:
        """`places` is the number of processes that hold one copy of the model together: rank r has place r mod
        places, and is compared with the others of its place."""
        self.tensors, self.world, self.run_log, self.finite = tensors, world, run_log, finite
        self.places = places
        self._held: tuple[list[int], list[list[tuple[str, str]]]] = ([], [])
        self.agreed = 0
        """The last step after which all ranks were seen to agree."""
        self.last = -1
        """The last step that was looked at."""
        self._waiting: _Look | None = None

    @property
    def waiting(self) -> bool:
        """Whether a look has not been read yet. The same on every rank."""
        return self._waiting is not None

    def look(self, step: int, samples: torch.Tensor, writes: str = "", troubles: int = 0) -> None:
        """After `step` steps, the last of them on these sample ids. `writes` is `full`, `short`, or empty for a
        comparison alone; `troubles` is how many findings of its own this rank has."""
        assert self._waiting is None, "the look before has not been read"
        named = self.tensors()
        held = [key for key, tensor in named.items() if not tensor.is_meta]  # the others hold no values
        order = sorted(held, key=lambda key: (GROUPS.index(key[0]), key[1]))
        numbers = fingerprints_of(
            [local_shard(named[key]) for key in order], [shard_span(named[key]) for key in order]
        )
        parts = [place for place, key in enumerate(order) if is_sharded(named[key])]
        tally = self.finite.tally if self.finite is not None else numbers.new_zeros(3)
        # Stages of one process may lie on other GPUs than its own.
        home = self.world.device
        values = torch.cat([part.to(home, torch.int64) for part in (tally, numbers, samples)])
        self._waiting = _Look(step, order, parts, len(samples), writes, troubles, HostCopy(values))
        self.last = step

    def read(self) -> Seen:
        """Brings the look before together on all ranks, which call this at the same step, and writes it down."""
        look = self._waiting
        assert look is not None
        self._waiting = None
        values = look.late.values()
        tally, numbers, samples = values.split([3, len(look.order), look.samples])
        names = [f"{group} {name}" for group, name in look.order]
        head = [
            *tally.tolist(),
            look.samples,
            len(names),
            zlib.crc32("\n".join(names).encode()),
            look.troubles,
        ]
        heads = self.world.all_gather_integers(torch.tensor(head))
        not_finite = max(self._bad_step(look.step, row[:3]) for row in heads)
        troubled = bool(heads[:, 6].any())
        if findings := self._other_names(heads, look):
            return Seen(look.step, findings, not_finite, troubled)
        ids = self._together(samples, heads[:, 3].tolist())
        findings = self._twice(ids, look.step)
        everybody = _joined(self._together(numbers, heads[:, 4].tolist()), look.parts)
        orders = self._orders(look, heads)
        drifts = [
            found
            for place in range(self.places)
            if (found := self._apart(place, orders, everybody, look.step))
        ]
        findings += tuple(drifts)
        if not drifts:
            self.agreed = look.step
        held = not_finite and self.finite is not None and not self.finite.once
        if look.writes and not held:
            self._write(look, orders, everybody, torch.cat(ids))
        return Seen(look.step, findings, not_finite, troubled)

    def _orders(self, look: _Look, heads: torch.Tensor) -> list[list[tuple[str, str]]]:
        """What each place's numbers are of. Asked for when names have changed."""
        if self.places == 1:
            return [look.order]
        now = heads[:, 4:6].flatten().tolist()
        if now != self._held[0]:
            self._held = now, self.world.all_gather_object(look.order)[: self.places]
        return self._held[1]

    def _apart(
        self, place: int, orders: list[list[tuple[str, str]]], everybody: list[torch.Tensor], step: int
    ) -> Finding | None:
        """A tensor on which the processes of one place differ."""
        names = [f"{group} {name}" for group, name in orders[place]]
        difference = first_difference(names, torch.stack(everybody[place :: self.places]))
        if difference is None:
            return None
        name, accused = difference
        return self._drift(name, [place + self.places * each for each in accused], step)

    def _bad_step(self, at: int, tally: torch.Tensor) -> int:
        return self.finite.step_of(at, tally) if self.finite is not None else 0

    def _together(self, samples: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Every rank's numbers, in rank order: of sample ids, the order of the global batch."""
        padded = torch.full((max(counts),), -1, dtype=torch.int64)
        padded[: len(samples)] = samples
        rows = self.world.all_gather_integers(padded)
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def _write(
        self,
        look: _Look,
        orders: list[list[tuple[str, str]]],
        everybody: list[torch.Tensor],
        ids: torch.Tensor,
    ) -> None:
        """One record for all layouts: the places of the first replica hold the whole state together."""
        values: dict[str, dict[str, int]] = {"ids": {"batch": int(fingerprint(ids))}}
        for order, numbers in zip(orders, everybody, strict=False):
            for (group, name), number in zip(order, numbers.tolist(), strict=True):
                values.setdefault(group, {})[name] = number
        text, chain = record_text(look.step, values, look.writes == "full", self.run_log.chain)
        self.run_log.record(text, chain)

    def _drift(self, name: str, ranks: list[int], step: int) -> Finding:
        group, _, tensor = name.partition(" ")
        return Finding(
            "drift",
            f"the ranks no longer hold the same {group}: {tensor!r} differs on rank(s) {ranks}",
            where=f"{group} {tensor!r}, rank(s) {ranks} of {self.world.size}",
            since=_since(self.agreed, step),
            fix=_FIX[group],
        )

    def _other_names(self, heads: torch.Tensor, look: _Look) -> tuple[Finding, ...]:
        wrong = torch.zeros(len(heads), dtype=torch.bool)
        for place in range(self.places):
            rows = heads[place :: self.places, 4:6]
            wrong[place :: self.places] = (rows != rows.mode(dim=0).values).any(dim=1)
        if not wrong.any():
            return ()
        ranks = wrong.nonzero().flatten().tolist()
        return (
            Finding(
                "drift",
                f"rank(s) {ranks} hold other parameters, gradients or buffers than the rest",
                where=f"rank(s) {ranks} of {self.world.size}: {heads[ranks[0], 4]} tensors, here {len(look.order)}",
                since=_since(self.agreed, look.step),
                fix="build the same model on every rank, and use all of it in every forward",
            ),
        )

    def _twice(self, ids: list[torch.Tensor], step: int) -> tuple[Finding, ...]:
        """A sample that two ranks were fed in one step."""
        everything = torch.cat(ids)
        if len(everything.unique()) == len(everything):
            return ()
        owners = torch.cat([torch.full_like(row, rank) for rank, row in enumerate(ids)])
        order = everything.argsort(stable=True)
        same = (everything[order][1:] == everything[order][:-1]).nonzero().flatten()
        sample, count = int(everything[order][same[0]]), len(same)
        ranks = sorted(set(owners[everything == sample].tolist()))
        others = f" and {count - 1:,} others" if count > 1 else ""
        return (
            Finding(
                "same-samples",
                f"sample {sample}{others} came twice in one global batch, on rank(s) {ranks}",
                where=f"rank(s) {ranks} of {len(ids)}, {count:,} of {len(everything):,} samples",
                since=f"step {step:,}",
                fix="feed each rank its own part of the global batch: look at what makes or changes batches",
            ),
        )


def state_tensors(state: TrainState) -> Named:
    """What a run's fingerprints are of: parameters, gradients, buffers that are saved, optimizer, average, scale."""
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


@dataclass(frozen=True)
class _Look:
    step: int
    order: list[tuple[str, str]]
    parts: list[int]
    """Places in `order` of those of which this process holds a part."""
    samples: int
    writes: str
    troubles: int
    late: HostCopy


def _joined(everybody: list[torch.Tensor], parts: list[int]) -> list[torch.Tensor]:
    """With the numbers of parts, which differ, added up to those of the whole tensors."""
    if not parts:
        return everybody
    rows = torch.stack(everybody)
    rows[:, parts] = rows[:, parts].sum(dim=0)
    return list(rows)


def _since(agreed: int, step: int) -> str:
    if agreed == step - 1:
        return f"step {step:,}"
    return f"between step {agreed:,}, after which all agreed, and step {step:,}"

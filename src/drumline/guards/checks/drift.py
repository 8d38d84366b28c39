"""Checks of what must be equal on all ranks: parameters, gradients, optimizer state, buffers, and why they differ.

Promises: tensors are read on their own device, and their fingerprints come to the host in one copy per device. Sparse
and uninitialised tensors are left out. The majority of ranks is right; where there is none, all ranks are named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from drumline.core.text import counted
from drumline.guards.finding import Finding, Reports, rank_names
from drumline.state.fingerprint import fingerprint, fingerprints_of, first_difference

ROUNDING = 1e-5
"""A difference below this fraction of a tensor's largest value comes from different machines or thread counts."""
_SAMPLED_VALUES = 1 << 16
_WRAPPER_FIX = (
    "train through the wrapper itself, model(x): DDP exchanges gradients only for its own forward. Several parts "
    "need one module with one forward that calls them; .module is for saving"
)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A fingerprint per tensor."""
    usable = {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in usable.items():
        by_device.setdefault(tensor.device, []).append(name)
    found: dict[str, int] = {}
    for names in by_device.values():
        values = fingerprints_of([usable[name] for name in names]).tolist()
        found.update(zip(names, values, strict=True))
    return {name: found[name] for name in usable}


def digest(values: Mapping[str, int]) -> str:
    """A short text that is equal on two ranks if all their fingerprints are."""
    text = "\n".join(f"{name} {value}" for name, value in values.items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def batch_fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """One number for a batch, from evenly spaced values of each tensor: enough to distinguish two batches."""
    total = 0
    for tensor in tensors:
        if is_plain(tensor) and tensor.numel():
            flat = tensor.detach().reshape(-1)
            total = hash((total, int(fingerprint(flat[:: max(1, len(flat) // _SAMPLED_VALUES)]))))
    return total


def difference(values: Sequence[Mapping[str, int]]) -> tuple[str, list[int]] | None:
    """The first tensor, in the first rank's order, on which ranks differ, and the indices of the ranks that differ
    from the majority (all of them where there is none). A tensor that a rank does not have differs too."""
    order = list(dict.fromkeys(name for rank in values for name in rank))
    if not order:
        return None
    table = torch.tensor([[rank.get(name, 0) for name in order] for rank in values], dtype=torch.int64)
    return first_difference(order, table)


def distance(samples: Sequence[Sequence[float]]) -> float:
    """How far the ranks' values of one tensor lie apart, relative to the largest; infinite if shapes differ."""
    if len({len(sample) for sample in samples}) != 1:
        return float("inf")
    table = torch.tensor(samples, dtype=torch.float64)
    most = table.abs().max().item() if table.numel() else 0.0
    spread = (table.max(dim=0).values - table.min(dim=0).values).max().item() if table.numel() else 0.0
    return spread / most if most else 0.0


def sample_of(tensor: torch.Tensor | None, count: int = 1024) -> list[float]:
    """Evenly spaced values of a tensor."""
    if tensor is None or not is_plain(tensor) or tensor.numel() == 0:
        return []
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // count)][:count].double().cpu().tolist()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has values to read."""
    return tensor.layout == torch.strided and not is_lazy(tensor) and not tensor.is_meta


def drifted(kind: str, name: str, ranks: str, where: str, since: str, fix: str) -> Finding:
    """Ranks that no longer hold the same values."""
    what = f"ranks have drifted apart: {kind} '{name}' differs on {ranks}"
    return Finding("drift", what, where, since, fix)


def rounding(kind: str, name: str, ranks: str, distance: float, since: str) -> Finding:
    """A difference that is not a mistake."""
    return Finding(
        "rounding",
        f"ranks' {kind} differ by rounding",
        f"'{name}' on {ranks}, by {distance:.1e} of its largest value",
        since,
        "nothing to do if machines or thread counts differ; they do not give the same bits",
    )


def state_on_some_ranks(ranks: Sequence[int], values: Sequence[Mapping[str, int]]) -> Finding | None:
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


def different_rates(reports: Reports) -> Finding | None:
    """Learning rates that differ between ranks at the end."""
    first, *_ = rates = reports.of("rates")
    for rank, each in zip(reports.ranks, rates, strict=True):
        for name, value in each.items():
            if name in first and value != first[name]:
                pair = reports.ranks[0], rank
                return Finding(
                    "drift",
                    f"{name} is {first[name]:.4g} on rank {pair[0]} and {value:.4g} on rank {pair[1]} at the end",
                    f"ranks {pair[0]} and {pair[1]}",
                    "seen after the last step",
                    "step the scheduler equally on every rank; all_reduce the loss that ReduceLROnPlateau reads",
                )
    return None


def summed_gradients(reports: Reports) -> Finding | None:
    """Gradients that the script adds up over the ranks without dividing them or the loss, or that it exchanges again
    after DDP. Each rank reports some values of a gradient after backward and before the step."""
    samples, ranks = reports.of("sample"), len(reports.ranks)
    if any(each is None for each in samples) or any(reports.of("divided")) or ranks < 2:
        return None
    local, now = (
        torch.tensor([sample[index] for sample in samples], dtype=torch.float64) for index in (0, 1)
    )
    # Equal gradients are DDP's mean already.
    if not all(torch.allclose(local.sum(0), each, rtol=1e-3, atol=0.0) for each in now):
        return None
    return Finding(
        "averaging",
        f"the gradients are the sum over {ranks} ranks, not the mean: the learning rate acts {ranks} times",
        "the code that exchanges .grad after backward",
        reports.since,
        "divide by the number of ranks after all_reduce (or use ReduceOp.AVG), and leave the exchange to DDP if it "
        "is used; nothing to do if the learning rate is chosen for the sum",
    )


def stepped_around(seen: Sequence[Mapping[str, Any]], tensor: str, since: str) -> Finding | None:
    """Weights that differ between ranks after a rank stepped with the model called around its wrapper. `seen` is each
    rank's `forwards.evidence`."""
    one = max(seen, key=lambda each: int(each["around"]))
    if not one["around"]:
        return None
    return Finding(
        "bypass",
        f"ranks have drifted apart: {counted(one['around'], 'step')} called the model around its DDP wrapper, so "
        "gradients were not exchanged",
        f"{one['around_first']}; parameter '{tensor}' differs",
        since,
        _WRAPPER_FIX,
    )


def different_gradients(
    tensor: str, accused: Sequence[int], seen: Sequence[Mapping[str, Any]], step: int, outside: bool
) -> Finding:
    """Why gradients differ between ranks just before a step. The difference itself is the evidence: a script that
    calls parts of its model directly and still exchanges gradients is right. `outside`: the parameter is not in the
    model."""
    differs = f"the gradient of '{tensor}' differs on {rank_names(accused)}"
    first = next((one for one in seen if one["through"] == 0), seen[0])
    called = f"{first['called']}; " if first["called"] else ""
    change = f"change {first['line']}\n       " if first["line"] else ""
    if outside:
        what = "the optimizer trains a parameter that is not in the DDP model: each rank trains its own"
        where = differs
        fix = "put it into the module that DDP wraps: one module with one forward for model, projection and loss"
    elif not first["wrapped"] and first["line"]:
        what = (
            "the model was taken out of its DDP wrapper: gradients are not exchanged, each rank trains alone"
        )
        where, fix = called + differs, change + _WRAPPER_FIX
    elif not first["wrapped"]:
        what = "the model is not wrapped in DistributedDataParallel: each rank trains alone on its slice of the data"
        where = called + differs
        fix = "wrap it after moving it to its device, model = DistributedDataParallel(model), and call the wrapper"
    elif first["through"] == 0:
        what = (
            "the model is called around its DDP wrapper: gradients are not exchanged, each rank trains alone"
        )
        where, fix = called + differs, change + _WRAPPER_FIX
    elif not first["synced"]:
        what = "the last backward before the step ran under no_sync(): gradients are not exchanged"
        where = differs
        fix = "leave no_sync() for the last micro-batch, forward and backward, before optimizer.step()"
    else:
        what = "gradients differ between ranks although DDP exchanged them: something changed them afterwards"
        where = differs
        fix = "check what touches .grad between backward and step (clipping by a rank's own norm, another backward)"
    return Finding("bypass", what, where, f"step {step}", fix)

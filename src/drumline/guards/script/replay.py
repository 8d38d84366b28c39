"""Finds where the first non-finite value of a step arose, before the step spoils the parameters, and saves the batch.

Promises: parameters, buffers, modes and generators are as before after the search. Each rank searches its own batch
without a collective (SyncBatchNorm runs as BatchNorm). Saved files are safetensors and JSON, so loading them runs no
code.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from drumline.core.arithmetic import leave_no_trace
from drumline.core.files import write_file, write_text
from drumline.guards.checks.nonfinite import (
    Origin,
    earliest,
    first_gradient,
    first_parameter,
    is_finite,
    layer_name,
    tensors_in,
    watched_outputs,
)
from drumline.guards.finding import Finding, rank_names
from drumline.guards.script.forwards import Call, inner_of, outputs_of
from drumline.guards.script.nonfinite import BadStep
from drumline.guards.script.rendezvous import Rendezvous

_GATHER_SECONDS = 10.0
_FIX = {
    "parameter": "check what wrote it: a loaded file, an update outside the optimizer, an earlier step",
    "batch": "check the saved batch and the code that makes it: division by a zero deviation, broken files",
    "output": "replay the saved batch through this layer; lower the learning rate, keep the layer in fp32, or fix "
    "its inputs",
    "loss": "check the loss: log or division of 0, a square root at 0, a target out of range",
    "gradient": "check the backward of this layer (sqrt, norm, division at 0), or fp16 overflow without a GradScaler",
}


def investigate(
    bad: BadStep, model: nn.Module, rendezvous: Rendezvous, poll: Callable[[], None], folder: Path
) -> Finding:
    """Combines what all ranks find out about a bad step, and saves this rank's batch in `folder`."""
    key = f"non-finite/{bad.step}"
    origin = locate(bad.calls, dict(model.named_parameters()), bad.gradients_gone)
    messages = rendezvous.gather(key, asdict(origin), poll, seconds=_GATHER_SECONDS)
    origins = [None if message is None else Origin(**message) for message in messages]
    mine = finding_of(rendezvous.ranks, origins, bad.step)
    finding = Finding(**rendezvous.first(f"{key}/finding", vars(mine)))
    path = save_batch(folder, bad.step, rendezvous.rank, bad.calls, finding, bad.ids)
    return replace(finding, fix=f"{finding.fix}; each rank saved its batch, this one to {path}")


def locate(
    calls: Sequence[Call], parameters: Mapping[str, torch.Tensor], gradients_gone: bool = False
) -> Origin:
    """Where a value of this rank was first not finite. `gradients_gone`: the gradients have been overwritten, so they
    are computed again."""
    name = first_parameter(parameters)
    if name is not None:
        return Origin("parameter", name)
    for call in calls:
        for index, tensor in enumerate(tensors_in((call.args, call.kwargs))):
            if not is_finite(tensor):
                return Origin("batch", f"input {index} of {type(call.module).__name__}")
    for call in calls:
        layer = _first_output(call)
        if layer is not None:
            return Origin("output", layer)
    for call in calls:
        if not all(math.isfinite(float(value)) for value in call.largest_gradients):
            return Origin("loss", call.name)
    if gradients_gone:
        return Origin("gradient", _recomputed_gradient(calls, parameters) or "")
    return Origin("gradient", first_gradient({name: p.grad for name, p in parameters.items()}) or "")


def finding_of(ranks: Sequence[int], origins: Sequence[Origin | None], step: int) -> Finding:
    """One finding for all ranks: the earliest origin, on the first rank that saw it."""
    origin = origins[earliest(origins)]
    assert origin is not None
    on = [rank for rank, one in zip(ranks, origins, strict=True) if one and one.kind == origin.kind]
    where = rank_names(on)
    if origin.kind == "gradient" and len(ranks) > 1:
        where = "gradients after the exchange between ranks: the rank of origin is unknown"
    what = f"gradients of step {step} are not finite: {origin}"
    return Finding("non-finite", what, where, f"step {step}", _FIX[origin.kind])


def save_batch(
    folder: Path, step: int, rank: int, calls: Sequence[Call], finding: Finding, ids: Sequence[int]
) -> Path:
    """Saves the step's inputs (every tensor of every call in order: `call0.input0`, ...) and the finding."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"call{number}.input{index}": tensor.detach().to("cpu").contiguous().clone()
        for number, call in enumerate(calls)
        for index, tensor in enumerate(tensors_in((call.args, call.kwargs)))
        if tensor.layout == torch.strided
    }
    path = folder / f"step-{step}-rank-{rank}.safetensors"
    write_file(path, lambda temporary: save_file(tensors, temporary))
    details = {
        "step": step,
        "rank": rank,
        "finding": str(finding),
        "modules": [type(inner_of(call.module)).__name__ for call in calls],
        "ids": list(ids),
        "torch": torch.__version__,
    }
    write_text(path.with_suffix(".json"), json.dumps(details, indent=1) + "\n")
    return path


def _first_output(call: Call) -> str | None:
    """Repeats the call and names the first module whose output is not finite."""
    model = inner_of(call.module)
    found: list[str] = []

    def record(name: str, module: nn.Module, tensor: torch.Tensor) -> None:
        found.append(layer_name(".".join(part for part in (call.name, name) if part), module))

    with watched_outputs(model, record), _unchanged(model), _as_called(call), torch.no_grad():
        model(*call.args, **call.kwargs)
    return found[0] if found else None


def _recomputed_gradient(calls: Sequence[Call], parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Repeats forward and backward of each call, the last one first, and names the first parameter, in the order of
    backward, whose gradient is not finite."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    for call in reversed(calls):
        model = inner_of(call.module)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
        with _unchanged(model), _as_called(call), torch.enable_grad():
            outputs = outputs_of(model(*args, **kwargs))
            if not call.gradients:
                continue
            gradients = torch.autograd.grad(
                [outputs[index] for index in call.gradients],
                list(trained.values()),
                list(call.gradients.values()),
                allow_unused=True,
            )
        name = first_gradient(dict(zip(trained, gradients, strict=True)))
        if name is not None:
            return name
    return None


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers and generators. SyncBatchNorm runs without the other ranks."""
    alone = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in alone:
        module.forward = partial(_BatchNorm.forward, module)  # type: ignore[method-assign]
    try:
        with leave_no_trace(model, devices=[each.device for each in model.parameters()]):
            yield
    finally:
        for module in alone:
            del module.forward


@contextlib.contextmanager
def _as_called(call: Call) -> Iterator[None]:
    """The autocast of the call, without compiled code, which does not run hooks inside."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in call.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield

"""Where the first value that is not finite arose, found before the step spoils the parameters; the batch, kept.

Promises: the model's parameters, buffers, modes and generators are as before after the search; of the script's
processes only those that have the bad gradient search, each on its own batch, with no collective (SyncBatchNorm is
run as plain BatchNorm). `replay` files are safetensors and JSON: loading them runs nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from drumline.core.files import write_file, write_text
from drumline.guards.delayed import Bad
from drumline.guards.finding import Finding
from drumline.guards.forwards import Call, inner_of, tensors_in, watched_outputs
from drumline.guards.gradients import first_bad
from drumline.guards.meeting import Meeting

_VERDICT_SECONDS = 10.0
_ORDER = ("parameter", "batch", "forward", "loss", "backward")


def investigate(
    bad: Bad, model: nn.Module, meeting: Meeting, pause: Callable[[], None], folder: Path
) -> Finding:
    """Combines the verdicts of all ranks on a bad step, and saves this rank's batch in `folder`."""
    key = f"non-finite/{bad.step}"
    verdict = locate(bad.calls, dict(model.named_parameters()), bad.gone)
    verdicts = meeting.gather(key, verdict, pause, seconds=_VERDICT_SECONDS)
    finding = Finding(**meeting.first(f"{key}/said", vars(finding_of(meeting.ranks, verdicts, bad.step))))
    path = keep_batch(folder, bad.step, meeting.rank, bad.calls, finding, bad.ids)
    return replace(finding, fix=f"{finding.fix}; each rank saved its batch, this one to {path}")


def locate(
    calls: Sequence[Call], parameters: Mapping[str, torch.Tensor], gone: bool = False
) -> dict[str, str]:
    """What this rank can say: at which stage, and in what, a value was first not finite. `gone`: the gradients are
    not there any more, so they are computed again."""
    for name, parameter in parameters.items():
        if not _finite(parameter):
            return {"stage": "parameter", "name": name}
    for call in calls:
        for place, tensor in enumerate(tensors_in((call.args, call.kwargs))):
            if not _finite(tensor):
                return {"stage": "batch", "name": f"input {place} of {type(call.module).__name__}"}
    for call in calls:
        layer = _first_module(call)
        if layer is not None:
            return {"stage": "forward", "name": layer}
    for call in calls:
        if not all(math.isfinite(float(value)) for value in call.output_gradients):
            return {"stage": "loss", "name": call.name}
    first = _first_gradient(calls, parameters) if gone else first_bad(parameters)
    return {"stage": "backward", "name": first or ""}


def finding_of(ranks: Sequence[int], verdicts: Sequence[dict[str, str] | None], step: int) -> Finding:
    """One finding from all ranks' words: the earliest stage, on the first rank that saw it."""
    said = [(rank, verdict) for rank, verdict in zip(ranks, verdicts, strict=True) if verdict is not None]
    rank, verdict = min(said, key=lambda item: (_ORDER.index(item[1]["stage"]), item[0]))
    name, stage = verdict["name"], verdict["stage"]
    on = [str(other) for other, word in said if word["stage"] == stage]
    where = f"rank {rank}" if len(on) == 1 else f"ranks {', '.join(on)}"
    what, fix = {
        "parameter": (
            f"parameter '{name}' was not finite before this step",
            "look at what wrote it: a loaded file, an update outside the optimizer, an earlier step",
        ),
        "batch": (
            f"the batch itself is not finite ({name})",
            "look at the saved batch and at what makes it: division by a zero deviation, broken files",
        ),
        "forward": (
            f"the output of {name} is the first that is not finite",
            "replay the saved batch through this layer; lower the rate, keep the layer in fp32, or mend its inputs",
        ),
        "loss": (
            "the model's output is finite, but the gradient that the loss gives it is not",
            "look at the loss: log or division of 0, a square root at 0, a target out of range",
        ),
        "backward": (
            f"outputs and loss are finite; in backward, the gradient of '{name}' is the first that is not",
            "look at backward of this layer (sqrt, norm, division at 0), or at fp16 overflow without a GradScaler",
        ),
    }[stage]
    if stage == "backward" and len(ranks) > 1:
        where = "gradients after the exchange: the rank it arose on cannot be told"
    return Finding(
        "non-finite", f"gradients of step {step} are not finite: {what}", where, f"step {step}", fix
    )


def keep_batch(
    folder: Path, step: int, rank: int, calls: Sequence[Call], finding: Finding, ids: Sequence[int]
) -> Path:
    """Saves the step's inputs (every call, every tensor in order: `call0.input0`, ...) and what was found."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"call{number}.input{place}": tensor.detach().to("cpu").contiguous().clone()
        for number, call in enumerate(calls)
        for place, tensor in enumerate(tensors_in((call.args, call.kwargs)))
        if tensor.layout == torch.strided
    }
    path = folder / f"step-{step}-rank-{rank}.safetensors"
    write_file(path, lambda temporary: save_file(tensors, temporary))
    notes = {
        "step": step,
        "rank": rank,
        "finding": str(finding),
        "modules": [type(inner_of(call.module)).__name__ for call in calls],
        "ids": list(ids),
        "torch": torch.__version__,
    }
    write_text(path.with_suffix(".json"), json.dumps(notes, indent=1) + "\n")
    return path


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def _first_module(call: Call) -> str | None:
    """Makes the call again and names the first module whose output is not finite."""
    model = inner_of(call.module)
    found: list[str] = []

    def look(name: str, module: nn.Module, output: Any) -> None:
        if not found and not all(_finite(tensor) for tensor in tensors_in(output)):
            path = ".".join(part for part in (call.name, name) if part)
            found.append(f"{type(module).__name__} '{path}'" if path else type(module).__name__)

    handles = [
        module.register_forward_hook(lambda m, i, output, name=name: look(name, m, output))
        for name, module in model.named_modules()
    ]
    try:
        with _as_before(model), _as_called(call), torch.no_grad():
            model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _first_gradient(calls: Sequence[Call], parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Goes forward and backward through each call again, the last one first, and names the first parameter, in the
    order of backward, whose gradient is not finite."""
    trained = {name: p for name, p in reversed(list(parameters.items())) if p.requires_grad}
    for call in reversed(calls):
        model = inner_of(call.module)
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (call.args, call.kwargs))
        with _as_before(model), _as_called(call), torch.enable_grad():
            outputs = watched_outputs(model(*args, **kwargs))
            ends = [(outputs[place], gradient) for place, gradient in call.arrived.items()]
            if not ends:
                continue
            found = torch.autograd.grad(
                [output for output, _ in ends],
                list(trained.values()),
                [gradient for _, gradient in ends],
                allow_unused=True,
            )
        for name, gradient in zip(trained, found, strict=True):
            if gradient is not None and not _finite(gradient):
                return name
    return None


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Buffers and generators put back; SyncBatchNorm alone."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    alone = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    for module in alone:
        module.forward = partial(_BatchNorm.forward, module)  # type: ignore[method-assign]
    try:
        with torch.random.fork_rng(devices=_devices(model)):
            yield
    finally:
        for module in alone:
            del module.forward
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextlib.contextmanager
def _as_called(call: Call) -> Iterator[None]:
    """The autocast of the call, and nothing compiled: hooks inside would not be seen."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in call.autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _devices(model: nn.Module) -> list[int]:
    found = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    return sorted(device.index for device in found)

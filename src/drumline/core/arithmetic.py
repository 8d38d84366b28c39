"""How torch computes: whether kernels repeat their bits, threads, and a context that leaves no trace.

Promises: whatever happens inside `leave_no_trace`, the tensors, training modes, gradients and random generators named
to it are as before, at the same addresses.

torch imports its compiler in `use_deterministic_algorithms` and in the first call of most methods of an optimizer,
which takes as long as importing torch itself. The functions here have the same effect without that import. If a later
torch is built differently, the compiler is imported again, which changes no result; `tests/cli/test_startup.py` fails
then.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.environment import threads_asked
from drumline.core.machine import cores_per_process


@contextmanager
def leave_no_trace(
    *modules: nn.Module, tensors: Iterable[Tensor] = (), devices: Iterable[torch.device] = ()
) -> Iterator[None]:
    """Restores on exit, whatever happens inside: modes, buffers and gradients of the modules; values of the tensors;
    the random generators of torch, of these GPUs and of Python. Copies are kept on the host, because a model may fill
    the GPU."""
    layers = list(dict.fromkeys(layer for module in modules for layer in module.modules()))
    modes = [(layer, layer.training) for layer in layers]
    buffers = [(layer._buffers, dict(layer._buffers)) for layer in layers]
    gradients = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    live = [*tensors, *(each for _, table in buffers for each in table.values() if each is not None)]
    saved = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in live if not tensor.is_meta]
    gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
    generators = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in gpus)]
    python = random.getstate()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
        for table, before in buffers:
            table.clear()
            table.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        torch.set_rng_state(generators[0])
        for state, device in zip(generators[1:], gpus, strict=True):
            torch.cuda.set_rng_state(state, device)
        random.setstate(python)


@contextmanager
def undone_if(found: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restores dense tensors of one type and device on exit if `found` is above 0, without waiting for the device.
    Copies them in chunks: a kernel for each tensor would take longer than a step, and one copy of all more memory."""
    chunks = _chunks(tensors)
    saved = [torch.cat(chunk) for chunk in chunks]
    yield
    for chunk, before in zip(chunks, saved, strict=True):
        after = torch.where(found.to(before.device) > 0, before, torch.cat(chunk))
        torch._foreach_copy_(chunk, list(after.split([piece.numel() for piece in chunk])))


CHUNK_BYTES = 1 << 26


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Pieces of the values of these tensors, in lists of at most `CHUNK_BYTES`."""
    chunks, size = list[list[Tensor]](), 0
    for values in map(flat, tensors):
        for piece in values.split(max(1, CHUNK_BYTES // values.element_size())):
            if not chunks or size + piece.nbytes > CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(piece)
            size += piece.nbytes
    return chunks


def flat(tensor: Tensor) -> Tensor:
    """The values of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def set_deterministic(deterministic: bool) -> None:
    """Selects kernels that repeat their bits, or the fastest ones."""
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    use_deterministic_algorithms(deterministic)
    # Filling fresh memory guards against reading it uninitialised; our kernels write before they read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def threads_per_process(
    wanted: int | str, local_size: int, strict: bool = False, env: Mapping[str, str] = os.environ
) -> int:
    """CPU threads for arithmetic: the recipe's, else the user's OMP_NUM_THREADS, else the cores divided by the
    processes of this machine. Their number decides the order of additions, so strict mode's depends on the recipe
    alone."""
    if isinstance(wanted, int):
        return wanted
    return 1 if strict else threads_asked(env) or cores_per_process(local_size)


def use_deterministic_algorithms(mode: bool) -> None:
    """Does what `torch.use_deterministic_algorithms` does. A compiler imported later reads its setting from the
    environment."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode)
    else:
        torch.set_deterministic_debug_mode("error" if mode else "default")
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1" if mode else "0"


class EagerOptimizer(torch.optim.Optimizer):
    """torch's optimizer without the wrappers that keep the compiler out of its methods, and import it to do so. For
    optimizers that no compiled code calls."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def eager_step(optimizer: type[torch.optim.Optimizer]) -> Any:
    """The `step` of one of torch's optimizers without such a wrapper. `differentiable=True` has no effect."""
    return torch.no_grad()(inspect.unwrap(optimizer.step))

"""How torch computes: its precision, whether kernels repeat their bits, and contexts that leave no trace.

Promises: every autocast block of Drumline is `autocast`. Whatever happens inside `leave_no_trace`, the tensors,
training modes, gradients and random generators named to it are as before, at the same addresses.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.environment import threads_asked
from drumline.core.errors import UserError
from drumline.core.machine import cores_per_process


def autocast(device: torch.device, dtype: torch.dtype | None, cached: bool | None = None) -> torch.autocast:
    """Computes in `dtype` where torch considers that safe. None computes in fp32, also inside another autocast.
    `cached` says whether converted weights are kept; None is torch's default."""
    return torch.autocast(
        device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=cached
    )


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


def resolve_precision(
    wanted: str, device: torch.device, why_no_fp16: str = "", field: str = "train.precision"
) -> torch.dtype | None:
    """The autocast type of a `precision` field. None computes in fp32. `auto` is fp32 on a CPU; on a GPU bf16 where
    it is supported, else fp16. `why_no_fp16` says why a loss scaler, which fp16 needs, cannot work."""
    if wanted == "auto":
        if device.type == "cpu":
            return None
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        return None if why_no_fp16 else torch.float16
    if wanted == "fp16" and why_no_fp16:
        raise UserError(f"{field} = fp16: {why_no_fp16}", "use bf16 or fp32")
    if wanted == "fp16" and device.type == "cpu":
        raise UserError(f"{field} = fp16 needs a GPU", "use bf16 or fp32 on a CPU")
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted]


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

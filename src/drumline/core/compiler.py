"""Avoids importing torch's compiler where nothing compiles: that takes as long as importing torch itself.

torch imports its compiler in `use_deterministic_algorithms` and in the first call of most methods of an optimizer.
Promises: everything here has the same effect as torch's own function. If a later torch is built differently, the
compiler is imported again, which costs time and changes no result; `tests/cli/test_startup.py` fails then.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import torch


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

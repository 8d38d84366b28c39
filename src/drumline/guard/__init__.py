"""Guards for one's own training loop: `watch = drumline.guard(model, optimizer)`, one line, plain PyTorch.

Promises: finds the mistakes listed in docs/guards.md, says what, where, since when and what to do; adds no collective
to the process group (ranks talk through its store), so the order of the script's own stays as it is. Refuses sharded
parameters (FSDP, tensor parallelism): there is no whole copy on each rank to compare.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from drumline.guard.finding import Finding, Stopped, Teller

__all__ = ["Finding", "Stopped", "Teller"]


class _CallableModule(ModuleType):
    """Importing this package makes it `drumline.guard`, the function's name too: so the package can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from drumline.guard.watch import guard

        return guard(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

"""Guards for one's own training loop: `watch = drumline.guard(model, optimizer)`, one line, plain PyTorch.

Promises: finds the mistakes listed in docs/guards.md, says what, where, since when and what to do; adds no collective
to the process group (ranks talk through its store), so the order of the script's own stays as it is. Refuses sharded
parameters (FSDP, tensor parallelism): there is no whole copy on each rank to compare.
"""

from __future__ import annotations

from drumline.guards.finding import Finding, Stopped, Teller

__all__ = ["Finding", "Stopped", "Teller"]

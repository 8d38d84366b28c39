"""Asynchronous copies from a device to the host.

Promises: starting a copy and `done` never wait for the device; `values` waits if it has to.
"""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor, with the values it has when the device reaches this point."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.detach().clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def done(self) -> bool:
        """Whether the copy has arrived."""
        return self._event is None or self._event.query()

    def values(self) -> torch.Tensor:
        """The copy, in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

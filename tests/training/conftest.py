"""What whole runs in the process of the tests leave behind is put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _arithmetic() -> Iterator[None]:
    """A run sets threads and kernels for its process; this one goes on."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

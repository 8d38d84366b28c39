"""Fingerprints of a GPU's tensors are those of their copies on the host, and nothing waits for them."""

from __future__ import annotations

import pytest
import torch

from drumline.state.fingerprint import CHUNK, fingerprints_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def some() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(1000).bfloat16(),
        torch.randn(77, 5).T,
        torch.arange(33),
        torch.tensor(3.0),
        torch.randn(2 * CHUNK + 17),
        torch.empty(0),
    ]


def test_a_value_is_the_same_on_the_gpu_and_on_the_host() -> None:
    host = some()
    device = [tensor.to("cuda") for tensor in host]
    assert device[0].is_contiguous(memory_format=torch.channels_last)
    assert fingerprints_of(device).tolist() == fingerprints_of(host).tolist()


def test_taking_fingerprints_does_not_wait_for_the_device() -> None:
    device = [tensor.to("cuda") for tensor in some()]
    fingerprints_of(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fingerprints_of(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""What ranks exchange travels as text that cannot run code."""

from __future__ import annotations

import json
import math
import pickle
import struct
from pathlib import Path

import pytest
import torch

from drumline.core.heartbeat import Beat, Phase
from drumline.data.feed.batch import Batch
from drumline.parallel.values import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 2**70, -0.1, "ü\n", math.inf],
        {"a": (1, "b"), "*": {2}, 3: frozenset({(4,)})},
        {(0, 1): "rows"},
        Path("runs/x"),
        torch.bfloat16,
        Beat(3, 7, Phase.SAVING),
        [Beat(), None],
    ],
)
def test_values_come_out_as_they_went_in(value: object) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_nan_and_tensors_keep_their_bits() -> None:
    assert math.isnan(decode(encode(math.nan)))
    tensors = [
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).t(),
        torch.zeros(0, 4),
        torch.tensor(True),
    ]
    for tensor in tensors:
        found = decode(encode(tensor))
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)
    batch = Batch(*(torch.full((2, 3), number) for number in range(4)))
    again = decode(encode(batch))
    assert isinstance(again, Batch)
    assert all(torch.equal(a, b) for a, b in zip(again, batch, strict=True))


class Foreign:
    pass


@pytest.mark.parametrize("value", [Foreign(), print, object, torch.device("cpu"), 1j])
def test_other_types_do_not_travel(value: object) -> None:
    with pytest.raises(TypeError):
        encode([value])


@pytest.mark.parametrize(
    "content",
    [
        {"*": ["data", ["os:system", {"command": "true"}]]},
        {"*": ["data", ["drumline.parallel.values:decode", {"text": ""}]]},
        {"*": ["data", ["drumline.parallel.world:os", {}]]},
        {"*": ["data", ["drumline.core.heartbeat:Beats", {"workers": 1}]]},
        {"*": ["data", ["drumline.nowhere:Beat", {}]]},
        {"*": ["data", ["drumline.core.heartbeat:Beat", {"count": 1, "step": 2, "phase": 0, "more": 1}]]},
        {"*": ["data", ["drumline.core.heartbeat:Beat", {"count": 1}]]},
        {"*": ["named", ["builtins:exec", ["1"]]]},
        {"*": ["enum", ["drumline.core.heartbeat:Phase", "NONE"]]},
        {"*": ["tensor", ["load", [1], 0, 4]]},
        {"*": ["tensor", ["float32", [9, 9], 0, 4]]},
        {"*": ["tensor", ["float32", [2], 0, 8]]},
        {"*": ["tensor", ["float32", [1], -4, 4]]},
        {"*": ["unknown", 1]},
        {"*": ["set", [[1]]]},
        {"*": 3},
    ],
)
def test_text_of_another_shape_is_rejected(content: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(content_of(json.dumps(content).encode()))


def test_a_pickle_is_rejected() -> None:
    for text in (pickle.dumps([1]), b"[" * 100_000, b"\xff"):
        for content in (text, content_of(text)):
            with pytest.raises(ValueError, match=r".+"):
                decode(content)


def content_of(text: bytes) -> bytes:
    """The text, with its length before and four bytes for tensors after it."""
    return struct.pack("!Q", len(text)) + text + bytes(4)

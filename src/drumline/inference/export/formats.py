"""The formats that `drumline export` writes and what can be chosen about them. Imports nothing slow."""

from __future__ import annotations

from typing import Literal

Format = Literal["pt2", "onnx", "aoti", "torchscript"]
"""The formats that hold a program. A safetensors file has weights and the record of the model only."""
AnyFormat = Literal[Format, "safetensors"]
How = Literal["trace", "script"]
Weights = Literal["auto", "model", "average"]
Device = Literal["cpu", "cuda"]
ENDINGS: dict[AnyFormat, str] = {
    "pt2": ".pt2",
    "onnx": ".onnx",
    "aoti": ".pt2",
    "torchscript": ".pt",
    "safetensors": ".safetensors",
}
"""The extension of each format. An extension means the first format that has it."""

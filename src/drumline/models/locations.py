"""Locations of taps: the text that names one, and the tensor that it stands for.

Promises: pure functions. A location is a module, or its `:input`. The tokens of a transformer, N x tokens x C, become
a map N x C x H x W of the patches for a stage or stem, and the class token, N x C, for `pooled`; `:cls` and
`:patches` choose the other one. N x H x W x C becomes N x C x H x W. All are views. Rejects patches that form no
square, and a class token where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from drumline.core.errors import UserError

INPUT, CLS, PATCHES = ":input", ":cls", ":patches"


@dataclass(frozen=True)
class Location:
    """Where a tap is."""

    module: str
    """The dotted name of the module."""
    of_input: bool = False
    """Its first input instead of its output."""
    part: str = ""
    """`:cls`, `:patches`, or empty: by the name of the tap."""

    @staticmethod
    def parse(text: str) -> Location:
        """From `MODULE`, `MODULE:input`, `MODULE:cls`, `MODULE:input:patches`, ..."""
        part = next((part for part in (CLS, PATCHES) if text.endswith(part)), "")
        text = text.removesuffix(part)
        return Location(text.removesuffix(INPUT), text.endswith(INPUT), part)


@dataclass(frozen=True)
class View:
    """How a tensor becomes a tap."""

    kind: str = ""
    """`cls`, `patches`, `channels last` or empty: as it is."""
    special: int = 0
    """Tokens before those of the patches."""
    side: int = 0
    """Patches along each side."""
    as_map: bool = True
    """Whether the class token becomes N x C x 1 x 1."""

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.kind == "cls":
            token = tensor[:, 0]
            return token[:, :, None, None] if self.as_map else token
        if self.kind == "patches":
            return tensor[:, self.special :].transpose(1, 2).unflatten(2, (self.side, self.side))
        return tensor.permute(0, 3, 1, 2) if self.kind == "channels last" else tensor


def view_of(tap: str, location: Location, tensor: Tensor, image: tuple[int, int]) -> View:
    """How the tensor at a location becomes the tap. `image`: height and width of the model's input."""
    if tensor.dim() == 4 and not location.part:
        rows, columns = tensor.shape[1:3]
        square_last = tensor.shape[2] == tensor.shape[3]
        last = not square_last and rows * image[1] == columns * image[0] and rows <= image[0]
        return View("channels last") if last else View()
    if tensor.dim() != 3:
        if location.part:
            raise UserError(
                f"{tap}={location.module}{location.part}: {location.module} has no tokens: its tensor has shape "
                f"{' x '.join(map(str, tensor.shape))}",
                fix=f"write {tap}={location.module}, or name a block of a transformer",
            )
        return View()
    tokens = tensor.shape[1]
    side = math.isqrt(tokens)
    special = tokens - side**2
    if location.part == CLS or (not location.part and tap == "pooled"):
        if not special:
            raise UserError(
                f"{tap}={location.module}{location.part}: there is no class token among its {tokens} tokens",
                fix="name a module whose output has shape N x C, such as the last linear layer's :input",
            )
        return View("cls", as_map=tap != "pooled")
    if special > side:
        raise UserError(
            f"{tap}={location.module}{location.part}: its {tokens} tokens do not form a square of patches",
            fix=f"write {tap}={location.module}{CLS}, or name a different module",
        )
    return View("patches", special, side)

"""Colours for numbered things: hues spread evenly, each light and dark.

Promises: dark text on a light shade and white text on a dark one are readable (4.5 to 1, the usual bound); neighbours
differ in hue and in lightness, so that also an eye that does not tell red from green tells them apart.
"""

from __future__ import annotations

import math


def shades(index: int, count: int) -> tuple[str, str]:
    """The light and the dark shade of one of `count` hues, as #rrggbb."""
    # Blue first: of two hues the other one is orange, the pair that every kind of eye tells apart.
    hue = math.radians(255 + 360 * index / count)
    odd = index % 2
    return _oklch(0.875 - 0.075 * odd, 0.085, hue), _oklch(0.54 - 0.09 * odd, 0.12, hue)


def _oklch(light: float, chroma: float, hue: float) -> str:
    """A colour of the OKLCH space (even steps look even) as #rrggbb; what a screen cannot show is clipped."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    cones = (
        (light + 0.3963377774 * a + 0.2158037573 * b) ** 3,
        (light - 0.1055613458 * a - 0.0638541728 * b) ** 3,
        (light - 0.0894841775 * a - 1.2914855480 * b) ** 3,
    )
    to_rgb = (
        (4.0767416621, -3.3077115913, 0.2309699292),
        (-1.2684380046, 2.6097574011, -0.3413193965),
        (-0.0041960863, -0.7034186147, 1.7076147010),
    )
    linear = (sum(weight * cone for weight, cone in zip(row, cones, strict=True)) for row in to_rgb)
    shown = (12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear)
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, v))):02x}" for v in shown)

"""Compares a run with golden.json: byte for byte on the kind of machine that made it, elsewhere to rounding."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.recipes import COMMANDS, Golden, machine

ROUNDING = 1e-3
"""Relative difference of losses that other processors and versions of torch may make in a few steps."""
ROUNDING_BF16 = 1e-2


def check(found: dict[str, Any], name: str) -> None:
    """Fails at the first difference. On a different machine, compares losses to rounding, then skips the comparison
    of bits with the reason."""
    golden = Golden.read()
    elsewhere = {key: value for key, value in machine().items() if value != golden.made_with[key]}
    rounding = ROUNDING_BF16 if "bf16" in COMMANDS[name] else ROUNDING
    compare(found, golden.runs[name], None if not elsewhere else rounding)
    if elsewhere:
        made = {key: golden.made_with[key] for key in elsewhere}
        pytest.skip(
            f"losses agree within {rounding:g}; bits not compared: made with {made}, here {elsewhere}"
        )


def compare(found: dict[str, Any], golden: dict[str, Any], rounding: float | None) -> None:
    """Byte for byte without `rounding`, else the losses alone. Losses come first, then the fingerprints, which show
    where bits differ, then the state. New fields of a metrics line are ignored."""
    for kind in ("train", "eval"):
        kept = [
            {key: value for key, value in line.items() if key in stored}
            for line, stored in zip(found[kind], golden[kind], strict=True)
        ]
        if rounding is None:
            assert kept == golden[kind]
        else:
            steps = [[line["step"] for line in lines] for lines in (kept, golden[kind])]
            losses = [[line["loss"] for line in lines] for lines in (kept, golden[kind])]
            assert steps[0] == steps[1]
            assert losses[0] == pytest.approx(losses[1], rel=rounding)
    if rounding is None:
        chains = {key for key in golden if key.startswith("fingerprints")}
        assert chains == {key for key in found if key.startswith("fingerprints")}
        for chain in sorted(chains):
            assert found[chain]["groups"] == golden[chain]["groups"]
            assert found[chain]["sha256"] == golden[chain]["sha256"]
        assert found["state"] == golden["state"]

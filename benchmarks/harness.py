"""What all benchmarks share: a command line with `--small`, and synchronization with the device.

`--small` runs the same code with tiny sizes on a CPU, in seconds. It shows that a script works and says nothing about
speed. A part that needs more than a CPU is skipped and prints a line that begins with "needs". The tests run every
script with `--small`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch


class Parser(argparse.ArgumentParser):
    """A parser with `--small`, which replaces the defaults of other options with the values given here."""

    def __init__(self, doc: str | None, **small: Any) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._small = small
        self.add_argument(
            "--small", action="store_true", help="tiny sizes on a CPU: a check that the script works"
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if super().parse_known_args(args, namespace)[0].small:
            self.set_defaults(**self._small)
        return super().parse_known_args(args, namespace)


def pick_device(small: bool) -> torch.device:
    """The first GPU, or the CPU if there is none or `small` is set."""
    return torch.device("cuda", 0) if torch.cuda.is_available() and not small else torch.device("cpu")


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: no figures"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

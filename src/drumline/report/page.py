"""The page of a run as HTML."""

from __future__ import annotations

from pathlib import Path


def write_page(run: Path) -> None:
    """placeholder"""

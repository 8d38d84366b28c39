"""`drumline verify DATASET`: its words, and what it prints. The checking is in `verify.py`."""

from __future__ import annotations

import os
from collections import deque
from difflib import get_close_matches
from pathlib import Path

from drumline.core.errors import UserError
from drumline.core.result import print_result
from drumline.data.packed.format import looks_packed
from drumline.data.verify import describe, summary, verify_dataset, write_list
from drumline.state.checkpoint import checkpoints, is_checkpoint

FLAGS = {"--list": "FILE", "--workers": "N", "--source": "NAME"}


def verify_command(words: list[str]) -> int:
    """Checks a data set, prints what was found, and gives the exit code: 1 when a run would refuse a sample."""
    path, *rest = words
    options = _options(deque(rest))
    workers = options.get("--workers")
    if workers is not None and (not workers.isdigit() or int(workers) < 1):
        raise UserError(f"verify --workers {workers}: not a number of processes", "give 1 or more")
    if "--list" in options:
        _check_writable(Path(options["--list"]))
    report = verify_dataset(
        Path(path), options.get("--source", "auto"), int(workers) if workers is not None else None
    )
    for line in describe(report):
        print(line)
    if "--list" in options:
        write_list(report, Path(options["--list"]))
    print_result(summary(report))
    return 1 if report.bad else 0


def is_dataset(path: Path) -> bool:
    """Whether `drumline verify PATH` means data rather than a run or one of its checkpoints."""
    if path.is_file() or looks_packed(path):  # a packed set has a manifest, as checkpoints do
        return True
    # A distillation that was stopped in its initial stage has nothing of its own yet.
    recipes = [path / "recipe.toml", *path.glob("initial-*/recipe.toml")] if path.is_dir() else []
    run = any(file.exists() for file in recipes) or checkpoints(path / "checkpoints") or checkpoints(path)
    return path.is_dir() and not run and not is_checkpoint(path)


def _check_writable(file: Path) -> None:
    """Before hours of work, not after."""
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK | os.X_OK):
        raise UserError(
            f"verify --list {file} cannot be written", "give a file in a folder that you may write to"
        )


def _options(words: deque[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    while words:
        flag, equals, value = words.popleft().partition("=")
        if flag not in FLAGS:
            near = get_close_matches(flag, FLAGS, n=1)
            raise UserError(
                f"verify does not know {flag!r}" + (f"; did you mean {near[0]}?" if near else ""),
                "a data set takes " + ", ".join(f"{name} {what}" for name, what in FLAGS.items()),
            )
        if not equals:
            if not words:
                raise UserError(f"verify {flag} wants a value", f"{flag} {FLAGS[flag]}")
            value = words.popleft()
        options[flag] = value
    return options

"""Writes golden.json again: `python -m tests.golden.regenerate [NAME ...]`, or every recipe without names.
`--stored` writes the stored runs and the stored teacher cache instead.

Use it only if results or formats are meant to change: the commit message gives the reason, and CHANGELOG.md describes
the change. The stored runs come from an earlier revision on purpose: a new format must still read the old one.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.golden.recipes import (
    CACHE,
    COMMANDS,
    GOLDEN,
    STORED,
    STORED_RUNS,
    STORED_STEP,
    Golden,
    lay_out,
    machine,
    observed,
    run,
)


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        lay_out(Path(folder))
        if words == ["--stored"]:
            store(Path(folder))
        else:
            write_golden(Path(folder), words)


def write_golden(folder: Path, names: list[str]) -> None:
    unknown = set(names) - set(COMMANDS)
    if unknown:
        sys.exit(f"no such recipe: {', '.join(sorted(unknown))}; there are: {', '.join(COMMANDS)}")
    golden = Golden.read() if GOLDEN.exists() else Golden(machine(), {})
    if golden.made_with != machine():
        if names:
            sys.exit("golden.json was made on a different machine or torch: regenerate all of it")
        golden = Golden(machine(), {})
    for name in names or COMMANDS:
        found = observed(run(folder, name, COMMANDS[name]))
        print(f"{name}: {'unchanged' if golden.runs.get(name) == found else 'written'}")
        golden.runs[name] = found
    golden.write()


def store(folder: Path) -> None:
    """Run folders as a run that was killed after its checkpoint at step 3 leaves them."""
    for name in STORED_RUNS:
        kept = STORED / name
        shutil.rmtree(kept, ignore_errors=True)
        whole = run(folder, name, COMMANDS[name])
        shutil.copytree(whole / "checkpoints" / STORED_STEP, kept / "checkpoints" / STORED_STEP)
        for file in ("recipe.toml", "environment.json", "metrics.jsonl", "fingerprints.txt"):
            shutil.copy(whole / file, kept / file)
    run(folder, "cached", COMMANDS["distill-cached"])
    shutil.rmtree(CACHE, ignore_errors=True)
    shutil.copytree(folder / "cache", CACHE)


if __name__ == "__main__":
    main(sys.argv[1:])

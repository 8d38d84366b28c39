"""A run folder as training leaves it, made in a millisecond."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from drumline.report.record import (
    BATCH,
    FACTS,
    FOLDER,
    MISTAKES,
    Evaluation,
    Tile,
    make_sheet,
    write_evaluation,
    write_sheet,
)
from drumline.report.units import FIXED_POINT

EPOCHS, STEPS = 6, 10
FINISHED = (
    "2026-01-02 10:00:00  started: drumline train data.path=photos (drumline 0.1.0)",
    "2026-01-02 10:00:40  finished: top-1 61.00%",
)


def make_run(
    folder: Path,
    classes: tuple[str, ...] = ("cat", "dog", "newt"),
    ranks: int = 2,
    seed: int = 0,
    log: tuple[str, ...] = FINISHED,
    recipe: Mapping[str, str] | None = None,
    teacher: bool = False,
) -> Path:
    """Writes everything that a page reads."""
    (folder / FOLDER).mkdir(parents=True)
    draw = np.random.default_rng(seed)
    fields = {
        "data.path": json.dumps("photos"),
        "model.name": json.dumps("resnet8"),
        "optim.lr": "0.2",
        **(recipe or {}),
    }
    sections: dict[str, list[str]] = {}
    for name, value in fields.items():
        section, key = name.split(".")
        sections.setdefault(section, []).append(f"{key} = {value}")
    text = "\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items())
    (folder / "recipe.toml").write_text(text + "\n")
    (folder / "log.txt").write_text("".join(f"{line}\n" for line in log))
    (folder / "fingerprints.txt").write_text(
        "# drumline fingerprints 1\n60 gradient * 0123\n60 chain abcdef\n"
    )
    environment = {
        "packages": {"drumline": "0.1.0", "torch": "2.13.0"},
        "device": "CPU",
        "cuda": None,
        "processes": ranks,
        "command": ["/somewhere/drumline", "train", "data.path=my photos"],
        "model": {"classes": list(classes)},
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    facts = {"parameters": 78_042, "train_samples": 600, "epochs": EPOCHS, "steps": EPOCHS * STEPS}
    (folder / FOLDER / FACTS).write_text(json.dumps(facts))
    with (folder / "metrics.jsonl").open("w") as file:
        for epoch in range(1, EPOCHS + 1):
            for line in _lines(epoch, ranks, seed):
                file.write(json.dumps(line) + "\n")
    _results(folder, classes, draw, teacher)
    return folder


def _lines(epoch: int, ranks: int, seed: int) -> list[dict[str, Any]]:
    at = {"step": epoch * STEPS, "epoch": float(epoch)}
    good = 0.1 * epoch + 0.01 * seed
    return [
        {"kind": "train", **at, "loss": 2.0 / epoch, "top1": good, "lr": 0.2 / epoch, "images_per_s": 500.0},
        {"kind": "eval", **at, "loss": 2.2 / epoch, "top1": good, "top5": good, "samples": 300, "correct": 30,
         "best": epoch < EPOCHS, "best_metric": "top1"},
        {"kind": "times", **at, "steps": STEPS, "images_per_s": 500.0, "step_ms": [100.0] * ranks,
         "compute_ms": [80.0] * ranks, "data_ms": [15.0] * ranks, "late_ms": [5.0] * ranks,
         "host_forward_ms": [30.0] * ranks, "host_backward_ms": [50.0] * ranks, "host_data_ms": [15.0] * ranks,
         "host_other_ms": [5.0] * ranks, "memory_mb": [500.0 + rank for rank in range(ranks)],
         "own_cores": [1.0] * ranks},
    ]  # fmt: skip


def _results(folder: Path, classes: tuple[str, ...], draw: np.random.Generator, teacher: bool) -> None:
    labels = np.arange(300) % len(classes)
    guesses = draw.integers(0, len(classes), 300)
    predictions = np.where(draw.random(300) < 0.6, labels, guesses)
    probabilities = (draw.random(300) * FIXED_POINT).astype(np.int64)
    step = (EPOCHS - 1) * STEPS
    taught = np.where(draw.random(300) < 0.8, labels, guesses) if teacher else None
    write_evaluation(folder / FOLDER, Evaluation(step, labels, predictions, probabilities, taught))
    wrong = np.flatnonzero(labels != predictions)[:5]
    pixels = draw.integers(0, 256, (max(1, len(wrong)), 16, 16, 3), dtype=np.uint8)
    tiles = tuple(
        Tile(classes[labels[n]], classes[predictions[n]], 0.9, f"{classes[labels[n]]}/{n}.jpg") for n in wrong
    )
    if tiles:
        write_sheet(folder / FOLDER / MISTAKES, make_sheet(pixels, tiles, step))
    write_sheet(folder / FOLDER / BATCH, make_sheet(pixels, (Tile(classes[0]),) * len(pixels), 0))

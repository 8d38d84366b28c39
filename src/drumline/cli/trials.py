"""`drumline why --measure`, `--sweep` and `--apply`: measure with short training runs.

Promises: reads the recipe as `drumline train` does, and reports the same errors. The short runs leave
nothing behind, however the command ends. An interrupted sweep prints the rows measured so far.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

from drumline.config.arguments import TrustOption, read_options, read_recipe
from drumline.config.limits import Range
from drumline.config.recipe import Distill, Recipe
from drumline.config.toml import dump_recipe, flat_recipe
from drumline.core.errors import UserError
from drumline.core.text import counted, message, print_result, wrapped
from drumline.observe.text_log import say

if TYPE_CHECKING:
    from drumline.diagnosis.evidence import Evidence
    from drumline.diagnosis.measure import Measured
    from drumline.diagnosis.slowdown import Slowdown
    from drumline.diagnosis.trial import Command

WIDE = 120
"""Sentences are not wrapped at more than this."""


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The options of `drumline why` for short runs."""

    measure: bool = False
    """Measure a recipe in three short runs: with its files on disk, with its files in memory, and with synthetic
    data."""
    sweep: bool = False
    """Measure every combination of the listed values in short runs, and print a table."""
    apply: bool = False
    """Try the change with the largest predicted saving in a short run, and compare the measured speed with the
    prediction."""
    seconds: Annotated[float, Range(0.5, 3600)] = 5.0
    """Seconds to measure in each short run; up to three times as long if its speed varies."""


def main(argv: Sequence[str]) -> int:
    """Measures or sweeps; returns the exit code."""
    own, others = split(argv)
    options = read_options(own, TrialOptions, "why")
    if options.measure and options.sweep:
        raise UserError("--measure and --sweep exclude each other", "leave one of them out")

    from drumline.diagnosis.trial import interruptible

    with interruptible():
        if options.sweep:
            return sweep(others, options)
        return measure(others, options)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of this command, and the arguments of the run."""
    own, others = list[str](), list[str]()
    waiting = iter(argv)
    for text in waiting:
        name = text.partition("=")[0]
        if name in ("--measure", "--sweep", "--apply", "--seconds"):
            own.append(text)
            own += [next(waiting, "")] if text == "--seconds" else []
        else:
            others.append(text)
    return own, others


def measure(arguments: Sequence[str], options: TrialOptions) -> int:
    """`drumline why --measure`."""
    from drumline.diagnosis import measure as arms
    from drumline.diagnosis.verdict import verdict_lines

    command, recipe = command_of(arguments)
    measured = arms.measure(command, flat_recipe(dump_recipe(recipe)), options.seconds, say)
    found = arms.findings(measured)
    for line in arms.lines(measured):
        _print(line)
    for line in verdict_lines(measured.evidence, found, width()):
        print(message(line))
    speeds = measured.evidence.arms
    result: dict[str, Any] = {
        "command": str(command),
        "arms": {name: speeds.get(name) for name in arms.ARMS},
        "stalls": {"prep": arms.prep_stall(speeds), "fetch": arms.fetch_stall(speeds)},
        "notes": list(measured.notes),
        "findings": [each.as_dict() for each in found],
    }
    if options.apply:
        result["applied"] = _apply(command, found, measured.evidence, options.seconds, measured)
    print_result(result)
    return 0


def apply_to_run(
    run: Path, found: Sequence[Slowdown], evidence: Evidence, seconds: float, trust: bool
) -> dict[str, Any] | None:
    """`drumline why RUN --apply`: tries the best change of a run's recipe. Returns the result for JSON."""
    from drumline.diagnosis.trial import interruptible

    command, _ = command_of([str(run / "recipe.toml"), *(["--trust"] if trust else [])])
    with interruptible():
        return _apply(command, found, evidence, seconds)


def sweep(arguments: Sequence[str], options: TrialOptions) -> int:
    """`drumline why --sweep`."""
    from drumline.core.progress import progress
    from drumline.diagnosis import sweep as sweeps
    from drumline.diagnosis.measure import files_of
    from drumline.diagnosis.trial import NO_PAUSES, error_of, run_trial

    axes, others = sweeps.read_axes(arguments)
    total = len(sweeps.combinations(axes))
    first = sweeps.settings_of(axes, sweeps.combinations(axes)[0])
    files_of(flat_recipe(dump_recipe(_read([*others, *first]))))  # rejects data that is not there
    _announce(total, options.seconds)

    def trial(settings: Sequence[str]) -> tuple[Evidence, float]:
        command, _ = command_of([*others, *settings])
        evidence = run_trial(command.having(*NO_PAUSES), options.seconds)
        return evidence, error_of(evidence.intervals[1:])

    rows = list[sweeps.Row]()
    interrupted = False
    try:
        for row in progress(sweeps.measure_rows(axes, trial), "short runs", total):
            rows.append(row)
            say(f"{' '.join(sweeps.settings_of(axes, row.values))}: {sweeps.described(row)}")
    except KeyboardInterrupt:
        interrupted = True
    for line in [*sweeps.table(axes, rows, width()), *sweeps.verdict(axes, rows)]:
        print(message(line))
    if interrupted:
        say(f"interrupted after {len(rows)} of {counted(total, 'combination')}")
    print_result(sweeps.as_json(axes, rows))
    if interrupted:
        return 130
    return 0 if sweeps.best_of(rows) else 2


def command_of(arguments: Sequence[str]) -> tuple[Command, Recipe]:
    """The training command that the arguments describe, and its recipe."""
    from drumline.cli.train import with_preset
    from drumline.diagnosis.trial import Command

    words = tuple(with_preset(list(_recipes_of_runs(arguments))))
    recipe = _read(words)
    job = "train"
    if recipe.distill != Distill():
        from drumline.distillation.selection import select_methods

        job = "distill"
        if any(epochs for _, epochs in select_methods(recipe.distill).initial):
            words = (*words, "distill.initial_epochs=0")
    return Command(job, words), recipe


def _read(words: Sequence[str]) -> Recipe:
    """The recipe of a command line. Rejects what a short run cannot measure."""
    recipe = read_recipe(words, "train", TrustOption).recipe
    if recipe.parallel.nodes > 1:
        raise UserError(
            f"parallel.nodes = {recipe.parallel.nodes}: a short run measures one machine",
            "add parallel.nodes=1",
        )
    cache = recipe.distill.cache
    if cache and not Path(cache).exists():
        raise UserError(
            f"distill.cache = {cache}: is not filled yet, and a short run would fill only part of it",
            "add distill.cache= to measure without it, or train first",
        )
    return recipe


def _recipes_of_runs(arguments: Sequence[str]) -> Iterator[str]:
    """A run folder stands for its recipe."""
    for text in arguments:
        file = Path(text) / "recipe.toml"
        yield str(file) if not text.startswith("-") and "=" not in text and file.is_file() else text


def _apply(
    command: Command,
    found: Sequence[Slowdown],
    evidence: Evidence,
    seconds: float,
    measured: Measured | None = None,
) -> dict[str, Any] | None:
    """Applies the best change. `measured` is the measurement of the command as it is, if there is one."""
    from drumline.diagnosis import apply as applying
    from drumline.diagnosis.measure import files_of, run_cold
    from drumline.diagnosis.page_cache import drop
    from drumline.diagnosis.trial import run_trial

    try:
        best = applying.choose(found)
        needed = applying.seconds_needed(best, evidence, seconds)
    except UserError as error:
        _print(f"not applied: {error}")
        return None
    # What was measured may have been too short for the evaluations or saves that this is about.
    before = None if measured is None or needed > seconds else evidence
    cold = measured is not None and measured.cold

    def run(each: Command) -> Evidence:
        if not cold:
            return run_trial(each, needed)
        drop(files_of(evidence.recipe) or [])
        return run_cold(each, needed)

    _announce(1 if before else 2, needed)
    applied = applying.apply(command, best, before, run)
    text, command_line = applied.lines()
    _print(text)
    print(message(command_line))  # not wrapped, to be pasted
    return applied.as_dict()


def _announce(runs: int, seconds: float) -> None:
    from drumline.diagnosis.trial import announced

    say(announced(runs, seconds))


def _print(text: str) -> None:
    print(wrapped(message(text), width()))


def width() -> int:
    """Characters of a line."""
    return min(get_terminal_size().columns, WIDE) if sys.stdout.isatty() else WIDE

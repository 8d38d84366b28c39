"""`drumline why`: why a run is slow, and what would help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.cli import trials
from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.core.errors import UserError
from drumline.core.files import check_output, write_output
from drumline.core.text import message, print_result


@dataclass(frozen=True)
class Options(trials.TrialOptions):
    """The arguments of `drumline why`."""

    run: str
    """A run folder."""
    trace: str = ""
    """Also write the run's records as a trace to this .json file. Open it in ui.perfetto.dev (docs/clock.md)."""
    trust: bool = False
    """Run code that a recipe file names as package.module:factory."""


COMMAND = Command(
    name="why",
    usage="""RUN [--apply] [--trace FILE]
--measure [RECIPE.toml] [FIELD=VALUE ...] [--apply]
--sweep FIELD=A,B,... [RECIPE.toml] [FIELD=VALUE ...]""",
    about="""
        Report why a run is slow. Lists the reasons, the most expensive first, each with the
        numbers behind it, the setting to change and the predicted speed. Reads the times that
        every run records, so the run may be finished, still running or killed. Prints
        `nothing stands out` if no rule finds a reason. docs/why-slow.md explains each reason.

        --measure, --sweep and --apply start short training runs and delete them afterwards.
        docs/why-measure.md explains them.

        If stdout is not a terminal, its last line is JSON. Each entry of `findings` has `code`,
        `text`, `saving` (a fraction of the present time), `flag` and `fix`. The exit code is 0
        whether or not there are findings.
    """,
    options=Options,
    examples="""
  drumline why runs/photos-resnet50-1
  drumline why runs/photos-resnet50-1 --apply      try the best change
  drumline why runs/photos-resnet50-1 --trace trace.json
  drumline why --measure data.path=photos model.name=resnet50
  drumline why --sweep workers=2,4,8 batch=128,256 data.path=photos
""",
)


def main(argv: list[str]) -> int:
    if "--measure" in argv or "--sweep" in argv:
        return trials.main(argv)
    options = read_options(argv, Options, "why")

    from drumline.diagnosis.evidence import read_evidence
    from drumline.diagnosis.rules import diagnose
    from drumline.diagnosis.verdict import verdict_lines
    from drumline.observe.runs import is_run, summarize

    run = Path(options.run)
    if not run.is_dir():
        raise UserError(f"there is no run {run}", "`drumline runs` lists the runs")
    if not is_run(run):
        raise UserError(f"{run} is not a run", "give a run folder; `drumline runs` lists them")
    if options.trace:
        check_output("--trace", Path(options.trace))
    evidence = read_evidence(run)
    if not evidence.intervals:
        state = summarize(run).state
        fix = (
            "wait a minute: a run first records its times after some seconds of training"
            if state == "running"
            else "train it for longer: a run records its times while it trains"
        )
        raise UserError(f"{run} has no times yet (it is {state})", fix)
    found = diagnose(evidence)
    for line in verdict_lines(evidence, found, trials.width()):
        print(message(line))
    result: dict[str, Any] = {"run": str(run), "findings": [each.as_dict() for each in found]}
    if options.trace:
        result["trace"] = _write_trace(run, Path(options.trace))
    if options.apply:
        result["applied"] = trials.apply_to_run(run, found, evidence, options.seconds, options.trust)
    print_result(result)
    return 0


def _write_trace(run: Path, file: Path) -> str:
    from drumline.diagnosis.trace import read_records, trace_json

    try:
        content = trace_json(read_records(run))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(
            f"{run} has a record that cannot be read ({type(error).__name__}: {error})",
            "remove the damaged line from its metrics.jsonl, or its trace.jsonl as a whole",
        ) from error
    try:
        write_output(file, content)
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror or error}", "free space, or give another --trace"
        ) from error
    print(f"\ntrace written to {file}: open it in https://ui.perfetto.dev")
    return str(file)

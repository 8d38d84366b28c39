"""`drumline compare`: two runs, bit by bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.core.text import message, print_result


@dataclass(frozen=True)
class Options:
    """The arguments of `drumline compare`."""

    run_a: str
    """A run folder or a checkpoint."""
    run_b: str
    """Another one."""


COMMAND = Command(
    name="compare",
    usage="RUN_A RUN_B",
    about="""
        Report whether two runs have the same bits. A run writes fingerprints.txt while it
        trains: short numbers for the samples, gradients, buffers, parameters and optimizer
        state after the first three steps, every guard.every steps and at each checkpoint.
        Reports the first step that differs and, within it, the first differing tensor; the
        last step that agrees; what differs in the recipe and set-up; and, if both runs have
        a later checkpoint, how far apart they are. Runs of different length are compared as
        far as both go. Checkpoints (RUN/checkpoints/step-N) can be compared too.

        Exit code 0: equal. 1: different. 2: not comparable, for example a damaged file.
    """,
    options=Options,
    examples="""
  drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2
  drumline compare runs/a/checkpoints/step-500 runs/b
  diff runs/a/fingerprints.txt runs/b/fingerprints.txt | head   the same by hand
""",
)


def main(argv: list[str]) -> int:
    options = read_options(argv, Options, "compare")

    from drumline.state.compare import compare

    found = compare(Path(options.run_a), Path(options.run_b))
    for line in found.lines:
        print(message(line))
    print_result({key: value for key, value in asdict(found).items() if key != "lines"})
    return 0 if found.equal else 1

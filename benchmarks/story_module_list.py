"""What one line costs: `module_list = module_list.module` in a distillation script with DDP, on the embedded digits.

    python benchmarks/story_module_list.py [--seeds 3]
    python benchmarks/story_module_list.py --small      # one setting, few steps: a check that the script works

Runs `tests/guards/scripts/story.py` over gloo with and without the line, once per seed, and prints the table of
docs/story-module-list.md, then the message of `drumline.guard` for the script with the line. Needs only a CPU; takes
some minutes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.guards.scripts_run import run_script

from harness import Parser

SETTINGS = (
    (2, ("--labels", "80"), "2 ranks, 80 images in total"),
    (4, ("--labels", "40"), "4 ranks, 40 images in total"),
    (2, ("--labels", "1438"), "2 ranks, all 1,438 images"),
    (2, ("--folders",), "2 ranks, 1,438 images, each rank reads 5 of the 10 classes from its own disk"),
)


def main() -> None:
    parser = Parser(__doc__, seeds=1)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    seeds = range(args.seeds)
    print("| Setting | Fixed script | With the line | Loss |\n|---|---|---|---|")
    for size, words, name in SETTINGS[:1] if args.small else SETTINGS:
        words = (*words, "--steps", "5") if args.small else words
        fixed = [accuracy(size, *words, "--fixed", "--seed", str(seed)) for seed in seeds]
        wrong = [accuracy(size, *words, "--seed", str(seed)) for seed in seeds]
        loss = statistics.mean(fixed) - statistics.mean(wrong)
        print(f"| {name} | {cell(fixed)} | {cell(wrong)} | {loss:.0f} points |", flush=True)
    outcome = run_script("story.py", 2, "--guard")
    print("\n" + outcome.finding(0).replace("[rank0]:", "").strip())


def accuracy(size: int, *words: str) -> float:
    """The accuracy of rank 0's student on the 359 evaluation images."""
    outcome = run_script("story.py", size, *words, seconds=300)
    assert outcome.quiet, outcome.err[0]
    return float(outcome.out[0].split()[1])


def cell(values: list[float]) -> str:
    """The mean and every value."""
    return f"{statistics.mean(values):.1f} % ({', '.join(f'{value:.1f}' for value in values)})"


if __name__ == "__main__":
    main()

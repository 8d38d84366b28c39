"""What one line costs: `module_list = module_list.module` in a distillation script, stock DDP, the embedded digits.

    python benchmarks/story_module_list.py [--seeds 3]
    python benchmarks/story_module_list.py --small      # one setting, few steps, to see that it works

Runs `tests/guards/scripts/story.py` over gloo, wrong and mended, per seed, and prints the table of
docs/story-module-list.md, then what `drumline.guard` says of the wrong one. CPU only, some minutes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.guards.scripts_run import run_script

from harness import Parser

SETTINGS = (
    (2, ("--labels", "80"), "2 ranks, 80 images dealt out"),
    (4, ("--labels", "40"), "4 ranks, 40 images dealt out"),
    (2, ("--labels", "1438"), "2 ranks, all 1,438 images dealt out"),
    (2, ("--folders",), "2 ranks, 1,438 images, each rank reads 5 of the 10 classes from its own disk"),
)


def main() -> None:
    parser = Parser(__doc__, seeds=1)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    seeds = range(args.seeds)
    print("| setting | mended script | with the line | lost |\n|---|---|---|---|")
    for size, words, name in SETTINGS[:1] if args.small else SETTINGS:
        words = (*words, "--steps", "5") if args.small else words
        mended = [accuracy(size, *words, "--mended", "--seed", str(seed)) for seed in seeds]
        wrong = [accuracy(size, *words, "--seed", str(seed)) for seed in seeds]
        lost = statistics.mean(mended) - statistics.mean(wrong)
        print(f"| {name} | {told(mended)} | {told(wrong)} | {lost:.0f} points |", flush=True)
    outcome = run_script("story.py", 2, "--guard")
    print("\n" + outcome.finding(0).replace("[rank0]:", "").strip())


def accuracy(size: int, *words: str) -> float:
    """Of rank 0's student on the 359 evaluation images."""
    outcome = run_script("story.py", size, *words, seconds=300)
    assert outcome.quiet, outcome.err[0]
    return float(outcome.out[0].split()[1])


def told(values: list[float]) -> str:
    """Mean and every value."""
    return f"{statistics.mean(values):.1f} % ({', '.join(f'{value:.1f}' for value in values)})"


if __name__ == "__main__":
    main()

"""Which silent mistakes the guards find, and which healthy loops they disturb: precision and recall as tables.

    python benchmarks/guard_recall.py [--small]

Runs every loop of `tests/guards/cases` in two processes over gloo and prints the tables of docs/guards.md. A
mistake is found if a guard that the case names stops the loop or warns. A healthy loop is disturbed if it is
stopped; loops with only a warning are listed. The held-out cases were written before the guards ran on them. Needs
only a CPU; takes about a minute. `--small` runs three cases.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.guards.cases.common import Case
from tests.guards.cases.run import load, run_cases

from harness import Parser


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    cases = load()
    if options.small:
        chosen = ("zero_grad_never_called", "softmax_before_cross_entropy", "mixup")
        cases = {name: cases[name] for name in chosen}
    said = run_cases(options.ranks, list(cases))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {options.ranks} ranks\n")
    print("| cases | mistakes | found | recall | healthy | stopped | warned | precision of stops |")
    print("|---|---|---|---|---|---|---|---|")
    for label, held_out in (("seen", False), ("held out", True)):
        summary(label, [case for case in cases.values() if case.held_out == held_out], said)
    print("\n| mistake | found by | |\n|---|---|---|")
    for case in cases.values():
        if case.codes:
            codes = [
                code
                for code in (*said[case.name]["stopped"], *said[case.name]["warned"])
                if code in case.codes
            ]
            outcome = "stopped" if said[case.name]["stopped"] else "warned" if codes else "**missed**"
            print(f"| {words(case)} | {f'`{codes[0]}`' if codes else ''} | {outcome} |")
    warned = [case for case in cases.values() if not case.codes and said[case.name]["warned"]]
    print(f"\nHealthy loops with a warning ({len(warned)}):")
    for case in warned:
        print(f"- {words(case)}: `{'`, `'.join(said[case.name]['warned'])}`")


def summary(label: str, cases: list[Case], said: dict[str, dict]) -> None:
    """Prints one row: how many mistakes were found, and how many healthy loops were stopped or warned."""
    mistakes = [case for case in cases if case.codes]
    healthy = [case for case in cases if not case.codes]
    if not cases:
        return
    found = [c for c in mistakes if set(c.codes) & {*said[c.name]["stopped"], *said[c.name]["warned"]}]
    stops = [case for case in found if said[case.name]["stopped"]]
    wrong = [case for case in healthy if said[case.name]["stopped"] or said[case.name]["error"]]
    warned = [case for case in healthy if said[case.name]["warned"] and case not in wrong]
    recall = f"{100 * len(found) / len(mistakes):.0f} %" if mistakes else ""
    precision = f"{100 * len(stops) / (len(stops) + len(wrong)):.0f} %" if stops or wrong else ""
    print(
        f"| {label} | {len(mistakes)} | {len(found)} | {recall} | {len(healthy)} | {len(wrong)} | {len(warned)} "
        f"| {precision} |"
    )


def words(case: Case) -> str:
    """The case's name as text."""
    return case.name.replace("_", " ") + (" (held out)" if case.held_out else "")


if __name__ == "__main__":
    main()

"""Precision and recall of `drumline why` on runs with a planted problem and on healthy runs, as tables.

    python benchmarks/why_recall.py [--small] [--only NAME]

Trains every run of `tests/diagnosis/planted.py` and prints the tables of docs/why-slow.md. A problem is found if one
finding has its code. Any other finding is wrong unless the case lists it as true, too (`machine-busy` is true of most
machines that run this). The held-out variants were written after the rules. Needs only a CPU; takes about ten
minutes on two cores. `--small` runs three cases.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.diagnosis import planted
from tests.diagnosis.planted import Case

from harness import Parser

SMALL = ("a hook that waits", "evaluation-heavy", "digits")


@dataclass(frozen=True)
class Judged:
    """A case, and the codes that `why` gave for it."""

    case: Case
    codes: tuple[str, ...]

    @property
    def found(self) -> bool:
        return self.case.code in self.codes

    @property
    def wrong(self) -> list[str]:
        return [code for code in self.codes if code not in self.case.allowed]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    groups = {
        "seen": (*planted.PLANTED, *planted.HEALTHY),
        "held out": (*planted.HELD_OUT, *planted.HEALTHY_HELD_OUT),
    }
    judged: dict[str, list[Judged]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for group, cases in groups.items():
            chosen = [case for case in cases if not options.small or case.name in SMALL]
            chosen = [case for case in chosen if options.only in case.name]
            judged[group] = [judge(case, Path(folder, group, case.name)) for case in chosen]
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU\n")
    print("| cases | problems | found | recall | healthy | with a claim | findings | wrong | precision |")
    print("|---|---|---|---|---|---|---|---|---|")
    for group, results in judged.items():
        summary(group, results)
    print("\n| planted | `why` says | found | also said |\n|---|---|---|---|")
    for results in judged.values():
        for each in results:
            print(row(each))


def judge(case: Case, folder: Path) -> Judged:
    print(f"{case.name} ...", file=sys.stderr, flush=True)
    evidence = planted.run_case(case, folder, train)
    return Judged(case, tuple(dict.fromkeys(each.code for each in planted.judge(case, evidence))))


def train(*words: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])


def summary(group: str, results: Sequence[Judged]) -> None:
    problems = [each for each in results if each.case.code]
    healthy = [each for each in results if not each.case.code]
    found = sum(each.found for each in problems)
    wrong = sum(len(each.wrong) for each in results)
    said = sum(len([code for code in each.codes if code != planted.BUSY]) for each in results)
    print(
        f"| {group} | {len(problems)} | {found} | {_percent(found, len(problems))} | {len(healthy)} "
        f"| {sum(bool(each.wrong) for each in healthy)} | {said} | {wrong} | {_percent(said - wrong, said)} |"
    )


def row(each: Judged) -> str:
    name = each.case.name if each.case.code else f"healthy: {each.case.name}"
    others = [code for code in each.codes if code not in (each.case.code, planted.BUSY)]
    marked = [f"**`{code}`**" if code in each.wrong else f"`{code}`" for code in others]
    found = ("yes" if each.found else "**no**") if each.case.code else ""
    said = f"`{each.case.code}`" if each.case.code else ""
    return f"| {name} | {said} | {found} | {', '.join(marked)} |"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


if __name__ == "__main__":
    main()

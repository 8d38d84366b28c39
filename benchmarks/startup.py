"""From the command to the first optimizer step: how long `drumline train` takes to start, beside `import torch`.

    python benchmarks/startup.py                    # on a CPU
    python benchmarks/startup.py --device cuda      # on one GPU
    python benchmarks/startup.py --small            # one round, to see that it works

Each round starts three new processes in turn: one that imports torch; the command up to the end of its first step,
in phases; and the whole command with one step, an evaluation, a checkpoint and the exit. A first round, which fills
the page cache and writes bytecode, does not count. Prints medians of the time on the clock and of the CPU time, which
other programs on the machine affect less. The phases are measured from outside: this script wraps the functions that
`PHASES` names, then calls the command line's `main`.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

PHASES = {
    "choose the device": "drumline.launch.worker:pick_device",
    "open the data": "drumline.train.prepare:prepare_sets",
    "build the model": "drumline.train.prepare_model:prepare_model",
    "lay out the model, build the optimizer": "drumline.train.start:prepare_trainee",
    "rehearse the step": "drumline.train.loop:rehearse",
    "first step": "drumline.train.step:TrainStep.__call__",
}
"""Functions by what they do, in the order in which a run calls them."""
TORCH, OURS, REST, TOTAL = "start Python, import torch", "import drumline", "all else", "to the first step"
COMMAND = ("train", "--model.name", "cifar/resnet8", "--train.steps", "1")
ALONE = "import time, torch; print([time.time(), time.process_time()])"
Times = tuple[float, float]
"""Seconds on the clock, and of CPU time."""


def child(began: float, argv: list[str]) -> None:
    """Runs the command up to the end of its first step; prints the times of each phase."""

    def now() -> Times:
        return time.time() - began, time.process_time()

    python = now()
    from drumline.cli import main as command
    from drumline.cli import without_garbage_collection

    begin = now()
    with without_garbage_collection():  # as the command does
        import torch
    times: dict[str, Times] = {OURS: _minus(begin, python)}
    times[TORCH] = _minus(now(), times[OURS])

    def timed(phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = now()
        result = function(*args, **kwargs)
        if phase == "first step" and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times[phase] = _minus(now(), begin)
        if phase == "first step":
            _report(times, now())
        return result

    begin = now()
    for phase, name in PHASES.items():
        module, path = name.split(":")
        *classes, function = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in classes:
            owner = getattr(owner, each)
        setattr(owner, function, _bound(timed, phase, getattr(owner, function)))
    ours = _minus(now(), begin)
    times[OURS] = times[OURS][0] + ours[0], times[OURS][1] + ours[1]
    command(argv)


def _bound(timed: Callable[..., Any], phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that can stand in a class, unlike a `partial`."""
    return lambda *args, **kwargs: timed(phase, function, *args, **kwargs)


def _minus(end: Times, begin: Times) -> Times:
    return end[0] - begin[0], end[1] - begin[1]


def _report(times: dict[str, Times], total: Times) -> None:
    """Prints all phases, and ends the process."""
    known = sum(wall for wall, _ in times.values()), sum(cpu for _, cpu in times.values())
    print(json.dumps({**times, REST: _minus(total, known), TOTAL: total}), flush=True)
    os._exit(0)


def main() -> None:
    from harness import Parser

    parser = Parser(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    # As after an install: with the bytecode that Python keeps beside the sources.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    alone: list[Times] = []
    whole: list[float] = []
    phases: list[dict[str, Times]] = []
    with tempfile.TemporaryDirectory() as folder:
        argv = [*COMMAND, "--run.device", options.device, "--run.dir", folder]
        for number in range(options.rounds + 1):
            begin = time.time()
            imported = json.loads(_python(["-c", ALONE], env))
            found = json.loads(_python([__file__, "--child", str(time.time()), *argv], env))
            command = time.time()
            _python(["-m", "drumline", *argv], env)
            if number:
                alone.append((imported[0] - begin, imported[1]))
                phases.append(found)
                whole.append(time.time() - command)
    print(f"{_machine(options.device)}, {options.rounds} rounds in turns, medians\n")
    print("| phase | s | CPU s |\n|---|---|---|")
    for phase in (TORCH, OURS, *PHASES, REST):
        wall, cpu = _medians([each[phase] for each in phases])
        print(f"| {phase} | {wall:.3f} | {cpu:.3f} |")
    least = _medians(alone)
    total = _medians([each[TOTAL] for each in phases])
    print(
        "\n| from the command | s | ratio | beyond, s | CPU s | ratio | beyond, s |\n|---|---|---|---|---|---|---|"
    )
    for name, (wall, cpu) in ((TORCH, least), (TOTAL, total)):
        print(
            f"| {name} | {wall:.3f} | {wall / least[0]:.2f} | {wall - least[0]:+.3f} "
            f"| {cpu:.3f} | {cpu / least[1]:.2f} | {cpu - least[1]:+.3f} |"
        )
    wall = statistics.median(whole)
    print(
        f"| to the end of a run of one step | {wall:.3f} | {wall / least[0]:.2f} | {wall - least[0]:+.3f} | | | |"
    )


def _medians(times: list[Times]) -> Times:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _python(argv: list[str], env: dict[str, str]) -> str:
    """Runs Python with these arguments; gives the last line that it printed."""
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _machine(device: str) -> str:
    """Asked for at the end: a process that holds a GPU would keep its driver awake for the others."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), sys.argv[3:])
    else:
        main()

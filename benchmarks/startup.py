"""How long `drumline train` takes from the command to the first optimizer step, compared with `import torch`.

    python benchmarks/startup.py                    # on a CPU
    python benchmarks/startup.py --device cuda      # on one GPU
    python benchmarks/startup.py --small            # one round: a check that the script works

Each round starts new processes in turn: one that imports torch; the command up to the end of its first step, in
phases; and the complete command with one step, an evaluation, a checkpoint and the exit, in one process and (on a
CPU) in two, which a launcher starts. A first round, which fills the page cache and writes bytecode, does not count.
Prints medians of wall time and of CPU time, which other programs affect less. A phase ends when the run first calls a
certain function of torch (see `child`), so the measured code needs no timers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

TORCH, REHEARSED = "start Python, import torch", "first backward and update (undone: a rehearsal)"
TOTAL, WHOLE = "to the first step", "to the end of a run of one step"
TWO = f"{WHOLE}, in two processes"
COMMAND = ("train", "--model.name", "cifar/resnet8", "--train.steps", "1", "--parallel.threads", "1")
ALONE = "import time, torch; print([time.time(), time.process_time()])"
Times = tuple[float, float]
"""Seconds of wall time and of CPU time."""


def child(began: float, argv: list[str]) -> None:
    """Runs the command up to the end of its first step; prints when each phase ended."""
    from drumline.cli import main as command
    from drumline.core.environment import thread_defaults
    from drumline.launch.start import without_garbage_collection

    os.environ.update(thread_defaults(os.environ))  # as the command does, before torch is imported
    with without_garbage_collection():  # as the command does
        import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends: dict[str, Times] = {}

    def mark(phase: str) -> None:
        ends.setdefault(phase, (time.time() - began, time.process_time()))

    def mark_before(owner: Any, name: str, phase: str) -> None:
        """Ends a phase at the first call of a function."""
        function: Callable[..., Any] = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, function)
            mark(phase)
            return function(*args, **kwargs)

        setattr(owner, name, marked)

    def stepped(*_: object) -> None:
        if REHEARSED in ends and not torch.cuda.is_initialized():
            end()
        mark(REHEARSED)

    def end() -> None:
        mark("first step")
        print(json.dumps(ends), flush=True)
        os._exit(0)

    mark(TORCH)
    mark_before(torch, "set_deterministic_debug_mode", "import drumline, open the device")
    mark_before(torch.nn.Module, "__init__", "open the data")
    mark_before(torch.optim.Optimizer, "__init__", "build the model")
    mark_before(torch.autograd, "backward", "build the optimizer, open the run folder, first forward")
    register_optimizer_step_post_hook(stepped)
    replay = torch.cuda.CUDAGraph.replay

    def first_replay(graph: Any) -> None:
        mark("capture the step as a CUDA graph")
        replay(graph)
        torch.cuda.synchronize()
        end()

    torch.cuda.CUDAGraph.replay = first_replay
    command(argv)


def main() -> None:
    from harness import Parser

    parser = Parser(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    # As after an installation: with bytecode.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    alone: list[Times] = []
    wholes: dict[str, list[float]] = {WHOLE: []} | ({TWO: []} if options.device == "cpu" else {})
    ends: list[dict[str, Times]] = []
    with tempfile.TemporaryDirectory() as folder:
        argv = [*COMMAND, "--run.device", options.device, "--run.dir", folder]
        for number in range(options.rounds + 1):
            begin = time.time()
            imported = json.loads(_python(["-c", ALONE], env))
            found = json.loads(_python([__file__, "--child", str(time.time()), *argv], env))
            if number:
                alone.append((imported[0] - begin, imported[1]))
                ends.append(found)
            for processes, (_, seconds) in enumerate(wholes.items(), 1):
                command = time.time()
                _python(["-m", "drumline", *argv, "--parallel.processes", str(processes)], env)
                if number:
                    seconds.append(time.time() - command)
    print(f"{_machine(options.device)}, {options.rounds} alternating rounds, medians\n")
    print("| phase | s | CPU s |\n|---|---|---|")
    began: list[Times] = [(0.0, 0.0)] * len(ends)
    for phase in ends[0]:
        ended = [each[phase] for each in ends]
        wall, cpu = _medians([(b[0] - a[0], b[1] - a[1]) for a, b in zip(began, ended, strict=True)])
        print(f"| {phase} | {wall:.3f} | {cpu:.3f} |")
        began = ended
    least, total = _medians(alone), _medians(began)
    print(
        "\n| from the command | s | ratio | extra s | CPU s | ratio | extra CPU s |\n|---|---|---|---|---|---|---|"
    )
    for name, (wall, cpu) in ((TORCH, least), (TOTAL, total)):
        print(
            f"| {name} | {wall:.3f} | {wall / least[0]:.2f} | {wall - least[0]:+.3f} "
            f"| {cpu:.3f} | {cpu / least[1]:.2f} | {cpu - least[1]:+.3f} |"
        )
    for name, seconds in wholes.items():
        wall = statistics.median(seconds)
        print(f"| {name} | {wall:.3f} | {wall / least[0]:.2f} | {wall - least[0]:+.3f} | | | |")


def _medians(times: list[Times]) -> Times:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def _python(argv: list[str], env: dict[str, str]) -> str:
    """Runs Python with these arguments. Returns the last line that it printed."""
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _machine(device: str) -> str:
    """Called at the end: a process with a CUDA context would keep the driver awake for the others."""
    import torch

    name = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(float(sys.argv[2]), sys.argv[3:])
    else:
        main()

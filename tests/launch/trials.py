"""Trials: machines of a run are cut off, frozen, misconfigured or attacked.

`python -m tests.launch.trials [NAME ...]` makes two hosts of network namespaces (root only), runs the trials and
prints a table in Markdown; its exit code is the number of trials that failed. The launchers
are real, the workers take empty steps. `test_trials.py` runs some of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launch.hosts import Host, cut, mend, two_hosts, why_not
from tests.launch.job import is_running, wait_for

HERE = Path(__file__).parent
PORT = 29513
PATIENCE = 60.0


@dataclass
class Machine:
    """A launcher on one of the hosts; what it says goes to a file."""

    process: subprocess.Popen[str]
    output: Path
    begun: float = field(default_factory=time.monotonic)

    def said(self) -> str:
        return self.output.read_text()

    def ends(self, seconds: float = PATIENCE) -> tuple[int, float]:
        """Exit code, and how long that took from now."""
        begin = time.monotonic()
        code = self.process.wait(timeout=seconds)
        return code, time.monotonic() - begin

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@dataclass
class Trial:
    """Two hosts, a folder, and what is started there."""

    hosts: tuple[Host, Host]
    folder: Path
    hurry: bool
    """Workers may be silent for a shorter time, for tests."""
    cleanup: ExitStack
    machines: list[Machine] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def launch(
        self, number: int, mode: str = "steps", env: dict[str, str] | None = None, **wanted: Any
    ) -> Machine:
        host = self.hosts[number]
        parallel = {"nodes": 2, "timeout": 30.0, "rendezvous": self.place, **wanted.pop("parallel", {})}
        request = {
            "command": [sys.executable, str(HERE / "job.py"), str(self.folder), mode],
            "processes": 1,
            "parallel": parallel,
            "hurry": self.hurry,
            **wanted,
        }
        output = self.folder / f"said-{len(self.machines)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*host.prefix, sys.executable, str(HERE / "launcher_process.py"), json.dumps(request)],
                stderr=file,
                text=True,
                cwd=HERE.parents[1],
                env=os.environ | {"DRUMLINE_SECRET": "for trials and nothing else"} | (env or {}),
            )
        self.cleanup.callback(process.wait)
        self.cleanup.callback(process.kill)
        self.machines.append(Machine(process, output))
        return self.machines[-1]

    def both(self, mode: str = "steps", **wanted: Any) -> tuple[Machine, Machine]:
        """Both machines, with their workers going."""
        machines = self.launch(0, mode, **wanted), self.launch(1, mode, **wanted)
        self.steps(0, 2)
        return machines

    def steps(self, generation: int, world: int) -> None:
        """Waits until all workers of a start take steps."""
        for rank in range(world):
            path = self.folder / f"step-{generation}-{rank}"
            said = "\n".join(machine.said() for machine in self.machines)
            assert wait_for(path, PATIENCE, holding=str(world)), f"{path.name} is missing\n{said}"

    def enough(self) -> None:
        """Lets the workers finish."""
        (self.folder / "enough").touch()

    def worker(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def nobody_left(self) -> None:
        for path in self.folder.glob("pid-*"):
            assert not is_running(int(path.read_text())), path.name


def cut_then_sigterm(trial: Trial) -> str:
    """The link is cut, then the launcher that cannot reach the rendezvous gets SIGTERM."""
    first, second = trial.both(supervision={"restarts": 3})
    cut(trial.hosts[1])
    time.sleep(0.5)
    second.signal(signal.SIGTERM)
    time.sleep(1.0)
    assert "SIGTERM: the processes finish their step" in second.said(), second.said()
    code, seconds = second.ends(15)
    assert code == 128 + signal.SIGKILL, second.said()
    assert not is_running(trial.worker(1))
    first.signal(signal.SIGTERM)
    assert first.ends()[0] in (128 + signal.SIGKILL, 128 + signal.SIGTERM), first.said()
    return f"answers at once, ends {seconds + 1:.0f} s later with 137, its worker with it"


def cut_then_worker_killed(trial: Trial) -> str:
    """The link is cut, and a worker on the cut-off machine dies before that is noticed."""
    first, second = trial.both()
    cut(trial.hosts[1])
    os.kill(trial.worker(1), signal.SIGKILL)
    code, seconds = second.ends(15)
    assert code == 1, second.said()
    assert "rank 1 on" in second.said(), second.said()
    assert "killed by SIGKILL" in second.said(), second.said()
    first.ends(30)
    return f"cut-off machine names the killed rank and ends after {seconds:.0f} s"


def cut_without_restarts(trial: Trial) -> str:
    """The link is cut; the run may not restart."""
    first, second = trial.both()
    cut(trial.hosts[1])
    (code, seconds), (other, _) = first.ends(30), second.ends(30)
    assert (code, other) == (1, 1), first.said() + second.said()
    assert re.search(r"machine 1, .+: lost: no message from its launcher for \d+ s", first.said()), (
        first.said()
    )
    assert re.search(rf"lost contact with the rendezvous at {trial.place} for \d+ s", second.said())
    return f"both end after {seconds:.0f} s with 1, each with one sentence"


def cut_for_good(trial: Trial) -> str:
    """The link is cut and stays so; restarts are left, `parallel.timeout` is 5 s."""
    first, second = trial.both(supervision={"restarts": 3}, parallel={"timeout": 5.0})
    cut(trial.hosts[1])
    (code, seconds), (other, _) = first.ends(40), second.ends(40)
    assert (code, other) == (1, 1), first.said() + second.said()
    for machine in (first, second):
        assert "restart 1 of 3" in machine.said()
        assert "the machines could not connect again" in machine.said()
    return f"both wait for each other, give up after `parallel.timeout`, {seconds:.0f} s in all, with 1"


def cut_and_returned(trial: Trial) -> str:
    """The link is cut and comes back; restarts are left."""
    first, second = trial.both(supervision={"restarts": 3})
    cut(trial.hosts[1])
    assert _says(second, "restart 1 of 3")
    assert _says(first, "restart 1 of 3")
    mend(trial.hosts[1])
    begin = time.monotonic()
    trial.steps(1, 2)
    seconds = time.monotonic() - begin
    trial.enough()
    assert first.ends()[0] == second.ends()[0] == 0, first.said() + second.said()
    return f"both restart and train together again {seconds:.1f} s after the link is back"


def frozen(trial: Trial) -> str:
    """Launcher and worker of machine 1 are stopped (SIGSTOP); `launch.min_nodes` is 1; later they go on."""
    first, second = trial.both(supervision={"restarts": 3, "min_nodes": 1})
    worker = trial.worker(1)
    for pid in (second.process.pid, worker):
        os.kill(pid, signal.SIGSTOP)
    trial.steps(1, 1)
    for pid in (second.process.pid, worker):
        os.kill(pid, signal.SIGCONT)
    begin = time.monotonic()
    assert _says(second, "the run continued without this machine"), second.said()
    seconds = time.monotonic() - begin
    assert _says(second, "the run is under way without this machine"), second.said()
    assert not is_running(worker)
    trial.enough()
    assert first.ends()[0] == 0, first.said()
    assert second.ends()[0] == 1
    assert second.said().endswith("the run ended while this machine was disconnected\n"), second.said()
    return f"the other goes on alone; thawed, the machine stops its worker within {seconds:.1f} s and waits"


def frozen_host(trial: Trial) -> str:
    """Launcher and worker of the machine with the rendezvous are stopped; restarts are left; later they go on."""
    first, second = trial.both(supervision={"restarts": 3})
    for pid in (first.process.pid, trial.worker(0)):
        os.kill(pid, signal.SIGSTOP)
    assert _says(second, "lost contact with the rendezvous"), second.said()
    for pid in (first.process.pid, trial.worker(0)):
        os.kill(pid, signal.SIGCONT)
    trial.steps(1, 2)
    trial.enough()
    assert first.ends()[0] == second.ends()[0] == 0, first.said() + second.said()
    return "the other says so and waits; thawed, both restart together"


def returned(trial: Trial) -> str:
    """Machine 1 is killed; the other goes on alone. It is started again, and the worker of the other is killed."""
    first, second = trial.both(supervision={"restarts": 3, "min_nodes": 1})
    second.process.kill()
    trial.steps(1, 1)
    again = trial.launch(1, supervision={"restarts": 3, "min_nodes": 1})
    assert _says(again, "the run is under way without this machine: it joins at the next restart")
    os.kill(trial.worker(0), signal.SIGKILL)
    trial.steps(2, 2)
    trial.enough()
    assert first.ends()[0] == again.ends()[0] == 0, first.said() + again.said()
    return "waits, says so, and joins at the next restart"


def skewed_clock(trial: Trial) -> str:
    """The clock of machine 1 is 120 s ahead; a worker is killed on the way."""
    first = trial.launch(0, supervision={"restarts": 1})
    second = trial.launch(1, supervision={"restarts": 1}, clock=120.0)
    trial.steps(0, 2)
    assert _says(first, "the clock of"), first.said()
    os.kill(trial.worker(1), signal.SIGKILL)
    trial.steps(1, 2)
    trial.enough()
    assert first.ends()[0] == second.ends()[0] == 0, first.said() + second.said()
    assert re.search(r"the clock of .+ is 1(19|20|21) s ahead of this machine's", first.said()), first.said()
    assert re.search(r"the clock of .+ is 1(19|20|21) s behind this machine's", second.said()), second.said()
    return "both name it once, restart and finish; nothing depends on it"


def stranger(trial: Trial) -> str:
    """At the port: HTTP, garbage, pickles, a foreign secret, huge messages, 300 silent connections."""
    first, second = trial.both()
    mark = trial.folder / "executed"
    attack = subprocess.run(
        [*trial.hosts[1].prefix, sys.executable, str(HERE / "stranger.py"), trial.hosts[0].address, str(PORT),
         str(mark)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert attack.returncode == 0, attack.stderr
    assert first.process.poll() is None, first.said()
    trial.enough()
    assert first.ends(20)[0] == second.ends(20)[0] == 0, first.said() + second.said()
    assert not mark.exists()
    return f"{attack.stdout.strip()}: nothing runs, the run finishes"


def port_held(trial: Trial) -> str:
    """`python -m http.server` holds the port; `parallel.timeout` is 15 s."""
    server = subprocess.Popen(
        [*trial.hosts[0].prefix, sys.executable, "-m", "http.server", "--bind", trial.hosts[0].address, str(PORT)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=trial.folder,
    )  # fmt: skip
    trial.cleanup.callback(server.wait)
    trial.cleanup.callback(server.kill)
    time.sleep(1.0)
    machines = [trial.launch(number, parallel={"timeout": 15.0}) for number in range(2)]
    ends = [machine.ends(30) for machine in machines]
    for machine, (code, _) in zip(machines, ends, strict=True):
        assert code == 2, machine.said()
        assert f"the program at {trial.place} is not a Drumline launcher" in machine.said(), machine.said()
    return f"both end within {max(seconds for _, seconds in ends):.0f} s with 2: not a Drumline launcher"


def different_secrets(trial: Trial) -> str:
    """The machines have different secrets."""
    first = trial.launch(0, parallel={"timeout": 15.0})
    second = trial.launch(1, env={"DRUMLINE_SECRET": "of another user, not of the trials"})
    code, seconds = second.ends(30)
    assert code == 2, second.said()
    for words in ("have different secrets", "drumline/secret", "DRUMLINE_SECRET"):
        assert words in second.said(), second.said()
    assert first.ends(30)[0] == 2
    assert "rejected for a different secret: 10.77.0.2" in first.said(), first.said()
    return f"the one that comes ends after {seconds:.0f} s with 2, naming both remedies; the other names its address"


def machine_lost(trial: Trial) -> str:
    """Everything on machine 1 is killed while the workers exchange gradients over gloo."""
    first, second = trial.both("exchanges")
    second.process.kill()
    code, seconds = first.ends(30)
    assert code == 1, first.said()
    assert "Traceback" not in first.said(), first.said()
    last = first.said().splitlines()[-1]
    assert re.fullmatch(r"machine 1, .+: lost: no message from its launcher for \d+ s", last), first.said()
    return f"one sentence after {seconds:.0f} s, no traceback"


TRIALS: tuple[Callable[[Trial], str], ...] = (
    cut_then_sigterm,
    cut_then_worker_killed,
    cut_without_restarts,
    cut_for_good,
    cut_and_returned,
    frozen,
    frozen_host,
    returned,
    skewed_clock,
    stranger,
    port_held,
    different_secrets,
    machine_lost,
)


def run_trial(
    trial: Callable[[Trial], str], hosts: tuple[Host, Host], folder: Path, hurry: bool = False
) -> str:
    """The outcome in words; `AssertionError` where it is not what it should be."""
    with ExitStack() as cleanup:
        cleanup.callback(mend, hosts[1])
        made = Trial(hosts, folder, hurry, cleanup)
        outcome = trial(made)
        made.nobody_left()
        return outcome


def _says(machine: Machine, words: str, seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while words not in machine.said():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main(names: list[str]) -> int:
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    failed = 0
    print("| trial | outcome |\n|---|---|", flush=True)
    with two_hosts() as hosts:
        for trial in TRIALS:
            if names and trial.__name__ not in names:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    outcome = run_trial(trial, hosts, Path(folder))
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failed += 1
                    outcome = f"**not as it should be**: {error}"
                    for path in sorted(Path(folder).glob("said-*")):
                        outcome += f"\n{path.name}:\n{path.read_text()}"
                    print(outcome, file=sys.stderr)
            assert trial.__doc__ is not None
            print(f"| {trial.__doc__} | {outcome} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

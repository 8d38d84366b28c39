"""A program that is forked from a warm process runs as in a new interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.runs.command import environment

pytestmark = pytest.mark.slow

PROBE = """
import atexit, json, os, signal, sys, threading
atexit.register(lambda: print("at exit", os.environ["MARK"]))
threading.Timer(0.05, print, ["a thread that is waited for"]).start()
if "raise" in sys.argv:
    raise ValueError("as asked")
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "path": sys.path, "mark": os.environ["MARK"],
    "main": [__name__, __spec__.name, sys.modules["__main__"].__spec__.name],
    "signals": [str(signal.getsignal(number)) for number in (1, 2, 13, 15)],
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3], "stdin": sys.stdin.read(),
    "unbuffered": sys.stdout.write_through, "rank": os.environ.get("RANK"),
}))
print("é", file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("words", [("a b", "3"), ("0",), ("raise",)], ids=str)
def test_a_forked_program_has_the_context_and_output_of_a_new_interpreter(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    command, env = [sys.executable, "-m", "probe", *words], environment(MARK="x")
    forked = warm.run(command, tmp_path, env, 60)
    new = subprocess.run(
        command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert forked.returncode == new.returncode
    assert forked.stdout == new.stdout
    assert forked.stderr.splitlines()[-1] == new.stderr.splitlines()[-1]


def test_a_variable_that_is_read_early_requires_a_new_interpreter() -> None:
    assert warm.as_the_server(environment(OMP_NUM_THREADS="3", RANK="1"))
    assert not warm.as_the_server(environment(MKL_CBWR="COMPATIBLE"))
    assert not warm.as_the_server(environment(PYTHONPATH="elsewhere"))
    assert not warm.as_the_server(environment(DRUMLINE_NATIVE="0"))


def test_a_fork_finds_everything_imported(tmp_path: Path) -> None:
    """Otherwise each program would import torch again, for seconds."""
    (tmp_path / "loaded.py").write_text(
        "import sys\nprint(*(name in sys.modules for name in sys.argv[1:]))\n"
    )
    done = warm.run([sys.executable, "-m", "loaded", *warm.IMPORTED], tmp_path, environment(), 60)
    assert done.stdout.split() == ["True"] * len(warm.IMPORTED)


def test_a_program_that_takes_too_long_is_killed_and_its_output_reported(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import os, time\nprint(os.fork() > 0)\ntime.sleep(600)\n")
    started = warm.Started([sys.executable, "-m", "endless"], tmp_path, environment())
    while "True" not in started.output()[0]:
        time.sleep(0.01)
    family = [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        started.finish(0.1)
    assert "True" in str(caught.value.output)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_workers_of_a_launcher_are_its_children_and_start_by_a_fork(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        "import subprocess, sys\n"
        "run = subprocess.Popen([sys.executable, '-P', '-m', 'drumline', '--version'], stdout=subprocess.PIPE,\n"
        "    start_new_session=True, env={'PATH': ''})\n"
        "print(run.communicate()[0].decode(), run.returncode)\n"
    )
    done = warm.run([sys.executable, "-m", "outer"], tmp_path, environment(), 60)
    assert done.stdout.startswith("drumline "), done.stderr
    assert done.stdout.split()[-1] == "0"

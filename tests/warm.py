"""Starts Python programs by forking a process that has torch imported, which saves the seconds of that import.

`Started` and `run` replace `subprocess.Popen` and `subprocess.run` in tests; `python -m tests.warm SOCKET` is the
server process that they fork. Drumline's launcher, when it runs there, forks its workers itself, so that they are its
children. A fork gets its own arguments, environment, folder, search path, standard streams, signals and open files.

It differs from a new interpreter in three ways: modules are already imported, the hash seed is shared, and
`/proc/PID` shows the command line and environment of the server. A program whose environment differs in a variable
that is read before it can be set (`READ_EARLY`) gets a new interpreter. Tests that kill processes, or that test the
start itself, use `subprocess`.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
READ_EARLY = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC", "GOMP", "KMP", "MKL", "OMP_WAIT", "OMP_PROC", "OMP_PLACES"),
    *("TORCH", "ATEN", "ONEDNN", "DNNL", "CUDA", "DRUMLINE_NATIVE"),
)
"""Beginnings of the names of variables that Python, torch or the native part read when they are loaded."""


# ---- for tests


class Started:
    """A program that was started; its output goes to files."""

    def __init__(self, argv: Sequence[str], cwd: Path | str, env: Mapping[str, str]) -> None:
        self.args = [*argv]
        self._folder = tempfile.TemporaryDirectory(prefix="drumline-warm-")
        for stream in ("1", "2"):
            Path(self._folder.name, stream).touch()
        request = {"argv": self.args, "cwd": str(cwd), "env": dict(env), "folder": self._folder.name}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self._ended = False

    def finish(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """Waits for its end. After `seconds`, kills it and its process group."""
        self._connection.settimeout(seconds)
        try:
            code = int(self._answers.readline())
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired(self.args, seconds, *self.output()) from None
        finally:
            self._answers.close()
            self._connection.close()
        self._ended = True
        out, err = self.output()
        self._folder.cleanup()
        return subprocess.CompletedProcess(self.args, code, out, err)

    def kill(self) -> None:
        """Kills it and its process group, unless it has ended."""
        if not self._ended:
            os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> tuple[str, str]:
        """What it has written so far to stdout and stderr."""
        return Path(self._folder.name, "1").read_text(), Path(self._folder.name, "2").read_text()


def run(
    argv: Sequence[str], cwd: Path | str, env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[str]:
    """Runs `python ...` to its end."""
    if not as_the_server(env):
        return subprocess.run(
            argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    return Started(argv, cwd, env).finish(seconds)


def as_the_server(env: Mapping[str, str]) -> bool:
    """Whether a program with this environment may be forked from a server with ours."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(READ_EARLY)}
    return (
        ours | _EXTRA == {name: value for name, value in env.items() if name.startswith(READ_EARLY)} | _EXTRA
    )


IMPORTED = (
    *(
        "drumline.distillation.run",
        "drumline.launch.launcher",
        "drumline.parallel.fsdp",
        "drumline.training.loop",
    ),
    *("tensorboard.summary", "torch._dynamo"),
)
"""What the server imports before it forks: nearly all that a run imports, in CPU-seconds."""
_EXTRA = {"PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_WAIT_POLICY": "passive"}
"""Of the server. A program may set them differently: they decide only how much is logged and how threads wait."""


@cache
def _server() -> str:
    folder = tempfile.TemporaryDirectory(prefix="drumline-warm-")
    path = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", path],
        cwd=ROOT,
        env={**os.environ, **_EXTRA},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return path


# ---- the server


def main() -> None:
    for module in IMPORTED:
        import_module(module)
    fork_drumline()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    os.write(1, b"ready\n")
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _serve(connection)
        connection.close()
        while _one_reaped():
            continue


def _one_reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _serve(connection: socket.socket) -> NoReturn:
    """Starts one program, sends its id, waits for it, and sends its exit code."""
    request = json.loads(connection.makefile().readline())
    program = os.fork()
    if not program:
        connection.close()
        os.setsid()
        streams = [os.open(os.devnull, os.O_RDONLY)]
        for name in ("1", "2"):
            streams.append(os.open(f"{request['folder']}/{name}", os.O_WRONLY | os.O_APPEND))
        _become(request["argv"], request["cwd"], request["env"], streams)
    connection.sendall(f"{program}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


_FORK_EXEC = subprocess._fork_exec  # type: ignore[attr-defined]
_PATH = sys.path[1:]
"""Where modules are found, less the folder of the program."""


def fork_drumline() -> None:
    """From now on, this process and its forks start `python -m drumline` by forking. Does nothing on a machine with a
    GPU: a launcher asks CUDA for the number of GPUs, and then CUDA does not work in its forks."""
    if not Path("/dev/nvidiactl").exists():
        subprocess._fork_exec = _fork_or_exec  # type: ignore[attr-defined]


def _fork_or_exec(*given: Any) -> int:
    """Replaces `_posixsubprocess.fork_exec`: forks Drumline's workers and executes everything else."""
    argv = [os.fsdecode(word) for word in given[0]]
    ours = argv[0] == sys.executable and argv[1:3] in (["-m", "drumline"], ["-P", "-m"])
    # Not with a function to be called before the start, nor from a thread: such forks were seen to abort.
    if not ours or given[-2] is not None or threading.current_thread() is not threading.main_thread():
        pid: int = _FORK_EXEC(*given)
        return pid
    (_, _, close, keep, cwd, env, stdin, _, _, stdout, _, stderr, _, failed, _, new_session, *_) = given
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        if new_session:
            os.setsid()
        os.close(failed)  # signals success
        variables = dict(os.environ)
        if env is not None:
            variables = dict(os.fsdecode(each).split("=", 1) for each in env)
        _become(argv, cwd and os.fsdecode(cwd), variables, [stdin, stdout, stderr], keep if close else None)
    return pid


def _become(
    argv: Sequence[str],
    cwd: str | None,
    env: Mapping[str, str],
    streams: Sequence[int],
    keep: Sequence[int] | None = (),
) -> NoReturn:
    """Runs `python [-P] -m MODULE ...` in this process, which is a fork, and ends it."""
    import torch

    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    high = [os.dup(stream) if stream != -1 else -1 for stream in streams]
    for target, stream in enumerate(high):
        if stream != -1:
            os.dup2(stream, target)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor > 2 and descriptor not in (keep or ()):
            try:
                if keep is not None or not os.get_inheritable(descriptor):
                    os.close(descriptor)
            except OSError:  # the one that listed them
                continue
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(number, "wb", 0, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors=errors,
            write_through=True,
        )
        for number, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    options = argv[1 : argv.index("-m")]
    module, arguments = argv[len(options) + 2], argv[len(options) + 3 :]
    sys.path[:] = _PATH if "-P" in options else [str(Path.cwd()), *_PATH]
    sys.argv = [module, *arguments]
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(code or 0)


if __name__ == "__main__":
    main()

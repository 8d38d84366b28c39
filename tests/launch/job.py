"""What the launcher's tests run as a worker: `python job.py FOLDER MODE [...]`.

Each worker leaves FOLDER/pid-RANK, so that a test can look for survivors. Imports torch only where a mode
talks to other workers, to start quickly.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from drumline.core import heartbeat
from drumline.core.environment import LAUNCHER, read_rank_info
from drumline.core.errors import UserError
from drumline.core.processes import die_with_parent
from drumline.launch.failure import record_failure
from drumline.launch.hang import answer_signal


def main() -> None:
    die_with_parent()
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    info = read_rank_info(os.environ)
    assert info is not None
    rank = info.rank
    write(folder / f"pid-{rank}", str(os.getpid()))
    try:
        globals()[mode](folder, rank)
    except Exception as error:
        shown = record_failure(error, rank)
        if not shown:
            print(f"rank {rank} printed: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def report(folder: Path, rank: int) -> None:
    """Reports the arguments, environment and descriptors of the worker."""
    # The listing's own descriptor is gone by the time it is looked at.
    links = {
        path.name: str(path.readlink()) for path in list(Path("/proc/self/fd").iterdir()) if path.exists()
    }
    facts = {
        "argv": sys.argv[3:],
        "env": dict(os.environ),
        "descriptors": links,
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "rank_info": vars(read_rank_info(os.environ)),
    }
    write(folder / f"report-{rank}", json.dumps(facts))


def raises(folder: Path, rank: int) -> None:
    """Rank 1 fails; the others ignore signals, like a process inside a collective."""
    _deaf_unless_rank_1(folder, rank)
    raise RuntimeError("the cat is on the keyboard")


def mistake(folder: Path, rank: int) -> None:
    """Every rank raises the same user error."""
    raise UserError("data.path = /nowhere does not exist", "give an existing folder")


def killed(folder: Path, rank: int) -> None:
    """Rank 1 dies like under the out-of-memory killer; the others notice a broken connection at once."""
    if rank == 1:
        all_ready(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    pid = int((folder / "pid-1").read_text()) if wait_for(folder / "pid-1") else 0
    ready(folder, rank)
    while is_running(pid):
        time.sleep(0.001)
    raise RuntimeError("[pair.cc:544] Connection closed by peer [127.0.0.1]:2222")


def late(folder: Path, rank: int) -> None:
    """Rank 0 is done at once; rank 1 fails after it."""
    if rank == 0:
        ready(folder, rank)
        return
    all_ready(folder)
    time.sleep(0.5)
    raise RuntimeError("the last mile is the longest")


def mute(folder: Path, rank: int) -> None:
    """Rank 1 ends with an exit code and no message."""
    _deaf_unless_rank_1(folder, rank)
    sys.exit(7)


def saves(folder: Path, rank: int) -> None:
    """Counts stop requests, takes a second to save after the first, exits with 0."""
    asked: list[float] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(time.monotonic()))
    ready(folder, rank)
    while not asked or time.monotonic() - asked[0] < 1.0:
        time.sleep(0.01)
    write(folder / f"saved-{rank}", str(len(asked)))
    sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)


def saves_or_fails(folder: Path, rank: int) -> None:
    """Asked to stop, rank 1 cannot save; the others can."""
    if rank != 1:
        saves(folder, rank)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    ready(folder, rank)
    while not asked:
        time.sleep(0.01)
    raise RuntimeError("no space left for the checkpoint")


def deaf(folder: Path, rank: int) -> None:
    """Ignores stop requests, and has a data loader of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = (
        "import time; from drumline.core.processes import die_with_parent; die_with_parent(); time.sleep(600)"
    )
    loader = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {LAUNCHER: str(os.getpid())})
    write(folder / f"pid-{rank}-loader", str(loader.pid))
    ready(folder, rank)
    time.sleep(600)


def sums(folder: Path, rank: int) -> None:
    """An all-reduce over gloo; reports the sum and the socket addresses that gloo used."""
    import psutil
    import torch
    import torch.distributed as dist

    from drumline.parallel.process_group import init_process_group

    info = read_rank_info(os.environ)
    assert info is not None
    init_process_group(info, torch.device("cpu"), "gloo", 60)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    links = [link for link in psutil.Process().net_connections("inet") if link.status == "ESTABLISHED"]
    peers = sorted({link.laddr.ip.removeprefix("::ffff:") for link in links})
    facts = {
        "sum": total.item(),
        "env": dict(os.environ),
        "rank_info": vars(info),
        "addresses": peers,
    }
    write(folder / f"report-{rank}", json.dumps(facts))
    if len(sys.argv) > 3 and sys.argv[3] == "fail" and rank == 1:
        raise RuntimeError("the other machine has a cat too")
    dist.all_reduce(total)
    dist.destroy_process_group()


def lost(folder: Path, rank: int) -> None:
    """`lost N HOW [SECONDS]`: in its first N starts rank 1 is lost while the others are deaf; then all
    workers finish, after SECONDS."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    write(folder / f"start-{start}-{rank}", str(time.time()))
    if start >= int(sys.argv[3]):
        launch = [os.environ["DRUMLINE_LAUNCH_ID"], os.environ["DRUMLINE_GENERATION"]]
        write(folder / f"report-{rank}", json.dumps({"start": start, "launch": launch}))
        time.sleep(float(sys.argv[5]) if len(sys.argv) > 5 else 0)
        return
    _deaf_unless_rank_1(folder, rank)
    child = subprocess.Popen(["sleep", "600"])  # knows nothing of us
    write(folder / f"pid-{rank}-child-{start}", str(child.pid))
    if sys.argv[4] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the cat is back")


def hung(folder: Path, rank: int) -> None:
    """`hung HOW [deaf]`: at its first start rank 1 stops beating after five steps; the others wait after six. `deaf`:
    they ignore requests to stop, like a process that waits in a collective."""
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heartbeat.connect(os.environ)
    answer_signal(os.environ)
    heartbeat.enter(heartbeat.Phase.STARTING)
    last = 5 if rank == 1 else 6
    for step in range(last):
        time.sleep(0.02)
        heartbeat.beat(step + 1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ready(folder, rank)
        if rank == 1 and sys.argv[3] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        dream_of_sheep() if rank == 1 else time.sleep(600)


def dream_of_sheep() -> None:
    time.sleep(600)


def until_alone(folder: Path, rank: int) -> None:
    """Continues until it is the only process of the run."""
    heartbeat.connect(os.environ)
    ready(folder, rank)
    while os.environ["WORLD_SIZE"] != "1":
        time.sleep(0.02)
        heartbeat.beat(1)
    write(folder / "alone", os.environ["TORCHELASTIC_RESTART_COUNT"])


def steps(folder: Path, rank: int) -> None:
    """Takes steps until FOLDER/enough exists, and cannot be asked to stop, like one that waits in a collective."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    heartbeat.connect(os.environ)
    for step in itertools.count(1):
        heartbeat.beat(step)
        write(folder / f"step-{os.environ['DRUMLINE_GENERATION']}-{rank}", os.environ["WORLD_SIZE"])
        if (folder / "enough").exists():
            return
        time.sleep(0.05)


def exchanges(folder: Path, rank: int) -> None:
    """The same, with an all-reduce over gloo at each step."""
    import torch

    from drumline.parallel.process_group import init_process_group

    info = read_rank_info(os.environ)
    assert info is not None
    world = init_process_group(info, torch.device("cpu"), "gloo", 60)
    while True:
        world.all_reduce(torch.ones(1))
        write(folder / f"step-{os.environ['DRUMLINE_GENERATION']}-{rank}", os.environ["WORLD_SIZE"])
        time.sleep(0.02)


def listens(folder: Path, rank: int) -> None:
    """Joins a process group; reports the addresses at which this process and its launcher listen."""
    import psutil
    import torch

    from drumline.parallel.process_group import init_process_group

    info = read_rank_info(os.environ)
    assert info is not None
    world = init_process_group(info, torch.device("cpu"), "gloo", 60)
    world.barrier()
    found = {
        process: [
            link.laddr.ip
            for link in psutil.Process(process).net_connections("inet")
            if link.status == "LISTEN"
        ]
        for process in (os.getpid(), os.getppid())
    }
    addresses = sorted({ip for ips in found.values() for ip in ips})
    write(folder / f"report-{rank}", json.dumps({"addresses": addresses}))
    assert found[os.getppid()], "the launcher keeps the socket of the store"
    world.barrier()
    world.close()


def _deaf_unless_rank_1(folder: Path, rank: int) -> None:
    if rank != 1:
        deaf(folder, rank)
    all_ready(folder)


def ready(folder: Path, rank: int) -> None:
    """Reports that this worker is running, and in which start."""
    write(folder / f"ready-{rank}", os.environ["TORCHELASTIC_RESTART_COUNT"])


def all_ready(folder: Path) -> None:
    """Waits until every other worker is running in this start, not only in an earlier one."""
    for other in range(int(os.environ["WORLD_SIZE"])):
        if other != 1:
            assert wait_for(folder / f"ready-{other}", holding=os.environ["TORCHELASTIC_RESTART_COUNT"])


def wait_for(path: Path, seconds: float = 30, holding: str | None = None) -> bool:
    """Whether the file is there in time, with that text if one is given."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and (holding is None or path.read_text() == holding)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def write(path: Path, text: str) -> None:
    """Writes a file atomically: tests wait for these files to appear."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


if __name__ == "__main__":
    main()

"""One command however it is started; stopping, failing and cleaning up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.data.damage import build_damaged_set
from tests.launch.hosts import two_hosts, why_not
from tests.runs.command import (
    LOADED,
    TINY,
    begin,
    completed,
    drumline,
    environment,
    result,
    sha256,
    still_running,
    train,
    wait_until,
)

pytestmark = pytest.mark.slow

SHORT = (*TINY, "train.epochs=1")
SIX_EPOCHS = (*LOADED, "train.epochs=6")
"""30 steps."""


def family(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with image files for `SIX_EPOCHS`."""
    build_damaged_set(tmp_path / "photos", kinds=())
    return tmp_path


@pytest.fixture(scope="module")
def loaded_reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash that `SIX_EPOCHS` ends with on two processes."""
    folder = tmp_path_factory.mktemp("loaded")
    build_damaged_set(folder / "photos", kinds=())
    train(folder, "reference", "parallel.processes=2", recipe=SIX_EPOCHS)
    return sha256(folder, "reference")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash that two processes of one host end with."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder, "reference", "parallel.processes=2", recipe=SHORT)
    return sha256(folder, "reference")


def test_torchrun_gives_the_same_bits(reference: str, tmp_path: Path) -> None:
    words = [*SHORT, "run.name=x"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "drumline",
    ]
    done = completed([*command, "train", *words], tmp_path)
    assert result(done)["finished"]
    assert sha256(tmp_path, "x") == reference


def test_slurms_variables_give_the_same_bits(reference: str, tmp_path: Path) -> None:
    runs = [
        begin(
            "train",
            *SHORT,
            "run.name=x",
            folder=tmp_path,
            SLURM_PROCID=str(rank),
            SLURM_NTASKS="2",
            SLURM_LOCALID=str(rank),
            SLURM_NODEID="0",
            SLURM_NNODES="1",
            SLURM_TASKS_PER_NODE="2",
            SLURM_JOB_ID=str(os.getpid()),
            SLURM_STEP_ID="0",
            SLURM_JOB_NODELIST="localhost",
            SLURM_STEP_NODELIST="localhost",
        )
        for rank in (0, 1)
    ]
    outputs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert outputs[1][0] == ""
    assert sha256(tmp_path, "x") == reference


def test_two_hosts_give_the_same_bits_as_one(reference: str, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as hosts:
        runs = [
            subprocess.Popen(
                [
                    *host.prefix,
                    sys.executable,
                    "-m",
                    "drumline",
                    "train",
                    *SHORT,
                    "run.name=x",
                    "parallel.nodes=2",
                    "parallel.processes=1",
                    f"parallel.rendezvous={hosts[0].address}:29577",
                    f"run.dir={tmp_path / f'host{number}'}",
                ],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, host in enumerate(hosts)
        ]
        outputs = [run.communicate(timeout=180) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    for (_, said), host in zip(outputs, hosts, strict=True):
        assert f"network interface {host.interface} ({host.address})" in said
    written = [path.name for path in tmp_path.iterdir()]
    assert written == ["host0"]  # rank 0 alone writes; the other host needs no disk of its own
    (tmp_path / "host0").rename(tmp_path / "runs")
    assert sha256(tmp_path, "x") == reference


@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGTERM, 1)]
)
def test_a_stopped_run_saves_leaves_no_process_and_resumes_to_the_same_bits(
    number: signal.Signals, processes: int, loaded_reference: str, photos: Path
) -> None:
    here = f"parallel.processes={processes}"
    run = begin("train", *SIX_EPOCHS, "run.name=x", here, folder=photos)
    wait_until((photos / "runs/x/checkpoints/step-7").exists, run)
    children = family(run)
    assert len(children) >= 2 * processes  # for each trainer a loader and the server that forked it
    run.send_signal(number)
    out, said = run.communicate(timeout=60)
    stopped = '"finished": false' in out
    assert run.returncode == (128 + number if stopped else 0), said
    assert "Traceback" not in said
    assert still_running(children, 10) == []
    if stopped:
        assert re.search(rf"stopped: ({number.name}|on request) after step \d+ of", said), said
    again = drumline("train", *SIX_EPOCHS, "run.name=x", here, "checkpoint.resume=auto", folder=photos)
    assert result(again)["finished"]
    if processes == 2:
        assert sha256(photos, "x") == loaded_reference


def test_a_stop_signal_to_whole_process_groups_still_saves(photos: Path) -> None:
    """As systemd and some batch systems send it: loaders and their server get the signal too."""
    words = ("run.name=x", "parallel.processes=2", "train.epochs=500")
    run = begin("train", *SIX_EPOCHS, *words, folder=photos)
    wait_until((photos / "runs/x/checkpoints/step-7").exists, run)
    children = family(run)
    for group in {os.getpgid(child.pid) for child in children}:
        os.killpg(group, signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "stopped: on request after step" in said
    assert "Traceback" not in said
    assert still_running(children, 10) == []


BROKEN = """
import os
import torch
from torch import nn

class Broken(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head, self.calls = nn.Linear(64, classes), 0
    def forward(self, x):
        self.calls += 1
        if os.environ.get("RANK", "0") == "1" and self.calls == 5:
            raise RuntimeError("the fifth call broke")
        return self.head(x.mean(dim=1).flatten(1))

def network(classes):
    return Broken(classes)
"""


def test_an_error_on_one_rank_is_shown_once_with_its_rank_and_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    begun = time.monotonic()
    run = begin("train", *SHORT, "model.name=broken:network", "parallel.processes=3", folder=tmp_path)
    children: list[psutil.Process] = []
    while run.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = family(run) or children
        assert time.monotonic() - begun < 60
        time.sleep(0.1)
    _, said = run.communicate()
    assert run.returncode == 1
    assert said.count("RuntimeError: the fifth call broke") == 1
    assert "rank 1 failed" in said
    assert said.count("Traceback") == 1
    assert still_running(children, 10) == []


def test_a_user_error_found_by_the_workers_prints_one_message(tmp_path: Path) -> None:
    done = drumline("train", "data.batch=5000", "parallel.processes=2", "model.name=resnet8", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("the training set has only 1438 samples") == 1
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_no_process_outlives_a_killed_launcher(photos: Path) -> None:
    words = ("run.name=x", "parallel.processes=2", "train.epochs=500")
    run = begin("train", *SIX_EPOCHS, *words, folder=photos)
    wait_until((photos / "runs/x/checkpoints/step-7").exists, run)
    children = family(run)
    run.kill()
    assert len(children) >= 4  # two trainers and their loader workers
    assert still_running(children, 10) == []
    run.communicate()


def test_a_second_run_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    run = begin("train", *TINY, "run.name=x", "train.epochs=500", folder=tmp_path)
    wait_until((tmp_path / "runs/x/checkpoints/step-7").exists, run)
    second = drumline("train", *TINY, "run.name=x", "checkpoint.resume=auto", folder=tmp_path)
    run.terminate()
    run.communicate(timeout=60)
    assert second.returncode == 2
    assert "being written by another run" in second.stderr


VIEWS = """
import torch

class Views:
    def __init__(self, split):
        big = torch.arange(500 * 192).remainder(251).to(torch.uint8).view(500, 8, 8, 3)
        self.pieces = [big[i] for i in range(500)]
        self.images = torch.stack(self.pieces[:96])
        self.labels = torch.arange(96) % 5
        self.classes = tuple("abcde")

def factory(path, split):
    return Views(split)
"""


def test_custom_data_with_many_views_starts_under_a_low_descriptor_limit(tmp_path: Path) -> None:
    """Nothing of it travels through process start, so "bad value(s) in fds_to_keep" cannot come up."""
    (tmp_path / "mydata.py").write_text(VIEWS)
    words = ("data.source=mydata:factory", "model.name=resnet8", "data.batch=24", "train.steps=6")
    command = [sys.executable, "-m", "drumline", "train", *words, "data.workers=2", "parallel.processes=2"]
    done = completed(["bash", "-c", 'ulimit -Sn 96; exec "$@"', "bash", *command], tmp_path)
    assert result(done)["samples"] == 96


def test_a_run_may_have_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    found = train(tmp_path, "step-lr", "train.steps=3", "train.eval_every=0")
    assert sha256(tmp_path, "step-lr")
    scored = result(drumline("eval", "runs/step-lr", folder=tmp_path))
    assert scored["correct"] == found["correct"]

"""The findings of the doctor on simulated machines, and on this one."""

from __future__ import annotations

import io
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from drumline.cli import doctor
from drumline.cli.doctor import Finding, examine, render
from drumline.core import machine
from drumline.launch import network
from drumline.launch.network import Interface

GIB = 2**30


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without problems, whatever this one is like, and no slow self-test."""
    here = [Interface("lo", "127.0.0.1", True), Interface("eth0", "10.1.0.5", True)]
    monkeypatch.setattr(network, "interfaces", lambda: here)
    monkeypatch.setattr(network, "choose_interface", lambda wanted, host, machines=1: here[machines - 1])
    monkeypatch.setattr(machine, "descriptor_limits", lambda: (1024, 1048576))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=16 * GIB, free=100 * GIB))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *rest, **named: [(2, 1, 6, "", ("10.1.0.5", 0))])
    monkeypatch.setattr(doctor, "_self_test", lambda env: Finding("gloo test", "ok", "met"))
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.chdir(tmp_path)


def found(name: str) -> Finding:
    return {finding.name: finding for finding in examine()}[name]


def test_a_healthy_machine_has_no_errors(healthy: None, capsys: pytest.CaptureFixture[str]) -> None:
    findings = examine()
    assert {finding.status for finding in findings} == {"ok"}, findings
    assert not any(finding.fix for finding in findings)
    assert doctor.main([]) == 0
    output = capsys.readouterr().out
    assert output.endswith("no errors, no warnings: ready to train\n")
    for name in ("Python", "drumline", "torch", "GPU", "CPU cores", "memory", "shared memory", "open files"):
        assert name in output


def test_small_shared_memory_names_dockers_option(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: SimpleNamespace(total=GIB // 16 if path == "/dev/shm" else GIB, free=100 * GIB),
    )
    finding = found("shared memory")
    assert (finding.status, finding.value) == ("warn", "0.06 GiB in /dev/shm")
    assert "--shm-size" in finding.fix


def test_a_low_descriptor_limit_is_a_warning_only_when_it_cannot_be_raised(
    healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = found("open files")
    assert (finding.status, finding.value) == ("ok", "1024 now, 1048576 at most (a run raises it to 65536)")
    monkeypatch.setattr(machine, "descriptor_limits", lambda: (1024, 1024))
    finding = found("open files")
    assert finding.status == "warn"
    assert "ulimit" in finding.fix
    monkeypatch.setattr(machine, "descriptor_limits", lambda: (1024, -1))
    assert found("open files").status == "ok"


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("GLOO_SOCKET_IFNAME", "ib0", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", "fail"),
        ("NCCL_SOCKET_IFNAME", "ib0", "fail"),
    ],
)
def test_interface_variables_are_checked_against_what_exists(
    healthy: None, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, status: str
) -> None:
    monkeypatch.setenv(variable, value)
    finding = found(variable)
    assert finding.status == status
    assert ("lo, eth0" in finding.fix) == (status == "fail")


def test_a_failing_line_gives_exit_code_1(
    healthy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert doctor.main([]) == 1
    assert "1 error, no warnings: fix the errors before training" in capsys.readouterr().out


def test_a_host_name_that_does_not_resolve_or_takes_long_is_a_warning(
    healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 7.5])
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(clock))
        finding = doctor._host_name()
    assert finding.status == "warn"
    assert "after 7.5 s" in finding.value

    def fail(*rest: object, **named: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    finding = doctor._host_name()
    assert finding.status == "warn"
    assert "/etc/hosts" in finding.fix


def test_a_gpu_that_torch_cannot_use_is_a_warning(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("GPU") == Finding("GPU", "ok", "none: runs will use the CPU")
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "550.54.15")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found("GPU").status == "warn"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in found("torch").fix


def test_gpus_are_listed_with_memory_and_driver(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "550.54.15")
    assert found("GPU 1") == Finding("GPU 1", "ok", "NVIDIA H200, 140 GiB, driver 550.54.15")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert found("backends").status == "fail"


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert doctor._nvidia_driver(file) == ""
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (x)\nGCC version\n"
    )
    assert doctor._nvidia_driver(file) == "550.54.15"


def test_a_full_or_read_only_disk_is_found(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=16 * GIB, free=GIB // 8))
    assert found("disk").status == "fail"

    def refuse(*rest: object, **named: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    finding = found("writable")
    assert finding.status == "fail"
    assert "Read-only" in finding.value


def test_an_old_torch_fails(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert found("torch").status == "fail"


def test_fewer_cores_in_a_container_are_reported(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(doctor.psutil, "cpu_count", lambda: 64)
    assert found("CPU cores").value == "4 usable of 64"


def test_the_self_test_passes_on_this_machine_and_fails_on_a_missing_interface() -> None:
    env = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
    assert doctor._self_test(env).status == "ok"
    broken = doctor._self_test(env | {"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert broken.status == "fail"
    assert "GLOO_SOCKET_IFNAME" in broken.fix


def test_a_self_test_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SELF_TEST", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "SELF_TEST_SECONDS", 0.3)
    finding = doctor._self_test(dict(os.environ))
    assert finding.status == "fail"
    assert "within 0.3 s" in finding.value


def test_a_fix_is_below_its_line() -> None:
    output = io.StringIO()
    findings = [Finding("a", "ok", "fine [not markup]"), Finding("longer", "warn", "low", "raise it")]
    render(findings, Console(file=output, width=200))
    assert output.getvalue().splitlines() == [
        "ok   a       fine [not markup]",
        "warn longer  low",
        "             fix: raise it",
        "no errors, 1 warning: ready to train",
    ]


def test_models_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    registry = SimpleNamespace(model_names=lambda: ("resnet18", "vgg8"))
    monkeypatch.setitem(sys.modules, "drumline.models.registry", registry)  # type: ignore[arg-type]
    assert doctor.main(["--models"]) == 0
    assert capsys.readouterr().out == "resnet18\nvgg8\n"


def test_the_checks_leave_no_file_behind(healthy: None, tmp_path: Path) -> None:
    environment = dict(os.environ)
    examine()
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == environment

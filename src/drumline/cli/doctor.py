"""`drumline doctor`: check this machine as a run will use it: versions, GPUs, limits, network, disk.

Each line reports one finding as ok, warn or fail, and what to change if it is not ok. Limits are those of the
container or job, not of the hardware. Changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.text import Text

from drumline.cli.help import Command
from drumline.config.arguments import read_options
from drumline.core import machine
from drumline.core.errors import UserError
from drumline.launch import network

OPTIONAL = ("torchvision", "timm", "onnx", "onnxscript", "onnxruntime", "nvidia-ml-py")
GIB = 2**30
SELF_TEST_SECONDS = 60.0

SELF_TEST = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
meet, limit = f"tcp://{sys.argv[1]}", timedelta(seconds=20)
dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1, timeout=limit)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 1
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Options:
    """The options of `drumline doctor`."""

    models: bool = False
    """List the built-in models for model.name and stop."""


COMMAND = Command(
    name="doctor",
    usage="[--models]",
    about="""
        Check this machine: versions, GPUs, cores, memory, limits, network interfaces,
        transports. Each line is ok, warn or fail, with what to do; the last line counts
        errors and warnings. Exit code 1 if anything fails.
    """,
    options=Options,
    examples="""
  drumline doctor
  drumline doctor --models
""",
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    fix: str = ""


def main(argv: list[str]) -> int:
    """Prints the findings; returns 1 if something would stop a run."""
    if read_options(argv, Options, "doctor").models:
        from drumline.models.registry import model_names

        for name in model_names():
            print(name)
        return 0
    findings = examine()
    render(findings, Console(highlight=False, soft_wrap=True))
    return int(any(finding.status == "fail" for finding in findings))


def examine() -> list[Finding]:
    """All findings: software, compute, memory, network, disk."""
    findings: list[Finding] = []
    for check in (_software, _native, _gpus, _limits, _network, _distributed, _disk):
        findings.extend(check())
    return findings


def render(findings: list[Finding], console: Console) -> None:
    """One line each, with its fix below, and a summary."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        line = Text(f"{finding.status:<5}", style=styles[finding.status])
        line.append(f"{finding.name:<{width}}  {finding.value}", style="default")
        console.print(line)
        if finding.fix:
            console.print(Text(f"{'':<{width + 7}}fix: {finding.fix}"))
    counts = {status: sum(finding.status == status for finding in findings) for status in ("warn", "fail")}
    errors, warnings = (
        _counted(counts[status], noun) for status, noun in (("fail", "error"), ("warn", "warning"))
    )
    if counts["fail"]:
        console.print(f"{errors}, {warnings}: fix the errors before training")
    else:
        console.print(f"{errors}, {warnings}: ready to train")


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def _software() -> Iterator[Finding]:
    import torch

    yield Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")
    ours = _version("drumline")
    yield Finding("drumline", "ok", ours or "not installed, run from its source folder")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    if torch.version.cuda is None and torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 11):
        yield Finding("torch", "fail", f"{torch.__version__} ({build})", "install torch 2.11 or newer")
    elif torch.version.cuda is None and not torch.version.hip and _nvidia_driver():
        yield Finding(
            "torch",
            "warn",
            f"{torch.__version__} ({build})",
            "this machine has a GPU: install torch's CUDA build",
        )
    else:
        yield Finding("torch", "ok", f"{torch.__version__} ({build})")
    versions = {name: _version(name) for name in OPTIONAL}
    have = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lack = ", ".join(name for name, version in versions.items() if not version)
    yield Finding("optional", "ok", (have or "none") + (f" (not installed: {lack})" if lack else ""))


def _native() -> Iterator[Finding]:
    from drumline import native

    fix = "" if native.decodes_jpeg() else "JPEGs are decoded at half the speed; the pixels are the same"
    yield Finding("native code", "ok" if native.decodes_jpeg() else "warn", native.describe(), fix)


def _gpus() -> Iterator[Finding]:
    import torch

    driver = _nvidia_driver()
    if not torch.cuda.is_available():
        if torch.version.cuda and driver:
            yield Finding(
                "GPU", "warn", f"none that torch can use, although driver {driver} is loaded",
                "compare `nvidia-smi` with torch's CUDA version; in a container, start it with --gpus all",
            )  # fmt: skip
        else:
            yield Finding("GPU", "ok", "none: runs will use the CPU")
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}",
            "ok",
            f"{card.name}, {card.total_memory / GIB:.0f} GiB" + (f", driver {driver}" if driver else ""),
        )


def _limits() -> Iterator[Finding]:
    cores, fitted = machine.usable_cores(), psutil.cpu_count() or 1
    yield Finding("CPU cores", "ok", f"{cores} usable" + (f" of {fitted}" if fitted > cores else ""))
    memory, total = machine.usable_memory(), psutil.virtual_memory().total
    share = f" of {total / GIB:.1f} GiB" if memory < total else ""
    yield Finding(
        "memory",
        "ok",
        f"{memory / GIB:.1f} GiB{share}, {psutil.virtual_memory().available / GIB:.1f} GiB free",
    )
    if Path("/dev/shm").exists():
        shared = shutil.disk_usage("/dev/shm").total
        small = shared < GIB
        yield Finding(
            "shared memory", "warn" if small else "ok", f"{shared / GIB:.2f} GiB in /dev/shm",
            "loader processes pass batches through it: in Docker, start with --shm-size=8g" if small else "",
        )  # fmt: skip
    soft, hard = machine.descriptor_limits()
    reach = machine.DESCRIPTORS if hard < 0 else min(hard, machine.DESCRIPTORS)
    low = reach < 4096
    yield Finding(
        "open files", "warn" if low else "ok",
        f"{soft} now, {'no limit' if hard < 0 else hard} at most"
        + ("" if soft >= reach else f" (a run raises it to {reach})"),
        "raise the hard limit: `ulimit -Hn 65536`, or in Docker --ulimit nofile=65536" if low else "",
    )  # fmt: skip


def _network() -> Iterator[Finding]:
    found = [i for i in network.interfaces() if i.address]
    listing = ", ".join(f"{i.name} {i.address}" + ("" if i.up else " (down)") for i in found)
    yield Finding(
        "interfaces", "ok" if found else "fail", listing or "none", "" if found else "ip link set lo up"
    )
    yield _attempt("one machine", lambda: str(network.choose_interface("auto", None)), "fail")
    yield _attempt(
        "several machines", lambda: str(network.choose_interface("auto", None, machines=2)), "warn"
    )
    names = [i.name for i in network.interfaces()]
    yield from _interface_variables(os.environ, names)
    yield _host_name()
    yield _attempt("free port", lambda: f"{network.free_port('127.0.0.1')} on 127.0.0.1", "fail")


def _interface_variables(env: Mapping[str, str], names: list[str]) -> Iterator[Finding]:
    """Whether the interfaces that the user set for gloo and NCCL exist."""
    for variable, prefixes in (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True)):
        value = env.get(variable)
        if not value:
            continue
        if _selects(value, names, prefixes):
            yield Finding(variable, "ok", value)
        else:
            yield Finding(
                variable,
                "fail",
                f"{value}: no such interface here",
                f"unset it, or set one of {', '.join(names)}",
            )


def _selects(value: str, names: list[str], prefixes: bool) -> bool:
    """Whether a list of interfaces selects any that exists. NCCL accepts prefixes, `=` for exact names and `^` to
    exclude names; gloo accepts exact names."""
    if prefixes and value.startswith("^"):
        return any(not _selects(value[1:], [name], True) for name in names)
    exact = not prefixes or value.startswith("=")
    wanted = [part.split(":")[0] for part in value.lstrip("=").split(",") if part]
    return any(name == part or (not exact and name.startswith(part)) for part in wanted for name in names)


def _host_name() -> Finding:
    """torch resolves the machine's own name several times at start; a broken name service costs seconds."""
    name, begin = socket.gethostname(), time.monotonic()
    fix = f"add a line `127.0.1.1 {name}` to /etc/hosts"
    try:
        address = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)[0][4][0]
    except OSError as error:
        return Finding("host name", "warn", f"{name} does not resolve ({error.strerror})", fix)
    seconds = time.monotonic() - begin
    if seconds > 1:
        return Finding("host name", "warn", f"{name} is {address}, found after {seconds:.1f} s", fix)
    return Finding("host name", "ok", f"{name} is {address}")


def _distributed() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    available = {
        "NCCL": dist.is_nccl_available(),
        "Gloo": dist.is_gloo_available(),
        "MPI": dist.is_mpi_available(),
    }
    have = ", ".join(name for name, yes in available.items() if yes)
    needed = available["NCCL"] or not torch.cuda.is_available()
    yield Finding(
        "backends", "ok" if available["Gloo"] and needed else "fail", have or "none",
        "" if available["Gloo"] and needed else "install a torch build with Gloo, and NCCL for GPUs",
    )  # fmt: skip
    yield _self_test(dict(os.environ))


def _self_test(env: dict[str, str]) -> Finding:
    """A gloo group of one on the interface that a run would use, in its own process because it may hang."""
    try:
        interface = network.loopback()
    except UserError as error:
        return Finding("gloo test", "fail", error.what, error.fix)
    variables, _ = network.socket_variables(interface, env, forced=False)
    where = f"{interface.address}:{network.free_port(interface.address)}"
    begin = time.monotonic()
    try:
        subprocess.run(
            [sys.executable, "-c", SELF_TEST, where], env=env | variables, check=True, capture_output=True, text=True,
            timeout=SELF_TEST_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(
            "gloo test", "fail", f"no answer on {interface.name} within {SELF_TEST_SECONDS:g} s",
            "check firewall rules for loopback, and GLOO_SOCKET_IFNAME",
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return Finding(
            "gloo test",
            "fail",
            reason,
            "check GLOO_SOCKET_IFNAME, and that the installation of torch is complete",
        )
    return Finding(
        "gloo test",
        "ok",
        f"a group started on {interface.name} in {time.monotonic() - begin:.1f} s",
    )


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    status: Literal["ok", "warn", "fail"] = (
        "ok" if free >= 5 * GIB else "warn" if free >= GIB // 4 else "fail"
    )
    yield Finding(
        "disk", status, f"{free / GIB:.1f} GiB free in {here}",
        "" if status == "ok" else "free some space, or put runs elsewhere with --run.dir",
    )  # fmt: skip
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"drumline")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Finding("writable", "fail", f"{here}: {error.strerror}", "use a different folder, or --run.dir")
    else:
        yield Finding("writable", "ok", str(here))


def _attempt(name: str, check: Callable[[], str], otherwise: Literal["warn", "fail"]) -> Finding:
    """The result of `check`, or its `UserError` as a finding."""
    try:
        return Finding(name, "ok", check())
    except UserError as error:
        return Finding(name, otherwise, error.what, error.fix)


def _version(package: str) -> str:
    """The installed version; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvidia_driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of the loaded driver, or empty without one."""
    try:
        first = proc.read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[0].isdigit() and "." in word), "of unknown version")

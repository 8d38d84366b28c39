"""The facts that decide the bits of a run (settings, software, devices, threads, code), and how two runs differ.

Saved with the run and with every checkpoint. Promises: two processes with the same `software` run the same lines of
drumline and of the user's own models and sources, and the same versions of the libraries that decode images and
compute. To find that out, nothing is imported.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from drumline.config.arguments import named_code
from drumline.config.recipe import Recipe
from drumline.config.sources import LIBRARIES
from drumline.config.toml import differing_fields
from drumline.core.machine import host_name
from drumline.core.text import printable

STEERING = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables that decide which kernels CUDA's libraries choose."""
DECIDING = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "KMP_",
    "OMP_",
    "GOMP_",
    "CUBLAS",
    "CUDNN_",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_",
)
"""Prefixes of variables that decide which code numerical libraries choose, or in which order they add."""
HARMLESS = re.compile(
    r".*(VERBOSE|LOG|DISPLAY|AFFINITY|BLOCKTIME|SETTINGS|WARNINGS|DUPLICATE_LIB_OK|STACKSIZE|SPINCOUNT|JIT_(DUMP|PROFILE)).*"
    r"|(OMP|MKL)_NUM_THREADS|OMP_(WAIT_POLICY|PROC_BIND|PLACES)|MKL_(THREADING_LAYER|SERVICE_FORCE_INTEL)"
)
"""Those of them that change only speed or messages. The number of threads is recorded separately."""
PACKAGES = ("drumline", "torch", "numpy", "pillow", "safetensors")
COMPARED = ("drumline", "torch", "numpy", "pillow", "simplejpeg")
"""Packages whose versions all ranks of a run must share."""
IRRELEVANT_TO_BITS = (
    "run.dir",
    "run.name",
    "run.trackers",
    "data.workers",
    "data.pool",
    "data.decode",
    "data.strict",
    "data.bad_limit",
    "train.log_every",
    "parallel.timeout",
    "parallel.interface",
    "parallel.rendezvous",
    "parallel.node_rank",
)
OF_THE_WORLD = ("parallel.processes", "parallel.nodes", "parallel.layout", "parallel.backend")
"""Fields that do not change the bits in strict mode either."""
UNSET = "not set"
ENDINGS = (".py", ".c", ".h")
MOST_FILES = 5000
"""Largest number of files of a user's package that are read."""
OURS = Path(__file__).parents[1]


def describe_environment(device: torch.device, processes: int, backend: str, threads: int) -> dict[str, Any]:
    """The environment of a run, as plain values: everything that may change its bits."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": host_name(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "device": device_name(device),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "libraries": {name: os.environ.get(name) for name in STEERING} if cuda else None,
        "arithmetic": arithmetic(device),
        "processes": processes,
        "backend": backend,
        "threads": threads,
        "command": sys.argv,
    }


def arithmetic(device: torch.device, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The facts besides package versions that decide the bits of a computation on this device, by name. Call it
    after the run has set torch's flags."""
    facts = {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(DECIDING) and not HARMLESS.fullmatch(name)
    }
    facts |= {
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "torch build": str(torch.version.git_version)[:12],
    }
    if device.type != "cuda":
        libraries = re.findall(
            r"(Math Kernel Library Version \S+|MKL-DNN v\S+|BLAS_INFO=\w+)", torch.__config__.show()
        )
        return facts | {
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "oneDNN": str(torch.backends.mkldnn.enabled),
            "libraries": ", ".join(libraries),
            "libc": " ".join(platform.libc_ver()),
        }
    major, minor = torch.cuda.get_device_capability(device)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return facts | {
        "compute capability": f"{major}.{minor}",
        "driver": _driver(),
        "cuDNN": f"enabled {cudnn.enabled}, deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}, "
        f"TF32 {cudnn.allow_tf32}",
        "reduced precision": f"fp16 {matmul.allow_fp16_reduced_precision_reduction}, "
        f"bf16 {matmul.allow_bf16_reduced_precision_reduction}, TF32 {matmul.allow_tf32}",
    }


def _driver() -> str:
    """The version of NVIDIA's driver, from the kernel."""
    with suppress(OSError):
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
        return found[0] if found else ""
    return ""


def device_name(device: torch.device) -> str:
    """The name of a device. For a CPU it includes the model, which decides the code that libraries choose."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} ({torch.backends.cpu.get_cpu_capability()}) {model}".strip()


def software(recipe: Recipe) -> dict[str, str]:
    """Versions, and digests of code. All processes of a run must have the same."""
    found = {"Python": platform.python_version()} | {name: package_version(name) for name in COMPARED}
    named = (recipe.model.name, recipe.data.source, *recipe.distill.teacher)
    for library in LIBRARIES:
        if any(name.startswith(f"{library}/") for name in named):
            found[library] = package_version(library)
    found["drumline's source code"] = code_digest(OURS)
    for name in dict.fromkeys(name for names in named_code(recipe).values() for name in names):
        package = name.partition(":")[0].partition(".")[0]
        if package in (*COMPARED, *LIBRARIES):  # such as torch.optim:NAdam
            found[package] = package_version(package)
        else:
            found[f"the code of {name}"] = module_digest(name)
    return found


def package_version(name: str) -> str:
    """The installed version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def code_digest(path: Path) -> str:
    """The first digits of the SHA-256 of a file, or of the source files of a folder with their names."""
    digest = hashlib.sha256()
    for file in _sources(path):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def changed_settings(saved: str, current: str, strict: bool = False) -> list[str]:
    """The fields that can change the result and differ between two recipes, as `name: old -> new`."""
    irrelevant = IRRELEVANT_TO_BITS + (OF_THE_WORLD if strict else ())
    return [
        f"{name}: {old} -> {new}"
        for name, old, new in sorted(differing_fields(saved, current), key=lambda field: field[0])
        if name not in irrelevant and not name.startswith(("checkpoint.", "launch.", "guard."))
    ]


def changed_environment(saved: dict[str, Any], current: dict[str, Any], strict: bool = False) -> list[str]:
    """The facts that can change bits and differ between two environments, as `name: old -> new`."""
    names = ("device", "cuda", "cudnn", "libraries", "threads", *(() if strict else ("processes", "backend")))
    # Strict mode promises equal bits, which its own code decides.
    packages = ("torch", "pillow", *(("drumline", "numpy") if strict else ()))
    pairs = {name: (saved.get(name), current.get(name)) for name in names}
    pairs |= {name: (saved.get("packages", {}).get(name), current["packages"].get(name)) for name in packages}
    before, now = saved.get("arithmetic"), current.get("arithmetic")
    if isinstance(before, dict) and isinstance(now, dict):  # earlier versions did not record it
        pairs |= {name: (before.get(name, UNSET), now.get(name, UNSET)) for name in sorted({*before, *now})}
    return [
        f"{_plain(name)}: {_plain(old)} -> {_plain(new)}" for name, (old, new) in pairs.items() if old != new
    ]


def _sources(path: Path) -> list[Path]:
    """The source files of a folder, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(
        Path(folder, name) for folder, _, names in os.walk(path) for name in names if name.endswith(ENDINGS)
    )[:MOST_FILES]


def module_digest(name: str) -> str:
    """The digest of the package or file that `package.module:thing` names, and of the neighbours that it imports."""
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    try:
        spec = PathFinder.find_spec(top)
        if spec is None:
            return "missing"
        folders = sorted(spec.submodule_search_locations or ())
        paths = [Path(folder) for folder in folders] or ([Path(spec.origin)] if spec.origin else [])
        roots = dict.fromkeys(path.parent for path in paths)
        beside = [path for root in roots for path in _beside(root, module) if path not in paths]
        return " ".join(map(code_digest, [*paths, *beside]))
    except (ImportError, ValueError, OSError) as error:
        return f"unreadable ({type(error).__name__})"


def _beside(root: Path, module: str) -> list[Path]:
    """The files and packages in `root` that a module imports, directly or indirectly. Imports of installed libraries
    are not followed, because these have versions."""
    if root.name in ("site-packages", "dist-packages"):
        return []
    waiting, seen, tops = [module], set[Path](), set[str]()
    while waiting and len(seen) < MOST_FILES:
        parts = waiting.pop().split(".")
        for end in range(1, len(parts) + 1):  # importing a.b.c runs a, a.b and a.b.c
            file = _source(root, parts[:end])
            if file is None:
                break
            if file not in seen:
                seen.add(file)
                tops.add(parts[0])
                waiting += _imports(file, parts[:end] if file.name == "__init__.py" else parts[: end - 1])
    files = {top: Path(root, f"{top}.py") for top in sorted(tops)}
    return [file if file.is_file() else Path(root, top) for top, file in files.items()]


def _source(root: Path, parts: list[str]) -> Path | None:
    """The file of a module, or its folder if it has no file."""
    base = root.joinpath(*parts)
    candidates = (Path(f"{base}.py"), base / "__init__.py")
    return next((file for file in candidates if file.is_file()), base if base.is_dir() else None)


def _imports(file: Path, package: list[str]) -> list[str]:
    """The full names of the modules that a file imports. A file that cannot be parsed raises its own error when it is
    imported."""
    try:
        tree = ast.parse(file.read_bytes() if file.is_file() else b"")
    except (SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]  # a module, or something in one
    return names


def _plain(value: object) -> str:
    """A value from an untrusted manifest as short text without control characters."""
    return printable(str(value)[:100])

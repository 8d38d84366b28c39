"""The golden recipes: short runs whose every bit is stored in golden.json.

Everything here goes through the command line and the files of a run folder, so that modules may move and be renamed
while the bits stay. Runs of one process share this process; runs of several are started as a user starts them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import platform
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
INPUTS = HERE / "inputs"
GOLDEN = HERE / "golden.json"
STORED = HERE / "checkpoints"
"""Run folders of an earlier revision, as a kill after step 3 leaves them."""
CACHE = HERE / "cache"
"""A teacher's outputs, kept by an earlier revision."""
STORED_RUNS = ("single", "fsdp-sharded", "pipeline-gpipe", "distill-helpers")
STORED_STEP = "step-3"

BASE = (
    "run.device=cpu",
    "data.source=digits",
    "data.batch=24",
    "data.workers=0",
    "model.name=golden_own:tiny",
    "optim.lr=0.1",
    "optim.warmup_epochs=0",
    "train.steps=5",
    "train.log_every=1",
    "train.eval_every=0",
    "parallel.threads=1",
    "checkpoint.every_steps=3",
    "checkpoint.keep=9",
)
"""Checkpoints at steps 3 and 5; fingerprints after steps 1, 2, 3 and 5."""

MOVED = "optim.name=adamw optim.lr=0.004 optim.clip=0.5 train.ema=0.9"
"""Keeps state of every kind: two moments, an average, clipping."""
STAGED = f"parallel.layout=pipeline parallel.micro_batches=4 data.batch=46 {MOVED}"
"""46 samples make uneven micro-batches: 12, 12, 11, 11."""
STRICT = "run.strict=true run.shards=4 train.ema=0.9 data.mixup=0.2 model.name=golden_own:dropping"
WIDE = "distill.teacher=golden_own:wide distill.teacher_weights=wide.safetensors"

TRAIN = {
    # Layouts.
    "single": "model.name=golden_own:dropping train.label_smoothing=0.1 optim.nesterov=true optim.clip=1 "
    "optim.schedule=step optim.milestones=0.02,0.05 optim.warmup_epochs=0.02 train.eval_every=0.034",
    "single-resnet8": f"model.name=resnet8 train.accumulate=3 data.mixup=0.2 {MOVED} optim.decay_all=false",
    "dp": "parallel.layout=dp data.cutmix=1 optim.lr_scaling=sqrt",
    "ddp": f"parallel.processes=2 train.accumulate=2 train.sync_bn=true data.mixup=0.2 data.cutmix=1 {MOVED}",
    "fsdp": f"parallel.processes=2 parallel.layout=fsdp model.name=resnet8 train.gradient_checkpointing=true {MOVED}",
    "fsdp-sharded": "parallel.processes=2 parallel.layout=fsdp checkpoint.sharded=true train.accumulate=2 "
    "optim.name=lamb optim.lr=0.01 train.ema=0.9",
    "model": f"parallel.layout=model parallel.virtual=true parallel.stages=2 parallel.split=layer2 "
    f"train.precision=bf16 {MOVED}",
    "accumulated": f"train.accumulate=4 data.batch=46 {MOVED}",
    "pipeline-gpipe": f"{STAGED} parallel.processes=2 parallel.schedule=gpipe parallel.split=even",
    "pipeline-1f1b": f"{STAGED} parallel.virtual=true parallel.stages=3 parallel.split=layer1,layer3",
    "pipeline-interleaved": f"{STAGED} parallel.processes=2 parallel.schedule=interleaved parallel.split=even",
    "pipeline-virtual-interleaved": f"{STAGED} parallel.virtual=true parallel.stages=2 parallel.schedule=interleaved "
    "parallel.split=layer1,layer2,layer3 parallel.batchnorm=deferred model.name=golden_own:dropping",
    "data-x-pipeline": "parallel.processes=4 parallel.layout=pipeline parallel.stages=2 parallel.micro_batches=2 "
    "parallel.split=layer2 parallel.batchnorm=sync model.name=golden_own:dropping",
    "strict": STRICT,
    # Sources.
    "folder": "data.source=folder data.path=photos data.size=16 data.batch=6 data.workers=2 data.pool=threads "
    "data.randaugment=2,9 data.jitter=0.4,0.4,0.4,0.1 data.erasing=0.5 train.gradient_checkpointing=true "
    "model.name=resnet8",
    "tar": "data.source=tar data.path=photos.tar data.size=14 data.batch=6 data.workers=1 data.pool=processes "
    "data.interpolation=bicubic data.resize=pillow13 data.exif=apply optim.name=lars optim.trust=0.02",
    "packed": "data.source=packed data.path=packed data.size=12 data.batch=6 optim.name=lamb optim.lr=0.01 "
    "train.precision=bf16",
    "idx": "data.source=idx data.path=idx data.augment=shift optim.name=lars optim.lr=1",
    "cifar10": "data.source=cifar10 data.path=cifar10 data.size=16 data.batch=10 data.randaugment=1,12 data.cutmix=1",
    "cifar100": "data.source=cifar100 data.path=cifar100 data.size=8 data.batch=10 train.precision=bf16 "
    "train.label_smoothing=0.1",
    "npz": "data.source=npz data.path=arrays.npz data.holdout=0.25 data.batch=12 data.augment=shift-flip",
    "synthetic": "data.source=synthetic data.path=classes=5,size=12,samples=64 data.batch=16 "
    "model.name=cifar/shufflenet_v2 data.augment=crop-flip run.seed=3",
    "custom-arrays": "data.source=golden_own:Arrays data.batch=12 model.classes=6 model.weights=tiny.safetensors "
    "optim.schedule=constant data.size=10 data.mean=0.40588235294117647,0.4032892156862745,0.40445016339869283 "
    "data.std=0.22215327169449356,0.22098563471708652,0.222695654305018",  # the data's own, not the weights'
    "custom-files": "data.source=golden_own:Files data.path=photos data.size=12 data.batch=6 data.mean=0.5,0.4,0.3 "
    "data.std=0.2,0.2,0.3",
}
DISTILL = {
    "distill-live": f"{WIDE} distill.method=kd data.mixup=0.2 distill.teacher_precision=bf16",
    "distill-cached": f"{WIDE} distill.method=kd,srd distill.T=1 distill.cache=cache",
    "distill-helpers": f"{WIDE} distill.method=crd,vid distill.options=crd.K:64,crd.dim:8 {MOVED}",
    "distill-ddp": f"{WIDE} parallel.processes=2 distill.method=rkd,vid distill.a=1",
    "distill-ensemble": "distill.teacher=golden_own:wide,golden_own:tiny "
    "distill.teacher_weights=wide.safetensors,tiny.safetensors distill.ensemble=logits "
    "distill.shares=2,1 distill.method=dkd distill.teacher_layout=model distill.teacher_stages=2 "
    "parallel.virtual=true train.accumulate=2",
    "distill-stages": f"{WIDE} distill.method=factor distill.initial_epochs=0.05",
    "distill-pipeline": f"{WIDE} {STAGED} parallel.processes=2 parallel.split=layer2 distill.teacher_layout=pipeline "
    "distill.method=vid,kd",
}
ALSO = {
    "strict-ddp": ("strict", f"train {STRICT} parallel.processes=2"),
    "strict-again": ("strict", f"train {STRICT} parallel.threads=auto data.workers=2"),
}
"""Other commands that end with the bits of a golden run."""
EQUAL_STATES = ("accumulated", "pipeline-gpipe", "pipeline-1f1b", "pipeline-interleaved")
"""Runs whose final state is the same by promise, whatever golden.json says."""
COMMANDS = {name: f"train {words}" for name, words in TRAIN.items()} | {
    name: f"distill {words}" for name, words in DISTILL.items()
}


# ---- inputs


def lay_out(folder: Path) -> None:
    """Writes every input that the recipes name into a folder."""
    shutil.copytree(INPUTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(folder / "photos.tar", "w") as archive:
        for file in sorted((folder / "photos").glob("*/*/*")):
            archive.add(file, str(file.relative_to(folder / "photos")))
    for prefix, count in (("train", 48), ("t10k", 10)):
        (folder / "idx").mkdir(exist_ok=True)
        images, labels = _images(count, 12 * 12, 4, seed=count)
        header = struct.pack(">IIII", 0x803, count, 12, 12)
        (folder / f"idx/{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, count)
        (folder / f"idx/{prefix}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())
    (folder / "cifar10").mkdir()
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        images, labels = _images(10, 3072, 10, seed=100 + number)
        batch = {"data": images, "labels": labels.tolist()}
        (folder / "cifar10" / name).write_bytes(pickle.dumps(batch, protocol=2))
    names = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "cifar10/batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    (folder / "cifar100").mkdir()
    for number, name in enumerate(("train", "test")):
        images, labels = _images(100, 3072, 100, seed=200 + number)
        rows = np.concatenate(
            [np.zeros((100, 1), np.uint8), labels[:, None].astype(np.uint8), images], axis=1
        )
        (folder / f"cifar100/{name}.bin").write_bytes(rows.tobytes())
    (folder / "cifar100/fine_label_names.txt").write_text("\n".join(f"class {n}" for n in range(100)) + "\n")
    images, labels = _images(64, 10 * 10 * 3, 4, seed=300)
    np.savez(folder / "arrays.npz", images=images.reshape(64, 10, 10, 3), labels=labels)


def _images(count: int, size: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise over a brightness that encodes the class, from the bits of Philox, whose stream NumPy never changes."""
    generator = np.random.Philox(key=np.array([11, seed], dtype=np.uint64))
    noise = generator.random_raw(count * size // 8 + 1).astype("<u8").view(np.uint8)[: count * size]
    labels = np.arange(count) % classes
    levels = (labels * 160 // classes).astype(np.uint8)
    return (noise.reshape(count, size) // 3 + levels[:, None]).astype(np.uint8), labels


# ---- running


def run(folder: Path, name: str, command: str, *more: str) -> Path:
    """Runs `drumline train|distill ...` in a folder laid out by `lay_out`; returns the run folder."""
    verb, *words = command.split()
    drumline([verb, *BASE, f"run.name={name}", *words, *more], folder)
    return folder / "runs" / name


def drumline(argv: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs a command to its end; returns the JSON on the last line of its output."""
    if any(word.startswith("parallel.processes=") for word in argv):
        code, out, err = _in_processes(argv, folder)
    else:
        code, out, err = _here(argv, folder)
    assert code == 0, f"drumline {' '.join(argv)}\nended with {code}:\n{err[-3000:]}"
    result = json.loads(out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def _in_processes(argv: Sequence[str], folder: Path) -> tuple[int, str, str]:
    from tests.runs.command import drumline as started

    done: subprocess.CompletedProcess[str] = started(*argv, folder=folder)
    return done.returncode, done.stdout, done.stderr


def _here(argv: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """In this process, which is left as it was."""
    from drumline.cli import main

    out, err = io.StringIO(), io.StringIO()
    with (
        _as_it_was(),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        return main([*argv]), out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    random, path, environment = torch.get_rng_state(), [*sys.path], dict(os.environ)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(random)
        sys.path[:] = path
        sys.modules.pop("golden_own", None)
        os.environ.clear()
        os.environ.update(environment)


# ---- what a run leaves behind

OF_THE_CLOCK = ("time", "images_per_s", "data_share")
"""Fields of metrics.jsonl that differ from one run to the next."""


def state_of(run: Path) -> str:
    """The state's sha256 by `drumline verify`, which has found every checkpoint sound."""
    found = drumline(["verify", str(run)], run.parent)
    assert found["sound"], found
    return str(found["state_sha256"])


def observed(run: Path) -> dict[str, Any]:
    """All that golden.json stores about a run. The chain of fingerprints covers every line above it; the lines of
    whole groups show what differs first."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"state": state_of(run)}
    for file in sorted(run.rglob("fingerprints.txt")):
        stage = file.parent.relative_to(run).as_posix().replace(".", "", 1)
        found[f"fingerprints {stage}".strip()] = {
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "groups": [
                line for line in file.read_text().splitlines() if line.split()[1] == "chain" or " * " in line
            ],
        }
    for kind in ("train", "eval"):
        found[kind] = [
            {key: value for key, value in line.items() if key not in (*OF_THE_CLOCK, "kind")}
            for line in lines
            if line["kind"] == kind
        ]
    return found


# ---- golden.json


@dataclass(frozen=True)
class Golden:
    """What is stored, and where it was made."""

    made_with: dict[str, Any]
    runs: dict[str, dict[str, Any]]

    @staticmethod
    def read() -> Golden:
        stored = json.loads(GOLDEN.read_text())
        return Golden(stored["made_with"], stored["runs"])

    def write(self) -> None:
        runs = {name: self.runs[name] for name in sorted(self.runs)}
        GOLDEN.write_text(json.dumps({"made_with": self.made_with, "runs": runs}, indent=1) + "\n")


FLOATING = {
    *("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_fp16"),
}
"""The instruction sets by which kernels for floating-point numbers are selected. Others (`avx_vnni`,
`avx512_vp2intersect`, ...) compute with integers: two processors that differ only in them gave equal bits."""


def machine() -> dict[str, str]:
    """What decides the last bits of arithmetic on a CPU beside our own code."""
    facts = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    flags = sorted(FLOATING & {*facts.get("flags", "").split()})
    return {
        "torch": f"{torch.__version__} ({str(torch.version.git_version)[:12]})",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": f"{platform.machine()} {facts.get('vendor_id', 'unknown')}",
        "instructions": " ".join(flags),
        "libc": " ".join(platform.libc_ver()),
        "threads": "1",
    }

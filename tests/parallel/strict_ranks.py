"""Short strict runs on real processes over gloo; the hash of each one's final state.

As a program (`python -m tests.parallel.strict_ranks FOLDER`) it is one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Optim, Parallel, Recipe, Run, Train
from drumline.core.environment import read_rank_info
from drumline.distillation.run import distill
from drumline.parallel.process_group import init_world
from drumline.parallel.strict.ordered import OrderedSum, owned
from drumline.parallel.world import Pending, World
from drumline.state.verify import verify_run
from drumline.training.loop import train
from tests.distillation.ranks import write_teacher
from tests.launch.ranks import results_of

NETS = "tests.parallel.strict_nets"
STEPS = 4


def results(size: int) -> dict[str, Any]:
    """Case to hash, as rank 0 of a world of `size` found them."""
    return results_of("tests.parallel.strict_ranks", size, write_teacher, seconds=300)[0]


def base(name: str, shards: int = 4) -> Recipe:
    return Recipe(
        run=Run(seed=3, strict=True, shards=shards, name=name),
        data=Data(source="digits", batch=48, workers=0),
        model=Model(name="resnet8"),
        optim=Optim(lr=0.05),
        train=Train(steps=STEPS, eval_every=0),
        parallel=Parallel(threads=1),
        checkpoint=Checkpoint(every_epochs=0),
    )


def cases() -> dict[str, Recipe]:
    """Everything the mode promises to cover, in few runs."""
    plain = base("plain")
    dropping = replace(base("dropping"), model=Model(name=f"{NETS}:dropping"))
    taught = Distill(teacher=("resnet14",), a=0.5)
    return {
        "plain": plain,
        "eight shards": base("eight", 8),
        "six shards": base("six", 6),
        "mixed, averaged, clipped": replace(
            base("mixed"),
            data=replace(plain.data, mixup=0.3, cutmix=0.5, erasing=0.3, randaugment=(1, 5), workers=1),
            train=replace(plain.train, ema=0.9, label_smoothing=0.1),
            optim=Optim(name="adamw", lr=0.01, clip=0.1),
        ),
        "dropout and stochastic depth": dropping,
        "recomputed": replace(
            base("recomputed"),
            train=replace(plain.train, gradient_checkpointing=True),
            optim=Optim(name="lars"),
        ),
        "bf16, lamb": replace(
            base("bf16"), train=replace(plain.train, precision="bf16"), optim=Optim(name="lamb", lr=0.01)
        ),
        "sync_bn": replace(
            base("sync"), train=replace(plain.train, sync_bn=True), data=replace(plain.data, mixup=0.2)
        ),
        "sync_bn, dropping, eight": replace(
            base("sync8", 8), model=dropping.model, train=replace(plain.train, sync_bn=True, ema=0.5)
        ),
        "SyncBatchNorm of the user's": replace(base("synced"), model=Model(name=f"{NETS}:synced")),
        "cumulative statistics": replace(base("cumulative"), model=Model(name=f"{NETS}:cumulative")),
        "odd parts": replace(base("odd", 6), model=Model(name=f"{NETS}:odd")),
        "frozen norms": replace(base("frozen", 6), model=Model(name=f"{NETS}:frozen")),
        "kd and dkd": replace(base("kd"), distill=replace(taught, method=("dkd",))),
        "crd and rkd": replace(
            base("crd"), distill=replace(taught, method=("crd", "rkd"), options=("crd.K:64", "crd.dim:16"))
        ),
        "similarity with norms in helpers": replace(
            base("helped"), distill=replace(taught, method=("ofd", "similarity"))
        ),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    device = os.environ.get("STRICT_DEVICE", "cpu")
    world = init_world(read_rank_info(os.environ), device, "auto", 60)
    found: dict[str, Any] = {}
    for name, recipe in cases().items():
        here = replace(recipe, run=replace(recipe.run, dir=str(folder), device=device))  # type: ignore[arg-type]
        found[name] = state_of(here, world, folder / "teacher.safetensors")
    found["wire"] = wire(world)
    torch.save(found, folder / f"{world.rank}.pt")
    world.close()


class Counting(World):
    """Counts the numbers that leave this process."""

    sent: ClassVar[int] = 0

    def all_to_all_async(self, send: Tensor, rows: int, theirs: Sequence[int]) -> Pending:
        Counting.sent += send.numel() * (self.size - 1) // self.size
        return super().all_to_all_async(send, rows, theirs)

    def all_gather_async(self, piece: Tensor, into: Tensor) -> Pending:
        Counting.sent += piece.numel() * (self.size - 1)
        return super().all_gather_async(piece, into)


def wire(world: World) -> dict[str, Any]:
    """Gradients of several types in many small buckets, and what they cost on the wire."""
    torch.manual_seed(1)
    shapes = [(7, 3), (130,), (2, 3, 5, 5), (1,), (64, 9)]
    kinds = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    parameters = [
        torch.randn(shape).to(kind).requires_grad_() for shape, kind in zip(shapes, kinds, strict=True)
    ]
    parameters[2].data = parameters[2].data.to(memory_format=torch.channels_last)
    counting = Counting(**vars(world))
    summed = OrderedSum(parameters, counting, 6, bucket_bytes=600)
    for _ in range(2):
        Counting.sent = 0
        summed.begin()
        for shard in range(*owned(6, world.size)[world.rank]):
            summed.shard_begin(shard)
            torch.manual_seed(100 + shard)
            # The last parameter belongs to some shards only.
            used = parameters if shard % 2 else parameters[:-1]
            torch.stack([(p.double() * torch.randn(p.shape).double()).sum() for p in used]).sum().backward()
            summed.shard_end(shard)
        summed.finish()
    padded = sum(len(bucket.total) for bucket in summed._buckets)
    return {
        "gradients": [p.grad for p in parameters],
        "strides": [list(p.grad.stride()) for p in parameters if p.grad is not None],
        "buckets": len(summed._buckets),
        "sent": Counting.sent / max(1, 2 * padded * (world.size - 1) / world.size),
    }


def state_of(recipe: Recipe, world: World, teacher: Path) -> str:
    """Runs it; the hash of what it ended with."""
    if recipe.distill.teacher:
        distill(replace(recipe, distill=replace(recipe.distill, teacher_weights=(str(teacher),))), world)
    else:
        train(recipe, world)
    world.barrier()
    return verify_run(Path(recipe.run.dir) / recipe.run.name).state_sha256


if __name__ == "__main__":
    main(Path(sys.argv[1]))

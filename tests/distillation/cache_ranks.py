"""A small teacher with its set, and real processes over gloo that fill a cache with it.

As a program (`python -m tests.distillation.cache_ranks FOLDER`) it is one rank and writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.environment import read_rank_info
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch, make_batch
from drumline.data.feed.sampler import Request
from drumline.data.feed.transform import Transform
from drumline.data.sources import ArrayDataset, DatasetSpec, open_dataset
from drumline.distillation.cache import fill as fill_module
from drumline.distillation.cache import folder as cache_module
from drumline.distillation.cache.fill import Teacher, fill, spot_check
from drumline.distillation.cache.folder import Cache, Key, open_cache, sole_filler
from drumline.distillation.cache.rows import Rule
from drumline.distillation.cache.teacher import make_key
from drumline.parallel.process_group import init_world
from drumline.parallel.world import World
from tests.launch.ranks import run_ranks

SEED, CLASSES, WIDTH = 7, 10, 6
SMALL_BLOCK = 512
"""1,438 digits: three blocks of two chunks, the last chunk of 158."""
MEAN, STD = (0.5,), (0.25,)
VIEW = Transform(size=8, augment="shift")
FULL = Rule(CLASSES, "float32", pooled=WIDTH)
TOP = Rule(CLASSES, "bfloat16", top=3)


def digits() -> ArrayDataset:
    source = open_dataset(DatasetSpec("digits", "", "train"))
    assert isinstance(source, ArrayDataset)
    return source


def teacher(rule: Rule = FULL, seed: int = 0) -> Teacher:
    """A fixed net; every sample's output is its own."""
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Conv2d(1, WIDTH, 3), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten()).eval()
    head = nn.Linear(WIDTH, CLASSES).eval()

    def run(images: Tensor) -> tuple[Tensor, Tensor | None]:
        assert len(images) == fill_module.CHUNK
        pooled = body(images.permute(0, 3, 1, 2).float() / 255)
        logits = 5 * head(pooled)
        return logits.to(rule.numbers), pooled.to(rule.numbers) if rule.pooled else None

    return run


def feed(requests: Iterable[Request]) -> Generator[Batch, None, None]:
    source = digits()
    for request in requests:
        yield make_batch(source, VIEW, SEED, request).batch


def key(rule: Rule = FULL, **changed: Any) -> Key:
    chosen: dict[str, Any] = {
        "teacher": "convnet; sha256 0; fp32",
        "source": digits(),
        "transform": VIEW,
        "mean": MEAN,
        "std": STD,
        "seed": SEED,
        "rule": rule,
    }
    return make_key(**(chosen | changed))


def filled(
    folder: Path,
    world: World,
    epochs: range = range(2),
    rule: Rule = FULL,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Cache, bool]:
    """The cache at a folder, and whether it is whole after filling it."""
    opened = open_cache(folder, key(rule), world)
    return opened, fill(opened, epochs, teacher(rule), feed, world, stopping=stopping)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def results(size: int, folder: Path) -> list[dict[str, Any]]:
    """What every rank of a world of `size` found; they fill `folder`/cache."""
    run_ranks("tests.distillation.cache_ranks", size, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cache_module.BLOCK, fill_module.SYNC_EVERY, fill_module.VISIBLE_SECONDS = SMALL_BLOCK, 1, 0.5
    world = init_world(read_rank_info(os.environ), "cpu", "auto", 60)
    found: dict[str, Any] = {}
    # Only one rank gets a stop request, in the middle of its second block. All of them stop, then resume.
    asked = iter(range(100))
    last = world.rank == world.size - 1
    opened, found["stopped"] = filled(
        folder / "cache", world, range(4), stopping=lambda: last and next(asked) >= 3
    )
    found["after_stop"] = sum(len(opened.missing(epoch)) for epoch in range(4))
    world.barrier()
    opened, found["filled"] = filled(folder / "cache", world, range(4))
    found["checked"] = spot_check(opened, range(4), teacher(), feed, world)
    found["other_teacher"] = refusal(lambda: spot_check(opened, range(4), teacher(seed=1), feed, world))
    found["other_key"] = refusal(lambda: open_cache(folder / "cache", key(seed=8), world))
    own = folder / f"own-{world.rank}"
    found["unseen"] = refusal(lambda: open_cache(own if world.is_rank_zero else own / "none", key(), world))
    # Every rank has a sound folder with the right key, but not the same one.
    apart = open_cache(folder / "apart-0", key(), world)
    if not world.is_rank_zero:
        (folder / f"apart-{world.rank}").mkdir()
        (folder / f"apart-{world.rank}" / "manifest.json").write_bytes(
            (apart.folder / "manifest.json").read_bytes()
        )
        apart = Cache(folder / f"apart-{world.rank}", apart.key, apart.machine)
    found["apart"] = refusal(lambda: fill(apart, range(1), teacher(), feed, world))
    taken = open_cache(folder / "taken", key(), world)
    with sole_filler(taken.folder) if world.is_rank_zero else nullcontext():
        found["taken"] = refusal(lambda: fill(taken, range(1), teacher(), feed, world))
    found["free_again"] = fill(taken, range(1), teacher(), feed, world)
    (folder / f"{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    world.close()


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))

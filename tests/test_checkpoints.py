"""`drumline.checkpoints`: a user's own loop saves and resumes with the guarantees of a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from drumline import checkpoints
from drumline.core.errors import UserError
from tests import checkpoint_ranks
from tests.launch.ranks import run_ranks

Parts = tuple[nn.Module, torch.optim.Optimizer, Any]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, betas=(0.8, 0.9)),
}


def parts(name: str = "sgd") -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])


def train(built: Parts, first: int, last: int) -> None:
    model, optimizer, schedule = built
    for step in range(first, last):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        schedule.step()


def damage(checkpoint: Path, file: str = "model.safetensors") -> None:
    content = bytearray((checkpoint / file).read_bytes())
    content[-1] ^= 1
    (checkpoint / file).write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_loop_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    whole = parts(name)
    train(whole, 0, 8)
    first = parts(name)
    train(first, 0, 4)
    path = checkpoints.save(
        tmp_path / "out", step=4, model=first[0], optimizer=first[1], extra={"s": first[2].state_dict()}
    )
    assert path == tmp_path / "out" / "step-4" == checkpoints.latest(tmp_path / "out")
    again = parts(name)
    train(again, 20, 23)  # of other values, which loading replaces
    found = checkpoints.load(tmp_path / "out", model=again[0], optimizer=again[1])
    assert found is not None
    assert (found.path, found.step, found.skipped) == (path, 4, ())
    again[2].load_state_dict(found.extra["s"])
    train(again, 4, 8)
    for a, b in zip(whole[0].state_dict().values(), again[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert again[1].state_dict()["param_groups"] == whole[1].state_dict()["param_groups"]


def test_extra_is_restored_unchanged(tmp_path: Path) -> None:
    extra: dict[str, Any] = {
        "a": [1, 2.5, True, None, "ü"],
        "b": {1: (0.1, -math.inf), "*": {}},
        "c": Counter({3: 1}),
        "average": {"w": torch.arange(6).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
    }
    model = nn.Linear(2, 2)
    checkpoints.save(tmp_path, step=0, model=model, extra=extra)
    found = checkpoints.load(tmp_path, model=model)
    assert found is not None
    for name, tensor in extra.pop("average").items():
        assert torch.equal(found.extra["average"][name], tensor)
        assert found.extra["average"][name].dtype == tensor.dtype
    found.extra.pop("average")
    assert found.extra == extra
    assert type(found.extra["c"]) is Counter
    assert type(found.extra["b"][1]) is tuple


def test_the_previous_checkpoint_is_loaded_if_the_newest_is_damaged(tmp_path: Path) -> None:
    built = parts()
    for step in (1, 2):
        train(built, step - 1, step)
        checkpoints.save(tmp_path, step=step, model=built[0], optimizer=built[1])
    damage(tmp_path / "step-2")
    assert not checkpoints.verify(tmp_path).sound
    found = checkpoints.load(tmp_path, model=built[0], optimizer=built[1])
    assert found is not None
    assert found.step == 1
    assert "step-2/model.safetensors: its checksum does not match" in found.skipped[0]
    checkpoints.save(tmp_path, step=2, model=built[0])  # the damaged one is not in the way
    assert checkpoints.latest(tmp_path) == tmp_path / "step-2"
    assert (tmp_path / "step-2.aside").is_dir()
    for step in (1, 2):
        damage(tmp_path / f"step-{step}", "manifest.json")
    with pytest.raises(UserError, match=r"no checkpoint to use: .*step-2.*step-1"):
        checkpoints.load(tmp_path, model=built[0])


def test_loading_from_a_folder_without_checkpoints_returns_none(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    assert checkpoints.load(tmp_path / "nowhere", model=model) is None
    assert checkpoints.load(tmp_path, model=model) is None
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_the_newest_checkpoints_are_kept_and_an_earlier_step_replaces_later_ones(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for step in (10, 20, 30, 40):
        checkpoints.save(tmp_path, step=step, model=model, keep=2)
    assert names(tmp_path) == ["step-30", "step-40"]
    checkpoints.save(tmp_path, step=35, model=model, keep=2)
    assert names(tmp_path) == ["step-30", "step-35", "step-40.aside"]
    assert checkpoints.verify(tmp_path).sound
    assert checkpoints.verify(tmp_path / "step-30").step == 30


def test_a_state_that_does_not_fit_or_cannot_be_saved_is_named(tmp_path: Path) -> None:
    built = parts()
    train(built, 0, 1)
    checkpoints.save(tmp_path, step=1, model=built[0], optimizer=built[1])
    with pytest.raises(UserError, match=r"model.*2 names differ|names differ"):
        checkpoints.load(tmp_path, model=nn.Linear(3, 4))
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    with pytest.raises(UserError, match="the optimizer's state does not fit"):
        checkpoints.load(tmp_path, model=built[0], optimizer=other)
    for extra in ({"x": object()}, {"x": [lambda: 0]}, {"x": {(1, 2): 3}}):
        with pytest.raises(UserError, match=r"extra/x.* holds a (object|function|dict), which cannot"):
            checkpoints.save(tmp_path, step=2, model=built[0], extra=extra)
    with pytest.raises(UserError, match="step = -1"):
        checkpoints.save(tmp_path, step=-1, model=built[0])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        checkpoints.save(tmp_path / "file", step=1, model=built[0])
    assert checkpoints.verify(tmp_path).checkpoints == 1


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    built = parts()
    train(built, 0, 1)
    path = checkpoints.save(tmp_path, step=1, model=built[0], optimizer=built[1])
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    assert json.loads((path / "manifest.json").read_text())["environment"]["loop"].keys() == {
        "optimizer",
        "extra",
    }


@pytest.mark.slow
def test_ranks_save_one_checkpoint_and_load_the_same_one(tmp_path: Path) -> None:
    run_ranks("tests.checkpoint_ranks", 2, tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1] == checkpoint_ranks.EXPECTED

"""Ranks that were started differently, with other code or on other data do not train."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drumline.config.recipe import Model, Recipe, Run
from drumline.config.toml import dump_recipe
from drumline.core.errors import UserError
from drumline.data import identity
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.data.sources import Dataset, DatasetSpec, open_dataset
from drumline.launch.network import free_port
from drumline.parallel.world import World
from drumline.state.provenance import code_digest, software
from drumline.training import consistency
from drumline.training.consistency import check_data, check_recipes, check_software, different_fields
from tests.runs.command import TINY, environment
from tests.training.threads import on_ranks


def test_only_fields_that_must_agree_are_compared() -> None:
    one = Recipe()
    other = replace(
        one,
        run=replace(one.run, seed=5, dir="elsewhere"),
        data=replace(one.data, path="there", workers=3),
        checkpoint=replace(one.checkpoint, every_steps=9),
    )
    found = different_fields(dump_recipe(one), dump_recipe(other))
    assert found == [("run.seed", "5", "0"), ("checkpoint.every_steps", "9", "0")]


def photos(root: Path) -> Path:
    """Two classes, five images each, per split; the file's size does not depend on the pixels."""
    for split in ("train", "val"):
        for label, name in enumerate(("ant", "bee")):
            (root / split / name).mkdir(parents=True)
            for number in range(5):
                pixels = np.full((8, 8, 3), 40 * number + 10 * label, np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.bmp")
    return root


def opened(source: str, path: Path) -> Any:
    train, evaluation = (open_dataset(DatasetSpec(source, str(path), split)) for split in ("train", "eval"))  # type: ignore[arg-type]
    return SimpleNamespace(train=train, eval=evaluation)


def compared(*sets: Any) -> str:
    """What every rank says, the same on all; empty when they agree."""
    found = on_ranks(len(sets), lambda world: check_data(sets[world.rank], 0, world))
    assert len({str(each) for each in found}) == 1, found
    assert all(isinstance(each, dict | UserError) for each in found), found
    return found[0].what if isinstance(found[0], UserError) else ""


def changed(root: Path, change: Any) -> Path:
    other = root.with_name("other")
    shutil.copytree(root, other)
    change(other)
    return other


def invert(root: Path) -> None:
    for file in root.glob("*/*/*.bmp"):
        pixels = 255 - np.asarray(Image.open(file))
        Image.fromarray(pixels).save(file)


CHANGES = {
    "training set: sample 0 (": invert,
    "training set: sample 1 is 'ant/2.bmp', on rank 0 'ant/1.bmp'": lambda root: (
        root / "train/ant/1.bmp"
    ).rename(root / "train/ant/9.bmp"),
    "training set: 9 samples, not 10; sample 9 is only on rank 0: 'bee/4.bmp' with label 1": lambda root: (
        root / "train/bee/4.bmp"
    ).unlink(),
    "evaluation set: sample 0 is 'ant/0.bmp' of 3 bytes, on rank 0 'ant/0.bmp' of": lambda root: (
        root / "val/ant/0.bmp"
    ).write_bytes(b"abc"),
    "training set: sample 5 is 'zoo/0.bmp', on rank 0 'bee/0.bmp'": lambda root: [
        (root / split / "bee").rename(root / split / "zoo") for split in ("train", "val")
    ],
}


@pytest.mark.parametrize("said", CHANGES)
def test_other_files_on_a_rank_are_named(said: str, tmp_path: Path) -> None:
    here = photos(tmp_path / "photos")
    there = changed(here, CHANGES[said])
    found = compared(*(opened("folder", path) for path in (here, here, there)))
    assert "rank 2 on " in found
    assert "has different data from rank 0" in found
    assert said in found


@pytest.mark.parametrize("kind", ["tar", "packed", "arrays"])
def test_other_pixels_are_found_in_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    def made(root: Path) -> Any:
        if kind == "packed":
            pack_set(
                "folder", str(root), root.with_suffix(".packed"), PackOptions(), 1, False, lambda said: None
            )
            return opened("packed", root.with_suffix(".packed"))
        if kind == "arrays":
            images = np.stack([np.asarray(Image.open(file)) for file in sorted(root.glob("train/*/*"))])
            labels = np.repeat([0, 1], 5)
            np.savez(root.with_suffix(".npz"), x_train=images, y_train=labels, x_test=images, y_test=labels)
            return opened("npz", root.with_suffix(".npz"))
        with tarfile.open(root.with_suffix(".tar"), "w") as archive:
            archive.add(root, arcname="photos")
        return opened("tar", root.with_suffix(".tar"))

    here = photos(tmp_path / "photos")
    there = changed(here, invert)
    same = shutil.copytree(here, tmp_path / "elsewhere" / "copy")
    one, other, copy = made(here), made(there), made(Path(same))
    assert compared(one, copy) == ""
    assert "rank 1 on " in (found := compared(one, other))
    assert "training set: sample 0 (" in found


def test_large_sets_are_compared_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "BLOCK", 3)
    monkeypatch.setattr(consistency, "BLOCK", 3)
    monkeypatch.setattr(identity, "CONTENTS", 2)
    here = photos(tmp_path / "photos")
    there = changed(here, lambda root: (root / "train/bee/3.bmp").rename(root / "train/bee/8.bmp"))
    found = compared(opened("folder", here), opened("folder", there))
    assert "sample 8 is 'bee/4.bmp', on rank 0 'bee/3.bmp'" in found
    source: Dataset = opened("folder", here).train
    assert len(identity.block_digests(source)) == 4
    assert identity.content_digests(source, 1)[0] != identity.content_digests(source, 5)[0]


def test_another_recipe_is_named_on_every_rank() -> None:
    recipes = [Recipe(), Recipe(run=Run(seed=5))]
    found = on_ranks(2, lambda world: check_recipes(recipes[world.rank], world))
    assert all("has a different recipe from rank 0: run.seed is 5, not 0" in str(each) for each in found)


def test_other_code_and_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "drumline's source code"):
        odd = software(Recipe()) | {name: "other"}
        by_rank = [software(Recipe()), odd]
        recipes = [Recipe(run=Run(seed=rank)) for rank in (0, 1)]
        monkeypatch.setattr(consistency, "software", lambda recipe, by_rank=by_rank: by_rank[recipe.run.seed])
        found = on_ranks(2, lambda world, recipes=recipes: check_software(recipes[world.rank], world))
        assert all(isinstance(each, UserError) for each in found)
        assert "rank 1 on " in found[0].what
        assert f"has different software from rank 0: {name} is other, not " in found[0].what


@pytest.mark.parametrize("strict", [False, True])
def test_another_processor_or_arithmetic_is_a_warning_and_in_strict_mode_an_error(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, here = consistency.describe_environment, threading.local()

    def described(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = known(*args, **kwargs) | {"device": f"processor {here.rank}"}
        variables = {"ONEDNN_MAX_CPU_ISA": "SSE41"} if here.rank else {}
        return found | {"arithmetic": found["arithmetic"] | variables}

    def check(world: World) -> list[str]:
        here.rank = world.rank
        return check_software(recipe, world)

    monkeypatch.setattr(consistency, "describe_environment", described)
    recipe = Recipe(run=Run(strict=strict))
    for found in on_ranks(2, check):
        said = found.what if strict else found[0]
        assert isinstance(found, UserError) is strict
        assert said.startswith("rank 1 on " if strict else "WARNING: rank 1 on ")
        assert "device: processor 0 -> processor 1" in said
        assert "ONEDNN_MAX_CPU_ISA: not set -> SSE41" in said


def test_code_is_that_of_the_users_package_and_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/nets.py", "alone.py"):
        (tmp_path / name).write_text("x = 1\n")
    recipe = Recipe(model=Model(name="mine.nets:small"), data=replace(Recipe().data, source="alone:load"))
    before = software(recipe)
    assert before == software(recipe)
    (tmp_path / "mine" / "helpers.py").write_text("")
    assert {name for name, value in software(recipe).items() if value != before[name]} == {
        "the code of mine.nets:small"
    }
    (tmp_path / "alone.py").write_text("x = 2\n")
    assert software(recipe)["the code of alone:load"] != before["the code of alone:load"]
    assert software(Recipe(model=Model(name="nowhere:net")))["the code of nowhere:net"] == "missing"
    assert "mine" not in sys.modules
    copy = shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    assert code_digest(Path(copy)) == code_digest(tmp_path / "mine")


@pytest.mark.slow
def test_ranks_with_other_data_end_with_one_message(tmp_path: Path) -> None:
    words = ["data.source=synthetic", *TINY[1:], "run.name=x", "parallel.timeout=60"]
    port = str(free_port("127.0.0.1"))
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "drumline", "train", *words, f"data.path=samples={1000 - 40 * rank}"],
            cwd=tmp_path,
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = "".join(run.communicate(timeout=120)[1] for run in runs)
    assert [run.returncode for run in runs] == [2, 2], said
    assert "has different data from rank 0: training set: 960 samples, not 1,000" in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("runs/*"))


def test_code_is_also_what_the_users_module_imports_from_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "parts").mkdir()
    (tmp_path / "net.py").write_text("import torch\nfrom helper import act\n")
    (tmp_path / "helper.py").write_text("import net, parts.blocks as blocks\n")  # and back, in a circle
    (tmp_path / "parts/blocks.py").write_text("act = 1\n")
    (tmp_path / "other.py").write_text("")

    def digest() -> str:
        return software(Recipe(model=Model(name="net:net")))["the code of net:net"]

    digests = [digest()]
    (tmp_path / "parts/blocks.py").write_text("act = 2\n")
    digests.append(digest())
    (tmp_path / "helper.py").write_text("import net, parts.blocks\n")
    digests.append(digest())
    assert len(set(digests)) == 3
    (tmp_path / "other.py").write_text("not used by the model")
    assert digest() == digests[-1]


def test_code_that_a_package_imports_from_beside_it_is_found_through_relative_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine/deep").mkdir(parents=True)
    (tmp_path / "mine/__init__.py").write_text("")
    (tmp_path / "mine/nets.py").write_text("from .deep import blocks\n")
    (tmp_path / "mine/deep/__init__.py").write_text("from ..more import *\n")
    (tmp_path / "mine/more.py").write_text("import common\n")
    (tmp_path / "mine/unused.py").write_text("import other\n")
    for name in ("common.py", "other.py"):
        (tmp_path / name).write_text("x = 1\n")
    recipe = Recipe(model=Model(name="mine.nets:small"))
    digests = [software(recipe)["the code of mine.nets:small"]]
    for name in ("other.py", "common.py"):
        (tmp_path / name).write_text("x = 2\n")
        digests.append(software(recipe)["the code of mine.nets:small"])
    assert digests[0] == digests[1] != digests[2]

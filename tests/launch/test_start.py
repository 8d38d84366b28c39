"""Runs started from Python: in this process, through the launcher, from a thread, without a `__main__` file."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from drumline.config.fields import with_values
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.launch.start import start
from tests.launch.job import wait_for
from tests.training.test_model import RECORD, weights

SMALL = {
    "data.source": "digits",
    "data.batch": 48,
    "model.name": "resnet8",
    "train.epochs": 1,
    "parallel.threads": 1,
    "run.device": "cpu",
    "run.name": "x",
}
PRELUDE = f"""
import sys
from drumline.config.fields import with_values
from drumline.config.recipe import Recipe
from drumline.launch.start import start
recipe = with_values(Recipe(), {SMALL!r} | {{"run.dir": sys.argv[1]}})
"""


def small(folder: Path, **changes: object) -> Recipe:
    values = {name.replace("__", "."): value for name, value in changes.items()}
    return with_values(Recipe(), SMALL | {"run.dir": str(folder)} | values)


def python(program: str, folder: Path, *, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs a program from standard input, as a notebook does: there is no file of it."""
    return subprocess.run(
        [sys.executable, "-", str(folder)],
        input=PRELUDE + program,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=folder,
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_weights_decide_what_a_recipe_object_leaves_at_its_default(tmp_path: Path, processes: int) -> None:
    given = weights(tmp_path, replace(RECORD, size=8, mean=(0.5,) * 3, std=(0.5,) * 3))
    more = {"model__weights": given, "train__steps": 1}
    result = start(small(tmp_path, parallel__processes=processes, **more))
    data = tomllib.loads((Path(result["run"]) / "recipe.toml").read_text())["data"]
    assert (data["eval_crop"], data["interpolation"], data["size"]) == (0.9, "bicubic", 8)


@pytest.mark.slow
def test_one_process_and_two_give_the_metrics_as_a_dictionary(tmp_path: Path) -> None:
    """From a thread of this process, where Python allows no signal handlers."""
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(start, small(tmp_path / "one")).result()
        two = pool.submit(start, small(tmp_path / "two", parallel__processes=2)).result()
    for found, folder in ((one, "one"), (two, "two")):
        assert found["finished"]
        assert found["run"] == str(tmp_path / folder / "x")
        assert found["samples"] == 359
        assert (tmp_path / folder / "x/weights").is_dir()
    assert set(one) == set(two)


@pytest.mark.slow
def test_a_program_without_a_file_starts_two_processes_inside_a_running_event_loop(tmp_path: Path) -> None:
    program = (
        "import asyncio, json\n"
        "async def cell():\n"
        "    return start(with_values(recipe, {'parallel.processes': 2}))\n"
        "print(json.dumps(asyncio.run(cell())))\n"
        "print('goes on')\n"
    )
    done = python(program, tmp_path)
    assert done.returncode == 0, done.stderr
    result, after = done.stdout.splitlines()  # nothing else on stdout
    assert json.loads(result)["finished"]
    assert after == "goes on"
    assert "2 processes here" in done.stderr


@pytest.mark.slow
def test_a_script_without_a_guard_can_use_loader_processes(tmp_path: Path) -> None:
    for split, label, number in itertools.product(("train", "val"), "ab", range(8)):
        image = tmp_path / f"set/{split}/{label}/{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (30 * number, 0, 0)).save(image)
    loading = {
        "data.source": "folder",
        "data.path": "set",
        "data.batch": 8,
        "data.size": 32,
        "data.workers": 2,
        "data.pool": "processes",
    }
    (tmp_path / "script.py").write_text(
        PRELUDE + f"print('imported')\nprint(start(with_values(recipe, {loading!r}))['finished'])"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "imported\nTrue\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_of_the_callers_own_module_is_found_by_the_workers_too(
    tmp_path: Path, processes: int
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/mine.py").write_text(
        "from torch.nn import AdaptiveAvgPool2d, Flatten, Linear, Sequential\n"
        "def network(classes):\n"
        "    return Sequential(AdaptiveAvgPool2d(4), Flatten(), Linear(48, classes))\n"
    )
    program = (
        "sys.path.insert(0, 'lib')\n"
        f"own = {{'model.name': 'mine:network', 'parallel.processes': {processes}}}\n"
        "print(start(with_values(recipe, own))['finished'])\n"
    )
    done = python(program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_mistake_is_raised_before_anything_starts(tmp_path: Path) -> None:
    recipe = small(tmp_path)
    with pytest.raises(UserError, match=r"data\.batch = -1"):
        start(replace(recipe, data=replace(recipe.data, batch=-1)))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mistake_that_a_process_finds_is_raised_here(tmp_path: Path, processes: int) -> None:
    recipe = small(tmp_path, parallel__processes=processes, data__source="folder", data__path="nowhere")
    with pytest.raises(UserError, match="nowhere") as caught:
        start(recipe)
    assert caught.value.fix


@pytest.mark.slow
def test_an_interrupt_saves_and_returns(tmp_path: Path) -> None:
    program = (
        "result = start(with_values(recipe, {'parallel.processes': 2, 'train.epochs': 500, 'train.log_every': 1}))\n"
        "print(result['finished'], result['stopped_by'])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert wait_for(tmp_path / "x/metrics.jsonl", 60)
        time.sleep(0.5)
        os.kill(run.pid, signal.SIGINT)
        out, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, out) == (0, "False SIGINT\n"), said
    assert list((tmp_path / "x/checkpoints").glob("step-*"))

"""One strategy per layout: which one a run gets, what it promises, and that nothing else knows them."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

import drumline
from drumline.config.fields import choices, recipe_fields
from drumline.config.layouts import LAYOUTS, STRICT, Layout, layout_problems, resolve_layout
from drumline.config.recipe import Data, Parallel, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.parallel.data_parallel import BufferMean
from drumline.parallel.strategy import Strategy, create_strategy, uses_channels_last
from drumline.parallel.world import World, single_process
from drumline.state.verify import verify_run
from tests.training import ranks, tiny

ONE = single_process(tiny.CPU)
GPU = torch.device("cuda", 0)
FOUR = replace(ONE, size=4, local_size=4)


@pytest.mark.parametrize(
    ("wanted", "world", "expected"),
    [
        ("auto", ONE, "single"),
        ("auto", FOUR, "ddp"),
        ("single", ONE, "single"),
        ("dp", ONE, "dp"),
        ("ddp", ONE, "single"),
        ("ddp", FOUR, "ddp"),
    ],
)
def test_auto_takes_what_fits_the_world(wanted: str, world: World, expected: str) -> None:
    assert resolve_layout(wanted, world.size) == expected


@pytest.mark.parametrize("wanted", ["single", "dp"])
def test_a_layout_for_one_process_is_rejected_for_several(wanted: str) -> None:
    with pytest.raises(UserError, match=f"parallel.layout = {wanted} runs in one process, but 4"):
        resolve_layout(wanted, FOUR.size)


def test_a_new_layout_says_which_one_a_single_process_uses_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYOUTS, "replicas", replace(LAYOUTS["fsdp"], alone="single"))
    assert resolve_layout("replicas", ONE.size) == "single"
    assert resolve_layout("replicas", FOUR.size) == "replicas"


@pytest.mark.parametrize("name", [*LAYOUTS, "replicas"])
def test_strict_mode_rejects_every_layout_that_does_not_say_it_works_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYOUTS, "replicas", Layout("tests.parallel.toy:ToyStrategy", "in halves"))
    recipe = Recipe(parallel=Parallel(layout=name), run=Run(strict=True))
    found = [problem.field for problem in layout_problems(recipe, 1)]
    assert ("run.strict" in found) == (name not in ("single", "ddp"))


def test_a_single_layout_is_the_model_itself() -> None:
    model = tiny.plain()
    assert create_strategy(Recipe(), ONE).setup(model) is model
    dp = create_strategy(Recipe(parallel=Parallel(layout="dp")), ONE)
    assert isinstance(dp.setup(model), DataParallel)


def test_a_world_of_one_averages_nothing() -> None:
    model = tiny.normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    BufferMean(model, ONE)()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_averaging_is_one_message_written_in_place() -> None:
    class Echo(World):
        """Every other rank holds the same."""

        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            messages.append(tensor.numel())
            return tensor.mul_(self.size)

    messages: list[int] = []
    model = tiny.normed()
    model[1].running_mean.uniform_()
    before = model[1].running_mean.clone()
    places = [buffer.data_ptr() for buffer in model.buffers()]
    BufferMean(model, Echo(**vars(FOUR)))()
    assert messages == [12]
    assert torch.equal(model[1].running_mean, before)
    assert [buffer.data_ptr() for buffer in model.buffers()] == places


def test_a_model_without_buffers_sends_nothing() -> None:
    BufferMean(nn.Linear(2, 2), FOUR)()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_float_buffers_become_the_mean_and_counters_stay(size: int) -> None:
    mean = sum(range(1, size + 1)) / size
    for rank, result in enumerate(ranks.results(size)):
        found = result["buffers"]
        torch.testing.assert_close(found["own"], torch.tensor([mean, -2 * mean]))
        torch.testing.assert_close(found["wide"], torch.tensor([[(mean - 1) / 3]], dtype=torch.float64))
        assert found["counter"].item() == rank


def test_a_constant_table_keeps_its_values_on_any_world() -> None:
    """Ten ranks that add tenths of a table would not get the table back."""

    class Same(World):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            mine = tensor.clone()
            for _ in range(self.size - 1):
                tensor += mine
            return tensor

    for size in range(2, 33):
        module = nn.Module()
        module.register_buffer("table", torch.arange(2000).float())
        BufferMean(module, Same(**{**vars(ONE), "size": size}))()
        assert torch.equal(module.table, torch.arange(2000).float())


@pytest.mark.parametrize(("mixup", "least"), [(0.0, 12), (0.2, 24)])
def test_a_batch_smaller_than_its_micro_batches_is_rejected(mixup: float, least: int) -> None:
    train = Train(accumulate=3)
    create_strategy(Recipe(train=train, data=Data(batch=least, mixup=mixup)), FOUR)
    with pytest.raises(UserError, match=f"data.batch = {least - 1}: too small for 4 processes x 3") as caught:
        create_strategy(Recipe(train=train, data=Data(batch=least - 1, mixup=mixup)), FOUR)
    assert f"give at least {least}" in caught.value.fix


def test_the_memory_layout_is_a_gpu_matter() -> None:
    assert uses_channels_last(Recipe(), GPU)
    assert not uses_channels_last(Recipe(), tiny.CPU)
    assert not uses_channels_last(Recipe(train=Train(channels_last=False)), GPU)


SOURCE = Path(drumline.__file__).parent
STRATEGIES = {layout.strategy.partition(":")[0] for layout in (*LAYOUTS.values(), STRICT)}
UNAMBIGUOUS = {"dp", "ddp", "fsdp", "pipeline"}
"""Layouts whose names mean nothing else anywhere: `model` is also a file of a checkpoint."""
ELSEWHERE = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.relative_to(SOURCE).parts[0] not in ("parallel", "config")
]


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_outside_parallel_and_config_asks_for_a_layout(path: Path) -> None:
    """By its name, by comparing the field, or by its class. To look the field up in the table is fine."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            assert node.value not in UNAMBIGUOUS, f"line {node.lineno} names a layout"
        if isinstance(node, ast.Compare | ast.Match):
            asked = {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
            compared = [
                name
                for name in asked
                if name.endswith(("parallel.layout", "teacher_layout", "strategy.name"))
            ]
            assert not compared, f"line {node.lineno} compares a layout"
        if isinstance(node, ast.ImportFrom | ast.Import):
            imported = {node.module} if isinstance(node, ast.ImportFrom) else {n.name for n in node.names}
            assert not imported & STRATEGIES, f"line {node.lineno} imports a strategy"


def test_the_table_is_where_layouts_come_from() -> None:
    for name, layout in LAYOUTS.items():
        module, _, kind = layout.strategy.partition(":")
        strategy = getattr(import_module(module), kind)
        assert issubclass(strategy, Strategy)
        assert strategy.name == name
        assert layout.summary
    assert choices(recipe_fields()["parallel.layout"].hint) == ("auto", *LAYOUTS)


@pytest.mark.slow
def test_a_new_layout_is_one_class_and_one_line_of_the_table(tmp_path: Path) -> None:
    """Through the ordinary command, from the field to the certificate and the checkpoint."""
    program = (
        "import sys; from drumline.config.layouts import LAYOUTS, Layout\n"
        "LAYOUTS['toy'] = Layout('tests.parallel.toy:ToyStrategy', 'in halves', one_process=True)\n"
        "from drumline.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "train", "parallel.layout=toy"]
    command += ["model.name=resnet8", "data.batch=12", "train.accumulate=3", "train.steps=2", "run.name=toy"]
    command += [f"run.dir={tmp_path}", "run.device=cpu", "parallel.threads=1", "train.eval_every=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "toy" / "log.txt").read_text()
    assert "layout toy: 6 halves" in log
    assert "toy check passed: gradients match one process" in log
    assert verify_run(tmp_path / "toy").step == 2

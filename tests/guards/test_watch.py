"""`drumline.guard` in one process: what it does not change, what it saves for replay, which arguments it rejects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import drumline
from drumline.core.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.poison = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(x.log() if self.poison else x)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
        optimizer.step()

    return step


def made() -> tuple[Net, torch.optim.SGD, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.randn(6, 4)


def test_steps_have_the_same_bits_with_and_without_a_guard() -> None:
    states = []
    for guarded in (False, True):
        model, optimizer, x = made()
        step = step_of(model, optimizer, x)
        if guarded:
            drumline.guard(model, optimizer, every=1)
        for _ in range(5):
            step()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_bad_step_changes_nothing_and_saves_its_batch_for_replay(tmp_path: Path) -> None:
    model, optimizer, x = made()
    watch = drumline.guard(model, optimizer, folder=tmp_path / "replay")
    step = step_of(model, optimizer, x)
    step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.poison = True
    watch.batch([5, 6, 7, 8, 9, 10])
    with pytest.raises(
        drumline.GuardError, match=r"gradients of step 2 .* output of Linear 'last' is the first"
    ) as stopped:
        step()
    assert stopped.value.finding.where == "rank 0"
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]  # by forward
    assert int(model.norm.num_batches_tracked) == 2  # once, not again by the search
    kept = load_file(tmp_path / "replay" / "step-2-rank-0.safetensors")
    assert list(kept) == ["call0.input0"]
    assert torch.equal(kept["call0.input0"], x)
    notes = json.loads((tmp_path / "replay" / "step-2-rank-0.json").read_text())
    assert notes["ids"] == [5, 6, 7, 8, 9, 10]
    assert notes["step"] == 2


def test_with_warn_only_the_first_bad_step_is_searched_and_saved(tmp_path: Path) -> None:
    """Parameters are not finite after it, so every later step is bad: a file for each would fill the disk."""
    model, optimizer, x = made()
    step = step_of(model, optimizer, x)
    with drumline.guard(model, optimizer, action="warn", folder=tmp_path):
        step()
        model.poison = True
        for _ in range(4):
            step()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-2-rank-0.json",
        "step-2-rank-0.safetensors",
    ]


def test_a_parameter_that_is_not_finite_before_the_step_is_named(tmp_path: Path) -> None:
    model, optimizer, x = made()
    drumline.guard(model, optimizer, folder=tmp_path)
    with torch.no_grad():
        model.first.bias[0] = torch.nan
    with pytest.raises(drumline.GuardError, match=r"parameter 'first.bias' was not finite before this step"):
        step_of(model, optimizer, x)()


def test_a_parameter_that_is_never_reached_is_reported_after_20_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, _, x = made()
    model.spare = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drumline.guard(model, optimizer)
    step = step_of(model, optimizer, x)
    for _ in range(19):
        step()
    assert capsys.readouterr().err == ""
    step()
    assert "'spare.weight', 'spare.bias'" in capsys.readouterr().err


def test_the_batch_is_saved_for_the_second_of_two_optimizers_too(tmp_path: Path) -> None:
    model, _, x = made()
    first = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1)
    second = torch.optim.SGD(model.last.parameters(), lr=0.1)
    watch = drumline.guard(model, [first, second], folder=tmp_path)
    for number in (1, 2):
        watch.batch([number])
        F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
        if number == 2:
            assert model.last.bias.grad is not None
            model.last.bias.grad[0] = torch.inf
        first.step()
        if number == 1:
            second.step()
    with pytest.raises(drumline.GuardError, match=r"in backward, the gradient of 'last.bias' is the first"):
        second.step()
    assert torch.equal(load_file(tmp_path / "step-2-rank-0.safetensors")["call0.input0"], x)
    assert json.loads((tmp_path / "step-2-rank-0.json").read_text())["ids"] == [2]


def test_closing_leaves_no_hook_behind() -> None:
    model, optimizer, x = made()
    hook = sys.excepthook
    loader = DataLoader([1, 2, 3], sampler=DistributedSampler([1, 2, 3], num_replicas=1, rank=0))
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]
    with drumline.guard(model, optimizer, loader=loader):
        step_of(model, optimizer, x)()
        assert sorted(map(int, loader)) == [1, 2, 3]
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert sys.excepthook is hook
    assert loader.batch_sampler.sampler is sampler  # type: ignore[union-attr]


def test_a_compiled_model_keeps_whole_graphs_and_compiles_once() -> None:
    torch._dynamo.reset()
    model, _, x = made()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drumline.guard(compiled, optimizer)
    step = step_of(compiled, optimizer, x)
    step()
    frames = torch._dynamo.utils.counters["frames"]["total"]
    for _ in range(5):
        step()
    assert torch._dynamo.utils.counters["frames"]["total"] == frames
    torch._dynamo.reset()


def test_invalid_arguments_are_rejected() -> None:
    model, optimizer, _ = made()
    with pytest.raises(UserError, match="0 optimizers"):
        drumline.guard(model, [])
    with pytest.raises(UserError, match="action='shout'"):
        drumline.guard(model, optimizer, action="shout")  # type: ignore[arg-type]


def test_importing_drumline_does_not_import_torch() -> None:
    code = "import sys, drumline; assert 'torch' not in sys.modules; drumline.guard"
    subprocess.run([sys.executable, "-c", code], check=True)

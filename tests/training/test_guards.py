"""What the guards of a run decide, each from the smallest thing that shows it."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.core.precision import BF16, FP32
from drumline.data.feed.batch import Batch
from drumline.guards.checks.frozen import followers
from drumline.guards.checks.model import not_in_optimizer
from drumline.guards.checks.nonfinite import Origin
from drumline.guards.finding import Finding, LoopState
from drumline.guards.run.nonfinite import advice, nonfinite_finding, save_batch
from drumline.parallel.world import single_process
from drumline.training import guards
from drumline.training.guards import as_error, foreign_parameters
from drumline.training.loop import train
from drumline.training.replay import find_origin
from drumline.training.task import Classification, LossSums
from tests.training import tiny
from tests.training.test_step import everything, same_bits


def optimizer_findings(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Finding | None, Finding | None]:
    """Parameters that no optimizer holds, and tensors in the optimizer that are not in the model."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    loop = LoopState(0, tiny.CPU, dict(model.named_parameters()), held, {}, "step 3", True, False)
    return not_in_optimizer(loop), foreign_parameters(loop, optimizer)


def test_an_optimizer_with_all_trainable_parameters_gives_no_finding() -> None:
    model = tiny.plain()
    model[0].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert optimizer_findings(model, torch.optim.SGD(trained, lr=0.1)) == (None, None)


def test_a_frozen_parameter_in_the_optimizer_is_no_mistake() -> None:
    model = tiny.plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    assert optimizer_findings(model, optimizer) == (None, None)


def test_parameters_that_no_optimizer_holds_are_named() -> None:
    model = tiny.plain()
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    found, foreign = optimizer_findings(model, optimizer)
    assert foreign is None
    assert found is not None
    assert found.guard == "parameters"
    assert found.where == "the model's '0.weight', '0.bias', '6.weight', '6.bias'"
    assert found.since == "step 3"


def test_a_replaced_parameter_is_missing_from_the_optimizer_and_the_old_one_is_foreign() -> None:
    model = tiny.plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[6].weight = nn.Parameter(torch.zeros(tiny.CLASSES, 8))
    outside, foreign = optimizer_findings(model, optimizer)
    assert outside is not None
    assert foreign is not None
    assert (outside.guard, outside.where) == ("parameters", "the model's '6.weight'")
    assert foreign.guard == "foreign-parameter"
    assert foreign.where == "param_groups[0]['params'][4], shape (4, 8)"


def test_a_finding_reads_as_what_where_since_and_fix() -> None:
    error = as_error(Finding("drift", "it drifts", where="rank 1", since="step 2", fix="do not"))
    assert str(error) == (
        "guard [drift]: it drifts\n  where: rank 1\n  since: step 2\n"
        "  fix: do not; to continue anyway, use --guard.action warn"
    )


class Odd(nn.Module):
    """From its second call on, spoils one row forward, or all of it backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.by, self.back, self.calls = forward, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            x = torch.cat([x[:2], x[2:3] * self.by, x[3:]])
            x.register_hook(lambda gradient: gradient * self.back)
        return x


def examined(odd: nn.Module) -> Origin | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), odd, nn.Linear(6, tiny.CLASSES))
    trained = tiny.state(model)
    step = tiny.step_of(trained, 8)
    step(tiny.make(8, 1), 0, 0.1)
    before = everything(trained)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    batch = tiny.make(8)._replace(samples=torch.arange(8) * 10)
    found = find_origin(step, batch, 1)
    assert same_bits(everything(trained), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert not any(part._forward_hooks for part in model.modules())
    return found


def test_a_finite_step_has_no_origin() -> None:
    assert examined(Odd(1.0, 1.0)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_layer_with_a_non_finite_output_is_named_with_the_samples(value: float) -> None:
    assert examined(Odd(value, 1.0)) == Origin("output", "Odd '3'", (20,))


def test_a_teacher_whose_outputs_are_not_finite_is_blamed_instead_of_the_rate() -> None:
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), Odd(math.nan, 1.0), nn.Linear(6, tiny.CLASSES))
    teacher[2].calls = 1

    class Taught(Classification):
        teachers = (teacher,)

        def __call__(self, model: nn.Module, images: torch.Tensor, batch: Batch) -> LossSums:
            sums = super().__call__(model, images, batch)
            return sums._replace(loss=sums.loss + teacher(images).sum())

    step = tiny.step_of(tiny.state(tiny.plain()), 8)
    step.objective = Taught()
    found = find_origin(step, tiny.make(8), 0)
    assert found == Origin("teacher", "Odd '2'", (int(tiny.make(8).samples[2]),))
    assert "teacher_precision" in advice(FP32, found)


def test_a_parameter_that_was_not_finite_before_is_named_first() -> None:
    trained = tiny.state(tiny.plain())
    with torch.no_grad():
        trained.module[4].bias[0] = math.nan
    found = find_origin(tiny.step_of(trained, 8), tiny.make(8), 0)
    assert found is not None
    assert (found.kind, found.name) == ("parameter", "4.bias")


def test_a_gradient_that_becomes_infinite_in_backward_names_the_next_parameter() -> None:
    found = examined(Odd(1.0, math.inf))
    assert found is not None
    assert (found.kind, found.name) == ("gradient", "2.bias")


def test_the_whole_batch_is_saved_and_the_finding_names_the_file(tmp_path: Path) -> None:
    batch = tiny.make(20)
    saved = save_batch(tmp_path, batch, 5, 1, "drumline train x")
    (file,) = tmp_path.iterdir()
    kept = load_file(file)
    assert all(torch.equal(kept[name], tensor) for name, tensor in batch._asdict().items())
    found = nonfinite_finding(5, 1, 1, None, batch.samples, "gradient", f"{advice(FP32)}. {saved}")
    assert "precision" not in found.fix
    assert advice(BF16).endswith("or use train.precision=fp32")
    assert "repeated, the step is finite" in found.what
    assert found.where == "rank 1 of 1, samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert str(file) in found.fix


def test_a_batch_that_cannot_be_saved_does_not_hide_the_finding(tmp_path: Path) -> None:
    saved = save_batch(tmp_path / "gone", tiny.make(4), 5, 1, "drumline train x")
    assert saved == (
        "The batch could not be saved (No such file or directory); `drumline train x` repeats this step"
    )


class Breaking(nn.Module):
    """Gives NaN in its sixth training step: the rehearsal takes back what it counted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return torch.where(self.steps > 5, torch.nan, 1.0) * rows if self.training else rows


def breaking(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes), Breaking())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.name=tests.training.test_guards:breaking", "the gradient of step 6 is NaN or infinite"),
        (
            "model.name=tests.training.few_ranks:blocks optim.lr=1e6 optim.weight_decay=1e38",
            "is NaN or infinite after step 1: the update overflowed",
        ),
    ],
)
def test_a_non_finite_state_ends_a_run_before_it_is_evaluated_or_saved(
    tmp_path: Path, words: str, said: str
) -> None:
    recipe = Recipe.from_args(
        (
            "data.source=tests.training.few_ranks:load",
            "data.batch=8",
            "train.steps=6",
            "train.eval_every=0.125" if "decay" in words else "train.eval_every=0",
            "parallel.threads=1",
            "run.device=cpu",
            "run.name=auto",
            f"run.dir={tmp_path}",
            *words.split(),
        )
    )
    with pytest.raises(UserError) as ended:
        train(recipe, single_process(tiny.CPU))
    (folder,) = tmp_path.iterdir()
    assert said in ended.value.what
    assert '"kind": "eval' not in (folder / "metrics.jsonl").read_text()
    assert not list((folder / "checkpoints").glob("step-*"))


class Momentum(nn.Module):
    """A frozen copy that follows the trained layer, as in BYOL."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.online = nn.Linear(3, classes)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.mean((2, 3))
        if self.training:
            with torch.no_grad():
                for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    target.lerp_(online, 0.1)
        return self.online(rows) + 0.01 * self.target(rows)


def test_a_momentum_encoder_is_recognised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def counted(module: nn.Module, names: list[str]) -> set[str]:
        asked.append(names)
        return followers(module, names)

    monkeypatch.setattr(guards, "followers", counted)
    recipe = Recipe.from_args(
        (
            "data.source=tests.training.few_ranks:load",
            "model.name=tests.training.test_guards:Momentum",
            "data.batch=8",
            "train.steps=8",
            "train.eval_every=0",
            "guard.every=1",
            "parallel.threads=1",
            "run.device=cpu",
            f"run.dir={tmp_path}",
        )
    )
    train(recipe, single_process(tiny.CPU))
    assert asked == [["target.bias", "target.weight"]]

"""What a run of distillation does around its steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.distillation import task
from drumline.distillation.objective import Distillation
from drumline.distillation.run import _phase_recipe, distill
from drumline.distillation.selection import select_methods
from drumline.distillation.student import StudentWithHelpers, fit_networks
from drumline.distillation.teacher import LoadedTeacher, Teacher
from drumline.models import create_model
from drumline.parallel.world import single_process
from tests.distillation import ranks


def test_the_teacher_is_checked_after_the_first_step_and_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps to an epoch, five in all; the run begins again from none."""
    ranks.write_teacher(tmp_path)
    steps: list[int] = []
    taken: list[int] = []
    monkeypatch.setattr(Distillation, "at", lambda self, step: taken.append(step))
    monkeypatch.setattr(Distillation, "check", lambda self: steps.append(taken[-1] + 1))
    recipe = Recipe(
        run=Run(dir=str(tmp_path / "runs")),
        data=Data(source="digits", batch=700, workers=0),
        model=Model(name="tests.distillation.nets:alone"),
        train=Train(steps=5, eval_every=0),
        distill=Distill(teacher=("resnet14",), teacher_weights=(str(tmp_path / "teacher.safetensors"),)),
        checkpoint=Checkpoint(every_epochs=0),
    )
    distill(recipe, single_process(torch.device("cpu")))
    assert steps == [1, 2, 4]


def test_a_teacher_with_finite_weights_and_infinite_outputs_is_rejected_before_the_first_step(
    tmp_path: Path,
) -> None:
    ranks.write_teacher(tmp_path)
    weights = tmp_path / "teacher.safetensors"
    state = load_file(weights)
    first = next(name for name in state if name.endswith("conv.weight") or name == "conv1.weight")
    save_file(state | {first: torch.full_like(state[first], 1e38)}, weights)
    recipe = Recipe(
        run=Run(dir=str(tmp_path / "runs")),
        data=Data(source="digits", batch=700, workers=0),
        model=Model(name="tests.distillation.nets:alone"),
        train=Train(steps=1),
        distill=Distill(teacher=("resnet14",), teacher_weights=(str(weights),)),
    )
    with pytest.raises(UserError, match="outputs for 359 of 359 evaluation images are NaN or infinite"):
        distill(recipe, single_process(torch.device("cpu")))


def test_a_tap_that_no_method_reads_causes_a_warning() -> None:
    distill = Distill(
        method=("hint",), teacher_taps="stage1=layer1,stage2=layer2", student_taps="stage1=layer1"
    )
    recipe = Recipe(model=Model(name="resnet8"), distill=distill)
    teachers = [LoadedTeacher("resnet14", "teacher.safetensors", create_model("resnet14", classes=4))]
    student = create_model("resnet8", classes=4)
    networks = fit_networks(recipe, select_methods(distill), student, teachers, 16)
    assert networks.warnings == (
        "WARNING: distill.student_taps names stage1, which no method reads",
        "WARNING: distill.teacher_taps names stage1, which no method reads",
    )


def test_methods_on_features_occur_once_for_each_teacher() -> None:
    distill = Distill(method=("kd", "crd"), shares=(3.0, 1.0), teacher_weights=("a", "b"))
    teachers = [LoadedTeacher(name, name, create_model(name, classes=4)) for name in ("resnet14", "vgg8")]
    recipe, student = Recipe(model=Model(name="resnet8"), distill=distill), create_model("resnet8", classes=4)
    networks = fit_networks(recipe, select_methods(distill), student, teachers, 32)
    found = [(each.name, each.teacher, each.share, each.needs.teacher) for each in networks.methods]
    assert found == [
        ("kd", 0, 1.0, ()),
        ("crd_1", 0, 0.75, ("pooled@1",)),
        ("crd_2", 1, 0.25, ("pooled@2",)),
    ]
    module = networks.with_helpers(seed=0)
    assert set(module.helpers) == {"crd_1", "crd_2"}
    teacher = Teacher(
        [each.module for each in networks.teachers], torch.device("cpu"), [("pooled",)] * 2, shares=(3.0, 1.0)
    )
    images = torch.randn(2, 3, 32, 32)
    taps = teacher(images).taps
    outputs = module.eval()(images, taps).helper_outputs
    for number, each in enumerate(networks.teachers, start=1):
        features = each.module(images, taps=True)[1]["pooled"]
        assert torch.equal(taps[f"pooled@{number}"], features)
        assert torch.equal(
            outputs[f"crd_{number}"]["teacher"], module.helpers[f"crd_{number}"].teacher(features)
        )


def test_the_weights_of_an_initial_phase_are_broadcast_to_every_rank(tmp_path: Path) -> None:
    """torch below 2.13 does not give buffers to the other ranks when DDP begins."""
    student = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    module = StudentWithHelpers(student, {"factor": nn.BatchNorm2d(2)}, {})
    given: list[torch.Tensor] = []
    other = SimpleNamespace(is_rank_zero=False, broadcast=given.append)
    task._load_phases(module, student, (tmp_path,), other)  # type: ignore[arg-type]
    assert [t.data_ptr() for t in given] == [t.data_ptr() for t in module.state_dict().values()]
    given.clear()
    task._load_phases(module, student, (), other)  # type: ignore[arg-type]
    assert given == []


def test_an_initial_phase_has_its_own_rate_and_length() -> None:
    recipe = Recipe.from_args(["distill.method=factor", "optim.lr=0.2", "train.epochs=7"])
    phase = _phase_recipe(recipe, "factor", 3.0)
    assert (phase.optim.lr, phase.train.epochs, phase.run.name) == (0.2, 3.0, "initial-factor")
    recipe = replace(recipe, distill=replace(recipe.distill, initial_lr=0.01))
    assert _phase_recipe(recipe, "factor", 3.0).optim.lr == 0.01

"""A teacher of different classes serves the methods that read only features; those that read logits reject it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.data.classes import Classes, numbers
from drumline.distillation.methods import METHODS
from drumline.distillation.run import distill
from drumline.distillation.teacher import LoadedTeacher, load_teachers
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.model_record import ModelRecord
from drumline.state.weights import export_tensors
from tests.distillation.nets import wakened

WORLD = single_process(torch.device("cpu"))
DIGITS = Classes(numbers(10), named=False)
ON_LOGITS = sorted(name for name, method in METHODS.items() if method().reads_logits)
ON_FEATURES = sorted(set(METHODS) - set(ON_LOGITS))


def weights(folder: Path, outputs: int, names: tuple[str, ...] = (), head: bool = True) -> str:
    """Weights of a resnet14 of so many classes; with `names`, it records them."""
    torch.manual_seed(outputs)
    state = wakened(create_model("resnet14", classes=outputs)).state_dict()
    state = {key: tensor for key, tensor in state.items() if head or not key.startswith("fc.")}
    file = folder / f"teacher-{outputs}{len(names)}{head}.safetensors"
    if names:
        classes = Classes(names, named=True)
        record = ModelRecord(
            "resnet14", outputs, classes, 32, (0.5,) * 3, (0.5,) * 3, 1.0, "pillow12", "bilinear", "ignore"
        )
        export_tensors(state, file, record)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    return str(file)


def recipe(folder: Path, file: str, method: tuple[str, ...], **fields: object) -> Recipe:
    return Recipe(
        run=Run(dir=str(folder / "runs"), name="student"),
        data=Data(source="digits", batch=64, workers=0),
        model=Model(name="resnet8"),
        train=Train(steps=2, log_every=1),
        distill=Distill(teacher=("resnet14",), teacher_weights=(file,), method=method, **fields),  # type: ignore[arg-type]
        checkpoint=Checkpoint(every_epochs=0),
    )


def loaded(recipe: Recipe) -> LoadedTeacher:
    return load_teachers(recipe, DIGITS, WORLD)[0]


def test_the_methods_that_read_logits() -> None:
    assert {"kd", "dkd", "dist", "srd"} <= set(ON_LOGITS)
    assert {"attention", "similarity", "hint", "rkd", "crd", "vid", "pkt", "nst", "correlation"} <= set(
        ON_FEATURES
    )


@pytest.mark.parametrize("method", ON_FEATURES)
def test_a_method_on_features_takes_a_teacher_with_its_own_classes(tmp_path: Path, method: str) -> None:
    file = weights(tmp_path, 100)
    found = loaded(recipe(tmp_path, file, (method,)))
    assert found.foreign
    state = found.module.state_dict()
    assert state["fc.weight"].shape[0] == 100
    assert all(torch.equal(state[name], tensor) for name, tensor in load_file(file).items())
    assert "100 classes" in " ".join(found.messages)


@pytest.mark.parametrize("method", ON_LOGITS)
def test_a_method_on_logits_rejects_it_and_does_not_advise_a_student_of_its_classes(
    tmp_path: Path, method: str
) -> None:
    with pytest.raises(UserError) as caught:
        loaded(recipe(tmp_path, weights(tmp_path, 100), ("hint", method)))
    assert "different classes" in caught.value.what
    assert f"{method} reads the teacher's logits" in caught.value.fix
    assert "model.classes" not in caught.value.fix
    assert "hint" in caught.value.fix


def test_kd_beside_a_method_on_features_rejects_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kd reads the teacher's logits"):
        loaded(recipe(tmp_path, weights(tmp_path, 100), ("hint",), a=0.5))


def test_as_many_classes_under_different_names_are_different_classes(tmp_path: Path) -> None:
    named = Classes(tuple("abcdefghij"), named=True)
    file = weights(tmp_path, 10, names=tuple("klmnopqrst"))
    (found,) = load_teachers(recipe(tmp_path, file, ("hint",)), named, WORLD)
    assert found.foreign
    with pytest.raises(UserError, match="different classes"):
        load_teachers(recipe(tmp_path, file, ("kd",)), named, WORLD)


def test_a_teacher_of_the_datas_classes_is_not_foreign(tmp_path: Path) -> None:
    assert not loaded(recipe(tmp_path, weights(tmp_path, 10), ("hint",))).foreign


def test_weights_without_a_classifier_teach_by_features(tmp_path: Path) -> None:
    found = loaded(recipe(tmp_path, weights(tmp_path, 10, head=False), ("hint",)))
    assert found.foreign
    assert not found.module.get_parameter("fc.weight").any()  # not random: it is part of a cache's key
    with pytest.raises(UserError, match=r"fc\.weight"):
        loaded(recipe(tmp_path, weights(tmp_path, 10, head=False), ("kd",)))


def ran(
    folder: Path, chosen: Recipe, capsys: pytest.CaptureFixture[str]
) -> tuple[str, list[dict[str, object]]]:
    distill(chosen, WORLD)
    lines = (folder / "runs/student/metrics.jsonl").read_text().splitlines()
    return "".join(capsys.readouterr()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("cache", [False, True])
def test_a_run_with_such_a_teacher_reports_no_score_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: bool
) -> None:
    chosen = recipe(
        tmp_path, weights(tmp_path, 100), ("rkd",), cache=str(tmp_path / "cache") if cache else ""
    )
    output, lines = ran(tmp_path, chosen, capsys)
    assert "teacher_agreement" not in lines[0]
    assert "accuracy is not measured" in output
    assert "hardly better than chance" not in output
    trained = [line for line in lines if "rkd" in line]
    assert len(trained) == 2


def test_the_loss_is_that_of_the_same_features_under_any_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[list[object]] = []
    for outputs in (10, 100):
        folder = tmp_path / str(outputs)
        folder.mkdir()
        torch.manual_seed(7)
        base = wakened(create_model("resnet14", classes=10)).state_dict()
        base |= {
            key: base[key][:1].repeat(outputs, *[1] * (base[key].ndim - 1))
            for key in ("fc.weight", "fc.bias")
        }
        save_file({name: tensor.contiguous() for name, tensor in base.items()}, folder / "t.safetensors")
        _, lines = ran(folder, recipe(folder, str(folder / "t.safetensors"), ("attention", "hint")), capsys)
        found.append([line["loss"] for line in lines if "attention" in line])
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_teachers_of_different_classes_teach_together_by_their_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = (weights(tmp_path, 10), weights(tmp_path, 100))
    chosen = recipe(tmp_path, files[0], ("rkd",))
    both = replace(chosen.distill, teacher=("resnet14", "resnet14"), teacher_weights=files)
    _, lines = ran(tmp_path, replace(chosen, distill=both), capsys)
    assert len([line for line in lines if line.get("rkd_1") and line.get("rkd_2")]) == 2

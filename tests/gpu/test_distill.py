"""Every distillation method on a GPU, as whole runs: captured, twice, resumed and cached, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drumline.config.recipe import Checkpoint, Data, Distill, Model, Optim, Recipe, Run, Train
from drumline.distillation.methods import METHODS
from drumline.distillation.run import distill
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.checkpoint import checkpoints
from drumline.state.verify import verify_run
from tests.distillation.nets import wakened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BASE = Recipe(
    run=Run(device="cuda"),
    data=Data(source="digits", batch=64, size=32),
    model=Model(name="resnet8"),
    optim=Optim(lr=0.01),
    train=Train(steps=12, eval_every=0),
    checkpoint=Checkpoint(every_epochs=0),
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teacher") / "teacher.safetensors"
    torch.manual_seed(2)
    state = wakened(create_model("resnet14", classes=10)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return str(path)


def recipe_of(path: str, *methods: str, **changes: object) -> Recipe:
    options = ("crd.K:512",) if "crd" in methods else ()
    settings = Distill(
        teacher=("resnet14",),
        teacher_weights=(path,),
        method=methods,
        a=0.5,
        options=options,
        initial_epochs=0.25 if any(METHODS[name].initial_epochs for name in methods) else "auto",
    )
    return replace(BASE, distill=replace(settings, **changes))  # type: ignore[arg-type]


def sha256(recipe: Recipe, folder: Path, name: str, capture: str = "on") -> str:
    recipe = replace(recipe, run=replace(recipe.run, dir=str(folder), name=name))
    recipe = replace(recipe, train=replace(recipe.train, capture=capture))  # type: ignore[arg-type]
    result = distill(recipe, single_process(torch.device("cuda", 0)))
    assert recipe.distill.self_taught or result.metrics["agreement"] is not None
    return verify_run(folder / name).state_sha256


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_run_gives_the_same_bits_as_a_plain_one(method: str, teacher: str, tmp_path: Path) -> None:
    recipe = recipe_of(teacher, method)
    captured = sha256(recipe, tmp_path, "on")
    assert captured == sha256(recipe, tmp_path, "off", capture="off")
    assert captured == sha256(recipe, tmp_path, "again")


@pytest.mark.parametrize("methods", [("crd", "reviewkd"), ("dkd", "dist"), ("hint", "rkd")])
def test_two_methods_combine(methods: tuple[str, str], teacher: str, tmp_path: Path) -> None:
    recipe = recipe_of(teacher, *methods)
    assert sha256(recipe, tmp_path, "on") == sha256(recipe, tmp_path, "off", capture="off")


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_other_precisions_give_the_same_bits_captured_and_plain(
    precision: str, teacher: str, tmp_path: Path
) -> None:
    recipe = recipe_of(teacher, "similarity", "nst")
    recipe = replace(recipe, train=replace(recipe.train, precision=precision))  # type: ignore[arg-type]
    assert sha256(recipe, tmp_path, "on") == sha256(recipe, tmp_path, "off", capture="off")


def test_a_resumed_run_with_a_bank_gives_the_same_bits(teacher: str, tmp_path: Path) -> None:
    recipe = recipe_of(teacher, "crd")
    whole = sha256(replace(recipe, train=replace(recipe.train, steps=24)), tmp_path, "whole")
    saving = replace(
        recipe, train=replace(recipe.train, steps=24), checkpoint=Checkpoint(every_steps=7, every_epochs=0)
    )
    sha256(saving, tmp_path, "cut")
    for late in checkpoints(tmp_path / "cut" / "checkpoints")[1:]:
        late.rename(late.with_name(f"{late.name}.removed"))
    again = replace(saving, checkpoint=replace(saving.checkpoint, resume="auto"))
    assert sha256(again, tmp_path, "cut") == whole


@pytest.mark.parametrize("top", [0, 3])
def test_a_run_that_reads_a_cache_gives_the_bits_of_the_run_that_filled_it(
    top: int, teacher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(teacher, "crd", "dkd", cache=str(tmp_path / "cache"), cache_top=top)
    first = sha256(recipe, tmp_path, "first")
    assert "blocks filled now" in capfd.readouterr().err
    assert first == sha256(recipe, tmp_path, "second", capture="off")
    assert "blocks filled now" not in capfd.readouterr().err


def test_a_compiled_run_works(teacher: str, tmp_path: Path) -> None:
    recipe = recipe_of(teacher, "kd", "attention")
    sha256(replace(recipe, train=replace(recipe.train, compile=True)), tmp_path, "compiled")


def test_an_ensemble_works(teacher: str, tmp_path: Path) -> None:
    recipe = recipe_of(
        teacher,
        "dkd",
        teacher=("resnet14", "resnet14"),
        teacher_weights=(teacher, teacher),
        shares=(1.0, 3.0),
    )
    assert sha256(recipe, tmp_path, "on") == sha256(recipe, tmp_path, "off", capture="off")


@pytest.mark.parametrize("taught", ["ema", "peer"])
def test_a_teacher_that_is_trained_with_the_student_gives_the_same_bits_captured_and_plain(
    taught: str, tmp_path: Path
) -> None:
    recipe = replace(BASE, distill=Distill(teacher=(taught,)), train=replace(BASE.train, ema=0.9))
    captured = sha256(recipe, tmp_path, "on")
    assert captured == sha256(recipe, tmp_path, "off", capture="off")


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet26", "timm/mobilenetv3_small_050"])
def test_foreign_students_and_teachers_have_taps(name: str, teacher: str, tmp_path: Path) -> None:
    pytest.importorskip(name.partition("/")[0])
    foreign = create_model(name, classes=10)
    path = tmp_path / "foreign.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in foreign.state_dict().items()}, path)
    recipe = recipe_of(teacher, "attention", "crd", teacher=(name,), teacher_weights=(str(path),))
    recipe = replace(recipe, data=replace(recipe.data, size=64), model=Model(name=name))
    sha256(recipe, tmp_path, "run", capture="auto")

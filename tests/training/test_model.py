"""The model that a run starts from: which one weights decide, and how images are prepared for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.recipe import Data, Distill, Model, Optim, Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.model_record import ModelRecord
from drumline.state.weights import export_tensors
from drumline.training import model as model_module
from drumline.training.model import choose_head_rate, initial_model, resolve_model

CLASSES = Classes(("a", "b", "c"), True)
RECORD = ModelRecord(
    "resnet8", 3, CLASSES, 24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.9, "pillow13", "bicubic", "apply"
)


def weights(folder: Path, record: ModelRecord | None = RECORD, name: str = "resnet8") -> str:
    file = folder / "w.safetensors"
    export_tensors(create_model(name, 3).state_dict(), file, record)
    return str(file)


def resolved(path: str, name: str = "auto", **data: Any) -> dict[str, Any]:
    return resolve_model(Recipe(model=Model(name=name, weights=path), data=Data(**data)))


def test_without_weights_the_model_is_resnet18_or_the_one_that_is_named() -> None:
    assert resolve_model(Recipe()) == {"model.name": "resnet18"}
    assert resolve_model(Recipe(model=Model(name="resnet50"))) == {}
    spelled = Recipe(model=Model(name="ResNet50"), distill=Distill(teacher=("WRN-40-2",)))
    assert resolve_model(spelled) == {"model.name": "resnet50", "distill.teacher": ("wrn_40_2",)}


def test_weights_with_a_record_decide_the_model_and_how_images_are_prepared(tmp_path: Path) -> None:
    assert resolved(weights(tmp_path)) == {
        "model.name": "resnet8",
        "data.size": 24,
        "data.mean": (0.1, 0.2, 0.3),
        "data.std": (0.4, 0.5, 0.6),
        "data.eval_crop": 0.9,
        "data.resize": "pillow13",
        "data.interpolation": "bicubic",
        "data.exif": "apply",
    }


def test_what_the_recipe_says_itself_stays(tmp_path: Path) -> None:
    found = resolved(weights(tmp_path), "resnet8", size=16, mean=(0.5,), std=(0.5,))
    assert not {"model.name", "data.size", "data.mean", "data.std"} & set(found)
    assert found["data.interpolation"] == "bicubic"


def test_what_a_command_sets_stays_even_if_it_is_the_default(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(weights=weights(tmp_path)))
    found = resolve_model(recipe, given=("data.eval_crop", "data.size", "data.exif"))
    assert {"data.eval_crop", "data.exif"}.isdisjoint(found)
    assert found["data.size"] == 24, "auto leaves it to the weights"


def test_a_mean_belongs_to_its_standard_deviation(tmp_path: Path) -> None:
    for ours in ({"mean": (0.5,)}, {"std": (0.5,)}):
        assert {"data.mean", "data.std"}.isdisjoint(resolved(weights(tmp_path), **ours))


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    path = weights(tmp_path)
    found = {name.partition(".")[2]: value for name, value in resolved(path).items()}
    assert resolved(path, found.pop("name"), **found) == {}


def test_a_name_that_contradicts_the_record_is_an_error_with_both(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.name = resnet50, but .* holds weights of resnet8"):
        resolved(weights(tmp_path), "resnet50")
    path = weights(tmp_path, replace(RECORD, model="resnet18"))
    assert "model.name" not in resolved(path, "torchvision/resnet18")
    with pytest.raises(UserError, match=r"holds weights of resnet18"):
        resolved(path, "cifar/resnet18")


def test_code_that_a_record_names_is_not_chosen(tmp_path: Path) -> None:
    path = weights(tmp_path, replace(RECORD, model="own.nets:small"))
    with pytest.raises(UserError, match=r"own\.nets:small runs the code of own\.nets") as caught:
        resolved(path)
    assert "add model.name=own.nets:small" in caught.value.fix
    assert "model.name" not in resolved(path, "own.nets:small")


def test_weights_without_a_record_are_of_the_one_model_that_they_fit(tmp_path: Path) -> None:
    assert resolved(weights(tmp_path, None)) == {"model.name": "cifar/resnet8"}
    backbone = {key: each for key, each in create_model("resnet8").state_dict().items() if key[:3] != "fc."}
    torch.save(backbone, tmp_path / "nohead.pth")
    assert resolved(str(tmp_path / "nohead.pth")) == {"model.name": "cifar/resnet8"}
    torch.save({"a.weight": torch.zeros(2, 2), "b": torch.zeros(2)}, tmp_path / "odd.pth")
    with pytest.raises(UserError, match="does not name its model and fits no built-in model"):
        resolved(str(tmp_path / "odd.pth"))


def test_published_weights_decide_them_too() -> None:
    found = resolved("torchvision:resnet50")
    assert (found["model.name"], found["data.size"]) == ("resnet50", 224)
    assert found["data.eval_crop"] == 224 / 232


def test_a_published_file_is_found_once_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find it is to hash it."""
    found: list[str] = []

    def resolve(path: str, fields: object) -> Path:
        found.append(path)
        return Path("cached.pth")

    monkeypatch.setattr(model_module, "resolve_weights", resolve)
    shared = model_module.shared_weights("torchvision:resnet50", single_process(torch.device("cpu")))
    assert (shared, found) == (Path("cached.pth"), ["torchvision:resnet50"])


def test_other_images_than_the_weights_own_are_a_warning(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(name="resnet8", weights=weights(tmp_path)), data=Data(size=16, exif="apply"))
    _, messages = initial_model(recipe, CLASSES, single_process(torch.device("cpu")))
    assert messages[-1].startswith("WARNING: images are prepared differently from those of the weights:")
    assert "data.size: 24 -> 16" in messages[-1]
    assert "exif" not in messages[-1]


def test_weights_bring_the_arguments_of_their_model(tmp_path: Path) -> None:
    path = weights(tmp_path, replace(RECORD, args=("stem:imagenet",)))
    assert resolved(path)["model.args"] == ("stem:imagenet",)
    assert resolved(path, "resnet8")["model.args"] == ("stem:imagenet",)
    own = Recipe(model=Model(name="resnet8", weights=path, args=("stem:cifar",)))
    assert "model.args" not in resolve_model(own)


@pytest.mark.parametrize(
    ("names", "given", "rate", "why"),
    [
        (("c", "a", "b"), "auto", 1.0, "the classifier is kept"),
        (("a", "b", "d"), "auto", 3.0, "the classifier is new"),
        (("a", "b"), "auto", 3.0, "the classifier is new"),
        (("a", "b", "c"), 3.0, 3.0, ""),
        (("a", "b", "d"), 1.0, 1.0, ""),
    ],
)
def test_a_classifier_that_is_kept_learns_at_the_rate_of_the_rest(
    tmp_path: Path, names: tuple[str, ...], given: Any, rate: float, why: str
) -> None:
    model = Model(name="resnet8", weights=weights(tmp_path))
    recipe = Recipe(model=model, optim=Optim(head_lr=given))
    world = single_process(torch.device("cpu"))
    chosen, line = choose_head_rate(recipe, Classes(names, True), world)
    assert chosen.optim.head_lr == rate
    assert why in line
    assert bool(line) == bool(why)


def test_the_rate_of_a_classifier_without_a_record_depends_on_the_number_of_classes(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(name="resnet8", weights=weights(tmp_path, None)), optim=Optim(head_lr="auto"))
    world = single_process(torch.device("cpu"))
    for names, rate in ((("x", "y", "z"), 1.0), (("x", "y"), 3.0)):
        assert choose_head_rate(recipe, Classes(names, True), world)[0].optim.head_lr == rate
    scratch = replace(recipe, model=Model(name="resnet8"))
    assert choose_head_rate(scratch, CLASSES, world)[0].optim.head_lr == 1.0

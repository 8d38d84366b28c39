"""Names, published sizes, and the errors for names that cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import drumline.models
from drumline.core.errors import UserError
from drumline.models import registry
from drumline.models.registry import (
    CIFAR,
    IMAGENET,
    canonical_name,
    create_model,
    model_names,
    suggest_models,
)
from drumline.models.resnet import ResNet
from drumline.models.vgg import VGG, CifarVGG
from tests.models.quick import on_meta

TORCHVISION_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "wide_resnet50_2": 68_883_240,
    "vgg11": 132_863_336,
    "vgg11_bn": 132_868_840,
    "vgg13": 133_047_848,
    "vgg13_bn": 133_053_736,
    "vgg16": 138_357_544,
    "vgg16_bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19_bn": 143_678_248,
    "mobilenet_v2": 3_504_872,
}
CIFAR_MILLIONS = {
    "resnet8": 0.08,
    "resnet14": 0.18,
    "resnet20": 0.28,
    "resnet32": 0.47,
    "resnet56": 0.86,
    "resnet110": 1.74,
    "resnet8x4": 1.23,
    "resnet32x4": 7.43,
    "resnet50": 23.71,
    "wrn_16_1": 0.18,
    "wrn_16_2": 0.70,
    "wrn_40_1": 0.57,
    "wrn_40_2": 2.26,
    "vgg8": 3.97,
    "vgg13": 9.46,
    "mobilenet_v2_half": 0.81,
    "shufflenet_v1": 0.95,
    "shufflenet_v2": 1.36,
}


def parameters(name: str, classes: int) -> int:
    return sum(parameter.numel() for parameter in on_meta(name, classes).parameters())


@pytest.mark.parametrize("name", TORCHVISION_PARAMETERS)
def test_imagenet_models_have_torchvisions_parameter_counts(name: str) -> None:
    assert parameters(name, 1000) == TORCHVISION_PARAMETERS[name]


@pytest.mark.parametrize("name", CIFAR_MILLIONS)
def test_cifar_models_have_the_published_parameter_counts(name: str) -> None:
    assert round(parameters(f"cifar/{name}", 100) / 1e6, 2) == CIFAR_MILLIONS[name]


def test_every_imagenet_model_has_a_parameter_count() -> None:
    assert set(TORCHVISION_PARAMETERS) == set(IMAGENET)


def test_a_plain_name_that_exists_twice_is_the_imagenet_model() -> None:
    assert {f"cifar/{name}" for name in CIFAR} <= set(model_names())
    assert set(CIFAR) <= set(model_names())
    for name in ("vgg13", "resnet18"):
        assert name in IMAGENET
        assert name in CIFAR
    assert isinstance(on_meta("vgg13"), VGG)
    assert isinstance(on_meta("cifar/vgg13"), CifarVGG)
    resnet, small = on_meta("resnet18"), on_meta("cifar/resnet18")
    assert isinstance(resnet, ResNet)
    assert isinstance(small, ResNet)
    assert (resnet.conv1.kernel_size, small.conv1.kernel_size) == ((7, 7), (3, 3))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("MobileNetV2", "cifar/mobilenet_v2_half"),
        ("ShuffleV1", "cifar/shufflenet_v1"),
        ("ShuffleV2", "cifar/shufflenet_v2"),
        ("wrn_40_2", "cifar/wrn_40_2"),
        ("resnet8x4", "cifar/resnet8x4"),
        ("vgg8", "cifar/vgg8"),
    ],
)
def test_the_spelling_of_the_literature_selects_the_cifar_model(theirs: str, ours: str) -> None:
    shapes = [
        {key: value.shape for key, value in on_meta(name).state_dict().items()} for name in (theirs, ours)
    ]
    assert shapes[0] == shapes[1]


def test_the_package_offers_the_public_names() -> None:
    assert drumline.models.create_model is create_model
    assert drumline.models.model_names is model_names
    assert len(set(model_names())) == len(model_names())


def test_the_default_is_a_thousand_classes() -> None:
    with torch.device("meta"):
        assert create_model("resnet20").get_submodule("fc").out_features == 1000


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(create_model("resnet8", 10).state_dict())
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("resnet181", "resnet18"),
        ("ResNet505", "resnet50"),
        ("wrn4022", "wrn_40_2"),
        ("cifar/vgg12", "cifar/vgg1"),
    ],
)
def test_an_unknown_name_suggests_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"no model '{wrong}'") as caught:
        create_model(wrong)
    assert near in caught.value.fix


def test_a_name_similar_to_none_refers_to_the_list() -> None:
    with pytest.raises(UserError, match="doctor --models"):
        create_model("qqqqqqqq")


def test_a_model_without_outputs_is_rejected() -> None:
    with pytest.raises(UserError, match="0 classes"):
        create_model("resnet18", 0)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"needs the package {package}.*not installed") as caught:
        create_model(f"{package}/resnet18")
    assert f"install {package}" in caught.value.fix


@pytest.mark.parametrize("package", ["torchvision", "timm"])
@pytest.mark.parametrize(
    "failure",
    [
        "raise RuntimeError('operator torchvision::nms does not exist')",
        "raise OSError('libcudart.so.11.0: cannot open shared object file')",
        "import no_such_dependency",
        "from torch import no_such_name",
    ],
)
def test_a_package_that_cannot_be_imported_is_an_error_with_its_reason(
    package: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(failure)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"{package} is installed, but importing it fails: ") as caught:
        create_model(f"{package}/resnet18")
    assert failure.split("'")[1] in str(caught.value) if "'" in failure else "no_such" in str(caught.value)
    assert package in caught.value.fix


def test_torchvisions_models_are_created_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.list_models = lambda module: ["resnet18", "vit_b_16"]  # type: ignore[attr-defined]
    models.get_model = lambda name, weights, num_classes, bias=True: nn.Linear(2, num_classes, bias)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    assert create_model("torchvision/vit_b_16", 5).out_features == 5
    assert create_model("torchvision/vit_b_16", 5, bias=False, weights=None).bias is None
    with pytest.raises(UserError, match="torchvision/vit_b_16 does not take width"):
        create_model("torchvision/vit_b_16", 5, width=3)
    with pytest.raises(UserError, match="torchvision/vit_b_17") as caught:
        create_model("torchvision/vit_b_17")
    assert "torchvision/vit_b_16" in caught.value.fix


def test_timms_models_are_created_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = ModuleType("timm")
    timm.list_models = lambda: ["convnext_tiny"]  # type: ignore[attr-defined]
    timm.is_model = lambda name: name == "convnext_tiny"  # type: ignore[attr-defined]
    timm.create_model = lambda name, pretrained, num_classes: nn.Linear(2, num_classes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert create_model("timm/convnext_tiny", 5).out_features == 5
    assert create_model("timm/convnext_tiny", 5, pretrained=False).out_features == 5
    with pytest.raises(UserError, match=r"pretrained = True: models are built without weights") as caught:
        create_model("timm/convnext_tiny", 5, pretrained=True)
    assert "model.weights" in caught.value.fix
    with pytest.raises(UserError, match="timm/convnext_tinny") as caught:
        create_model("timm/convnext_tinny")
    assert "timm/convnext_tiny" in caught.value.fix


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module on the path; returns its name."""
    lines = [
        "from torch import nn",
        "def ours(classes): return nn.Linear(3, classes)",
        "def theirs(num_classes=7, wide=False): return nn.Linear(3, num_classes)",
        "class Net(nn.Module):",
        "    def __init__(self, classes):",
        "        super().__init__()",
        "        self.fc = nn.Linear(3, classes)",
        "def no_model(classes): return 'a string'",
        "def greedy(classes, width): return nn.Linear(width, classes)",
        "def nothing(): return nn.Linear(3, 3)",
        "def breaks(classes): raise RuntimeError('inside the factory')",
        "number = 3",
        "def greedy_inside(classes, width): return nn.Linear(width, classes)",
        "instance = nn.Linear(3, 3)",
    ]
    (tmp_path / "users_nets.py").write_text("\n".join(lines))
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "broken_nets.py").write_text("raise ValueError('bad table')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("users_nets", "needs_more", "broken_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "users_nets"


def test_a_users_factory_receives_the_number_of_classes(own_module: str) -> None:
    assert create_model(f"{own_module}:ours", 4).out_features == 4
    assert create_model(f"{own_module}:theirs", 4).out_features == 4
    assert create_model(f"{own_module}:Net", 4).get_submodule("fc").out_features == 4


def test_arguments_go_to_the_factory(own_module: str) -> None:
    assert create_model(f"{own_module}:greedy", 4, width=7).in_features == 7
    with pytest.raises(UserError, match=r"cannot be called with the number of classes and depth"):
        create_model(f"{own_module}:ours", 4, depth=7)
    assert create_model("resnet8", 4, stem="imagenet").get_submodule("conv1").stride == (2, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "words", "fix"),
    [
        (
            "resnet8",
            {"drop_rate": 0.1},
            "resnet8 does not take drop_rate",
            "it takes stem, groups, group_width",
        ),
        ("resnet8", {"stem": "big"}, "AssertionError: the stem is imagenet or cifar", "correct or remove"),
        ("vgg8", {"norm": True}, "vgg8 does not take norm", "remove model.args: it takes none"),
    ],
)
def test_arguments_that_a_model_does_not_take_are_rejected(
    name: str, arguments: dict[str, object], words: str, fix: str
) -> None:
    with pytest.raises(UserError, match=rf"^model.args: .*{words}") as caught:
        create_model(name, 4, **arguments)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "value", ["../w", "w.pth", "file:w", "hf_hub:a/b", "https://a.b/w.pth", "~", "a b", "x" * 65]
)
def test_text_arguments_of_a_library_model_are_plain_words(own_module: str, value: str) -> None:
    for name in ("resnet8", "torchvision/resnet18", "timm/resnet18"):
        with pytest.raises(UserError, match=r"model.args: stem = .*: arguments of .* are numbers") as caught:
            create_model(name, 4, stem=value)
        assert "model.weights" in caught.value.fix
    assert create_model(f"{own_module}:theirs", 4, wide=value) is not None


@pytest.mark.parametrize(
    "key",
    ["pretrained", "weights", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"],
)
def test_arguments_that_load_files_are_rejected(own_module: str, key: str) -> None:
    for name in ("resnet8", "torchvision/resnet18", "timm/resnet18", f"{own_module}:theirs"):
        with pytest.raises(UserError, match=f"model.args: {key} = w: models are built without weights"):
            create_model(name, 4, **{key: "w"})


def test_errors_from_a_users_factory_are_shown_with_their_line(own_module: str) -> None:
    what = r"the factory raised RuntimeError at users_nets\.py:11: inside the factory"
    with pytest.raises(UserError, match=what) as caught:
        create_model(f"{own_module}:breaks", 4)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.fix == "correct the factory; it is called with classes=4"
    with pytest.raises(UserError, match=r"TypeError at users_nets\.py:13: .*empty") as caught:
        create_model(f"{own_module}:greedy_inside", 4, width="x")
    assert caught.value.fix == "correct the factory or model.args; it is called with classes=4, width='x'"


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("no_such_package.nets:make", "there is no module no_such_package", "PYTHONPATH"),
        ("users_nets:our", "users_nets has nothing called our", "did you mean ours"),
        ("users_nets:number", "has number, which is not callable", "define number"),
        (
            "users_nets:instance",
            "users_nets:instance is a module, not a factory",
            "name the class or a function",
        ),
        ("users_nets:no_model", "returned str, not a torch.nn.Module", "return the model"),
        ("users_nets:greedy", r"signature is \(classes, width\)", "default"),
        ("users_nets:nothing", r"signature is \(\)", "num_classes"),
        ("needs_more:make", "needs a_package_that_is_not_there", "install a_package_that_is_not_there"),
        ("broken_nets:make", "failed with ValueError: bad table", "broken_nets"),
        ("users_nets:", "no module or no factory", "package.module:factory"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_factory_that_cannot_be_used_is_explained(name: str, what: str, fix: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        create_model(name)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("vit_b_16", "torchvision/vit_b_16"),
        ("ViT-B/16", "torchvision/vit_b_16"),
        ("vit_base_patch16_224", "timm/vit_base_patch16_224"),
        ("swin_t", "torchvision/swin_t"),
        ("resnet-18", "resnet18"),
        ("ResNet_50", "resnet50"),
        ("resnet19", "resnet18"),
        ("resnet", "resnet18"),
        ("mobilenetv2", "mobilenet_v2"),
        ("mobilenet_v3_large", "torchvision/mobilenet_v3_large"),
        ("wrn-16-2", "wrn_16_2"),
        ("convnext", "torchvision/convnext_tiny"),
        ("timm/vit_b_16", "torchvision/vit_b_16"),
    ],
)
def test_a_suggested_name_is_a_model_that_exists(name: str, meant: str) -> None:
    assert meant in suggest_models(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ResNet50", "resnet50"),
        ("ResNet-18", "resnet18"),
        ("WRN-40-2", "wrn_40_2"),
        ("CIFAR/ResNet20", "cifar/resnet20"),
        ("shufflenetV2", "shufflenet_v2"),
        ("MobileNetV2", "MobileNetV2"),  # the literature's, which is not torchvision's
        ("mobilenetv2", "mobilenetv2"),  # either of them
        ("mine:ResNet50", "mine:ResNet50"),
    ],
)
def test_capitals_and_punctuation_do_not_matter_unless_several_models_are_meant(
    name: str, meant: str
) -> None:
    assert canonical_name(name) == meant


def test_an_unknown_name_without_near_ones_refers_to_the_list() -> None:
    assert suggest_models("my_network") == ()
    with pytest.raises(UserError, match="there is no model 'my_network'") as caught:
        create_model("my_network")
    assert "`drumline doctor --models`" in caught.value.fix
    assert "torchvision/NAME" in caught.value.fix


def test_a_suggestion_says_if_its_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda package: False)
    with pytest.raises(UserError) as caught:
        create_model("vit_b_16")
    assert caught.value.fix == "did you mean torchvision/vit_b_16 (install torchvision first)?"


@pytest.mark.parametrize("name", ["/home/me/wn.py:net", "/home/me/wn.py", "/home/me/wn:net"])
def test_a_file_instead_of_a_module_is_explained(name: str) -> None:
    with pytest.raises(UserError, match="names a file, not a module") as caught:
        create_model(name + ":net" * (":" not in name))
    assert "add the folder /home/me to PYTHONPATH and set model.name=wn:net" in caught.value.fix

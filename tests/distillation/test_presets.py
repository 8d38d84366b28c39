"""A preset is the published recipe of a pair and a method: the literature's networks, weights, rates and figure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drumline.config.fields import from_text, recipe_fields, with_values
from drumline.config.recipe import Recipe
from drumline.core.errors import UserError
from drumline.distillation.presets import (
    is_preset,
    listing,
    preset_arguments,
    preset_names,
    published,
    published_by,
)
from drumline.distillation.selection import select_methods, temperature
from drumline.models.registry import create_model

PARAMETERS = {
    "resnet20": 278_324,
    "resnet32": 472_756,
    "resnet56": 861_620,
    "resnet110": 1_736_564,
    "resnet8x4": 1_233_540,
    "resnet32x4": 7_433_860,
    "wrn_16_2": 703_284,
    "wrn_40_1": 569_780,
    "wrn_40_2": 2_255_156,
    "vgg8": 3_965_028,
    "vgg13": 9_462_180,
    "resnet50": 23_705_252,
    "mobilenet_v2_half": 812_836,
    "shufflenet_v1": 949_258,
    "shufflenet_v2": 1_355_528,
}
"""Of the literature's CIFAR networks with 100 classes. ImageNet's vgg13 and resnet50 have others."""
DISTILL = {"teacher", "method", "r", "a", "b", "T", "standardise", "options", "initial_lr"}
ENDS = ("teacher", "alone")


def fields(name: str) -> dict[str, str]:
    """The words of a preset by field; no field is set twice."""
    words = [word.partition("=") for word in preset_arguments(name)]
    found = {key: value for key, _, value in words}
    assert len(found) == len(words)
    return found


def size(model: str, classes: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(model, classes).parameters())


def test_every_preset_selects_the_network_in_its_name() -> None:
    models = {}
    for name in preset_names():
        start, kind, networks = name.split("/")
        given = fields(name)
        students = networks if kind in ENDS else networks.split("-")[1]
        models[start, students] = given["model.name"]
        if kind not in ENDS:
            models[start, networks.split("-")[0]] = given["distill.teacher"]
    for (start, network), model in models.items():
        if start == "cifar100":
            assert size(model, 100) == PARAMETERS[network], network
        else:
            assert size(model, 1000) == {"resnet18": 11_689_512, "resnet34": 21_797_672}[network]
    assert {network for start, network in models if start == "cifar100"} == set(PARAMETERS)


def test_every_argument_is_valid_for_its_field() -> None:
    for name in preset_names():
        values = {}
        for key, text in fields(name).items():
            if known := recipe_fields().get(key):
                values[key] = from_text(known.hint, [text])
            else:
                assert key in {f"distill.{own}" for own in DISTILL}
        with_values(Recipe(), values)


def test_a_recipe_without_a_teacher_sets_no_field_of_distillation() -> None:
    lone = [name for name in preset_names() if name.split("/")[1] in ENDS]
    assert len(lone) == 6 + 9 + 2
    for name in lone:
        assert not any(word.startswith("distill.") for word in preset_arguments(name))
    for name in set(preset_names()) - set(lone):
        assert {"distill.teacher", "distill.method", "distill.r", "distill.a"} < set(fields(name))


SCHEDULE = [
    "optim.momentum=0.9",
    "optim.nesterov=false",
    "optim.weight_decay=0.0005",
    "optim.decay_all=true",
    "optim.warmup_epochs=0",
    "optim.schedule=step",
    "optim.milestones=150,180,210",
    "optim.gamma=0.1",
    "train.epochs=240",
]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "cifar100/dkd/resnet56-resnet20",
            [
                "data.source=cifar100",
                "data.augment=shift-flip",
                "data.batch=64",
                "model.name=resnet20",
                "distill.teacher=resnet56",
                "distill.method=dkd",
                "distill.r=1.0",
                "distill.a=0.0",
                "distill.b=1.0",
                "distill.T=4.0",
                "distill.options=beta=2.0,warmup=20",
                "optim.name=sgd",
                "optim.lr=0.05",
                *SCHEDULE,
            ],
        ),
        (
            "cifar100/kd+ls/vgg13-mobilenet_v2_half",
            [
                "data.source=cifar100",
                "data.augment=shift-flip",
                "data.batch=64",
                "model.name=mobilenet_v2_half",
                "distill.teacher=cifar/vgg13",
                "distill.method=kd",
                "distill.r=0.1",
                "distill.a=9.0",
                "distill.T=3.0",
                "distill.standardise=true",
                "optim.name=sgd",
                "optim.lr=0.01",
                *SCHEDULE,
            ],
        ),
        (
            "cifar100/alone/shufflenet_v1",
            [
                "data.source=cifar100",
                "data.augment=shift-flip",
                "data.batch=64",
                "model.name=shufflenet_v1",
                "optim.name=sgd",
                "optim.lr=0.01",
                *SCHEDULE,
            ],
        ),
        (
            "imagenet/attention/resnet34-resnet18",
            [
                "data.augment=crop-flip",
                "data.batch=256",
                "model.name=resnet18",
                "distill.teacher=resnet34",
                "distill.method=attention",
                "distill.r=1.0",
                "distill.a=0.0",
                "distill.b=1000.0",
                "distill.options=layers=3+4",
                "optim.name=sgd",
                "optim.lr=0.1",
                "optim.momentum=0.9",
                "optim.nesterov=false",
                "optim.weight_decay=0.0001",
                "optim.decay_all=true",
                "optim.warmup_epochs=0",
                "optim.schedule=step",
                "optim.milestones=30,60,90",
                "optim.gamma=0.1",
                "train.epochs=100",
            ],
        ),
    ],
)
def test_complete_presets_word_for_word(name: str, words: list[str]) -> None:
    assert preset_arguments(name) == words


@pytest.mark.parametrize(
    ("method", "r", "a", "b"),
    [
        ("kd", 0.1, 0.9, None),
        ("hint", 1, 0, 100),
        ("attention", 1, 0, 1000),
        ("similarity", 1, 0, 3000),
        ("correlation", 1, 0, 0.02),
        ("vid", 1, 0, 1),
        ("rkd", 1, 0, 1),
        ("pkt", 1, 0, 30000),
        ("crd", 1, 0, 0.8),
        ("crd+kd", 1, 1, 0.8),
        ("reviewkd", 1, 0, 5),
        ("ofd", 1, 0, 0.001),
        ("factor", 1, 0, 200),
        ("nst", 1, 0, 50),
        ("kdsvd", 1, 0, 1),
        ("fsp", 1, 0, 1),
        ("abound", 1, 0, 1),
        ("dist", 1, 0, 2),
    ],
)
def test_weights_of_presets_are_those_of_the_methods(
    method: str, r: float, a: float, b: float | None
) -> None:
    given = fields(f"cifar100/{method}/resnet32x4-resnet8x4")
    assert given["distill.method"] == method.split("+")[0]
    assert (float(given["distill.r"]), float(given["distill.a"])) == (r, a)
    assert (float(given["distill.b"]) if "distill.b" in given else None) == b
    assert given.get("distill.T") == ("4.0" if a or method == "dist" else None)
    assert "distill.standardise" not in given


@pytest.mark.parametrize(
    ("pair", "beta"),
    [
        ("wrn_40_2-wrn_16_2", 6),
        ("wrn_40_2-wrn_40_1", 6),
        ("resnet56-resnet20", 2),
        ("resnet110-resnet20", 2),
        ("resnet110-resnet32", 2),
        ("resnet32x4-resnet8x4", 8),
        ("vgg13-vgg8", 6),
        ("vgg13-mobilenet_v2_half", 6),
        ("resnet50-mobilenet_v2_half", 8),
        ("resnet32x4-shufflenet_v1", 8),
        ("resnet32x4-shufflenet_v2", 8),
        ("wrn_40_2-shufflenet_v1", 8),
    ],
)
def test_beta_of_dkd_depends_on_the_pair(pair: str, beta: float) -> None:
    assert fields(f"cifar100/dkd/{pair}")["distill.options"] == f"beta={beta:.1f},warmup=20"


@pytest.mark.parametrize(
    ("pair", "weight"),
    [
        ("wrn_40_2-wrn_16_2", 5),
        ("wrn_40_2-wrn_40_1", 5),
        ("wrn_40_2-shufflenet_v1", 5),
        ("resnet32x4-shufflenet_v1", 5),
        ("resnet32x4-shufflenet_v2", 8),
        ("resnet56-resnet20", 0.6),
        ("resnet110-resnet32", 1),
    ],
)
def test_weight_of_reviewkd_depends_on_the_pair(pair: str, weight: float) -> None:
    assert float(fields(f"cifar100/reviewkd/{pair}")["distill.b"]) == weight


@pytest.mark.parametrize(
    ("pair", "T", "b", "beta"),
    [
        ("resnet32x4-resnet8x4", 2, 9, 8),
        ("resnet32x4-shufflenet_v2", 2, 9, 8),
        ("wrn_40_2-wrn_16_2", 2, 12, 2),
        ("resnet56-resnet20", 3, 18, 2),
        ("resnet110-resnet20", 2, 15, 2),
        ("vgg13-mobilenet_v2_half", 3, 9, 2),
    ],
)
def test_dkd_with_standardisation_has_the_settings_of_its_logs(
    pair: str, T: float, b: float, beta: float
) -> None:
    given = fields(f"cifar100/dkd+ls/{pair}")
    assert [given[f"distill.{key}"] for key in ("method", "r", "a", "standardise")] == [
        "dkd",
        "1.0",
        "0.0",
        "true",
    ]
    assert (float(given["distill.T"]), float(given["distill.b"])) == (T, b)
    assert given["distill.options"] == f"beta={beta:.1f},warmup=20"


def test_reviewkd_trains_as_its_authors_train() -> None:
    given = fields("cifar100/reviewkd/resnet32x4-resnet8x4")
    words = ("data.batch", "optim.lr", "optim.nesterov", "optim.decay_all", "optim.milestones")
    assert [given[key] for key in words] == ["128", "0.1", "true", "true", "151,181,211"]


def test_figures_of_repdistiller_are_reached_by_its_variants() -> None:
    for method in ("fsp", "factor", "abound"):
        given = fields(f"cifar100/{method}/resnet110-resnet32")
        assert given["distill.options"] == "variant=repdistiller"
        assert given.get("distill.initial_lr") == ("0.01" if method == "factor" else None)
    assert "distill.initial_lr" not in fields("cifar100/factor/vgg13-vgg8")
    assert fields("cifar100/factor/wrn_40_2-wrn_16_2")["distill.initial_lr"] == "0.01"


def test_mlkd_and_ctkd_have_the_schedules_of_their_authors() -> None:
    for pair, epochs in (
        ("resnet32x4-resnet8x4", 240),
        ("vgg13-mobilenet_v2_half", 480),
        ("resnet32x4-shufflenet_v2", 960),
    ):
        given = fields(f"cifar100/mlkd/{pair}")
        assert (given["train.epochs"], given["optim.milestones"]) == (str(epochs), "150,180,210")
        assert (given["distill.r"], given["distill.b"]) == ("0.2", "0.9")
    given = fields("cifar100/ctkd/resnet56-resnet20")
    assert [given[key] for key in ("distill.r", "distill.b", "optim.lr")] == ["0.1", "0.9", "0.05"]


@pytest.mark.parametrize(
    ("pair", "T", "a"),
    [
        ("resnet32x4-resnet8x4", 2, 9),
        ("wrn_40_2-wrn_40_1", 2, 9),
        ("resnet110-resnet20", 4, 12),
        ("vgg13-vgg8", 3, 9),
        ("resnet50-mobilenet_v2_half", 3, 1),
    ],
)
def test_logit_standardisation_has_the_settings_of_its_logs(pair: str, T: float, a: float) -> None:
    given = fields(f"cifar100/kd+ls/{pair}")
    assert (float(given["distill.T"]), float(given["distill.a"]), given["distill.r"]) == (T, a, "0.1")
    assert given["distill.standardise"] == "true"


def test_no_field_of_the_optimizer_is_left_to_the_run() -> None:
    """A warm-up that the run chooses, of a twentieth of its epochs, is in no published recipe."""
    for name in preset_names():
        given = fields(name)
        assert {"data.batch", "train.epochs", "optim.lr"} < set(given)
        assert given["optim.warmup_epochs"] == "0"
    assert (Recipe().optim.clip, Recipe().train.label_smoothing) == (0, 0)


def test_imagenet_has_weights_of_its_own() -> None:
    given = fields("imagenet/kd/resnet34-resnet18")
    assert [given[f"distill.{key}"] for key in "raT"] == ["0.5", "0.5", "1.0"]
    given = fields("imagenet/dkd/resnet34-resnet18")
    assert (given["distill.T"], given["distill.options"]) == ("1.0", "beta=0.5,warmup=1")
    given = fields("imagenet/reviewkd/resnet34-resnet18")
    assert (given["distill.b"], given["distill.options"]) == ("1.0", "warmup=1,preact=true")
    given = fields("imagenet/kd+ls/resnet34-resnet18")
    assert [given[f"distill.{key}"] for key in ("r", "a", "T", "standardise")] == [
        "1.0",
        "6.0",
        "2.0",
        "true",
    ]
    given = fields("imagenet/dist/resnet34-resnet18")
    assert (given["distill.b"], given["distill.T"]) == ("2.0", "1.0")
    assert (given["optim.nesterov"], given["optim.decay_all"]) == ("true", "false")
    for method, batch, lr in (("kd", 512, 0.2), ("kd+ls", 512, 0.2), ("dkd", 512, 0.2), ("srd", 256, 0.1)):
        given = fields(f"imagenet/{method}/resnet34-resnet18")
        assert (int(given["data.batch"]), float(given["optim.lr"])) == (batch, lr)
    given = fields("imagenet/teacher/resnet34")
    assert (given["train.epochs"], given["optim.milestones"]) == ("90", "30,60")


def test_only_mobilenet_and_shufflenet_students_use_a_fifth_of_the_learning_rate() -> None:
    for name in preset_names():
        if name.startswith("cifar100/"):
            small = name.endswith(("mobilenet_v2_half", "shufflenet_v1", "shufflenet_v2"))
            method = name.split("/")[1].removesuffix("+kd")
            large = {"reviewkd": 0.1, "mlkd": 0.025}.get(method, 0.05)
            expected = (0.01 if method == "mlkd" else large / 5) if small else large
            assert float(fields(name)["optim.lr"]) == expected


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("cifar100/kd/wrn_40_2-wrn_16_2", 74.92),
        ("cifar100/hint/resnet50-mobilenet_v2_half", 63.16),
        ("cifar100/attention/vgg13-mobilenet_v2_half", 59.40),
        ("cifar100/similarity/resnet50-vgg8", 73.34),
        ("cifar100/vid/wrn_40_2-wrn_40_1", 73.30),
        ("cifar100/rkd/resnet32x4-resnet8x4", 71.90),
        ("cifar100/pkt/resnet110-resnet32", 72.61),
        ("cifar100/crd/resnet32x4-shufflenet_v1", 75.11),
        ("cifar100/crd+kd/vgg13-vgg8", 74.29),
        ("cifar100/dkd/resnet56-resnet20", 71.97),
        ("cifar100/dkd/wrn_40_2-shufflenet_v1", 76.70),
        ("cifar100/dkd/resnet50-vgg8", None),
        ("cifar100/kd+ls/resnet32x4-shufflenet_v2", 75.56),
        ("cifar100/kd+ls/resnet110-resnet20", 71.48),
        ("cifar100/kd+ls/wrn_40_2-shufflenet_v1", None),
        ("cifar100/hint+kd/wrn_40_2-wrn_16_2", None),
        ("cifar100/dkd+ls/resnet56-resnet20", 72.32),
        ("cifar100/dkd+ls/resnet32x4-shufflenet_v2", 77.37),
        ("cifar100/ctkd/resnet110-resnet32", 73.52),
        ("cifar100/reviewkd/wrn_40_2-shufflenet_v1", 77.14),
        ("imagenet/srd/resnet34-resnet18", 71.87),
        ("cifar100/teacher/resnet56", 72.34),
        ("cifar100/teacher/vgg13", 74.64),
        ("cifar100/teacher/resnet50", 79.34),
        ("cifar100/alone/resnet32", 71.14),
        ("cifar100/alone/mobilenet_v2_half", 64.60),
        ("cifar100/alone/shufflenet_v2", 71.82),
        ("imagenet/teacher/resnet34", 73.31),
        ("imagenet/alone/resnet18", 69.75),
        ("imagenet/kd/resnet34-resnet18", 71.03),
        ("imagenet/dist/resnet34-resnet18", 72.07),
        ("imagenet/kd+ls/resnet34-resnet18", 71.42),
    ],
)
def test_published_figures(name: str, figure: float | None) -> None:
    assert published(name) == figure


@pytest.mark.parametrize(
    ("name", "authors"),
    [
        ("cifar100/hint/resnet56-resnet20", "CRD"),
        ("cifar100/alone/resnet20", "CRD"),
        ("cifar100/reviewkd/resnet56-resnet20", "ReviewKD"),
        ("cifar100/ctkd/resnet56-resnet20", "logit standardisation"),
        ("cifar100/hint+kd/resnet56-resnet20", None),
        ("cifar100/mlkd/resnet56-resnet20", None),
        ("cifar100/dist/resnet110-resnet20", None),
        ("imagenet/attention/resnet34-resnet18", "attention transfer"),
        ("imagenet/teacher/resnet34", "torchvision"),
    ],
)
def test_each_figure_has_authors(name: str, authors: str | None) -> None:
    assert published_by(name) == authors
    assert all((published(each) is None) == (not published_by(each)) for each in preset_names())


def test_every_figure_is_in_the_right_column() -> None:
    """A row too short or too long would show here, and so would a network with two figures of its own."""
    rows = [line.split() for line in listing().partition("\n\n")[0].splitlines()]
    pairs = [row[1] for row in rows if len(row) == 2 and "-" in row[1]]
    by_method = {row[0]: row[1:] for row in rows}
    for end, kind in enumerate(ENDS):
        assert len(by_method[kind]) == len(pairs) + 1 == 14
        for pair, cell in zip(pairs, by_method[kind][:-1], strict=True):
            assert published(f"cifar100/{kind}/{pair.split('-')[end]}") == float(cell)
    for method in {name.split("/")[1] for name in preset_names() if name.startswith("cifar100/")} - {
        "fsp",
        "kdsvd",
    }:
        if method in by_method:
            cells = [cell for cell in by_method[method] if not cell[0].isalpha()]
            assert len(cells) == 13


@pytest.mark.parametrize("method", ["fsp", "kdsvd"])
def test_some_methods_are_offered_where_the_maps_have_equal_widths(method: str) -> None:
    pairs = {name.split("/")[2] for name in preset_names() if f"/{method}/" in name}
    assert len(pairs) == 6
    assert "resnet110-resnet32" in pairs
    assert not pairs & {"wrn_40_2-wrn_40_1", "resnet50-vgg8", "vgg13-mobilenet_v2_half"}


def test_the_listing_shows_every_pair_and_method() -> None:
    text = listing()
    for name in preset_names():
        _, kind, networks = name.split("/")
        assert kind in ENDS or f"  {networks}\n" in text
        assert f"\n{kind.removesuffix('+kd')} " in text
        if (figure := published(name)) is not None:
            assert f"{figure:.2f}" in text
    assert max(map(len, text.splitlines())) <= 120
    examples = [line.split() for line in text.splitlines() if line.startswith("  drumline ")]
    assert [words[1] for words in examples] == ["train", "distill"]
    assert all(words[2] in preset_names() for words in examples)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("cifar100/dkdd/resnet56-resnet20", "cifar100/dkd/resnet56-resnet20"),
        ("cifar100/dkd/resnet56-resnet21", "cifar100/dkd/resnet56-resnet20"),
        ("cifar100/dkd/resnet56", "cifar100/dkd/resnet56-resnet20?"),
        ("cifar100/AT/vgg13-MobileNetV2", "cifar100/attention/vgg13-mobilenet_v2_half?"),
        ("cifar100/student/ShuffleV2", "cifar100/alone/shufflenet_v2?"),
        ("imagenet/dkd/resnet50-resnet18", "imagenet/dkd/resnet34-resnet18?"),
        ("cifar100/fsp/resnet50-vgg8", "cifar100/fsp/"),
        ("imagenet/", "imagenet/teacher/resnet34"),
        ("cifar100/!", "`drumline distill --presets`"),
    ],
)
def test_an_unknown_preset_suggests_the_nearest_ones(wrong: str, meant: str) -> None:
    for ask in (preset_arguments, published):
        with pytest.raises(UserError) as caught:
            ask(wrong)
        assert wrong in caught.value.what
        assert meant in caught.value.fix


def test_arguments_that_count_as_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(map(is_preset, preset_names()))
    assert is_preset("cifar100/no/such")
    assert is_preset("imagenet/dkd/resnet34-resnet18")
    for word in (
        "cifar100",
        "cifar10/kd/a-b",
        "data.path=cifar100/x",
        "cifar100/x=1",
        "imagenet/recipe.toml",
        "--x",
    ):
        assert not is_preset(word)
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    assert not is_preset("imagenet/train")


def test_a_preset_sets_a_temperature_if_a_method_reads_it() -> None:
    for name in preset_names():
        given = dict(word.split("=", 1) for word in preset_arguments(name))
        if "distill.method" in given:
            selection = select_methods(Recipe.from_args([*preset_arguments(name), "data.path=x"]).distill)
            reads = any(temperature(each.method) is not None for each in selection.methods)
            assert ("distill.T" in given) == reads, name

"""The recipe itself: every field documented, every impossible value named with a fix, the page up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest

from drumline.config.fields import recipe_fields, value_of, with_values
from drumline.config.recipe import Recipe
from drumline.config.rules import Problem, problems

SECOND = {"data.std": (0.5,), "parallel.rendezvous": "node0:29500", "optim.schedule": "step"}


def wrong(**changes: Any) -> list[Problem]:
    """The problems of the default recipe with some fields changed; `data__batch=0` sets `data.batch`."""
    return list(problems(with_values(Recipe(), {name.replace("__", "."): v for name, v in changes.items()})))


def test_the_default_recipe_has_no_problem() -> None:
    assert wrong() == []


@pytest.mark.parametrize("name", recipe_fields())
def test_every_field_has_a_docstring_that_is_a_sentence(name: str) -> None:
    assert recipe_fields()[name].help.endswith(".")


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("run.seed", -1, 0),
        ("run.seed", 2**63, 2**63 - 1),
        ("run.name", "", "a"),
        ("run.name", "..", "..a"),
        ("run.name", "a/b", "a b"),
        ("run.name", "a\\b", "a-b"),
        ("run.name", "a\nb", "ä"),
        ("run.name", "ä" * 128, "a" * 255),
        ("data.batch", 0, 1),
        ("data.size", 0, 1),
        ("data.workers", -1, 0),
        ("data.hflip", 1.1, 1.0),
        ("data.vflip", -0.1, 0.0),
        ("data.rotation", 181.0, 180.0),
        ("data.crop_scale", (0.0, 1.0), (0.1, 1.0)),
        ("data.transform", "mine", "mine:f"),
        ("train.loss", "crossentropy", "mine:f"),
        ("optim.name", "adam", "torch.optim:NAdam"),
        ("optim.name", "torch.optim.NAdam", "torch.optim:NAdam"),
        ("optim.name", "timm/optim:Lion", "timm.optim:Lion"),
        ("train.loss", "timm/loss:Focal", "timm.loss:Focal"),
        ("data.source", "timm/data:f", "timm.data:f"),
        ("model.args", ("drop_rate",), ("drop_rate:0.1",)),
        ("model.args", ("a:1", "a:2"), ("a:1", "b:2")),
        ("model.args", ("num_classes:3",), ("stem:cifar",)),
        ("data.jitter", (0.4,), ()),
        ("data.jitter", (0.4, 0.4, 0.4), (0.4, 0.4, 0.4, 0.1)),
        ("data.jitter", (0.4, 0.4, 0.4, 0.1, 0.1), (2.0, 0.0, 0.0, 0.0)),
        ("data.jitter", (-0.1, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
        ("data.jitter", (0.0, 0.0, 0.0, 0.6), (0.0, 0.0, 0.0, 0.5)),
        ("data.randaugment", (2,), ()),
        ("data.randaugment", (2, 9, 0), (2, 9)),
        ("data.randaugment", (0, 9), (1, 9)),
        ("data.randaugment", (2, -1), (2, 0)),
        ("data.randaugment", (2, 31), (2, 30)),
        ("data.erasing", -0.1, 0.0),
        ("data.erasing", 1.1, 1.0),
        ("data.bad_limit", -0.1, 0.0),
        ("data.bad_limit", 1.1, 1.0),
        ("data.mixup", -0.1, 0.0),
        ("data.mixup", 9.0, 8.0),
        ("data.mixup", 1e-4, 1e-3),
        ("data.cutmix", -0.1, 8.0),
        ("data.holdout", 1.0, 0.99),
        ("data.holdout", -0.1, 0.0),
        ("data.eval_crop", 0.0, 0.1),
        ("data.eval_crop", 1.1, 1.0),
        ("data.mean", (0.5, 0.5), (0.5,)),
        ("data.mean", (127.0,), (1.0,)),
        ("data.mean", (-0.1,), (0.0,)),
        ("model.classes", 1, 2),
        ("optim.lr", -1e-9, 0.0),
        ("optim.reference_batch", 0, 1),
        ("optim.momentum", 1.0, 0.999),
        ("optim.weight_decay", -1.0, 0.0),
        ("optim.betas", (0.9, 1.0), (0.0, 0.9)),
        ("optim.betas", (-0.1, 0.9), (0.9, 0.9)),
        ("optim.eps", -1.0, 0.0),
        ("optim.trust", -1.0, 0.0),
        ("optim.clip", -1.0, 0.0),
        ("optim.warmup_epochs", -1.0, 0.5),
        ("optim.milestones", (2.0, 1.0), (1.0, 2.0)),
        ("optim.milestones", (1.0, 1.0), (1.0,)),
        ("optim.milestones", (0.0, 1.0), (0.5,)),
        ("optim.gamma", -1.0, 0.0),
        ("optim.final_lr", 1.1, 1.0),
        ("train.epochs", -1.0, 0.5),
        ("train.steps", -1, 1),
        ("train.accumulate", 0, 128),
        ("train.label_smoothing", 1.0, 0.1),
        ("train.ema", 1.0, 0.999),
        ("train.eval_every", -1.0, 0.0),
        ("train.log_every", 0, 1),
        ("parallel.processes", 0, 4),
        ("parallel.nodes", 0, 2),
        ("parallel.node_rank", -1, 0),
        ("parallel.rendezvous", "node0", "node0:29500"),
        ("parallel.rendezvous", ":29500", "[::1]:29500"),
        ("parallel.rendezvous", "node0:0", "file:///shared/meet"),
        ("parallel.rendezvous", "node0:65536", "node0:65535"),
        ("parallel.rendezvous", "file://x", "env://"),
        ("parallel.timeout", 0.0, 1.0),
        ("parallel.threads", 0, 1),
        ("checkpoint.every_steps", -1, 0),
        ("checkpoint.every_epochs", -1.0, 0.0),
        ("checkpoint.keep", 0, 1),
        ("checkpoint.resume", "", "runs/a"),
    ],
)
def test_an_impossible_value_is_rejected_with_a_fix_and_the_nearest_valid_one_is_accepted(
    name: str, bad: Any, good: Any
) -> None:
    others = {other: value for other, value in SECOND.items() if other != name}
    found = list(problems(with_values(Recipe(), others | {name: bad})))
    assert [problem.field for problem in found if problem.field == name]
    assert all(problem.what and problem.fix for problem in found)
    fine = {other: value for other, value in others.items() if other != "data.std" or name == "data.mean"}
    assert name not in [problem.field for problem in problems(with_values(Recipe(), fine | {name: good}))]


TWO_MACHINES = {
    "parallel__nodes": 2,
    "parallel__rendezvous": "a:1",
    "launch__restarts": 1,
    "run__name": "x",
}


@pytest.mark.parametrize(
    ("changes", "field", "part"),
    [
        ({"train__epochs": 0.0}, "train.epochs", "train.steps = 0"),
        ({"data__source": "folder"}, "data.path", "folder"),
        ({"data__source": "packed"}, "data.path", "packed"),
        ({"data__source": "tar"}, "data.path", "tar"),
        ({"data__mean": (0.5,)}, "data.std", "data.mean"),
        ({"data__std": (0.5,)}, "data.mean", "data.std"),
        ({"data__mean": (0.5,), "data__std": (0.5, 0.5, 0.5)}, "data.std", "data.mean"),
        ({"data__mean": (0.5,), "data__std": (0.0,)}, "data.std", "too small"),
        ({"data__batch": 7, "parallel__processes": 8}, "data.batch", "8 processes"),
        (
            {"data__batch": 7, "parallel__processes": 2, "train__accumulate": 4},
            "data.batch",
            "2 processes x 4",
        ),
        ({"data__batch": 7, "train__accumulate": 8}, "data.batch", "1 process x 8"),
        ({"parallel__layout": "single", "parallel__processes": 2}, "parallel.layout", "2"),
        (
            {"parallel__layout": "dp", "parallel__nodes": 2, "parallel__rendezvous": "a:1"},
            "parallel.layout",
            "2",
        ),
        ({"parallel__nodes": 2}, "parallel.rendezvous", "2 machines"),
        ({"parallel__node_rank": 1}, "parallel.node_rank", "parallel.nodes = 1"),
        ({"run__device": "cpu", "train__precision": "fp16"}, "train.precision", "run.device = cpu"),
        ({"run__device": "cpu", "data__decode": "gpu"}, "data.decode", "run.device = cpu"),
        ({"run__device": "cpu", "train__capture": "on"}, "train.capture", "run.device = cpu"),
        ({"run__device": "cpu", "parallel__backend": "nccl"}, "parallel.backend", "run.device = cpu"),
        ({"optim__nesterov": True, "optim__name": "adamw"}, "optim.nesterov", "adamw"),
        ({"optim__nesterov": True, "optim__momentum": 0.0}, "optim.nesterov", "momentum 0"),
        ({"data__crop_scale": (0.5, 0.4)}, "data.crop_scale", "above the maximum"),
        ({"data__crop_scale": (0.5, 1.0), "data__augment": "shift"}, "data.crop_scale", "shift"),
        ({"optim__milestones": (1.0,)}, "optim.milestones", "cosine"),
        ({"optim__args": ("k:1",)}, "optim.args", "optim.name = sgd"),
        ({"optim__name": "m:f", "optim__betas": (0.8, 0.9)}, "optim.betas", "m:f"),
        ({"optim__name": "m:f", "parallel__layout": "fsdp"}, "optim.name", "fsdp"),
        ({"train__loss": "m:f", "train__label_smoothing": 0.1}, "train.label_smoothing", "m:f"),
        ({"data__transform": "m:f", "data__decode": "gpu"}, "data.decode", "m:f"),
        ({"checkpoint__resume": "auto"}, "checkpoint.resume", "run.name = auto"),
        ({**TWO_MACHINES, "run__name": "auto"}, "run.name", "several machines restart"),
        ({**TWO_MACHINES, "launch__min_nodes": 3}, "launch.min_nodes", "parallel.nodes = 2"),
        ({**TWO_MACHINES, "launch__min_nodes": 1, "launch__restarts": 0}, "launch.min_nodes", "restarts = 0"),
        (
            {**TWO_MACHINES, "launch__min_nodes": 1, "parallel__node_rank": 0},
            "launch.min_nodes",
            "parallel.node_rank",
        ),
    ],
)
def test_an_impossible_combination_names_one_field_and_the_other(
    changes: dict[str, Any], field: str, part: str
) -> None:
    (problem,) = wrong(**changes)
    assert problem.field == field
    assert part in problem.what
    assert problem.fix


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_float_field_takes_a_number_that_is_not_finite(bad: float) -> None:
    for field in recipe_fields().values():
        if field.hint is float or (get_origin(field.hint) is tuple and float in get_args(field.hint)):
            value = bad if field.hint is float else (bad, 0.5)
            found = [
                p.what for p in problems(with_values(Recipe(), {field.name: value})) if p.field == field.name
            ]
            assert found in (
                ["expected a number"],
                ["expected a list of numbers"],
                ["expected a list of 2 numbers"],
            )


def test_no_text_field_takes_what_a_file_cannot_hold() -> None:
    (problem,) = wrong(data__path="photos\udcff")
    assert problem.field == "data.path"
    assert "UTF-8" in problem.what


def test_problems_come_in_the_order_of_the_fields_and_one_field_is_not_blamed_twice_over() -> None:
    found = wrong(checkpoint__keep=0, data__batch=0, data__source="npz", run__seed=-1, parallel__processes=4)
    assert [problem.field for problem in found] == ["run.seed", "data.path", "data.batch", "checkpoint.keep"]


def test_a_fields_name_leads_to_its_value() -> None:
    assert all(value_of(Recipe(), name) == field.default for name, field in recipe_fields().items())


def test_the_reference_page_is_what_the_generator_writes() -> None:
    maker = _generator()
    assert maker.PAGE.read_text(encoding="utf-8") == maker.reference(), (
        "docs/recipe.md is stale: run `python docs/make_recipe_reference.py`"
    )


def test_the_reference_page_has_a_row_for_every_field() -> None:
    rows = [
        line for line in _generator().reference().split("\n") if line.startswith("| `") and line.endswith("|")
    ]
    assert len(rows) >= len(recipe_fields())
    assert all(row.count(" | ") == 3 for row in rows if not row.startswith("| `drumline"))


def _generator() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "make_recipe_reference.py"
    spec = importlib.util.spec_from_file_location("make_recipe_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

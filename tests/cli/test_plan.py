"""`drumline plan --cuts`: plain errors, a table for people, JSON for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drumline.cli import main
from drumline.cli.plan import Measurement, Options, describe, describe_split, plan_split, read
from drumline.core.errors import UserError
from drumline.models import create_model
from drumline.parallel.pipeline.cut import trace
from drumline.parallel.pipeline.profile import Profile, UnitProfile
from tests.runs.command import drumline, result


def made_up(*seconds: float, noise: float = 0.01) -> Profile:
    """Units a, b, … of so many seconds."""
    return Profile(
        tuple(
            UnitProfile(
                chr(97 + place), time / 3, 2 * time / 3, 10, 40, 1 << 20, 2048 * (place > 0), int(place > 0)
            )
            for place, time in enumerate(seconds)
        ),
        noise,
    )


def measured(profile: Profile, returns: str = "Tensor") -> Measurement:
    return Measurement(profile, device="cpu", precision="fp32", batch=8, size=224, returns=returns)


def test_the_options_are_read() -> None:
    assert read(["--cuts", "resnet50"]) == Options("resnet50")
    line = "--stages 2 4 --cuts=timm/vit --micro-batches 16 --size auto --all --device cpu"
    asked = read(line.split())
    assert asked == Options("timm/vit", (2, 4), micro_batches=16, all=True, device="cpu")
    assert read(["--cuts", "a", "--stages=2,3"]).stages == (2, 3)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["plan needs a model", "drumline plan --cuts resnet50"]),
        ("resnet50", ["resnet50: plan takes only options", "drumline plan --cuts resnet50"]),
        ("--cuts", ["--cuts: needs a value"]),
        ("--cuts a --stage 4", ["--stage: plan has no such option", "did you mean --stages?"]),
        ("--cuts a --microbatches 4", ["did you mean --micro-batches?"]),
        ("--cuts a --stages 1", ["--stages 1: too small", "give at least 2"]),
        ("--cuts a --stages two", ["--stages two"]),
        ("--cuts a --batch 0", ["--batch 0: too small", "give at least 1"]),
        ("--cuts a --device tpu", ["--device tpu: expected one of auto, cpu, cuda"]),
        ("--cuts a --json=yes", ["--json=yes: expected true or false"]),
        ("--cuts a --size x --batch y", ["--size x", "--batch y"]),
    ],
)
def test_wrong_options_are_all_reported_with_a_fix(line: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as told:
        read(line.split())
    assert all(part in str(told.value) for part in parts)
    assert str(told.value).count("fix:") == line.count(" --size") + 1


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--cuts resnet19", ["there is no model 'resnet19'", "resnet18"]),
        ("--cuts resnet8 --stages 17", ["resnet8 can be cut into at most 5 stages, not 17"]),
        ("--cuts vgg8 --size 4", ["images of 4x4 are too small for this VGG"]),
        ("--cuts resnet8 --size 4 --batch 1", ["cannot take these images", "at least 2 images"]),
        ("--cuts resnet8 --device cpu --precision fp16", ["--precision = fp16 needs a GPU"]),
    ],
)
def test_an_impossible_plan_is_rejected_before_anything_is_measured(
    line: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *line.split()]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert all(part in told.err for part in parts)


def test_the_table_fits_into_80_columns_and_long_names_stay_whole() -> None:
    found = made_up(0.1, 0.2, 0.1)
    long = "a.very.long.name.of.a.module.inside.of.another.one"
    units = (*found.units[:2], UnitProfile(long, 123.4567, 200.0, 10**9, 4 * 10**9, 1 << 40, 1 << 40, 12))
    lines = describe(Options("net"), measured(Profile(units, 0.01)))
    assert max(map(len, lines)) <= 100
    assert long in lines
    assert "net: 3 units" in lines[0]


def test_a_row_shows_the_time_before_a_cut_and_the_tensors_that_cross_it() -> None:
    lines = describe(Options("net"), measured(made_up(1.0, 2.0, 1.0)))
    rows = {line.split()[0]: line.split() for line in lines[-3:]}
    assert rows["a"] == ["a", "0", "%", "333.33", "666.67", "25.0", "%", "1.0", "10", "-"]
    assert rows["c"] == ["c", "75", "%", "333.33", "666.67", "25.0", "%", "1.0", "10", "2", "(1)"]


def test_the_table_says_why_a_model_cannot_be_trained() -> None:
    assert not any("returns" in line for line in describe(Options("net"), measured(made_up(1.0))))
    lines = describe(Options("net"), measured(made_up(1.0), "dict"))
    assert "in training it returns dict: to train it, wrap it in a factory that returns the logits" in lines


def test_the_table_reports_a_noisy_machine() -> None:
    assert any("noisy" in line for line in describe(Options("net"), measured(made_up(1.0, noise=0.2))))


def test_a_split_is_given_as_the_flags_to_paste_with_its_limits() -> None:
    found = plan_split(made_up(1.0, 1.0, 1.0, 3.0), 2, 8)
    assert found.flags == "--parallel.layout pipeline --parallel.stages 2 --parallel.split d"
    assert (found.balance, found.even_balance) == pytest.approx((1.0, 4 / 3))
    assert found.speed_up == pytest.approx(2 / (1 + 1 / 8))
    assert found.memory_bytes == (2 * 3 * (1 << 20) + 3 * 120, (1 << 20) + 3 * 40)
    told = "\n".join(describe_split(found))
    assert "50 50 % of the time" in told
    assert "not worth it" not in told


def test_a_stage_that_holds_most_of_the_time_is_not_worth_a_pipeline() -> None:
    told = "\n".join(describe_split(plan_split(made_up(1.0, 17.0, 1.0, 1.0), 4, 32)))
    assert "not worth it: 4 devices, less than 2 x the speed. stage 2 alone holds 85 %" in told
    starved = "\n".join(describe_split(plan_split(made_up(1.0, 1.0, 1.0, 1.0), 4, 2)))
    assert "not worth it" in starved
    assert "2 micro-batches leave the stages idle" in starved


@pytest.mark.parametrize(
    "name",
    [
        "resnet8",
        "resnet18",
        "cifar/vgg8",
        "cifar/wrn_16_1",
        "shufflenet_v2",
    ],
)
def test_a_model_of_ours_returns_a_tensor(name: str) -> None:
    """What is said of models that return something else is not said of these."""
    record = trace(create_model(name, 10).train(), sample=torch.empty(2, 3, 32, 32)).records[True]
    assert record.returns == "Tensor"
    assert not [
        line for line in describe(Options(name), measured(made_up(1.0), record.returns)) if "wrap" in line
    ]


def test_all_lists_cuts_inside_blocks_and_json_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cuts", "resnet8", "--all", "--json", "--repeats", "1", "--batch", "2"]) == 0
    names = [unit["name"] for unit in json.loads(capsys.readouterr().out)["units"]]
    assert {"conv1", "layer1", "layer2", "layer3", "fc"} < set(names)
    assert any(name.startswith("layer2.0.") for name in names)


@pytest.mark.slow
def test_the_command_measures_a_model_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, classes))\n"
    )
    words = ("plan", "--cuts", "mine:net", "--size", "16", "--stages", "2", "--repeats", "2")
    done = drumline(*words, folder=tmp_path)
    found = result(done)
    assert [unit["name"] for unit in found["units"]][:2] == ["0", "1"]
    assert found["splits"][0]["flags"] in done.stdout
    assert done.stdout.startswith("mine:net: ")

"""`drumline compare` for models: what the arguments mean, exit codes, and the JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.cli import main
from drumline.comparison import measure as measuring
from drumline.comparison.sides import kind_of
from drumline.core.errors import UserError
from drumline.data.classes import Classes, numbers
from drumline.models import create_model
from drumline.state.model_record import ModelRecord
from drumline.state.weights import export_tensors

SMALL = ("--size", "32", "--batch", "2", "--device", "cpu")


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "LAYER_ROUNDS", 1)


def record(model: str) -> ModelRecord:
    third = (0.5, 0.5, 0.5)
    return ModelRecord(
        model, 10, Classes(numbers(10), False), 32, third, third, 1.0, "pillow12", "bilinear", "ignore"
    )


def weights(path: Path, model: str = "cifar/resnet8", seed: int = 0) -> Path:
    """Weights that say what model they are of."""
    torch.manual_seed(seed)
    export_tensors(create_model(model.replace("own:", ""), classes=10).state_dict(), path, record(model))
    return path


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_equal_models_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "cifar/resnet8", "resnet8", *SMALL]) == 0
    found = answer(capsys)
    assert found["equal"] is True
    assert found["findings"] == []
    assert found["totals"]["a"]["parameters"] == found["totals"]["b"]["parameters"] > 70_000


def test_different_models_exit_with_1_and_say_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["compare", "cifar/resnet8", "tests.comparison.networks:Residual", *SMALL, "--classes", "10"])
        == 1
    )
    found = answer(capsys)
    assert found["equal"] is False
    assert found["summary"]
    assert {"code", "text", "layers"} == set(found["findings"][0])
    assert found["values"]["first_layer"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet8", "resent8"), "there is no model 'resent8'"),
        (("resnet8", "runs/none"), "runs/none does not exist"),
        (("resnet8", "none.pth"), "none.pth does not exist"),
        (("resnet8", "nowhere:build"), "there is no module nowhere"),
        (
            ("tests.comparison.networks:Vision", "resnet8", "--size", "40"),
            "rejects images of 2 x 3 x 40 x 40",
        ),
        (("resnet8", "resnet8", "--batch", "1"), "--batch 1"),
    ],
)
def test_mistakes_of_the_user_exit_with_2(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words, *(() if "--batch" in words else ("--batch", "2"))]) == 2
    assert message in capsys.readouterr().err


def test_a_name_means_the_model_and_a_path_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("resnet18").mkdir()
    Path("run").mkdir()
    Path("some.pth").touch()
    kinds = [
        kind_of(each)
        for each in ("resnet18", "./resnet18", "run", "some.pth", "timm:resnet18", "timm/x", "a.b:c")
    ]
    assert kinds == ["model", "folder", "folder", "weights", "weights", "model", "model"]
    with pytest.raises(UserError, match="does not exist"):
        kind_of("runs/x")


def test_weights_with_a_record_are_loaded_and_compared_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = weights(tmp_path / "best.safetensors")
    assert main(["compare", str(file), "cifar/resnet8", *SMALL]) == 0
    assert answer(capsys)["totals"]["a"]["parameters"] > 70_000


def test_two_trained_models_differ_in_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = weights(tmp_path / "a.safetensors"), weights(tmp_path / "b.safetensors", seed=1)
    assert main(["compare", str(one), str(other), *SMALL]) == 1
    assert [each["code"] for each in answer(capsys)["findings"]] == ["weights"]
    assert main(["compare", str(one), str(one), *SMALL]) == 0


def test_two_runs_are_compared_as_models_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "weights").mkdir(parents=True)
        weights(tmp_path / name / "weights" / "best.safetensors")
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["compare", *runs]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["compare", *runs, "--models", *SMALL]) == 0


def test_foreign_weights_are_compared_by_names_and_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = create_model("cifar/resnet8", classes=7).state_dict()
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, tmp_path / "fits.pth"
    )
    assert main(["compare", str(tmp_path / "fits.pth"), "cifar/resnet8"]) == 0
    assert "B fits A" in capsys.readouterr().out
    torch.save(
        {name.replace("conv1", "first"): tensor for name, tensor in state.items()}, tmp_path / "other.pth"
    )
    assert main(["compare", "cifar/resnet8", str(tmp_path / "other.pth")]) == 1
    text = capsys.readouterr().out
    assert "only in A: conv1.weight (B has first.weight)" in text
    assert "rename the tensors one by one" in text


def test_code_that_only_a_file_names_needs_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.safetensors"
    state = create_model("tests.comparison.networks:Plain", classes=10).state_dict()
    export_tensors(state, file, record("tests.comparison.networks:Plain"))
    assert main(["compare", str(file), "cifar/resnet8", *SMALL]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert main(["compare", str(file), str(file), "--trust", *SMALL]) == 0
    assert main(["compare", str(file), "tests.comparison.networks:Plain", *SMALL]) == 0


def test_an_exported_program_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    assert main(["compare", str(tmp_path / "model.onnx"), "resnet8"]) == 2
    assert "is an exported program" in capsys.readouterr().err

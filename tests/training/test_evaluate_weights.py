"""`drumline eval` scores a model on the classes it was trained on, whatever the folders of the data are called."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from drumline.cli import main
from drumline.config.recipe import Data, Model, Recipe
from drumline.core.errors import UserError
from drumline.data.classes import Classes, numbers
from drumline.data.packed.format import PackOptions
from drumline.data.packed.write import pack_set
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.model_record import ModelRecord
from drumline.state.weights import export_tensors
from drumline.training.evaluate import evaluate_weights, model_to_score
from drumline.training.sets import open_sets

COLOURS = {"blue": (30, 30, 220), "green": (30, 220, 30), "red": (220, 30, 30)}
CPU = torch.device("cpu")
RECORD = ModelRecord(
    model="tests.training.test_evaluate_weights:by_colour",
    outputs=3,
    classes=Classes(("red", "green", "blue"), named=True),
    size=8,
    mean=(0.5,),
    std=(0.25,),
    eval_crop=1.0,
    resize="pillow12",
    interpolation="bilinear",
    exif="ignore",
)


def by_colour(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))


def knows_colours(outputs: int = 3) -> dict[str, torch.Tensor]:
    """Output 0 is red, 1 green, 2 blue: an order that no folder has."""
    return {"2.weight": 4 * torch.eye(outputs, 3), "2.bias": torch.zeros(outputs)}


def photos(root: Path, **folders: str) -> Path:
    """Class folders, each with two training and three evaluation images of a colour."""
    for name, colour in (folders or {name: name for name in COLOURS}).items():
        for split, count in (("train", 2), ("val", 3)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), COLOURS[colour]).save(root / split / name / f"{number}.png")
    return root


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[None]:
    """A command sets it for its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    export_tensors(knows_colours(), tmp_path / "w.safetensors", RECORD)
    return tmp_path / "w.safetensors"


def recipe(data: Path, weights: Path, classes: int | str = "auto", holdout: float = 0.0) -> Recipe:
    return Recipe(
        data=Data(
            path=str(data), size=8, mean=(0.5,), std=(0.25,), eval_crop=1.0, workers=0, holdout=holdout
        ),
        model=Model(name=RECORD.model, weights=str(weights), classes=classes),  # type: ignore[arg-type]
    )


def scored(data: Path, weights: Path) -> tuple[int, int, int]:
    found = evaluate_weights(recipe(data, weights), single_process(CPU))
    assert found.model_classes == 3
    return found.score.correct, found.score.samples, found.classes


def test_classes_in_another_order_and_some_of_them_score_right(weights: Path, tmp_path: Path) -> None:
    assert scored(photos(tmp_path / "all"), weights) == (9, 9, 3)
    assert scored(photos(tmp_path / "some", blue="blue", green="green"), weights) == (6, 6, 2)
    assert scored(photos(tmp_path / "swapped", blue="green", green="blue"), weights) == (0, 6, 2)


def test_rows_of_a_report_are_classes_by_name(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The data has two of the three classes, in a different order from the model, and calls green images blue."""
    data = photos(tmp_path / "some", blue="green", red="red")
    files = ["--predictions", str(tmp_path / "p.csv"), f"--confusion={tmp_path / 'c.csv'}"]
    words = [f"model.name={RECORD.model}", f"data.path={data}", "data.workers=0"]
    assert main(["eval", "--trust", *files, "--per-class", str(weights), *words]) == 0, "options come first"
    out, err = capfd.readouterr()
    classes = json.loads(out.splitlines()[-1])["per_class"]
    assert [(each["class"], each["samples"], each["correct"], each["predicted"]) for each in classes] == [
        ("red", 3, 3, 3),
        ("green", 0, 0, 3),
        ("blue", 3, 0, 0),
    ]
    assert (classes[2]["confused_with"], classes[2]["confused"]) == ("green", 3)
    assert (classes[1]["accuracy"], classes[2]["precision"]) == (None, None)
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    found = [(row["sample"], row["label"], row["prediction"], row["correct"]) for row in rows]
    blue, red = (str(data / "val" / name) for name in ("blue", "red"))
    assert found[0] == (f"{blue}/0.png", "blue", "green", "false")
    assert found[3] == (f"{red}/0.png", "red", "red", "true")
    assert all(0.5 < float(row["probability"]) < 1 for row in rows)
    assert (tmp_path / "c.csv").read_text().splitlines() == [
        "label \\ prediction,red,green,blue",
        "red,3,0,0",
        "green,0,0,0",
        "blue,0,3,0",
    ]
    assert "blue         3        0      0.0%  green (3)" in err


def test_a_report_that_cannot_be_written_is_rejected_before_the_work(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(weights), "--trust", f"model.name={RECORD.model}", "data.path=nowhere"]
    assert main([*words, f"--predictions={tmp_path / 'missing' / 'p.csv'}"]) == 2
    assert "p.csv cannot be written" in capfd.readouterr().err
    same = tmp_path / "same.csv"
    assert main([*words, f"--predictions={same}", f"--confusion={same}"]) == 2
    assert f"--predictions and --confusion are both {same}" in capfd.readouterr().err


def test_a_broken_image_is_marked_among_the_predictions(weights: Path, tmp_path: Path) -> None:
    data = photos(tmp_path / "all")
    (data / "val/red/1.png").write_bytes(b"nothing")
    given = recipe(data, weights)
    found = evaluate_weights(
        replace(given, data=replace(given.data, bad_limit=0.5)),
        single_process(CPU),
        predictions=str(tmp_path / "p.csv"),
    )
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert [bool(row["error"]) for row in rows] == [row["sample"].endswith("red/1.png") for row in rows]
    assert found.broken_samples == 1


def more_outputs(classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes + 1))


def test_outputs_beyond_the_classes_are_numbered(tmp_path: Path) -> None:
    tensors = knows_colours(4)
    tensors["2.bias"][3] = 30.0
    save_file(tensors, tmp_path / "w.safetensors")
    given = recipe(photos(tmp_path / "all"), tmp_path / "w.safetensors")
    name = "tests.training.test_evaluate_weights:more_outputs"
    found = evaluate_weights(replace(given, model=replace(given.model, name=name)), single_process(CPU))
    assert [(each.name, each.predicted) for each in found.report.classes] == [
        ("blue", 0),
        ("green", 0),
        ("red", 0),
        ("3", 9),
    ]


def test_packed_sets_and_tars_score_the_same(weights: Path, tmp_path: Path) -> None:
    photos(tmp_path / "some", blue="blue", red="red")
    shutil.make_archive(str(tmp_path / "some"), "tar", tmp_path / "some")
    pack_set(
        "folder", str(tmp_path / "some"), tmp_path / "packed", PackOptions(), 1, False, lambda said: None
    )
    assert scored(tmp_path / "some.tar", weights) == (6, 6, 2)
    assert scored(tmp_path / "packed", weights) == (6, 6, 2)


def test_a_renamed_or_added_class_is_rejected_by_name(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not have 'azure'; the data does not have 'blue'") as caught:
        scored(photos(tmp_path / "a", azure="blue", green="green", red="red"), weights)
    assert "it knows 'red', 'green', 'blue'" in caught.value.fix
    with pytest.raises(UserError, match=r"the model does not have 'reds'; .*'reds' may be 'red'"):
        scored(photos(tmp_path / "b", reds="red", green="green", blue="blue"), weights)
    # Nothing is evaluated of a class that is only below train.
    only_train = photos(tmp_path / "c")
    shutil.copytree(only_train / "train" / "red", only_train / "train" / "scarlet")
    assert scored(only_train, weights) == (9, 9, 3)


def test_numbers_are_compared_by_count(weights: Path, tmp_path: Path) -> None:
    three = photos(tmp_path / "three")
    export_tensors(
        knows_colours(), tmp_path / "n.safetensors", replace(RECORD, classes=Classes(numbers(3), False))
    )
    sets = open_sets(recipe(three, weights), single_process(CPU))
    *_, outputs, words = model_to_score(recipe(three, tmp_path / "n.safetensors"), sets, single_process(CPU))
    assert outputs is None
    assert any("matched by number" in word for word in words)


def test_weights_without_a_record_are_matched_by_number(weights: Path, tmp_path: Path) -> None:
    save_file(knows_colours(), tmp_path / "old.safetensors")
    three = photos(tmp_path / "three")
    sets = open_sets(recipe(three, weights), single_process(CPU))
    *_, outputs, words = model_to_score(
        recipe(three, tmp_path / "old.safetensors"), sets, single_process(CPU)
    )
    assert outputs is None
    assert any("no record of its class names" in word for word in words)
    save_file(knows_colours(5), tmp_path / "five.safetensors")
    with pytest.raises(UserError, match="has different classes"):
        model_to_score(recipe(three, tmp_path / "five.safetensors"), sets, single_process(CPU))
    *_, words = model_to_score(
        recipe(three, tmp_path / "five.safetensors", classes=5), sets, single_process(CPU)
    )
    assert words[-1].startswith("WARNING")
    assert words[-1].endswith("although the model has 5 and the data 3")


def test_weights_that_are_not_finite_are_rejected_by_tensor(tmp_path: Path) -> None:
    broken = knows_colours()
    broken["2.bias"][1] = torch.nan
    save_file(broken, tmp_path / "nan.safetensors")
    with pytest.raises(UserError, match=r"nan.safetensors: 2.bias contains NaN or infinity"):
        scored(photos(tmp_path / "three"), tmp_path / "nan.safetensors")


def test_an_output_that_is_not_finite_gives_valid_json_and_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    large = {"2.weight": torch.full((3, 3), 3e38), "2.bias": torch.full((3,), 3e38)}
    export_tensors(large, tmp_path / "large.safetensors", RECORD)
    words = [f"data.path={photos(tmp_path / 'three')}", f"model.name={RECORD.model}", "data.workers=0"]
    assert main(["eval", str(tmp_path / "large.safetensors"), *words]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert found["loss"] is None
    assert found["nonfinite_samples"] > 0
    assert "the model's output is NaN or infinite" in err
    assert "precision" not in err, "it computes in fp32 already"
    assert "top-1 " in err
    assert "top-5" not in err, "with three classes it says nothing"
    assert found["top5"] is not None


def test_weights_on_their_own_bring_what_they_know(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Image size, mean and deviation come along; code that the file names does not run unless it is repeated."""
    data = f"data.path={photos(tmp_path / 'three')}"
    assert main(["eval", str(weights), data]) == 2
    assert f"runs the code of {__name__}" in capfd.readouterr().err
    assert main(["eval", str(weights), f"model.name={RECORD.model}"]) == 2
    assert "its data is unknown" in capfd.readouterr().err
    assert main(["eval", str(weights), f"model.name={RECORD.model}", data, "--dry-run"]) == 0
    resolved = capfd.readouterr().out
    assert all(line in resolved for line in ("size = 8", "mean = [0.5]", "std = [0.25]", "eval_crop = 1.0"))
    save_file(knows_colours(), tmp_path / "other.safetensors")
    assert main(["eval", str(tmp_path / "other.safetensors"), data]) == 2
    assert "does not name its model and fits no built-in model" in capfd.readouterr().err


def test_weights_of_other_programs_are_of_the_built_in_model_that_they_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = create_model("resnet8", 3).state_dict()
    torch.save(state, tmp_path / "sd.pth")
    words = [f"data.path={photos(tmp_path / 'three')}", "data.workers=0", "data.size=16"]
    assert main(["eval", str(tmp_path / "sd.pth"), *words]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["samples"] > 0
    torch.save({key: each for key, each in state.items() if key[:3] != "fc."}, tmp_path / "nohead.pth")
    assert main(["eval", str(tmp_path / "nohead.pth"), *words]) == 2
    assert "2 tensors are missing (fc.weight, fc.bias)" in capfd.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2


def test_weights_of_a_run_bring_its_recipe(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "weights").mkdir(parents=True)
    best = tmp_path / "run" / "weights" / "best.safetensors"
    shutil.move(weights, best)
    (tmp_path / "run" / "recipe.toml").write_text(
        f'[data]\npath = "{photos(tmp_path / "three")}"\nworkers = 0\n[model]\nname = "{RECORD.model}"\n'
        "[parallel]\nnodes = 4\n[launch]\nrestarts = 3\n"
    )
    assert main(["eval", str(best), "--trust"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["correct"] == 9
    assert main(["eval", str(best), "--trust", "data.size=16", "--dry-run"]) == 0
    resolved = capfd.readouterr().out
    assert "size = 16" in resolved
    assert "nodes = 1" in resolved


def test_a_folder_without_splits_is_scored_whole(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "all")
    assert scored(root / "val", weights) == (9, 9, 3)
    assert f"{root / 'val'} has no evaluation split: scoring all 9 images" in capfd.readouterr().err
    shutil.make_archive(str(tmp_path / "val"), "tar", root / "val")
    assert scored(tmp_path / "val.tar", weights) == (9, 9, 3)
    shutil.rmtree(root / "train")  # only val/ is left
    assert scored(root, weights) == (9, 9, 3)
    shutil.make_archive(str(tmp_path / "only"), "tar", root)
    assert scored(tmp_path / "only.tar", weights) == (9, 9, 3)
    capfd.readouterr()
    with pytest.raises(UserError, match="no folder 'train'"):
        open_sets(recipe(root, weights), single_process(CPU))
    with pytest.raises(UserError, match="no evaluation split"):
        open_sets(recipe(root / "val", weights), single_process(CPU))


def test_training_images_are_not_scored_for_want_of_others(weights: Path, tmp_path: Path) -> None:
    root = photos(tmp_path / "all")
    (root / "val").rename(root / "vall")
    with pytest.raises(UserError, match="is 'vall' meant to be val"):
        scored(root, weights)
    shutil.rmtree(root / "vall")
    shutil.make_archive(str(tmp_path / "train"), "tar", root)
    for data in (root, tmp_path / "train.tar"):
        with pytest.raises(UserError, match="has a folder 'train' but no evaluation split"):
            scored(data, weights)
    assert scored(root / "train", weights) == (6, 6, 3)


def test_other_data_does_not_inherit_the_holdout_of_the_run(
    weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = photos(tmp_path / "own") / "train", photos(tmp_path / "other")
    (tmp_path / "run" / "weights").mkdir(parents=True)
    shutil.move(weights, tmp_path / "run" / "weights" / "best.safetensors")
    (tmp_path / "run" / "recipe.toml").write_text(
        f'[data]\npath = "{own}"\nholdout = 0.5\nworkers = 0\n[model]\nname = "{RECORD.model}"\n'
    )
    for words, samples in (
        ([], 3),
        ([f"data.path={own}"], 3),
        ([f"data.path={other}"], 9),
        ([f"data.path={other / 'val'}"], 9),
        ([f"data.path={other / 'val'}", "data.holdout=0.5"], 6),
    ):
        assert main(["eval", str(tmp_path / "run"), "--trust", *words]) == 0
        assert json.loads(capfd.readouterr().out.splitlines()[-1])["samples"] == samples


def test_a_wrong_path_is_answered_with_the_command_that_is_meant(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "weights").mkdir(parents=True)
        (tmp_path / name / "recipe.toml").write_text("")
        shutil.copy(weights, tmp_path / name / "weights" / "best.safetensors")
    monkeypatch.chdir(tmp_path)
    for words, meant in (
        (["a", "b"], "eval scores one model at a time: run `drumline eval b`"),
        (["a/weights/best.safetensors", "b/weights/best.safetensors"], "`drumline eval b/weights/best"),
        (["a/recipe.toml"], "did you mean `drumline eval a`?"),
    ):
        assert main(["eval", *words]) == 2
        assert meant in capsys.readouterr().err
    assert main(["eval", "a/weights", f"data.path={photos(tmp_path / 'all')}", "--dry-run", "--trust"]) == 2
    assert 'weights = "a/weights"' in capsys.readouterr().out

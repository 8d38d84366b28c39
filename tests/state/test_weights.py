"""Weights files: every accepted layout, every refusal, and what a round trip keeps."""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.models.registry import create_model
from drumline.state.model_record import ModelRecord
from drumline.state.weights import (
    WeightFields,
    export_tensors,
    export_weights,
    load_weights,
    resolve_weights,
)
from tests.models.quick import on_meta

State = dict[str, Tensor]


def model(seed: int = 0, classes: int = 10, name: str = "resnet8") -> nn.Module:
    torch.manual_seed(seed)
    return create_model(name, classes)


def state(seed: int = 1, classes: int = 10, name: str = "resnet8") -> State:
    return dict(model(seed, classes, name).state_dict())


def same(left: nn.Module, right: State) -> bool:
    return all(torch.equal(tensor, right[key]) for key, tensor in left.state_dict().items())


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "best": 0.5},
        lambda s: {"model_state_dict": s},
        lambda s: {f"module.{key}": value for key, value in s.items()},
        lambda s: {f"_orig_mod.{key}": value for key, value in s.items()},
        lambda s: {"model": {f"_orig_mod.module.{key}": value for key, value in s.items()}},
        lambda s: {f"module._orig_mod.{key}": value for key, value in s.items()},
        lambda s: {key.replace("layer1.", "layer1._orig_mod."): value for key, value in s.items()},
        lambda s: {"state_dict": {f"model.{key}": value for key, value in s.items()}, "hyper_parameters": {}},
        lambda s: {f"net.module.{key}": value for key, value in s.items()},
        lambda s: {"model_ema": {f"module.{key}": value for key, value in s.items()}},
        lambda s: {f"module.{key}": value for key, value in s.items()} | {"n_averaged": torch.tensor(3)},
        lambda s: {"state_dict": s, "state_dict_ema": {key: value + 1 for key, value in s.items()}},
        lambda s: {"state_dict": s, "args": argparse.Namespace(lr=0.1, data="photos")},
    ],
)
def test_every_usual_layout_of_a_pytorch_file_is_read(
    wrapped: Callable[[State], object], tmp_path: Path
) -> None:
    torch.save(wrapped(state()), tmp_path / "weights.pth")
    target = model()
    report = load_weights(target, tmp_path / "weights.pth")
    assert same(target, state())
    assert report.loaded == len(state())
    assert report.reinitialised == ()
    assert report.file == tmp_path / "weights.pth"


def test_what_is_exported_loads_again_bit_by_bit(tmp_path: Path) -> None:
    source = model(5).to(memory_format=torch.channels_last)
    export_weights(source, tmp_path / "out.safetensors")
    stored = load_file(tmp_path / "out.safetensors")
    assert set(stored) == set(source.state_dict())
    assert all(stored[key].dtype == tensor.dtype for key, tensor in source.state_dict().items())
    target = model()
    load_weights(target, str(tmp_path / "out.safetensors"))
    assert same(target, dict(source.state_dict()))
    assert [file.name for file in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, torch.compile, lambda bare: torch.compile(nn.DataParallel(bare))]
)
def test_a_wrapped_model_is_exported_under_its_bare_names(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    export_weights(wrap(model(5)), tmp_path / "out.safetensors")
    assert set(load_file(tmp_path / "out.safetensors")) == set(state())


def test_a_model_with_a_part_called_module_keeps_its_names(tmp_path: Path) -> None:
    source, target = (nn.ModuleDict({"module": nn.Linear(3, 2)}) for _ in range(2))
    export_weights(source, tmp_path / "out.safetensors")
    load_weights(target, tmp_path / "out.safetensors")
    assert same(target, dict(source.state_dict()))


def test_tied_parameters_can_be_exported(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    export_weights(tied, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b.weight"], tied["a"].weight)


def test_a_failed_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.safetensors"
    export_weights(model(5), path)
    before = path.read_bytes()

    def half(file: Path, *_: object, **__: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("drumline.state.weights.write_tensors", half)
    with pytest.raises(OSError, match="disk full"):
        export_weights(model(6), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["out.safetensors"]


def test_a_classifier_of_another_size_is_kept_and_reported(tmp_path: Path) -> None:
    save_file(state(1, classes=100), tmp_path / "w.safetensors")
    target = model(0, classes=10)
    before = target.get_submodule("fc").get_parameter("weight").clone()
    report = load_weights(target, tmp_path / "w.safetensors", strict_head=False)
    assert report.reinitialised == ("fc.weight", "fc.bias")
    assert report.loaded == len(state()) - 2
    assert "the classifier (fc.weight, fc.bias) is re-initialised because" in report.notes[0]
    assert torch.equal(target.get_submodule("fc").get_parameter("weight"), before)
    assert torch.equal(target.state_dict()["conv1.weight"], state(1, classes=100)["conv1.weight"])


def test_a_different_number_of_classes_is_rejected_unless_the_classifier_may_be_reinitialised(
    tmp_path: Path,
) -> None:
    save_file(state(1, classes=100), tmp_path / "w.safetensors")
    target = model()
    with pytest.raises(UserError, match=r"fc.weight is 100x64 in the file and 10x64 in the model") as caught:
        load_weights(target, tmp_path / "w.safetensors")
    assert "classes=100" in caught.value.fix
    assert same(target, state(0))


def test_another_modules_last_linear_layer_is_its_classifier(tmp_path: Path) -> None:
    def small(classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, classes))

    save_file(dict(small(3).state_dict()), tmp_path / "w.safetensors")
    report = load_weights(small(2), tmp_path / "w.safetensors", strict_head=False)
    assert report.reinitialised == ("2.weight", "2.bias")


def small_record(*names: str) -> ModelRecord:
    return ModelRecord(
        model="resnet8",
        outputs=len(names),
        classes=Classes(names, named=True),
        size=8,
        mean=(0.5,),
        std=(0.25,),
        eval_crop=0.875,
        resize="pillow12",
        interpolation="bilinear",
        exif="ignore",
    )


def test_rows_of_the_classifier_follow_the_names_of_their_classes(tmp_path: Path) -> None:
    source, target = model(5, classes=3), model(classes=3)
    export_tensors(source.state_dict(), tmp_path / "w.safetensors", small_record("cat", "ant", "bee"))
    data = Classes(("ant", "bee", "cat"), named=True)
    report = load_weights(target, tmp_path / "w.safetensors", classes=data)
    assert "matched by name" in report.notes[0]
    for key in ("fc.weight", "fc.bias"):
        assert torch.equal(target.state_dict()[key], source.state_dict()[key][[1, 2, 0]])


def test_a_classifier_of_other_names_is_rejected_or_reinitialised(tmp_path: Path) -> None:
    source, data = model(5, classes=3), Classes(("ant", "bee", "fox"), named=True)
    export_tensors(source.state_dict(), tmp_path / "w.safetensors", small_record("ant", "bee", "cat"))
    with pytest.raises(UserError, match=r"does not have 'fox'; the data does not have 'cat'"):
        load_weights(model(classes=3), tmp_path / "w.safetensors", classes=data)
    target = model(0, classes=3)
    report = load_weights(target, tmp_path / "w.safetensors", classes=data, strict_head=False)
    assert torch.equal(target.state_dict()["fc.weight"], model(0, classes=3).state_dict()["fc.weight"])
    assert torch.equal(target.state_dict()["conv1.weight"], source.state_dict()["conv1.weight"])
    assert "is re-initialised" in report.notes[0]
    assert report.reinitialised == ("fc.weight", "fc.bias")


def test_weights_without_a_record_are_matched_by_number_and_that_is_reported(tmp_path: Path) -> None:
    save_file(state(classes=3), tmp_path / "w.safetensors")
    data = Classes(("ant", "bee", "cat"), named=True)
    report = load_weights(model(classes=3), tmp_path / "w.safetensors", classes=data)
    assert report.record is None
    assert "no record of its class names" in report.notes[0]


def test_files_without_batch_counters_load(tmp_path: Path) -> None:
    old = {key: value for key, value in state().items() if not key.endswith("num_batches_tracked")}
    save_file(old, tmp_path / "w.safetensors")
    target = model()
    assert load_weights(target, tmp_path / "w.safetensors").loaded == len(old)
    assert same(target, state())


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("cifar/mobilenet_v2_half", ("stages.",), ("blocks.",)),
        ("cifar/resnet50", (".downsample.", "fc."), (".shortcut.", "linear.")),
    ],
)
def test_published_spellings_of_a_models_keys_are_understood(
    name: str, ours: tuple[str, ...], theirs: tuple[str, ...], tmp_path: Path
) -> None:
    published = {}
    for key, tensor in on_meta(name).state_dict().items():
        for mine, other in zip(ours, theirs, strict=True):
            key = key.replace(mine, other)
        published[key] = torch.full(tensor.shape, 0.5).to(tensor.dtype)
    save_file(published, tmp_path / "w.safetensors")
    target = on_meta(name).to_empty(device="cpu")
    assert load_weights(target, tmp_path / "w.safetensors").loaded == len(published)
    assert all((parameter == 0.5).all() for parameter in target.parameters())


def test_weights_of_another_model_are_rejected_and_that_model_is_named(tmp_path: Path) -> None:
    save_file(state(name="resnet14", classes=7), tmp_path / "w.safetensors")
    target = model()
    with pytest.raises(UserError, match="does not fit this ResNet") as caught:
        load_weights(target, tmp_path / "w.safetensors")
    assert "36 tensors are unknown to the model (layer1.1." in caught.value.what
    assert caught.value.fix == "the file fits cifar/resnet14: create that model"
    assert same(target, state(0))


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    broken = state()
    del broken["layer2.0.conv1.weight"]
    broken["conv1.weight"] = torch.zeros(16, 3, 7, 7)
    save_file(broken, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"1 tensor is missing \(layer2.0.conv1.weight\)") as caught:
        load_weights(model(), tmp_path / "w.safetensors")
    assert "conv1.weight is 16x3x7x7 in the file and 16x3x3x3 in the model" in caught.value.what
    assert caught.value.fix == "give this model's own weights"


class Hostile:
    """Unpickles to a call that would leave a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_file_that_could_execute_code_is_rejected_and_executes_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": state(), "extra": Hostile(tmp_path / "ran")}, tmp_path / "w.pth")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile(tmp_path / "ran"), protocol=2))
    for name in ("w.pth", "plain.pt"):
        with pytest.raises(UserError, match=r"is rejected: it holds .*mkdir besides tensors") as caught:
            load_weights(model(), tmp_path / name)
        assert "state_dict" in caught.value.fix
    assert not (tmp_path / "ran").exists()


def test_a_whole_pickled_model_is_rejected(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"torch.nn.modules.linear.Linear besides tensors"):
        load_weights(model(), tmp_path / "w.pth")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_cut_short_is_called_unreadable(suffix: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / f"whole{suffix}", tmp_path / f"cut{suffix}"
    torch.save(state(), whole) if suffix == ".pth" else save_file(state(), whole)
    cut.write_bytes(whole.read_bytes()[:5000])
    said = (
        "cannot load weights: .*cut" if suffix == ".safetensors" else "cut.pth is not a PyTorch weights file"
    )
    with pytest.raises(UserError, match=said) as caught:
        load_weights(model(), cut)
    assert "damaged" in caught.value.fix


@pytest.mark.parametrize(
    ("content", "held"),
    [
        ({"epoch": 3, "lr": 0.1}, "the entries epoch, lr"),
        ({"state_dict": {}}, "nothing"),
        (torch.zeros(3), "a Tensor"),
        ([1, 2], "a list"),
    ],
)
def test_a_file_without_a_state_dict_says_what_it_holds(content: object, held: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=f"has no state dict: it holds {held}"):
        load_weights(model(), tmp_path / "w.pt")


def test_an_unknown_kind_of_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "w.onnx").write_bytes(b"")
    with pytest.raises(UserError, match=r"model.weights = .*w.onnx: unsupported weights file") as caught:
        load_weights(model(), tmp_path / "w.onnx", fields=WeightFields())
    assert ".safetensors" in caught.value.fix


def test_a_run_folder_gives_its_best_then_its_last_then_its_newest_checkpoint(tmp_path: Path) -> None:
    def put(name: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        return file

    with pytest.raises(UserError, match="has no weights"):
        resolve_weights(tmp_path)
    (tmp_path / "checkpoints/step-300").mkdir(parents=True)
    put("checkpoints/step-400.tmp/model.safetensors")
    for name in (
        "checkpoints/step-20/model.safetensors",
        "checkpoints/step-100/model.safetensors",
        "weights/last.safetensors",
        "weights/best.safetensors",
        "model.safetensors",
    ):
        file = put(name)
        assert resolve_weights(tmp_path) == file
        assert resolve_weights(str(file)) == file


def test_a_missing_path_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        load_weights(model(), tmp_path / "nothing")


def test_a_checkpoint_of_lightning_is_read_or_the_error_says_how_to_export_it(tmp_path: Path) -> None:
    kept = {"state_dict": {f"model.{key}": value for key, value in state().items()}, "epoch": 3}
    torch.save(kept, tmp_path / "last.ckpt")
    target = model()
    load_weights(target, tmp_path / "last.ckpt")
    assert same(target, state())
    torch.save({**kept, "callbacks": Path("/somewhere")}, tmp_path / "code.ckpt")
    with pytest.raises(UserError, match="besides tensors") as caught:
        load_weights(target, tmp_path / "code.ckpt")
    assert 'save only checkpoint["state_dict"]' in caught.value.fix


def test_mistakes_in_python_are_explained_in_python(tmp_path: Path) -> None:
    save_file(state(classes=3), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="different classes") as caught:
        load_weights(model(), tmp_path / "w.safetensors")
    assert "create_model(..., classes=3)" in caught.value.fix
    assert "strict_head=False" in caught.value.fix
    with pytest.raises(UserError) as caught:
        load_weights(model(), tmp_path / "w.safetensors", fields=WeightFields())
    assert "model.classes" in caught.value.fix
    with pytest.raises(UserError, match=r"gone.pt: no such file"):
        load_weights(model(), tmp_path / "gone.pt")


def test_the_weights_folder_of_a_run_is_its_weights(tmp_path: Path) -> None:
    (tmp_path / "last.safetensors").touch()
    assert resolve_weights(tmp_path).name == "last.safetensors"
    (tmp_path / "best.safetensors").touch()
    assert resolve_weights(tmp_path).name == "best.safetensors"


@pytest.mark.parametrize("name", ["w.bin", "w.pth.tar"])
def test_other_usual_names_of_pytorch_files_are_read(name: str, tmp_path: Path) -> None:
    torch.save({"state_dict": state()}, tmp_path / name)
    ours = model()
    load_weights(ours, tmp_path / name)
    assert same(ours, state())


def test_weights_without_a_classifier_load_if_it_may_be_initialised(tmp_path: Path) -> None:
    headless = {key: value for key, value in state().items() if not key.startswith("fc.")}
    save_file(headless, tmp_path / "w.safetensors")
    report = load_weights(model(), tmp_path / "w.safetensors", strict_head=False)
    assert report.reinitialised == ("fc.weight", "fc.bias")
    assert "it has no classifier" in report.notes[0]
    with pytest.raises(UserError, match=r"2 tensors are missing \(fc.weight, fc.bias\)"):
        load_weights(model(), tmp_path / "w.safetensors")


def test_a_classifier_with_some_of_the_classes_is_initialised_whole_and_that_is_reported(
    tmp_path: Path,
) -> None:
    theirs, ours = Classes(("cat", "dog", "owl"), True), Classes(("cat", "dog", "tit", "auk"), True)
    record = ModelRecord("resnet8", 3, theirs, 8, (0.5,), (0.5,), 0.875, "pillow12", "bilinear", "ignore")
    export_tensors(state(classes=3), tmp_path / "w.safetensors", record)
    report = load_weights(model(classes=4), tmp_path / "w.safetensors", strict_head=False, classes=ours)
    assert "so are the rows of 2 classes that both have" in report.notes[0]

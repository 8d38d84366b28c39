"""`drumline export`: files that match the model get their name, and all others are rejected with the cause."""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from drumline.cli import main
from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.inference.export import export, graph
from drumline.inference.export.export import export_model
from drumline.inference.export.load import ExportedModel, exported_format
from drumline.inference.export.record import KEY
from drumline.inference.model import load_model, load_trained
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.weights import export_tensors
from drumline.training.loop import train
from drumline.training.sets import Normalise
from tests.inference.export.test_verify import MODEL
from tests.inference.test_model import PHOTOS

NETS = "tests.inference.export.nets"
IMAGES = sorted(str(path) for path in (PHOTOS / "val").rglob("*.jpg"))
ENDINGS = {
    "onnx": ".onnx",
    "pt2": ".pt2",
    "aoti": ".pt2",
    "torchscript": ".pt",
    "safetensors": ".safetensors",
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads that wait for each other take far longer than these models compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(folder: Path, name: str) -> Path:
    torch.manual_seed(1)
    export_tensors(
        create_model(name, classes=3).state_dict(), folder / "w.safetensors", replace(MODEL, model=name)
    )
    return folder / "w.safetensors"


def exported(model: Path, kind: Any, **options: Any) -> dict[str, Any]:
    out = model.with_name("out" + ENDINGS[kind])
    return export_model(model, kind, out, images=[str(PHOTOS / "val")], trust=True, **options)


def rejected(model: Path, kind: Any = "pt2", **options: Any) -> UserError:
    """The error of an export, after which there is no file."""
    with pytest.raises(UserError) as caught:
        exported(model, kind, **options)
    assert sorted(path.name for path in model.parent.iterdir()) == [model.name]
    return caught.value


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("resnet8", "onnx", {}),
        ("resnet8", "pt2", {"raw": True}),
        ("resnet8", "torchscript", {}),
        ("resnet8", "safetensors", {}),
        (f"{NETS}:ViT", "onnx", {}),
        (f"{NETS}:ViT", "torchscript", {"raw": True}),
        (f"{NETS}:FineBranches", "pt2", {}),
        (f"{NETS}:Cond", "pt2", {}),
        (f"{NETS}:Base", "torchscript", {"how": "script"}),
    ],
)
def test_an_exported_file_predicts_what_the_model_predicts(
    name: str, kind: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = weights(tmp_path, name)
    report = exported(model, kind, **options)
    assert (report["images"], report["top1_agreement"]) == (6, 1.0)
    assert report["logit_difference"] <= 1e-5 < report["limit"] < 1e-3
    original, loaded = load_trained(model, trust=True), load_model(report["file"], trust=True)
    assert loaded.classes == original.classes
    wanted = original.probabilities(IMAGES)
    assert torch.allclose(loaded.probabilities(IMAGES), wanted, atol=1e-6)
    assert main(["predict", report["file"], *IMAGES, "--trust"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["label"] for row in rows] == [original.label(int(index)) for index in wanted.argmax(1)]
    if isinstance(loaded, ExportedModel):
        evidence = loaded.export.parity
        assert {key: report[key] for key in evidence} == evidence, "the file has the evidence"
        assert loaded.probabilities([]).shape == (0, 3)
        assert report["other_size"] in ("rejected", "works")
        assert set(report["latency"]) == {"1", "8"}


@pytest.mark.parametrize(
    ("net", "code", "message"),
    [
        (
            "TrainMode",
            "batch-statistics",
            r"nets\.py:\d+: `x = F\.relu\(self\.bn.*` normalises with",
        ),
        ("Dropout", "torch-random", r"nets\.py:\d+: `return F\.dropout\(x\)` draws random numbers"),
        ("PythonRandom", "python-random", r"nets\.py:\d+: `return x \* random\.random\(\)`"),
        ("Branch", "data-branch", r"nets\.py:\d+: `if x\.mean\(\) > 1e6:`"),
        ("NumpyBranch", "data-branch", r"nets\.py:\d+: `if x\.detach\(\)\.numpy\(\)\.mean\(\) > 1e6:`"),
        ("FixedView", "shape-guard", r"fails on a batch of 2: RuntimeError: .*nets\.py:\d+"),
        (
            "Assertion",
            "shape-guard",
            r"batch of 2: AssertionError \(nets\.py:\d+: `assert x\.shape\[0\] == 8",
        ),
        (
            "BatchBranch",
            "shape-guard",
            r"limited to 5 <= batch.*lines that compute with a shape: nets\.py:\d+",
        ),
        (
            "Broken",
            "model-fails",
            r"the model itself fails: AttributeError: .*nets\.py:\d+: `return x \+ self\.nothing`",
        ),
        ("BatchMaximum", "unstable", r"nets\.py:\d+: `return x / float\(x\.max\(\)\)`"),
    ],
)
def test_a_model_that_no_file_can_repeat_is_rejected_with_its_line(
    net: str, code: str, message: str, tmp_path: Path
) -> None:
    error = rejected(weights(tmp_path, f"{NETS}:{net}"))
    assert error.code == code, error
    assert error.fix
    assert re.search(message, error.what, re.DOTALL), error.what


def test_a_trace_that_keeps_one_side_of_a_branch_is_rejected(tmp_path: Path) -> None:
    error = rejected(weights(tmp_path, f"{NETS}:Branch"), "torchscript")
    assert error.code == "data-branch"
    assert "`if x.mean() > 1e6:`" in error.what
    assert "--how script" in error.fix
    # All images of the test take one side, so that only the watched pass can find it.
    script = exported(weights(tmp_path, f"{NETS}:Branch"), "torchscript", how="script")
    assert script["verdict"] == "ok", "a script keeps both sides"


def test_a_fix_by_how_script_is_not_given_where_it_cannot_work(tmp_path: Path) -> None:
    for how in ("trace", "script"):
        error = rejected(weights(tmp_path, f"{NETS}:BatchMaximum"), "torchscript", how=how)
        assert (error.code, "--how script" in error.fix) == ("unstable", False)
    error = rejected(weights(tmp_path, "resnet8"), "torchscript", how="script")
    assert "cannot compile the source of resnet8, a built-in model" in error.what
    assert "use --how trace" in error.fix


def test_measurement_alone_finds_faults_that_nobody_saw_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "watch_forward", lambda model, inputs: [])
    for net in ("Dropout", "PythonRandom", "TrainMode"):
        assert rejected(weights(tmp_path, f"{NETS}:{net}"), "torchscript").code == "unstable"
    monkeypatch.setattr(export, "_floor", lambda *_: export.verify.Difference())
    for net, code in (("Dropout", "torch-random"), ("PythonRandom", "mismatch")):
        assert rejected(weights(tmp_path, f"{NETS}:{net}"), "torchscript").code == code


@pytest.mark.parametrize("kind", ["pt2", "torchscript"])
@pytest.mark.parametrize("raw", [False, True])
def test_the_outputs_of_a_file_do_not_require_grad(kind: str, raw: bool, tmp_path: Path) -> None:
    file = exported(weights(tmp_path, "resnet8"), kind, raw=raw)["file"]
    program = torch.export.load(file).module() if kind == "pt2" else torch.jit.load(file)
    pixels = torch.zeros(2, MODEL.size, MODEL.size, 3, dtype=torch.uint8)
    inputs = pixels.permute(0, 3, 1, 2).float() if raw else pixels
    assert program(inputs).numpy().shape == (2, 3)
    assert not any(each.requires_grad for each in program.parameters())


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    error = rejected(weights(tmp_path, f"{NETS}:NoOnnx"), "onnx")
    assert (error.code, "aten.linalg_matrix_exp" in error.what) == ("unsupported-operator", True)


@pytest.mark.parametrize(
    ("mean", "std", "named"),
    [
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "with ImageNet's mean and standard deviation"),
        ((0.6, 0.5, 0.4), (0.3, 0.25, 0.2), "in BGR order"),
        ((0.41, 0.5, 0.6), (0.2, 0.25, 0.3), ""),
    ],
)
def test_a_wrong_normalisation_is_rejected(
    mean: tuple[float, ...],
    std: tuple[float, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong:
        @staticmethod
        def build(_mean: Any, _std: Any, *rest: Any, **more: Any) -> Normalise:
            return Normalise.build(mean, std, *rest, **more)

    monkeypatch.setattr(graph, "Normalise", Wrong)
    error = rejected(weights(tmp_path, "resnet8"), "torchscript")
    assert error.code == ("wrong-normalisation" if named else "mismatch")
    assert named in error.what
    assert "logits differ by" in error.what


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"eval_crop": 0.9}, "eval_crop is 0.9, not 0.8"),
        ({"interpolation": "bilinear"}, "interpolation is bilinear, not bicubic"),
        ({"fit": "stretch"}, "fit is stretch, not crop"),
        ({"size": 32}, "size is 32, not 24"),
    ],
)
def test_a_wrong_resize_is_rejected(
    wrong: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = export.exported_record

    def changed(*given: Any) -> Any:
        record = right(*given)
        return replace(record, model=replace(record.model, **wrong))

    monkeypatch.setattr(export, "exported_record", changed)
    error = rejected(weights(tmp_path, "resnet8"), "torchscript")
    assert (error.code, named in error.what) == ("wrong-pixels", True), error


def test_a_failure_leaves_an_existing_file_as_it_was(tmp_path: Path) -> None:
    model = weights(tmp_path, f"{NETS}:Dropout")
    (tmp_path / "out.pt2").write_text("precious")
    with pytest.raises(UserError):
        exported(model, "pt2")
    assert (tmp_path / "out.pt2").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"out.pt2", "w.safetensors"}


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    exported(weights(folder, "resnet8"), "onnx")
    return folder / "out.onnx"


def test_a_file_whose_graph_was_changed_is_rejected_when_it_is_loaded(
    onnx_file: Path, tmp_path: Path
) -> None:
    model = onnx.load(str(onnx_file))
    mean = next(each for each in model.graph.initializer if each.name == "mean")
    mean.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(mean) * 0.5, "mean"))
    onnx.save(model, str(tmp_path / "changed.onnx"))
    with pytest.raises(UserError, match="does not reproduce its recorded outputs") as caught:
        load_model(tmp_path / "changed.onnx")
    assert caught.value.code == "wrong-answers"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"eval_crop": 0.8', '"eval_crop": 0.9'), "the record was changed"),
        (lambda text: None, "has no Drumline record"),
    ],
)
def test_a_file_whose_record_was_changed_is_rejected(
    onnx_file: Path, tmp_path: Path, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(str(onnx_file))
    assert main(["eval", str(onnx_file)]) == 2
    assert "is an exported file, which eval cannot score" in capsys.readouterr().err
    (entry,) = (each for each in model.metadata_props if each.key == KEY)
    text = change(entry.value)
    if text is None:
        model.metadata_props.remove(entry)
    else:
        entry.value = text
    onnx.save(model, str(tmp_path / "changed.onnx"))
    assert main(["predict", str(tmp_path / "changed.onnx"), IMAGES[0]]) == 2
    assert message in capsys.readouterr().err


def test_programs_that_can_run_code_need_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(weights(tmp_path, "resnet8"), "torchscript")["file"]
    with pytest.raises(UserError, match="can run code when it is loaded") as caught:
        load_model(file)
    assert (caught.value.code, "trust=True" in caught.value.fix) == ("untrusted-code", True)
    assert main(["predict", file, IMAGES[0]]) == 2
    assert "add --trust" in capsys.readouterr().err


def test_archives_without_a_record_and_damaged_ones_are_rejected(tmp_path: Path) -> None:
    program = torch.jit.trace(torch.nn.Identity(), torch.zeros(1))
    torch.jit.save(program, str(tmp_path / "plain.pt"))
    assert exported_format(tmp_path / "plain.pt") == "torchscript"
    with pytest.raises(UserError, match="no Drumline record"):
        load_model(tmp_path / "plain.pt", trust=True)
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pt")
    assert exported_format(tmp_path / "weights.pt") is None, "weights are weights"
    (tmp_path / "no.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"no\.onnx cannot be loaded"):
        load_model(tmp_path / "no.onnx")
    with zipfile.ZipFile(tmp_path / "half.pt2", "w") as archive:
        archive.writestr("half/archive_format", "pt2")
    with pytest.raises(UserError, match="no Drumline record"):
        load_model(tmp_path / "half.pt2", trust=True)


def test_what_cannot_be_exported_is_an_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights(tmp_path, "resnet8")
    for options, message in (
        ({"format": "onnx", "out": tmp_path / "a.pt"}, r"--format onnx needs the extension \.onnx"),
        ({"format": "onnx", "out": tmp_path / "no" / "a.onnx"}, "cannot be written"),
        ({"format": "safetensors", "out": model}, "is the model itself"),
        ({"format": "pt2", "how": "script", "out": tmp_path / "a.pt2"}, "--how script has no effect"),
        ({"format": "pt2", "out": tmp_path / "a.pt2"}, "no images to verify the export on"),
        ({"format": "pt2", "out": tmp_path / "a.pt2", "weights": "average"}, "--weights average"),
    ):
        with pytest.raises(UserError, match=message):
            export_model(model, **options)  # type: ignore[arg-type]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="there is no no-such-compiler"):
        export_model(model, "aoti", tmp_path / "a.pt2")
    (tmp_path / "b.onnx").write_bytes(b"")
    with pytest.raises(UserError, match="is already an exported file"):
        export_model(tmp_path / "b.onnx", "pt2", tmp_path / "a.pt2")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    with pytest.raises(UserError, match="needs onnxscript, which is not installed") as caught:
        export_model(model, "onnx", tmp_path / "a.onnx")
    assert "pip install" in caught.value.fix


def test_formats_have_different_names_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = {kind: export.output_file(tmp_path / "photos", kind) for kind in export.ENDINGS}
    assert len(set(files.values())) == len(files)
    assert files["aoti"] == tmp_path / "photos.aoti.pt2"
    assert files["pt2"] == tmp_path / "photos.pt2"
    assert export.output_file(tmp_path / "photos", "aoti", "a.pt2").name == "a.pt2"


def test_a_run_is_exported_with_its_own_images_and_its_averaged_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one", device="cpu"),
        data=Data(path=str(PHOTOS), batch=4, size=32, workers=0),
        model=Model(name="resnet8"),
        optim=Optim(lr=0.05),
        train=Train(steps=3, ema=0.5),
        checkpoint=Checkpoint(every_steps=3),
    )
    result = train(recipe, single_process(torch.device("cpu")))
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert main(["export", "one", "--format", "torchscript"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["file"] == "one.pt"
    assert Path("one.pt").is_file()
    assert (report["images"], report["of"]) == (6, "evaluation images of one")
    assert report["accuracy"] == {"model": result.metrics["top1"], "exported": result.metrics["top1"]}
    for which in ("average", "model"):
        assert (
            main(["export", "one", "--out", f"{which}.safetensors", "--weights", which, "--samples", "all"])
            == 0
        )
    best, average, trained = (
        load_model(path).model.fc.weight  # type: ignore[union-attr]
        for path in ("one", "average.safetensors", "model.safetensors")
    )
    assert torch.equal(best, average)
    assert not torch.equal(best, trained)
    for wrong, message in (
        ([], "export needs a format"),
        (["--out", "a.pt3"], "'.pt3' is not the extension of one"),
        (["--out", "a.pt", "--samples", "0"], "--samples 0"),
    ):
        capsys.readouterr()
        assert main(["export", "one", *wrong]) == 2
        assert message in capsys.readouterr().err

"""`load_model`: a trained model sees an image as evaluation does, wherever the image comes from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.data.classes import Classes
from drumline.data.feed.batch import make_batch
from drumline.data.feed.sampler import Request
from drumline.data.sources import ArrayDataset, DatasetSpec, EncodedDataset, open_dataset
from drumline.inference.classifier import Prediction
from drumline.inference.model import TrainedModel, load_model
from drumline.models import create_model
from drumline.parallel.world import single_process
from drumline.state.model_record import ModelRecord
from drumline.state.weights import export_tensors
from drumline.training.loop import train

PHOTOS = Path(__file__).parents[1] / "golden" / "inputs" / "photos"


def stored(folder: Path, fit: str = "crop", name: str = "resnet8", outputs: int = 3) -> TrainedModel:
    """A model of three classes, through a file."""
    torch.manual_seed(1)
    record = ModelRecord(
        model=name,
        outputs=outputs,
        classes=Classes(("ash", "birch", "cedar"), named=True),
        size=24,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.25, 0.3),
        eval_crop=0.8,
        resize="pillow12",
        interpolation="bicubic",
        exif="apply",
        fit=fit,
    )
    model = create_model("resnet8", classes=outputs)
    export_tensors(model.state_dict(), folder / "w.safetensors", record)
    return load_model(folder / "w.safetensors")


def test_pixels_of_files_are_those_of_evaluation(tmp_path: Path) -> None:
    model, source = stored(tmp_path), open_dataset(DatasetSpec("folder", str(PHOTOS), "eval"))
    assert isinstance(source, EncodedDataset)
    wanted = make_batch(source, model.transform, 0, Request(0, np.arange(len(source)))).batch.images.numpy()
    for sample in range(len(source)):
        path = source.where(sample)
        assert np.array_equal(model.pixels(path), wanted[sample])
        with Image.open(path) as image:
            assert np.array_equal(model.pixels(image), wanted[sample])
    assert model.classes == ("ash", "birch", "cedar")


def test_an_image_turned_by_exif_is_turned_as_in_evaluation(tmp_path: Path) -> None:
    model = stored(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as image:
        assert np.array_equal(model.pixels(image), model.pixels(tmp_path / "turned.png"))
    assert np.array_equal(model.pixels(tmp_path / "turned.png"), model.pixels(np.rot90(pixels, -1)))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_arrays_are_those_of_evaluation(tmp_path: Path, channels: int) -> None:
    model = stored(tmp_path, fit="stretch")
    images = np.random.default_rng(0).integers(0, 256, (3, 20, 31, channels), dtype=np.uint8)
    source = ArrayDataset("noise", images, np.arange(3), ("ash", "birch", "cedar"))
    wanted = make_batch(source, model.transform, 0, Request(0, np.arange(3))).batch.images.numpy()
    for image, pixels in zip(images, wanted, strict=True):
        assert np.array_equal(model.pixels(image), np.broadcast_to(pixels, (24, 24, 3)))
        if channels == 1:
            assert np.array_equal(model.pixels(image[:, :, 0]), model.pixels(image))


def test_preprocess_gives_what_the_module_takes(tmp_path: Path) -> None:
    model = stored(tmp_path)
    images = [np.random.default_rng(n).integers(0, 256, (40, 30 + n, 3), dtype=np.uint8) for n in range(3)]
    inputs = model.preprocess(images)
    pixels = np.stack([model.pixels(image) for image in images])
    mean, std = (255 * torch.tensor(each)[:, None, None] for each in (model.record.mean, model.record.std))
    wanted = (torch.from_numpy(pixels).permute(0, 3, 1, 2) - mean) / std
    assert inputs.shape == (3, 3, 24, 24)
    assert torch.allclose(inputs, wanted, atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(model.model(inputs).softmax(dim=1), model.probabilities(images))


def test_a_model_is_printed_in_one_line(tmp_path: Path) -> None:
    assert repr(stored(tmp_path)) == "<TrainedModel resnet8: 3 classes, 24 px, cpu>"


@pytest.mark.parametrize("name", ["torchvision:resnet50", "timm:resnet50.a1_in1k"])
def test_published_weights_are_not_downloaded_to_predict(name: str) -> None:
    with pytest.raises(
        UserError, match=f"published weights.*\n  fix: train with finetune={name} on your images"
    ):
        load_model(name)


def test_predict_of_a_list_names_the_method_for_several_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"one image, not a list\n  fix: call probabilities\(\[...\]\)"):
        stored(tmp_path).predict(["a.jpg"])  # type: ignore[arg-type]


def test_a_run_predicts_what_it_was_scored_with(tmp_path: Path) -> None:
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one", device="cpu"),
        data=Data(source="digits", batch=64, workers=0),
        model=Model(name="resnet8"),
        optim=Optim(lr=0.05),
        train=Train(steps=6),
        checkpoint=Checkpoint(every_steps=6),
    )
    result = train(recipe, single_process(torch.device("cpu")))
    source = open_dataset(DatasetSpec("digits", "", "eval"))
    assert isinstance(source, ArrayDataset)
    model = load_model(tmp_path / "one")
    found = model.probabilities(list(source.take(np.arange(len(source))))).argmax(1).numpy()
    assert (int((found == source.labels).sum()), len(found)) == (
        result.metrics["correct"],
        result.metrics["samples"],
    )
    first = model.predict(source.take(np.arange(1))[0])
    assert first == Prediction(str(found[0]), first.probability, int(found[0]))
    assert 0.1 < first.probability <= 1
    assert load_model(tmp_path / "one" / "checkpoints" / "step-6").classes == model.classes


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    model = stored(tmp_path)
    for image in (np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(UserError, match=r"the image is an array of .* with shape"):
            model.predict(image)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected a list of images, not one image"):
        model.probabilities("text.jpg")
    assert model.probabilities([]).shape == (0, 3)
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(UserError, match=r"text\.jpg"):
        model.predict(tmp_path / "text.jpg")
    export_tensors(create_model("resnet8", classes=3).state_dict(), tmp_path / "plain.safetensors")
    with pytest.raises(UserError, match="does not say what model it holds"):
        load_model(tmp_path / "plain.safetensors")


def test_code_of_the_user_runs_only_when_it_is_trusted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the code of tests\.inference\.test_model:resnet8 builds"):
        stored(tmp_path, name="tests.inference.test_model:resnet8")
    assert load_model(tmp_path / "w.safetensors", trust=True).classes[0] == "ash"


def test_an_output_beyond_the_classes_is_called_by_its_number(tmp_path: Path) -> None:
    model = stored(tmp_path, outputs=5)
    with torch.no_grad():
        model.model.fc.bias[4] = 100.0  # type: ignore[union-attr,index]
    assert model.predict(np.zeros((30, 30), np.uint8)).label == "4"


def resnet8(classes: int) -> torch.nn.Module:
    return create_model("resnet8", classes=classes)

"""`drumline predict`: which images it finds, what it predicts for them, and how it writes that down."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.cli import main
from drumline.config.recipe import Checkpoint, Data, Model, Optim, Recipe, Run, Train
from drumline.core.errors import UserError
from drumline.inference.images import find_images
from drumline.inference.predict import predict_images
from drumline.parallel.world import single_process
from drumline.training.loop import train
from tests.inference.test_model import PHOTOS, stored


@pytest.fixture
def model(tmp_path: Path) -> str:
    stored(tmp_path)
    return str(tmp_path / "w.safetensors")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with every kind of file that a user may have."""
    folder = tmp_path / "photos"
    (folder / "b" / ".hidden").mkdir(parents=True)
    pixels = np.random.default_rng(3).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(folder / "b" / "colour.jpg")
    image.convert("L").save(folder / "b" / "grey.png")
    image.convert("CMYK").save(folder / "a.jpeg")
    image.save(folder / "b" / ".hidden" / "no.jpg")
    (folder / "b" / "notes.txt").write_text("not an image")
    (folder / "c.jpg").write_text("not an image either")
    return folder


NAMES = ["a.jpeg", "c.jpg", "b/colour.jpg", "b/grey.png"]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_folder_means_its_images_in_order(photos: Path) -> None:
    assert [image.name for image in find_images([str(photos)]).images] == [
        str(photos / name) for name in NAMES
    ]
    twice = [str(photos / "b" / "notes.txt"), str(photos / "b" / "grey.png")]
    assert [image.name for image in find_images(twice).images] == twice, "a file that is named is tried"


def test_an_archive_means_its_images_and_their_bytes(photos: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(photos, "photos")
    found = {image.name: image.read() for image in find_images([str(tmp_path / "photos.tar")]).images}
    assert {name for name in found if ".hidden" not in name} == {
        f"{tmp_path}/photos.tar:photos/{name}" for name in NAMES
    }
    assert found[f"{tmp_path}/photos.tar:photos/a.jpeg"] == (photos / "a.jpeg").read_bytes()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["missing.jpg"], r"missing\.jpg does not exist"),
        (["empty"], "empty has no images"),
        (["empty.tar"], r"empty\.tar has no images"),
        (["-", "-"], "- is given twice"),
        (["photos.tar.gz"], "compressed by gzip"),
    ],
)
def test_paths_without_images_are_rejected(
    paths: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    tarfile.open("empty.tar", "w").close()
    tarfile.open("photos.tar.gz", "w:gz").close()
    with pytest.raises(UserError, match=message):
        find_images(paths)


def test_every_image_has_a_result_whatever_the_batch(model: str, photos: Path, tmp_path: Path) -> None:
    trained = stored(tmp_path)
    images = find_images([str(photos)] * 3).images
    expected = None
    for batch in (1, 5, 64):
        found = list(predict_images(trained, iter(images), top=2, batch=batch))
        assert [each.image for each in found] == images
        labels = [[best.label for best in each.best] for each in found]
        assert [bool(each.error) for each in found] == [name == "c.jpg" for name in NAMES] * 3
        assert expected in (None, labels)
        expected = labels
    alone = trained.predict(photos / "a.jpeg")
    assert found[0].best[0].label == alone.label
    assert found[0].best[0].probability == pytest.approx(alone.probability, abs=1e-6)
    assert found[0].best[0].probability >= found[0].best[1].probability


def test_predictions_agree_with_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(
        run=Run(dir=str(tmp_path), name="one", device="cpu"),
        data=Data(path=str(PHOTOS), batch=4, size=32, workers=0),
        model=Model(name="resnet8"),
        optim=Optim(lr=0.05),
        train=Train(steps=3),
        checkpoint=Checkpoint(every_steps=3),
    )
    result = train(recipe, single_process(torch.device("cpu")))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "one"), str(PHOTOS / "val"), "--device", "cpu"]) == 0
    rows = lines(capsys)
    correct = sum(Path(str(row["path"])).parent.name == row["label"] for row in rows)
    assert (correct, len(rows)) == (result.metrics["correct"], result.metrics["samples"])


def test_json_has_a_row_for_each_image(model: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", model, str(photos), "--top", "9", "--device", "cpu"]) == 1, "one cannot be read"
    rows = lines(capsys)
    assert [row["path"] for row in rows] == [str(photos / name) for name in NAMES]
    assert {row["label"] for row in rows} <= {"ash", "birch", "cedar", None}
    assert len(rows[0]["top"]) == 3, "no more classes than there are"  # type: ignore[arg-type]
    assert rows[1]["label"] is None
    assert "not an image in a supported format" in str(rows[1]["error"])


def test_a_zip_archive_has_to_be_unpacked(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.ZIP").write_bytes(b"PK\x03\x04")
    assert main(["predict", model, str(tmp_path / "new.ZIP"), "--device", "cpu"]) == 2
    assert (
        "new.ZIP is a zip archive\n  fix: unpack it and give the folder, or give a .tar"
        in capsys.readouterr().err
    )


def test_an_image_on_stdin_is_predicted_as_its_file_is(
    model: str, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from drumline.inference import images

    images._read_stdin.cache_clear()
    stream = io.TextIOWrapper(io.BytesIO((photos / "a.jpeg").read_bytes()))
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["predict", model, "-", str(photos / "a.jpeg"), "--device", "cpu"]) == 0
    piped, named = lines(capsys)
    assert piped["path"] == "-"
    assert piped["label"] == named["label"]


def test_csv_has_a_column_for_each_class(
    model: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.csv"
    main(["predict", model, str(photos), "--top", "2", "--out", str(out), "--device", "cpu"])
    header, *rows = list(csv.reader(out.open()))
    assert header == ["path", "label", "probability", "label_2", "probability_2", "error"]
    assert [row[0] for row in rows] == [str(photos / name) for name in NAMES]
    assert all(len(row) == 6 for row in rows)
    assert capsys.readouterr().err.strip() == (
        "3 images predicted; 1 cannot be read; 1 file skipped, which by name are no images (.txt); "
        f"written to {out}"
    )


class Page(html.parser.HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_page_shows_every_image_and_runs_nothing(model: str, photos: Path, tmp_path: Path) -> None:
    evil = photos / "<script>alert(1)<"
    evil.mkdir()
    (photos / "a.jpeg").rename(evil / "&amp;.jpeg")
    out = tmp_path / "page.html"
    main(["predict", model, str(photos), "--top", "2", "--out", str(out), "--device", "cpu"])
    page = Page(out.read_text())
    kinds = [tag for tag, _ in page.tags]
    assert kinds.count("img") == 3
    assert kinds.count("figure") == 4
    assert "script" not in kinds
    sources = [str(attributes["src"]) for tag, attributes in page.tags if tag == "img"]
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not any("href" in attributes for _, attributes in page.tags)
    assert str(evil / "&amp;.jpeg") in page.texts


def test_a_name_that_is_no_text_is_escaped(
    model: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = os.fsdecode(os.fsencode(photos) + b"/\xff\x1b[31m.jpg")
    (photos / "a.jpeg").rename(odd)
    main(["predict", model, odd, "--device", "cpu"])
    assert str(lines(capsys)[0]["path"]).endswith("\\udcff\x1b[31m.jpg")
    main(["predict", model, odd, "--format", "table", "--device", "cpu"])
    assert "\x1b" not in capsys.readouterr().out


def test_an_output_that_is_a_link_or_a_device_stays_one(model: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.csv"
    out.symlink_to("target.csv")
    (tmp_path / "target.csv").write_text("old")
    assert main(["predict", model, str(photos / "a.jpeg"), "--out", str(out), "--device", "cpu"]) == 0
    assert out.is_symlink()
    assert (tmp_path / "target.csv").read_text().startswith("path,label")
    device = Path("/dev/null")
    arguments = ["--out", str(device), "--format", "csv", "--device", "cpu"]
    assert main(["predict", model, str(photos / "a.jpeg"), *arguments]) == 0
    assert device.is_char_device()


def test_linked_folders_are_searched_once(photos: Path) -> None:
    (photos / "b" / "again").symlink_to(photos)
    (photos / "d").symlink_to(photos / "b")
    found = find_images([str(photos)])
    assert [image.name for image in found.images] == [str(photos / name) for name in NAMES]
    assert found.skipped == {".txt": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_stdout_is_an_error(model: str, photos: Path) -> None:
    command = [sys.executable, "-m", "drumline", "predict", model, str(photos / "a.jpeg"), "--device", "cpu"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert "stdout cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "predict needs MODEL and IMAGES, not only"),
        (["a.jpg", "--out", "found.xyz"], "the extension '.xyz' names no format"),
        ([__file__, "--out", "nowhere/found.csv"], "cannot be written"),
        ([__file__, "--out", __file__, "--format", "csv"], "is one of the images"),
        ([__file__, "--device", "cuda"], "device = cuda, but torch sees no GPU"),
        (["a.jpg", "--top", "0"], "--top 0: "),
        (["a.jpg", "--format", "yaml"], "--format yaml: expected"),
    ],
)
def test_wrong_arguments_are_explained(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", model, *arguments]) == 2
    assert message in capsys.readouterr().err

"""An AOTInductor package gives the same results as the model, in Python and in the C++ example."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from drumline.inference.export.load import ExportedModel
from drumline.inference.model import load_model, load_trained
from tests.inference.export.test_export import IMAGES, NETS, exported, one_thread, weights
from tests.inference.export.test_verify import MODEL

assert one_thread  # a fixture that is used by every test here

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None,
        reason="AOTInductor needs a C++ compiler, which is not installed",
    ),
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = weights(tmp_path_factory.mktemp("aoti"), f"{NETS}:Base")
    report = exported(model, "aoti")
    assert (report["top1_agreement"], report["other_size"]) == (1.0, "unchecked")
    assert report["logit_difference"] <= 1e-5
    return Path(report["file"])


def test_a_package_predicts_what_the_model_predicts(package: Path) -> None:
    model = load_trained(package.with_name("w.safetensors"), trust=True)
    wanted = model.probabilities(IMAGES)
    loaded = load_model(package, trust=True)
    assert torch.allclose(loaded.probabilities(IMAGES), wanted, atol=1e-6)
    assert isinstance(loaded, ExportedModel)
    assert not loaded.program(torch.zeros(2, MODEL.size, MODEL.size, 3, dtype=torch.uint8)).requires_grad


@pytest.fixture(scope="module")
def classify(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for need, reason in (("cmake", "cmake is not installed"), ("make", "make is not installed")):
        if shutil.which(need) is None:
            pytest.skip(reason)
    folder = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", str(ROOT / "examples" / "cpp"), "-B", str(folder), prefix]
    done = subprocess.run(configure, capture_output=True, text=True, check=False)
    if "Could NOT find JPEG" in done.stderr:
        pytest.skip("the headers of libjpeg-turbo are not installed")
    assert done.returncode == 0, done.stderr
    done = subprocess.run(["cmake", "--build", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "classify"


def test_the_cpp_example_answers_as_predict_does(package: Path, classify: Path, tmp_path: Path) -> None:
    (tmp_path / "no.jpg").write_bytes(b"no image")
    given = [*IMAGES, str(tmp_path / "no.jpg")]
    done = subprocess.run([classify, package, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "no.jpg: is not a JPEG" in done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    model = load_model(package, trust=True)
    predictions = [model.predict(path) for path in IMAGES]
    assert [(path, label) for path, label, _ in rows] == [
        (path, prediction.label) for path, prediction in zip(IMAGES, predictions, strict=True)
    ]
    for (_, _, probability), prediction in zip(rows, predictions, strict=True):
        assert float(probability) == pytest.approx(prediction.probability, abs=2e-6)


def test_the_cpp_example_rejects_a_file_without_a_record(classify: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [classify, tmp_path / "no.pt2", "a.jpg"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "no.pt2" in done.stderr) == (2, True)

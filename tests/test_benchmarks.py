"""The benchmarks run from end to end on a few made-up images, and notice pixels that are not Pillow's."""

from __future__ import annotations

import importlib
import io
import json
import tarfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

FOLDER = Path(__file__).parents[1] / "benchmarks"
FEW = ("--made-up", "3", "--size", "64")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives a benchmark as a module, with its command line set."""
    monkeypatch.syspath_prepend(str(FOLDER))
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark

    def take(name: str, *arguments: str) -> ModuleType:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        return importlib.import_module(name)

    yield take
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = benchmark
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def rows(printed: str, name: str) -> list[list[str]]:
    """The cells of the table rows that begin with a name."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line
    ]
    return [row for row in cells if row[0].startswith(name)]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_script_can_be_imported(script: Any, name: str) -> None:
    """Those that need a GPU run nowhere else here, and would rot unseen."""
    assert script(name).__doc__


def test_feed_cpu_shows_our_pixels_at_100_percent_beside_pillow(script: Any, capsys: Any) -> None:
    feed_cpu = script("feed_cpu", *FEW, "--rounds", "1", "--no-scaling")
    assert feed_cpu.main() == 0
    printed = capsys.readouterr().out
    assert "3 made-up photographs (no --path given)" in printed
    (ours,) = rows(printed, "Drumline, native")
    assert ours[-1] == "100 %"
    (boxed,) = rows(printed, "Pillow resize(box=)")
    assert boxed[-1] != "100 %"


def test_jpeg_rule_makes_valid_files_of_every_kind_and_tells_what_the_rule_says(
    script: Any, capsys: Any
) -> None:
    jpeg_rule = script("jpeg_rule", "--dry", "--crops", "6")
    made = list(jpeg_rule.corpus([jpeg_rule.jpeg(Image.new("RGB", (90, 70), "red"), 80)], 6))
    for sample in made:
        with Image.open(io.BytesIO(sample.data)) as image:
            image.load()
            header = jpeg_rule.read_header(sample.data)
            assert image.size == (header.width, header.height)
    assert jpeg_rule.main() == 0
    printed = capsys.readouterr().out
    accepted, left = printed.split("Left to the CPU")
    kinds = {sample.kind for sample in made}
    for kind in (
        *("progressive", "progressive grey", "extended frame (SOF1)", "extended frame, tables above 255"),
        *("grey with factors 2x2", "4:1:1"),
    ):
        assert f"| {kind} (" in left
        kinds.remove(kind)
    for kind in ("4:2:0", "grey", "RGB", "16-bit tables", "4:4:0 written 2x2, 2x1", "16384 x 40"):
        assert kind in kinds
    for kind in kinds:
        assert f"| {kind} |" in accepted


def test_pixels_ends_with_0_only_while_every_value_of_ours_is_pillows(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = script("pixels", *FEW)
    monkeypatch.setattr(pixels, "without_native_part", lambda folder, view: [])  # it starts another Python
    monkeypatch.setattr(pixels, "ways", without_empty(pixels.ways))
    assert pixels.main() == 0
    printed = capsys.readouterr().out
    for name in ("Drumline, loader's threads", "Drumline, native", "Pillow decode + Drumline resize"):
        (cells,) = rows(printed, name)
        assert cells[1] == cells[5] == "100 %", name

    cutters = script("cutters", *FEW)
    honest = cutters.window_of

    def one_value_off(*arguments: Any) -> Any:
        window = honest(*arguments).copy()
        window[5, 5, 0] ^= 1
        return window

    monkeypatch.setattr(cutters, "window_of", one_value_off)
    assert pixels.main() == 1
    (cells,) = rows(capsys.readouterr().out, "Drumline, native")
    assert cells[1] != "100 %"


def test_photographs_are_found_in_folders_and_tars_alike(script: Any, tmp_path: Path) -> None:
    shared = script("photographs")
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for place in ("photos/b.jpg", "photos/deep/a.JPEG"):
        (tmp_path / place).write_bytes(shared.made_up_photograph(len(place)))
    (tmp_path / "photos" / "notes.txt").write_text("not an image")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(tmp_path / "photos", "photos")
    of_folder = shared.photographs(str(tmp_path / "photos"))
    assert of_folder.names == ["b.jpg", "a.JPEG"]
    assert of_folder[:2] == shared.photographs(str(tmp_path / "photos.tar"))[:2]


def test_the_reference_is_crop_then_resize_then_mirror(script: Any) -> None:
    shared = script("photographs")
    values = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    row = np.array([10, 5, 42, 37, 32, 32, 0, 0, 1], np.int32)
    # A crop of the target's size is not resampled at all, so this says where the box and the mirror lie.
    assert np.array_equal(
        shared.pillow_window(Image.fromarray(values), row, 32), values[5:37, 10:42][:, ::-1]
    )


def test_same_answers_counts_a_network_that_sees_equal_pixels(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_answers = script("same_answers", "--made-up", "3")
    torch.manual_seed(0)
    network = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 49, 10))
    monkeypatch.setattr(same_answers, "classifier", lambda: network)
    assert same_answers.main() == 0
    (cells,) = rows(capsys.readouterr().out, "Drumline, CPU path")
    assert cells[1:4] == ["3 of 3"] * 3

    by_loader = same_answers.by_loader
    monkeypatch.setattr(
        same_answers, "by_loader", lambda *arguments: (image[:, ::-1] for image in by_loader(*arguments))
    )
    assert same_answers.main() == 1


@pytest.mark.slow
def test_pixels_without_the_native_part_are_the_same(script: Any, capsys: Any) -> None:
    pixels = script("pixels", *FEW)
    assert pixels.main() == 0
    (cells,) = rows(capsys.readouterr().out, "Drumline, without its native part")
    assert cells[1] == cells[5] == "100 %"


@pytest.mark.slow
def test_feed_cpu_shows_each_loader_at_each_number_of_workers(script: Any, capsys: Any) -> None:
    feed_cpu = script("feed_cpu", *FEW, "--rounds", "1", "--batch", "2", "--workers", "2")
    assert feed_cpu.main() == 0
    printed = capsys.readouterr().out
    for kind in ("Drumline, threads", "Drumline, processes", "DataLoader + PIL transforms"):
        assert [cells[1] for cells in rows(printed, kind)] == ["1", "2"]


@pytest.mark.slow
def test_feed_gpu_checks_every_sample_of_a_tiny_run(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ("--device", "cpu", "--tiny", "--only", "resnet18", "--modes", "eager", "--rounds", "1")
    feed_gpu = script("feed_gpu", *tiny)
    assert feed_gpu.main() == 0
    assert "Drumline against Pillow: 32 of 32 samples equal" in capsys.readouterr().out

    honest = feed_gpu.drumline

    def one_sample_off(*arguments: Any) -> Any:
        for number, (images, labels) in enumerate(honest(*arguments)):
            if number == 3:
                images[1, 0, 0, 0] ^= 1
            yield images, labels

    monkeypatch.setattr(feed_gpu, "drumline", one_sample_off)
    assert feed_gpu.main() == 1
    assert "Drumline against Pillow: 31 of 32 samples equal" in capsys.readouterr().out


@pytest.mark.slow
def test_fault_outcomes_damages_a_run_and_notices_other_bits(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = script("fault_outcomes", "--quick")
    assert faults.main() == 0
    printed = capsys.readouterr().out
    for fault in ("cut to half: optimizer.safetensors", "one bit flipped: manifest.json"):
        (cells,) = rows(printed, fault)
        assert cells[1] == "warned, went on from step-14 of step-7, step-14, step-21"
        assert cells[2:] == ["0", "1 bad", "the same bits"]

    wrong = faults.Outcome("a fault", "said", 0, "sound", faults.words_of(False), good=False)
    assert not faults.told(lambda: wrong).good
    assert "NOT AS IT SHOULD BE" in capsys.readouterr().out


@pytest.mark.slow
def test_distill_speed_measures_every_way_and_notices_one_that_computes_another_loss(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    distill_speed = script("distill_speed", "--device", "cpu", "--quick")
    assert distill_speed.main() == 0
    printed = capsys.readouterr().out
    for name, count in (("by hand", 2), *((f"Drumline, {way}", 2) for way in ("live", "cached", "alone"))):
        found = rows(printed, name)
        assert len(found) == count
        assert all(float(cells[3].replace(",", "")) > 0 for cells in found)
    assert "left out" not in printed
    assert len([line for line in printed.splitlines() if line.startswith(("pass: ", "FAIL: "))]) == 6
    assert printed.count("filling the cache") == 2
    assert "the same" in printed

    ways, honest = distill_speed.entries, distill_speed.ByHand.step
    monkeypatch.setattr(distill_speed, "entries", lambda *arguments: ways(*arguments)[:3])
    monkeypatch.setattr(distill_speed.ByHand, "step", lambda arm, batch: 1.05 * honest(arm, batch))
    assert distill_speed.main() == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_distill_quality_makes_each_run_once_and_says_what_is_missing(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = ("--quick", "--out", str(tmp_path))
    quality = script("distill_quality", *out)
    assert quality.main() == 0
    printed = capsys.readouterr().out
    for name, agrees in (("teacher", False), ("alone", True), ("kd", True)):
        (cells,) = rows(printed, name)
        assert cells[1] == "1"
        assert (cells[7] != "-") == agrees
    assert printed.splitlines()[-1].endswith("nothing is said: kd.")
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["teacher", "alone", "kd"]

    script("distill_quality", *out, "--seeds", "0,1", "--methods", "kd,dkd", "--budget", "0")
    assert quality.main() == 0
    again = capsys.readouterr().out
    assert rows(again, "kd") == rows(printed, "kd")
    for missing in ("alone, seed 1", "kd, seed 1", "dkd, seed 0", "dkd, seed 1"):
        assert f"Missing: {missing}: no time left" in again
    assert again.count("Missing") == 4

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(quality, "distill", broken)
    script("distill_quality", *out, "--methods", "kd,dkd")
    assert quality.main() == 1
    assert "Missing: dkd, seed 0: failed: RuntimeError: no such luck" in capsys.readouterr().out


def test_layouts_measures_no_schedule_faster_than_its_ideal_and_pipelines_faster_than_none(
    script: Any, capsys: Any
) -> None:
    layouts = script("layouts", "--quick", "--no-processes")
    ideal = {"model": "192", "gpipe": "120", "1f1b": "120", "interleaved": "108"}
    best = dict.fromkeys(ideal, float("inf"))
    for _ in range(5):  # a busy machine may hold any step up, but not each time
        assert layouts.main() == 0
        printed = capsys.readouterr().out
        for name in ideal:
            row = rows(printed, name)[0]
            assert row[4] == ideal[name]
            assert float(row[5]) > float(ideal[name])
            best[name] = min(best[name], float(row[5]))
        if max(best, key=lambda name: best[name]) == "model":
            break
    assert all(best[name] < best["model"] for name in best if name != "model"), best


@pytest.mark.slow
def test_layouts_measures_processes_too(script: Any, capsys: Any, tmp_path: Path) -> None:
    layouts = script("layouts", "--quick", "--log", str(tmp_path / "log"))
    assert layouts.main() == 0
    printed = capsys.readouterr().out
    assert len(rows(printed, "1f1b")) == 3
    assert "1 replica(s) of two ranks" in printed
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {line["what"] for line in lines} == {"threads", "processes", "exchange"}


def test_layout_memory_notices_a_lane_that_keeps_more_than_promised(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = script("layout_memory", "--quick")
    assert memory.main() == 0
    printed = capsys.readouterr().out
    for name in ("gpipe", "1f1b", "interleaved"):
        for cells in rows(printed, name):
            assert cells[3] == cells[4]
            assert cells[5] == cells[6]
    monkeypatch.setattr(memory, "promised_in_flight", lambda *arguments: 3)
    assert memory.main() == 1
    assert "MORE than promised" in capsys.readouterr().out


@pytest.mark.slow
def test_copy_overlap_shows_a_gain_draws_it_and_notices_other_bits(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overlap = script("copy_overlap", "--quick", "--out", str(tmp_path))
    assert overlap.main() == 0
    printed = capsys.readouterr().out
    (gpipe,) = rows(printed, "gpipe")
    assert float(gpipe[4]) < float(gpipe[2])
    assert [cells[4] for cells in rows(printed, "cifar/resnet8")[:3]] == ["0"] * 3
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".json"}

    honest = overlap.ModelInStages.score
    monkeypatch.setattr(overlap, "on_cpu", lambda *arguments: 0)
    monkeypatch.setattr(overlap, "overlap_on_gpu", lambda *arguments: None)

    def one_off(job: Any, micro: int, output: Any) -> Any:
        return honest(job, micro, output) * (1 + (micro == 2 and "lane" in threading.current_thread().name))

    monkeypatch.setattr(overlap.ModelInStages, "score", one_off)
    assert overlap.main() == 1
    assert rows(capsys.readouterr().out, "cifar/resnet8")[0][4] != "0"


def test_distill_quality_refuses_a_method_before_anything_is_trained(
    script: Any, capsys: Any, tmp_path: Path
) -> None:
    quality = script("distill_quality", "--quick", "--methods", "kdd", "--out", str(tmp_path / "out"))
    assert quality.main() == 2
    assert "distill.method = kdd" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_distill_quality_shortens_warm_ups_and_initial_stages_with_the_run(script: Any) -> None:
    quality = script("distill_quality")
    assert quality.method_words("kd+ls", 30) == ["distill.method=kd", "distill.standardise=true"]
    assert quality.method_words("dkd", 30) == ["distill.method=dkd", "distill.options=dkd.warmup:2.5"]
    assert quality.method_words("factor", 24) == ["distill.method=factor", "distill.initial_epochs=3"]
    assert quality.method_words("dist@T=4", 24) == ["distill.method=dist", "distill.T=4"]


def test_distill_quality_calls_a_method_better_only_beyond_both_half_spreads(script: Any) -> None:
    table = script("distill_table")

    def runs(*last: float) -> list[Any]:
        return [
            table.Done("", seed, "", "", "", 0, 1, top1, top1, 1.0, None, 1.0, 1.0)
            for seed, top1 in enumerate(last)
        ]

    told = table.verdict(
        {
            "alone": runs(0.70, 0.72),
            "far": runs(0.740, 0.750),
            "near": runs(0.71, 0.74),
            "worse": runs(0.5, 0.5),
            "once": runs(0.9),
        }
    )
    better, rest = told.split(" Not: ")
    assert better.endswith(": far (+3.50 points, half-spreads 1.50).")
    assert rest.startswith(
        "near (+1.50 points, half-spreads 2.50), worse (-21.00 points, half-spreads 1.00)."
    )
    assert rest.endswith("nothing is said: once.")
    assert table.half_spread([0.1, 0.2, 0.3]) == pytest.approx(0.1)


def without_empty(ways: Any) -> Any:
    """Leaves out the ways that give no windows."""
    return lambda *arguments, **named: (
        (name, windows) for name, windows in ways(*arguments, **named) if windows != []
    )

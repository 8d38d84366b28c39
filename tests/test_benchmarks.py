"""Every benchmark runs from end to end in its small form, and those that check something notice when it is wrong."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drumline.config.recipe import Recipe

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef main(" in path.read_text())


@dataclass(frozen=True)
class SmallRun:
    """A script that ran in its small form."""

    folder: Path

    @property
    def printed(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def code(self) -> int:
        return int((self.folder / "code").read_text())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SmallRun]:
    """Every script, run once with `--small`."""
    folder = tmp_path_factory.mktemp("small")
    subprocess.run(
        [sys.executable, "-m", "tests.small_benchmarks", str(folder), *SCRIPTS],
        cwd=FOLDER.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=900,
    )
    return {name: SmallRun(folder / name) for name in SCRIPTS}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_runs_in_its_small_form(small: dict[str, SmallRun], name: str) -> None:
    """With tiny sizes on a CPU. What needs more is skipped there, with a line that says so."""
    done = small[name]
    assert done.code == 0, done.printed + (done.folder / "stderr").read_text()[-3000:]
    assert "|---|" in done.printed or "first tenth" in done.printed
    assert "Traceback" not in done.printed


@pytest.mark.slow
def test_loop_overhead_trains_its_tiny_network_past_the_step_where_it_once_diverged(
    small: dict[str, SmallRun],
) -> None:
    (cells,) = rows(small["loop_overhead"].printed, "tiny CNN")
    assert cells[-1] == "yes"
    assert "deterministic: 2 + 40 steps a round" in (small["loop_overhead"].folder / "stderr").read_text()


@pytest.mark.slow
def test_faults_kills_a_run_and_compares_its_bits_with_the_uninterrupted_run(
    small: dict[str, SmallRun],
) -> None:
    """A run that finishes before its kill is followed by another one, so there may be several."""
    printed = small["faults"].printed
    (cells,) = rows(printed, "strict")
    kills, finished, equal = map(int, cells[1:4])
    assert kills == 1
    assert finished == equal >= 1
    assert f"{equal} of {finished} finished runs have the same hash as the uninterrupted run" in printed


def test_faults_covers_every_layout_and_adds_up_its_logs(script: Any, capsys: Any, tmp_path: Path) -> None:
    faults = script("faults")
    every = faults.settings(list(faults.LAYOUTS), 4, 240)
    assert {setting.layout for setting in every} == {
        *("strict", "single", "ddp", "fsdp", "pipeline", "data x pipeline")
    }
    assert {size for setting in every for size in setting.worlds} == {1, 2, 3, 4}
    assert all(len(setting.worlds) == 1 for setting in every if setting.layout != "strict")
    for setting in every:
        Recipe.from_args([*setting.words(), "run.name=killed"])
    killed = {"kind": "a rank", "at": 1.0, "step": 9, "by_itself": True, "processes": 2, "resumed": 5}
    lines = [
        {"layout": "ddp", "source": "digits", "kills": [{**killed, "recovered": 3.0}] * 2, "worlds": [2]},
        {"layout": "fsdp", "source": "files", "kills": [{**killed, "recovered": 3.0}], "worlds": [4, 4]},
        {"kills": [], "worlds": [3], "same": True, "orphans": 0, "unexplained": []},  # of an older log
    ]
    for line in lines:
        with (tmp_path / f"{line.get('layout')}.jsonl").open("w") as file:
            file.write(json.dumps({"same": True, **line}) + "\n")
    logs = sorted(map(str, tmp_path.iterdir()))
    script("faults", "--report", *logs)
    assert faults.main() == 0
    printed = capsys.readouterr().out
    assert rows(printed, "a rank") == [["a rank", "3", "4.0 / 4", "2.0 / 2.0"]]
    assert rows(printed, "ddp") == [["ddp", "2", "1", "1", "1 x 2"]]
    assert rows(printed, "fsdp") == [["fsdp", "1", "1", "1", "2 x 4"]]
    assert "3 of 3 finished runs" in printed
    with Path(logs[0]).open("a") as file:
        file.write(json.dumps({**lines[0], "same": False}) + "\n")
    assert faults.main() == 1
    assert "3 of 4 finished runs" in capsys.readouterr().out


def test_faults_rejects_an_unknown_layout(script: Any, capsys: Any) -> None:
    faults = script("faults", "--layouts", "strict,dpp")
    with pytest.raises(SystemExit):
        faults.main()
    assert "--layouts: dpp" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_script_has_a_docstring(script: Any, name: str) -> None:
    assert script(name).__doc__


@pytest.mark.slow
def test_guard_latency_names_the_guard_and_the_step(small: dict[str, SmallRun]) -> None:
    printed = small["guard_latency"].printed
    assert rows(printed, "`model.module(x)`") == [["`model.module(x)`", "bypass", "1", "1", "stopped"]]
    assert rows(printed, "a NaN in one") == [
        ["a NaN in one rank's batch at step 5", "non-finite", "5", "5", "stopped"]
    ]


@pytest.mark.slow
def test_feed_cpu_finds_drumlines_pixels_equal_and_times_every_loader_with_every_number_of_workers(
    small: dict[str, SmallRun],
) -> None:
    printed = small["feed_cpu"].printed
    assert "3 synthetic photographs (no --path given)" in printed
    (ours,) = rows(printed, "Drumline, native")
    assert ours[-1] == "100 %"
    (boxed,) = rows(printed, "Pillow resize(box=)")
    assert boxed[-1] != "100 %"
    for kind in ("Drumline, threads", "Drumline, processes", "DataLoader + PIL transforms"):
        assert [cells[1] for cells in rows(printed, kind)] == ["1", "2"]


@pytest.mark.slow
def test_jpeg_rule_makes_valid_files_of_every_kind_and_shows_which_the_rule_accepts(
    script: Any, small: dict[str, SmallRun]
) -> None:
    jpeg_rule = script("jpeg_rule")
    made = list(jpeg_rule.corpus([jpeg_rule.jpeg(Image.new("RGB", (90, 70), "red"), 80)], 6))
    for sample in made:
        with Image.open(io.BytesIO(sample.data)) as image:
            image.load()
            header = jpeg_rule.read_header(sample.data)
            assert image.size == (header.width, header.height)
    accepted, left = small["jpeg_rule"].printed.split("Left to the CPU")
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


@pytest.mark.slow
def test_pixels_finds_drumlines_pixels_equal_with_and_without_the_native_extension(
    small: dict[str, SmallRun],
) -> None:
    for name in (
        *("Drumline, loader's threads", "Drumline, native", "Drumline, without the native extension"),
        "Pillow decode + Drumline resize",
    ):
        (cells,) = rows(small["pixels"].printed, name)
        assert cells[1] == cells[5] == "100 %", name


def test_pixels_exits_with_1_if_one_value_differs_from_pillows(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = script("pixels", "--small")
    monkeypatch.setattr(pixels, "without_native_part", lambda folder, view: [])  # it starts another Python
    monkeypatch.setattr(pixels, "ways", without_empty(pixels.ways))
    cutters = script("cutters")
    script("pixels", "--small")
    honest = cutters.crop_encoded

    def one_value_off(*arguments: Any) -> Any:
        window = honest(*arguments).copy()
        window[5, 5, 0] ^= 1
        return window

    monkeypatch.setattr(cutters, "crop_encoded", one_value_off)
    assert pixels.main() == 1
    (cells,) = rows(capsys.readouterr().out, "Drumline, native")
    assert cells[1] != "100 %"


def test_photographs_are_found_in_folders_and_tars(script: Any, tmp_path: Path) -> None:
    shared = script("photographs")
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for name in ("photos/b.jpg", "photos/deep/a.JPEG"):
        (tmp_path / name).write_bytes(shared.made_up_photograph(len(name)))
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


@pytest.mark.slow
def test_same_answers_counts_every_answer_as_equal_for_equal_pixels(small: dict[str, SmallRun]) -> None:
    (cells,) = rows(small["same_answers"].printed, "Drumline, CPU path")
    assert cells[1:4] == ["3 of 3"] * 3


def test_same_answers_notices_pixels_that_differ(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same_answers = script("same_answers", "--small")
    by_loader = same_answers.by_loader
    monkeypatch.setattr(
        same_answers, "by_loader", lambda *arguments: (image[:, ::-1] for image in by_loader(*arguments))
    )
    assert same_answers.main() == 1


@pytest.mark.slow
def test_feed_gpu_checks_every_sample_of_a_tiny_run(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, small: dict[str, SmallRun]
) -> None:
    assert "Drumline against Pillow: 32 of 32 samples equal" in small["feed_gpu"].printed

    feed_gpu = script("feed_gpu", "--small")
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
def test_fault_outcomes_damages_a_run_and_notices_different_bits(
    script: Any, capsys: Any, small: dict[str, SmallRun]
) -> None:
    printed = small["fault_outcomes"].printed
    for fault in ("cut to half: optimizer.safetensors", "one bit flipped: manifest.json"):
        (cells,) = rows(printed, fault)
        assert cells[1] == "warned, resumed from step-14 of step-7, step-14, step-21"
        assert cells[2:] == ["0", "1 bad", "the same bits"]

    faults = script("fault_outcomes")
    wrong = faults.Outcome("a fault", "said", 0, "sound", faults.words_of(False), good=False)
    assert not faults.report_row(lambda: wrong).good
    assert "NOT AS EXPECTED" in capsys.readouterr().out


@pytest.mark.slow
def test_distill_speed_measures_every_loop_and_notices_a_different_loss(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, small: dict[str, SmallRun]
) -> None:
    printed = small["distill_speed"].printed
    for name, count in (
        ("hand-written", 2),
        *((f"Drumline, {way}", 2) for way in ("live", "cached", "alone")),
    ):
        found = rows(printed, name)
        assert len(found) == count
        assert all(float(cells[3].replace(",", "")) > 0 for cells in found)
    assert "skipped" not in printed
    assert len([line for line in printed.splitlines() if line.startswith(("pass: ", "FAIL: "))]) == 6
    assert printed.count("filling the cache") == 2
    assert "the same" in printed

    distill_speed = script("distill_speed", "--small")
    ways, honest = distill_speed.entries, distill_speed.ByHand.step
    monkeypatch.setattr(distill_speed, "entries", lambda *arguments: ways(*arguments)[:3])
    monkeypatch.setattr(distill_speed.ByHand, "step", lambda arm, batch: 1.05 * honest(arm, batch))
    assert distill_speed.main() == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_distill_table_trains_each_run_once_and_lists_missing_runs(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, small: dict[str, SmallRun]
) -> None:
    folder = small["distill_table"].folder / "distill-table"
    printed = small["distill_table"].printed
    for name, agrees in (("teacher", False), ("alone", False), ("kd", True)):
        (cells,) = rows(printed, name)
        assert cells[1] == "1"
        assert (cells[7] != "-") == agrees
    assert printed.splitlines()[-1].endswith("no verdict: kd.")
    runs = json.loads((folder / "results.json").read_text())["runs"]
    assert {run["method"] for run in runs} == {"teacher", "alone", "kd"}
    kept = [path.suffix for path in folder.rglob("*") if path.is_file()]
    assert set(kept) == {".json", ".log", ".safetensors"}
    assert kept.count(".safetensors") == 1, "the teacher's"
    folder = folder.rename(folder.with_name("moved"))

    out = ("--small", "--out", str(folder))
    table = script("distill_table", *out, "--seeds", "0", "1", "--methods", "kd", "dkd", "--budget", "0")
    assert table.main() == 0
    again = capsys.readouterr().out
    assert rows(again, "kd") == rows(printed, "kd")
    for missing in ("alone, seed 1", "kd, seed 1", "dkd, seed 0", "dkd, seed 1"):
        assert f"Missing: {missing}: no time left" in again
    assert again.count("Missing") == 4

    monkeypatch.setattr(table.sys, "executable", "/bin/false")
    script("distill_table", *out, "--methods", "kd", "dkd")
    assert table.main() == 1
    assert "Missing: dkd, seed 0: failed with exit code 1" in capsys.readouterr().out


@pytest.mark.slow
def test_distill_table_saves_its_runs_at_the_deadline_and_continues_them(
    script: Any, capsys: Any, tmp_path: Path
) -> None:
    out = ("--small", "--out", str(tmp_path), "--epochs")
    assert script("distill_table", *out, "400", "--budget", "9").main() == 0
    printed = capsys.readouterr()
    assert "the teacher is not trained yet (saved; the same command continues it)" in printed.out
    (log,) = (tmp_path / "runs").glob("*.log")
    assert len([*(tmp_path / "runs").glob("*/checkpoints/step-*")]) == 1, log.read_text()
    assert not [*(tmp_path / "runs").glob("*/weights")]


def test_layouts_finds_pipelines_faster_than_stages_in_turn_and_slower_than_their_ideal(
    script: Any, capsys: Any
) -> None:
    layouts = script("layouts", "--small", "--no-processes")
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
def test_layouts_measures_pipelines_across_processes(small: dict[str, SmallRun]) -> None:
    printed = small["layouts"].printed
    assert len(rows(printed, "1f1b")) == 3
    assert "1 replica(s) of two ranks" in printed
    lines = [json.loads(line) for line in (small["layouts"].folder / "log.jsonl").read_text().splitlines()]
    assert {line["what"] for line in lines} == {"threads", "processes", "exchange"}


@pytest.mark.slow
def test_layout_memory_notices_a_rank_that_keeps_more_than_predicted(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, small: dict[str, SmallRun]
) -> None:
    memory = script("layout_memory", "--small")
    printed = small["layout_memory"].printed
    for name in ("gpipe", "1f1b", "interleaved"):
        for cells in rows(printed, name):
            assert cells[3] == cells[4]
            assert cells[5] == cells[6]
    monkeypatch.setattr(memory, "max_in_flight", lambda *arguments: 3)
    assert memory.main() == 1
    assert "MORE than predicted" in capsys.readouterr().out


@pytest.mark.slow
def test_copy_overlap_measures_a_gain_draws_timelines_and_notices_different_bits(
    script: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, small: dict[str, SmallRun]
) -> None:
    printed = small["copy_overlap"].printed
    overlap = script("copy_overlap", "--small")
    (gpipe,) = rows(printed, "gpipe")
    if float(gpipe[4]) >= float(gpipe[2]):  # other tests have taken the cores meanwhile: measured once more
        overlap.main()
        (gpipe,) = rows(capsys.readouterr().out, "gpipe")
    assert float(gpipe[4]) < float(gpipe[2])
    assert [cells[4] for cells in rows(printed, "cifar/resnet8")[:3]] == ["0"] * 3
    assert {path.suffix for path in (small["copy_overlap"].folder / "timelines").iterdir()} == {
        ".svg",
        ".json",
    }

    honest = overlap.ModelInStages.score
    monkeypatch.setattr(overlap, "on_cpu", lambda *arguments: 0)
    monkeypatch.setattr(overlap, "overlap_on_gpu", lambda *arguments: None)

    def one_off(job: Any, micro: int, output: Any) -> Any:
        return honest(job, micro, output) * (1 + (micro == 2 and "lane" in threading.current_thread().name))

    monkeypatch.setattr(overlap.ModelInStages, "score", one_off)
    assert overlap.main() == 1
    assert rows(capsys.readouterr().out, "cifar/resnet8")[0][4] != "0"


def test_distill_table_rejects_an_unknown_method_before_training(
    script: Any, capsys: Any, tmp_path: Path
) -> None:
    table = script("distill_table", "--small", "--methods", "kdd", "--out", str(tmp_path / "out"))
    assert table.main() == 2
    assert "distill.method = kdd" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_distill_table_takes_an_npz_file(script: Any, tmp_path: Path) -> None:
    table = script("distill_table")
    setting = table.Setting("cifar100", "cifar100.npz", "resnet56-resnet20", 240, ("alone", "kd"), (0,))
    assert all("data.source=npz" in job.words for job in table.jobs_of(setting))


def test_distill_table_calls_a_run_that_was_stopped_while_it_started_unfinished(
    script: Any, capsys: Any, tmp_path: Path
) -> None:
    table = script("distill_table", "--small", "--out", str(tmp_path), "--budget", "0.5")
    assert table.main() == 0, capsys.readouterr()
    assert "the teacher is not trained yet (saved; the same command continues it)" in capsys.readouterr().out


def test_distill_table_runs_presets_and_shortens_warm_ups_and_initial_phases(script: Any) -> None:
    table = script("distill_table")

    def words(method: str, epochs: float, set_: str = "cifar100") -> dict[str, str]:
        setting = table.Setting(set_, "", "resnet32x4-resnet8x4", epochs, ("alone", method), (0,))
        return dict(word.split("=", 1) for word in table.recipe_words(setting, method, 0))

    full = words("dkd", 240)
    preset = dict(word.split("=", 1) for word in table.preset_arguments("cifar100/dkd/resnet32x4-resnet8x4"))
    assert preset.items() <= full.items()
    short = words("dkd", 30)
    assert (short["train.epochs"], short["optim.milestones"]) == ("30", "18.75,22.5,26.25")
    assert "warmup=2.5" in short["distill.options"]
    assert words("dkd", 30, "digits")["distill.options"] == "dkd.warmup:2.5"
    assert words("factor", 24)["distill.initial_epochs"] == "3"
    assert words("kd+ls", 30, "digits")["distill.standardise"] == "true"
    assert words("dist@T=4", 24)["distill.T"] == "4"


def test_distill_table_says_which_figures_are_reproduced(script: Any) -> None:
    report = script("distill_report")
    setting = report.Setting("cifar100", "", "resnet32x4-resnet8x4", 240, ("alone", "kd", "dkd"), (0,))

    def runs(*last: float) -> list[Any]:
        return [report.Done("", "", 0, "", "", "", 0, 1, top1, top1, None) for top1 in last]

    text = report.reproduction(setting, {"alone": runs(0.725), "kd": runs(0.73, 0.732), "dkd": runs(0.75)})
    assert text == ("Within 0.5 points of the published figure: alone (+0.00), kd (-0.23). Not: dkd (-1.32).")


def test_distill_report_calls_a_method_better_only_if_the_gain_exceeds_both_half_spreads(
    script: Any,
) -> None:
    table = script("distill_report")

    def runs(*last: float) -> list[Any]:
        return [
            table.Done("", "", seed, "", "", "", 0, 1, top1, top1, None) for seed, top1 in enumerate(last)
        ]

    text = table.verdict(
        {
            "alone": runs(0.70, 0.72),
            "far": runs(0.740, 0.750),
            "near": runs(0.71, 0.74),
            "worse": runs(0.5, 0.5),
            "once": runs(0.9),
        }
    )
    better, rest = text.split(" Not: ")
    assert better.endswith(": far (+3.50 points, half-spreads 1.50).")
    assert rest.startswith(
        "near (+1.50 points, half-spreads 2.50), worse (-21.00 points, half-spreads 1.00)."
    )
    assert rest.endswith("no verdict: once.")
    assert table.half_spread([0.1, 0.2, 0.3]) == pytest.approx(0.1)


def without_empty(ways: Any) -> Any:
    """Leaves out the ways that give no windows."""
    return lambda *arguments, **named: (
        (name, windows) for name, windows in ways(*arguments, **named) if windows != []
    )

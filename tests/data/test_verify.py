"""`drumline verify DATASET`: finds every kind of damage, agrees with the run, and raises no false alarm."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from drumline import native
from drumline.cli.verify import SHOWN, describe, is_dataset, summary, write_list
from drumline.core.errors import UserError
from drumline.data.examine import examine
from drumline.data.image.decode import decode
from drumline.data.packed import format as packed
from drumline.data.sources import DatasetSpec, EncodedDataset, open_dataset
from drumline.data.verify import BAD, WARNINGS, DatasetFinding, DatasetReport, verify_dataset
from tests.data.damage import KINDS, build_damaged_set, encoded, flipped, good_jpeg, picture

pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")


def decodes(data: bytes) -> bool:
    try:
        decode(data, "it")
        return True
    except UserError:
        return False


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    build_damaged_set(folder)
    return folder


@pytest.fixture(scope="module")
def report(damaged: Path) -> DatasetReport:
    return verify_dataset(damaged, workers=1)


def small_set(folder: Path, count: int = 4) -> None:
    """Two classes, both splits, all good."""
    for seed in range(4 * count):
        place = folder / ("train", "val")[seed % 2] / f"class{seed // 2 % 2}" / f"{seed:03}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(good_jpeg(seed))


def kinds_by_name(report: DatasetReport) -> dict[str, str]:
    return {Path(finding.path).name: finding.kind for finding in report.findings}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_damage_is_found_in_every_check(name: str) -> None:
    kind = KINDS[name]
    for seed in range(4):
        good = good_jpeg(seed, 48 + 7 * seed, 80 - 5 * seed)
        data = kind(good)
        assert data == kind(good)
        if kind.outcome != "either":
            assert decodes(data) == (kind.outcome == "good")
            found = [found for found, _ in examine(data, f"folder/{name}{kind.suffix}").findings]
            assert found == ([kind.finding] if kind.finding else [])


def test_verify_reports_as_bad_exactly_the_files_that_decode_rejects(
    damaged: Path, report: DatasetReport
) -> None:
    files = [path for path in damaged.rglob("*") if path.is_file()]
    rejected = {str(path) for path in files if not decodes(path.read_bytes())}
    assert {finding.path for finding in report.findings if finding.kind in BAD} == rejected
    assert len(rejected) > 20
    assert report.samples == len(files)


def test_sound_images_give_no_findings(report: DatasetReport) -> None:
    assert [finding for finding in report.findings if Path(finding.path).name.startswith("good")] == []


def test_ids_and_splits_are_those_of_the_run(damaged: Path, report: DatasetReport) -> None:
    for side in ("train", "eval"):
        source = open_dataset(DatasetSpec("folder", str(damaged), side))
        assert isinstance(source, EncodedDataset)
        assert dict(report.splits)[side] == len(source)
        for finding in report.findings:
            if finding.split == side:
                assert source.where(finding.sample) == finding.path


def test_kinds_are_counted_and_harmless_ones_are_notes(report: DatasetReport) -> None:
    counted = summary(report)
    assert counted["bad"] + counted["warnings"] == sum(counted["kinds"].values()) == len(report.findings)
    assert counted["kinds"].keys() <= {*BAD, *WARNINGS}
    assert counted["notes"] == {"animated": 1, "cmyk": 2, "16-bit": 1}
    assert json.loads(json.dumps(counted)) == counted


@pytest.mark.slow
def test_several_processes_give_the_same_report(damaged: Path, report: DatasetReport) -> None:
    assert verify_dataset(damaged, workers=3) == report


def test_a_sound_set_is_sound(tmp_path: Path) -> None:
    small_set(tmp_path)
    report = verify_dataset(tmp_path)
    assert not report.bad
    assert report.findings == ()
    assert report.splits == (("train", 8), ("eval", 8))
    assert describe(report) == ["ok   16 samples (train 8, eval 8): all sound"]


def test_the_same_bytes_in_both_splits_are_a_leak(tmp_path: Path) -> None:
    small_set(tmp_path)
    inside, outside = tmp_path / "train/class1/002.jpg", tmp_path / "val/class0/zz.jpg"
    outside.write_bytes(inside.read_bytes())
    for split in ("train", "val"):  # equal, but bad: no leak
        (tmp_path / split / "class0/empty.jpg").touch()
    report = verify_dataset(tmp_path)
    leaks = [finding for finding in report.findings if finding.kind == "leak"]
    assert [(leak.split, leak.path) for leak in leaks] == [("eval", str(outside))]
    assert str(inside) in leaks[0].reason
    assert report.bad == 2


def test_a_leak_alone_is_a_warning(tmp_path: Path) -> None:
    small_set(tmp_path)
    (tmp_path / "val/class0/zz.jpg").write_bytes((tmp_path / "train/class0/000.jpg").read_bytes())
    report = verify_dataset(tmp_path)
    assert not report.bad
    assert report.warnings == 1


def test_files_that_are_not_images_by_their_names_are_a_warning(tmp_path: Path) -> None:
    for number in range(4):
        place = tmp_path / "photos" / ("train", "val")[number // 2] / "ab"[number % 2]
        place.mkdir(parents=True)
        (place / "1.jpg").write_bytes(good_jpeg(number))
        (place / "2.heic").write_bytes(b"whatever")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(tmp_path / "photos", "photos")
    for path in (tmp_path / "photos", tmp_path / "photos.tar"):
        report = verify_dataset(path, workers=1)
        assert not report.bad
        assert [(found.split, found.sample, found.kind) for found in report.findings] == [
            ("train", -1, "passed-over"),
            ("eval", -1, "passed-over"),
        ]
        assert "2 files that are not images, by extension: .heic 2" in describe(report)[0]


def test_class_folders_without_a_split_are_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jpg").write_bytes(good_jpeg(ord(name)))
    (tmp_path / "a/y.jpg").write_bytes(good_jpeg(3)[:500])
    report = verify_dataset(tmp_path)
    assert report.splits == (("train", 3),)
    assert kinds_by_name(report) == {"y.jpg": "truncated"}


def test_a_flat_folder_of_images_can_be_checked(tmp_path: Path) -> None:
    (tmp_path / "b.jpg").write_bytes(good_jpeg())
    (tmp_path / "a.png").write_bytes(encoded(picture(), "PNG")[:300])
    (tmp_path / "notes.txt").write_text("not looked at")
    report = verify_dataset(tmp_path)
    assert report.splits == (("images", 2),)
    assert kinds_by_name(report) == {"a.png": "truncated"}


def test_a_broken_link_and_a_pipe_are_named_and_the_rest_is_checked(tmp_path: Path) -> None:
    small_set(tmp_path)
    (tmp_path / "train/class0/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    os.mkfifo(tmp_path / "train/class0/pipe.jpg")
    (tmp_path / "val/class1/cut.jpg").write_bytes(good_jpeg(1)[:700])
    report = verify_dataset(tmp_path)
    assert kinds_by_name(report) == {
        tmp_path.name: "unopened",
        "gone.jpg": "unreadable",
        "pipe.jpg": "unreadable",
        "cut.jpg": "truncated",
    }
    assert report.splits == (("train", 10), ("eval", 9))


def test_links_that_go_round_in_circles_do_not_hang_it(tmp_path: Path) -> None:
    small_set(tmp_path)
    (tmp_path / "train/class0/again").symlink_to(tmp_path / "train")
    report = verify_dataset(tmp_path)
    assert report.kinds == {"unopened": 1}
    assert report.samples == 16


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_set(tmp_path)
    scan = os.scandir

    def fail(path: str) -> object:
        if str(path).endswith("class1"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", fail)
    report = verify_dataset(tmp_path)
    unreadable = [finding.path for finding in report.findings if finding.kind == "unreadable"]
    assert unreadable == [str(tmp_path / split / "class1") for split in ("train", "val")]


def test_a_missing_path_or_one_without_images_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UserError):
            verify_dataset(path)


def test_arrays_are_checked_for_leaks_and_damage(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    labels = np.arange(40) % 4
    file = tmp_path / "set.npz"
    np.savez(file, x_train=images[:30], y_train=labels[:30], x_test=images[29:], y_test=labels[29:])
    report = verify_dataset(file)
    assert [(leak.kind, leak.split, leak.sample) for leak in report.findings] == [("leak", "eval", 0)]
    assert report.splits == (("train", 30), ("eval", 11))
    file.write_bytes(flipped(file.read_bytes(), 3000))
    assert verify_dataset(file).kinds["unopened"] >= 1


def test_one_cut_off_idx_file_is_named_and_the_other_split_checked(tmp_path: Path) -> None:
    for prefix, count in (("train", 20), ("t10k", 5)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 6, 6), np.uint8).tobytes()
        labels = bytes(number % 5 for number in range(count))
        images = struct.pack(">IIII", 0x803, count, 6, 6) + pixels
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)
    assert not verify_dataset(tmp_path).bad
    file = tmp_path / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-7])
    report = verify_dataset(tmp_path)
    assert report.splits == (("train", 20),)
    assert [(finding.split, finding.kind) for finding in report.findings] == [("eval", "unopened")]
    assert str(file) in report.findings[0].reason


def test_a_tar_gives_the_findings_of_its_folder(damaged: Path, report: DatasetReport, tmp_path: Path) -> None:
    file = tmp_path / "set.tar"
    with tarfile.open(file, "w") as archive:
        archive.add(damaged, ".")
    inside = verify_dataset(file, workers=1)
    assert [(f.split, f.sample, f.kind) for f in inside.findings] == [
        (f.split, f.sample, f.kind) for f in report.findings
    ]


def packed_set(folder: Path, samples: list[bytes], names: list[str]) -> None:
    folder.mkdir()
    with packed.SplitWriter(folder, "train", None, packed.Split(0, (), 0)) as writer:
        for data, name in zip(samples, names, strict=True):
            stored = packed.StoredSample(data, packed.SampleKind.OTHER, 64, 56, 1, zlib.crc32(data))
            writer.add(stored, 0, name.encode())
        split = writer.commit()
    packed.write_manifest(
        folder,
        packed.PackedManifest(
            "folder",
            "files",
            ("a",),
            packed.PackOptions(),
            "job",
            packed.sealed(folder, "train", split),
            None,
        ),
    )


def test_every_flipped_bit_of_a_packed_set_is_found(tmp_path: Path) -> None:
    samples = [good_jpeg(seed) for seed in range(6)]
    samples[4] = samples[4][:600]  # packed as it was
    # A name that does not fit is no matter here: packing may change the format.
    packed_set(tmp_path / "set", samples, ["a/0.png", *(f"a/{number}.jpg" for number in range(1, 6))])
    assert is_dataset(tmp_path / "set")
    assert [(f.sample, f.kind) for f in verify_dataset(tmp_path / "set").findings] == [(4, "truncated")]
    shard = packed.shard_file(tmp_path / "set", "train", 0)
    shard.write_bytes(flipped(shard.read_bytes(), len(samples[0]) + len(samples[1]) - 300))
    report = verify_dataset(tmp_path / "set")
    assert [(f.sample, f.kind) for f in report.findings] == [(1, "changed"), (4, "truncated")]
    assert report.source == "packed"


def test_a_packed_set_with_a_damaged_index_is_not_sound(tmp_path: Path) -> None:
    packed_set(tmp_path / "set", [good_jpeg()], ["a/0.jpg"])
    index = packed.index_file(tmp_path / "set", "train")
    index.write_bytes(flipped(index.read_bytes(), 10))
    report = verify_dataset(tmp_path / "set")
    assert report.kinds == {"unopened": 1}
    assert report.bad
    assert "none could be opened" in describe(report)[-1]


def only(data: bytes, name: str = "x.jpg") -> list[str]:
    return [kind for kind, _ in examine(data, name).findings]


def test_damage_that_pillow_ignores_is_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "jpeg_warnings", lambda data: None)  # by the markers alone
    restarts = encoded(picture(), restart_marker_blocks=2)
    at = restarts.index(b"\xff\xd1")
    wrong = restarts[:at] + b"\xff\xd2" + restarts[at + 2 :]
    unended = [data for data in (good_jpeg(seed)[:-2] for seed in range(40)) if decodes(data)]
    png = encoded(picture(), "PNG")
    assert decodes(wrong)
    assert unended
    assert only(restarts) == []
    assert only(wrong) == only(unended[0]) == ["suspect"]
    assert only(png, "x.png") == []
    assert only(flipped(png, png.index(b"IEND") - 5), "x.png") == ["suspect"]
    assert only(png[:-12], "x.png") == ["suspect"]
    assert only(png + b"after the end", "x.png") == []


def test_warnings_of_libjpeg_make_a_file_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {None: [], -1: [], 0: [], 2: ["suspect"]}
    for answer, findings in answers.items():
        monkeypatch.setattr(native, "jpeg_warnings", lambda data, answer=answer: answer)
        assert only(good_jpeg()) == findings


def test_later_frames_may_be_damaged() -> None:
    frames = KINDS["animation-called-jpg"](good_jpeg())
    for length in range(len(frames) // 2, len(frames), 7):
        if decodes(frames[:length]):
            assert "mislabelled" in only(frames[:length])


@pytest.mark.parametrize(
    ("format", "name", "mislabelled"),
    [
        ("JPEG", "a.JPEG", False),
        ("JPEG", "a.webp", True),
        ("PPM", "a.pgm", False),
        ("TIFF", "a.tif", False),
        ("WEBP", "a.webp", False),
        ("WEBP", "a.jpg", True),
        ("PNG", "a.JPG", True),
        ("BMP", "a.bmp", False),
        ("PNG", "no extension", False),
    ],
)
def test_extension_and_content_are_compared(format: str, name: str, mislabelled: bool) -> None:
    assert only(encoded(picture(), format), name) == (["mislabelled"] if mislabelled else [])


def test_long_lists_are_shortened_on_the_screen_and_complete_in_the_file(tmp_path: Path) -> None:
    small_set(tmp_path / "set")
    for number in range(SHOWN + 3):
        (tmp_path / "set/train/class0" / f"z{number:02}.jpg").touch()
    report = verify_dataset(tmp_path / "set")
    lines = describe(report)
    assert sum(line.startswith("BAD  empty (train") for line in lines) == SHOWN
    assert any("3 more" in line for line in lines)
    write_list(report, tmp_path / "list.tsv")
    rows = [line.split("\t") for line in (tmp_path / "list.tsv").read_text().splitlines()]
    assert len(rows) == SHOWN + 3
    assert rows[0] == [
        "4",
        "train",
        "empty",
        str(tmp_path / "set/train/class0/z00.jpg"),
        "is empty (0 bytes)",
    ]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_names_that_are_not_text_or_control_a_terminal_are_escaped(tmp_path: Path) -> None:
    small_set(tmp_path / "set")
    folder = os.fsencode(tmp_path / "set/train/class0")
    for name in (b"caf\xe9.jpg", b"\x1b[2J.jpg", b"two\nlines\t.jpg"):
        Path(os.fsdecode(folder + b"/" + name)).touch()
    report = verify_dataset(tmp_path / "set")
    assert report.bad == 3
    for line in describe(report):
        assert line.isprintable()
        line.encode("utf-8")
    write_list(report, tmp_path / "list.tsv")
    rows = (tmp_path / "list.tsv").read_bytes().splitlines()
    assert len(rows) == 3
    assert all(row.count(b"\t") == 4 for row in rows)
    assert folder + b"/caf\xe9.jpg" in b"\t".join(rows)
    assert b"\x1b" not in b"".join(rows)


@pytest.mark.parametrize("division", [{"holdout": 0.5}, {"folds": 2, "fold": 1}])
def test_equal_files_in_the_two_parts_of_a_division_are_leaks(
    tmp_path: Path, division: dict[str, Any]
) -> None:
    for number in range(8):
        file = tmp_path / "cat" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 6), (number % 2 * 200, 9, 9)).save(file)
    assert verify_dataset(tmp_path, workers=1).kinds["leak"] == 0
    divided = DatasetSpec("auto", "", "train", **division)
    report = verify_dataset(tmp_path, workers=1, divided=divided)
    assert dict(report.splits) == {"train": 4, "eval": 4}
    assert report.kinds["leak"] == 4


def test_a_list_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    report = DatasetReport("x", "folder", (), (DatasetFinding("train", 0, "empty", "p", "r"),), ())
    with pytest.raises(UserError, match="--list"):
        write_list(report, tmp_path / "no such folder" / "list.tsv")


def test_runs_and_checkpoints_are_not_data_sets(tmp_path: Path) -> None:
    small_set(tmp_path / "data")
    (tmp_path / "flat").mkdir()
    for run in ("begun", "saved/checkpoints/step-10", "single/step-3", "run/step-9"):
        (tmp_path / run).mkdir(parents=True)
    (tmp_path / "begun/recipe.toml").touch()
    (tmp_path / "run/step-9/manifest.json").touch()
    (tmp_path / "set.npz").touch()
    data = {path: is_dataset(tmp_path / path) for path in ("data", "flat", "set.npz", "missing")}
    assert data == {"data": True, "flat": True, "set.npz": True, "missing": False}
    runs = ("begun", "saved", "saved/checkpoints", "saved/checkpoints/step-10", "single/step-3", "run/step-9")
    assert [run for run in runs if is_dataset(tmp_path / run)] == []


PROGRAM = """
import sys, time
from pathlib import Path
from drumline.data import verify
if __name__ == "__main__":
    print("begun", flush=True)
    verify.verify_dataset(Path(sys.argv[1]), workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_check(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "set" / "class0"
    folder.mkdir(parents=True)
    big = encoded(picture(0, 2000, 2000))
    for index in range(400):
        (folder / f"{index}.jpg").write_bytes(big)
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "set")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 20
    while len(family := parent.children(recursive=True)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)  # the resource tracker, the fork server and two checkers
    time.sleep(0.5)
    assert len(family) == 4
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=20)
    assert psutil.wait_procs(family, timeout=10)[1] == []
    # One KeyboardInterrupt, the parent's; none from its processes.
    assert errors.count("Traceback") == (1 if number == signal.SIGINT else 0), errors

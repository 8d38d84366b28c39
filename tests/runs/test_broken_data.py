"""Runs on damaged data: no crash, no hang, a reported outcome, and the same bits each time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.data.image.decode import decode
from drumline.data.verify import BAD
from drumline.state.verify import verify_run
from tests.data.damage import KINDS, build_damaged_set, encoded, good_jpeg, picture
from tests.runs.command import begin, drumline, metrics, result, wait_until

pytestmark = pytest.mark.slow

RECIPE = (
    "data.batch=20",
    "data.size=32",
    "data.bad_limit=0.5",
    "data.pool=threads",
    "data.workers=1",
    "model.name=resnet8",
    "train.epochs=2",
    "train.log_every=1",
    "parallel.threads=1",
    "parallel.timeout=60",
)
"""Ten steps that meet every sample of the damaged set twice."""
PATIENCE_S = 120
"""A run takes some seconds; one that takes this long hangs."""
Ids = list[tuple[str, int]]


@dataclass(frozen=True)
class Damaged:
    """A folder with the data set `set` and the run `plain` on it."""

    folder: Path
    broken: frozenset[str]
    """The broken files, as the run writes them: relative to the folder, printable."""
    result: dict[str, Any]
    reported: str

    def run(self, name: str, *words: str, data: str = "set", **env: str) -> dict[str, Any]:
        return result(trained(self.folder, name, *words, data=data, **env))

    def sha256(self, name: str) -> str:
        return verify_run(self.folder / "runs" / name).state_sha256

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for kind in ("train", "eval") for line in metrics(self.folder, name, kind)]


def trained(
    folder: Path, name: str, *words: str, data: str = "set", **env: str
) -> subprocess.CompletedProcess[str]:
    return drumline(
        "train", "--data.path", data, *RECIPE, f"run.name={name}", *words,
        folder=folder, timeout=PATIENCE_S, **env,
    )  # fmt: skip


def listed(folder: Path, name: str) -> list[tuple[str, int, str]]:
    """The lines of a run's list of broken samples: split, sample id, problem."""
    lines = (folder / "runs" / name / "broken-samples.tsv").read_text().splitlines()
    parts = [line.split("\t") for line in lines]
    return [(split, int(sample), what) for split, sample, what in parts]


def ids(folder: Path, name: str) -> Ids:
    return [(split, sample) for split, sample, _ in listed(folder, name)]


def names(lines: list[tuple[str, int, str]], known: frozenset[str]) -> set[str]:
    """The files that the lines name."""
    found = {name for _, _, what in lines for name in known if what.startswith(f"{name} ")}
    assert len(found) == len(lines)
    return found


def undecodable(file: Path) -> bool:
    try:
        decode(file.read_bytes(), file.name)
    except UserError:
        return True
    return False


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    folder = tmp_path_factory.mktemp("broken")
    kinds = build_damaged_set(folder / "set", good_images=81)
    odd = folder / "set/train/class1/archive.jpg"
    kinds[odd.rename(odd.with_name(os.fsdecode(b"arch\xff\tive\n.jpg")))] = kinds.pop(odd)
    assert len(kinds) > len(KINDS) >= 12
    assert sum(1 for _ in (folder / "set/train").rglob("*.*")) % 20 == 0, "every epoch meets every sample"
    (folder / "set/train/class0/notes.txt").write_text("no image")
    broken = {
        file for file, kind in kinds.items()
        if kind.outcome == "bad" or (kind.outcome == "either" and undecodable(file))
    }  # fmt: skip
    done = trained(folder, "plain")
    return Damaged(
        folder,
        frozenset(printable(str(file.relative_to(folder))) for file in broken),
        result(done),
        done.stderr,
    )


def test_the_list_names_exactly_the_broken_files(damaged: Damaged) -> None:
    lines = listed(damaged.folder, "plain")
    assert names(lines, damaged.broken) == damaged.broken
    assert lines == sorted(lines, key=lambda line: (line[0] != "training", line[1]))
    assert damaged.result["broken_samples"] == len(damaged.broken)
    assert damaged.result["finished"]


def test_broken_samples_are_reported_at_the_end(damaged: Damaged) -> None:
    counts = {split: [line[0] for line in listed(damaged.folder, "plain")].count(split)
              for split in ("training", "evaluation")}  # fmt: skip
    log = (damaged.folder / "runs/plain/log.txt").read_text()
    for reported in (damaged.reported, log):
        assert (
            f"WARNING: {counts['training']} of 100 training samples are broken and were replaced" in reported
        )
        assert (
            f"WARNING: {counts['evaluation']} of 43 evaluation samples are broken and were scored as"
            in reported
        )
        assert "set/train/class0/empty.jpg is empty (0 bytes)" in reported
    assert "Traceback" not in damaged.reported


def test_skipped_files_are_reported_at_the_start(damaged: Damaged) -> None:
    words = "WARNING: the training set has 1 file that is not an image, by extension: .txt 1"
    assert words in damaged.reported.split("epoch 1")[0]


def test_verify_agrees_with_the_run(damaged: Damaged) -> None:
    done = drumline("verify", "set", "--list", "found.tsv", folder=damaged.folder, timeout=PATIENCE_S)
    assert done.returncode == 1, done.stderr
    rows = [
        line.split("\t")
        for line in (damaged.folder / "found.tsv").read_text(errors="surrogateescape").split("\n")[:-1]
    ]
    bad = [(split, int(sample)) for sample, split, kind, _, _ in rows if kind in BAD]
    split_of = {"training": "train", "evaluation": "eval"}
    assert sorted(bad) == sorted((split_of[split], sample) for split, sample in ids(damaged.folder, "plain"))


@pytest.mark.parametrize(
    ("name", "words", "env"),
    [
        ("chosen", ("data.pool=auto", "data.workers=auto"), {}),
        ("no-workers", ("data.workers=0",), {}),
        ("three-threads", ("data.workers=3",), {}),
        ("two-loaders", ("data.workers=2", "data.pool=processes"), {}),
        ("no-native", ("data.pool=auto",), {"DRUMLINE_NATIVE": "0"}),
    ],
)
def test_the_bits_and_the_list_do_not_depend_on_the_decoder(
    damaged: Damaged, name: str, words: tuple[str, ...], env: dict[str, str]
) -> None:
    found = damaged.run(name, *words, **env)
    assert found["broken_samples"] == damaged.result["broken_samples"]
    assert ids(damaged.folder, name) == ids(damaged.folder, "plain")
    assert damaged.losses(name) == damaged.losses("plain")
    assert damaged.sha256(name) == damaged.sha256("plain")


@pytest.mark.parametrize(
    ("name", "flags", "words"), [("packed", (), ()), ("raw", ("--raw",), ("data.workers=0",))]
)
def test_a_packed_set_gives_the_bits_of_its_folder(
    damaged: Damaged, name: str, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    packing = drumline("pack", "set", f"set.{name}", *flags, folder=damaged.folder, timeout=PATIENCE_S)
    packed = result(packing)
    assert (packed["train"], packed["eval"]) == (100, 43)
    assert packed["bad"] <= len(damaged.broken), "packing reads headers only, so it sees fewer"
    damaged.run(name, *words, data=f"set.{name}")
    assert ids(damaged.folder, name) == ids(damaged.folder, "plain")
    assert damaged.sha256(name) == damaged.sha256("plain")
    assert all(f"set.{name}" in what for _, _, what in listed(damaged.folder, name)), "the file is named"


def test_a_tar_gives_the_bits_of_its_folder(damaged: Damaged) -> None:
    with tarfile.open(damaged.folder / "set.tar", "w") as archive:
        archive.add(damaged.folder / "set", "set")
    damaged.run("tar", data="set.tar")
    assert ids(damaged.folder, "tar") == ids(damaged.folder, "plain")
    assert damaged.sha256("tar") == damaged.sha256("plain")
    lines = listed(damaged.folder, "tar")
    inside = frozenset(f"set.tar:{name}" for name in damaged.broken)
    assert names(lines, inside) == inside


def test_two_processes_agree_on_the_list_and_repeat_their_bits(damaged: Damaged) -> None:
    first = damaged.run("two", "parallel.processes=2")
    assert first["finished"]
    assert ids(damaged.folder, "two") == ids(damaged.folder, "plain")
    assert first["broken_samples"] == damaged.result["broken_samples"]
    damaged.run("two-loaders-each", "parallel.processes=2", "data.pool=processes")
    assert damaged.sha256("two-loaders-each") == damaged.sha256("two")
    assert listed(damaged.folder, "two-loaders-each") == listed(damaged.folder, "two")


@pytest.mark.parametrize(
    ("processes", "words"),
    [(1, ("data.workers=2", "data.pool=processes")), (2, ()), (2, ("data.workers=0",))],
)
def test_strict_stops_at_once_and_names_the_file(
    damaged: Damaged, processes: int, words: tuple[str, ...]
) -> None:
    name = f"strict-{processes}-{len(words)}"
    done = trained(
        damaged.folder,
        name,
        "--data.strict",
        f"parallel.processes={processes}",
        "checkpoint.every_steps=1",
        *words,
    )
    assert done.returncode == 2
    assert any(file in printable(done.stderr) for file in damaged.broken), done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    saved = damaged.folder / "runs" / name / "checkpoints"
    assert not list(saved.glob("step-*")), "the first epoch's first batches hold broken samples"


@pytest.mark.parametrize("processes", [1, 2])
def test_too_many_broken_samples_stop_the_run_and_are_named(damaged: Damaged, processes: int) -> None:
    done = trained(
        damaged.folder, f"limit-{processes}", "--data.bad_limit", "0.001", f"parallel.processes={processes}"
    )
    assert done.returncode == 2
    assert "of 100 training samples are broken; data.bad_limit allows 1: " in done.stderr
    assert any(file in done.stderr for file in damaged.broken)
    assert (
        "`drumline verify` lists all of them; restore or remove them, or raise data.bad_limit" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert done.stderr.count("are broken; data.bad_limit") == 1, "reported once, not by every rank"


def test_the_limit_counts_the_broken_samples_of_all_processes(damaged: Damaged) -> None:
    """Each process reads some of them. They add up their counts at the first evaluation."""
    broken = sum(split == "training" for split, _ in ids(damaged.folder, "plain"))
    limit = f"data.bad_limit={(broken - 1) / 100}"
    done = trained(damaged.folder, "together", limit, "parallel.processes=2", "data.workers=0")
    assert done.returncode == 2
    assert f"{broken} of 100 training samples are broken; data.bad_limit allows {broken - 1}" in done.stderr
    assert metrics(damaged.folder, "together", "train")[-1]["step"] == 5
    assert done.stderr.count("are broken; data.bad_limit") == 1


@pytest.mark.parametrize("words", [(), ("data.workers=0",), ("parallel.processes=2",)])
def test_a_set_of_only_broken_files_is_an_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    for number in range(24):
        file = tmp_path / "set" / ("val", "train")[number % 2] / f"class{number % 3}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(good_jpeg(number)[:300])
    done = trained(tmp_path, "none", "data.batch=4", "data.bad_limit=1", *words)
    assert done.returncode == 2
    assert "samples cannot be read, the last of them: set/train/class" in done.stderr
    assert "drumline verify" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_stopped_and_resumed_ends_with_the_bits_of_an_uninterrupted_one(damaged: Damaged) -> None:
    longer = (
        "train.epochs=12",
        "train.eval_every=6",
        "checkpoint.every_steps=3",
        "checkpoint.every_epochs=0",
    )
    damaged.run("whole", *longer)
    words = ("--data.path", "set", *RECIPE, *longer, "run.name=stopped")
    run = begin("train", *words, folder=damaged.folder)
    wait_until((damaged.folder / "runs/stopped/checkpoints/step-3").exists, run)
    run.send_signal(signal.SIGINT)
    out, reported = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 128 + signal.SIGINT, reported
    assert '"finished": false' in out
    assert damaged.run("stopped", *longer, "checkpoint.resume=auto")["finished"]
    assert damaged.sha256("stopped") == damaged.sha256("whole")
    assert ids(damaged.folder, "stopped") == ids(damaged.folder, "whole")


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_file_deleted_during_a_run_is_an_error_that_names_it(tmp_path: Path, pool: str) -> None:
    """A file that is truncated during the run is a broken sample instead."""
    build_damaged_set(tmp_path / "set", kinds=())
    deleted, cut = sorted((tmp_path / "set/train").rglob("*.jpg"))[:2]
    words = ("train.epochs=40", "train.eval_every=0", "checkpoint.every_steps=3", f"data.pool={pool}")
    run = begin("train", "--data.path", "set", *RECIPE, *words, "run.name=x", folder=tmp_path)
    wait_until((tmp_path / "runs/x/checkpoints/step-3").exists, run)
    cut.write_bytes(cut.read_bytes()[:500])
    deleted.unlink()
    _, reported = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1, reported
    name = deleted.relative_to(tmp_path)
    assert f"drumline: {name} cannot be read: No such file or directory (8 tries in 9.5 s)" in reported
    assert "Traceback" not in reported
    noted = tmp_path / "runs/x/broken-samples.tsv"
    assert not noted.exists() or str(name) not in noted.read_text()


def test_broken_evaluation_images_score_as_black_ones_and_are_reported(damaged: Damaged) -> None:
    shutil.copytree(damaged.folder / "set", damaged.folder / "black", symlinks=True)
    black = encoded(picture().point(lambda _: 0), "PNG")
    replaced = [file for file in (damaged.folder / "black/val").rglob("*.*") if undecodable(file)]
    for file in replaced:
        file.write_bytes(black)
    reported = f"WARNING: {len(replaced)} of 43 evaluation samples are broken and were scored as black images"
    scores = []
    for words in (("data.path=black",), ("data.path=set",), ("data.path=set", "parallel.processes=2")):
        done = drumline(
            "eval", "runs/plain", *words, "parallel.threads=1", folder=damaged.folder, timeout=PATIENCE_S
        )
        scores.append(result(done))
        assert (reported in done.stderr) == ("data.path=set" in words)
    assert [score.pop("broken_samples") for score in scores] == [0, len(replaced), len(replaced)]
    assert len(replaced) >= 9
    assert scores == [scores[0]] * 3

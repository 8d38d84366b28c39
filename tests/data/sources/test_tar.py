"""Tar archives: the folder source's samples without unpacking, and every archive that must not be trusted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.data.sources import DatasetSpec, detect_source, open_dataset
from drumline.data.sources.base import MappedFiles
from drumline.data.sources.divide import holdout_mask
from drumline.data.sources.tar import members, open_tar
from tests.data.sources.test_folder import FILES

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode("utf-8", "surrogateescape") * 30)
    return root


def archive(folder: Path, file: Path, format: int = tarfile.PAX_FORMAT, within: str = "") -> Path:
    with tarfile.open(file, "w", format=format) as tar:
        for entry in sorted(folder.iterdir(), reverse=True):
            tar.add(entry, f"{within}{entry.name}")
    return file


def made(file: Path, *entries: tarfile.TarInfo | tuple[str, bytes]) -> Path:
    with tarfile.open(file, "w") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return file


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


PLAIN = [("a/1.jpg", b"one"), ("b/2.jpg", b"two")]


def assert_same(file: Path, folder: Path, split: str, holdout: float = 0.0) -> None:
    ours = open_dataset(DatasetSpec("tar", str(file), split, holdout))  # type: ignore[arg-type]
    theirs = open_dataset(DatasetSpec("folder", str(folder), split, holdout))  # type: ignore[arg-type]
    assert isinstance(ours, MappedFiles)
    assert ours.classes == theirs.classes
    np.testing.assert_array_equal(ours.labels, theirs.labels)
    assert [ours.read(i) for i in range(len(ours))] == [theirs.read(i) for i in range(len(theirs))]
    tails = [ours.where(i).partition(":")[2] for i in range(len(ours))]
    assert all(theirs.where(i).endswith(tail.removeprefix("top/")) for i, tail in enumerate(tails))


def error_of(file: Path, split: str = "train", holdout: float = 0.0) -> UserError:
    with pytest.raises(UserError) as caught:
        open_dataset(DatasetSpec("tar", str(file), split, holdout))  # type: ignore[arg-type]
    assert caught.value.fix
    assert file.name in caught.value.what
    return caught.value


@given(
    files=st.lists(FILES, min_size=1, max_size=20),
    format=st.sampled_from(sorted(FORMATS)),
    within=st.sampled_from(["", "./", "top/", "./top/"]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_labels_and_bytes_are_those_of_the_unpacked_folder(tmp_path_factory, files, format, within):
    root = put(tmp_path_factory.mktemp("set"), "c/first.png", "c/dir/second.png")
    for name, deeper, file, ending in files:
        put(root, f"{name}/first.png", "/".join([name, *deeper, file + ending]))
    file = archive(root, root.with_suffix(".tar"), FORMATS[format], within)
    assert_same(file, root, "train")
    assert_same(file, root, "train", 0.3)


def test_folders_are_sorted_by_their_whole_paths(tmp_path):
    root = put(tmp_path / "set", "c/a/z.png", "c/a-b/y.png", "c/x.png", "c/a/b/w.png", "B/10.png", "B/2.png")
    assert_same(archive(root, tmp_path / "x.tar"), root, "train")


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("within", ["", "top/"])
def test_splits_are_found_as_in_folders(tmp_path, format, within):
    root = put(tmp_path / "set", "train/a/1.jpg", "train/b/2.jpg", "train/b/c/3.jpg", "valid/b/4.jpg")
    file = archive(root, tmp_path / "x.tar", FORMATS[format], within)
    assert_same(file, root, "train")
    assert_same(file, root, "eval")
    assert "evaluation split of its own" in error_of(file, holdout=0.1).what


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_long_and_odd_names_are_read(tmp_path, format):
    odd = os.fsdecode(b"caf\xe9 \xff.jpg")
    long = ["a/" + "n" * 200 + ".jpg", f"{'d' * 90}/{'e' * 90}/1.png"]
    root = put(tmp_path / "set", *long, f"ünï 猫/{odd}", "a/'x\n.jpg")
    assert_same(archive(root, tmp_path / "x.tar", FORMATS[format]), root, "train")


def test_a_holdout_has_the_same_samples_as_for_the_folder(tmp_path):
    root = put(tmp_path / "set", *(f"{name}/{i}.jpg" for name in "ab" for i in range(9)))
    file = archive(root, tmp_path / "x.tar")
    assert_same(file, root, "train", 0.25)
    assert_same(file, root, "eval", 0.25)
    labels = open_dataset(DatasetSpec("tar", str(file), "train")).labels
    assert len(open_dataset(DatasetSpec("tar", str(file), "eval", 0.25))) == holdout_mask(labels, 0.25).sum()
    assert "no evaluation split" in error_of(file, "eval").what


def test_archives_of_the_tar_program_are_read(tmp_path):
    root = put(tmp_path / "set", "a/1.jpg", "b/" + "x" * 120 + ".jpg", "b/3.jpg")
    for format in ("v7", "ustar", "gnu", "pax", "oldgnu"):
        if format == "v7":
            (root / "b" / ("x" * 120 + ".jpg")).rename(root / "b" / "short.jpg")
        file = tmp_path / f"{format}.tar"
        subprocess.run(["tar", f"--format={format}", "-cf", file, "-C", root, "."], check=True)
        assert_same(file, root, "train")


def test_pointers_lead_to_the_bytes_that_read_gives(tmp_path):
    import ctypes

    source = open_tar(DatasetSpec("tar", str(made(tmp_path / "x.tar", *PLAIN, ("b/3.png", b""))), "train"))
    ids = np.array([2, 0, 1])
    source.read_ahead(ids)
    addresses, lengths = source.pointers(ids)
    assert addresses.dtype == np.uint64
    assert [ctypes.string_at(int(a), int(n)) for a, n in zip(addresses, lengths, strict=True)] == [
        b"",
        b"one",
        b"two",
    ]


def test_of_two_members_with_one_name_the_later_counts(tmp_path):
    source = open_tar(
        DatasetSpec("tar", str(made(tmp_path / "x.tar", *PLAIN, ("./a//1.jpg", b"newer"))), "train")
    )
    assert [source.read(i) for i in range(len(source))] == [b"newer", b"two"]


def test_other_and_hidden_members_are_ignored_and_counted(tmp_path):
    fifo = link("a/pipe", "", tarfile.FIFOTYPE)
    extra = [(".x/1.jpg", b""), ("a/._1.jpg", b""), ("a/note.txt", b"1"), ("README", b"")]
    source = open_tar(DatasetSpec("tar", str(made(tmp_path / "x.tar", *PLAIN, *extra, fifo)), "train"))
    assert (len(source), source.classes) == (2, ("a", "b"))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([link("a/1.jpg", "../../secret.jpg", tarfile.SYMTYPE)], "symbolic link"),
        ([link("c", "a", tarfile.SYMTYPE)], "symbolic link"),
        ([link("a/9.jpg", "a/1.jpg", tarfile.LNKTYPE)], "hard link"),
        ([link("a/9.jpg", "", tarfile.CHRTYPE)], "device"),
        ([("/a/9.jpg", b"x")], "points outside"),
        ([("a/../../9.jpg", b"x")], "points outside"),
        ([("../a/9.jpg", b"x")], "points outside"),
        ([("a/..", b"x")], "points outside"),
        ([("9.jpg", b"x")], "beside its class folders"),
        ([link("empty", "", tarfile.DIRTYPE)], "'empty' has no images"),
        ([link("val/q", "", tarfile.DIRTYPE)], "looks like a split"),
    ],
)
def test_members_that_cannot_be_trusted_are_rejected(tmp_path, entries, words):
    assert words in error_of(made(tmp_path / "x.tar", *PLAIN, *entries)).what


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([("1.jpg", b"x"), ("2.jpg", b"x")], "without class folders"),
        ([("photos/1.jpg", b"x"), ("photos/2.jpg", b"x")], "one folder, photos/"),
        ([("n01.tar", b"x")], "holds archives"),
        ([], "no class folders"),
        ([("val/a/1.jpg", b"x")], "looks like a split"),
        ([("train/a/1.jpg", b"x"), ("val/b/1.jpg", b"x"), ("train/c/1.jpg", b"x")], ""),
    ],
)
def test_the_error_for_an_archive_without_class_folders_describes_the_layout(tmp_path, entries, words):
    file = made(tmp_path / "x.tar", *entries)
    if words:
        assert words in error_of(file).what
    else:
        assert "'b'" in error_of(file, "eval").what


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_compressed_archives_are_rejected_with_the_command_that_uncompresses_them(tmp_path, mode):
    file = tmp_path / f"x.tar.{mode}"
    with tarfile.open(file, f"w:{mode}") as tar:  # type: ignore[call-overload]
        tar.addfile(tarfile.TarInfo("a/1.jpg"))
    assert detect_source("auto", str(file)) == "tar"
    assert "uncompress" in error_of(file).fix
    file.rename(tmp_path / "x.tar")  # whatever its name says
    assert "compressed" in error_of(tmp_path / "x.tar").what


def test_sparse_members_are_rejected(tmp_path):
    with (tmp_path / "hole.jpg").open("wb") as hole:
        hole.truncate(1 << 20)
        hole.seek(1 << 19)
        hole.write(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "hole.jpg").rename(tmp_path / "a/hole.jpg")
    for format in ("gnu", "pax"):
        command = ["tar", "--sparse", f"--format={format}", "-cf", tmp_path / "x.tar", "-C", tmp_path, "a"]
        subprocess.run(command, check=True)
        assert "sparse" in error_of(tmp_path / "x.tar").what


def test_an_archive_truncated_anywhere_is_rejected(tmp_path):
    whole = made(tmp_path / "x.tar", ("a/1.jpg", b"1" * 700), ("b/2.jpg", b"2" * 5)).read_bytes()
    cut = tmp_path / "cut.tar"
    for size in range(0, 2560 + 512, 32):  # up to the last byte of the mark that ends it
        cut.write_bytes(whole[:size])
        words = error_of(cut).what
        assert "is cut off" in words or size == 0, size
    cut.write_bytes(whole[: 2560 + 512])
    assert len(open_tar(DatasetSpec("tar", str(cut), "train"))) == 2


def resized(file: Path, at: int, size: bytes) -> Path:
    """The archive with another size in the header at byte `at`, whose checksum is right again."""
    data = bytearray(file.read_bytes())
    data[at + 124 : at + 136] = size
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    file.write_bytes(data)
    return file


def test_a_member_that_reaches_one_byte_beyond_the_archive_is_rejected(tmp_path):
    file = made(tmp_path / "x.tar", *PLAIN)
    room = file.stat().st_size - 1024 - 512
    assert "without the mark" in error_of(resized(file, 1024, b"%011o\0" % room)).what
    assert f"has {room + 1} bytes, only {room}" in error_of(resized(file, 1024, b"%011o\0" % (room + 1))).what


def test_links_have_no_data_whatever_size_they_state(tmp_path):
    file = made(tmp_path / "x.tar", link("a/notes", "a/1.jpg", tarfile.LNKTYPE), *PLAIN)
    source = open_tar(DatasetSpec("tar", str(resized(file, 0, b"%011o\0" % 700)), "train"))
    assert [source.read(i) for i in range(len(source))] == [b"one", b"two"]


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"12x\0" + b"\0" * 8]
)
def test_impossible_sizes_are_rejected(tmp_path, size):
    file = resized(made(tmp_path / "x.tar", *PLAIN), 0, size)
    assert "cut off" in error_of(file).what or "damaged" in error_of(file).what


@given(position=st.integers(0, 1023), value=st.integers(0, 255))
@settings(max_examples=150)
def test_a_changed_header_byte_is_rejected_or_changes_nothing(position, value):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a/é" + "x" * 120)
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    data = np.frombuffer(buffer.getvalue(), np.uint8).copy()
    data[position] = value
    try:
        for member in members(data, "x.tar"):
            assert 0 <= member.offset <= member.offset + member.length <= len(data)
    except UserError:
        pass


def test_a_file_that_is_not_a_tar_is_rejected(tmp_path):
    for content in (b"", b"hello", os.urandom(4096), b"\xff\xd8\xff" + bytes(2000)):
        (tmp_path / "x.tar").write_bytes(content)
        error_of(tmp_path / "x.tar")
    error_of(tmp_path / "missing.tar")


def test_nothing_is_written_to_disk(tmp_path):
    file = made(tmp_path / "x.tar", *PLAIN)
    code = (
        "import sys\n"
        "from drumline.data.sources import DatasetSpec, open_dataset\n"
        "def watch(event, args):\n"
        "    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'): sys.exit(3)\n"
        "sys.addaudithook(watch)\n"
        f"source = open_dataset(DatasetSpec('tar', {str(file)!r}, 'train'))\n"
        "assert source.read(1) == b'two'\n"
    )
    assert subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path).returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar"]

"""The table of sources: which one a path belongs to, and what `data.source` may be."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from drumline.config import sources as table
from drumline.config.recipe import Data, Recipe
from drumline.config.sources import SOURCES, Source
from drumline.core.errors import UserError
from drumline.data.sources import DatasetSpec, detect_source, open_dataset


@pytest.mark.parametrize("name", SOURCES)
def test_the_functions_of_each_source_exist(name: str) -> None:
    assert callable(resolve_name(SOURCES[name].open))
    assert not SOURCES[name].detect or callable(resolve_name(SOURCES[name].detect))


def test_auto_is_resolved_by_the_path(tmp_path: Path) -> None:
    assert detect_source("auto", "") == "digits"
    assert detect_source("auto", str(tmp_path)) == "folder"
    assert detect_source("synthetic", "size=8") == "synthetic"
    assert detect_source("pack.mod:make", "x") == "pack.mod:make"
    with pytest.raises(UserError, match="does not exist"):
        detect_source("auto", str(tmp_path / "no"))
    (tmp_path / "a.zip").write_bytes(b"")
    with pytest.raises(UserError, match="is not a supported file") as caught:
        detect_source("auto", str(tmp_path / "a.zip"))
    assert caught.value.fix.startswith(
        "unpack it and give the folder, or give a folder of class folders, a .tar, "
    )
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="is not a supported file") as caught:
        detect_source("auto", str(tmp_path / "a.jpg"))
    assert len(caught.value.fix) < 160


def test_an_unknown_source_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"data.source = 'cifar-10': unknown; did you mean cifar10\?"):
        Recipe(data=Data(source="cifar-10", path="x")).check()
    with pytest.raises(UserError, match=r"data.source = ':': unknown"):
        Recipe(data=Data(source=":")).check()


def test_a_source_is_an_entry_in_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything else about it is made from the entry."""
    (tmp_path / "toy_source.py").write_text(
        "import numpy as np\n"
        "from drumline.data.sources.base import ArrayDataset\n"
        "def is_toy(path):\n"
        "    return path.suffix == '.toy'\n"
        "def open_toy(spec):\n"
        "    labels = np.arange(4)\n"
        "    return ArrayDataset('toy', np.zeros((4, 8, 8, 1), np.uint8), labels, tuple('abcd'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = Source("toy_source:open_toy", "a .toy file", detect="toy_source:is_toy", augment="none")
    monkeypatch.setitem(table.SOURCES, "toy", entry)
    monkeypatch.setitem(vars(table.SOURCE_NAMES), "names", (*table.SOURCE_NAMES.names, "toy"))
    (tmp_path / "some.toy").touch()
    assert detect_source("auto", str(tmp_path / "some.toy")) == "toy"
    assert open_dataset(DatasetSpec("toy", "some.toy", "train")).classes == tuple("abcd")
    with pytest.raises(UserError, match=r"data.source = toy needs a path"):
        Recipe(data=Data(source="toy")).check()
    with pytest.raises(UserError, match="the source toy has an evaluation split of its own"):
        open_dataset(DatasetSpec("toy", "some.toy", "train", holdout=0.1))

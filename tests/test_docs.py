"""The pages say what is true of the repository: links lead somewhere, named tests exist, the map is the tree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target) or not re.search(r"[./#]", target):  # code such as layers[i](x)
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {slug(title) for title in titles}, f"{page.name} links to {target}"


def slug(title: str) -> str:
    """The anchor that a Markdown page gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for name, path in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", page.read_text()):
        assert f"def {name}(" in (page.parent / path).read_text(), f"{path} has no {name}"


def test_the_folder_map_is_that_of_the_tree() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_architecture_map.py"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert maker["with_map"](page) == page, "run `make docs`"

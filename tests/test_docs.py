"""The pages are true to the repository: links, paths, tests, commands, options and recipe fields exist."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

from drumline.cli import COMMANDS
from drumline.cli.help import help_text
from drumline.config.fields import recipe_fields

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCE = ROOT / "src" / "drumline"
SECTIONS = "|".join({name.partition(".")[0] for name in recipe_fields()})
NO_FIELDS = (".py", ".safetensors", ".index", ".names", "model.model")
"""Ends of names that look like recipe fields: files such as `train.index`, and a Python attribute."""
NO_COMMANDS = ("guard", "fingerprints", "help")
"""Words after `drumline` in messages and in the first line of a file; and a word that leads to --help."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def slug(title: str) -> str:
    """The anchor that a Markdown page gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def code_of(page: Path) -> str:
    """The code blocks and code spans of a page."""
    return "\n".join(re.findall(r"```.*?```|^ {4}.*?$|`[^`\n]+`", page.read_text(), re.DOTALL | re.MULTILINE))


@each_page
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


@each_page
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    """Paths in the repository, and module paths below src/drumline."""
    folders = [path.name for root in (ROOT, SOURCE) for path in root.iterdir() if path.is_dir()]
    first = "|".join(re.escape(name) for name in folders if name[0] not in "._")
    for path in re.findall(rf"(?<![\w./-])((?:{first})/[\w./-]*(?:\.py|\.md|/))(?![\w<*])", code_of(page)):
        assert (ROOT / path).exists() or (SOURCE / path).exists(), f"{page.name} names {path}"


@each_page
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for name, path in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", page.read_text()):
        assert f"def {name}(" in (page.parent / path).read_text(), f"{path} has no {name}"


@each_page
def test_every_recipe_field_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(rf"(?<![\w./])(?:--)?((?:{SECTIONS})\.\w+)(?=[=\s`,])", code_of(page)))
    assert not {name for name in named if not name.endswith(NO_FIELDS)} - set(recipe_fields())


@each_page
def test_every_command_and_option_that_a_page_shows_exists(page: Path) -> None:
    lines = re.findall(r"(?:^ *|\$ |`|srun |-m )drumline ([a-z]+)\b([^`\n#]*)", code_of(page), re.MULTILINE)
    for command, words in lines:
        if command in NO_COMMANDS:
            continue
        assert command in COMMANDS, f"{page.name} shows drumline {command}"
        help_page = help_text(import_module(f"drumline.cli.{command}").COMMAND, "")
        for option in re.findall(r"--[a-z][\w-]*(?![\w.-])", words):
            assert option in f"{help_page} --help", f"{page.name} shows drumline {command} {option}"


@each_page
def test_every_script_option_that_a_page_shows_exists(page: Path) -> None:
    for script, words in re.findall(r"python ([a-z]+/\w+\.py)([^`\n#]*)", page.read_text()):
        for option in re.findall(r"--[a-z][\w-]*", words):
            assert f'"{option}"' in (ROOT / script).read_text(), f"{page.name} shows {script} {option}"


def test_the_folder_map_is_that_of_the_tree() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_architecture_map.py"))
    packages = {path.parent.name for path in maker["SOURCE"].glob("*/__init__.py")}
    assert sorted(maker["ORDER"]) == sorted(packages)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert maker["with_map"](page) == page, "run `make docs`"

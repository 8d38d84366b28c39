"""Recipe files: what is written is read back equal; lines are kept; nothing unknown gets through."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.fields import recipe_fields, with_values
from drumline.config.recipe import Data, Optim, Recipe, Run
from drumline.config.toml import dump_recipe, literal, load_recipe
from drumline.core.errors import UserError

_TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        "",
        '"',
        "'",
        "\\",
        '"""',
        "'''",
        "\n",
        "\r\n",
        "\r",
        "\t",
        "\0",
        "\x7f",
        "\x85",
        "\u2028",
        "\\u0041",
        "#",
        "é𝄞",
    ]
)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of type `hint` may hold."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Union or origin is type(int | str):
        return st.one_of(*map(_values, arguments))
    if origin is tuple and arguments[-1] is ...:
        return st.lists(_values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_values, arguments))
    return {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e-10, 1e16, 1e22, -0.0]),
        str: _TEXT,
    }[hint]


recipes = st.fixed_dictionaries(
    {}, optional={name: _values(field.hint) for name, field in recipe_fields().items()}
).map(lambda values: with_values(Recipe(), values))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "recipe.toml"


@given(recipes)
def test_a_written_recipe_is_read_back_equal(scratch: Path, recipe: Recipe) -> None:
    text = dump_recipe(recipe)
    scratch.write_bytes(text.encode())
    loaded = load_recipe(scratch)
    assert loaded.recipe == recipe
    assert repr(loaded.recipe) == repr(recipe)
    assert dump_recipe(loaded.recipe) == text
    assert set(loaded.origins) == set(recipe_fields())


@given(recipes, st.dictionaries(st.sampled_from(list(recipe_fields())), _TEXT))
def test_remarks_never_change_what_is_read(scratch: Path, recipe: Recipe, remarks: dict[str, str]) -> None:
    scratch.write_bytes(dump_recipe(recipe, remarks).encode())
    assert load_recipe(scratch).recipe == recipe


@given(recipes, st.sampled_from(list(recipe_fields())))
def test_the_line_of_a_field_is_the_line_that_names_it(scratch: Path, recipe: Recipe, name: str) -> None:
    text = dump_recipe(recipe)
    scratch.write_bytes(text.encode())
    number = int(load_recipe(scratch).origins[name].rpartition(":")[2])
    line = text.split("\n")[number - 1]
    assert line.startswith(recipe_fields()[name].key + " = ")


def test_a_dump_is_complete_in_order_and_readable() -> None:
    text = dump_recipe(Recipe())
    tree = tomllib.loads(text)
    assert [f"{section}.{key}" for section, table in tree.items() for key in table] == list(recipe_fields())
    assert text.startswith('[run]\ndir = "runs"\nname = "auto"\nseed = 0\n')
    assert "\n\n[data]\n" in text
    assert "betas = [0.9, 0.999]\n" in text
    assert "eps = 1e-08\n" in text
    assert text.endswith("\n")


def test_equal_recipes_give_the_same_text() -> None:
    assert dump_recipe(Recipe(optim=Optim(lr=1))) == dump_recipe(Recipe(optim=Optim(lr=1.0)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "0.1", True])
def test_a_value_that_could_not_be_read_back_is_not_written(bad: Any) -> None:
    with pytest.raises(UserError, match=r"optim\.lr = .* cannot be written"):
        dump_recipe(Recipe(optim=Optim(lr=bad)))


def test_what_a_file_does_not_set_keeps_the_value_of_the_base(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("optim.lr = 3\n[data]\nbatch = 7\n")
    base = Recipe(run=Run(seed=5), data=Data(batch=9, path="x"))
    loaded = load_recipe(path, base)
    assert loaded.recipe == Recipe(run=Run(seed=5), data=Data(batch=7, path="x"), optim=Optim(lr=3.0))
    assert type(loaded.recipe.optim.lr) is float
    assert loaded.origins == {"optim.lr": f"{path}:1", "data.batch": f"{path}:3"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "[run]\n[data]\n", "optim = {}\n"])
def test_an_empty_recipe_is_the_default_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert load_recipe(path).recipe == Recipe()


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf[optim]\r\n\r\nlr = 0.5\r\n")
    loaded = load_recipe(path)
    assert loaded.recipe.optim.lr == 0.5
    assert loaded.origins == {"optim.lr": f"{path}:3"}


@pytest.mark.parametrize("text", ["[[optim]]\nlr = 1\n", "[optim]\nlr.x = 1\n", "[optim]\nlr = {x = 1}\n"])
def test_misplaced_tables_are_rejected_with_their_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"recipe.toml:\d: optim"):
        load_recipe(path)


def test_a_long_value_is_shown_short(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[optim]\nlr = '" + "x" * 500 + "'\n")
    with pytest.raises(UserError) as refused:
        load_recipe(path)
    assert "xxx..." in str(refused.value)
    assert "x" * 100 not in str(refused.value).replace(str(tmp_path), "")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("")
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(path)


def test_literals_are_toml() -> None:
    for value in (True, 1, 1e-10, 'a"\\\n', (1.0, 2.0)):
        read = tomllib.loads(f"x = {literal(value)}")["x"]
        assert (tuple(read) if isinstance(read, list) else read) == value


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000,
        "x = " + "[\n" * 20_000,
        "[a]\nx = " + "{a=" * 2000,
        "[run]\nseed = 1" + "0" * 5000,
        "[run]\nseed = 0x" + "f" * 5000,
        "[" + "a." * 30_000 + "b]",
        "a." * 30_000 + "b = 1",
        "# " + "x" * 100_000,
    ],
)
def test_text_made_to_break_a_parser_is_a_users_error_soon(tmp_path: Path, text: str) -> None:
    """A recipe may be a stranger's."""
    (tmp_path / "r.toml").write_text(text)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"r\.toml") as caught:
        load_recipe(tmp_path / "r.toml")
    assert time.monotonic() - began < 5
    assert len(str(caught.value)) < 2000

"""Lines of keys: found in any way of writing TOML, checked against what tomllib reads."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.toml_places import Place, key_places

TRICKY = '''\
# lr = 1
title = "a # not a comment"   # a comment with = and [x]
"quoted key" . 'and.dots' = 1
[optim]   # header
lr=0.2
  betas = [ 0.9, # ] inside
    0.99,
  ]
text = """
[fake]
lr = 3
\\"""still\\"""
"""
raw = \'\'\'
'' it's
key = "
\'\'\'
ends = """two quotes"""""
raw_ends = \'\'\'and two\'\'\'\'\'
when = 1979-05-27 07:32:00  # a date with a space
table = { a = 1, "b c" = [ { d = "}" } ], e.f = 2 }
nested = [[1, 2], ["]", ']']]
[ data . "deep er" ]
size = "auto"
[[many]]
x = 1
[[many]]
x = 2
'''


def test_tricky_writing_does_not_shift_a_line() -> None:
    places = key_places(TRICKY)
    assert {path: place.line for path, place in places.items() if "[]" not in path} == {
        ("title",): 2,
        ("quoted key",): 3,
        ("quoted key", "and.dots"): 3,
        ("optim",): 4,
        ("optim", "lr"): 5,
        ("optim", "betas"): 6,
        ("optim", "text"): 9,
        ("optim", "raw"): 14,
        ("optim", "ends"): 18,
        ("optim", "raw_ends"): 19,
        ("optim", "when"): 20,
        ("optim", "table"): 21,
        ("optim", "table", "a"): 21,
        ("optim", "table", "b c"): 21,
        ("optim", "table", "e"): 21,
        ("optim", "table", "e", "f"): 21,
        ("optim", "nested"): 22,
        ("data",): 23,
        ("data", "deep er"): 23,
        ("data", "deep er", "size"): 24,
        ("many",): 25,
        ("many", "x"): 26,
    }
    assert places["optim", "lr"] == Place(5, "0.2")
    assert places["optim", "when"].written == "1979-05-27 07:32:00"
    assert places["optim", "ends"].written == '"""two quotes"""""'
    assert places["optim", "raw_ends"].written == "'''and two'''''"
    assert places["optim",].written == ""


@pytest.mark.parametrize("text", ["", "\n", "# only a comment", "[a]", "a=1", "a = 1\r\n[b]\r\nc = 2\r\n"])
def test_short_texts_are_walked_to_their_end(text: str) -> None:
    assert set(key_places(text)) == set(_paths(tomllib.loads(text)))


_KEYS = st.text("abc-_ .\"'#=[]\\é", max_size=4)
_SPACE = st.sampled_from(["", " ", "\t "])
_FILLER = st.sampled_from(["", "\n", "# = [x]\n", "\n  # \"'''\n\n"])
_VALUES = st.recursive(
    st.sampled_from(
        ["1", "-2.5e-3", "true", "2020-01-01 10:00:00", "07:32:00", '"a\\"]#"', "'\\'", '""', "''"]
    )
    | st.sampled_from(
        ['"""\n]\n""\n"""', "'''\n[x]\n''\n'''", '"""a\\\n  b"""'],
    ),
    lambda inner: st.builds(
        lambda items, gap: "[" + f"{gap},\n#]\n".join(items) + ("," if items else "") + "]",
        st.lists(inner, max_size=3),
        _SPACE,
    ),
    max_leaves=5,
)


@given(
    st.dictionaries(
        _KEYS, st.dictionaries(_KEYS, st.tuples(_VALUES, _FILLER, _SPACE), max_size=4), max_size=4
    ),
    st.randoms(use_true_random=False),
)
def test_every_key_is_found_on_its_line_however_it_is_written(tables: dict[str, Any], chance: Any) -> None:
    lines: dict[tuple[str, ...], int] = {}
    inline = [name for name in tables if chance.random() < 0.3]
    dotted = [name for name in tables if name not in inline and chance.random() < 0.5]
    text = ""
    # Dotted and inline tables stand above the first header, or they would belong to it.
    for name, table in sorted(tables.items(), key=lambda item: item[0] not in inline + dotted):
        here = text.count("\n") + 1
        if name in inline:
            lines[name,] = here
            text += f"{_quote(name)} = {{"
            pairs = []
            for key, (_, _, gap) in table.items():
                lines[name, key] = here
                pairs.append(f"{gap}{_quote(key)}{gap}={gap}[1]{gap}")
            text += ",".join(pairs) + "}\n"
            continue
        if name not in dotted:
            lines[name,] = here
            text += f"[{_quote(name)}]\n"
        for key, (value, filler, gap) in table.items():
            text += filler
            lines[name, key] = text.count("\n") + 1
            lines.setdefault((name,), lines[name, key])
            prefix = f"{_quote(name)}{gap}.{gap}" if name in dotted else gap
            text += f"{prefix}{_quote(key)}{gap}={gap}{value}{gap}# end\n"
    places = key_places(text)
    assert {path: place.line for path, place in places.items()} == lines
    assert set(places) == set(_paths(tomllib.loads(text)))


def _quote(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _paths(table: dict[str, Any], above: tuple[str, ...] = ()) -> Any:
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))

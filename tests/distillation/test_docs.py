"""The page on distillation matches the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from drumline.config.fields import recipe_fields

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "distillation.md").read_text()


def test_the_tables_of_methods_and_options_are_up_to_date() -> None:
    maker = runpy.run_path(str(DOCS / "make_method_table.py"))
    assert maker["with_tables"](PAGE) == PAGE, "run `make docs`"


def test_every_field_that_is_named_exists() -> None:
    named = set(re.findall(r"`(?:--)?(distill\.\w+)", PAGE)) | set(re.findall(r"(distill\.\w+)=", PAGE))
    assert len(named) > 8
    assert named <= set(recipe_fields())

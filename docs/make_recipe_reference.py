"""Writes the reference tables: docs/recipe.md from the dataclasses of the recipe, and the guards in docs/guards.md.

Run `python docs/make_recipe_reference.py` after changing a field or a guard; a test fails while a page is stale.
"""

from __future__ import annotations

from pathlib import Path

from drumline.config.fields import Field, recipe_fields, sections
from drumline.config.toml import literal
from drumline.guards.table import GUARDS

PAGE, GUARDS_PAGE = Path(__file__).with_name("recipe.md"), Path(__file__).with_name("guards.md")
BEGIN = "<!-- table: written by docs/make_recipe_reference.py from src/drumline/guards/table.py -->"
END = "<!-- end of table -->"

_OPENING = """\
# Recipe

A recipe is the whole configuration of a run. Every field has a default, so an empty recipe is valid. There are three
ways to set a field. The command line overrides the file, and the last of a repeated flag counts:

| where | for example |
|---|---|
| in a recipe file, below its section | `[optim]` and then `lr = 0.2` |
| on the command line | `drumline train recipe.toml optim.lr=0.2` |
| as a flag | `drumline train recipe.toml --optim.lr 0.2` |

Lists are `[0.9, 0.99]` in a file, `optim.betas=0.9,0.99` or `--optim.betas 0.9 0.99` on the command line.
`--train.compile` and `--train.no-compile` turn a switch on and off. An unknown name is an error that suggests the
nearest one. `--dry-run` prints the resolved recipe with the origin of each value, and what would happen.
`drumline train --help` lists the fields on the terminal, `drumline train --help optim` explains a section, and
`drumline train --help optim.lr` a field.

In Python, `Recipe.from_args` takes the same arguments and makes the same checks:

```python
import drumline

recipe = drumline.Recipe.from_args(["recipe.toml", "optim.lr=0.2"])
```

A mistake raises `UserError` with every error and its fix. `Recipe(optim=Optim(lr=0.2), train=Train(epochs=3))`
builds a recipe from its sections, which a type checker understands; `recipe.check()` then makes the same checks.

<!-- Written by make_recipe_reference.py from src/drumline/config/recipe.py: change that file, not this one. -->
"""


def reference() -> str:
    """The page as Markdown: a table for each section."""
    blocks = [_OPENING]
    for section, kind in sections().items():
        rows = [_row(field) for field in recipe_fields().values() if field.section == section]
        blocks.append(
            f"## [{section}]\n\n{kind.__doc__}\n\n"
            "| field | takes | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(blocks)


def _row(field: Field) -> str:
    cells = (
        f"`{field.key}`",
        field.takes(),
        f"`{literal(field.default)}`",
        f"{field.help} {field.details}".strip(),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def with_guards(page: str) -> str:
    """docs/guards.md with the table of guards as it is."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    rows = [
        f"| `{guard.name}` | {'stops' if guard.stops else 'warns'} | {guard.finds} |"
        for guard in GUARDS.values()
    ]
    table = "\n".join(["| guard | | finds |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    GUARDS_PAGE.write_text(with_guards(GUARDS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")

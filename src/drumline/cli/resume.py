"""`drumline resume`: continue a run where it stopped."""

from __future__ import annotations

from pathlib import Path

from drumline.cli.help import Command
from drumline.config.arguments import RecipeOptions
from drumline.core.errors import UserError

COMMAND = Command(
    name="resume",
    usage="RUN [section.key=value ...] [options]",
    about="""
        Continue a run where it stopped or was killed, from its newest valid checkpoint, with
        the recipe in its folder. It takes the same steps with the same bits
        as if it had not been interrupted. A finished run is evaluated again, and its result
        is printed.

        `drumline resume RUN` means `drumline train RUN/recipe.toml checkpoint.resume=auto`,
        or the same with `distill` if that is what started the run. Fields on the command
        line override the recipe; the log names those that change the result.
    """,
    options=RecipeOptions,
    examples="""
  drumline resume runs/photos
  drumline resume runs/photos parallel.processes=2
  drumline resume runs/photos train.epochs=120
""",
)


def main(argv: list[str]) -> int:
    from drumline.cli import distill, train
    from drumline.config.toml import load_recipe
    from drumline.state.folder import command_of, run_of

    if not argv or argv[0].startswith("-") or "=" in argv[0]:
        raise UserError("resume needs a run", "drumline resume RUN (`drumline runs` lists them)")
    path, *others = argv
    for argument in others:
        name = argument.lstrip("-").partition("=")[0]
        if name == "repeat":
            raise UserError(
                f"{argument}: resume continues one run",
                "remove it; to continue with the other seeds, repeat the `drumline train ... --repeat` command",
            )
        if name in ("run.name", "run.dir", "checkpoint.resume"):
            raise UserError(
                f"{argument}: resume continues the run in its own folder",
                f"remove it; to start a new run from this one: drumline train {path}/recipe.toml run.name=NEW "
                f"checkpoint.resume={path}",
            )
    folder = Path(path)
    if not folder.exists():
        raise UserError(f"{path} does not exist", "give a run folder (`drumline runs` lists them)")
    if run_of(folder) is None:
        raise UserError(
            f"{path} is not a run folder: it has no recipe.toml", "`drumline runs` lists the runs"
        )
    # By the path that was given: the recipe's own folder may be a link.
    file = str((folder.parent if folder.is_file() else folder) / "recipe.toml")
    if not Path(file).is_file():
        raise UserError(
            f"{path} is a part of a run", f"resume the run itself: drumline resume {run_of(folder)}"
        )
    arguments = [file, "checkpoint.resume=auto", *others]
    return (train if command_of(load_recipe(file).recipe) == "train" else distill).main(arguments)

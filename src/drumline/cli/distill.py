"""`drumline distill`: one run of a recipe with a teacher."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drumline.cli.help import Command
from drumline.cli.repeat import RepeatOptions, dry_run, recipes
from drumline.cli.train import COMMON, run, with_preset
from drumline.config.arguments import read_recipe
from drumline.config.fields import sections
from drumline.core.errors import UserError


@dataclass(frozen=True)
class Options(RepeatOptions):
    """The options of `drumline distill`."""

    presets: bool = False
    """List the published recipes and stop."""


COMMAND = Command(
    name="distill",
    usage="[PRESET|RECIPE.toml] [section.key=value ...] [options]",
    about="""
        Train a student that learns from the labels and from a teacher: a run folder, a
        checkpoint or a weights file. Measures the teacher's accuracy first. Does everything
        that `train` does, with the loss r x cross-entropy + a x kd + b x METHOD. The weights
        and the temperature T default to those of each method's paper. Without a trained
        teacher, use distill.teacher=ema or distill.teacher=peer.
    """,
    options=Options,
    examples="""
  drumline distill distill.teacher_weights=runs/teacher model.name=resnet18 ...
  drumline distill ... distill.method=dkd distill.options=beta:2,warmup:5
  drumline distill ... distill.options=schedule:cosine,end:0.1  fade kd out
  drumline distill ... distill.method=crd,kd distill.b=0.8 distill.a=1
  drumline distill ... distill.method=mine:Method    your own (add-a-method.md)
  drumline distill ... distill.cache=caches/teacher  store the teacher's outputs
  drumline distill cifar100/crd/resnet32x4-resnet8x4 data.path=cifar100
      distill.teacher_weights=runs/resnet32x4         a published recipe
  drumline distill --presets                          list them
""",
    sections=("distill", *(section for section in sections() if section != "distill")),
    common=("distill.teacher_weights", "distill.method", "distill.cache", *COMMON),
)


def main(argv: list[str]) -> int:
    if "--presets" in argv:
        from drumline.distillation.presets import listing

        print(listing())
        return 0
    if argv and re.match(r"\w+/(alone|teacher)/", argv[0]):
        raise UserError(f"{argv[0]} trains one network", f"use drumline train {argv[0]}")
    argv = with_preset(argv)
    invocation = read_recipe(argv, "distill", Options)
    runs = recipes(invocation.recipe, invocation.options.repeat, invocation.origins)
    if invocation.options.dry_run:
        return dry_run(invocation, runs, "distill")

    from drumline.distillation.selection import select_methods
    from drumline.distillation.teacher import check_teachers

    select_methods(invocation.recipe.distill)
    check_teachers(invocation.recipe.distill)
    return run(["distill", *argv], runs, "distill", invocation.origins)

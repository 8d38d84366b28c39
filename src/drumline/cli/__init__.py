"""The command `drumline`: finds the module of a subcommand and runs it.

Each module in this package that is named like a command has a `COMMAND`, which describes it for `--help`, and a
`main`, which reads its arguments and returns the exit code. A user's mistake is one message without a traceback and
exit code 2. If stdout is not a terminal, the last line that a command prints on it is its result as JSON.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from drumline.core.environment import thread_defaults
from drumline.core.errors import UserError
from drumline.core.text import near, wrapped

HELP = """usage: drumline COMMAND ...

Train PyTorch vision models on a CPU, a GPU, many GPUs or many machines, with
the same command.

commands:
  train    train a model
  distill  train a model with a teacher
  resume   continue a run
  runs     list runs and how they differ
  eval     score a run or weights
  predict  classify images with a trained model
  export   export a verified model for other programs
  pack     pack a data set into a few large files
  verify   check a run or a data set for damage
  why      report why a run is slow, and what would help
  compare  report whether two runs have the same bits
  plan     list where a model can be cut into pipeline stages
  doctor   check this machine
  demo     train and distil on the embedded digits, in about a minute

examples:
  drumline demo
  drumline train data.path=photos model.name=resnet50
  drumline eval runs/photos-resnet50-1
  drumline distill distill.teacher_weights=runs/photos-resnet50-1
      data.path=photos model.name=resnet18

`drumline COMMAND --help` explains a command; `drumline --version` prints the
version.
"""

COMMANDS = (
    "train",
    "distill",
    "resume",
    "runs",
    "eval",
    "predict",
    "export",
    "pack",
    "verify",
    "why",
    "compare",
    "plan",
    "doctor",
    "demo",
)
OTHER_COMMANDS = {
    **dict.fromkeys(("fit", "run", "finetune", "fine-tune"), "train"),
    **dict.fromkeys(("evaluate", "test", "validate", "val", "score"), "eval"),
    **dict.fromkeys(("convert", "save", "onnx", "deploy", "freeze"), "export"),
    **dict.fromkeys(("infer", "inference", "classify", "label"), "predict"),
    **dict.fromkeys(("continue", "restart"), "resume"),
    **dict.fromkeys(("ls", "list", "history", "table"), "runs"),
    **dict.fromkeys(("teach", "kd", "distil"), "distill"),
    **dict.fromkeys(("check", "fsck", "validate-data"), "verify"),
    **dict.fromkeys(("diff",), "compare"),
    **dict.fromkeys(("diagnose", "profile", "slow"), "why"),
    **dict.fromkeys(("info", "env", "collect_env"), "doctor"),
    **dict.fromkeys(("version",), "--version"),
}
"""Commands by their names in other programs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # torch's native code repeats on stderr what we report ourselves; read when torch is first imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(thread_defaults(os.environ))
    if (here := str(Path.cwd())) not in sys.path:
        # For the user's own `package.module:factory`; last, so that nothing installed is shadowed.
        sys.path.append(here)
    try:
        return _dispatch(argv)
    except UserError as error:
        text = f"drumline: {error}"
        at_terminal = sys.stderr is not None and sys.stderr.isatty()
        print(wrapped(text, get_terminal_size().columns) if at_terminal else text, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has closed it; the interpreter must not fail over it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("drumline: interrupted", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help", *argv[2:]]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if argv else 2
    name, *rest = argv
    if name in ("--version", "-V"):
        from drumline import __version__

        print(f"drumline {__version__}")
        return 0
    if name not in COMMANDS:
        meant = (
            [OTHER_COMMANDS[name]]
            if name in OTHER_COMMANDS
            else near(name, [*COMMANDS, "--version", "--help"])
        )
        raise UserError(
            f"there is no command {name!r}",
            f"did you mean `drumline {meant[0]}`?" if meant else f"use one of: {', '.join(COMMANDS)}",
        )
    module = importlib.import_module(f"drumline.cli.{name}")
    asked = [number for number, text in enumerate(rest) if text in ("-h", "--help")]
    if asked:
        from drumline.cli.help import help_text

        print(help_text(module.COMMAND, "".join(rest[asked[0] + 1 :][:1])))
        return 0
    code: int = module.main(rest)
    return code

"""The command `drumline`: one function per subcommand, nothing else.

Promises: a user's mistake is told in one message without a traceback and ends with exit code 2; when stdout is
not a terminal, the last line that train, eval, verify, compare and plan print on it is their result as JSON.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shutil import get_terminal_size

from drumline.config.recipe import Distill, Recipe
from drumline.core.environment import thread_defaults
from drumline.core.errors import UserError
from drumline.core.result import print_result
from drumline.core.text import message, wrapped

HELP = """usage: drumline COMMAND ...

Train PyTorch vision models on a CPU, a GPU, many GPUs or many machines, with the same command.

commands:
  train    train a model:            drumline train --model.name resnet50 --data.path photos
  distill  teach a small model:      drumline distill --distill.teacher_weights runs/photos-resnet50-1
                                       --model.name resnet18 --data.path photos
  eval     score a run or weights:   drumline eval runs/photos-resnet50-1
  pack     pack a data set:          drumline pack photos photos.packed
  verify   check a data set or run:  drumline verify photos
  compare  same bits or not:         drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2
  plan     where to cut a model:     drumline plan --cuts resnet50 --stages 4
  doctor   examine this machine:     drumline doctor
  demo     a teacher and its student, from data to weights, on the embedded digits

Start with `drumline demo`. `drumline COMMAND --help` explains each command; `drumline --version` prints the version.
"""

OTHER_COMMANDS = {
    **dict.fromkeys(("fit", "run", "finetune", "fine-tune", "resume"), "train"),
    **dict.fromkeys(("evaluate", "test", "validate", "val", "score"), "eval"),
    **dict.fromkeys(("teach", "kd", "distil"), "distill"),
    **dict.fromkeys(("check", "fsck", "validate-data"), "verify"),
    **dict.fromkeys(("diff",), "compare"),
    **dict.fromkeys(("info", "env", "collect_env"), "doctor"),
    **dict.fromkeys(("version",), "--version"),
}
"""Commands by what other programs call them."""

TRAIN_HELP = """Train a model. Everything has a default: `drumline train` alone trains on the embedded
digits. The run folder holds the recipe, metrics, checkpoints and weights."""

DISTILL_HELP = """Teach a student by a trained teacher (a run folder, a checkpoint or a weights file), whose accuracy
is measured first. Does all that `train` does, with the loss r x cross-entropy + a x kd + b x METHOD; weights and the
temperature T default to each method's paper."""

VERIFY_HELP = """usage: drumline verify RUN_OR_CHECKPOINT
       drumline verify DATASET [--list FILE] [--workers N] [--source NAME]

Check every byte of every checkpoint of a run (or of one checkpoint) against its checksums, and print the hash of
the newest state: parameters, buffers and optimizer. Two runs with the same hash hold the same bits.

Or check a data set (folders of images, .tar, packed set, idx, CIFAR, npz): every sample is decoded as a run would
decode it; truncated, damaged, bomb-sized and mislabelled files are listed, and files that both splits share.
  --list FILE    write all findings to FILE, one a line, tab-separated
  --workers N    processes that decode (default: one per core)
  --source NAME  what it is, where that cannot be told: folder, tar, packed, idx, cifar10, cifar100, npz

Exit code 0: no problems. 1: problems, each of them listed.

examples:
  drumline verify runs/photos-resnet50-1
  drumline verify photos --list broken.tsv
"""

COMPARE_HELP = """usage: drumline compare RUN_A RUN_B

Say whether two runs hold the same bits. Each writes fingerprints.txt while it trains: short numbers of the samples,
gradients, buffers, parameters and optimizer state after the first three steps, every guard.every steps and at each
checkpoint. Reports the first step that differs and, within it, the first differing tensor; the last step that agrees;
what differs in recipe and set-up; and, where both have a later checkpoint, how far apart they are.
Takes checkpoints (RUN/checkpoints/step-N) too. Runs of different length are compared as far as both go.

Exit code 0: equal. 1: different. 2: cannot be compared, such as a damaged file.

examples:
  drumline compare runs/photos-resnet50-1 runs/photos-resnet50-2
  drumline compare runs/a/checkpoints/step-500 runs/b
  diff runs/a/fingerprints.txt runs/b/fingerprints.txt | head    the same question, asked by hand
"""

DOCTOR_HELP = """usage: drumline doctor [--models]

Examine this machine: versions, GPUs, cores, memory, limits, network interfaces, transports. Each line is ok, warn
or fail, with what to do; the last line counts errors and warnings. Exit code 1 when anything fails.
  --models    list the built-in models that model.name takes
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # torch's native code repeats on stderr what we report ourselves; read when torch is first imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update(thread_defaults(os.environ))
    if (here := str(Path.cwd())) not in sys.path:
        # For `package.module:factory` of the user's own; last, so that nothing installed is shadowed.
        sys.path.append(here)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "distill": _distill,
        "eval": _evaluate,
        "pack": _pack,
        "verify": _verify,
        "compare": _compare,
        "plan": _plan,
        "doctor": _doctor,
        "demo": _demo,
    }
    if len(words) > 1 and words[0] == "help" and words[1] in commands:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        from drumline import __version__

        print(f"drumline {__version__}")
        return 0
    try:
        if words[0] not in commands:
            from drumline.core.suggest import near

            meant = [OTHER_COMMANDS[words[0]]] if words[0] in OTHER_COMMANDS else near(words[0], commands)
            raise UserError(
                f"there is no command {words[0]!r}",
                f"did you mean `drumline {meant[0]}`?" if meant else f"use one of: {', '.join(commands)}",
            )
        return commands[words[0]](words[1:])
    except UserError as error:
        said = f"drumline: {error}"
        at_terminal = sys.stderr is not None and sys.stderr.isatty()
        print(wrapped(said, get_terminal_size().columns) if at_terminal else said, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; let the interpreter not stumble over it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("drumline: interrupted", file=sys.stderr)
        return 130


def _train(words: list[str]) -> int:
    """`drumline train`: one run of a recipe."""
    from drumline.config.arguments import parse

    words = _with_preset(words)
    invocation = parse(words, "train", TRAIN_HELP)
    if invocation.recipe.distill != Distill():
        raise UserError(
            "train has no teacher, and fields of [distill] are set",
            "use drumline distill, or leave them out",
        )
    if invocation.dry_run:
        from drumline.cli.dry_run import show, what_would_happen

        return show(invocation, partial(what_would_happen, distils=False))

    return _run(["train", *words], invocation.recipe, "drumline.train.loop:train")


def _distill(words: list[str]) -> int:
    """`drumline distill`: one run of a recipe with a teacher."""
    from drumline.config.arguments import parse
    from drumline.distill.presets import listing

    if "--presets" in words:
        print(listing())
        return 0
    if words and re.match(r"\w+/(alone|teacher)/", words[0]):
        raise UserError(f"{words[0]} trains one network", f"use drumline train {words[0]}")
    words = _with_preset(words)
    invocation = parse(words, "distill", DISTILL_HELP)
    if invocation.dry_run:
        from drumline.cli.dry_run import show, what_would_happen

        return show(invocation, partial(what_would_happen, distils=True))

    from drumline.distill.choose import choose
    from drumline.distill.load import check_teachers

    choose(invocation.recipe.distill)
    check_teachers(invocation.recipe.distill)
    return _run(["distill", *words], invocation.recipe, "drumline.distill.run:distill")


def _evaluate(words: list[str]) -> int:
    """`drumline eval`: score a model."""
    from drumline.cli.eval import evaluate as run

    if words and not words[0].startswith("-"):
        announce("eval", words[0])
    return run(words)


def _verify(words: list[str]) -> int:
    """`drumline verify`: check a run, a checkpoint or a data set."""
    if "-h" in words or "--help" in words:
        print(VERIFY_HELP, end="")
        return 0
    if not words or words[0].startswith("-"):
        raise UserError(
            "verify takes a run folder, a checkpoint or a data set first", "drumline verify runs/NAME"
        )
    if not Path(words[0]).exists():
        raise UserError(f"{words[0]} does not exist", "give a run folder, a checkpoint or a data set")

    from drumline.cli.verify import is_dataset, verify_command

    if is_dataset(Path(words[0])):
        return verify_command(words)
    if len(words) != 1:
        raise UserError(
            f"verify of a run takes nothing more, not {' '.join(words[1:])!r}",
            "drumline verify runs/NAME; --list and --workers are for data sets",
        )

    from drumline.core.progress import progress
    from drumline.state.verify import verify_run

    def watch(items: Iterable[Path], total: int) -> Iterable[Path]:
        return progress(items, "verifying checkpoints", total)

    verification = verify_run(Path(words[0]), watch)
    for line in verification.lines:
        print(message(line))
    print_result({key: value for key, value in asdict(verification).items() if key != "lines"})
    return 0 if verification.sound else 1


def _pack(words: list[str]) -> int:
    """`drumline pack`: a data set in a few large files."""
    from drumline.cli.pack import pack as run

    return run(words)


def _compare(words: list[str]) -> int:
    """`drumline compare`: two runs, bit by bit."""
    if "-h" in words or "--help" in words:
        print(COMPARE_HELP, end="")
        return 0
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise UserError(
            f"compare takes two runs or checkpoints, not {' '.join(words)!r}",
            "drumline compare runs/A runs/B",
        )

    from drumline.state.compare import compare as find

    found = find(Path(words[0]), Path(words[1]))
    for line in found.lines:
        print(message(line))
    print_result({key: value for key, value in asdict(found).items() if key != "lines"})
    return 0 if found.equal else 1


def _plan(words: list[str]) -> int:
    """`drumline plan`: where a model can be cut into stages."""
    from drumline.cli.plan import plan as show

    return show(words)


def _doctor(words: list[str]) -> int:
    """`drumline doctor`: examine this machine."""
    if words and words[0] in ("-h", "--help"):
        print(DOCTOR_HELP, end="")
        return 0
    if words not in ([], ["--models"]):
        raise UserError(f"doctor does not know {' '.join(words)!r}", "its only option is --models")

    from drumline.cli.doctor import doctor as examine

    return examine(models=bool(words))


def _demo(words: list[str]) -> int:
    """`drumline demo`: the main job on embedded data."""
    from drumline.cli.demo import demo as show

    return show(words, main)


def _with_preset(words: list[str]) -> list[str]:
    """The words with the name of a published recipe, if they start with one, replaced by what it stands for."""
    from drumline.distill.presets import is_preset, preset_words

    if not words or not is_preset(words[0]):
        return words
    meant = preset_words(words[0])
    if not any(word.lstrip("-").startswith(("data.path", "data.source")) for word in (*meant, *words[1:])):
        raise UserError(f"{words[0]} needs its images", "give --data.path FOLDER")
    return [*meant, *words[1:]]


def announce(command: str, what: str) -> None:
    """Prints a first line at a terminal before torch, which takes seconds, is imported."""
    if sys.stderr is not None and sys.stderr.isatty() and "RANK" not in os.environ:
        from drumline import __version__
        from drumline.observe.text_log import say

        say(f"drumline {__version__}: {command} {what}")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For the first import of torch. What it creates stays until the process ends; scanning that for garbage, during
    the import, afterwards and at exit, takes time and finds none."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _run(words: list[str], recipe: Recipe, job: str) -> int:
    """Runs a job."""
    announce(words[0], recipe.model.name)
    with without_garbage_collection():
        from drumline.launch.worker import run

    return run(words, recipe, job)

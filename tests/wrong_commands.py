"""Command lines and recipe files that are wrong, and what the message must contain for each.

One table for the reader's own test and for the tests of the whole command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class WrongCommand:
    """A command line with errors. `files` are written to the working folder first; a name that ends in / is a folder.

    `mistakes` is the number of errors in the message: one mistake must not be reported as several.
    """

    name: str
    argv: tuple[str, ...]
    must_contain: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    mistakes: int = 1

    def write_files(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _line(name: str, line: str, *must_contain: str, mistakes: int = 1) -> WrongCommand:
    return WrongCommand(name, tuple(line.split()), must_contain, mistakes=mistakes)


def _file(name: str, text: str | bytes, *must_contain: str, mistakes: int = 1) -> WrongCommand:
    return WrongCommand(name, ("recipe.toml",), must_contain, {"recipe.toml": text}, mistakes)


_PIPELINE = "parallel.layout=pipeline"

WRONG_COMMANDS = [
    # Names on the command line.
    _line("unknown flag", "--optim.le 3", "--optim.le", "did you mean --optim.lr 3?"),
    _line("unknown assignment", "optim.mometum=0.9", "optim.mometum", "did you mean optim.momentum=0.9?"),
    _line("flag without its section", "--lr 0.2", "--lr", "did you mean --optim.lr 0.2?"),
    _line("assignment without its section", "epochs=3", "epochs", "did you mean train.epochs=3?"),
    _line("flag in another section", "--train.lr 0.2", "--train.lr", "did you mean --optim.lr 0.2?"),
    _line("wrong section", "--optimizer.lr 0.2", "--optimizer.lr", "did you mean --optim.lr 0.2?"),
    _line("long word for a field", "--optim.learning-rate 1", "--optim.learning-rate", "--optim.lr"),
    _line("single dash", "-optim.lr 0.2", "-optim.lr", "did you mean --optim.lr 0.2?"),
    _line("misspelt option", "--dryrun", "--dryrun", "did you mean --dry-run?"),
    _line("nothing near", "--zzz 1", "--zzz", "drumline train --help"),
    _line("nothing near in its section", "train.dropout=3", "train.dropout", "[train] has epochs, steps, "),
    _line("a section for its field", "model=resnet18", "model", "did you mean model.name=resnet18?"),
    _line("a section as a flag", "--optim adamw", "--optim", "did you mean --optim.name adamw?"),
    _line("a source for a section", "data=digits", "data", "did you mean data.source=digits?"),
    _line("a name from elsewhere", "--batch-size 64", "--batch-size", "did you mean --data.batch 64?"),
    _line("Lightning's epochs", "trainer.max_epochs=3", "did you mean train.epochs=3?"),
    _line("Lightning's epochs, bare", "--max-epochs 3", "did you mean --train.epochs 3?"),
    _line("three meanings", "train.name=x", "did you mean run.name=x, model.name=x or optim.name=x?"),
    _line("timm's weights", "model.pretrained=true", "finetune=torchvision:NAME or finetune=timm:NAME"),
    _line("timm's weights as a flag", "--pretrained", "finetune=torchvision:NAME or finetune=timm:NAME"),
    _line("weights from elsewhere", "pretrained=a.pt", "did you mean model.weights=a.pt?"),
    _line("timm's half precision", "train.amp=true", "did you mean train.precision=bf16?"),
    _line("timm's half precision as a flag", "--amp", "did you mean train.precision=bf16?"),
    _line("resume without a run", "--resume", "to continue a run: drumline resume RUN"),
    _line("resume without its run", "--resume last", "to continue a run: drumline resume RUN"),
    WrongCommand(
        "resume as a flag",
        ("--resume", "runs/a"),
        ("to continue a run: drumline resume runs/a",),
        {"runs/a/": ""},
    ),
    # Values on the command line.
    _line(
        "empty path", "data.path=", "data.path=: the value is empty", "shell variable", "data.source=digits"
    ),
    _line("empty name", "run.name=", "run.name=: the value is empty", "give a name or auto"),
    _line("an example without a fraction", "train.epochs=x", "for example train.epochs=10"),
    _line("a negative length", "train.epochs=-1", "give at least 0; above 0 unless train.steps is set"),
    _line("a side of thousands", "data.size=99999", "data.size=99999: too large", "give at most 8276"),
    _line("text for a number", "--optim.lr fast", "--optim.lr fast", "expected a number", "fix: for example"),
    _line("text for a number, assigned", "optim.lr=fast", "optim.lr=fast", "for example optim.lr=0.1"),
    _line("not finite", "optim.lr=nan", "optim.lr=nan", "expected a number"),
    _line("fraction for a count", "--data.batch 12.5", "--data.batch 12.5", "a whole number"),
    _line("word for a count", "data.workers=many", "data.workers=many", "a whole number or auto"),
    _line("wrong choice", "--optim.name adamv", "--optim.name adamv", "sgd, adamw", "did you mean adamw?"),
    _line("choice in capitals", "train.precision=BF16", "train.precision=BF16", "did you mean bf16?"),
    _line("neither true nor false", "train.compile=maybe", "train.compile=maybe", "true or false"),
    _line("switch with a strange word", "--train.compile yes", "--train.compile yes", "true or false"),
    _line("too short a list", "--optim.betas 0.9", "--optim.betas 0.9", "2 numbers", "0.9 0.999"),
    _line("too long a list", "optim.betas=0.9,0.99,0.999", "optim.betas=0.9,0.99,0.999", "0.9,0.999"),
    _line("text in a list", "--data.mean 0.5 x 0.5", "--data.mean 0.5 x 0.5", "a list of numbers"),
    _line("no value at the end", "--optim.lr", "--optim.lr: needs a value", "for example --optim.lr 0.1"),
    _line("no value before a flag", "--run.name --dry-run", "--run.name: needs a value"),
    _line("empty number", "optim.lr=", "optim.lr=", "expected a number"),
    _line("text for strengths", "--data.jitter strong", "a list of numbers", "--data.jitter 0.4 0.4 0.4 0.1"),
    _line("fraction in a list", "data.randaugment=2,9.5", "a list of whole numbers", "data.randaugment=2,9"),
    _line("singular for a choice", "data.pool=thread", "auto, threads, processes", "did you mean threads?"),
    _line("RandAugment", "data.augment=randaugment", "did you mean data.randaugment=2,9?"),
    _line("a dot for a colon", "model.name=nets.Branch", "did you mean nets:Branch?"),
    _line("an optimizer of torch", "optim.name=adam", "did you mean adamw or torch.optim:Adam?"),
    _line("half a choice", "--data.resize pillow", "pillow12, pillow13", "did you mean pillow1"),
    _line("misspelt filter", "data.interpolation=bicubik", "bilinear, bicubic", "did you mean bicubic?"),
    _line("gpu for cuda", "run.device=gpu", "run.device=gpu", "did you mean cuda?"),
    _line("torch's name of a type", "train.precision=bfloat16", "did you mean bf16?"),
    _line("a short flag", "-b 64", "-b: there is no such field", "did you mean --data.batch 64?"),
    _line("a recipe of another kind", "recipe.yaml", "recipe.yaml", "recipes are TOML files"),
    # Words that stand alone.
    _line("loose word", "resnet50", "resnet50", "section.key=value", "model.name=resnet50"),
    _line("spaces around the sign", "optim.lr = 0.2", "optim.lr", "write optim.lr=VALUE without spaces"),
    WrongCommand("data folder alone", ("photos",), ("photos", "data.path=photos"), {"photos/": ""}),
    WrongCommand(
        "run folder alone",
        ("runs/a",),
        ("runs/a", "drumline resume runs/a", "drumline train runs/a/recipe.toml"),
        {"runs/a/recipe.toml": ""},
    ),
    WrongCommand("other file alone", ("r.yaml",), ("r.yaml", "ends in .toml"), {"r.yaml": ""}),
    # The file itself.
    WrongCommand(
        "missing file", ("recpie.toml",), ("recpie.toml", "did you mean recipe.toml?"), {"recipe.toml": ""}
    ),
    WrongCommand(
        "second file", ("a.toml", "b.toml"), ("b.toml", "after a.toml"), {"a.toml": "", "b.toml": ""}
    ),
    WrongCommand("folder for a file", ("a.toml",), ("a.toml", "is a folder"), {"a.toml/": ""}),
    _file("not UTF-8", b"[run]\nname = '\xff'\n", "recipe.toml:2", "UTF-8"),
    _file("no quotes", "[model]\nname = resnet50\n", "recipe.toml:2:8", "name = resnet50", "quotes"),
    _file("key given twice", "[optim]\nlr = 1\nlr = 2\n", "recipe.toml:3", "lr = 2", "once"),
    _file("unclosed list", "[optim]\nbetas = [0.9,\n", "recipe.toml:2", "not valid TOML"),
    # Names in the file.
    _file("unknown key", "[optim]\n\nlrr = 0.2\n", "recipe.toml:3", "optim.lrr", "did you mean lr"),
    _file(
        "key in another section",
        "[train]\nlr = 0.2\n",
        "recipe.toml:2",
        "train.lr",
        "`lr` belongs in [optim]",
    ),
    _file("key outside sections", "lr = 0.2\n", "recipe.toml:1", "`lr` belongs in [optim]"),
    _file(
        "unknown section", "[optimizer]\nlr = 1\n", "recipe.toml:1", "[optimizer]", "did you mean [optim]?"
    ),
    _file("dotted unknown key", "run.seed = 1\noptim.lrr = 2\n", "recipe.toml:2", "optim.lrr"),
    _file("inline unknown key", "optim = {lr = 1, warmup = 2}\n", "recipe.toml:1", "warmup_epochs"),
    _file("hyphen in a key", "[data]\neval-crop = 1.0\n", "recipe.toml:2", "did you mean eval_crop?"),
    # Values in the file.
    _file("number in quotes", '[optim]\nlr = "0.2"\n', 'recipe.toml:2: optim.lr = "0.2"', "write lr = 0.2"),
    _file("number for text", "[run]\nname = 5\n", "recipe.toml:2: run.name = 5", 'write name = "5"'),
    _file("true for a count", "[data]\nbatch = true\n", "recipe.toml:2: data.batch = true", "a whole number"),
    _file("1 for a switch", "[train]\ncompile = 1\n", "recipe.toml:2", "true or false", "compile = true"),
    _file("infinite", "[optim]\nlr = inf\n", "recipe.toml:2: optim.lr = inf", "expected a number"),
    _file(
        "wrong choice in the file",
        '[optim]\nname = "adam"\n',
        "recipe.toml:2",
        "did you mean adamw or torch.optim:Adam?",
    ),
    _file("list too short", "[optim]\nbetas = [0.9]\n", "recipe.toml:2", "a list of 2 numbers"),
    _file("text for a list", '[data]\njitter = "0.4,0.4,0.4,0.1"\n', "recipe.toml:2", "a list of numbers"),
    _file("number for a list", "[data]\nmean = 0.5\n", "recipe.toml:2", "write mean = [0.5]"),
    _file("section for a value", "[optim.lr]\nx = 1\n", "recipe.toml:1", "optim.lr", "expected a number"),
    _file("value for a section", "optim = 3\n", "recipe.toml:1: optim = 3", "[optim]"),
    _file(
        "after a long string and a long list",
        '[run]\nname = """\n[optim]\nlr = 1\n"""\n[data]\nmean = [\n  0.1, # ]\n]\nbatch = "x"\n',
        "recipe.toml:10: data.batch",
    ),
    _file(
        "two mistakes at once",
        "[optim]\nlrr = 1\n[train]\nepochs = true\n",
        "recipe.toml:2",
        "recipe.toml:4",
        mistakes=2,
    ),
    # Values that cannot be, alone or together.
    _line("negative flag", "--optim.lr -1", "--optim.lr -1: too small", "fix: give at least 0"),
    _line("negative assignment", "optim.lr=-1", "optim.lr=-1: too small", "fix: give at least 0"),
    _file(
        "negative in the file",
        "[optim]\nlr = -1\n",
        "recipe.toml:2: optim.lr = -1",
        "too small",
        "at least 0",
    ),
    WrongCommand(
        "flag beats the file and is blamed",
        ("--optim.lr", "-2", "recipe.toml"),
        ("--optim.lr -2: too small",),
        {"recipe.toml": "[optim]\nlr = 0.1\n"},
    ),
    _line("default is to blame", "data.source=folder", 'data.path = "" (default)', "give its folder or file"),
    _line("no place to meet", "parallel.nodes=2", "parallel.rendezvous", "2 machines", "HOST:PORT"),
    _line("resume without a name", "checkpoint.resume=auto", "checkpoint.resume=auto", "set run.name"),
    _line(
        "shards without strict", "run.shards=4", "run.shards=4: only strict mode has shards", "--run.strict"
    ),
    _line(
        "fewer shards than processes",
        "--run.strict --run.shards 2 parallel.processes=4",
        "--run.shards 2: fewer shards than processes (4)",
        "--run.shards 4",
    ),
    _line(
        "uneven shards",
        "run.strict=true run.shards=3 data.batch=128",
        "cannot be divided into 3 equal shards",
        "--data.batch 129",
    ),
    _line(
        "uneven pairs",
        "--run.strict data.batch=72 data.mixup=0.2",
        "8 equal shards of mixed pairs",
        "--data.batch 80",
    ),
    _line("no shards", "--run.strict run.shards=0", "run.shards=0: too small", "at least 1"),
    _line("more threads than any", "parallel.threads=100000", "parallel.threads=100000: too large", "4096"),
    _line(
        "shards and micro-batches",
        "--run.strict --train.accumulate 2",
        "--train.accumulate 2",
        "--run.shards 2 or more",
    ),
    _line(
        "strict, any kernel", "--run.strict --run.no-deterministic", "run.strict", "needs run.deterministic"
    ),
    _line(
        "strict DataParallel",
        "--run.strict parallel.layout=dp",
        "--run.strict: computes shards of the batch with the whole model in each process; parallel.layout = dp does "
        "not",
        "use ddp",
    ),
    _line("fp16 on a CPU", "train.precision=fp16 run.device=cpu", "run.device = cpu", "use bf16 or fp32"),
    _line("GPU decode on a CPU", "data.decode=gpu run.device=cpu", "run.device = cpu", "use auto or cpu"),
    _line("packed set without a path", "data.source=packed", 'data.path = "" (default)', "folder or file"),
    _line(
        "too few strengths",
        "--data.jitter 0.4,0.4",
        "has 2 values",
        "give 4: brightness",
        "such as 0.4,0.4,0.4,0.1",
    ),
    _line(
        "strength below nothing",
        "data.jitter=0,-1,0,0",
        "data.jitter=0,-1,0,0: contrast is too small",
        "give at least 0",
    ),
    _line("hue too far", "data.jitter=0.4,0.4,0.4,0.6", "hue is too large", "give at most 0.5 as hue"),
    _line("one number for two", "--data.randaugment 9", "has 1 value", "operations, magnitude, such as 2,9"),
    _line(
        "no operation", "data.randaugment=0,9", "data.randaugment=0,9: operations is too small", "at least 1"
    ),
    _line("a million operations", "data.randaugment=1000000,9", "operations is too large", "at most 100"),
    _line("next to no mixup", "data.mixup=1e-300", "too small", "at least 0.001, or 0"),
    _line(
        "magnitude off the scale",
        "--data.randaugment 2 31",
        "--data.randaugment 2 31",
        "give at most 30 as magnitude",
    ),
    _line("limit in percent", "--data.bad-limit 5", "--data.bad-limit 5: too large", "give at most 1"),
    _line("more than certain", "data.erasing=1.5", "data.erasing=1.5: too large", "give at most 1"),
    _line("a rate that overflows", "optim.lr=1e39", "optim.lr=1e39: too large", "give at most"),
    # Layouts that cannot be.
    _line(
        "zero bubble",
        "--parallel.schedule zbv",
        "--parallel.schedule zbv",
        "not available",
        "backward",
        "1f1b",
    ),
    _line("zero bubble in words", "parallel.schedule=zero-bubble", "would silently be wrong", "interleaved"),
    _file("zero bubble in a file", '[parallel]\nschedule = "ZB-H1"\n', "recipe.toml:2", "not available"),
    _line("half a schedule", "parallel.schedule=1f1", "gpipe, 1f1b, interleaved", "did you mean 1f1b?"),
    _line(
        "processes left over",
        f"{_PIPELINE} --parallel.stages 2 parallel.processes=3",
        "--parallel.stages 2: 3 processes",
        "a multiple of 2",
    ),
    _line(
        "no stages",
        f"{_PIPELINE} --parallel.stages 0 parallel.processes=2 parallel.micro_batches=4",
        "--parallel.stages 0: too small",
        "give at least 1",
    ),
    _line(
        "more pieces than samples",
        f"{_PIPELINE} data.batch=8 --parallel.micro-batches 9",
        "--parallel.micro-batches 9: data.batch = 8",
        "at most 8",
    ),
    _line(
        "more pieces than pairs",
        f"{_PIPELINE} data.batch=8 data.mixup=0.2 parallel.micro_batches=5",
        "parallel.micro_batches=5: data.batch = 8",
        "in pairs",
        "at most 4",
    ),
    _line(
        "half a round",
        f"{_PIPELINE} parallel.stages=2 parallel.schedule=interleaved parallel.micro_batches=5",
        "parallel.micro_batches=5: parallel.schedule = interleaved needs a multiple of parallel.stages = 2",
        "give 6",
    ),
    _line("strict stages", f"{_PIPELINE} --run.strict", "--run.strict", "the whole model", "use ddp"),
    _line("compiled stages", f"{_PIPELINE} --train.compile", "--train.compile: not supported", "use ddp"),
    _line(
        "accumulating stages", f"{_PIPELINE} --train.accumulate 2", "--train.accumulate 2", "micro_batches"
    ),
    _line(
        "stages with sync_bn", f"{_PIPELINE} --train.sync-bn", "--train.sync-bn", "--parallel.batchnorm sync"
    ),
    _line("captured stages", f"{_PIPELINE} train.capture=on", "train.capture=on", "use auto or off"),
    _line(
        "loss scales apart",
        f"{_PIPELINE} parallel.processes=2 train.precision=fp16",
        "train.precision=fp16: not supported by a pipeline over processes",
        "use bf16 or fp32",
    ),
    _line("chunks in one row", f"{_PIPELINE} parallel.chunks=2", "parallel.chunks=2", "schedule interleaved"),
    _line(
        "chunks that are none",
        f"{_PIPELINE} parallel.chunks=1 parallel.schedule=interleaved",
        "parallel.chunks=1: parallel.schedule = interleaved needs at least 2",
    ),
    _line(
        "chunks of no pipeline", "parallel.layout=model parallel.chunks=2", "parallel.chunks=2", "pipeline"
    ),
    _line(
        "too many names",
        f"{_PIPELINE} parallel.stages=2 parallel.split=layer2,layer3",
        "parallel.split=layer2,layer3: makes 3 stage(s), but the recipe has 2",
    ),
    _line("sharded alone", f"{_PIPELINE} --checkpoint.sharded", "--checkpoint.sharded", "fsdp"),
    _line("model over processes", "parallel.layout=model parallel.processes=2", "one process", "pipeline"),
    _line("stages without a layout", "parallel.stages=2", "parallel.stages=2", "use pipeline or model"),
    _line("a norm mode of pipelines", "parallel.batchnorm=sync", "parallel.batchnorm=sync", "train.sync_bn"),
    WrongCommand(
        "file and line at odds",
        ("recipe.toml", "--parallel.processes", "8"),
        ("recipe.toml:2: data.batch = 4", "give at least 8"),
        {"recipe.toml": "[data]\nbatch = 4\n"},
    ),
    _line("unknown names come first", "--optim.lr -1 --zzz", "--zzz: there is no such field"),
    _line(
        "two impossible",
        "optim.lr=-1 data.batch=0",
        "optim.lr=-1: too small",
        "data.batch=0: too small",
        mistakes=2,
    ),
    _line("two unknown", "--zzz 1 --optim.lr 0.1 optim.le=2", "--zzz", "optim.lr=2", mistakes=2),
]

"""The whole configuration of a run as one frozen, printable value.

A recipe that is saved with a run is enough to repeat the run. Every field has a default, a docstring, and beside its
type the values that it may hold; `--help`, docs/recipe.md and the checks read all three. `rules.py` rejects
combinations of fields that cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drumline.config.layouts import LAYOUTS
from drumline.config.learning import AutoFloat, AutoInt, Data, Model, Optim, PrecisionName, Train
from drumline.config.limits import Descriptions, PerMachine, Range, Several

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
if TYPE_CHECKING:
    LayoutName = str
else:
    _SUMMARIES = Descriptions({name: layout.summary for name, layout in LAYOUTS.items()})
    LayoutName = Annotated[Literal["auto", *LAYOUTS], _SUMMARIES]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run is stored and what makes it repeatable."""

    dir: Annotated[str, PerMachine(path=True)] = "runs"
    """Folder that contains the run folders."""
    name: str = "auto"
    """Name of the run folder inside `dir`. `auto`: the name of the data folder, file or source, the model, and the
    next free number, as `photos-resnet50-1`. The recipe in a run folder, RUN/recipe.toml, continues RUN with
    `checkpoint.resume=auto`; otherwise it starts a new run beside RUN. Both work after RUN was moved."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of everything random: initial weights, sample order, augmentation, mixup."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. `auto`: CUDA if there is a GPU."""
    deterministic: bool = True
    """Use only kernels that give the same bits on every run. On a GPU this costs up to about 10 %."""
    strict: bool = False
    """Give the same bits on any number of processes up to `shards`, also after kills and restarts. Each shard of the
    global batch is computed on its own, and gradients are added in a fixed order."""
    shards: Annotated[AutoInt, Range(1)] = "auto"
    """Equal slices of the global batch in strict mode. The bits depend on this number. `auto`: 8."""
    trackers: Annotated[tuple[str, ...], Several(TRACKERS)] = ("tensorboard",)
    """Programs that get the metrics and the recipe, in addition to the run folder: W&B, MLflow and trackio must be
    installed and are set up by their own environment variables (docs/trackers.md). `none`: no program."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """How a student learns from a teacher. Only `drumline distill` uses this section."""

    teacher: tuple[str, ...] = ()
    """Model name of the teacher; several names are an ensemble. Empty: the model of the run that `teacher_weights`
    names. Without `teacher_weights`: `ema`, the moving average of the student (`train.ema`), or `peer`, a second
    student with a different seed, where each learns from the other."""
    teacher_weights: Annotated[tuple[str, ...], PerMachine(path=True)] = ()
    """Run folder, checkpoint or weights file of each teacher."""
    method: tuple[str, ...] = ("kd",)
    """Distillation methods, such as `kd`, `dkd`, `crd` or `reviewkd`, or your own as `package.module:Class`; several
    as `crd,rkd`. docs/distillation.md describes all of them. kd can be added to any method with its weight `a`."""
    unlabelled: Annotated[str, PerMachine(path=True)] = ""
    """Folder or tar file of images without labels, found at any depth, to train on in addition. The methods compare
    student and teacher on all images; cross-entropy and training accuracy are means over the labelled ones."""
    r: Annotated[AutoFloat, Range(0)] = "auto"
    """Weight of the cross-entropy with the labels. `auto`: as in the method's paper."""
    a: Annotated[AutoFloat, Range(0)] = "auto"
    """Weight of kd, the divergence of softened logits. `auto`: as in the method's paper."""
    b: Annotated[tuple[float, ...], Range(0)] = ()
    """Weight of each other method, in the order of `method`. Empty: as in their papers."""
    T: Annotated[AutoFloat, Range(0.001, 1e6)] = "auto"
    """Temperature of the logits, for all methods. `auto`: for each method as in its paper. `options` sets that of one
    method, as `dist.T:1`."""
    standardise: bool = False
    """Standardise logits (z-score of each row) before methods that compare them. The defaults for kd and dkd are then
    those of the standardisation's authors: T 2, weight 9."""
    options: tuple[str, ...] = ()
    """Options of a method, as `beta:2,warmup:20`, or `dkd.beta:2` if several methods are combined. Every method takes
    `warmup`, `schedule` and `end` for its weight and, if it has one, `T_schedule` and `T_end` for its temperature."""
    initial_epochs: Annotated[AutoFloat, Range(0)] = "auto"
    """Epochs of the initial phase, for methods that have one, such as fsp. `auto`: as in the method's paper."""
    initial_lr: Annotated[AutoFloat, Range(above=0)] = "auto"
    """Learning rate of the initial phase. `auto`: `optim.lr`."""
    student_taps: str = ""
    """Modules to tap in a student that is not built in: `stage1=layer1,stage2=layer2`. Empty: found automatically."""
    teacher_taps: str = ""
    """The same for the teacher."""
    teacher_precision: PrecisionName = "auto"
    """Arithmetic of the teacher. `auto`: that of the student."""
    teacher_layout: Literal["auto", "single", "model", "pipeline"] = "auto"
    """Layout of the teacher. `single`: whole, on the device of every process that computes the loss. `pipeline`: in
    stages over the processes of the student's pipeline; the micro-batches of a step pass through the teacher first.
    `model`: in stages over the GPUs of each process, which take turns. `auto`: single."""
    teacher_stages: Annotated[AutoInt, Range(1)] = "auto"
    """Stages of `teacher_layout` model. `auto`: one for each GPU of the process."""
    ensemble: Literal["probabilities", "logits"] = "probabilities"
    """What to average over several teachers: softened probabilities or logits."""
    shares: Annotated[tuple[float, ...], Range(above=0)] = ()
    """Weight of each teacher in the average, or of its features in the loss. Empty: equal."""
    cache: Annotated[str, PerMachine(path=True)] = ""
    """Folder that stores the teacher's outputs. The first run fills it. Later runs with any student, batch or number
    of processes read it and do not compute the teacher again. Empty: the teacher runs at every step."""
    cache_top: Annotated[int, Range(0)] = 0
    """Store only this many of a sample's largest logits; the others share the remaining probability. 0: all."""

    @property
    def self_taught(self) -> str:
        """`ema` or `peer` if the teacher is trained with the student; otherwise empty."""
        return self.teacher[0] if self.teacher in (("ema",), ("peer",)) else ""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the work is distributed over processes and machines."""

    processes: Annotated[AutoInt, Range(1), PerMachine()] = "auto"
    """Processes on this machine. `auto`: one per GPU, or one on a CPU."""
    layout: LayoutName = "auto"
    """How the model and the batch are distributed. `auto`: ddp for several processes, otherwise single."""
    stages: Annotated[AutoInt, Range(1)] = "auto"
    """Processes (or, within one process, GPUs) that hold one copy of the model, for layouts pipeline and model.
    `auto`: all of them."""
    micro_batches: Annotated[AutoInt, Range(1)] = "auto"
    """Micro-batches into which each replica splits its slice of the global batch in a pipeline. The result depends on
    this number as it does on train.accumulate. `auto`: four per stage, or as many as there are samples for."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's work. `gpipe`: all forwards, then all backwards; keeps the activations of every
    micro-batch. `1f1b`: backwards as early as possible; keeps at most one micro-batch per stage. `interleaved`: 1f1b
    with several smaller stages on each process; idles less and sends more. All give the same bits, except for
    dropout, which draws per stage."""
    chunks: Annotated[AutoInt, Range(1)] = "auto"
    """Stages on each process for schedule interleaved. `auto`: 2."""
    split: str = "time"
    """Where the model is cut. `time`: where measured times are balanced best. `even`: the same number of blocks in
    each stage. Or the modules that begin stages 2, 3, …, such as layer2,layer3.1 (`drumline plan --cuts MODEL` lists
    them). Does not change the bits, except for dropout, which draws per stage. A resumed run keeps its cut."""
    batchnorm: Literal["micro", "deferred", "sync", "frozen"] = "micro"
    """BatchNorm in a pipeline. `micro`: each micro-batch is normalised on its own and updates the running statistics.
    `deferred`: the same, but the running statistics are updated once per step. `sync`: each micro-batch is normalised
    together with those of the other replicas. `frozen`: with the running statistics, which do not change."""
    virtual: bool = False
    """Let the stages of one process share devices if there are too few. Correct, but not faster: for trying a layout
    without the GPUs."""
    nodes: Annotated[int, Range(1)] = 1
    """Machines in the run. Start the same command on each."""
    node_rank: Annotated[AutoInt, Range(0), PerMachine()] = "auto"
    """Rank of this machine, 0 to nodes-1. `auto`: the rendezvous assigns the ranks."""
    rendezvous: Annotated[str, PerMachine()] = ""
    """Where the machines meet: `host:port` (TCP), `file:///shared/path`, or `env://` if RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT are set for each process. Empty: this machine alone, on a free port. Several machines need the
    same secret: DRUMLINE_SECRET, or ~/.config/drumline/secret."""
    interface: Annotated[str, PerMachine()] = "auto"
    """Network interface for gloo and NCCL. `auto`: loopback for one machine, otherwise the one that reaches the
    rendezvous."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Transport. `auto`: nccl if every process has its own GPU, otherwise gloo."""
    timeout: Annotated[float, Range(1), PerMachine()] = 300.0
    """Seconds that a process waits for another one before it gives up."""
    # As in manifest.py: what a checkpoint may ask for. OpenMP crashes on a hundred thousand.
    threads: Annotated[AutoInt, Range(1, 4096), PerMachine()] = "auto"
    """CPU threads per process for arithmetic. `auto`: OMP_NUM_THREADS if you set it, otherwise cores divided by
    processes; 1 in strict mode. Changes bits on a CPU, so a resumed run keeps the number it was started with."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the processes of a run are supervised."""

    restarts: Annotated[int, Range(0)] = 0
    """How many times a run that lost a process restarts from its newest checkpoint. It restarts at once, or after 1,
    2, 4, up to 60 s if the last restart made no progress. 0: the run ends."""
    hang: Annotated[float, Range(0)] = 60.0
    """Seconds without a step or another sign of progress after which a process counts as hung. The stack of every
    process is printed, and the run restarts or ends. 0: never."""
    min_nodes: Annotated[AutoInt, Range(1)] = "auto"
    """Machines with which a restart may continue when others are lost. `auto`: all of parallel.nodes."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Checks for silent mistakes while a run trains."""

    action: Literal["stop", "warn"] = "stop"
    """What to do when a check fails: stop the run, or print a warning and continue."""
    every: Annotated[int, Range(1)] = 100
    """Steps between fingerprints of parameters, gradients, buffers, optimizer state and sample ids, which are
    compared over all processes. The first three steps and each checkpoint are always fingerprinted."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is saved, how often, and how a run resumes."""

    every_steps: Annotated[int, Range(0)] = 0
    """Steps between checkpoints. 0: by epochs only."""
    every_epochs: Annotated[float, Range(0)] = 1.0
    """Epochs between checkpoints. 0: by steps and at the end only."""
    keep: Annotated[int, Range(1)] = 3
    """Newest checkpoints to keep, in addition to the best one."""
    best: str = "top1"
    """Metric that decides which checkpoint is the best: `top1`, `top5`, `loss`, or with a teacher `agreement`. The
    best checkpoint is kept and exported as `weights/best.safetensors`. `train.patience` uses this metric, too."""
    sharded: bool = False
    """With layout fsdp, each process writes its own shards. Faster for large models. Every process must see the run
    folder. Such a checkpoint can be used like any other."""
    resume: str = "never"
    """Whether to resume, and from where. `auto`: resume from the newest valid checkpoint in this run folder, or start
    if the folder has no run. `never`: start, and reject a folder that has a run. A path: resume from that run or
    checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a training run.

    `Recipe.from_args(["recipe.toml", "optim.lr=0.2"])` reads what `drumline train` reads, and checks it in the same
    way. `Recipe(optim=Optim(lr=0.2))` builds one from its sections; call `check` before you use it.
    """

    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    distill: Distill = field(default_factory=Distill)
    parallel: Parallel = field(default_factory=Parallel)
    launch: Launch = field(default_factory=Launch)
    guard: Guard = field(default_factory=Guard)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @staticmethod
    def from_args(args: Sequence[str | Path]) -> Recipe:
        """The recipe of a command line: at most one recipe file, and fields as `section.key=value`.

        Raises `UserError` with every unknown name, wrong value and impossible combination. `--trust` runs code that
        the file names.
        """
        from drumline.config.arguments import TrustOption, read_recipe

        return read_recipe([str(arg) for arg in args], "train", TrustOption).recipe

    def check(self) -> Recipe:
        """The recipe itself. Raises `UserError` with every impossible value or combination of values."""
        from drumline.config.rules import check

        check(self)
        return self

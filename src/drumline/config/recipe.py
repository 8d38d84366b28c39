"""The whole configuration of a run as one frozen, printable value.

Promises: a recipe saved with a run is enough to run it again; every field has a default and a docstring. What is
impossible is told by `recipe_checks.py`, naming the field, the value and the fix.
Reading and writing files lives in `recipe_file.py`, the command line in `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

AutoInt = int | Literal["auto"]
AutoFloat = float | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run lives and what makes it repeatable."""

    dir: str = "runs"
    """Folder that holds the run folders."""
    name: str = "auto"
    """Name of the run folder below `dir`. `auto` takes `<data>-<model>-N` with the next free N, where `<data>` is the
    name of the data folder or file, or of the source where it needs none: `photos-resnet50-1`, `digits-resnet18-1`. A
    recipe that is given from its own run folder, RUN/recipe.toml, goes on in RUN with `checkpoint.resume=auto`, and
    makes a new run beside RUN otherwise, wherever RUN was moved to."""
    seed: int = 0
    """Seed of everything random: initial weights, sample order, augmentation, mixing."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute. `auto` takes CUDA when there is a GPU."""
    deterministic: bool = True
    """Use only kernels that give the same bits on every run (GPU: costs up to about 10 %)."""
    strict: bool = False
    """The same bits on any number of processes up to `shards`, whatever is killed and restarted: each shard of the
    global batch is computed alone, and gradients are added in a fixed order."""
    shards: AutoInt = "auto"
    """Equal parts of the global batch in strict mode; part of what decides the bits. `auto`: 8."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, in which batches, seen how."""

    source: str = "auto"
    """`folder`, `tar`, `packed` (by `drumline pack`), `idx`, `cifar10`, `cifar100`, `npz`, `digits` (embedded),
    `synthetic`, or your own as `package.module:factory`. `auto` looks at `path`; without a path it takes
    the embedded digits."""
    path: str = ""
    """Folder or file with the data. A folder (or tar) source wants `train/<class>/` and `val/<class>/`, or class
    folders alone together with `holdout`."""
    batch: int = 128
    """Global batch: samples per optimizer step over all processes and accumulation steps together."""
    size: AutoInt = "auto"
    """Side of the square image the model sees. `auto`: the stored size for arrays, 224 for image files."""
    workers: AutoInt = "auto"
    """Threads or processes per training process that read and decode. Never changes a pixel or the order."""
    pool: Literal["auto", "threads", "processes"] = "auto"
    """What the workers are. `auto`: native threads where they measure faster (JPEG), else processes."""
    decode: Literal["auto", "cpu", "gpu"] = "auto"
    """Where JPEGs are decoded. `gpu`: by nvJPEG those that come out bit-equal to Pillow, the rest on the CPU.
    `auto` measures both and says what it took: threads, and the GPU for what they are too slow for. The pixels are
    the same."""
    augment: Literal["auto", "none", "shift", "shift-flip", "crop-flip"] = "auto"
    """`shift`: pad by an eighth and crop back. `shift-flip`: with a mirror (CIFAR's usual).
    `crop-flip`: random resized crop with a mirror (ImageNet's usual). `auto` picks by source."""
    jitter: tuple[float, ...] = ()
    """Colour jitter as four strengths: brightness, contrast, saturation, hue (`0.4,0.4,0.4,0.1`). Empty: none."""
    randaugment: tuple[int, ...] = ()
    """RandAugment as two numbers: operations per sample, and magnitude from 0 to 30 (`2,9`). Empty: none."""
    erasing: float = 0.0
    """Probability that a box of a sample is erased to the mean colour."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution; 0 turns it off."""
    cutmix: float = 0.0
    """Alpha of cutmix's Beta distribution; 0 turns it off. With `mixup` too, each pair takes one of both."""
    holdout: float = 0.0
    """Share of the training samples set aside for evaluation when the data has no split of its own.
    Which ones depends on the sample's position alone, not on the seed."""
    eval_crop: float = 0.875
    """Evaluation of image files: the centre crop is this share of the resized short side."""
    resize: Literal["pillow12", "pillow13"] = "pillow12"
    """Whose resize to give, bit for bit, whatever is installed: Pillow up to 12, or from 13 on, which differs."""
    interpolation: Literal["bilinear", "bicubic", "box", "lanczos"] = "bilinear"
    """Filter of the resize."""
    strict: bool = False
    """Stop at the first sample that cannot be read. Else a broken training sample is replaced by another one (the
    same on every run), a broken evaluation image is black, and all are listed at the end."""
    bad_limit: float = 0.01
    """Share of a set's samples that may be broken before the run stops."""
    exif: Literal["ignore", "apply"] = "ignore"
    """EXIF orientation of image files. `ignore` gives the pixels that torchvision and timm train on."""
    mean: tuple[float, ...] = ()
    """Per-channel mean (0 to 1) to subtract. Empty: measured on array sources, ImageNet's for image files."""
    std: tuple[float, ...] = ()
    """Per-channel deviation (0 to 1) to divide by. Empty: as for `mean`."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which network."""

    name: str = "resnet18"
    """A name of ours (`drumline doctor --models` lists them), `torchvision/NAME`, `timm/NAME`, or
    `package.module:factory`, called as `factory(classes=N)`."""
    weights: str = ""
    """A run folder, a checkpoint, or a weights file (.safetensors, .pt, .pth) to start from."""
    classes: AutoInt = "auto"
    """Outputs of the classifier. `auto` takes the number of classes in the data."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How parameters move."""

    name: Literal["sgd", "adamw", "lars", "lamb"] = "sgd"
    """Optimizer."""
    lr: float = 0.1
    """Peak learning rate, at `reference_batch` when `lr_scaling` is on."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale `lr` by (global batch / `reference_batch`), or its square root."""
    reference_batch: int = 256
    """Batch that `lr` was chosen for; used by `lr_scaling` only."""
    momentum: float = 0.9
    """Momentum of sgd and lars."""
    nesterov: bool = False
    """Nesterov momentum for sgd."""
    weight_decay: float = 5e-4
    """Weight decay (decoupled in adamw and lamb)."""
    decay_all: bool = True
    """Decay every parameter, as the classic recipes do. `False` spares biases and normalisation layers."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decay rates of adamw and lamb."""
    eps: float = 1e-8
    """Denominator guard of adamw and lamb."""
    trust: float = 0.001
    """Trust coefficient of lars."""
    clip: float = 0.0
    """Clip the gradient's global norm to this; 0 turns it off."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up from near zero."""
    milestones: tuple[float, ...] = ()
    """Epochs at which `step` multiplies the rate by `gamma`. Empty: at 1/2 and 3/4 of the run."""
    gamma: float = 0.1
    """Factor of each milestone."""
    final_lr: float = 0.0
    """Where `cosine` ends, as a share of the peak rate."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long and in which arithmetic."""

    epochs: float = 10.0
    """Passes over the training data. Ignored when `steps` is set."""
    steps: int = 0
    """Total optimizer steps; 0 means `epochs` decides."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward. `auto`: bf16 on a GPU that has it, fp16 on an older one, fp32 on a
    CPU."""
    accumulate: int = 1
    """Split each process's share of the global batch into this many micro-batches."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    ema: float = 0.0
    """Decay of a moving average of the weights, evaluated and saved beside the model; 0 turns it off."""
    sync_bn: bool = False
    """BatchNorm over the whole global batch instead of each process's (strict mode: each shard's) part of it."""
    channels_last: bool = True
    """NHWC memory layout on a GPU. On a CPU the layout stays NCHW."""
    compile: bool = False
    """Run the model through torch.compile."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the whole step as one CUDA graph and replay it. Same bits, no launch cost."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward (torch.utils.checkpoint): less memory, about a third
    more compute, same result."""
    eval_every: float = 1.0
    """Evaluate every this many epochs; the end of the run is always evaluated. 0: only the end."""
    log_every: int = 50
    """Write metrics every this many steps."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """How a student learns from a teacher. Only `drumline distill` reads this section."""

    teacher: tuple[str, ...] = ()
    """Model name of the teacher; several make an ensemble. Empty: that of the run which `teacher_weights` names."""
    teacher_weights: tuple[str, ...] = ()
    """Run folder, checkpoint or weights file of each teacher."""
    method: tuple[str, ...] = ("kd",)
    """`kd`, `dkd`, `dist`, `hint`, `attention`, `similarity`, `correlation`, `vid`, `rkd`, `pkt`, `crd`, `reviewkd`,
    `ofd`, `factor`, `nst`, `kdsvd`, `fsp`, `abound`, `srd`; several as `crd,rkd`. kd joins any of them by its weight
    `a`."""
    r: AutoFloat = "auto"
    """Weight of the labels' cross-entropy. `auto`: the method's paper."""
    a: AutoFloat = "auto"
    """Weight of kd, the divergence of softened logits. `auto`: the method's paper."""
    b: tuple[float, ...] = ()
    """Weight of each other method, in their order. Empty: their papers."""
    T: AutoFloat = "auto"
    """Temperature of the logits. `auto`: the method's paper."""
    standardise: bool = False
    """Standardise logits (z-score of each row) before methods that compare them."""
    options: tuple[str, ...] = ()
    """A method's own numbers, as `beta:2,warmup:20`, or `dkd.beta:2` where two methods are combined."""
    initial_epochs: AutoFloat = "auto"
    """Length of the initial stage of fsp, abound and factor. `auto`: the method's paper."""
    student_taps: str = ""
    """Where taps lie in a student that is not one of ours, as `stage1=layer1`, with commas
    between several. Empty: found."""
    teacher_taps: str = ""
    """The same for the teacher."""
    teacher_precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the teacher. `auto`: as the student's."""
    teacher_layout: Literal["auto", "single", "model", "pipeline"] = "auto"
    """Where the teacher lies, which need not be as the student. `single`: whole, on the device of every process that
    computes the loss. `pipeline`: in stages over the processes of the student's pipeline, one on each; a step's
    micro-batches go through the teacher first. `model`: in stages over the GPUs of each process, which take turns:
    for a teacher that is too large for one. `auto`: single."""
    teacher_stages: AutoInt = "auto"
    """Stages of `teacher_layout` model. `auto`: as many as the process has GPUs to itself."""
    ensemble: Literal["probabilities", "logits"] = "probabilities"
    """What of several teachers is averaged: their softened probabilities, or their logits."""
    shares: tuple[float, ...] = ()
    """Weight of each teacher in the mean. Empty: equal."""
    cache: str = ""
    """Folder that keeps the teacher's outputs. Filled on first use; later runs of any student, batch or number of
    processes read it, and the teacher is not computed again. Empty: the teacher runs at every step."""
    cache_top: int = 0
    """Keep only this many of a sample's logits, the largest; the rest share their probability. 0: all."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the work is laid over processes and machines."""

    processes: AutoInt = "auto"
    """Processes on this machine. `auto`: one per GPU, or one on a CPU."""
    layout: Literal["auto", "single", "dp", "ddp", "fsdp", "model", "pipeline"] = "auto"
    """`ddp`: one process per GPU, gradients averaged. `fsdp`: the same with parameters, gradients and optimizer
    sharded over the processes. `pipeline`: the model in stages, each on a process or a GPU of its own, working on
    several micro-batches at a time; more processes than stages are replicas. `model`: the stages take turns, one
    process driving them all (saves memory, no time). `dp`: torch's DataParallel, one process driving all GPUs
    (slower, and GPU 0 carries the extra memory). `auto`: ddp for several processes, else single."""
    stages: AutoInt = "auto"
    """Processes (or, in one process, GPUs) that one copy of the model is laid over, for layout pipeline and model.
    `auto`: all of them."""
    micro_batches: AutoInt = "auto"
    """Pieces that each replica's part of the global batch goes through the pipeline in. More keep the stages busier
    and smaller; results depend on it as on train.accumulate. `auto`: four for each stage, or as many as there are
    samples for."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of a pipeline's work. `gpipe`: all forwards, then all backwards; keeps every micro-batch's activations.
    `1f1b`: backwards as soon as possible; keeps at most one for each stage. `interleaved`: 1f1b with several
    smaller stages on each process; idles less and sends more. All give the same bits (dropout draws by stages)."""
    chunks: AutoInt = "auto"
    """Stages on each process for schedule interleaved. `auto`: 2."""
    split: str = "time"
    """Where the model is cut. `time`: at the places that balance measured times best. `even`: the same number of
    blocks in each stage. Or the modules that begin stages 2, 3, …, such as layer2,layer3.1 (`drumline plan --cuts
    MODEL` lists them). Changes no bits but those of dropout, which draws by stages; a resumed run keeps its cut."""
    batchnorm: Literal["micro", "deferred", "sync", "frozen"] = "micro"
    """BatchNorm in a pipeline. `micro`: each micro-batch is normalised by itself and moves the running statistics.
    `deferred`: normalised so too, but running statistics move once a step, by all its micro-batches together. `sync`:
    each micro-batch together with those of the other replicas. `frozen`: by the running statistics, which stay."""
    virtual: bool = False
    """Let the stages of one process share a device where there are too few: right, but not faster. For trying a
    layout out without the GPUs."""
    nodes: int = 1
    """Machines in the run. Start the same command on each."""
    node_rank: AutoInt = "auto"
    """This machine's number, 0 to nodes-1. `auto` lets the rendezvous number the machines."""
    rendezvous: str = ""
    """Where the machines meet: `host:port` (TCP), `file:///shared/path`, or `env://` when RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT are set for each process. Empty: this machine alone, on a free port. Several machines
    need the same secret: DRUMLINE_SECRET, or ~/.config/drumline/secret."""
    interface: str = "auto"
    """Network interface for gloo and NCCL. `auto`: loopback for one machine, else the one that reaches the
    rendezvous."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Transport. `auto`: nccl when every process has its own GPU, else gloo."""
    timeout: float = 300.0
    """Seconds a process waits for another before it gives up."""
    threads: AutoInt = "auto"
    """CPU threads per process for arithmetic. `auto`: OMP_NUM_THREADS where you set it, else cores divided by
    processes; 1 in strict mode. Changes bits on a CPU, so a resumed run keeps the number it was started with."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the processes of a run are watched over."""

    restarts: int = 0
    """How often a run that lost a process goes on by itself from its newest checkpoint: at once, or after 1, 2, 4 ...
    60 s when the last restart made no progress. 0: it ends."""
    hang: float = 60.0
    """Seconds without a step, or another sign of progress, before a process counts as hung: the stack of each is
    printed, and the run restarts or ends. 0: never."""
    min_nodes: AutoInt = "auto"
    """Machines that a restart may go on with when others are gone. `auto`: all of parallel.nodes."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What looks for silent mistakes while a run trains."""

    action: Literal["stop", "warn"] = "stop"
    """What happens when one is found: the run ends, or goes on after a warning."""
    every: int = 100
    """Fingerprint parameters, gradients, buffers, optimizer and sample ids, and compare all processes, every this
    many steps; after the first three steps and at each checkpoint in any case."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is kept, how often, and how a run goes on."""

    every_steps: int = 0
    """Save every this many steps; 0 saves by epochs only."""
    every_epochs: float = 1.0
    """Save every this many epochs; 0 saves by steps and at the end only."""
    keep: int = 3
    """Newest checkpoints to keep, beside the best one."""
    sharded: bool = False
    """With layout fsdp, each process writes its own pieces: faster for large models, and every process must see the
    run folder. Such a checkpoint serves like any other."""
    resume: str = "never"
    """`auto`: go on from the newest sound checkpoint of this run folder, or start where the folder holds no run.
    `never`: start, and refuse a folder that holds a run. A path: go on from that run or checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a training run."""

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


def field_names(recipe: Recipe) -> Iterator[str]:
    """The dotted name of every field, in the order they are written down here."""
    for section in fields(recipe):
        yield from (f"{section.name}.{key.name}" for key in fields(getattr(recipe, section.name)))


def value_of(recipe: Recipe, name: str) -> Any:
    """The value at a dotted name such as `optim.lr`."""
    section, key = name.split(".")
    return getattr(getattr(recipe, section), key)

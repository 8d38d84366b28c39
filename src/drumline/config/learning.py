"""The sections of a recipe that affect what is learned: data, model, optimizer and training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from drumline.config.limits import (
    MODEL_ARGUMENTS,
    OPTIMIZER_ARGUMENTS,
    ClassWeights,
    Length,
    Names,
    PerMachine,
    Range,
    Values,
)
from drumline.config.sources import SOURCE_NAMES
from drumline.core.precision import PRECISIONS

AutoInt = int | Literal["auto"]
AutoFloat = float | Literal["auto"]
AUTO: Any = "auto"
Fraction = Annotated[float, Range(0, below=1)]
SourceName = Annotated[str, SOURCE_NAMES]
CHANNELS = Length((1, 3), "one for grey images, three for colour")
OF_TORCH = tuple(
    f"torch.optim:{name}" for name in ("Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta")
)
"""Optimizers of torch that a wrong name may mean."""
PIXELS = "pixel values are between 0 and 1 here, so divide by 255 if necessary"
if TYPE_CHECKING:
    PrecisionName = str
    ResolvedInt = int
    ResolvedFloat = float
else:
    PrecisionName = Literal["auto", *PRECISIONS]
    # `training/defaults.py` replaces `auto` once the data is open. Later code sees a number.
    ResolvedInt = AutoInt
    ResolvedFloat = AutoFloat


@dataclass(frozen=True, kw_only=True)
class Data:
    """The images, and how they are batched, augmented and decoded."""

    source: SourceName = "auto"
    """Kind of data, or your own as `package.module:factory`. `auto`: detected from `path`; without a path: the
    embedded digits."""
    path: Annotated[str, PerMachine(path=True)] = ""
    """Folder or file with the data. A folder or tar file contains `train/<class>/` and `val/<class>/`, or class
    folders alone together with `holdout`."""
    labels: Annotated[str, PerMachine(path=True)] = ""
    """File with the labels of the images: .csv, .tsv or .parquet with the columns `path`, `label` and, unless
    `holdout` or `folds` divides the data, `split` (train, val or test). Its paths are relative to `data.path`, or to
    the file's own folder if `data.path` is empty. Empty: folder names are the labels."""
    batch: Annotated[ResolvedInt, Range(1, example=64)] = AUTO
    """Global batch: samples per optimizer step, over all processes and accumulation steps together. `auto`: 16 to
    128, depending on the number of training samples, for at least about 20 steps per epoch."""
    size: Annotated[AutoInt, Range(1)] = "auto"
    """Side of the square image that the model gets. `auto`: the stored size for arrays, 224 for image files."""
    workers: Annotated[AutoInt, Range(0), PerMachine()] = "auto"
    """Threads or processes per training process that read and decode. Never changes a pixel or the order."""
    pool: Annotated[Literal["auto", "threads", "processes"], PerMachine()] = "auto"
    """Kind of workers. `auto`: native threads where they are faster (JPEG), processes otherwise."""
    decode: Annotated[Literal["auto", "cpu", "gpu"], PerMachine()] = "auto"
    """Where JPEGs are decoded. `gpu`: nvJPEG decodes the files for which its result equals Pillow's bit for bit, and
    the CPU the others. `auto`: measures both, prefers threads, and uses the GPU for what they cannot keep up with.
    The pixels are the same in all cases."""
    augment: Literal["auto", "none", "shift", "shift-flip", "crop-flip"] = "auto"
    """Augmentation of training images. `shift`: pad by an eighth and crop back. `shift-flip`: the same with a random
    flip (usual for CIFAR). `crop-flip`: random resized crop with a random flip (usual for ImageNet). `auto`: depends
    on the source."""
    hflip: Annotated[AutoFloat, Range(0, 1)] = "auto"
    """Probability of a horizontal flip. `auto`: 0.5 for `shift-flip` and `crop-flip`, otherwise 0. Set it to 0 for
    digits, text, and other images that change their meaning when mirrored."""
    vflip: Annotated[float, Range(0, 1)] = 0.0
    """Probability of a vertical flip."""
    rotation: Annotated[float, Range(0, 180)] = 0.0
    """Maximum random rotation around the centre, in degrees in either direction, with nearest-neighbour sampling and
    black corners. 0: off."""
    crop_scale: Annotated[tuple[float, float], Range(above=0, most=1)] = (0.08, 1.0)
    """Minimum and maximum area of the crops of `crop-flip`, as fractions of the image's area."""
    jitter: Annotated[
        tuple[float, ...],
        Values(
            {"brightness": Range(0), "contrast": Range(0), "saturation": Range(0), "hue": Range(0, 0.5)},
            example=(0.4, 0.4, 0.4, 0.1),
        ),
    ] = ()
    """Colour jitter as four strengths: brightness, contrast, saturation, hue (`0.4,0.4,0.4,0.1`). Empty: none."""
    randaugment: Annotated[
        tuple[int, ...], Values({"operations": Range(1, 100), "magnitude": Range(0, 30)}, example=(2, 9))
    ] = ()
    """RandAugment as two numbers: operations per sample, and magnitude (`2,9`). Empty: none."""
    erasing: Annotated[float, Range(0, 1)] = 0.0
    """Probability that a rectangle of a sample is replaced by the mean colour."""
    transform: Annotated[str, Names((), "function")] = ""
    """Your own augmentation of training images, in addition to the others, as `package.module:function`. Called as
    `function(image, rng)` after crop and horizontal flip, and before the other pixel operations, with a uint8 array
    (height, width, channels) and a NumPy generator for this sample and epoch. Returns an array of the same shape and
    type."""
    mixup: Annotated[float, Range(0.001, 8, or_zero=True)] = 0.0
    """Alpha of mixup's Beta distribution. 0: off."""
    cutmix: Annotated[float, Range(0.001, 8, or_zero=True)] = 0.0
    """Alpha of cutmix's Beta distribution. 0: off. If `mixup` is on too, each pair of samples uses one of the two."""
    holdout: Fraction = 0.0
    """Fraction of the training samples to set aside for evaluation if the data has no evaluation split, the same
    fraction of each class. The choice depends on a sample's position and on `split_seed`, not on `run.seed`."""
    folds: Annotated[int, Range(2, 1000, or_zero=True)] = 0
    """Number of folds of a cross-validation, for data without an evaluation split. Each class is divided as evenly as
    possible. Fold number `fold` is for evaluation, the others for training. 0: off."""
    fold: Annotated[int, Range(0)] = 0
    """Number of the fold for evaluation, from 0 to `folds` - 1."""
    split_seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the division by `holdout` or `folds`."""
    balance: Literal["none", "sqrt", "balanced"] = "none"
    """How often an epoch draws each class. `none`: each sample once. `balanced`: all classes equally often. `sqrt`:
    in proportion to the square root of the number of samples, between the two. The length of an epoch does not
    change: it repeats samples of small classes, with different augmentation, and leaves out some of large ones, in
    turns."""
    eval_crop: Annotated[float, Range(above=0, most=1)] = 0.875
    """Evaluation of image files: side of the centre crop as a fraction of the resized short side."""
    resize: Literal["pillow12", "pillow13"] = "pillow12"
    """Version of Pillow whose resize is reproduced bit for bit, whatever version is installed. Pillow 13 differs from
    12 and earlier."""
    interpolation: Literal["bilinear", "bicubic", "box", "lanczos"] = "bilinear"
    """Filter of the resize."""
    strict: bool = False
    """Stop at the first sample that cannot be read. Otherwise a broken training sample is replaced by another one
    (the same one on every run), a broken evaluation image is black, and all of them are listed at the end."""
    bad_limit: Annotated[float, Range(0, 1)] = 0.01
    """Fraction of a set's samples that may be broken before the run stops."""
    exif: Literal["ignore", "apply"] = "ignore"
    """EXIF orientation of image files. `ignore` gives the pixels that torchvision and timm train on."""
    mean: Annotated[tuple[float, ...], Range(0, 1, hint=PIXELS), CHANNELS] = ()
    """Mean to subtract from each channel. Empty: measured for array sources, ImageNet's for image files."""
    std: Annotated[tuple[float, ...], Range(above=0, most=1, hint=PIXELS), CHANNELS] = ()
    """Standard deviation to divide each channel by. Empty: as for `mean`."""

    @property
    def mixing_unit(self) -> int:
        """Samples that stay together on one process: pairs, if samples are mixed."""
        return 2 if self.mixup or self.cutmix else 1


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network."""

    name: str = "auto"
    """Architecture. A built-in model (`drumline doctor --models` lists them), `torchvision/NAME`, `timm/NAME`, or
    your own `package.module:factory`, which is called as `factory(classes=N)`. `auto`: the model of `weights`;
    without weights, resnet18."""
    args: Annotated[tuple[str, ...], MODEL_ARGUMENTS] = ()
    """Arguments of the model's factory besides the number of classes, such as `drop_rate:0.1,drop_path_rate:0.05`.
    Stored with the weights."""
    weights: Annotated[str, PerMachine(path=True)] = ""
    """Weights to start from: a run folder, a checkpoint, a weights file (.safetensors, .pt, .pth, .pth.tar, .bin), or
    published weights of a library, such as `torchvision:resnet50` or `timm:resnet50.a1_in1k`. If the weights record
    their preprocessing, they also set `data.size`, `mean`, `std`, `interpolation`, `eval_crop`, `resize` and `exif`,
    unless you set these."""
    classes: Annotated[AutoInt, Range(2)] = "auto"
    """Outputs of the classifier. `auto`: the number of classes in the data."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and the learning rate."""

    name: Annotated[str, Names(("sgd", "adamw", "lars", "lamb"), others=OF_TORCH)] = "sgd"
    """Optimizer, or your own as `package.module:factory`, such as `torch.optim:NAdam`, which is called as
    `factory(groups, lr=..., weight_decay=..., **args)`."""
    args: Annotated[tuple[str, ...], OPTIMIZER_ARGUMENTS] = ()
    """Arguments of your own optimizer, such as `momentum_decay:0.004,decoupled_weight_decay:true`."""
    # Above 3e38 the rate does not fit into a float32 tensor.
    lr: Annotated[ResolvedFloat, Range(0, 1e6, example=0.1)] = AUTO
    """Peak learning rate. With `lr_scaling`, the rate for `reference_batch`. `auto`: depends on optimizer and batch,
    for sgd 0.1 at a batch of 128; a third of that if the run starts from `model.weights`. Your own optimizer needs a
    number."""
    head_lr: Annotated[ResolvedFloat, Range(0, 1e6)] = 1.0
    """Factor on the learning rate of the classifier, the model's last linear layer. `auto`: 3 if the classifier is
    new because the classes of `model.weights` differ from the data's, else 1. `finetune=WEIGHTS` sets `auto`."""
    layer_decay: Annotated[float, Range(above=0, most=1)] = 1.0
    """Factor on the learning rate from each block of the model to the preceding one: the classifier learns at the
    full rate, and the first layers at the lowest. 0.65 to 0.9 is usual for fine-tuning a transformer. 1: off."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by (global batch / `reference_batch`), or by its square root."""
    reference_batch: Annotated[int, Range(1)] = 256
    """Batch that `lr` was chosen for. Only `lr_scaling` uses it."""
    momentum: Fraction = 0.9
    """Momentum of sgd and lars."""
    nesterov: bool = False
    """Nesterov momentum for sgd."""
    weight_decay: Annotated[float, Range(0)] = 5e-4
    """Weight decay. Decoupled in adamw and lamb."""
    decay_all: bool = True
    """Apply weight decay to every parameter, including biases and normalisation layers, as the classic recipes do.
    `False`: not to biases and normalisation layers."""
    betas: Annotated[tuple[float, float], Range(0, below=1)] = (0.9, 0.999)
    """Decay rates of the moments in adamw and lamb."""
    eps: Annotated[float, Range(0)] = 1e-8
    """Added to the denominator in adamw and lamb."""
    trust: Annotated[float, Range(0)] = 0.001
    """Trust coefficient of lars."""
    clip: Annotated[float, Range(0)] = 0.0
    """Maximum norm of all gradients together; larger ones are scaled down. 0: off."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_epochs: Annotated[ResolvedFloat, Range(0, example=2.0)] = AUTO
    """Epochs of linear warm-up from near zero. `auto`: a twentieth of the run."""
    milestones: Annotated[tuple[float, ...], Range(above=0)] = ()
    """Epochs at which schedule `step` multiplies the rate by `gamma`. Empty: at 1/2 and 3/4 of the run."""
    gamma: Annotated[float, Range(0)] = 0.1
    """Factor at each milestone."""
    final_lr: Annotated[float, Range(0, 1)] = 0.0
    """Rate at the end of schedule `cosine`, as a fraction of the peak rate."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long to train, and in which arithmetic."""

    epochs: Annotated[ResolvedFloat, Range(0, hint="above 0 unless train.steps is set", example=10.0)] = AUTO
    """Passes over the training data. Ignored if `steps` is set. `auto`: 30 to 80 from scratch, 5 to 20 if the run
    starts from `model.weights`; more for fewer training samples."""
    steps: Annotated[int, Range(0)] = 0
    """Total optimizer steps. 0: `epochs` decides."""
    precision: PrecisionName = "auto"
    """Arithmetic of forward and backward. `auto`: bf16 on a GPU that supports it, fp16 on an older one, fp32 on a
    CPU."""
    accumulate: Annotated[int, Range(1)] = 1
    """Micro-batches into which each process splits its slice of the global batch."""
    loss: Annotated[str, Names(("cross_entropy", "bce"), "function")] = "cross_entropy"
    """Loss on the labels. `bce`: binary cross-entropy of each class, averaged over the classes. Or your own as
    `package.module:function`, which is called as `loss(logits, labels)` and returns one loss per sample; a class is
    constructed once."""
    label_smoothing: Fraction = 0.0
    """Fraction of the target that is spread over all classes."""
    class_weights: Annotated[tuple[str, ...], ClassWeights()] = ()
    """Weights of the classes in the training loss. `balanced`: in inverse proportion to how often a class is drawn.
    Or by name, such as `cat:2,dog:0.5`; other classes have 1. Weights are scaled to a mean of 1 over the drawn
    samples, which keeps the learning rate comparable. Empty: none."""
    freeze: tuple[str, ...] = ()
    """Modules of the model to freeze, such as `conv1,bn1,layer1`. `stem`: everything before the first block.
    `backbone`: everything but the classifier. A frozen BatchNorm layer stays in evaluation mode, so its running
    statistics do not change either."""
    unfreeze_epoch: Annotated[float, Range(0)] = 0.0
    """Epoch at which the frozen modules start to train, counted from 0: 2 freezes them for two epochs. 0: never."""
    ema: Fraction = 0.0
    """Decay of a moving average of the weights, which is evaluated and saved beside the model. 0: off."""
    sync_bn: bool = False
    """Compute BatchNorm statistics over the whole global batch, not over each process's slice of it (in strict mode:
    each shard)."""
    channels_last: bool = True
    """NHWC memory layout on a GPU. On a CPU the layout stays NCHW."""
    compile: bool = False
    """Compile the model with torch.compile."""
    capture: Literal["auto", "on", "off"] = "auto"
    """Record the whole step as one CUDA graph and replay it. Same bits, without the cost of launching kernels."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each block in backward (torch.utils.checkpoint). Less memory, about a third more
    compute, same result."""
    eval_every: Annotated[float, Range(0)] = 1.0
    """Epochs between evaluations. The end of the run is always evaluated. 0: only the end."""
    patience: Annotated[int, Range(0)] = 0
    """Consecutive evaluations without improvement in `checkpoint.best` after which the run stops early. 0: never. The
    schedule does not become shorter: a cosine schedule that stops early does not reach its low rates."""
    log_every: Annotated[int, Range(1)] = 50
    """Steps between lines of metrics.jsonl."""

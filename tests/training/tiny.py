"""The smallest models, batches and steps that can show a promise kept or broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from drumline.config.recipe import Data, Optim, Recipe, Run, Train
from drumline.data.feed.batch import Batch
from drumline.data.sources import ArrayDataset
from drumline.guards.run.nonfinite import NonFiniteGate
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import World, single_process
from drumline.training.sets import Normalise
from drumline.training.state import TrainState, build_state
from drumline.training.step import TrainStep
from drumline.training.task import Classification, Objective

CPU = torch.device("cpu")
CLASSES = 4
SGD = Optim(lr=0.1, momentum=0.9, weight_decay=1e-3)


def plain(seed: int = 0) -> nn.Module:
    """Nothing in it looks at more than one sample, and nothing is random."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.Tanh(),
        nn.Linear(8, CLASSES),
    )


def normed(seed: int = 0) -> nn.Module:
    """With BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(6, CLASSES)
    )


def dropping(seed: int = 0) -> nn.Module:
    """With dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def imbalanced(*sizes: int) -> ArrayDataset:
    """Classes a, b, c, ... with these numbers of samples."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return ArrayDataset(
        "npz", np.zeros((len(labels), 8, 8, 3), np.uint8), labels, tuple("abcdefgh"[: len(sizes)])
    )


def make(count: int, seed: int = 0, mix: torch.Tensor | None = None) -> Batch:
    """A batch of noise, 8 x 8 RGB."""
    draw = np.random.default_rng(seed)
    return Batch(
        images=torch.from_numpy(draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)),
        labels=torch.from_numpy(draw.integers(0, CLASSES, count)),
        samples=torch.arange(count),
        mix=torch.empty(count, 0) if mix is None else mix,
    )


def part(batch: Batch, where: slice) -> Batch:
    """Some rows of a batch."""
    return Batch(*(tensor[where] for tensor in batch))


def state(
    module: nn.Module,
    world: World | None = None,
    optim: Optim = SGD,
    train: Train | None = None,
    model: nn.Module | None = None,
) -> TrainState:
    recipe = Recipe(optim=optim, train=train or Train(), run=Run(seed=5))
    return build_state(create_strategy(recipe, world or single_process(CPU)), module, model)


def step_of(
    trained: TrainState,
    batch: int,
    *,
    accumulate: int = 1,
    clip: float = 0.0,
    objective: Objective | None = None,
    gate: NonFiniteGate | None = None,
) -> TrainStep:
    """A step over a global batch of `batch` samples. Smoothing, so that the labels' loss has two terms."""
    recipe = trained.strategy.recipe
    trained.strategy.recipe = replace(
        recipe,
        data=Data(batch=batch),
        train=replace(recipe.train, accumulate=accumulate),
        optim=replace(recipe.optim, clip=clip),
    )
    trained.strategy.micro_batches = accumulate
    return TrainStep(trained, objective or Classification(0.1), NORMALISE, gate)


NORMALISE = Normalise.build((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), CPU, channels_last=False)


def normalised(images: torch.Tensor) -> torch.Tensor:
    """What `NORMALISE` does, in other words."""
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.25, 0.3])
    return ((images / 255.0 - mean) / std).permute(0, 3, 1, 2).contiguous()


def reference_steps(
    model: nn.Module, batches: list[Batch], rates: list[float], optim: Optim
) -> list[list[torch.Tensor]]:
    """A plain torch loop over whole batches: trains `model`, gives each step's gradients."""
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=0.0,
        momentum=optim.momentum,
        weight_decay=optim.weight_decay,
        nesterov=optim.nesterov,
    )
    gradients = []
    for batch, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        logits = model(normalised(batch.images))
        nn.functional.cross_entropy(logits, batch.labels, label_smoothing=0.1).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return gradients

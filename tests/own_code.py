"""Augmentations, losses, models and optimizers as a user would write them, right and wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

Image = NDArray[np.uint8]
_OWN = np.random.default_rng(0)


def noisy(image: Image, rng: np.random.Generator) -> Image:
    return np.clip(image.astype(np.int16) + rng.integers(-20, 21, image.shape), 0, 255).astype(np.uint8)


class Shade:
    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        image[:] = (image * rng.uniform(0.3, 1)).astype(np.uint8)
        return image


def by_random(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, random.randrange(9), 0)


def by_numpy(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, np.random.randint(9), 0)


def by_torch(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, int(torch.randint(9, ())), 0)


def by_its_own(image: Image, rng: np.random.Generator) -> Image:
    return np.roll(image, int(_OWN.integers(9)), 0)


def cut_off(image: Image, rng: np.random.Generator) -> Image:
    return image[:4]


def scaled(image: Image, rng: np.random.Generator) -> Any:
    return image / 255


def empty(image: Image, rng: np.random.Generator) -> None:
    image[:] = 0


def failing(image: Image, rng: np.random.Generator) -> Image:
    raise KeyError("a mistake")


def without_generator(image: Image) -> Image:
    return image


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


class Weighted(nn.Module):
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 10))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, self.weights[: logits.shape[1]], reduction="none")


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return focal(self.scale * logits, labels)


class Remembering(Weighted):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.weights.mul_(0.9)
        return super().forward(logits, labels)


class Calls:
    """A number of calls, and losses that do not depend on it at first."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        return focal(logits, labels)


_CALLS: list[int] = []


def weaker(logits: Tensor, labels: Tensor) -> Tensor:
    _CALLS.append(1)
    return focal(logits, labels) / len(_CALLS)


class Caching:
    """Keeps a table that every call computes alike, and draws random numbers."""

    def __init__(self) -> None:
        self.tables: dict[int, Tensor] = {}

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        table = self.tables.setdefault(logits.shape[1], torch.ones(logits.shape[1]))
        return focal(logits * table, labels) * torch.rand(len(labels))


def of_products(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits @ torch.eye(logits.shape[1]), labels, reduction="none")


def averaged(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def detached(logits: Tensor, labels: Tensor) -> Tensor:
    return focal(logits.detach(), labels)


def of_three(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return focal(logits, labels) * weights


class Counting(torch.optim.Optimizer):
    """Adam as many write it: numbers on the host, in the state and in the group, and moments that are replaced."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, scale=2.0, moment=torch.full_like(p, 0.1), kind="adam", unused=None)
                state["step"] += 1
                state["scale"] *= 0.99
                state["moment"] = group["beta"] * state["moment"] + p.grad
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["scale"] / (state["step"] + group["k"]) * state["moment"])


class Hidden(Counting):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()


class Slow(Counting):
    """Momentum in a dict of its own."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.slow: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * self.slow[p])


class Tallied(Counting):
    """A number in a table of its group."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.param_groups[0]["tally"] = {"n": 0}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["tally"]["n"] += 1
        super().step()


class Common(Counting):
    """State under a name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        common: Any = self.state["common"]  # type: ignore[index]
        common["n"] = common.get("n", 0) + 1


class Referring(Counting):
    """Refers to its parameters, groups and methods, and keeps nothing else."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.own = [p for group in self.param_groups for p in group["params"]]
        self.groups, self.kept, self.work = self.param_groups, self.state, self.step


class Ahead(Counting):
    """A wrapper, such as Lookahead."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)


class Late(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            if state["step"] == 4:
                state["late"] = torch.zeros(())


class Listing(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["history"] = [1, 2]


class Drifting(Counting):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.param_groups[0]["k"] > 3:
            self.param_groups[0]["beta"] *= 0.9


class Forgetful(Counting):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(next(iter(params))["params"][:1], lr, weight_decay)


def no_optimizer(params: Any, lr: float, weight_decay: float = 0.0) -> int:
    return 3


def without_decay(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Rprop(params, lr=lr)


def net(classes: int, width: int = 8, dropout: float = 0.0, norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width) if norm else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, classes),
    )

"""The methods' formulas, written out from the papers and from their authors' code, helpers included.

Each function gets the features of both networks (`own_forward`), the trained tensors of a helper by name (W), and
returns the mean loss of the batch. Nothing of Drumline computes here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.distillation.methods.own_forward import Features

CHOSEN_STAGE = 1
"""hint reads the second stage: `hint_layer` 2 of RepDistiller, where 0 is the stem."""


@dataclass
class Case:
    """One batch."""

    s: Features
    t: Features
    labels: Tensor
    W: Mapping[str, Tensor] = field(default_factory=dict)
    norms: list[Any] = field(default_factory=list)
    """The teacher's BatchNorms before the activations of its stages."""
    banks: Any = None
    """For crd: the two banks, the negatives, all labels, and the samples of the batch."""
    epoch: int = 1
    """Counted from 1."""


def soft(z: Tensor, T: float | Tensor) -> Tensor:
    e = (z / T - (z / T).amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(1)


def kd(c: Case, T: float | Tensor = 4.0) -> Tensor:
    return (T * T * divergence(soft(c.t.logits, T), soft(c.s.logits, T))).mean()


def deit(c: Case) -> Tensor:
    """These students have one head."""
    scores = soft(c.s.logits, 1)[range(len(c.labels)), c.t.logits.argmax(1)]
    return -scores.log().mean()


def dkd(c: Case, T: float = 4.0, alpha: float = 1.0, beta: float = 8.0) -> Tensor:
    total = 0
    for z_s, z_t, label in zip(c.s.logits, c.t.logits, c.labels.tolist(), strict=True):
        others = [i for i in range(len(z_s)) if i != label]
        p_s, p_t = soft(z_s[None], T)[0], soft(z_t[None], T)[0]
        two_s, two_t = (torch.stack((p[label], p[others].sum())) for p in (p_s, p_t))
        target = divergence(two_t[None], two_s[None])
        rest = divergence(soft(z_t[None, others], T), soft(z_s[None, others], T))
        total = total + (alpha * target + beta * rest).sum() * T**2
    return total / len(c.labels)


def dist(c: Case, T: float = 1.0) -> Tensor:
    def apart(a: Tensor, b: Tensor) -> Tensor:
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        return 1 - ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-8)).mean()

    p_s, p_t = soft(c.s.logits, T), soft(c.t.logits, T)
    return T * T * (apart(p_s, p_t) + apart(p_s.T, p_t.T))


def mlkd(c: Case) -> Tensor:
    """With one view in place of the weak and the strong one."""
    sure = soft(c.t.logits, 1)
    samples, classes = (
        float((v <= np.percentile(v.numpy(), 50)).double().mean()) for v in (sure.amax(1), sure.sum(0))
    )
    total = 0
    for T in (4.0, 3.0, 5.0, 2.0, 6.0):
        p_s, p_t = soft(c.s.logits, T), soft(c.t.logits, T)
        total = total + kd(c, T) * samples + kd(c, T)
        total = total + ((p_t.T @ p_t - p_s.T @ p_s) ** 2).sum() / p_s.shape[1] * classes
        total = total + ((p_t @ p_t.T - p_s @ p_s.T) ** 2).sum() / len(p_s) * samples
    return total


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grads[0], None


def ctkd(c: Case) -> Tensor:
    """The factor falls from 0 to -1 by half a cosine over ten epochs."""
    factor = (math.cos(math.pi * min(c.epoch, 10) / 10) + 1) / 2 - 1
    return kd(c, 1 + 20 * Reversed.apply(c.W["parameter"], factor).sigmoid())


def normed(x: Tensor, W: Mapping[str, Tensor], name: str) -> Tensor:
    return F.batch_norm(x, None, None, W[f"{name}.weight"], W[f"{name}.bias"], True)


def met(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    size = min(a.shape[2], b.shape[2])
    return F.adaptive_avg_pool2d(a, size), F.adaptive_avg_pool2d(b, size)


def converted(x: Tensor, like: Tensor, weight: Tensor) -> Tensor:
    """The convolution that FitNet's regressors in RepDistiller use for two sizes."""
    mine, theirs = x.shape[2], like.shape[2]
    if mine == 2 * theirs:
        return F.conv2d(x, weight, stride=2, padding=1)
    if 2 * mine == theirs:
        return F.conv_transpose2d(x, weight, stride=2, padding=1)
    return F.conv2d(x, weight)


def hint(c: Case) -> Tensor:
    target = c.t.stages[CHOSEN_STAGE]
    out = normed(converted(c.s.stages[CHOSEN_STAGE], target, c.W["conv.weight"]), c.W, "norm")
    return ((torch.relu(out) - target) ** 2).mean()


def each_stage(compare: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Case], Tensor]:
    return lambda c: sum(compare(*met(s, t)) for s, t in zip(c.s.stages, c.t.stages, strict=True))


def lengths_one(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def attention_gap(s: Tensor, t: Tensor) -> Tensor:
    a, b = (lengths_one((x**2).mean(1).flatten(1)) for x in (s, t))
    return ((a - b) ** 2).mean()


def nst_gap(s: Tensor, t: Tensor) -> Tensor:
    s, t = lengths_one(s.flatten(2)), lengths_one(t.flatten(2))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (torch.einsum("nip,njp->nij", a, b) ** 2).mean()

    return kernel(t, t) + kernel(s, s) - 2 * kernel(s, t)


def similarity(c: Case) -> Tensor:
    g_s, g_t = (x.stages[-1].flatten(1) @ x.stages[-1].flatten(1).T for x in (c.s, c.t))
    return ((lengths_one(g_t) - lengths_one(g_s)) ** 2).sum() / len(g_s) ** 2


def embedded(c: Case) -> tuple[Tensor, Tensor]:
    s, t = (
        x.pooled @ c.W[f"{name}.weight"].T + c.W[f"{name}.bias"]
        for name, x in (("student", c.s), ("teacher", c.t))
    )
    return s, t


def correlation(c: Case) -> Tensor:
    s, t = embedded(c)
    gap = (s - t).abs()
    return torch.stack([(a * b).sum() for a, b in itertools.pairwise(gap)]).mean()


def vid(c: Case) -> Tensor:
    total = 0
    for number, (s, t) in enumerate(zip(c.s.stages, c.t.stages, strict=True), 1):
        s, t = met(s, t)
        for layer in (0, 2, 4):
            s = F.conv2d(torch.relu(s) if layer else s, c.W[f"means.stage{number}.{layer}.weight"])
        variance = ((1 + c.W[f"log_scales.stage{number}"].exp()).log() + 1e-5)[:, None, None]
        total = total + (0.5 * ((s - t) ** 2 / variance + variance.log())).mean()
    return total


def rkd(c: Case) -> Tensor:
    def distances(x: Tensor) -> Tensor:
        rows = [
            torch.stack([(a - b).norm() if i != j else a.sum() * 0 for j, b in enumerate(x)])
            for i, a in enumerate(x)
        ]
        found = torch.stack(rows)
        return found / found[found > 0].mean()

    def angles(x: Tensor) -> Tensor:
        rays = lengths_one(x[None] - x[:, None] + 0)
        return torch.einsum("ijc,ikc->ijk", rays, rays)

    s, t = c.s.pooled, c.t.pooled
    return 25 * F.smooth_l1_loss(distances(s), distances(t)) + 50 * F.smooth_l1_loss(angles(s), angles(t))


def pkt(c: Case) -> Tensor:
    def chances(x: Tensor) -> Tensor:
        near = (lengths_one(x) @ lengths_one(x).T + 1) / 2
        return near / near.sum(1, keepdim=True)

    s, t = chances(c.s.pooled), chances(c.t.pooled)
    return (t * ((t + 1e-7) / (s + 1e-7)).log()).mean()


def crd(c: Case, tau: float = 0.07) -> Tensor:
    """Z is N times the mean of exp(score) over all positives and negatives of the first batch."""
    students, teachers, negatives, labels, samples = c.banks
    s, t = (lengths_one(x) for x in embedded(c))
    total = 0
    for anchors, bank in ((s, teachers), (t, students)):
        positives = [(a @ bank[i] / tau).exp() for a, i in zip(anchors, samples, strict=True)]
        others = [
            torch.stack([(a @ bank[j] / tau).exp() for j in negatives if labels[j] != labels[i]])
            for a, i in zip(anchors, samples, strict=True)
        ]
        Z = (len(bank) * torch.cat([torch.stack(positives), *others]).mean()).detach()
        for positive, kept in zip(positives, others, strict=True):
            noise = len(kept) / len(bank)
            total = (
                total
                - (positive / Z / (positive / Z + noise)).log()
                - (noise / (kept / Z + noise)).log().sum()
            )
    return total / len(s)


def reviewkd(c: Case, student: str = "stages") -> Tensor:
    """From deep to shallow; the deepest level is the pooled vector."""
    mine = [*getattr(c.s, student), c.s.pooled[:, :, None, None]][::-1]
    theirs = [*c.t.before, c.t.pooled[:, :, None, None]][::-1]
    total, deeper = 0, None
    for level, (x, target) in enumerate(zip(mine, theirs, strict=True)):
        name = f"fusions.{level}"
        x = normed(F.conv2d(x, c.W[f"{name}.enter.0.weight"]), c.W, f"{name}.enter.1")
        if deeper is not None:
            y = F.interpolate(deeper, x.shape[2:], mode="nearest")
            gates = F.conv2d(torch.cat((x, y), 1), c.W[f"{name}.attend.weight"], c.W[f"{name}.attend.bias"])
            x = x * gates.sigmoid()[:, 0:1] + y * gates.sigmoid()[:, 1:2]
        deeper = F.interpolate(x, target.shape[2:], mode="nearest")
        out = F.conv2d(deeper, c.W[f"{name}.leave.0.weight"], padding=1)
        out = normed(out, c.W, f"{name}.leave.1")
        grids = [target.shape[2], *(grid for grid in (4, 2, 1) if grid < target.shape[2])]
        gaps = [(F.adaptive_avg_pool2d(out, g) - F.adaptive_avg_pool2d(target, g)) ** 2 for g in grids]
        weights = [0.5**halvings for halvings in range(len(grids))]
        total = total + sum(w * gap.mean() for w, gap in zip(weights, gaps, strict=True)) / sum(weights)
    return total


def connected(c: Case, number: int) -> Tensor:
    """A 1x1 convolution and a BatchNorm for each stage."""
    x = F.conv2d(c.s.before[number], c.W[f"stages.{number}.0.weight"])
    return normed(x, c.W, f"stages.{number}.1")


def ofd(c: Case) -> Tensor:
    total, count = 0, len(c.t.before)
    for number, (t, norm) in enumerate(zip(c.t.before, c.norms, strict=True)):
        margins = []
        for mean, deviation in zip(norm.bias.tolist(), norm.weight.abs().tolist(), strict=True):
            law = NormalDist(mean, deviation)
            negative = law.cdf(0)
            margins.append(
                mean - deviation**2 * law.pdf(0) / negative if negative > 0.001 else -3 * deviation
            )
        margin = torch.tensor(margins, dtype=t.dtype)[:, None, None].expand_as(t)
        s = connected(c, number)
        gap = (s - margin) ** 2 * ((s > margin) & (t <= margin))
        gap = gap + (s - t) ** 2 * (((s > t) & (t > margin) & (t <= 0)) | (t > 0))
        total = total + gap.sum() / len(s) / 2 ** (count - 1 - number)
    return total


def abound(c: Case, connect: Callable[[Case, int], Tensor] = connected) -> Tensor:
    total, count = 0, len(c.t.before)
    for number, t in enumerate(c.t.before):
        s = connect(c, number)
        gap = (s + 1) ** 2 * ((s > -1) & (t <= 0)) + (s - 1) ** 2 * ((s <= 1) & (t > 0))
        total = total + 0.003 * gap.sum() / len(s) * 2.0 ** (number - count + 1)
    return total


def connected_if_different(c: Case, number: int) -> Tensor:
    s, t = c.s.before[number], c.t.before[number]
    if s.shape == t.shape:
        return s
    return normed(converted(s, t, c.W[f"stages.{number}.0.weight"]), c.W, f"stages.{number}.1")


def encoded(x: Tensor, W: Mapping[str, Tensor], name: str, layers: int, training: bool) -> Tensor:
    """Three convolutions with LeakyReLU; with BatchNorm if a layer has three modules, else with a bias."""
    for layer in range(0, 3 * layers, layers):
        x = F.conv2d(x, W[f"{name}.{layer}.weight"], W.get(f"{name}.{layer}.bias"), padding=1)
        if layers == 3 and training:
            x = normed(x, W, f"{name}.{layer + 1}")
        elif layers == 3:  # fresh running statistics: mean 0, variance 1
            x = x / math.sqrt(1 + 1e-5)
        x = F.leaky_relu(x, 0.1)
    return x


def factor(c: Case) -> Tensor:
    s = encoded(c.s.stages[-1], c.W, "translator", 3, True)
    t = encoded(c.t.stages[-1], c.W, "paraphraser.encode", 3, False)
    return (lengths_one(s.flatten(1)) - lengths_one(t.flatten(1))).abs().mean()


def factor_of_repdistiller(c: Case) -> Tensor:
    s = encoded(c.s.stages[-1], c.W, "translator", 3, True)
    t = encoded(c.t.stages[-1], c.W, "paraphraser.encode", 2, False)
    s, t = ((x**2).mean(1).flatten(1) for x in met(s, t))
    return (lengths_one(s) - lengths_one(t)).abs().mean()


def kdsvd(c: Case, k: int = 1) -> Tensor:
    """Teacher and student of equal widths. The sign of a singular vector is that of the sum of the teacher's."""
    total, previous = 0, None
    for s, t in zip(c.s.stages, c.t.stages, strict=True):
        mine = torch.linalg.svd(s.flatten(2).mT, full_matrices=False)[2].mT[:, :, : k + 3]
        _, sigma, theirs = torch.linalg.svd(t.flatten(2).mT, full_matrices=False)
        theirs = theirs.mT[:, :, :k] * theirs.mT[:, :, :k].sum(1, keepdim=True).sign()
        cosine = mine.mT @ theirs
        chosen = (cosine.abs() == cosine.abs().amax(1, keepdim=True)) * cosine.sign()
        scale = lengths_one(sigma[:, :k])[:, None]
        now = (mine @ chosen.detach() * scale, theirs * scale)
        if previous:
            r_s, r_t = (
                (-((a[:, :, None] - b[:, None]) ** 2) / 8).exp() for a, b in zip(now, previous, strict=True)
            )
            total = total + ((r_s - r_t) ** 2).sum() / len(s)
        previous = now
    return total


def fsp(c: Case, pool: Callable[..., Tensor] = F.adaptive_max_pool2d) -> Tensor:
    def flows(x: Features) -> list[Tensor]:
        found = []
        for a, b in itertools.pairwise([x.stem, *x.stages]):
            size = min(a.shape[2], b.shape[2])
            a, b = (each if each.shape[2] == size else pool(each, size) for each in (a, b))
            found.append((a[:, :, None] * b[:, None]).mean((3, 4)))
        return found

    return sum(((a - b) ** 2).mean() for a, b in zip(flows(c.s), flows(c.t), strict=True))


def srd(c: Case) -> Tensor:
    s = F.batch_norm(c.s.pooled @ c.W["project.weight"].T, None, None, training=True, eps=1e-4)
    t = F.batch_norm(c.t.pooled, None, None, training=True, eps=1e-4)
    return 2 * ((s - t) ** 4).sum().log() + kd(c, 1.0)

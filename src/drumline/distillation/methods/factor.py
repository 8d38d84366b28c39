"""Factor transfer: the student learns a compressed form of the teacher's last map instead of the map itself.

Promises: an initial phase (`Paraphrase`) trains an autoencoder of the teacher's last map. `Factor` freezes it and
trains a translator that computes the same factors from the student's last map. Both helpers name the autoencoder
`paraphraser`, so its weights carry over by name; once frozen, it stays in eval mode. In both phases, the larger of
two maps is pooled to the size of the smaller: before it is encoded or, in RepDistiller's variant, after. Rejects
networks without stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from drumline.config.limits import Range
from drumline.distillation.method import (
    LossInputs,
    Method,
    Needs,
    NetworkInfo,
    Taps,
    Variant,
    Weights,
    at_common_size,
    common_grid,
    last_stage,
    unit,
)
from drumline.models.base import pool_to


def factor(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean absolute difference per sample, (n,), of the two networks' factors n x K x H x W:

        mean over k, h, w of | s / ||s|| - t / ||t|| |

    with the L2 norm over all factors of a sample. Factors of zero stay zero and get no gradient.
    """
    return (unit(student.flatten(1)) - unit(teacher.flatten(1))).abs().mean(1)


def factor_energy(student: Tensor, teacher: Tensor) -> Tensor:
    """RepDistiller's form of `factor`, (n,): of the mean over k of the squares, H x W, at the smaller size."""
    student, teacher = at_common_size(student, teacher)
    return factor(student.square().mean(1), teacher.square().mean(1))


def paraphrase(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Mean squared error per sample, (n,)."""
    return ((reconstruction - target) ** 2).flatten(1).mean(1)


@dataclass(frozen=True)
class Paraphrase(Method):
    """The initial phase of `Factor`: an autoencoder of the teacher's last map. It does not involve the student."""

    name: ClassVar[str] = "factor"
    reads: ClassVar[str] = "last stage"
    weights: ClassVar[Weights] = Weights(r=0.0, a=0.0, b=1.0)
    helper_reads_teacher: ClassVar[bool] = True

    k: Annotated[float, Range(above=0, most=64)] = 0.5
    """Channels of the factors, as a multiple of the channels of the teacher's last map."""
    variant: Variant = "paper"
    """`paper`: the authors' form. `repdistiller`: the mean square of the factors at each position is compared, with
    weight 200, and the autoencoder has no BatchNorm."""

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return Needs(teacher=(_last(teacher),))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        _, grid = _grids(student, teacher, self.variant)
        return _Reconstruct(_last(teacher), grid, self._paraphraser(teacher))

    def loss(self, inputs: LossInputs) -> Tensor:
        return paraphrase(inputs.helper_outputs["reconstruction"], inputs.helper_outputs["target"])

    def _paraphraser(self, teacher: NetworkInfo) -> Paraphraser:
        channels = teacher.shapes[_last(teacher)][0]
        return Paraphraser(channels, max(1, round(self.k * channels)), norm=self.variant == "paper")


@dataclass(frozen=True)
class Factor(Paraphrase):
    """Factor transfer (Kim et al., 2018): a compressed form of the last map.

    With p = 1, the authors' loss and their weight of 500.
    """

    name: ClassVar[str] = "factor"
    weights: ClassVar[Weights] = Weights(b=500.0)
    initial_epochs: ClassVar[float] = 30.0

    @classmethod
    def initial_method(cls) -> type[Method]:
        return Paraphrase

    def needs(self, student: NetworkInfo, teacher: NetworkInfo) -> Needs:
        return Needs((_last(student),), (_last(teacher),))

    def helper(self, student: NetworkInfo, teacher: NetworkInfo) -> nn.Module:
        paraphraser = self._paraphraser(teacher)
        translator = encoder(student.shapes[_last(student)][0], paraphraser.width)
        taps = (_last(student), _last(teacher))
        return _Translate(taps, _grids(student, teacher, self.variant), paraphraser, translator)

    def loss(self, inputs: LossInputs) -> Tensor:
        compare = factor if self.variant == "paper" else factor_energy
        return compare(inputs.helper_outputs["student"], inputs.helper_outputs["teacher"])


class Paraphraser(nn.Module):
    """Three convolutions to `width` channels, and three transposed ones back."""

    def __init__(self, channels: int, width: int, norm: bool = True) -> None:
        super().__init__()
        self.width = width
        self.encode = encoder(channels, width, norm)
        self.decode = nn.Sequential(
            *_layer(nn.ConvTranspose2d(width, width, 3, padding=1, bias=not norm), norm),
            *_layer(nn.ConvTranspose2d(width, channels, 3, padding=1, bias=not norm), norm),
            *_layer(nn.ConvTranspose2d(channels, channels, 3, padding=1, bias=not norm), norm),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The map, reconstructed from its factors."""
        rebuilt: Tensor = self.decode(self.encode(x))
        return rebuilt


def encoder(channels: int, width: int, norm: bool = True) -> nn.Sequential:
    """Three 3x3 convolutions, each with BatchNorm (or a bias) and LeakyReLU(0.1): channels, then twice `width`."""
    return nn.Sequential(
        *_layer(nn.Conv2d(channels, channels, 3, padding=1, bias=not norm), norm),
        *_layer(nn.Conv2d(channels, width, 3, padding=1, bias=not norm), norm),
        *_layer(nn.Conv2d(width, width, 3, padding=1, bias=not norm), norm),
    )


class _Reconstruct(nn.Module):
    def __init__(self, tap: str, grid: tuple[int, int], paraphraser: Paraphraser) -> None:
        super().__init__()
        self.tap, self.grid = tap, grid
        self.paraphraser = paraphraser

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        target = pool_to(teacher[self.tap], self.grid)
        return {"reconstruction": self.paraphraser(target), "target": target}


class _Translate(nn.Module):
    def __init__(
        self,
        taps: tuple[str, str],
        grids: tuple[tuple[int, int], tuple[int, int]],
        paraphraser: Paraphraser,
        translator: nn.Sequential,
    ) -> None:
        super().__init__()
        self.taps, self.grids = taps, grids
        self.paraphraser = paraphraser.requires_grad_(False).eval()
        self.translator = translator

    def train(self, mode: bool = True) -> _Translate:
        super().train(mode)
        self.paraphraser.eval()
        return self

    def forward(self, student: Taps, teacher: Taps) -> dict[str, Tensor]:
        mine, theirs = self.taps
        return {
            "student": self.translator(pool_to(student[mine], self.grids[0])),
            "teacher": self.paraphraser.encode(pool_to(teacher[theirs], self.grids[1])),
        }


def _layer(convolution: nn.Conv2d | nn.ConvTranspose2d, norm: bool) -> tuple[nn.Module, ...]:
    norms = [nn.BatchNorm2d(convolution.out_channels)] if norm else []
    return convolution, *norms, nn.LeakyReLU(0.1)


def _last(network: NetworkInfo) -> str:
    return last_stage("factor", network)


def _grids(
    student: NetworkInfo, teacher: NetworkInfo, variant: Variant
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The sizes at which the maps of student and teacher are encoded. From the probed shapes, because the initial
    phase does not read the student's map."""
    mine, theirs = student.shapes[_last(student)], teacher.shapes[_last(teacher)]
    if variant == "paper":
        return common_grid(mine, theirs), common_grid(mine, theirs)
    return (mine[1], mine[2]), (theirs[1], theirs[2])

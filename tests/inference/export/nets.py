"""Small models, as a user writes them: with faults that no file can repeat, with fine branches, and a ViT.

Annotations are not postponed: TorchScript reads them.
"""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Base(nn.Module):
    """Two layers; subclasses do something between them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, classes)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        return self.fc(self.between(x).mean((2, 3)))


class TrainMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.bn.train()
        return super().forward(x)


class Dropout(Base):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class PythonRandom(Base):
    def between(self, x: Tensor) -> Tensor:
        return x * random.random()


class NumpyRandom(Base):
    def between(self, x: Tensor) -> Tensor:
        return x * float(np.random.uniform())


class RandomArgument(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.fc(x * random.random())


class NumpyArgument(Base):
    """The layer that receives the random number is the user's own."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.inner = Base(classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * float(np.random.uniform()))


class Branch(Base):
    """Doubles dark images: each image by itself would do, but the branch is taken for a whole batch."""

    def between(self, x: Tensor) -> Tensor:
        if x.mean() > 1e6:
            x = x * 2
        return x


class NumpyBranch(Base):
    def between(self, x: Tensor) -> Tensor:
        if x.detach().numpy().mean() > 1e6:
            x = x * 2
        return x


class BatchMaximum(Base):
    def between(self, x: Tensor) -> Tensor:
        return x / float(x.max())


class FixedView(Base):
    def between(self, x: Tensor) -> Tensor:
        return x.view(8, -1, x.shape[2], x.shape[3])


class Assertion(Base):
    def between(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 8
        return x


class BatchBranch(Base):
    """Computes the same on both sides, so that only an exporter minds."""

    def between(self, x: Tensor) -> Tensor:
        if x.shape[0] > 4:
            x = x * 1.0
        return x


class NoOnnx(Base):
    def between(self, x: Tensor) -> Tensor:
        return x + torch.linalg.matrix_exp(x[:, :1, :4, :4]).mean() * 0


class Cond(Base):
    """A branch as torch.export can hold it."""

    def between(self, x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 1e6, lambda y: y * 2, lambda y: y * 1, (x,))


class Broken(Base):
    def between(self, x: Tensor) -> Tensor:
        return x + self.nothing


class FineBranches(Base):
    """Branches on a shape and on Python values, which a file may hold as they are."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.double = True

    def between(self, x: Tensor) -> Tensor:
        if x.shape[2] > 4:
            x = x[:, :, 1:-1]
        return x * 2 if self.double else x


class ViT(nn.Module):
    """Patches, a class token, and two layers of attention: one of torch's module, one written out."""

    def __init__(self, classes: int, size: int = 24, patch: int = 8, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        q, k, v = self.qkv(self.norms[1](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + y.transpose(1, 2).flatten(2)
        return self.head((x + self.mlp(self.norms[2](x)))[:, 0])

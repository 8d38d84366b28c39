"""Small networks of four families with switches that plant a mistake, written unlike the built-in models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Conv = partial(nn.Conv2d, bias=False)


class Unit(nn.Module):
    """A bottleneck block under names of its own, with modules where the built-in one calls functions."""

    def __init__(self, before: int, inner: int, step: int, **how: Any) -> None:
        super().__init__()
        self.how = how
        after, bias = 4 * inner, how.get("bias", False)
        steps = (step, 1) if how.get("early_stride") else (1, step)
        norm = partial(nn.BatchNorm2d, eps=how.get("eps", 1e-5), momentum=how.get("momentum", 0.1))
        act = how.get("act", nn.ReLU)
        self.squeeze = nn.Sequential(nn.Conv2d(before, inner, 1, steps[0], bias=bias), norm(inner), act())
        wide = how.get("dilation", 1)
        self.work = nn.Sequential(
            nn.Conv2d(inner, inner, 3, steps[1], wide, wide, how.get("groups", 1), bias), norm(inner)
        )
        self.work_act = nn.Identity() if how.get("no_inner_act") else act()
        self.expand = nn.Sequential(nn.Conv2d(inner, after, 1, bias=bias), norm(after))
        self.side: nn.Module = nn.Identity()
        if before != after or step > 1:
            self.side = nn.Sequential(nn.Conv2d(before, after, 1, step, bias=bias), norm(after))
        self.drop = nn.Dropout(how["drop"]) if how.get("drop") else nn.Identity()
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(x)
        if self.how.get("detach"):
            side = side.detach()
        y = self.expand(self.work_act(self.work(self.squeeze(x))))
        if self.how.get("no_skip"):
            return self.act(y)
        if self.how.get("skip_of_itself"):
            side = y
        if self.how.get("scale"):
            y = y * self.how["scale"]
        if self.how.get("late_skip"):
            return self.act(y) + side
        return self.act(side + self.drop(y))


class Residual(nn.Module):
    """A ResNet with bottlenecks. `special` gives the switches of single blocks by number."""

    def __init__(
        self,
        num_classes: int = 10,
        depths: tuple[int, ...] = (2, 2, 2),
        width: int = 8,
        pool: bool = True,
        stem_stride: int = 2,
        stem: int = 7,
        head: str = "mean",
        special: dict[int, dict[str, Any]] | None = None,
        **how: Any,
    ) -> None:
        super().__init__()
        self.head = head
        self.entry = nn.Sequential(
            nn.Conv2d(3, width, stem, stem_stride, stem // 2, bias=how.get("bias", False)),
            nn.BatchNorm2d(width, eps=how.get("eps", 1e-5), momentum=how.get("momentum", 0.1)),
            how.get("act", nn.ReLU)(),
        )
        self.pool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        units, before = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                inner = width * 2**stage
                own = {**how, **(special or {}).get(len(units), {})}
                units.append(Unit(before, inner, 2 if stage and not number else 1, **own))
                before = 4 * inner
        self.units = nn.Sequential(*units)
        self.answer = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.units(self.pool(self.entry(x)))
        pooled = x.amax((2, 3)) if self.head == "max" else x.mean((2, 3))
        return self.answer(pooled)


class Plain(nn.Module):
    """A VGG."""

    def __init__(
        self, num_classes: int = 10, norm: bool = True, widths: tuple[int, ...] = (8, 16, 16), drop: float = 0.5,
        acts: tuple[bool, ...] = (True, True, True), bias: bool = True, average: bool = False, in_place: bool = False,
        extra: bool = False, shared: bool = False, padding_mode: str = "zeros",
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for number, (wide, act) in enumerate(zip(widths, acts, strict=True)):
            layers.append(nn.Conv2d(before, wide, 3, padding=1, bias=bias, padding_mode=padding_mode))
            layers += [nn.BatchNorm2d(wide)] if norm else []
            layers += [nn.ReLU(in_place)] if act else []
            layers += (
                [nn.Conv2d(wide, wide, 3, padding=1, bias=bias), nn.ReLU(in_place)]
                if extra and number == 1
                else []
            )
            layers.append(nn.AvgPool2d(2) if average else nn.MaxPool2d(2))
            before = wide
        self.features = nn.Sequential(*layers)
        hidden = nn.Linear(before * 16, before * 16)
        second = hidden if shared else nn.Linear(before * 16, before * 16)
        self.top = nn.Sequential(
            hidden, nn.ReLU(), nn.Dropout(drop), second, nn.ReLU(), nn.Linear(before * 16, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.features(x).flatten(1))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2."""

    def __init__(self, before: int, after: int, step: int, grow: int, depthwise: bool, linear: bool) -> None:
        super().__init__()
        wide = before * grow
        self.up, self.up_norm = Conv(before, wide, 1), nn.BatchNorm2d(wide)
        self.mix = Conv(wide, wide, 3, step, 1, groups=wide if depthwise else 1)
        self.mix_norm = nn.BatchNorm2d(wide)
        self.down, self.down_norm = Conv(wide, after, 1), nn.BatchNorm2d(after)
        self.add, self.linear = step == 1 and before == after, linear

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.up_norm(self.up(x)))
        y = self.down_norm(self.down(F.relu6(self.mix_norm(self.mix(y)))))
        y = y if self.linear else F.relu6(y)
        return x + y if self.add else y


class Mobile(nn.Module):
    def __init__(
        self,
        num_classes: int = 10,
        grow: int = 2,
        depthwise: bool = True,
        linear: bool = True,
        stem_stride: int = 2,
    ) -> None:
        super().__init__()
        self.stem, self.stem_norm = Conv(3, 8, 3, stem_stride, 1), nn.BatchNorm2d(8)
        sizes = ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1))
        self.rows = nn.ModuleList([Inverted(*size, grow, depthwise, linear) for size in sizes])
        self.out = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardtanh(self.stem_norm(self.stem(x)), 0.0, 6.0)
        for row in self.rows:
            x = row(x)
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, wide: int, heads: int, **how: Any) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        eps = how.get("eps", 1e-6)
        self.n1, self.n2 = nn.LayerNorm(wide, eps=eps), nn.LayerNorm(wide, eps=eps)
        self.qkv = nn.Linear(wide, 3 * wide, bias=how.get("qkv_bias", True))
        self.proj = nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        if self.how.get("post_norm"):
            x = self.n1(x + self._attend(x))
            return self.n2(x + self._mlp(x))
        x = x + self._keep(self._attend(self.n1(x)))
        if self.how.get("no_mlp_skip"):
            return self._mlp(self.n2(x))
        return x + self._keep(self._mlp(self.n2(x)))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.how.get("gelu", "none")))

    def _attend(self, x: Tensor) -> Tensor:
        many, tokens, wide = x.shape
        q, k, v = self.qkv(x).reshape(many, tokens, 3, self.heads, wide // self.heads).permute(2, 0, 3, 1, 4)
        if self.how.get("by_hand"):
            score = (q @ k.transpose(-2, -1)) * (wide // self.heads) ** -0.5
            y = score.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.how.get("scale"))
        return self.proj(y.transpose(1, 2).reshape(many, tokens, wide))

    def _keep(self, x: Tensor) -> Tensor:
        rate = self.how.get("drop_path", 0.0)
        if not rate or not self.training:
            return x
        mask = x.new_empty(len(x), 1, 1).bernoulli_(1 - rate)
        return x * mask.div_(1 - rate)


class Vision(nn.Module):
    """A small vision transformer."""

    def __init__(
        self, num_classes: int = 10, wide: int = 16, depth: int = 3, heads: int = 4, pool: str = "token",
        position: bool = True, special: dict[int, dict[str, Any]] | None = None, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.patch = nn.Conv2d(3, wide, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, wide) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, wide) * 0.02) if position else None
        self.body = nn.Sequential(
            *(Block(wide, heads, **{**how, **(special or {}).get(n, {})}) for n in range(depth))
        )
        self.norm, self.out, self.pool = (
            nn.LayerNorm(wide, eps=how.get("eps", 1e-6)),
            nn.Linear(wide, num_classes),
            pool,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        if self.position is not None:
            x = x + self.position
        x = self.norm(self.body(x))
        return self.out(x[:, 1:].mean(1) if self.pool == "mean" else x[:, 0])


class TheirBlock(nn.Module):
    """The same block with PyTorch's attention."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(wide, eps=1e-6), nn.LayerNorm(wide, eps=1e-6)
        self.attention = nn.MultiheadAttention(wide, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TheirVision(nn.Module):
    """The same transformer under other names."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.cls, self.embed = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 17, 16))
        self.conv_proj = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.ModuleList([TheirBlock(16, 4) for _ in range(3)])
        self.ln, self.head = nn.LayerNorm(16, eps=1e-6), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        x = torch.cat((self.cls.repeat(x.shape[0], 1, 1), x), dim=1) + self.embed
        for block in self.encoder:
            x = block(x)
        return self.head(self.ln(x)[:, 0])


Build = Callable[..., nn.Module]

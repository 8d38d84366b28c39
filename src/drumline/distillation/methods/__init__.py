"""The table of distillation methods by name; one module per family."""

from __future__ import annotations

from drumline.distillation.method import Method
from drumline.distillation.methods import (
    boundary,
    contrast,
    factor,
    logits,
    maps,
    relations,
    statistics,
    temperatures,
)

_METHODS: tuple[type[Method], ...] = (
    logits.Kd,
    logits.Dkd,
    logits.Dist,
    temperatures.Mlkd,
    temperatures.Ctkd,
    maps.Hint,
    maps.Attention,
    relations.Similarity,
    relations.Correlation,
    maps.Vid,
    relations.Rkd,
    relations.Pkt,
    contrast.Crd,
    maps.ReviewKd,
    boundary.Ofd,
    factor.Factor,
    statistics.Nst,
    statistics.Kdsvd,
    statistics.Fsp,
    boundary.Abound,
    relations.Srd,
)

METHODS = {method.name: method for method in _METHODS}

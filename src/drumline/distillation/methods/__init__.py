"""The table of distillation methods by name; one module per family."""

from __future__ import annotations

from drumline.distillation.method import Method
from drumline.distillation.methods.boundary import Abound, Ofd
from drumline.distillation.methods.contrast import Crd
from drumline.distillation.methods.factor import Factor, Paraphrase
from drumline.distillation.methods.logits import Dist, Dkd, Kd
from drumline.distillation.methods.maps import Attention, Hint, ReviewKd, Vid
from drumline.distillation.methods.relations import Correlation, Pkt, Rkd, Similarity, Srd
from drumline.distillation.methods.statistics import Fsp, Kdsvd, Nst

METHODS: dict[str, type[Method]] = {
    "kd": Kd,
    "dkd": Dkd,
    "dist": Dist,
    "hint": Hint,
    "attention": Attention,
    "similarity": Similarity,
    "correlation": Correlation,
    "vid": Vid,
    "rkd": Rkd,
    "pkt": Pkt,
    "crd": Crd,
    "reviewkd": ReviewKd,
    "ofd": Ofd,
    "factor": Factor,
    "nst": Nst,
    "kdsvd": Kdsvd,
    "fsp": Fsp,
    "abound": Abound,
    "srd": Srd,
}

STAGES: dict[str, type[Method]] = {"paraphrase": Paraphrase, "fsp": Fsp, "abound": Abound}
"""The methods that initial stages train, by the name in a method's `initial`."""

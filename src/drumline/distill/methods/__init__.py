"""The table of distillation methods by name; one module per family."""

from __future__ import annotations

from drumline.distill.method import Method
from drumline.distill.methods.boundary import Abound, Ofd
from drumline.distill.methods.contrast import Crd
from drumline.distill.methods.factor import Factor, Paraphrase
from drumline.distill.methods.logits import Dist, Dkd, Kd
from drumline.distill.methods.maps import Attention, Hint, Vid
from drumline.distill.methods.relations import Correlation, Pkt, Rkd, Similarity
from drumline.distill.methods.review import ReviewKd
from drumline.distill.methods.srd import Srd
from drumline.distill.methods.statistics import Fsp, Kdsvd, Nst

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

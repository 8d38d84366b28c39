"""Every method trains what its authors train, on every family of networks: loss and gradients, helpers and taps.

Drumline's loss is compared with `transcriptions`, on features that `own_forward` computes without taps, in float64.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.recipe import Distill, Model, Recipe
from drumline.distillation.method import LossInputs
from drumline.distillation.methods import METHODS
from drumline.distillation.selection import select_methods
from drumline.distillation.student import fit_networks
from drumline.distillation.teacher import LoadedTeacher
from drumline.models import create_model
from drumline.parallel.world import single_process
from tests.distillation.methods import transcriptions as by
from tests.distillation.methods.own_forward import features_of
from tests.distillation.nets import wakened

BATCH, CLASSES, SAMPLES, EPOCH = 4, 10, 24, 3
FAMILIES = {
    "ResNet": ("resnet8", "resnet8x4", "resnet14"),
    "WRN": ("wrn_16_1", "wrn_16_2", "wrn_16_1"),
    "VGG": ("vgg8", "cifar/vgg11", "cifar/vgg11"),
    "MobileNet": ("mobilenet_v2_half", "vgg8", "mobilenet_v2_half"),
    "ShuffleNet": ("shufflenet_v1", "resnet8x4", "shufflenet_v1"),
    "ShuffleNet V2": ("shufflenet_v2", "resnet8x4", "shufflenet_v1"),
}
"""A student, a teacher, and a teacher with the same sizes and, where there is one, the same widths."""
REPDISTILLER = "variant:repdistiller"
Formula = Callable[[by.Case], Tensor]

FORMULAS: dict[str, Formula] = {
    "kd": by.kd,
    "deit": by.deit,
    "dkd": by.dkd,
    "dist": by.dist,
    "mlkd": by.mlkd,
    "ctkd": by.ctkd,
    "hint": by.hint,
    "attention": by.each_stage(by.attention_gap),
    "similarity": by.similarity,
    "correlation": by.correlation,
    "vid": by.vid,
    "rkd": by.rkd,
    "pkt": by.pkt,
    "crd": by.crd,
    "reviewkd": by.reviewkd,
    "ofd": by.ofd,
    "factor": by.factor,
    "nst": by.each_stage(by.nst_gap),
    "kdsvd": by.kdsvd,
    "fsp": by.fsp,
    "abound": by.abound,
    "srd": by.srd,
    "reviewkd preact:true": partial(by.reviewkd, student="before"),
    f"factor {REPDISTILLER}": by.factor_of_repdistiller,
    f"fsp {REPDISTILLER}": partial(by.fsp, pool=F.adaptive_avg_pool2d),
    f"abound {REPDISTILLER}": partial(by.abound, connect=by.connected_if_different),
}
"""The formula of each method, and of each of its variants."""
EQUAL_SIZES = ("ofd", "abound", "factor", "fsp", "kdsvd")
"""Methods whose authors define them for maps of equal sizes."""
EQUAL_WIDTHS = ("fsp", "kdsvd")
TOLERANCE = {"kdsvd": 1e-4}
"""kdsvd iterates instead of decomposing, and where singular values are close, its gradient is bounded."""
OPTIONS = {"crd": ("K:12", "dim:6")}


def _cases() -> Iterator[tuple[str, str]]:
    for kind in FORMULAS:
        for family in FAMILIES:
            if not (kind.split()[0] in EQUAL_WIDTHS and family == "ShuffleNet V2"):
                yield kind, family


@cache
def network(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return wakened(create_model(name, CLASSES), seed)


def norms_of(teacher: nn.Module, count: int) -> list[nn.Module]:
    """The BatchNorms directly before the activations (in MobileNet, at the end) of the stages."""
    places = {
        "ResNet": ["layer1[-1].bn2", "layer2[-1].bn2", "layer3[-1].bn2"],
        "WideResNet": ["block2.layer[0].bn1", "block3.layer[0].bn1", "bn1"],
        "CifarVGG": [f"block{number}[-1]" for number in range(1, count + 1)],
        "CifarMobileNetV2": [f"stages[{number}][-1].conv[7]" for number in (1, 2, 4, 6)],
        "ShuffleNetV1": ["layer1[-1].bn3", "layer2[-1].bn3", "layer3[-1].bn3"],
    }[type(teacher).__name__]
    return [eval(f"net.{place}", {"net": teacher}) for place in places]


def test_every_method_has_a_formula() -> None:
    assert {kind.split()[0] for kind in FORMULAS} == set(METHODS)


@pytest.mark.parametrize(("kind", "family"), list(_cases()))
def test_loss_and_gradients_are_those_of_the_literature(kind: str, family: str) -> None:
    name, *options = kind.split()
    student_name, general, equal = FAMILIES[family]
    size = 32 if family == "MobileNet" else 16  # at 16, its last map has one position
    teacher_name = (
        equal if (name in EQUAL_SIZES and REPDISTILLER not in options) or name in EQUAL_WIDTHS else general
    )
    student = copy.deepcopy(network(student_name, 1)).train()
    teacher = copy.deepcopy(network(teacher_name, 2)).eval()
    recipe = Recipe(
        model=Model(name=student_name),
        distill=Distill(method=(name,), options=(*options, *OPTIONS.get(name, ()))),
    )
    selection = select_methods(recipe.distill)
    if name in ("fsp", "abound"):
        selection = select_methods(recipe.distill, name)
    method = next(each.method for each in selection.methods if each.name == name)
    networks = fit_networks(recipe, selection, student, [LoadedTeacher(teacher_name, "", teacher)], size)
    module = networks.with_helpers(0).double().train()
    teacher = networks.teachers[0].module.double()

    generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()))
    images = torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    samples = torch.randperm(SAMPLES, generator=generator)[:BATCH]
    helper = module.helpers[name] if name in module.helpers else nn.Module()
    weights = {
        key: value.detach().clone().requires_grad_(value.requires_grad)
        for key, value in helper.named_parameters()
    }
    reference = copy.deepcopy(module.student)

    memory = method.memory(labels, 0, single_process(torch.device("cpu")))
    banks = None
    if memory is not None:
        rows = memory.fetch(torch.arange(SAMPLES))
        banks = (
            rows.student.double(),
            rows.teacher.double(),
            memory.negatives().tolist(),
            labels,
            samples.tolist(),
        )
    with torch.no_grad():
        taught_logits, taught_taps = teacher(images, taps=True)
    output = module(images, taught_taps)
    needs = next(each.needs for each in networks.methods if each.name == name)
    loss = method.loss(
        LossInputs(
            output.logits,
            taught_logits,
            {tap: output.taps[tap] for tap in needs.student},
            {tap: taught_taps[tap] for tap in needs.teacher},
            output.helper_outputs.get(name, {}),
            labels[samples],
            samples,
            memory,
            torch.tensor(float(EPOCH - 1)),
        )
    ).mean()
    loss.backward()

    with torch.no_grad():
        taught = features_of(teacher, images)
    norms = norms_of(teacher, len(taught.stages)) if name == "ofd" else []
    found = features_of(reference, images)
    case = by.Case(found, taught, labels[samples], weights, norms, banks, EPOCH)
    expected = FORMULAS[kind](case)
    expected.backward()

    torch.testing.assert_close(loss, expected.reshape(()), rtol=TOLERANCE.get(kind, 1e-6), atol=1e-9)
    ours = dict(module.student.named_parameters()) | {
        f"helper.{key}": p for key, p in helper.named_parameters()
    }
    theirs = dict(reference.named_parameters()) | {f"helper.{key}": p for key, p in weights.items()}
    assert ours.keys() == theirs.keys()
    largest = max(p.grad.abs().max() for p in theirs.values() if p.grad is not None)
    assert largest > 0
    for key, p in theirs.items():
        mine, wanted = (torch.zeros_like(p) if each.grad is None else each.grad for each in (ours[key], p))
        assert (mine - wanted).abs().max() <= TOLERANCE.get(kind, 1e-6) * largest, key

"""DeiT's hard distillation: the teacher's class as a second label, with and without a distillation token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.recipe import Distill, Model, Parallel, Recipe
from drumline.core.errors import UserError
from drumline.distillation.method import LossInputs
from drumline.distillation.methods.logits import Deit
from drumline.distillation.selection import select_methods
from drumline.distillation.student import FittedNetworks, fit_networks
from drumline.distillation.teacher import LoadedTeacher
from drumline.models import create_model

CLASSES = 10


class TwoTokens(nn.Module):
    """A class token and a distillation token with a head each, as timm's DeiT."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 8, 8)
        self.head, self.head_dist = nn.Linear(8, classes), nn.Linear(8, classes)
        self.distilled_training = False

    def set_distilled_training(self, enable: bool = True) -> None:
        self.distilled_training = enable

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body(x).mean((2, 3))
        one, other = self.head(x), self.head_dist(x)
        if self.training and self.distilled_training:
            return one, other
        return (one + other) / 2


def fitted(method: str, layout: str = "single", student: nn.Module | None = None) -> FittedNetworks:
    distill = Distill(method=(method,))
    recipe = Recipe(model=Model(name="two"), distill=distill, parallel=Parallel(layout=layout))
    teacher = LoadedTeacher("resnet8", "teacher", create_model("resnet8", classes=CLASSES))
    return fit_networks(recipe, select_methods(distill), student or TwoTokens(), [teacher], 16)


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_the_loss_is_half_the_labels_and_half_the_teachers_class() -> None:
    """Touvron et al., equation 3: the class token learns the label, the distillation token the teacher's class."""
    selection = select_methods(Distill(method=("deit",)))
    assert (selection.r, [each.weight for each in selection.methods]) == (0.5, [0.5])
    networks = fitted("deit")
    module = networks.with_helpers(seed=0)
    output = module.train()(images(), {})
    features = networks.model.body(images()).mean((2, 3))
    assert torch.equal(output.logits, networks.model.head(features))
    assert torch.equal(output.taps["distilled"], networks.model.head_dist(features))
    teacher, labels = torch.randn(4, CLASSES), torch.arange(4)
    inputs = LossInputs(output.logits, teacher, output.taps, {}, {}, labels, labels)
    expected = F.cross_entropy(output.taps["distilled"], teacher.argmax(1), reduction="none")
    assert torch.equal(Deit().loss(inputs), expected)


def test_evaluation_takes_the_mean_of_both_heads() -> None:
    model = fitted("deit").model.eval()
    features = model.body(images()).mean((2, 3))
    torch.testing.assert_close(model(images()), (model.head(features) + model.head_dist(features)) / 2)


def test_without_the_method_a_second_head_changes_nothing() -> None:
    networks = fitted("attention")
    output = networks.with_helpers(seed=0).train()(images(), {})
    features = networks.model.body(images()).mean((2, 3))
    torch.testing.assert_close(
        output.logits, (networks.model.head(features) + networks.model.head_dist(features)) / 2
    )


def test_a_student_with_one_head_learns_both_labels_with_it() -> None:
    networks = fitted("deit", student=create_model("resnet8", classes=CLASSES))
    assert networks.methods[0].needs.student == ()
    student, teacher = torch.randn(4, CLASSES), torch.randn(4, CLASSES)
    inputs = LossInputs(student, teacher, {}, {}, {}, torch.arange(4), torch.arange(4))
    assert torch.equal(Deit().loss(inputs), F.cross_entropy(student, teacher.argmax(1), reduction="none"))


def test_a_second_head_in_stages_is_rejected() -> None:
    with pytest.raises(UserError, match="does not return the logits of its distillation token"):
        fitted("deit", layout="pipeline")

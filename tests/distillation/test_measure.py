"""What the score of a teacher says about its images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drumline.config.recipe import Data, Recipe
from drumline.data.feed.transform import IMAGENET_MEAN, IMAGENET_STD
from drumline.distillation.measure import measure_teacher
from drumline.distillation.teacher import Teacher
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import single_process
from drumline.training.sets import Sets, open_sets

HERE = single_process(torch.device("cpu"))


class NearestMean(nn.Module):
    """Classifies digits by the nearest mean of a class, if they are normalised in one way."""

    def __init__(self, sets: Sets, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        batches = list(sets.evaluation(Recipe(), HERE))
        shift, scale = (torch.tensor(each).view(1, 3, 1, 1) for each in (mean, std))
        pixels = (torch.cat([each.images for each in batches]).permute(0, 3, 1, 2) / 255 - shift) / scale
        self.darkest = pixels.amin()
        labels = torch.cat([each.labels for each in batches])
        self.means = torch.stack([pixels[labels == label].mean(0).flatten() for label in range(10)])

    def forward(self, images: Tensor) -> Tensor:
        known = (images.amin() - self.darkest).abs() < 0.1
        return -torch.cdist(images.flatten(1), self.means) * known


@pytest.mark.parametrize("imagenet", [True, False])
def test_a_teacher_that_scores_higher_with_imagenets_normalisation_causes_a_warning(imagenet: bool) -> None:
    mean, std = (0.9, 0.9, 0.9), (0.05, 0.05, 0.05)
    recipe = Recipe(data=Data(source="digits", batch=32, workers=0, mean=mean, std=std))
    sets = open_sets(recipe, HERE)
    own = (IMAGENET_MEAN, IMAGENET_STD) if imagenet else (mean, std)
    teacher = Teacher([NearestMean(sets, *own)], HERE.device)
    predictions = torch.zeros(len(sets.eval), dtype=torch.int64)
    strategy = create_strategy(recipe, HERE)
    score, warnings = measure_teacher(teacher, predictions, sets, strategy, True, try_imagenet=True)
    right = (predictions.numpy() == sets.eval.labels).sum()
    assert score.correct == right
    if imagenet:
        assert score.accuracy < 0.6
        (warning,) = warnings
        assert "on 359 images with ImageNet's normalisation" in warning
        assert "set data.mean=0.485,0.456,0.406 data.std=0.229,0.224,0.225" in warning
    else:
        assert score.accuracy > 0.8
        assert warnings == []
    assert measure_teacher(teacher, predictions, sets, strategy, True)[1] == []

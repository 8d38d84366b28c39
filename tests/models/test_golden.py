"""Stored logits: a change of any network's arithmetic fails here, without torchvision and without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.models.quick import quick_model

# Second image of two, first three of ten classes, in double precision. The plain names and all but the CIFAR
# ResNets were compared with independent implementations of the same networks when these were stored.
LOGITS = {
    "resnet18": (10.3965645, -3.84150053, 11.3781721),
    "resnet50": (436.882861, -2008.74391, -1308.86631),
    "resnext50_32x4d": (-31.8244505, 145.396123, -1104.29288),
    "wide_resnet50_2": (446.476606, -65.5887733, -1391.6858),
    "vgg11": (1.45712057, 0.174357737, 0.26936524),
    "vgg11_bn": (1.0173849, 0.100237439, 0.124596802),
    "mobilenet_v2": (1.84300292, 0.611990978, 0.388726814),
    "cifar/resnet20": (71.5488397, -56.5360799, -53.7799518),
    "cifar/resnet8x4": (3.72553723, 1.4859969, 2.39074128),
    "cifar/resnet50": (1007.15781, -2030.23996, -1079.95155),
    "cifar/wrn_16_2": (1.83492581, 1.51593689, 11.5447415),
    "cifar/vgg13": (0.651181661, -0.0619302843, 0.584272521),
    "cifar/mobilenet_v2_half": (1496.97506, -1011.18015, -3048.98209),
    "cifar/shufflenet_v1": (66.9178739, -698.799408, -105.351036),
    "cifar/shufflenet_v2": (14.602099, 41.1255464, 36.292682),
}


@pytest.mark.parametrize("name", LOGITS)
def test_a_network_computes_its_stored_logits(name: str) -> None:
    images = torch.sin(torch.arange(2 * 3 * 32 * 32, dtype=torch.double) * 0.7).view(2, 3, 32, 32)
    model = quick_model(name).double().eval()
    with torch.no_grad():
        logits = model(images)[1, :3]
    # Weights come from fp32 normal draws, whose last bits may differ between processors.
    torch.testing.assert_close(logits, torch.tensor(LOGITS[name], dtype=torch.double), rtol=1e-4, atol=1e-4)

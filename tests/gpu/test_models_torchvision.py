"""Our ImageNet models beside torchvision's on the GPU: same keys, same initial weights, same bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.models.base import pool_to
from drumline.models.registry import IMAGENET, create_model
from drumline.state.weights import export_weights, load_weights

# cuBLAS reads this when its first handle is made; without it deterministic algorithms reject matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CLASSES = 16


@pytest.fixture
def torchvision_models() -> object:
    return pytest.importorskip("torchvision.models", reason="needs torchvision")


def pair(models: object, name: str, seed: int) -> tuple[nn.Module, nn.Module]:
    """torchvision's model and ours, built from the same seed."""
    torch.manual_seed(seed)
    theirs = models.get_model(name, weights=None, num_classes=CLASSES)  # type: ignore[attr-defined]
    torch.manual_seed(seed)
    return theirs, create_model(name, CLASSES)


def unusual(model: nn.Module) -> None:
    """Norms as no constructor leaves them, so that a swap or a missing one cannot hide."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.5)


def trained_once(model: nn.Module, side: int, batch: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, gradients and buffers of one step in training mode; the seed also fixes the dropout."""
    model.cuda().train()
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(batch, 3, side, side, generator=generator).cuda()
    targets = torch.randint(CLASSES, (batch,), generator=generator).cuda()
    torch.manual_seed(6)
    logits = model(images)
    F.cross_entropy(logits, targets).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return logits.detach(), grads, list(model.buffers())


@pytest.mark.parametrize("name", IMAGENET)
@pytest.mark.usefixtures("repeatable")
def test_same_keys_same_seed_same_weights_same_bits(
    name: str, torchvision_models: object, tmp_path: Path
) -> None:
    theirs, ours = pair(torchvision_models, name, seed=1)
    wanted, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(wanted)
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key

    torch.manual_seed(2)
    theirs = torchvision_models.get_model(name, weights=None, num_classes=CLASSES)  # type: ignore[attr-defined]
    unusual(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)

    side, batch = (224, 4) if name.startswith("vgg") else (96, 8)
    expected, actual = (trained_once(model, side, batch) for model in (theirs, ours))
    assert torch.equal(actual[0], expected[0])
    assert len(actual[1]) == len(list(theirs.parameters()))
    for (key, _), grad, other in zip(theirs.named_parameters(), actual[1], expected[1], strict=True):
        assert torch.equal(grad, other), key
    for (key, _), buffer, other in zip(theirs.named_buffers(), actual[2], expected[2], strict=True):
        assert torch.equal(buffer, other), key

    ours.eval()
    theirs.eval()
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(7)).cuda()
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))

    export_weights(ours, tmp_path / "ours.safetensors")
    theirs.load_state_dict(load_file(tmp_path / "ours.safetensors"), strict=True)
    for key, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "mobilenet_v2"])
def test_torchvisions_saved_weights_load_into_ours(
    name: str, torchvision_models: object, tmp_path: Path
) -> None:
    theirs, _ = pair(torchvision_models, name, seed=3)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = create_model(name, CLASSES)
    assert load_weights(ours, tmp_path / "theirs.pth", strict_head=True).reinitialised == ()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


@pytest.mark.parametrize("side", [64, 224, 320, 448])
@pytest.mark.usefixtures("repeatable")
def test_vgg_trains_under_strict_determinism_at_any_size(side: int) -> None:
    """torchvision's VGG raises here: its adaptive pooling has no deterministic backward on CUDA."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(4)
    model = create_model("vgg11_bn", CLASSES)
    runs = []
    for _ in range(2):
        model.zero_grad()
        logits, grads, _ = trained_once(model, side, 2)
        runs.append((logits, [grad.clone() for grad in grads]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("side", [1, 2, 7, 10, 14, 21])
@pytest.mark.usefixtures("repeatable")
def test_pooling_to_the_grid_is_adaptive_pooling(side: int) -> None:
    x = torch.randn(2, 8, side, side, device="cuda", requires_grad=True)
    weights = torch.randn(2, 8, 7, 7, device="cuda")
    (expected_grad,) = torch.autograd.grad((F.adaptive_avg_pool2d(x, 7) * weights).sum(), x)
    torch.use_deterministic_algorithms(True)
    pooled = pool_to(x, (7, 7))
    (grad,) = torch.autograd.grad((pooled * weights).sum(), x)
    torch.testing.assert_close(pooled, F.adaptive_avg_pool2d(x, 7), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["cifar/resnet20", "cifar/wrn_16_2", "cifar/vgg8", "MobileNetV2", "ShuffleV1", "ShuffleV2"]
)
@pytest.mark.usefixtures("repeatable")
def test_small_image_models_train_under_strict_determinism(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(4)
    model = create_model(name, CLASSES)
    start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    runs = []
    for _ in range(2):
        model.load_state_dict(start)
        model.zero_grad()
        logits, grads, _ = trained_once(model, 32, 8)
        runs.append([logits, *(grad.clone() for grad in grads)])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))

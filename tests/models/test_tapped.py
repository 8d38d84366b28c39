"""Taps of models that are not built in: correct values, at locations found or named, without side effects."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from drumline.core.errors import UserError
from drumline.models.find_taps import find_taps
from drumline.models.tapped import Tapped, norm_before, parse_taps, with_taps
from tests.models.quick import quick_model

SIDE = 32


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """torchvision's basic block: one in-place ReLU called twice, a sum written into the norm's output."""

    def __init__(self, entry: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(entry, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(entry, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        identity = x if self.downsample is None else self.downsample(x)
        out += identity
        return self.relu(out)

    def before(self, x: Tensor) -> Tensor:
        """The sum, with nothing done in place."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return out + (x if self.downsample is None else self.downsample(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(8, 8, 1), Block(8, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 12, 2), Block(12, 12, 1))
        self.layer3 = nn.Sequential(Block(12, 16, 2))
        self.layer4 = nn.Sequential(Block(16, 20, 2), Block(20, 20, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.drop(torch.flatten(self.avgpool(x), 1)))

    def by_hand(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The forward written out, with nothing done in place."""
        seen = {"stem": F.relu(self.bn1(self.conv1(x)))}
        x = self.maxpool(seen["stem"])
        for number in (1, 2, 3, 4):
            *body, last = self.get_submodule(f"layer{number}")  # type: ignore[misc]
            for block in body:
                x = F.relu(block.before(x))
            seen[f"stage{number}.pre"] = last.before(x)
            x = seen[f"stage{number}"] = F.relu(seen[f"stage{number}.pre"])
        seen["pooled"] = self.drop(x.mean((2, 3)))
        return self.fc(seen["pooled"]), seen


class Bottleneck(nn.Module):
    def __init__(self, entry: int, width: int, stride: int) -> None:
        super().__init__()
        hidden = 2 * entry
        self.conv = nn.Sequential(
            nn.Sequential(nn.Conv2d(entry, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)),
            nn.Sequential(
                nn.Conv2d(hidden, hidden, 3, stride, 1), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)
            ),
            nn.Conv2d(hidden, width, 1),
            nn.BatchNorm2d(width),
        )
        self.residual = stride == 1 and entry == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
            Bottleneck(8, 8, 1),
            Bottleneck(8, 12, 2),
            Bottleneck(12, 12, 1),
            Bottleneck(12, 16, 2),
            nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU6(inplace=True)),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def vgg() -> nn.Sequential:
    layers: list[nn.Module] = []
    for entry, width in ((3, 4), (4, 6), (6, 8)):
        layers += [nn.Conv2d(entry, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)]
    features = nn.Sequential(*layers)
    pool, classifier = nn.AdaptiveAvgPool2d(2), nn.Sequential(nn.Flatten(), nn.Linear(32, 7), nn.ReLU(True))
    return nn.Sequential(features, pool, classifier, nn.Linear(7, 5))


class Functional(nn.Module):
    """Activations that are no modules, done in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)), inplace=True)
        return self.fc(x.mean((2, 3)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, 8)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "vgg": vgg,
    "functional": Functional,
    "vit": ViT,
    "block": lambda: nn.Sequential(Block(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MAKERS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)  # type: ignore[arg-type]
    return model


def tapped(name: str, text: str = "") -> Tapped:
    model = with_taps(made(name), text, images())
    assert isinstance(model, Tapped)
    return model


RESNET = {
    "stem": "relu",
    "stage1.pre": "layer1.1.relu:input",
    "stage1": "layer1",
    "stage2.pre": "layer2.1.relu:input",
    "stage2": "layer2",
    "stage3.pre": "layer3.0.relu:input",
    "stage3": "layer3",
    "stage4.pre": "layer4.1.relu:input",
    "stage4": "layer4",
    "pooled": "fc:input",
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet", RESNET),
        (
            "mobilenet",
            {
                "stage1": "features.1",
                "stage2": "features.3",
                "stage3.pre": "features.5.2:input",
                "stage3": "features.5",
                "pooled": "classifier.1:input",
            },
        ),
        (
            "vgg",
            {
                "stage1.pre": "0.2:input",
                "stage1": "0.2",
                "stage2.pre": "0.6:input",
                "stage2": "0.6",
                "stage3.pre": "0.10:input",
                "stage3": "0.10",
                "pooled": "3:input",
            },
        ),
        ("functional", {"stage1": "bn1", "stage2": "bn2", "pooled": "fc:input"}),
        ("vit", {"pooled": "head:input"}),
        ("block", {"stage1.pre": "0.relu:input", "stage1": "0", "pooled": "3:input"}),
    ],
)
def test_stages_end_where_the_map_halves(name: str, expected: dict[str, str]) -> None:
    found = find_taps(made(name), images())
    assert found == expected
    assert list(found) == list(expected)


def test_a_module_that_spans_two_sizes_is_replaced_by_its_parts() -> None:
    """`features` halves the map once, as a stage does; but it is the whole network."""
    features = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU())
    model = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    found = find_taps(model, images())
    assert (found["stage1"], found["stage2"]) == ("0.1", "0.3")


def test_squeeze_and_excitation_is_no_stage() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)
            self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)
            self.last, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv1(x)
            x = self.conv2(x * self.gate(self.pool(x)).sigmoid())
            return self.fc(self.last(x).flatten(1))

    found = find_taps(Squeezed(), images())
    assert found == {"stage1": "conv1", "stage2": "conv2", "pooled": "fc:input"}


def test_layers_after_the_global_pool_are_no_stage() -> None:
    head = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 9, 1), nn.ReLU(), nn.Flatten(), nn.Linear(9, 5)]
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 6, 3, 2, 1), *head)
    assert find_taps(model, images()) == {"stage1": "0", "stage2": "1", "pooled": "6:input"}


def test_a_module_used_again_later_names_only_its_last_call() -> None:
    relu = nn.ReLU()
    first, second = (
        nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), relu),
        nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), relu),
    )
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    expected = {"stage1": "0", "stage2.pre": "0.1:input", "stage2": "1", "pooled": "4:input"}
    assert find_taps(nn.Sequential(first, second, *tail), images()) == expected
    flat = {"stage1": "0", "stage2.pre": "1:input", "stage2": "1", "pooled": "6:input"}
    assert find_taps(nn.Sequential(*first, *second, *tail), images()) == flat


def test_an_activation_whose_output_is_written_to_is_not_the_stages_end() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(3, 3, 3, 1, 1), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.conv(x))
            out += x
            return out

    after = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 6, 3, 2, 1))
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    model = with_taps(nn.Sequential(Added(), after, *tail), "", images())
    assert isinstance(model, Tapped)
    # The next stage's in-place activation writes over stage1, and is not its end either.
    assert model.locations == {"stage1": "0", "stage2": "1", "pooled": "4:input"}
    assert model.copied == ("stage1",)


def test_timms_list_of_features_is_used_where_it_names_maps() -> None:
    model = made("resnet")
    entries = [("relu", 8), ("layer1.0", 8), ("layer2", 12), ("layer3", 16), ("layer4", 20)]
    model.feature_info = [  # type: ignore[assignment]
        {"module": name, "num_chs": channels, "reduction": 2} for name, channels in entries
    ]
    found = find_taps(model, images())
    assert (found["stem"], found["stage1"], found["stage4"]) == ("relu", "layer1.0", "layer4")
    model.feature_info = [{"module": "layer2", "num_chs": 13}, {"module": "gone", "num_chs": 8}]  # type: ignore[assignment]
    assert find_taps(model, images()) == RESNET


@pytest.mark.parametrize("train", [False, True])
def test_taps_are_what_a_forward_without_in_place_operations_gives(train: bool) -> None:
    model, other = tapped("resnet").train(train), made("resnet").train(train)
    assert isinstance(other, ResNet)
    torch.manual_seed(3)
    logits, taps = model(images(), taps=True)
    torch.manual_seed(3)
    expected, seen = other.by_hand(images())
    torch.testing.assert_close(logits, expected)
    assert list(taps) == list(seen) == list(RESNET)
    for tap, tensor in seen.items():
        torch.testing.assert_close(taps[tap], tensor, msg=lambda text, tap=tap: f"{tap}: {text}")
    assert all(taps[f"stage{n}.pre"].min() < 0 for n in (1, 2, 3, 4))


def test_taps_of_in_place_functions_are_the_values_before_them() -> None:
    model = tapped("functional").eval()
    inner = model.model
    assert isinstance(inner, Functional)
    _, taps = model(images(), taps=True)
    first = inner.bn1(inner.conv1(images()))
    assert torch.equal(taps["stage1"], first)
    assert torch.equal(taps["stage2"], inner.bn2(inner.conv2(first.relu())))
    assert first.min() < 0
    assert model.copied == ("stage1", "stage2")


def test_only_overwritten_taps_are_copied() -> None:
    model = tapped("resnet")
    assert model.copied == tuple(f"stage{n}.pre" for n in (1, 2, 3, 4))
    given: list[Tensor] = []
    model.model.get_submodule("layer2").register_forward_hook(lambda _m, _a, out: given.append(out))
    _, taps = model(images(), taps=True)
    assert taps["stage2"] is given[0]
    # Without the in-place ReLU the sum is still there at the end.
    plain = made("resnet")
    for module in plain.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    assert with_taps(plain, "", images()).copied == ()


def trained_once(name: str, how: str) -> tuple[Tensor, list[Tensor | None], list[Tensor], Tensor]:
    """Logits, gradients, buffers and the next random number after one step with the bare model or the wrapped."""
    bare = made(name)
    model = bare if how == "bare" else with_taps(bare, "", images())
    model.train()
    torch.manual_seed(2)
    logits = model(images(), taps=True)[0] if how == "taps" else model(images())
    logits.square().sum().backward()
    return logits.detach(), [p.grad for p in bare.parameters()], list(bare.buffers()), torch.rand(1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["wrapped", "taps"])
def test_taps_change_neither_logits_nor_gradients_nor_statistics_nor_draws(name: str, how: str) -> None:
    expected, actual = trained_once(name, "bare"), trained_once(name, how)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[3], expected[3])
    for one, other in zip(actual[1], expected[1], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert len(actual[2]) == len(expected[2])
    for one, other in zip(actual[2], expected[2], strict=True):
        assert torch.equal(one, other)
    assert all(counter == 1 for counter in actual[2] if counter.dtype == torch.int64)


def test_gradients_flow_through_taps_copied_or_not() -> None:
    model, other = tapped("resnet").eval(), made("resnet").eval()
    assert isinstance(other, ResNet)
    logits, taps = model(images(), taps=True)
    expected, seen = other.by_hand(images())
    for out, mids in ((logits, taps), (expected, seen)):
        (out.square().sum() + sum(mid.pow(3).mean() for mid in mids.values())).backward()
    for (key, one), two in zip(other.named_parameters(), model.model.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, msg=lambda text, key=key: f"{key}: {text}")


def test_wrapping_changes_no_mode_buffer_or_generator() -> None:
    class Counting(nn.Module):
        """Counts forwards and draws even in evaluation mode."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("replaced", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.replaced = torch.rand(())
            return x

    model = nn.Sequential(Counting(), made("resnet"))
    model.train()
    model[1].get_submodule("layer2").eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    held = list(model.buffers())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with_taps(model, "", images())
    assert torch.equal(torch.rand(1), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(one is other for one, other in zip(model.buffers(), held, strict=True))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_nothing_is_kept_after_a_forward_even_if_it_failed() -> None:
    model = tapped("resnet")
    model(images(), taps=True)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4, SIDE, SIDE), taps=True)
    assert model._slot.seen is None
    assert model._slot.versions == {}
    held = [k for module in model.modules() for k, value in vars(module).items() if isinstance(value, Tensor)]
    assert held == []


def test_exported_keys_are_those_of_the_unwrapped_model() -> None:
    model = tapped("resnet")
    assert list(model.model.state_dict()) == list(made("resnet").state_dict())


def test_a_tap_overwritten_in_training_alone_is_named() -> None:
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.fc((x.add_(1) if self.training else x + 1).mean((2, 3)))

    model = with_taps(Sly(), "", images())
    model.eval()(images(), taps=True)
    with pytest.raises(AssertionError, match="tap stage1: conv was overwritten"):
        model.train()(images(), taps=True)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_copy_of_the_model_has_its_own_taps(context: Callable[[], torch.no_grad]) -> None:
    model = tapped("resnet").eval()
    _, expected = model(images(), taps=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model.model.get_submodule("conv1").weight.data.zero_()  # type: ignore[union-attr, operator]
        with context():
            _, taps = other(images(), taps=True)
        assert list(taps) == list(expected)
        assert all(torch.equal(taps[tap], tensor) for tap, tensor in expected.items())
        assert norm_before(other, "stage1.pre") is other.model.layer1[1].bn2
        model.load_state_dict(other.state_dict())


def test_a_model_can_be_wrapped_in_inference_mode() -> None:
    model = made("resnet").eval()
    with torch.inference_mode():
        wrapped = with_taps(model, "", images())
    assert isinstance(wrapped, Tapped)
    assert wrapped.copied == tapped("resnet").copied


@pytest.mark.parametrize(("name", "fullgraph"), [("vgg", False), ("block", True), ("functional", True)])
def test_a_tapped_model_compiles(name: str, fullgraph: bool) -> None:
    torch.compiler.reset()
    model = tapped(name).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        logits, taps = compiled(images(), taps=True)
        expected, seen = model(images(), taps=True)
        assert torch.equal(logits, expected)
        assert list(taps) == list(seen)
        assert all(torch.equal(taps[tap], tensor) for tap, tensor in seen.items())
        assert torch.equal(compiled(images()), expected)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_taps_come_through_ddp() -> None:
    model, other = tapped("resnet"), tapped("resnet")
    wrapped = nn.parallel.DistributedDataParallel(model)
    for network in (wrapped, other):
        torch.manual_seed(4)
        logits, taps = network(images(), taps=True)
        (logits.sum() + taps["stage2.pre"].square().sum()).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        assert torch.equal(one.grad, two.grad)


def test_norms_are_those_before_the_activation() -> None:
    model = tapped("resnet")
    inner = model.model
    # The last BatchNorm called in layer3 is the shortcut's; the sum was written into bn2's output.
    for tap, name in (
        ("stage1.pre", "layer1.1.bn2"),
        ("stage3.pre", "layer3.0.bn2"),
        ("stage3", "layer3.0.bn2"),
    ):
        assert norm_before(model, tap) is inner.get_submodule(name)
    assert norm_before(model, "pooled") is None
    plain = tapped("vgg")
    assert norm_before(plain, "stage2.pre") is plain.model.get_submodule("0.5")
    linear = tapped("mobilenet", "stage2=features.4,stage2.pre=features.4")
    assert norm_before(linear, "stage2.pre") is linear.model.get_submodule("features.4.conv.3")
    assert norm_before(inner, "stage1") is None


def test_a_sum_of_branches_has_the_last_norm_of_its_stage() -> None:
    class Sum(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.bn, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, 1, 1)
            self.act = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x + self.conv(self.bn(x)))

    class Bare(Sum):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(x + self.conv(x))

    model = nn.Sequential(
        Sum(3), nn.Conv2d(3, 4, 2, 2), Sum(4), nn.Conv2d(4, 4, 2, 2), Bare(4), nn.Flatten(), nn.Linear(256, 5)
    )
    wrapped = with_taps(model, "", images())
    assert norm_before(wrapped, "stage1.pre") is model.get_submodule("0.bn")
    assert norm_before(wrapped, "stage2.pre") is model.get_submodule("2.bn")
    # The norms of earlier stages are not this one's.
    assert norm_before(wrapped, "stage3.pre") is None


def test_the_head_is_the_layer_that_returns_the_logits() -> None:
    for name, head in (("resnet", "fc"), ("mobilenet", "classifier.1"), ("vgg", "3"), ("vit", "head")):
        model = tapped(name).eval()
        assert model.locations["pooled"] == f"{head}:input"
        found = model.model.get_submodule(head)
        logits, taps = model(images(), taps=True)
        assert torch.equal(found(taps["pooled"]), logits)
    changed = with_taps(nn.Sequential(vgg(), nn.Softmax(1)), "", images())
    assert "pooled" not in changed.locations


def test_a_built_in_model_is_not_wrapped_without_text() -> None:
    model = quick_model("cifar/resnet8").eval()
    assert with_taps(model, " ", images()) is model
    assert norm_before(model, "stage1.pre") is model.get_submodule(model.tap_info["stage1"].norm)
    assert norm_before(model, "pooled") is None


def test_text_redefines_taps_of_a_built_in_model() -> None:
    model = quick_model("cifar/resnet20").eval()
    expected_logits, expected = model(images(), taps=True)
    wrapped = with_taps(model, "stage2=layer2.1", images())
    logits, taps = wrapped(images(), taps=True)
    assert torch.equal(logits, expected_logits)
    # Its own stage2.pre belongs to another block.
    assert list(taps) == [tap for tap in expected if tap != "stage2.pre"]
    for tap, tensor in taps.items():
        assert torch.equal(tensor, expected[tap]) == (tap != "stage2"), tap
    assert torch.equal(taps["stage2"], model.layer2[1](model.layer2[0](expected["stage1"])))  # type: ignore[operator, index]
    assert norm_before(wrapped, "stage1") is norm_before(model, "stage1")
    assert norm_before(wrapped, "stage2.pre") is None
    everything = ",".join(f"{tap}=layer1.0.conv1:input" for tap in expected)
    _, taps = with_taps(model, everything, images())(images(), taps=True)
    assert all(torch.equal(tensor, expected["stem"]) for tap, tensor in taps.items())


def test_named_locations_take_precedence_over_found_ones() -> None:
    model = tapped("resnet", " stage2 = layer2.0 , stem=maxpool")
    assert model.locations == {
        **RESNET,
        "stem": "maxpool",
        "stage2": "layer2.0",
        "stage2.pre": "layer2.0.relu:input",
    }
    assert tapped("vit", "stage1=patches").locations == {"stage1": "patches", "pooled": "head:input"}


def test_text_is_parsed_exactly() -> None:
    text = "stage1=layer1,stage1.pre=layer1.1.relu:input,pooled=fc:input"
    expected = {"stage1": "layer1", "stage1.pre": "layer1.1.relu:input", "pooled": "fc:input"}
    assert parse_taps(text) == parse_taps(text, made("resnet")) == expected
    assert parse_taps("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage1=layr1", r"ResNet has no module 'layr1'\n  fix: did you mean layer1"),
        ("stage1=layer1.1.rellu:input", r"did you mean layer1.1.relu"),
        ("stage1=zzz", r"did you mean conv1, bn1"),
        ("stage0=layer1", r"no tap 'stage0'\n  fix: taps are stem, stage1"),
        ("stem.pre=relu:input", "no tap 'stem.pre'"),
        ("fc=fc", "no tap 'fc'"),
        ("stage1", "ResNet has no module 'stage1'"),
        ("stage1=", "'stage1=' is not TAP=MODULE"),
        ("stage1=layer1:output", "a location is a module name"),
        ("stage1=layer1,stage1=layer2", "stage1 is given twice, as layer1 and layer2"),
    ],
)
def test_wrong_text_is_rejected_with_a_fix(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_taps(text, made("resnet"))


def test_a_module_that_is_not_called_is_rejected() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ModuleList([nn.Identity()]))
    model.forward = lambda x: model[0](x).mean((2, 3))  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"stage1=1.0: 1.0 is not called"):
        Tapped(model, {"stage1": "1.0"}, images())

"""What spans processes is what one process with the whole batch would compute, gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from drumline.distillation.objective import AcrossRanks
from drumline.parallel.norm import WorldNorm, over_all, world_total
from drumline.parallel.world import World, single_process
from tests.distillation import gather_ranks
from tests.distillation.gather_ranks import COUNTS, GLOBAL, NORMS

CPU = torch.device("cpu")
TWO = World(rank=0, size=2, local_rank=0, local_size=2, device=CPU, backend="gloo")
TOTAL = world_total(TWO)
"""A world of two processes without a connection, for code that does not communicate."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    """By the largest value: gradients of norms are differences that nearly cancel."""
    scale = float(expected.double().abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=relative * scale)


@pytest.mark.slow
@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_the_world_is_batchnorm_on_the_whole_batch(name: str, size: int) -> None:
    found = [result[name] for result in gather_ranks.results(size)]
    expected = gather_ranks.normed(gather_ranks.norm_of(name), name, slice(None))
    assert all(each.keys() == expected.keys() for each in found)
    relative = TOLERANCE[NORMS[name][1]]
    for key, value in expected.items():
        if key.startswith("grad"):
            # Each rank's share; DDP adds them up.
            together = torch.stack([each[key] for each in found]).sum(0)
        elif key.startswith("buffer"):
            assert all(torch.equal(each[key], found[0][key]) for each in found)
            together = found[0][key]
        else:
            together = torch.cat([each[key] for each in found])
            assert together.dtype == value.dtype
        close(together, value, relative)


@pytest.mark.slow
@pytest.mark.parametrize("size", COUNTS)
def test_norms_of_each_rank_alone_give_different_results(size: int) -> None:
    """The reference detects it: the statistics of the slices are different."""
    whole = gather_ranks.normed(gather_ranks.norm_of("2-d"), "2-d", slice(None))
    first = COUNTS[size][0]
    apart = gather_ranks.normed(gather_ranks.norm_of("2-d"), "2-d", slice(first))
    with pytest.raises(AssertionError):
        close(apart["out0"], whole["out0"][:first], 1e-3)
    with pytest.raises(AssertionError):
        close(apart["buffer running_var"], whole["buffer running_var"], 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("size", COUNTS)
def test_gathered_rows_have_the_loss_and_gradient_of_the_whole_batch(size: int) -> None:
    weight = (gather_ranks.drawn((3, 6), 31) / 8).requires_grad_()
    inputs = ((gather_ranks.drawn((GLOBAL, 3), 30) - 5) / 4).requires_grad_()
    rows = inputs @ weight
    loss = gather_ranks.related(rows)
    loss.backward()
    assert weight.grad is not None
    assert inputs.grad is not None
    found = [result["gathered"] for result in gather_ranks.results(size)]
    for each in found:
        close(each["rows"], rows.detach(), 1e-12)
        close(each["loss"], loss.detach(), 1e-12)
        close(each["weight"], weight.grad, 1e-10)
        assert each["labels"].tolist() == list(range(GLOBAL))
        assert torch.equal(each["rows"], found[0]["rows"])
    close(torch.cat([each["inputs"] for each in found]), inputs.grad, 1e-10)


def test_in_one_process_rows_are_not_changed() -> None:
    rows = torch.randn(3, 2)
    everywhere = AcrossRanks(single_process(CPU), [3])
    assert everywhere(rows) is rows


def nested() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "deep": nn.Sequential(
                nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4, momentum=0.2), nn.ReLU())
            ),
            "listed": nn.ModuleList([nn.BatchNorm1d(5, affine=False), nn.GroupNorm(1, 4), nn.BatchNorm3d(2)]),
        }
    )


def norms(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
    }


def test_every_batchnorm_is_replaced_and_nothing_else() -> None:
    module = nested()
    before = dict(module.named_modules())
    changed = over_all(module, TOTAL)
    assert changed is module
    assert set(norms(module)) == {"deep.1.0", "listed.0", "listed.2"}
    for name, part in module.named_modules():
        if name in norms(module):
            assert isinstance(part, WorldNorm)
            assert part.total is TOTAL
        else:
            assert part is before[name]


def test_a_batchnorm_by_itself_is_replaced_too() -> None:
    assert isinstance(over_all(nn.BatchNorm1d(3), TOTAL), WorldNorm)


def test_parameters_buffers_and_keys_stay_the_same_objects() -> None:
    module = nested()
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    keys = list(module.state_dict())
    over_all(module, TOTAL)
    assert list(module.state_dict()) == keys
    assert all(tensor is parameters[name] for name, tensor in module.named_parameters())
    assert all(tensor is buffers[name] for name, tensor in module.named_buffers())
    assert len(parameters) == len(list(module.parameters()))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_modes_frozen_weights_and_hyperparameters_are_kept(training: bool, frozen: bool) -> None:
    module = nested().train(training).requires_grad_(not frozen)
    before = {
        name: (part.eps, part.momentum, part.affine, part.track_running_stats)  # type: ignore[attr-defined]
        for name, part in norms(module).items()
    }
    over_all(module, TOTAL)
    assert all(parameter.requires_grad is not frozen for parameter in module.parameters())
    assert all(part.training is training for part in module.modules())
    for name, part in norms(module).items():
        assert (part.eps, part.momentum, part.affine, part.track_running_stats) == before[name]  # type: ignore[attr-defined]


def test_one_frozen_parameter_beside_a_trained_one_stays_so() -> None:
    norm = nn.BatchNorm2d(3)
    norm.bias.requires_grad_(False)
    made = over_all(norm, TOTAL)
    assert [(name, parameter.requires_grad) for name, parameter in made.named_parameters()] == [
        ("weight", True),
        ("bias", False),
    ]


def test_a_norm_in_eval_mode_has_the_bits_of_torchs_and_does_not_communicate() -> None:
    norm = gather_ranks.norm_of("2-d fp32").eval()
    norm.running_mean.normal_()  # type: ignore[operator,union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[operator,union-attr]
    images = torch.randn(3, 4, 5, 5)
    expected = norm(images)
    assert torch.equal(over_all(norm, TOTAL)(images), expected)


def test_a_norm_in_eval_mode_without_statistics_uses_those_of_its_batch_and_does_not_communicate() -> None:
    def no_exchange(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("an evaluation has other batches on each process: this would wait for ever")

    norm = nn.BatchNorm2d(4, track_running_stats=False).eval()
    images = torch.randn(3, 4, 5, 5)
    expected = norm(images)
    assert torch.equal(over_all(norm, no_exchange)(images), expected)


def test_a_norm_over_all_ranks_is_left_out_of_compiled_code() -> None:
    """What the compiler makes of a meeting depends on who meets; what it fuses around one would depend on it too."""
    operations: list[str] = []

    def collect(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        operations.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    first, norm = nn.Linear(4, 4), over_all(nn.BatchNorm1d(4), world_total(single_process(CPU)))

    def model(images: Tensor) -> Tensor:
        return norm(first(images)).relu()  # type: ignore[no-any-return]

    images = torch.randn(6, 4)
    expected = model(images)
    torch._dynamo.reset()
    try:
        assert torch.equal(torch.compile(model, backend=collect)(images), expected)
    finally:
        torch._dynamo.reset()
    assert any("linear" in name for name in operations)
    assert not any("rsqrt" in name or "square" in name for name in operations)


def test_a_norm_that_has_two_names_is_replaced_under_both() -> None:
    module = nn.Module()
    module.one = module.other = nn.BatchNorm2d(3)
    over_all(module, TOTAL)
    assert isinstance(module.one, WorldNorm)
    assert isinstance(module.other, WorldNorm)
    assert module.one.weight is module.other.weight

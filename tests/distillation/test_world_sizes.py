"""Any number of processes: the same loss, gradients and state, and no trainable left without a gradient."""

from __future__ import annotations

import pytest
import torch

from tests.distillation import ranks

pytestmark = pytest.mark.slow
RELATIVE = 1e-5
"""Of a tensor's largest value, or a hundredth of the largest of all gradients (a bias before a normalisation has none
but rounding): fp32 sums in a different order."""


def apart(a: torch.Tensor, b: torch.Tensor, least: float = 1e-6) -> float:
    """How far apart two tensors are, in parts of the larger of b's largest value and `least`."""
    return float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), least)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ranks.CASES)
def test_loss_and_gradients_do_not_depend_on_the_number_of_processes(name: str, size: int) -> None:
    one, several = ranks.results(1)[0][name], ranks.results(size)[0][name]
    assert one["terms"] == several["terms"]
    assert apart(several["meter"], one["meter"]) <= RELATIVE
    assert one["gradients"].keys() == several["gradients"].keys()
    least = max(float(gradient.abs().max()) for gradient in one["gradients"].values()) / 100
    found = {key: apart(several["gradients"][key], one["gradients"][key], least) for key in one["gradients"]}
    assert max(found.values()) <= RELATIVE, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ranks.CASES)
def test_all_ranks_have_the_same_results_and_every_parameter_has_a_gradient(name: str, size: int) -> None:
    found = [result[name] for result in ranks.results(size)]
    assert found[0]["idle"] == []
    for other in found[1:]:
        assert found[0]["state"].keys() == other["state"].keys()
        assert all(torch.equal(tensor, other["state"][key]) for key, tensor in found[0]["state"].items())
        assert other["memory"] == {}, "rank 0 collects it alone"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [name for name in ranks.CASES if "crd" in name])
def test_the_collected_bank_does_not_depend_on_the_number_of_processes(name: str, size: int) -> None:
    one, several = ranks.results(1)[0][name]["memory"], ranks.results(size)[0][name]["memory"]
    assert set(one) == {"crd.student", "crd.teacher", "crd.log_z"}
    for key in one:
        assert one[key].shape == several[key].shape
        assert apart(several[key], one[key]) <= RELATIVE
    moved = (one["crd.student"] != one["crd.teacher"]).any(1)
    assert len(moved) > 1000

"""A user's own optimizer: as in a plain loop, undone without a trace, and the same bits after a restart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.config.learning import Optim
from drumline.core.errors import UserError
from drumline.training.optim import build_optimizer, set_rate
from drumline.training.own_optimizer import OwnOptimizer, by_kind
from tests import own_code
from tests.training.test_optim import RATES, give, gradients, model

OPTIMIZERS = [
    *(f"torch.optim:{name}" for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam")),
    *(f"torch.optim:{name}" for name in ("RAdam", "RMSprop", "Rprop", "SGD")),
    "tests.own_code:Counting",
    "tests.own_code:Referring",
]
ARGUMENTS = {"RMSprop": ("momentum:0.9", "centered:true"), "Adagrad": ("initial_accumulator_value:0.1",)}
STEPS = len(RATES)


def settings(name: str, **more: Any) -> Optim:
    attribute = name.partition(":")[2]
    decay = 0.0 if attribute == "Rprop" else 0.01
    return Optim(name=name, lr=0.1, weight_decay=decay, args=ARGUMENTS.get(attribute, ()), **more)


def built(optim: Optim, module: nn.Module) -> OwnOptimizer:
    made = build_optimizer(optim, module.parameters(), torch.tensor(0.0))
    assert isinstance(made, OwnOptimizer)
    return made


def take(optimizer: OwnOptimizer, module: nn.Module, step: int) -> None:
    set_rate(optimizer, RATES[step])
    give(module, gradients(step))
    optimizer.step()


def state(optimizer: OwnOptimizer) -> list[Tensor]:
    return [tensor for slots in optimizer.state.values() for tensor in slots.values()]


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


@pytest.mark.parametrize("decay_all", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_moves_as_in_a_plain_loop_and_goes_on_after_a_restart(name: str, decay_all: bool) -> None:
    optim, module, plain = settings(name, decay_all=decay_all), model(), model()
    ours = built(optim, module)
    assert equal(weights(module), weights(plain))  # the trial steps have left no trace
    attribute, decay = name.partition(":")[2], optim.weight_decay
    kind: Any = getattr(own_code if "tests" in name else torch.optim, attribute)
    matrices = [p for p in plain.parameters() if p.ndim > 1 or decay_all]
    vectors = [p for p in plain.parameters() if p.ndim <= 1 and not decay_all]
    groups: list[dict[str, Any]] = [{"params": matrices, **({"weight_decay": decay} if decay else {})}]
    if vectors:
        groups += [{"params": vectors, **({"weight_decay": 0.0} if decay else {})}]
    arguments = {
        "RMSprop": {"momentum": 0.9, "centered": True},
        "Adagrad": {"initial_accumulator_value": 0.1},
    }
    theirs = kind(groups, lr=0.1, **arguments.get(attribute, {}))
    addresses = [tensor.data_ptr() for tensor in state(ours)]
    for step in range(STEPS):
        if step == 0:  # a rehearsed step, undone as `leave_no_trace` does
            before = [tensor.clone() for tensor in (*weights(module), *state(ours))]
            take(ours, module, step)
            with torch.no_grad():
                for tensor, value in zip([*module.parameters(), *state(ours)], before, strict=True):
                    tensor.copy_(value)
        if step == 3:  # a new process that reads a checkpoint
            saved = [tensor.clone() for tensor in state(ours)]
            resumed = model(seed=1)
            resumed.load_state_dict(module.state_dict())
            ours, module = built(optim, resumed), resumed
            for tensor, value in zip(state(ours), saved, strict=True):
                tensor.copy_(value)
            addresses = [tensor.data_ptr() for tensor in state(ours)]
        take(ours, module, step)
        for group in theirs.param_groups:
            group["lr"] = RATES[step]
        give(plain, gradients(step))
        theirs.step()
        assert equal(weights(module), weights(plain)), step
    assert [tensor.data_ptr() for tensor in state(ours)] == addresses


def test_a_parameter_that_gets_its_first_gradient_late_starts_then() -> None:
    optim = settings("torch.optim:NAdam")
    module, plain = model(), model()
    ours, theirs = built(optim, module), torch.optim.NAdam(plain.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(STEPS):
        for each, values in ((module, gradients(step)), (plain, gradients(step))):
            give(each, values)
            if step < 2:
                next(iter(each.parameters())).grad = None
        set_rate(ours, RATES[step])
        theirs.param_groups[0]["lr"] = RATES[step]
        ours.step()
        theirs.step()
        assert equal(weights(module), weights(plain)), step


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "tests.own_code:Counting"])
def test_a_step_with_infinite_gradients_changes_nothing(name: str) -> None:
    module = model()
    ours = built(settings(name), module)
    ours.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for step in range(3):
        take(ours, module, step)
    before = [tensor.clone() for tensor in (*weights(module), *state(ours))]
    ours.found_inf.fill_(1)  # type: ignore[attr-defined]
    take(ours, module, 3)
    assert equal(before, [*weights(module), *state(ours)])
    ours.found_inf.fill_(0)  # type: ignore[attr-defined]
    take(ours, module, 3)
    assert not equal(before, [*weights(module), *state(ours)])


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "torch.optim:Adam", "tests.own_code:Counting"])
def test_a_gpu_undoes_a_skipped_step_without_waiting_and_has_the_bits_of_a_cpu(name: str) -> None:
    ones, others = model(), model()
    waiting, late = built(settings(name), ones), built(settings(name), others)
    # As if on a GPU: all but the counters, which are on the host.
    tensors = [*others.parameters(), *state(late)]
    late._on_devices = by_kind([each for each in tensors if each.ndim])
    late._on_host = by_kind([each for each in tensors if not each.ndim])
    for optimizer in (waiting, late):
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for step, skipped in enumerate([1, 0, 0, 1, 1, 0, 1, 0]):
        for optimizer, module in ((waiting, ones), (late, others)):
            optimizer.found_inf.fill_(skipped)  # type: ignore[attr-defined]
            take(optimizer, module, step % STEPS)
        if step > 3:
            late.undo_skipped()  # as a checkpoint does; else the next step does it
            assert equal(state(waiting), state(late)), step
        assert equal(weights(ones), weights(others)), step


def test_scaled_gradients_are_unscaled() -> None:
    ones, others = model(), model()
    plain, scaled = (built(settings("torch.optim:NAdam"), each) for each in (ones, others))
    take(plain, ones, 0)
    set_rate(scaled, RATES[0])
    give(others, [4 * gradient for gradient in gradients(0)])
    scaled.grad_scale, scaled.found_inf = torch.tensor(4.0), torch.zeros(())  # type: ignore[attr-defined]
    scaled.step()
    assert equal(weights(ones), weights(others))


@pytest.mark.parametrize(
    ("name", "words", "fix"),
    [
        ("tests.own_code:Hidden", "keeps calls in its attributes", "optimizer.state[parameter]"),
        ("tests.own_code:Slow", "keeps slow in its attributes", "optimizer.state[parameter]"),
        ("tests.own_code:Tallied", "keeps tally in its parameter groups", "optimizer.state[parameter]"),
        ("tests.own_code:Common", "keeps state that belongs to no parameter", "optimizer.state[parameter]"),
        ("tests.own_code:Listing", "keeps history, a list,", "optimizer.state[parameter]"),
        (
            "tests.own_code:Ahead",
            "keeps the state of a second optimizer",
            "optimizer.state[parameter]",
        ),
        ("tests.own_code:Forgetful", "are not those that it was given", "pass on all parameters"),
        (
            "tests.own_code:no_optimizer",
            "returned a int, not a torch.optim.Optimizer",
            "the optimizer itself",
        ),
        ("tests.own_code:without_decay", "does not take weight_decay", "optim.weight_decay=0"),
        ("tests.own_code:Countin", "has nothing called Countin", "did you mean Counting?"),
        ("tests.nowhere:Adam", "there is no module tests.nowhere", "PYTHONPATH"),
        ("torch.optim:LBFGS", "does not take weight_decay", "optim.weight_decay=0"),
        (
            "torch.optim:Muon",
            "raised ValueError: Muon only supports 2D",
            "called as (params, lr, weight_decay)",
        ),
    ],
)
def test_a_mistake_is_reported_before_the_first_step(name: str, words: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        built(Optim(lr=0.1, name=name), model())
    assert error.value.what.startswith(f"optim.name {name}: ")
    assert words in error.value.what
    assert fix in error.value.fix


def test_an_optimizer_that_needs_a_closure_is_rejected() -> None:
    with pytest.raises(UserError, match=r"its step raised TypeError: .*closure"):
        built(Optim(lr=0.1, name="torch.optim:LBFGS", weight_decay=0.0), model())


def test_unknown_arguments_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"cannot be called with lr, weight_decay, beta1; its parameters are lr, betas"
    ):
        built(Optim(lr=0.1, name="torch.optim:NAdam", args=("beta1:0.9",)), model())


@pytest.mark.parametrize(
    ("name", "words"),
    [("Late", "keeps late, which did not exist"), ("Drifting", "keeps numbers of its parameter")],
)
def test_state_that_appears_later_ends_the_run(name: str, words: str) -> None:
    module = model()
    ours = built(settings(f"tests.own_code:{name}"), module)
    for step in range(3):
        take(ours, module, step)
    with pytest.raises(UserError, match=words):
        take(ours, module, 3)

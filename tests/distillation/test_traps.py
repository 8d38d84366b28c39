"""Traps that public distillation code fell into, one test each: first that the trap is one, then that it is empty.

Where another file keeps the promise already, its test is called from here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.distillation.method import Method, Needs, NetworkInfo, Taps
from drumline.distillation.methods import METHODS
from drumline.distillation.methods.contrast import ContrastBank
from drumline.distillation.methods.logits import Kd, dist
from drumline.distillation.methods.relations import correlation, pkt, rkd, similarity
from drumline.distillation.methods.temperatures import mlkd
from drumline.distillation.objective import AcrossRanks, Distillation, LossTerm
from drumline.distillation.selection import select_methods
from drumline.distillation.student import StudentOutput, StudentWithHelpers, network_info
from drumline.distillation.teacher import LiveTeacher, Teacher, TeacherOutput
from drumline.models import create_model
from drumline.models.tapped import with_taps
from drumline.parallel.world import World, single_process
from drumline.training.task import Classification
from tests.distillation import ranks, test_world_sizes
from tests.distillation.methods import test_relations, test_statistics
from tests.distillation.nets import Alone, wakened
from tests.training import ranks as training
from tests.training import tiny

CPU = torch.device("cpu")
CLASSES = tiny.CLASSES
RELATIONAL = ("similarity", "correlation", "rkd", "pkt", "dist", "mlkd")


def images(count: int = 4, side: int = 16) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(7))


def distillation(
    parts: list[LossTerm], run_teacher: Any, r: float = 1.0, teacher: Teacher | None = None
) -> Distillation:
    return Distillation(
        parts,
        r,
        Classification(0.0, CLASSES),
        run_teacher=run_teacher,
        global_batch=AcrossRanks(single_process(CPU), [6]),
        device=CPU,
        per_epoch=10,
        teacher=teacher,
    )


class InPlace(nn.Module):
    """A third-party network whose activations overwrite their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


def test_a_hook_before_an_in_place_relu_sees_what_came_before_it() -> None:
    torch.manual_seed(0)
    model = InPlace().eval()
    hooked: list[Tensor] = []
    handle = model.first[1].register_forward_hook(lambda _module, _args, out: hooked.append(out))
    with torch.no_grad():
        model(images())
        handle.remove()
        assert hooked[0].min() == 0, "a plain hook falls into the trap"
        places = "stage1=first,stage1.pre=first.2:input,stage2=second,stage2.pre=second.2:input"
        _, taps = with_taps(model, places, images())(images(), taps=True)
        expected = model.first[1](model.first[0](images()))
    assert torch.equal(taps["stage1.pre"], expected)
    assert torch.equal(taps["stage1"], expected.relu())
    assert taps["stage2.pre"].min() < 0


def test_a_wide_resnets_statistics_are_updated_once_a_step() -> None:
    torch.manual_seed(0)
    bare = create_model("wrn_16_1", classes=CLASSES)
    plain, tapped = copy.deepcopy(bare).train(), bare.train()
    plain(images())
    needs = {"ofd": Needs(("stage1.pre", "stage2.pre", "stage3.pre"), ())}
    output = StudentWithHelpers(tapped, {}, needs)(images(), {})
    assert list(output.taps) == list(needs["ofd"].student)
    counters = [buffer.item() for name, buffer in tapped.named_buffers() if name.endswith("tracked")]
    assert counters == [1] * len(counters)
    assert len(counters) > 10
    for name, buffer in plain.named_buffers():
        assert torch.equal(tapped.get_buffer(name), buffer), name


def test_a_teacher_in_train_mode_is_switched_to_eval_and_a_later_change_is_rejected() -> None:
    torch.manual_seed(1)
    module = wakened(create_model("resnet8", classes=CLASSES)).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trap = copy.deepcopy(module)
    trap(images())
    assert not torch.equal(trap.get_buffer("bn1.running_mean"), before["bn1.running_mean"])
    teacher = Teacher([module], CPU)
    made = distillation([LossTerm("kd", Kd(), 1.0, Needs())], LiveTeacher(teacher), teacher=teacher)
    student = Alone(CLASSES, (4, 4))
    state = tiny.state(StudentWithHelpers(student, {}, {}), model=student)
    step = tiny.step_of(state, 6, objective=made)
    step.rehearse(tiny.make(6))
    for index in range(3):
        state.module.train()
        step(tiny.make(6, index), index, 0.1)
    made.check()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    module.get_submodule("bn1").train()
    with pytest.raises(UserError, match="bn1 is in training mode"):
        made.check()


@pytest.mark.slow
def test_helpers_are_inside_the_one_ddp_and_do_not_diverge() -> None:
    one = ranks.results(1)[0]
    helped = [
        name for name, case in one.items() if any(key.startswith("helpers.") for key in case["gradients"])
    ]
    assert {"hint", "vid", "correlation", "crd", "reviewkd", "ofd", "factor", "srd"} <= set(helped)
    for name in helped:
        first, second = (result[name] for result in ranks.results(2))
        trained = [key for key in first["gradients"] if key.startswith("helpers.")]
        assert {
            key for key in trained if not torch.equal(first["gradients"][key], second["gradients"][key])
        } == set()
        assert first["idle"] == second["idle"] == [], name
        assert all(torch.equal(tensor, second["state"][key]) for key, tensor in first["state"].items()), name


@pytest.mark.slow
def test_no_forward_bypasses_ddp_so_gradients_are_exchanged() -> None:
    """Each rank had other samples, so equal gradients have been exchanged, and they are those of the whole batch."""
    for name, whole in ranks.results(1)[0].items():
        first, second = (result[name]["gradients"] for result in ranks.results(2))
        assert first.keys() == second.keys() == whole["gradients"].keys()
        assert all(torch.equal(gradient, second[key]) for key, gradient in first.items()), name
        # A shift before a BatchNorm has no effect: its gradient is rounding, to be seen beside the others'.
        largest = max(float(gradient.abs().max()) for gradient in whole["gradients"].values())
        for key, gradient in whole["gradients"].items():
            scale = max(float(gradient.abs().max()), 1e-2 * largest)
            assert float((first[key] - gradient).abs().max()) <= test_world_sizes.RELATIVE * scale, (
                name,
                key,
            )


@pytest.mark.parametrize("size", [1, 3, 8])
def test_crds_banks_are_sharded_and_there_are_no_index_lists(size: int) -> None:
    samples, dim, draws = 10_000, 16, 512
    labels = torch.arange(samples) % 7
    rows = 0
    for rank in range(size):
        world = World(rank, size, rank, size, CPU, "gloo")
        bank = ContrastBank(labels, 3, world, dim=dim, draws=draws, momentum=0.5)
        own = len(bank.live()[0]) - 1
        assert abs(own - samples / size) < 1
        rows += own
        held = sum(tensor.nbytes for tensor in tensors_in(bank))
        assert held <= (own + 1) * 2 * dim * 4 + labels.nbytes + draws * 8 + 64
        assert bank.negatives().shape == (draws,)
    assert rows == samples


@pytest.mark.slow
def test_batch_relational_losses_do_not_change_with_the_number_of_processes() -> None:
    torch.manual_seed(3)
    mine, theirs = torch.randn(26, 10), torch.randn(26, 10)
    losses = {
        "similarity": similarity,
        "correlation": correlation,
        "rkd": lambda s, t: rkd(s, t, 25.0, 50.0),
        "pkt": pkt,
        "dist": lambda s, t: dist(s, t, 1.0, 1.0, 1.0),
        "mlkd": lambda s, t: mlkd(s, t, (4.0, 2.0)),
    }
    for name in RELATIONAL:
        whole = losses[name](mine, theirs)
        halves = (losses[name](mine[:13], theirs[:13]) + losses[name](mine[13:], theirs[13:])) / 2
        assert abs(halves / whole - 1) > 1e-3, f"{name}: halves apart would show nothing"
        one = ranks.results(1)[0][name]
        place = 3 + one["terms"].index(name)
        for size in (2, 4):
            several = ranks.results(size)[0][name]["meter"]
            assert several[place].item() == pytest.approx(one["meter"][place].item(), rel=2e-5), name


def test_nst_and_rkd_use_little_memory() -> None:
    test_statistics.test_nst_builds_no_tensor_larger_than_its_smaller_side()
    test_relations.test_rkd_angles_never_hold_a_cube()


class Given(nn.Module):
    """A student with helpers that returns given fp16 tensors, as autocast leaves them."""

    def __init__(self, logits: Tensor, taps: Taps) -> None:
        super().__init__()
        self.output = StudentOutput(logits, dict(taps), {})

    def forward(self, images: Tensor, teacher_taps: Taps) -> StudentOutput:
        return self.output


def big_taps(seed: int) -> dict[str, Tensor]:
    """Values of some hundreds, as deep features have them, on large maps."""
    torch.manual_seed(seed)
    shapes = {
        "stem": (4, 32, 32),
        "stage1": (4, 32, 32),
        "stage2": (8, 32, 32),
        "stage3": (8, 16, 16),
        "pooled": (8,),
    }
    taps = {name: (300 + 50 * torch.randn(6, *shape)).half() for name, shape in shapes.items()}
    return {name: tap.requires_grad_() for name, tap in taps.items()}


def test_half_precision_features_and_confident_logits_give_finite_losses() -> None:
    mine, theirs = big_taps(0), {name: tap.detach() for name, tap in big_taps(1).items()}
    flat = mine["stage2"].detach().flatten(1)
    assert (flat @ flat.T).isinf().all(), "a Gram matrix in fp16 falls into the trap"
    logits = 1e4 * torch.tensor([[1.0, -1.0, 0.5, -0.5]]).repeat(6, 1).half()
    assert F.softmax(logits.float(), 1).log().isinf().any(), "log(softmax) falls into the trap"
    student = NetworkInfo("s", {name: tuple(tap.shape[1:]) for name, tap in mine.items()}, CLASSES)
    without_helpers = (
        "kd",
        "dkd",
        "dist",
        "mlkd",
        "attention",
        "similarity",
        "rkd",
        "pkt",
        "nst",
        "kdsvd",
        "fsp",
    )
    for name in without_helpers:
        method: Method = METHODS[name]()
        assert method.helper(student, student) is None
        own = {key: tap.detach().clone().requires_grad_() for key, tap in mine.items()}
        output = logits.detach().clone().requires_grad_()
        taught = TeacherOutput(-logits, theirs)
        made = distillation(
            [LossTerm(name, method, 1.0, method.needs(student, student))], lambda _i, _b, t=taught: t
        )
        made.at(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outcome = made(Given(output, own), torch.empty(6, 3, 8, 8), tiny.make(6))
        outcome.loss.backward()
        assert outcome.terms is not None
        assert outcome.loss.dtype == torch.float32
        assert outcome.terms.isfinite().all(), name
        for tensor in (output, *own.values()):
            assert tensor.grad is None or tensor.grad.isfinite().all(), name


def test_the_square_of_the_temperature_is_never_dropped() -> None:
    """Neither when a weight is zero nor when T is large: kd pulls equally hard at any T."""
    torch.manual_seed(4)
    output, taught = torch.randn(6, CLASSES), TeacherOutput(torch.randn(6, CLASSES), {})

    def pull(T: float, r: float) -> float:
        logits = output.clone().requires_grad_()
        made = distillation([LossTerm("kd", Kd(T=T), 1.0, Needs())], lambda _images, _batch: taught, r=r)
        made.at(0)
        outcome = made(Given(logits, {}), torch.empty(6, 3, 8, 8), tiny.make(6))
        labels = F.cross_entropy(logits, tiny.make(6).labels, reduction="sum")
        (outcome.loss - r * labels).backward()
        assert logits.grad is not None
        return logits.grad.norm().item()

    assert pull(100.0, 0.0) == pytest.approx(pull(10.0, 0.0), rel=0.1)
    assert pull(100.0, 0.0) == pytest.approx(pull(4.0, 0.0), rel=0.5)
    for T in (1.0, 4.0):
        assert pull(T, 0.0) == pytest.approx(pull(T, 1.0), rel=1e-5)


def test_correlation_is_added_with_the_right_sign() -> None:
    (part,) = select_methods(Distill(method=("correlation",))).methods
    student, teacher = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    before = (student.detach() - teacher).abs().sum()
    (part.weight * correlation(student, teacher)).backward()
    assert student.grad is not None
    after = (student.detach() - 0.1 * student.grad / part.weight - teacher).abs().sum()
    assert after < before


@pytest.mark.slow
def test_padded_samples_are_never_counted() -> None:
    """The teacher is scored by the same `evaluate` as any model: 23 samples in batches of 4 on 3 processes."""
    one = training.evaluation(single_process(CPU))
    assert one["samples"] == training.SAMPLES == 23
    assert [result["score"] for result in training.results(3)] == [one] * 3


def test_features_are_returned_and_never_left_on_a_module() -> None:
    torch.manual_seed(0)
    student = with_taps(InPlace(), "", images())
    teacher_module = wakened(create_model("resnet8", classes=CLASSES))
    one = (network_info(student, "student", images()), network_info(teacher_module, "teacher", images()))
    methods = {name: METHODS[name]() for name in ("hint", "attention", "vid", "crd", "srd", "correlation")}
    needs = {name: method.needs(*one) for name, method in methods.items()}
    helpers = {name: made for name, method in methods.items() if (made := method.helper(*one)) is not None}
    asking = [name for name, method in methods.items() if method.helper_reads_teacher]
    module = StudentWithHelpers(student, helpers, needs, asking).train()
    teacher = Teacher([teacher_module], CPU, taps=[("stage1", "stage2", "stage3", "pooled")])
    output = module(images(), teacher(images()).taps)
    assert len(output.taps) >= 3
    assert set(output.helper_outputs) == set(helpers)
    assert strays(module) == []
    assert strays(teacher_module) == []
    module.student.features = output.taps
    assert strays(module) != [], "the search finds what is kept"


def strays(module: nn.Module) -> list[Tensor]:
    """Tensors that hang on a module without being its parameters or buffers."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [tensor for tensor in tensors_in(module) if id(tensor) not in known]


def tensors_in(thing: object, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that can be reached from an object by its attributes, its items and what its hooks hold."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | torch.device):
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    inner: list[object] = []
    if isinstance(thing, Mapping):
        inner += [*thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner += [*thing]
    inner += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    inner += [getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
    return [tensor for each in inner for tensor in tensors_in(each, seen)]

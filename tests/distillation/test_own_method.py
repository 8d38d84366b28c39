"""`distill.method=package.module:Class`: right methods are used like built-in ones; mistakes are explained before a
run starts."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from drumline.cli import main
from drumline.config.arguments import TrustOption, named_code, read_recipe
from drumline.config.recipe import Distill, Model, Recipe
from drumline.core.errors import UserError
from drumline.distillation import method_named
from drumline.distillation.methods.logits import Kd
from drumline.distillation.methods.relations import Similarity
from drumline.distillation.selection import select_methods
from drumline.distillation.student import fit_networks
from drumline.distillation.teacher import LoadedTeacher
from drumline.distillation.trial import try_own_methods
from drumline.state.provenance import software
from tests.distillation.nets import alone, wakened
from tests.distillation.own_methods import Counts, Projected, Soft, Undecorated
from tests.runs.command import begin, drumline, kill_when, result, sha256

OWN = "tests.distillation.own_methods"
PAGE = (Path(__file__).parents[2] / "docs/add-a-method.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def tried(*names: str, **fields: object) -> None:
    """Selects, fits and tries methods as a run does before it starts."""
    torch.manual_seed(1)
    recipe = Recipe(
        model=Model(name="student"),
        distill=Distill(
            method=tuple(name if ":" in name else f"{OWN}:{name}" for name in names),
            **fields,  # type: ignore[arg-type]
        ),
    )
    selection = select_methods(recipe.distill)
    student, teacher = alone(10), wakened(alone(10), seed=5)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    networks = fit_networks(recipe, selection, student, [LoadedTeacher("teacher", "", teacher)], 8)
    state = torch.get_rng_state()
    module = networks.with_helpers(0)
    torch.set_rng_state(state)
    try_own_methods(networks, module, selection, 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in student.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def rejected(name: str, **fields: object) -> str:
    with pytest.raises(UserError) as caught:
        tried(name, **fields)
    assert caught.value.fix
    return f"{caught.value.what} | {caught.value.fix}"


@pytest.mark.parametrize("name", ["Soft", "Undecorated", "Projected", "Deepest"])
def test_a_right_method_passes_and_leaves_no_trace(name: str) -> None:
    tried(name)
    tried(name, a=0.5)


def test_it_has_options_weights_and_schedules_as_built_in_methods_have() -> None:
    words = ("Soft.power:3", "plain.warmup:5", "T_schedule:linear")
    found = select_methods(
        Distill(
            method=("kd", f"{OWN}:Soft", f"{OWN}:Undecorated"), options=("Soft.power:3", "plain.warmup:5")
        )
    )
    assert found.describe() == (
        "loss = 0.5 cross-entropy + 1 kd + 2 Soft + 1 plain (warm-up of 5 epochs), T = 4 (kd), 3 (Soft)"
    )
    assert [each.method for each in found.methods[:2]] == [Kd(), Soft(power=3)]
    assert isinstance(found.methods[2].method, Undecorated)
    assert found.relating == ["plain"]
    tried("Soft", options=words[2:], T=2.0)
    with pytest.raises(UserError, match=r"Soft.power = 7: too large"):
        select_methods(Distill(method=(f"{OWN}:Soft",), options=("power:7",)))


def test_methods_are_built_by_name() -> None:
    assert method_named("kd", T=2.0) == Kd(T=2.0)
    assert method_named("sp") == Similarity()
    assert method_named(f"{OWN}:Soft", power=4) == Soft(power=4)
    assert method_named(f"{OWN}:Projected").name == Projected.name == "Projected"
    for name, options, part in [
        ("kdd", {}, "did you mean kd"),
        ("kd", {"temperature": 2}, "its options are: T"),
        ("dkd", {"betta": 2}, "did you mean beta"),
        ("kd", {"T": -1.0}, "too small"),
        ("my.mine.Own", {}, "did you mean my.mine:Own"),
    ]:
        with pytest.raises(UserError, match=part):
            method_named(name, **options)


def test_its_code_is_part_of_the_software_and_a_recipe_file_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(distill=Distill(method=("kd", f"{OWN}:Soft")))
    assert named_code(recipe) == {"distill.method": (f"{OWN}:Soft",)}
    assert len(software(recipe)[f"the code of {OWN}:Soft"]) > 8
    file = tmp_path / "recipe.toml"
    file.write_text(f'[distill]\nmethod = ["{OWN}:Soft"]\n')
    with pytest.raises(UserError, match=r"runs the code of tests\.distillation\.own_methods"):
        read_recipe([str(file)], "distill", TrustOption)
    trusted = read_recipe([str(file), "--trust"], "distill", TrustOption).recipe
    assert trusted.distill.method == (f"{OWN}:Soft",)
    file.write_text('[distill]\nmethod = ["nowhere:Soft"]\n[data]\nsource = "digits"\n')
    assert main(["distill", str(file), "--dry-run"]) == 0
    assert "method: nowhere:Soft; not imported, because that would run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("Sofft", "has nothing called Sofft", "did you mean Soft?"),
        (
            "NoBase",
            "is a class that is not derived from drumline.distillation.Method",
            "class NoBase(Method)",
        ),
        ("function", "is a function that is not derived", "(docs/add-a-method.md)"),
        ("NoLoss", "has no loss", "def loss(self, inputs)"),
        ("NoDecorator", "extra cannot be set", "@dataclass(frozen=True) above `class NoDecorator`"),
        ("NoDecoratorAtAll", "gamma cannot be set", "@dataclass(frozen=True)"),
        ("TypedWeights", "weights has a type, which makes it an option", "write `weights = ...`"),
        ("NumberForWeights", "weights = 2.0 is not a Weights", "`weights = Weights(b=2)`"),
        ("WrongScope", "scope = 'batch'", "use one of sample, global_batch"),
        ("Taken", "its name kd is that of a built-in method", 'name = "taken2"'),
        ("Untextual", "the type of the option layers cannot be set on the command line", "use int, float"),
        ("Scheduled", "warmup has a type", "without a type"),
        ("OutsideItsLimits", "power = 9: too large", "give at most 4"),
        ("OnlyNeeds", "overrides needs, but not reads", "describe what it reads"),
        ("TakesTensors", "its loss cannot be called with inputs", "def loss(self, inputs)"),
        ("Averaged", "its loss returned a tensor of shape () for 4 samples", 'scope = "global_batch"'),
        ("PerSample", "its loss returned a tensor of shape (4,)", "return one number"),
        ("Number", "its loss returned a float", "return one loss per sample"),
        ("Unconnected", "does not depend on the student", "without .detach()"),
        ("OfTeacher", "does not depend on the student", "without .detach()"),
        ("Divides", "its loss is not finite", "division by zero"),
        ("InfiniteSlope", "the gradient of its loss is not finite", "square root of zero"),
        ("Undeclared", "inputs.taps['stage2'] does not exist", '`reads = "logits, stage2"`'),
        ("ByItsRole", "it has stage3", "inputs.taps.values()"),
        ("UndeclaredWithHelper", "inputs.taps['pooled'] does not exist", "from the helper"),
        ("UndeclaredOutput", "it has mapped", "{'other': ...}"),
        ("ReadsTeacherInHelper", "teacher_taps['pooled'] does not exist", "helper_reads_teacher = True"),
        ("NoSuchTap", "reads the tap `stage9`, which student does not have", "distill.student_taps"),
        ("Relates", "depends on the other samples of the batch", 'scope = "global_batch"'),
        ("Random", "two results for the same inputs", "from its inputs alone"),
        ("Counts", "two results for the same inputs", "from its inputs alone"),
        ("Raises", "its loss raised KeyError at own_methods.py:", "docs/add-a-method.md"),
        ("RaisesInHelper", "building its helper raised KeyError at own_methods.py:", "correct it"),
        ("RaisesInNeeds", "its needs raised IndexError at own_methods.py:", "correct it"),
        ("NoModule", "helper returned a function", "return an nn.Module or None"),
        ("TensorFromHelper", "its helper returned a Tensor, not a dict", "return a dict"),
        ("Lazy", "its helper has parameters without a shape", 'nn.Linear(student.shapes["pooled"][0], ...)'),
        ("Drifting", "the parameter linear.weight of its helper changes", "make it a buffer"),
    ],
)
def test_a_mistake_is_explained_before_a_run(name: str, what: str, fix: str) -> None:
    found = rejected(name)
    assert found.startswith("distill.method")
    assert what in found.partition(" | ")[0]
    assert fix in found.partition(" | ")[2]


def test_a_missing_module_is_explained() -> None:
    for name, part in [("nowhere.mine:Soft", "there is no module nowhere"), ("mine.py:Soft", "names a file")]:
        with pytest.raises(UserError, match=part):
            select_methods(Distill(method=(name,)))


def test_the_trial_of_a_dataclass_that_is_not_frozen_does_not_change_its_default() -> None:
    rejected("Counts")
    assert Counts().calls == 0


# The page "Add a method".


(SHELL,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
TRAIN, DISTILL = (shlex.split(line)[1:] for line in SHELL.replace("\\\n", "").splitlines())
SHORT = (
    "run.device=cpu",
    "parallel.threads=1",
    "train.eval_every=0",
    "train.steps=8",
    "checkpoint.every_steps=3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the teacher of the page."""
    folder = tmp_path_factory.mktemp("own")
    assert result(drumline(*TRAIN, "run.device=cpu", "parallel.threads=1", folder=folder))["finished"]
    return folder


@pytest.mark.slow
def test_the_example_runs_as_printed_and_has_equal_bits_on_two_processes(folder: Path) -> None:
    (folder / "mine.py").write_text(EXAMPLES[0])
    assert len(EXAMPLES[0].splitlines()) <= 22
    for processes in ("1", "2"):
        own = (f"run.name={processes}", f"parallel.processes={processes}", "run.strict=true", "run.shards=2")
        done = drumline(*DISTILL, *SHORT, *own, folder=folder)
        assert result(done)["finished"], done.stderr
        assert "loss = 0.5 cross-entropy + 1 Sure (cosine to 0 times), T = 4" in done.stderr
    assert sha256(folder, "1") == sha256(folder, "2")


@pytest.mark.slow
def test_the_example_with_a_helper_resumes_with_the_bits_of_an_uninterrupted_run(folder: Path) -> None:
    (folder / "mine.py").write_text(EXAMPLES[1])
    words = ("data.source=digits", "model.name=resnet8", "distill.teacher_weights=runs/teacher", *SHORT)
    words = ("distill", *words, "distill.method=kd,mine:Cosine", "distill.cache=kept")
    words = (*words, "optim.schedule=constant", "optim.warmup_epochs=0")  # independent of the length
    assert result(drumline(*words, "run.name=whole", folder=folder))["finished"]
    saved = folder / "runs/cut/checkpoints/step-3"
    kill_when(saved.exists, begin(*words, "run.name=cut", "train.steps=400", folder=folder))
    for newer in saved.parent.glob("step-*"):
        if newer != saved:
            shutil.rmtree(newer)
    untrusted = drumline("resume", "runs/cut", "train.steps=8", folder=folder)
    assert "runs the code of mine" in untrusted.stderr
    done = drumline("resume", "runs/cut", "train.steps=8", "--trust", folder=folder)
    assert result(done)["finished"], done.stderr
    assert sha256(folder, "cut") == sha256(folder, "whole")


def test_the_example_with_a_helper_passes_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "second_example.py").write_text(EXAMPLES[1])
    monkeypatch.syspath_prepend(tmp_path)
    tried("second_example:Cosine")

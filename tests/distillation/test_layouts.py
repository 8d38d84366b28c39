"""Student and teacher with different layouts: the same bits, no teacher where it is not needed, and errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumline.config.recipe import Data, Distill, Model, Parallel, Recipe, Run, Train
from drumline.config.rules import problems
from drumline.core.errors import UserError
from drumline.data.feed.batch import Batch
from drumline.distillation import staged_teacher
from drumline.distillation.run import distill
from drumline.distillation.staged_teacher import (
    PipelinedTeacher,
    StagePlan,
    cut_teacher,
    place_teacher,
    plan_teacher_stages,
    stage_devices,
)
from drumline.distillation.teacher import Teacher
from drumline.models import create_model
from drumline.observe.display import make_display
from drumline.parallel.pipeline.schedule import Shape
from drumline.parallel.strategy import create_strategy
from drumline.parallel.world import make_grid, single_process
from drumline.state.checkpoint import newest_valid, read_checkpoint
from drumline.state.fingerprint import state_sha256
from tests.distillation import layout_ranks as ranks
from tests.distillation.nets import wakened
from tests.launch.ranks import one_thread

CPU = torch.device("cpu")
HERE = single_process(CPU)


def sha_of(run: Path) -> str:
    newest, _ = newest_valid(run / "checkpoints")
    assert newest is not None
    return state_sha256(read_checkpoint(newest)[1])


# Whole runs.


@pytest.mark.slow
@pytest.mark.parametrize("name", ranks.CASES)
def test_a_pipeline_has_the_bits_of_plain_accumulation_with_any_layout_of_the_teacher(
    name: str, tmp_path: Path
) -> None:
    """Every stage of the teacher and of the student is on one of two processes; then on one, without stages."""
    first, last = ranks.results()
    folder = Path(first["folder"])
    plain = ranks.recipe_of(folder, name)
    with one_thread():
        scores, _ = ranks.learn(replace(plain, run=replace(plain.run, dir=str(tmp_path))), HERE)
    assert sha_of(tmp_path / name) == sha_of(folder / name)
    assert first[name]["scores"] == last[name]["scores"] == scores
    assert scores["agreement"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole-logits", "staged-taps"])
def test_a_checkpoint_of_a_pipeline_resumes_without_one_to_the_same_bits(name: str, tmp_path: Path) -> None:
    folder = Path(ranks.results()[0]["folder"])
    recipe = ranks.recipe_of(folder, name)
    half = str(folder / name / "checkpoints" / "step-2")
    going_on = replace(
        recipe,
        run=replace(recipe.run, dir=str(tmp_path)),
        checkpoint=replace(recipe.checkpoint, resume=half),
    )
    with one_thread():
        distill(going_on, HERE)
    assert sha_of(tmp_path / name) == sha_of(folder / name)


@pytest.mark.slow
def test_only_processes_that_compute_the_teacher_hold_it() -> None:
    first, last = ranks.results()
    for name, (_, layout, _) in ranks.CASES.items():
        mine, theirs = first[name], last[name]
        if layout == "pipeline":
            assert mine["has"]
            assert theirs["has"]
            assert min(mine["held"], theirs["held"]) > 0
            assert mine["held"] + theirs["held"] == mine["all"]
        else:
            assert (mine["has"], mine["held"]) == (False, 0)
            assert (theirs["has"], theirs["held"]) == (True, theirs["all"])


@pytest.mark.slow
def test_each_process_checks_the_stages_of_the_teacher_that_it_holds() -> None:
    for rank, found in enumerate(ranks.results()):
        for name in ranks.CASES:
            changed = "weights or statistics have changed" in found[name]["error_text"]
            assert changed == found[name]["has"], (rank, name)


@pytest.mark.slow
def test_a_run_resumes_in_a_pipeline_with_its_teacher_to_the_same_bits() -> None:
    folder = Path(ranks.results()[0]["folder"])
    assert sha_of(folder / "resumed") == sha_of(folder / "staged-taps")


@pytest.mark.slow
def test_a_run_logs_the_layout_of_its_teacher() -> None:
    words = ranks.results()[0]["staged-two-teachers"]["words"]
    where = "in 2 stages over the processes of the student's pipeline: 0: from conv1 | 1: from layer2.1"
    assert words.count(f"teacher resnet14 {where}") == 2


# A teacher in the stages of one process.


def teacher(**options: Any) -> Teacher:
    torch.manual_seed(4)
    return Teacher([wakened(create_model("resnet14", classes=10))], CPU, **options)


def laid(whole: Teacher, count: int) -> Teacher:
    made = copy.deepcopy(whole)
    how = StagePlan(Shape(count, 1, 1, "gpipe", 1, False), make_grid(HERE), (CPU,) * count)
    recipe = Recipe(data=Data(batch=4), distill=Distill(teacher_layout="model"))
    cut = cut_teacher(
        made.modules[0],
        "resnet14",
        bool(made.taps[0]),
        how,
        create_strategy(recipe, HERE),
        8,
        make_display(0),
    )
    assert len(cut) == count
    place_teacher(made, [cut], how, channels_last=False)
    return made


@pytest.mark.parametrize("count", [2, 5])
def test_a_teacher_in_stages_has_the_outputs_of_the_whole_one(count: int) -> None:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = teacher(taps=[("stage2", "pooled")])
    parts = laid(whole, count)
    output, wanted = parts(images), whole(images)
    assert torch.equal(output.logits, wanted.logits)
    assert output.taps.keys() == wanted.taps.keys()
    assert all(torch.equal(output.taps[name], tap) for name, tap in wanted.taps.items())
    parts.check()


def test_a_teacher_in_stages_is_still_checked() -> None:
    parts = laid(teacher(), 2)
    parts.modules[0].get_submodule("fc").to("meta")
    with pytest.raises(UserError, match=r"fc.weight is on meta, but its stage computes on cpu"):
        parts.check()


def test_a_released_teacher_takes_no_memory() -> None:
    gone = teacher()
    gone.release()
    assert all(tensor.is_meta for tensor in gone.modules[0].state_dict().values())


def test_outputs_computed_ahead_are_returned_in_the_order_of_micro_batches_repeatedly() -> None:
    source = PipelinedTeacher(teacher())
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pieces = [batch_of(images[first : first + 2]) for first in (0, 2, 4)]
    source.run_ahead(pieces, lambda piece: piece.images.permute(0, 3, 1, 2))
    wanted = source.teacher(images).logits.split(2)
    for _ in range(2):
        for piece, logits in zip(pieces, wanted, strict=True):
            torch.testing.assert_close(source(images[:0], piece).logits, logits)


def batch_of(images: Tensor) -> Batch:
    count = len(images)
    empty = torch.zeros(count, 0)
    fields = dict.fromkeys(Batch._fields, empty)
    labels = torch.zeros(count, dtype=torch.int64)
    return Batch(**{**fields, "images": images.permute(0, 2, 3, 1), "labels": labels})


# Devices and errors.


def test_a_teachers_last_stage_is_on_the_process_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_teacher.torch.cuda, "device_count", lambda: 4)

    def numbers(local_rank: int, local_size: int, wanted: int | str, virtual: bool = False) -> list[int]:
        own = torch.device("cuda", local_rank)
        world = replace(single_process(own), local_rank=local_rank, local_size=local_size)
        return [device.index for device in stage_devices(wanted, virtual, world)]

    assert numbers(0, 1, "auto") == [3, 2, 1, 0]
    assert numbers(1, 2, "auto") == [3, 1]
    assert numbers(0, 2, 2) == [2, 0]
    assert numbers(0, 2, 3, virtual=True) == [0, 2, 0]
    assert numbers(3, 4, 2, virtual=True) == [3, 3]
    with pytest.raises(UserError, match=r"distill.teacher_stages = 3: the process has only 2 devices"):
        numbers(0, 2, 3)
    with pytest.raises(UserError, match="needs at least two devices in the process, which has one"):
        numbers(0, 4, "auto")


def test_too_many_stages_are_rejected_with_the_teachers_name() -> None:
    with pytest.raises(UserError) as error:
        laid(teacher(), 99)
    assert error.value.what.startswith("distill.teacher_layout = model in 99 stages: teacher resnet14: ")


WRONG: list[tuple[Distill, Parallel, str, str]] = [
    (
        Distill(teacher_layout="pipeline"),
        Parallel(),
        "distill.teacher_layout",
        "parallel.layout = auto",
    ),
    (
        Distill(teacher_layout="pipeline", cache="c"),
        Parallel(layout="pipeline"),
        "distill.cache",
        "whole teacher in each process",
    ),
    (Distill(teacher_stages=2), Parallel(), "distill.teacher_stages", "has no effect"),
    (Distill(teacher_layout="model", teacher_stages=0), Parallel(), "distill.teacher_stages", "too small"),
    (Distill(), Parallel(virtual=True), "parallel.virtual", "has no effect"),
]


@pytest.mark.parametrize(("settings", "parallel", "field", "what"), WRONG)
def test_a_recipe_with_an_impossible_layout_of_the_teacher_is_rejected(
    settings: Distill, parallel: Parallel, field: str, what: str
) -> None:
    found = [
        problem for problem in problems(Recipe(distill=settings, parallel=parallel)) if problem.field == field
    ]
    assert len(found) == 1
    assert what in found[0].what


def test_a_teacher_in_virtual_stages_works_with_a_student_without_stages() -> None:
    settings = Distill(teacher_layout="model", teacher_stages=2)
    assert not list(problems(Recipe(distill=settings, parallel=Parallel(virtual=True))))


def test_a_pipeline_in_one_process_rejects_a_teacher_over_processes() -> None:
    recipe = Recipe(
        data=Data(batch=128),
        distill=Distill(teacher_layout="pipeline"),
        parallel=Parallel(layout="pipeline", stages=2, virtual=True),
    )
    with pytest.raises(UserError, match="pipeline is in one process"):
        plan_teacher_stages(recipe, create_strategy(recipe, HERE))


@pytest.mark.parametrize(("method", "why"), [("rkd", "relates all samples"), ("fsp", "has an initial phase")])
def test_methods_that_need_the_whole_batch_or_an_initial_phase_are_rejected_in_stages(
    method: str, why: str, tmp_path: Path
) -> None:
    ranks.write_teachers(tmp_path)
    recipe = Recipe(
        run=Run(dir=str(tmp_path), device="cpu"),
        data=Data(source="digits", batch=24, workers=0),
        model=Model(name="resnet8"),
        train=Train(steps=1),
        distill=Distill(
            teacher=("resnet14",), teacher_weights=(str(tmp_path / "0.safetensors"),), method=(method,)
        ),
        parallel=Parallel(layout="pipeline", stages=2, virtual=True),
    )
    with pytest.raises(UserError) as error:
        distill(recipe, HERE)
    assert error.value.what.startswith("parallel.layout = pipeline: ")
    assert method in error.value.what
    assert why in error.value.what
    assert "ddp" in error.value.fix

"""`drumline distill` as a user types it: output and files, stopped and resumed, cached, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.cli import main
from drumline.models import create_model
from tests.distillation.nets import wakened
from tests.runs.command import begin, drumline, kill_when, metrics, result, sha256

pytestmark = pytest.mark.slow

DATA = ("data.source=digits", "data.batch=48", "parallel.threads=1", "data.workers=0")
STUDENT = (*DATA, "model.name=resnet8", "train.log_every=1")
TEACHER = "distill.teacher_weights=runs/teacher"
ONE = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `teacher`, a resnet8 after one epoch, and weights of a different one."""
    folder = tmp_path_factory.mktemp("distill")
    words = (*DATA, "model.name=resnet8", "train.epochs=1", "run.name=teacher")
    result(drumline("train", *words, folder=folder, **ONE))
    torch.manual_seed(5)
    state = wakened(create_model("resnet8", classes=10)).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "other.safetensors")
    return folder


def distil(home: Path, name: str, *words: str, code: int = 0) -> str:
    """The output of one run, the JSON line last."""
    done = drumline("distill", *STUDENT, f"run.name={name}", *words, folder=home, **ONE)
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr + done.stdout


def killed(home: Path, name: str, ready: Callable[[], bool], *words: str) -> None:
    """A run that is killed as soon as it is `ready`."""
    kill_when(ready, begin("distill", *STUDENT, f"run.name={name}", *words, folder=home, **ONE))


# One run.


@pytest.fixture(scope="module")
def plain(home: Path) -> tuple[Path, str]:
    """The run `plain`, with a method that trains helpers, and its output."""
    return home, distil(home, "plain", TEACHER, "distill.method=kd,hint", "distill.b=1", "train.epochs=1")


def test_a_run_reports_the_teachers_score_the_loss_and_the_agreement(plain: tuple[Path, str]) -> None:
    home, output = plain
    teacher = metrics(home, "teacher", "eval")[-1]
    assert f"top-1 {teacher['top1']:.2%} ({teacher['correct']} of 359)" in output.split("epoch 1:")[0]
    assert "loss = 1 cross-entropy + 1 kd + 1 hint, T = 4" in output
    final = metrics(home, "plain", "eval")[-1]
    assert 0 < final["agreement"] <= 1
    assert f'"agreement": {final["agreement"]}' in output.splitlines()[-1]
    assert f"teacher {teacher['top1']:.2%}, agreement {final['agreement']:.2%}" in output
    assert f'"teacher_top1": {teacher["top1"]}' in output.splitlines()[-1]
    assert round(final["agreement"] * 359) == pytest.approx(final["agreement"] * 359)


def test_the_terms_of_the_loss_are_logged_and_add_up(plain: tuple[Path, str]) -> None:
    lines = metrics(plain[0], "plain", "train")
    assert len(lines) == 29
    for line in lines:
        assert line["loss"] == pytest.approx(line["ce"] + line["kd"] + line["hint"], rel=1e-4)
        assert 0 <= line["teacher_agreement"] <= 1


def test_the_exported_weights_are_the_student_alone_and_can_be_evaluated(plain: tuple[Path, str]) -> None:
    home, _ = plain
    exported = load_file(home / "runs/plain/weights/last.safetensors")
    expected = create_model("resnet8", classes=10).state_dict()
    assert exported.keys() == expected.keys()
    assert all(exported[name].shape == tensor.shape for name, tensor in expected.items())
    scored = result(drumline("eval", "runs/plain", folder=home, **ONE))
    assert scored["correct"] == metrics(home, "plain", "eval")[-1]["correct"]


@pytest.mark.parametrize(
    "words",
    [("distill.method=hint", "optim.lr=0.05"), ("distill.method=hint,rkd", "distill.b=100,1")],
    ids=["published rate", "default rate"],
)
def test_hint_at_its_published_weight_does_not_diverge(home: Path, words: tuple[str, ...]) -> None:
    """The published recipe, with a teacher whose maps are large because it has been trained."""
    deeper = (*DATA, "data.batch=64", "model.name=resnet20")
    if not (home / "runs/deeper").exists():
        result(drumline("train", *deeper, "train.epochs=3", "run.name=deeper", folder=home, **ONE))
    name = words[0].partition("=")[2]
    words = (*words, "optim.warmup_epochs=0", "train.steps=40")
    output = distil(home, name, *deeper, "distill.teacher_weights=runs/deeper", *words)
    losses = [line["loss"] for line in metrics(home, name, "train")]
    assert len(losses) == 40
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])
    assert "not finite" not in output


# Stopped and resumed.


def test_crd_killed_and_resumed_on_two_processes_ends_with_the_bits_of_an_uninterrupted_run(
    home: Path,
) -> None:
    words = (
        TEACHER,
        "distill.method=crd,kd",
        "distill.options=K:64,dim:16,crd.schedule:cosine,kd.T_schedule:linear,kd.T_end:2",
        "train.steps=24",
        "train.eval_every=0",
        "checkpoint.every_steps=4",
        "parallel.processes=2",
    )
    distil(home, "whole", *words)
    saved = home / "runs/cut/checkpoints/step-8"
    assert "1 kd (T linear to 2) + 0.8 crd (cosine to 0 times)" in (home / "runs/whole/log.txt").read_text()
    killed(home, "cut", saved.exists, *words)
    output = distil(home, "cut", *words, "checkpoint.resume=auto")
    assert "resumed from" in output
    assert sha256(home, "cut") == sha256(home, "whole")
    losses = [
        [(line["step"], line["loss"]) for line in metrics(home, name, "train")] for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    newest = home / "runs/whole/checkpoints/step-24"
    keys = {key for file in newest.glob("*.safetensors") for key in load_file(file)}
    assert {"crd.student", "crd.teacher", "crd.log_z"} <= keys
    # Its certificate computes a step of its own, which must leave no trace in the memory either.
    distil(home, "sharded", *words, "parallel.layout=fsdp")
    assert sha256(home, "sharded") == sha256(home, "whole")


def test_a_run_killed_in_its_initial_phase_resumes_there(home: Path) -> None:
    words = (
        TEACHER,
        "distill.method=fsp",
        "distill.initial_epochs=1",
        "train.steps=6",
        "checkpoint.every_steps=5",
    )
    distil(home, "fsp-whole", *words)
    stage = home / "runs/fsp/initial-fsp"
    killed(home, "fsp", (stage / "checkpoints/step-5").exists, *words)
    assert not (home / "runs/fsp/checkpoints").exists()
    output = distil(home, "fsp", *words, "checkpoint.resume=auto")
    assert "resumed from" in output
    assert "initial phase of fsp" in output
    assert "continues from the initial phase initial-fsp" in output
    assert (stage / "checkpoints/step-29").is_dir()
    assert sha256(home, "fsp/initial-fsp") == sha256(home, "fsp-whole/initial-fsp")
    assert sha256(home, "fsp") == sha256(home, "fsp-whole")
    first = metrics(home, "fsp", "train")[0]
    assert first["step"] == 1
    assert not (home / "runs/fsp/initial-fsp/weights/best.safetensors").exists()


def test_every_process_continues_from_an_initial_phase(home: Path) -> None:
    """The run compares the ranks' models, buffers included, after its first steps."""
    words = (TEACHER, "distill.method=factor", "distill.initial_epochs=0.2", "train.steps=4")
    output = distil(home, "factor", *words, "parallel.processes=2")
    assert "initial phase of factor: 1 factor" in output
    assert "continues from the initial phase initial-factor" in output
    kept = load_file(home / "runs/factor/checkpoints/step-4/helpers.safetensors")
    (stage,) = (home / "runs/factor/initial-factor/checkpoints").glob("step-*")
    made = load_file(stage / "helpers.safetensors")
    frozen = [name for name in kept if ".paraphraser." in name]
    assert len(frozen) > 10
    assert all(torch.equal(kept[name], made[name]) for name in frozen)


def test_a_run_stopped_in_its_initial_phase_is_reported_and_verified_as_such(home: Path) -> None:
    words = (TEACHER, "distill.method=abound", "distill.initial_epochs=3", "train.steps=4")
    killed(home, "early", (home / "runs/early/initial-abound/checkpoints/step-29").exists, *words)
    judged = drumline("verify", "runs/early", folder=home, **ONE)
    assert "no images" not in judged.stderr + judged.stdout
    output = distil(home, "elsewhere", *words, "checkpoint.resume=runs/early", code=2)
    assert "stopped in its initial phase" in output
    assert "--run.name early --checkpoint.resume auto" in output


def test_features_of_several_teachers_are_terms_of_their_own(home: Path) -> None:
    words = ("distill.teacher_weights=runs/teacher,runs/teacher", "distill.shares=3,1", "train.steps=2")
    output = distil(home, "several", *words, "distill.method=kd,hint", "distill.b=2")
    assert "loss = 1 cross-entropy + 1 kd + 2 hint" in output
    (line, *_) = metrics(home, "several", "train")
    assert line["hint_1"] > 0
    assert line["hint_1"] == pytest.approx(line["hint_2"], rel=0.5), "the same teacher, another regressor"
    assert line["loss"] == pytest.approx(
        line["ce"] + line["kd"] + 2 * (0.75 * line["hint_1"] + 0.25 * line["hint_2"])
    )


# Cached.


def test_a_cache_serves_a_different_student_and_rejects_a_different_teacher(home: Path) -> None:
    words = ("train.steps=6", "distill.cache=kept")
    filled = distil(home, "first", *words, TEACHER)
    assert "blocks filled now" in filled
    for text in (filled, (home / "runs" / "first" / "log.txt").read_text()):
        assert text.count("teacher resnet8 (") == 1
    assert filled.index("teacher resnet8 (") < filled.index("blocks filled now")
    second = distil(home, "second", *words, TEACHER, "model.name=wrn_16_1", "data.batch=32")
    assert "teacher: cached in kept;" in second
    assert "blocks filled" not in second
    # The precision that `auto` means here, by its name.
    assert "cached in kept;" in distil(home, "named", *words, TEACHER, "train.precision=fp32")
    other = ("distill.teacher=resnet8", "distill.teacher_weights=other.safetensors")
    output = distil(home, "third", *words, *other, code=2)
    assert "teacher" in output
    assert "kept" in output
    assert "fix:" in output


def test_a_cache_filled_by_crd_serves_kd_with_the_steps_of_its_own_cache(home: Path) -> None:
    words = (TEACHER, "train.steps=4", "train.eval_every=0")
    distil(home, "crd", *words, "distill.method=crd", "distill.cache=with-features")
    distil(home, "alone", *words, "distill.cache=logits")
    shared = distil(home, "shared", *words, "distill.cache=with-features")
    assert "blocks filled now" not in shared
    losses = [[line["loss"] for line in metrics(home, name, "train")] for name in ("alone", "shared")]
    assert losses[0] == losses[1]
    longer = (TEACHER, "train.steps=60", "distill.cache=with-features")
    output = distil(home, "longer", *longer, code=2)
    assert "epochs are not filled. It stores pooled features, which kd does not compute" in output


def test_a_cached_run_takes_the_steps_of_a_live_one(home: Path) -> None:
    words = (TEACHER, "train.steps=5", "train.eval_every=0")
    distil(home, "live", *words)
    distil(home, "stored", *words, "distill.cache=kept-too")
    losses = [[line["loss"] for line in metrics(home, name, "train")] for name in ("live", "stored")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# Refused.

WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no weights": ((), ("distill.teacher_weights is empty", "drumline train")),
    "a missing file": (
        ("distill.teacher_weights=gone.safetensors",),
        ("distill.teacher_weights = gone.safetensors", "no such file", "run folder"),
    ),
    "a file without a name": (
        ("distill.teacher_weights=other.safetensors",),
        ("distill.teacher is empty", "--distill.teacher"),
    ),
    "an unknown method": ((TEACHER, "distill.method=crdd"), ("distill.method = crdd", "did you mean crd?")),
    "an option of another method": (
        (TEACHER, "distill.options=rkd.angle:2"),
        ("distill.options: rkd.angle:2",),
    ),
    "data parallel": ((TEACHER, "parallel.layout=dp"), ("parallel.layout = dp", "--parallel.layout ddp")),
    "accumulation with a relational method": (
        (TEACHER, "distill.method=rkd", "train.accumulate=2"),
        ("train.accumulate = 2", "rkd", "--train.accumulate 1"),
    ),
    "mixed images with a bank": (
        (TEACHER, "distill.method=crd", "data.mixup=0.2"),
        ("distill.method = crd", "data.mixup"),
    ),
    "maps from a cache": (
        (TEACHER, "distill.method=hint", "distill.cache=maps"),
        ("distill.cache", "hint", "stage2", "remove distill.cache"),
    ),
    "fsp with different channels": (
        (TEACHER, "distill.method=fsp", "model.name=wrn_16_2"),
        ("distill.method = fsp", "need the same channels"),
    ),
    "taps without a reader": (
        (TEACHER, "distill.student_taps=stage1=layer9"),
        ("distill.student_taps", "kd reads no taps"),
    ),
    "a gap between stages": (
        (TEACHER, "distill.method=hint", "distill.teacher_taps=stage9=layer3"),
        ("without stage4", "distill.teacher_taps"),
    ),
    "a tap that is no map": (
        (TEACHER, "distill.method=hint", "distill.student_taps=stage2=fc"),
        ("stage2 (fc)", "must be N x C x H x W", "distill.student_taps"),
    ),
    "no initial phase, but its rate": (
        (TEACHER, "distill.initial_lr=0.1"),
        ("distill.initial_lr = 0.1", "kd has no initial phase"),
    ),
    "no initial phase, but its length": (
        (TEACHER, "distill.initial_epochs=3"),
        ("distill.initial_epochs = 3", "kd has no initial phase"),
    ),
    "nothing to keep the largest in": (
        (TEACHER, "distill.cache_top=3"),
        ("distill.cache_top", "give distill.cache too"),
    ),
    "a cache that is a file": (
        (TEACHER, "distill.cache=other.safetensors"),
        ("distill.cache = other.safetensors: is a file",),
    ),
    "features of two teachers from a cache": (
        ("distill.teacher_weights=runs/teacher,runs/teacher", "distill.method=crd", "distill.cache=both"),
        ("distill.cache: crd reads the features of each of the 2 teachers", "remove distill.cache"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_dry_run_rejects_a_wrong_command_with_the_field_and_a_fix(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, must_contain = WRONG[name]
    monkeypatch.chdir(home)
    assert main(["distill", *STUDENT, "run.name=wrong", "train.steps=2", *argv, "--dry-run"]) == 2
    error = capsys.readouterr().err
    for text in ("fix: ", *must_contain):
        assert text in error, error
    assert not (home / "runs/wrong").exists()
    assert not (home / "maps").exists()


@pytest.mark.parametrize("name", ["maps from a cache", "fsp with different channels"])
def test_a_run_rejects_a_wrong_command_as_its_dry_run_does(name: str, home: Path) -> None:
    argv, must_contain = WRONG[name]
    done = drumline("distill", *STUDENT, "run.name=wrong", "train.steps=2", *argv, folder=home, **ONE)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in ("fix: ", *must_contain):
        assert text in done.stderr, done.stderr
    assert not (home / "maps").exists()


def test_a_teacher_that_was_trained_on_different_images_causes_a_warning(home: Path) -> None:
    output = distil(
        home,
        "larger",
        "distill.teacher_weights=runs/teacher/weights/last.safetensors",
        "data.size=12",
        "train.steps=2",
    )
    assert "was trained on different images: data.size: 8 -> 12" in output


PRESETS: dict[tuple[str, ...], str] = {
    ("train", "imagenet/alone/resnet18", "train.steps=1"): "needs its images",
    ("distill", "cifar100/alone/resnet20"): "use drumline train cifar100/alone/resnet20",
    ("train", "cifar100/kd/resnet56-resnet20", "data.path=."): "train has no teacher",
}


@pytest.mark.parametrize("words", PRESETS, ids=lambda words: words[1])
def test_a_preset_that_does_not_fit_the_command_is_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    done = drumline(*words, folder=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert PRESETS[words] in done.stderr
    assert list(tmp_path.iterdir()) == []

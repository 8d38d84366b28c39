"""Untrusted runs, recipes and weights: the command reads them, reports what is wrong and executes nothing in them."""

from __future__ import annotations

import ast
import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from drumline.cli import main
from drumline.config.recipe import Distill
from drumline.core.errors import UserError
from drumline.core.files import CorruptError, write_sealed
from drumline.inference.model import load_model
from drumline.models import create_model
from drumline.state.checkpoint import known_sha256, write_checkpoint, write_checksums
from drumline.state.manifest import Position
from drumline.state.model_record import read_record
from drumline.state.tensors import write_tensors
from drumline.state.weights import export_tensors, export_weights, load_weights

SOURCE = Path(__file__).parents[1] / "src" / "drumline"
EVIL = "import pathlib\npathlib.Path('owned').touch()\n\ndef boom(**words):\n    raise SystemExit\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An untrusted run folder beside a module that it tries to execute, as in an unpacked archive."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text(EVIL)
    folder = tmp_path / "run"
    model = create_model("resnet8", classes=10)
    groups = {"model": dict(model.state_dict()), "optimizer": {}}
    write_checkpoint(folder / "checkpoints", groups, Position(3, 10), "", {"threads": 1})
    (folder / "weights").mkdir()
    export_weights(model, folder / "weights" / "last.safetensors")
    write_checksums(folder / "weights")
    (folder / "recipe.toml").write_text('[model]\nname = "resnet8"\n')
    yield folder
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("field", ["model.name", "data.source"])
@pytest.mark.parametrize("command", ["eval", "train"])
def test_code_named_by_an_untrusted_run_is_not_executed(
    run: Path, capsys: pytest.CaptureFixture[str], field: str, command: str
) -> None:
    section, key = field.split(".")
    (run / "recipe.toml").write_text(f'[{section}]\n{key} = "evil:boom"\n')
    words = [str(run)] if command == "eval" else [str(run / "recipe.toml")]
    assert main([command, *words]) == 2
    error = capsys.readouterr().err
    assert "runs the code of evil" in error
    assert "add --trust, or repeat" in error
    assert not Path("owned").exists()


def test_code_named_by_an_untrusted_teacher_is_not_executed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from drumline.distillation.teacher import check_teachers

    (run / "recipe.toml").write_text('[model]\nname = "evil:boom"\n')
    with pytest.raises(UserError, match="its recipe names the model evil:boom, which runs the code of evil"):
        check_teachers(Distill(teacher_weights=(str(run),)))
    assert check_teachers(Distill(teacher_weights=(str(run),), teacher=("evil:boom",))) == ("evil:boom",)
    assert not Path("owned").exists()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("owned"),)


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.safetensors", "w.bin", "w.pkl"])
def test_a_pickle_under_any_file_name_is_rejected_unexecuted(run: Path, name: str) -> None:
    torch.save({"state_dict": Trap()}, name) if name.startswith("w.p") else Path(name).write_bytes(
        pickle.dumps(Trap())
    )
    with pytest.raises(UserError, match=name):
        load_weights(create_model("resnet8", classes=10), name)
    assert not Path("owned").exists()


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with timm's signature that loads `checkpoint_path` as timm does."""

    def create(
        model_name: str,
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: Any = None,
        checkpoint_path: Any = None,
        cache_dir: Any = None,
        **kwargs: Any,
    ) -> nn.Module:
        if checkpoint_path:
            torch.load(checkpoint_path, weights_only=False)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, kwargs["num_classes"]))

    module = ModuleType("timm")
    vars(module).update(create_model=create, is_model="resnet18".__eq__, list_models=lambda: ["resnet18"])
    monkeypatch.setitem(sys.modules, "timm", module)


LOADS = ["checkpoint_path:w.pth", "checkpoint_path:w", "checkpoint_path:1"]


@pytest.mark.parametrize("argument", LOADS)
def test_arguments_in_the_record_of_weights_load_no_files(run: Path, timm: None, argument: str) -> None:
    for name in ("w.pth", "w"):
        torch.save(Trap(), name)
    model = create_model("timm/resnet18", classes=2)
    images = {"resize": "pillow12", "interpolation": "bilinear", "exif": "ignore", "eval_crop": 0.875}
    plain = images | {"size": 8, "mean": [0.5], "std": [0.5], "classes": ["a", "b"], "outputs": 2}
    record = read_record(plain | {"model": "timm/resnet18", "args": [argument]})
    export_tensors(model.state_dict(), "model.safetensors", record)
    with pytest.raises(
        UserError, match=r"model.args: checkpoint_path = .*: models are built without weights"
    ):
        load_model("model.safetensors")
    assert not Path("owned").exists()


@pytest.mark.parametrize("argument", LOADS)
def test_arguments_in_a_recipe_load_no_files(
    run: Path, timm: None, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    for name in ("w.pth", "w"):
        torch.save(Trap(), name)
    recipe = f'[model]\nname = "timm/resnet18"\nargs = ["{argument}"]\n[data]\nsource = "digits"\n'
    (run / "recipe.toml").write_text(recipe)
    assert main(["train", str(run / "recipe.toml"), "--dry-run"]) == 2
    assert "model.args: checkpoint_path = " in capsys.readouterr().err
    assert not Path("owned").exists()


def test_changed_weights_do_not_load(run: Path) -> None:
    file = run / "weights" / "last.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"last\.safetensors: its checksum does not match"):
        load_weights(create_model("resnet8", classes=10), file)


def test_weights_that_their_folders_checksums_do_not_list_are_rejected(run: Path) -> None:
    for folder in (run / "weights", run / "checkpoints" / "step-3"):
        write_tensors(folder / "best.safetensors", {"w": torch.zeros(1)})
        with pytest.raises(CorruptError, match="do not list it"):
            known_sha256(folder / "best.safetensors")


def huge(content: dict[str, Any]) -> None:
    content["environment"]["threads"] = 10**9


def outside(content: dict[str, Any]) -> None:
    content["files"]["../../recipe.toml"] = content["files"]["model.safetensors"]


def escape_codes(content: dict[str, Any]) -> None:
    content["environment"]["\x1b[2J"] = "\x1b]0;owned\x07"
    content["position"]["step"] = 4


@pytest.mark.parametrize("change", [huge, outside, escape_codes])
def test_a_forged_manifest_with_a_valid_checksum_is_an_error_without_a_traceback(
    run: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None]
) -> None:
    path = run / "checkpoints" / "step-3" / "manifest.json"
    content = json.loads(path.read_text())
    del content["seal"]
    change(content)
    write_sealed(path, content)
    assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr()
    assert "BAD  step-3" in printed.out
    assert "\x1b" not in printed.out + printed.err
    words = [
        "data.source=digits",
        "model.name=resnet8",
        f"checkpoint.resume={run / 'checkpoints' / 'step-3'}",
    ]
    assert main(["train", *words, "train.steps=4", "run.dir=runs", "parallel.threads=1"]) == 2
    assert "cannot resume" in capsys.readouterr().err


FORBIDDEN = {
    r"\bpickle\.(load|loads)\b": (),
    r"\b_?Unpickler\b": ("data/sources/cifar.py",),
    r"\btorch\.load\((?!.*weights_only=True)": (),
    r"\b(np|numpy)\.load\((?!.*allow_pickle=False)": (),
    r"\b(import|from) (yaml|shelve|marshal|dill|joblib|cloudpickle)\b": (),
    r"\b(import_module|resolve_name)\(": (
        "__init__.py",
        "cli/__init__.py",
        "core/named.py",
        "models/registry.py",
        "data/sources/__init__.py",
        "data/sources/custom.py",
        "distillation/__init__.py",
        "launch/worker.py",
        "parallel/strategy.py",
        "state/pretrained.py",
    ),
    r"\bshell=True": (),
}
"""Patterns that can execute code, and the modules where each is allowed: for Drumline's own names, and for names from
the user's command line."""


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_load_path_can_run_code(pattern: str) -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(pattern, line) and not line.lstrip().startswith("#")
    }
    assert found <= set(FORBIDDEN[pattern])


STAGES = "parallel/pipeline/stage.py"
"""Executes the code that torch.fx generates from the user's own model. None of it comes from a file."""


def test_no_module_evaluates_text_as_code() -> None:
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec", "compile", "__import__")
        and str(path.relative_to(SOURCE)) != STAGES
    ]
    assert calls == []
    assert (SOURCE / STAGES).read_text().count("exec(") == 1

"""The command line: what it accepts, what it rejects, and how quickly it starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from drumline.config import arguments
from drumline.config.arguments import Invocation, RecipeOptions, describe, read_options, read_recipe
from drumline.config.fields import recipe_fields, value_of
from drumline.config.limits import Range, keyword_arguments
from drumline.config.recipe import Data, Optim, Recipe
from drumline.config.toml import load_recipe
from drumline.core.errors import UserError
from tests.wrong_commands import WRONG_COMMANDS, WrongCommand


def train(line: str) -> Invocation[RecipeOptions]:
    return read_recipe(shlex.split(line), "train", RecipeOptions)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("wrong", WRONG_COMMANDS, ids=lambda wrong: wrong.name)
def test_a_wrong_line_is_rejected_with_its_location_the_reason_and_a_fix(
    wrong: WrongCommand, folder: Path
) -> None:
    wrong.write_files(folder)
    with pytest.raises(UserError) as refused:
        read_recipe(wrong.argv, "train", RecipeOptions)
    message = str(refused.value)
    for part in wrong.must_contain:
        assert part in message
    # Each mistake has a line of its own and a fix below it.
    lines = message.split("\n")
    assert len(lines) == 2 * wrong.mistakes
    assert all(line.startswith("  fix: ") for line in lines[1::2])
    assert not any(line.startswith(" ") for line in lines[::2])


def test_the_table_of_wrong_lines_names_each_case_once() -> None:
    names = [wrong.name for wrong in WRONG_COMMANDS]
    assert len(set(names)) == len(names) >= 25


def test_an_empty_line_gives_the_defaults() -> None:
    assert train("") == Invocation(Recipe(), RecipeOptions(), {})


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--optim.lr 0.2", "optim.lr", 0.2),
        ("--optim.lr=0.2", "optim.lr", 0.2),
        ("optim.lr=0.2", "optim.lr", 0.2),
        ("optim.lr=1", "optim.lr", 1.0),
        ("--optim.lr 1e-10", "optim.lr", 1e-10),
        ("--data.eval-crop 1", "data.eval_crop", 1.0),
        ("--data.eval_crop 1", "data.eval_crop", 1.0),
        ("data.eval-crop=1", "data.eval_crop", 1.0),
        ("data.workers=auto", "data.workers", "auto"),
        ("data.workers=3", "data.workers", 3),
        ("--train.compile", "train.compile", True),
        ("--train.compile true", "train.compile", True),
        ("--train.compile=True", "train.compile", True),
        ("train.compile=true", "train.compile", True),
        ("--train.no-channels-last", "train.channels_last", False),
        ("--train.no_channels_last", "train.channels_last", False),
        ("train.channels_last=false", "train.channels_last", False),
        ("--optim.betas 0.8 0.99", "optim.betas", (0.8, 0.99)),
        ("--optim.betas 0.8,0.99", "optim.betas", (0.8, 0.99)),
        ("--optim.betas=0.8,0.99", "optim.betas", (0.8, 0.99)),
        ("optim.betas=0.8,0.99", "optim.betas", (0.8, 0.99)),
        ("--data.mean 0.1 0.2 0.3 data.std=1,1,1", "data.mean", (0.1, 0.2, 0.3)),
        ("--data.mean --data.std", "data.mean", ()),
        ("data.mean=", "data.mean", ()),
        ("--data.jitter 0.4,0.4,0.4,0.1", "data.jitter", (0.4, 0.4, 0.4, 0.1)),
        ("--data.jitter 0.4 0.4 0.4 0.1", "data.jitter", (0.4, 0.4, 0.4, 0.1)),
        ("data.jitter=0.4,0.4,0.4,0.1", "data.jitter", (0.4, 0.4, 0.4, 0.1)),
        ("data.jitter=", "data.jitter", ()),
        ("--data.randaugment 2,9", "data.randaugment", (2, 9)),
        ("--data.randaugment 2 9", "data.randaugment", (2, 9)),
        ("--data.randaugment=2,9", "data.randaugment", (2, 9)),
        ("--data.strict", "data.strict", True),
        ("--data.no-strict", "data.strict", False),
        ("--data.bad-limit 0", "data.bad_limit", 0.0),
        ("data.pool=processes", "data.pool", "processes"),
        ("--data.decode gpu", "data.decode", "gpu"),
        ("data.resize=pillow13", "data.resize", "pillow13"),
        ("--data.interpolation bicubic", "data.interpolation", "bicubic"),
        ("data.path='my photos,2 = x.toml'", "data.path", "my photos,2 = x.toml"),
        ("--data.path a=b.toml", "data.path", "a=b.toml"),
        ("--run.name=--odd", "run.name", "--odd"),
        ("model.name=package.module:factory", "model.name", "package.module:factory"),
        ("--optim.lr 1 optim.lr=2 --optim.lr 3", "optim.lr", 3.0),
        ("--optim.lr 1 optim.lr=2", "optim.lr", 2.0),
    ],
)
def test_a_field_is_set_in_any_of_its_spellings(line: str, name: str, value: object) -> None:
    result = train(line)
    given = value_of(result.recipe, name)
    assert given == value
    assert type(given) is type(value)
    assert result.origins[name] == "command line"


@pytest.mark.parametrize("name", [name for name in recipe_fields() if name != "data.path"])
def test_every_field_takes_its_default_from_the_line_as_help_shows_it(name: str) -> None:
    field = recipe_fields()[name]
    assert train(arguments._spell(field, "--", field.default)).recipe == Recipe()
    assert train(arguments._spell(field, "", field.default)).recipe == Recipe()


@pytest.mark.parametrize(
    "line",
    [
        "recipe.toml optim.lr=0.3 --train.compile",
        "optim.lr=0.3 recipe.toml --train.compile",
        "--train.compile --optim.lr 0.3 recipe.toml",
        "--optim.lr 0.3 --train.compile recipe.toml",
    ],
)
def test_flags_override_the_file_in_any_position(line: str, folder: Path) -> None:
    (folder / "recipe.toml").write_text("[optim]\nlr = 0.2\nmomentum = 0.8\n[train]\ncompile = false\n")
    result = train(line)
    assert result.recipe.optim.lr == 0.3
    assert result.recipe.optim.momentum == 0.8
    assert result.recipe.train.compile
    assert result.origins == {
        "optim.lr": "command line",
        "optim.momentum": "recipe.toml:3",
        "train.compile": "command line",
    }


@pytest.mark.parametrize(
    ("here", "file", "runs"),
    [
        (".", "moved/photos/recipe.toml", "moved"),
        ("moved", "photos/recipe.toml", "."),
        ("moved/photos", "recipe.toml", None),
        ("moved/photos/checkpoints", "../recipe.toml", None),
        (".", "link/recipe.toml", "."),
    ],
)
def test_the_recipe_of_a_run_folder_continues_in_that_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, here: str, file: str, runs: str | None
) -> None:
    run = folder / "moved" / "photos"
    (run / "checkpoints").mkdir(parents=True)
    (run / "recipe.toml").write_text('[run]\ndir = "/elsewhere/runs"\nname = "old"\n')
    (folder / "link").symlink_to(run)
    monkeypatch.chdir(folder / here)
    runs = str(folder / "moved") if runs is None else runs
    name = Path(file).parent.name if file.startswith("link") else "photos"

    def place(words: str) -> tuple[str, str]:
        found = train(f"{file} {words}").recipe.run
        return found.dir, found.name

    assert place("checkpoint.resume=auto") == (runs, name)
    assert place("") == (runs, "auto")
    assert place("checkpoint.resume=other") == (runs, "auto")
    assert place("checkpoint.resume=auto run.dir=new") == ("new", name)
    assert place("checkpoint.resume=auto run.name=b") == (runs, "b")
    assert train(f"{file} checkpoint.resume=auto").origins["run.dir"] == f"the folder of {file}"


def test_a_recipe_outside_of_a_run_folder_keeps_its_own_folder_and_name(folder: Path) -> None:
    (folder / "recipe.toml").write_text('[run]\ndir = "/elsewhere/runs"\nname = "old"\n')
    found = train("recipe.toml checkpoint.resume=auto").recipe.run
    assert (found.dir, found.name) == ("/elsewhere/runs", "old")


def test_a_list_stops_before_the_recipe_file(folder: Path) -> None:
    (folder / "recipe.toml").write_text("[data]\nstd = [0.5]\n")
    assert train("--data.mean 0.5 recipe.toml").recipe.data.mean == (0.5,)


CODE = {
    "model.name": '[model]\nname = "mine.nets:tiny"\n',
    "data.source": '[data]\nsource = "mine.nets:tiny"\n',
    "data.transform": '[data]\ntransform = "mine.nets:tiny"\n',
    "train.loss": '[train]\nloss = "mine.nets:tiny"\n',
    "optim.name": '[optim]\nname = "mine.nets:tiny"\n',
    "distill.teacher": '[distill]\nteacher = ["resnet18", "mine.nets:tiny"]\n',
}


@pytest.mark.parametrize("name", CODE)
def test_code_that_a_recipe_file_names_must_be_trusted(name: str, tmp_path: Path) -> None:
    """An untrusted recipe must not run code; what is on the command line is the user's own."""
    file = tmp_path / "r.toml"
    file.write_text(CODE[name])
    with pytest.raises(UserError, match=rf"r\.toml:2: {name} = .*: runs the code of mine\.nets\n") as caught:
        train(str(file))
    value = "resnet18,mine.nets:tiny" if name == "distill.teacher" else "mine.nets:tiny"
    assert f"add --trust, or repeat {name}={value} on the command line" in str(caught.value)
    trusted = train(f"{file} --trust")
    assert train(f"{file} {name}={value}").recipe == trusted.recipe
    assert train(f"{name}={value}").recipe == trusted.recipe
    assert train(f"{file} --dry-run").options.dry_run, "shows, and runs nothing"


@pytest.mark.parametrize("name", CODE)
def test_evaluation_needs_trust_for_the_code_that_it_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text(CODE[name])
    if name in ("model.name", "data.source"):
        with pytest.raises(UserError, match="runs the code of"):
            read_recipe([str(file)], "eval", RecipeOptions)
    else:
        read_recipe([str(file)], "eval", RecipeOptions)


def test_optimizers_and_losses_of_torch_need_no_trust(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[optim]\nname = "torch.optim:NAdam"\n[train]\nloss = "torch.nn:MultiMarginLoss"\n')
    assert train(str(file)).recipe.optim.name == "torch.optim:NAdam"
    for name in ("torch.hub:load", "torch:load", "torch.optim.mine:f"):
        file.write_text(f'[optim]\nname = "{name}"\n')
        with pytest.raises(UserError, match="runs the code of"):
            train(str(file))


def test_arguments_are_typed_by_their_text() -> None:
    texts = ("a:1", "b:0.5", "c:true", "d:None", "e:cifar", "f=1e-3", "g:-2", "h:x=y")
    assert keyword_arguments(texts) == {
        "a": 1,
        "b": 0.5,
        "c": True,
        "d": None,
        "e": "cifar",
        "f": 0.001,
        "g": -2,
        "h": "x=y",
    }
    assert [type(value) for value in keyword_arguments(texts[:3]).values()] == [int, float, bool]
    assert train("model.args=a:1,b:x").recipe.model.args == ("a:1", "b:x")


def test_names_of_known_packages_and_of_ours_need_no_trust(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    for known in ("resnet18", "timm/vit:tiny", "torchvision/resnet18"):
        file.write_text(f'[model]\nname = "{known}"\n')
        assert train(str(file)).recipe.model.name == known


@pytest.mark.parametrize("flag", ["--dry-run", "--dry_run"])
def test_dry_run_is_no_part_of_the_recipe(flag: str) -> None:
    assert train(f"optim.lr=1 {flag}").options.dry_run
    assert train(f"optim.lr=1 {flag}").recipe == train("optim.lr=1").recipe
    assert not train("optim.lr=1").options.dry_run


def test_a_name_that_is_not_utf8_is_rejected_before_a_run_needs_to_save_it() -> None:
    with pytest.raises(UserError, match=r"data\.path=.*not valid UTF-8"):
        Recipe.from_args(["data.path=ph\udcffoto"])


def test_describe_writes_a_recipe_file_with_the_same_recipe_and_the_origins_of_its_values(
    folder: Path,
) -> None:
    odd = folder / "my\nrecipe.toml"
    odd.write_text('[optim]\nlr = 0.2\n[run]\nname = "quo\\"te # x"\n[train]\nepochs = 10\n')
    result = read_recipe([odd.name, "optim.betas=0.8,0.9"], "train", RecipeOptions)
    text = describe(result.recipe, result.origins)
    (folder / "again.toml").write_text(text)
    assert load_recipe("again.toml").recipe == result.recipe
    lines = text.split("\n")
    assert 'lr = 0.2  # my\\nrecipe.toml:2; default "auto"' in lines
    assert "betas = [0.8, 0.9]  # command line; default [0.9, 0.999]" in lines
    assert 'epochs = 10.0  # my\\nrecipe.toml:6; default "auto"' in lines
    assert 'warmup_epochs = "auto"' in lines
    assert sum("  # " in line for line in lines) == 4


def test_reading_a_command_line_does_not_import_torch() -> None:
    code = (
        "import sys; from drumline.config.recipe import Recipe; Recipe.from_args(['optim.lr=0.2']);"
        "sys.exit(','.join({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == "\n"


@dataclass(frozen=True)
class Some:
    """Options of a command without a recipe."""

    path: str
    """A file."""
    out: str
    """Another."""
    workers: Annotated[int | Literal["auto"], Range(1, 9)] = "auto"
    """A number."""
    sizes: tuple[int, ...] = ()
    """A list."""
    kind: Literal["red", "green"] = "red"
    """A choice."""
    keep_all: bool = False
    """A switch."""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b", Some("a", "b")),
        ("a --keep-all b", Some("a", "b", keep_all=True)),
        ("--workers 3 a b --sizes 1 2", Some("a", "b", workers=3, sizes=(1, 2))),
        ("--sizes=1,2 --workers=auto a=1 b.toml", Some("a=1", "b.toml", sizes=(1, 2))),
        ("a b --kind=green --kind red", Some("a", "b")),
    ],
)
def test_the_options_of_a_command_are_read(line: str, expected: Some) -> None:
    assert read_options(line.split(), Some, "some") == expected


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["some needs PATH and OUT", "drumline some PATH OUT"]),
        ("a", ["some needs PATH and OUT, not only a"]),
        ("a b c", ["c: one argument too many", "drumline some --help"]),
        ("a b --worker 3", ["--worker: some has no such option", "did you mean --workers?"]),
        ("a b --path x", ["--path: some has no such option"]),
        ("a b -keep-all", ["did you mean --keep-all?"]),
        ("a b --zzz 1", ["`drumline some --help` lists the options"]),
        ("a b --workers", ["--workers: needs a value"]),
        ("a b --workers many", ["--workers many: expected a whole number or auto"]),
        ("a b --workers 0", ["--workers 0: too small", "give at least 1"]),
        ("a b --workers 99", ["--workers 99: too large", "give at most 9"]),
        ("a b --kind=gren", ["one of red, green", "did you mean green?"]),
        ("a b --keep-all=yes", ["--keep-all=yes: expected true or false", "for example --keep-all"]),
        ("a b --lo 1 --workers x", ["--lo: some has no such option", "--workers x"]),
    ],
)
def test_wrong_options_are_all_reported_with_a_fix(line: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        read_options(line.split(), Some, "some")
    message = str(refused.value)
    assert all(part in message for part in parts), message
    assert message.count("fix:") == (2 if "--lo" in line else 1)


def test_a_recipe_is_built_in_python_as_on_the_command_line(folder: Path) -> None:
    (folder / "recipe.toml").write_text("[optim]\nlr = 0.2\n")
    recipe = Recipe.from_args([folder / "recipe.toml", "train.epochs=3"])
    assert (recipe.optim.lr, recipe.train.epochs) == (0.2, 3.0)
    with pytest.raises(UserError, match=r"did you mean optim\.lr=1\?"):
        Recipe.from_args(["optim.le=1"])
    with pytest.raises(UserError, match="there is no such field"):
        Recipe.from_args(["--dry-run"])


def test_a_recipe_built_from_its_sections_is_checked_in_the_same_way() -> None:
    assert Recipe(optim=Optim(lr=1)).check().optim.lr == 1
    with pytest.raises(UserError) as refused:
        Recipe(optim=Optim(lr=-1.0), data=Data(batch="64")).check()  # type: ignore[arg-type]
    assert "data.batch = '64': expected a whole number" in str(refused.value)
    with pytest.raises(UserError, match=r"optim\.lr = -1\.0: too small\n  fix: give at least 0"):
        Recipe(optim=Optim(lr=-1.0)).check()


def test_a_recipe_records_the_canonical_name_of_a_method() -> None:
    recipe = Recipe.from_args(["distill.method=FitNets,kd,Mine:Own"])
    assert recipe.distill.method == ("hint", "kd", "Mine:Own")


def test_finetune_stands_for_plain_fields_that_others_override(tmp_path: Path) -> None:
    def given(*words: str) -> tuple[str, Any]:
        recipe = read_recipe(list(words), "train", RecipeOptions).recipe
        return recipe.model.weights, recipe.optim.head_lr

    assert given("finetune=w.pth") == given("--finetune", "w.pth") == ("w.pth", "auto")
    assert given("finetune=w.pth", "optim.head_lr=1") == given("optim.head_lr=1", "finetune=w.pth")
    assert given("finetune=w.pth", "optim.head_lr=1") == ("w.pth", 1.0)
    file = tmp_path / "r.toml"
    file.write_text("[optim]\nhead_lr = 5.0\n")
    assert given(str(file), "finetune=w.pth") == ("w.pth", 5.0)
    with pytest.raises(UserError, match="both set weights"):
        given("finetune=w.pth", "model.weights=v.pth")
    with pytest.raises(UserError, match="has no weights"):
        given("finetune=")
    assert given("finetune=w.pth", "finetune=v.pth")[0] == "v.pth"
    with pytest.raises(UserError, match=r"^--finetune: needs a value"):
        given("--finetune", "--data.batch", "4")
    with pytest.raises(UserError, match="-b: has no weights"):
        given("--finetune", "-b", "data.batch=4")
    named = read_recipe(["--run.name", "finetune=x"], "train", RecipeOptions).recipe
    assert (named.run.name, named.model.weights) == ("finetune=x", "")
    with pytest.raises(UserError, match="finetune: there is no such field"):
        read_recipe(["finetune=w.pth"], "eval", RecipeOptions)


@dataclass(frozen=True)
class DataOptions:
    data: str
    images: tuple[str, ...]
    source: str = "auto"
    labels: str = ""
    split_seed: int = 0


def test_a_command_that_reads_data_takes_the_fields_of_its_options() -> None:
    line = ["data.path=a=b", "x", "data.labels=l.csv", "--data.split-seed=3", "--source", "data.path=c"]
    assert read_options(line, DataOptions, "some") == DataOptions("a=b", ("x",), "data.path=c", "l.csv", 3)
    with pytest.raises(UserError, match=r"data\.batch=4: some does not take data\.batch"):
        read_options(["photos", "data.batch=4"], DataOptions, "some")


def test_other_commands_reject_the_fields_of_a_recipe() -> None:
    with pytest.raises(UserError, match=r"data\.path=y: some does not take data\.path") as rejected:
        read_options(["data.path=y"], Some, "some")
    assert rejected.value.fix == "give the path alone: y"
    with pytest.raises(UserError, match=r"optim\.lr=1: some does not take optim\.lr"):
        read_options(["optim.lr=1"], Some, "some")
    with pytest.raises(UserError, match=r"--data\.path: some has no such option"):
        read_options(["--data.path=y"], Some, "some")

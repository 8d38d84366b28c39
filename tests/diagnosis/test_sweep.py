from __future__ import annotations

from collections.abc import Sequence

import pytest

from drumline.core.errors import UserError
from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.sweep import (
    Axis,
    Row,
    as_json,
    best_of,
    combinations,
    knee_of,
    measure_rows,
    read_axes,
    settings_of,
    table,
    verdict,
)

WORKERS = Axis("data.workers", ("2", "4", "8"))
BATCH = Axis("data.batch", ("128", "64"))


def evidence(images_per_s: float) -> Evidence:
    step_ms = 64e3 / images_per_s
    values = {"step_ms": (step_ms,), "data_ms": (step_ms / 4,), "memory_mb": (512.0,), "own_cores": (1.5,)}
    return Evidence([Interval(each, 1.0, 10, images_per_s, values) for each in (10, 20)])


def row(*values: str, speed: float) -> Row:
    return Row(values, speed, 0.1, 512.0, 1.5)


def test_short_and_full_names_with_several_values_are_axes_and_the_rest_is_the_recipe() -> None:
    axes, others = read_axes(
        ["workers=2,4", "--data.batch=64,128", "recipe.toml", "size=32", "optim.betas=0.9,0.99", "--trust"]
    )
    assert axes == [Axis("data.workers", ("2", "4")), Axis("data.batch", ("64", "128"))]
    assert others == ["recipe.toml", "data.size=32", "optim.betas=0.9,0.99", "--trust"]


def test_the_path_of_a_synthetic_source_is_one_value() -> None:
    path = "data.path=classes=10,size=32,samples=64"
    assert read_axes(["workers=1,2", path])[1] == [path]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("wrkers=1,2", "data.workers=1,2"),
        ("data.wrkers=1,2", "data.workers=1,2"),
        ("name=a,b", "run.name=a,b, model.name=a,b or optim.name=a,b"),
    ],
)
def test_an_unknown_or_ambiguous_name_is_rejected_with_the_nearest(text: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        read_axes([text])
    assert fix in raised.value.fix


@pytest.mark.parametrize("text", ["workers=1,x", "workers=1,-1"])
def test_a_value_that_the_field_cannot_have_is_rejected_before_anything_runs(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.workers="):
        read_axes([text])


def test_a_sweep_without_values_is_rejected() -> None:
    with pytest.raises(UserError, match="values to try"):
        read_axes(["data.path=photos"])


def test_every_combination_is_tried_once() -> None:
    found = combinations([WORKERS, BATCH])
    assert len(set(found)) == len(found) == 6
    assert settings_of([WORKERS, BATCH], found[1]) == ["data.workers=2", "data.batch=64"]


def test_the_knee_is_the_smallest_within_five_percent_of_the_best() -> None:
    rows = [row("2", speed=900), row("4", speed=960), row("8", speed=1000)]
    assert best_of(rows) is rows[2]
    assert knee_of([WORKERS], rows) is rows[1]


def test_the_knee_compares_numbers_by_size_and_names_by_their_order() -> None:
    rows = [row("128", speed=1000), row("64", speed=990)]
    assert knee_of([BATCH], rows) is rows[1]
    pool = Axis("data.pool", ("threads", "processes"))
    rows = [row("threads", speed=990), row("processes", speed=1000)]
    assert knee_of([pool], rows) is rows[0]


def test_of_several_knees_the_fastest_counts() -> None:
    rows = [row("2", "128", speed=980), row("4", "64", speed=990), row("4", "128", speed=1000)]
    assert knee_of([WORKERS, BATCH], rows) is rows[1]


def test_a_combination_that_cannot_run_is_a_row_with_its_reason() -> None:
    def measure(settings: Sequence[str]) -> tuple[Evidence, float]:
        if settings == ["data.workers=4"]:
            raise UserError("out of memory on cuda:0\nand more", "use less")
        return evidence(100.0 if settings == ["data.workers=2"] else 200.0), 0.01

    rows = list(measure_rows([WORKERS], measure))
    assert [each.problem for each in rows] == ["", "out of memory on cuda:0", ""]
    assert rows[0].images_per_s == pytest.approx(100)
    assert rows[0].data_share == pytest.approx(0.25)
    assert (rows[0].memory_mb, rows[0].cores) == (512, 1.5)
    assert best_of(rows) is rows[2]


def test_the_table_marks_best_and_knee_and_gives_reasons_their_own_lines() -> None:
    reason = "data.batch = 9000: the training set has only 2000 samples, which is less than one batch"
    rows = [row("2", speed=900), row("4", speed=1234.4), Row(("8",), problem=reason)]
    lines = table([WORKERS], rows, 80)
    assert lines[0].split() == ["workers", "img/s", "data", "wait", "memory", "cores"]
    assert lines[2].split() == ["4", "1,234", "10", "%", "512", "MB", "1.5", "best,", "knee"]
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(" ".join(lines[3:]).split()) == f"8 {reason}"
    assert verdict([WORKERS], rows) == ["best: data.workers=4"]


def test_columns_of_fields_with_the_same_key_have_full_names() -> None:
    axes = [Axis("model.name", ("a", "b")), Axis("optim.name", ("sgd", "lars"))]
    assert table(axes, [], 80)[0].split()[:2] == ["model.name", "optim.name"]


def test_json_has_every_row_the_best_and_the_knee() -> None:
    rows = [row("2", speed=990), row("4", speed=1000), Row(("8",), problem="no memory")]
    found = as_json([WORKERS], rows)
    assert [each["settings"] for each in found["rows"]] == [{"data.workers": value} for value in "248"]
    assert found["rows"][2]["problem"] == "no memory"
    assert found["rows"][2]["images_per_s"] is None
    assert found["best"] == found["rows"][1]
    assert found["knee"] == found["rows"][0]


def test_nothing_measured_has_neither_best_nor_knee() -> None:
    rows = [Row(("2",), problem="no memory")]
    assert verdict([WORKERS], rows) == ["no combination could be measured"]
    assert as_json([WORKERS], rows)["best"] is None

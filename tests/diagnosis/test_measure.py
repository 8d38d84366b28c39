from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drumline.config.arguments import TrustOption, read_recipe
from drumline.config.toml import dump_recipe, flat_recipe
from drumline.diagnosis.evidence import Evidence, Interval
from drumline.diagnosis.measure import (
    CACHED,
    COLD,
    SYNTHETIC,
    Measured,
    fetch_stall,
    files_of,
    findings,
    lines,
    prep_stall,
    same_samples,
    synthetic_settings,
)
from drumline.diagnosis.page_cache import Dropped, drop, still_cached

DROPPED = Dropped(10, 10 << 20, 0.0)


def settings(*words: str) -> dict[str, object]:
    return flat_recipe(dump_recipe(read_recipe(words, "train", TrustOption).recipe))


def measured(
    synthetic: float, cached: float, cold: float, data: float = 0.0, is_cold: bool = False
) -> Measured:
    """Arms, and evidence in which this fraction of the time waits for data, because of one worker that decodes."""
    arms = {SYNTHETIC: synthetic, CACHED: cached, COLD: cold}
    speed = cold if is_cold else cached
    step_ms = 64e3 / speed
    values = {
        "step_ms": (step_ms,),
        "data_ms": (data * step_ms,),
        "compute_ms": ((1 - data) * step_ms,),
        "feed_make_ms": (step_ms,),
        "workers_make_ms": (step_ms,),
        "workers_make_cpu_ms": (step_ms,),
        "busy_cores": (1.0,),
        "own_cores": (1.0,),
    }
    facts = {"workers": 1, "cores": 8, "machine_cores": 8, "pool": "threads"}
    intervals = [Interval(step, step / 100, 10, speed, values, facts) for step in (10, 20)]
    recipe = settings("data.batch=64", "data.workers=1", "data.path=photos")
    return Measured(Evidence(intervals, recipe, {}, arms), dict.fromkeys(arms, 0.01), DROPPED, is_cold)


def test_the_stalls_are_fractions_of_the_slower_arms_time() -> None:
    arms = {SYNTHETIC: 1000.0, CACHED: 750.0, COLD: 600.0}
    assert prep_stall(arms) == pytest.approx(0.25)
    assert fetch_stall(arms) == pytest.approx(0.2)
    assert prep_stall({SYNTHETIC: 700.0, CACHED: 750.0}) == 0, "noise is no stall"
    assert fetch_stall({SYNTHETIC: 700.0, CACHED: 750.0}) is None


def test_a_prediction_never_exceeds_the_speed_on_synthetic_data() -> None:
    (free,) = findings(measured(10_000, 500, 480, data=0.5))
    assert free.code == "workers"
    assert free.predicted_images_per_s == pytest.approx(1000)
    (capped,) = findings(measured(800, 500, 480, data=0.5))
    assert capped.flag == free.flag
    assert capped.predicted_images_per_s == pytest.approx(800)


def test_a_stall_that_no_rule_explains_is_a_reason_if_it_is_larger_than_the_noise() -> None:
    (found,) = findings(measured(1000, 800, 700))
    assert (found.code, found.saving) == ("prep", pytest.approx(0.2))
    noisy = replace(measured(1000, 800, 700), errors={SYNTHETIC: 0.1, CACHED: 0.1})
    assert findings(noisy) == []
    assert findings(measured(1000, 950, 900)) == []


def test_reading_is_a_reason_only_if_the_data_does_not_fit_into_the_memory() -> None:
    assert findings(measured(1000, 950, 600)) == []
    (found,) = findings(measured(1000, 950, 600, is_cold=True))
    assert found.code == "fetch"
    assert "in the first epoch only" in "\n".join(lines(measured(1000, 950, 600)))
    assert "in the first epoch only" not in "\n".join(lines(measured(1000, 950, 600, is_cold=True)))


def test_the_arms_are_shown_with_their_errors_and_what_was_not_measured_is_said() -> None:
    shown = lines(measured(1510, 890, 610))
    assert [line.split()[:2] for line in shown] == [["synthetic", "data"], ["files", "in"], ["files", "on"]]
    assert "1,510 img/s ± 1.0 %" in shown[0]
    assert "prep stall 41 %" in shown[1]
    assert "fetch stall 31 %" in shown[2]
    part = measured(1510, 890, 610)
    arms = {CACHED: 890.0}
    part = replace(part, evidence=replace(part.evidence, arms=arms), notes=("files on disk: not measured",))
    assert lines(part) == ["files in memory  890 img/s ± 1.0 %", "files on disk: not measured"]


def test_synthetic_data_has_the_size_and_number_of_the_real_and_none_of_its_settings() -> None:
    recipe = settings(
        "data.labels=l.csv", "data.holdout=0.2", "data.mixup=0.2", "train.class_weights=balanced"
    )
    recipe["data.batch"] = 64
    environment = {"model": {"outputs": 7, "size": 96}, "data": {"training": {"samples": 500}}}
    found = synthetic_settings(Evidence((), recipe, environment))
    assert "data.path=classes=7,size=96,samples=500" in found
    changed = settings(
        "data.labels=l.csv", "data.holdout=0.2", "data.mixup=0.2", "train.class_weights=balanced", *found
    )
    assert changed["data.source"] == "synthetic"
    assert (changed["data.batch"], changed["data.size"]) == (64, 96)
    assert (changed["data.labels"], changed["data.holdout"], changed["train.class_weights"]) == ("", 0.0, [])
    assert changed["data.mixup"] == 0.2, "it is a part of what the model computes"


def test_the_cached_arm_sees_only_what_the_cold_arm_has_read() -> None:
    def interval(step: int) -> Interval:
        return Interval(step, step / 100, 10, 64.0, {"step_ms": (1.0,)})

    part = same_samples(Evidence([interval(10), interval(40)]))
    assert part(interval(40))
    assert not part(interval(50))
    whole = same_samples(Evidence([interval(10), interval(95)]))
    assert whole(interval(500)), "it has read a whole epoch"
    assert same_samples(Evidence(()))(interval(500))


def test_the_files_of_the_data_are_found_for_each_source(tmp_path: Path) -> None:
    (tmp_path / "photos/train/a").mkdir(parents=True)
    (tmp_path / "photos/train/a/1.jpg").touch()
    (tmp_path / "labels.csv").touch()
    photos = tmp_path / "photos"
    assert files_of(settings(f"data.path={photos}")) == [photos]
    assert files_of(settings(f"data.labels={tmp_path / 'labels.csv'}")) == [tmp_path]
    assert files_of(settings(f"data.path={photos}", "data.source=mine:code")) == [photos]
    assert files_of(settings("data.path=option", "data.source=mine:code")) == []
    assert files_of(settings()) is None, "arrays are read once"


def test_dropped_files_are_no_longer_in_memory(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    files = [tmp_path / "inside" / str(number) for number in range(5)]
    for file in files:
        file.write_bytes(b"x" * 100_000)
    found = drop([tmp_path])
    assert (found.files, found.bytes) == (5, 500_000)
    cached = still_cached(files)
    if cached is None:
        assert not found.worked, "a file system that does not tell"
        return
    assert found.worked == (cached <= 0.1)
    for file in files:
        file.read_bytes()
    assert still_cached(files) == 1.0


def test_nothing_to_drop_is_not_taken_for_cold() -> None:
    assert not Dropped(0, 0, None).worked
    assert not Dropped(5, 100, None).worked
    assert not Dropped(5, 100, 1.0).worked

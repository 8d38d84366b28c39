"""Every guard: a plain DDP script with the mistake in it, two real processes over gloo, and the message read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.guards.scripts_run import SCRIPTS, run_script

LINES = (SCRIPTS / "mistakes.py").read_text().splitlines()


def line_of(text: str) -> str:
    """`mistakes.py:LINE: ` and the line itself, as a finding quotes it."""
    (number,) = [number for number, line in enumerate(LINES, 1) if line.strip() == text]
    return f"mistakes.py:{number}: `{text}`"


FOUND = {
    # mistake: guard, step, words that the message must hold
    "module-call": (
        "bypass",
        1,
        ["around its DDP wrapper", line_of("out = model.module(x)"), "calls Net directly"],
    ),
    "submodule-call": (
        "bypass",
        1,
        [line_of("out = net.head(F.relu(net.norm(net.conv(x))).flatten(1))"), "calls Conv2d 'conv' directly"],
    ),
    "unwrapped": (
        "bypass",
        1,
        ["not wrapped in DistributedDataParallel", "model = DistributedDataParallel(model)"],
    ),
    "no-sync": ("bypass", 1, ["no_sync()", "gradient of 'conv.weight' differs on ranks 0, 1"]),
    "gradient-changed": ("bypass", 1, ["something changed them afterwards", "'head.bias'"]),
    "drift": ("drift", 1, ["parameter 'conv.weight' differs on ranks 0, 1", "before wrapping in DDP"]),
    "late-drift": ("drift", 8, ["'head.weight'", "(equal at step 4)"]),
    "rate": ("drift", 1, ["param_groups[0]['lr']", "equally on every rank"]),
    "same-samples": ("same-samples", 1, ["ranks 0, 1 got equal inputs twice in a row", "DistributedSampler"]),
    "same-ids": ("same-samples", 1, ["ranks 0 and 1 share 8 sample ids"]),
    "unused": ("parameters", 1, ["had no gradient", "'extra.weight', 'extra.bias'"]),
    "strangers": ("parameters", 1, ["not in the model", "params'][4]", "(10, 144)"]),
    "teacher-trained": ("teacher", 1, ["the optimizer trains the teacher", "'conv.weight'"]),
    "teacher-train-mode": ("teacher", 1, ["the teacher is in train mode", "teacher.eval()"]),
    "left-in-eval": ("eval-mode", 7, ["trained in eval mode", "model.train()"]),
    "bad-batch": ("non-finite", 5, ["the batch itself is not finite", "where: rank 1", "saved"]),
    "bad-layer": ("non-finite", 5, ["the output of Conv2d 'conv' is the first", "where: rank 1"]),
    "bad-loss": ("non-finite", 5, ["the loss or its gradient is not", "where: rank 1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FOUND)
def test_a_mistake_stops_every_rank_with_the_same_words(mistake: str) -> None:
    guard, step, words = FOUND[mistake]
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes == [1, 1]
    for rank in (0, 1):
        told = outcome.finding(rank)
        assert told.startswith(f"drumline guard [{guard}]"), told
        assert re.search(rf"since: step {step}\b", told), told
        for word in words:
            assert word in told, told
        assert "fix: " in told
        assert "done" not in outcome.out[rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "guard", "words"),
    [
        ("buffers", "buffers", ["'norm.running_mean'", "broadcast_buffers=True"]),
        ("set-epoch", "set-epoch", ["in all of 2 passes", "noticed at step 7", "set_epoch(epoch)"]),
        ("frozen-norms", "frozen-norms", ["every BatchNorm layer (1) is in eval mode", "since: step 7"]),
        ("loss-parameter", "bypass", ["not in the DDP model", "param_groups[0]['params'][6]"]),
        ("outside", "parameters", ["no optimizer holds it", "'head.bias'"]),
        ("teacher-gradients", "teacher", ["backward reaches the teacher", "torch.no_grad()"]),
        ("past-end", "schedule", ["T_max=3", "has been stepped 4 times", "rises again", "since: step 5"]),
        ("dead-rate", "schedule", ["rate is 0", "since: step 5"]),
        ("scheduler-early", "schedule", ["before optimizer.step()", "since: step 1"]),
        ("never-stepped", "schedule", ["never stepped in 13 steps", "CosineAnnealingLR"]),
        ("busy", "waiting", ["rank 1 keeps the others waiting", line_of("time.sleep(5)")]),
    ],
)
def test_what_may_be_meant_is_told_and_not_stopped(mistake: str, guard: str, words: list[str]) -> None:
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes == [0, 0]
    told = outcome.err[0]
    assert told.count(f"drumline guard [{guard}]") == 1
    assert f"silence: ignore=['{guard}']" in told
    for word in words:
        assert word in told, told


@pytest.mark.slow
def test_a_warning_lets_the_script_go_on_and_is_said_once() -> None:
    outcome = run_script("mistakes.py", 2, "module-call", "warn")
    assert outcome.codes == [0, 0]
    assert outcome.err[0].count("drumline guard [bypass]") == 1
    assert outcome.out[0] == "done after 24\n"


@pytest.mark.slow
def test_three_ranks_name_the_one_that_differs() -> None:
    outcome = run_script("mistakes.py", 3, "drift")
    assert "parameter 'conv.weight' differs on rank 1\n" in outcome.finding(2).replace("[rank2]:", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "off"), [("padded", "2 samples twice"), ("dropped", "1 sample left out")]
)
def test_an_evaluation_that_counts_wrong_says_by_how_many(mistake: str, off: str) -> None:
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes == [1, 1]
    assert off in outcome.finding(0)
    assert "guard [evaluation]" in outcome.finding(1)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["short", "short-exit", "short-barrier"])
def test_unequal_numbers_of_steps_end_within_seconds_and_say_who_is_where(mistake: str) -> None:
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes[0] == 1
    told = outcome.finding(0)
    assert "guard [steps]: ranks take unequal numbers of steps" in told
    assert "rank 0 waits in step 6" in told
    assert "`out = model(x)`" in told or mistake == "short-exit"
    if mistake == "short-barrier":
        assert f"rank 1 is past step 5 at {SCRIPTS}/{line_of('dist.barrier()')}" in told
        assert "guard [steps]" in outcome.finding(1)
    else:
        assert "rank 1 finished after step 5" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "skipped"), [("skipped-batch", 3), ("skipped-update", 2), ("skipped-late", 6)]
)
def test_a_rank_that_skips_a_step_is_named_and_every_rank_ends(mistake: str, skipped: int) -> None:
    """One rank waits in the guard, the other in a collective: neither would ever go on."""
    outcome = run_script("mistakes.py", 2, mistake, seconds=40)
    assert all(code > 0 for code in outcome.codes), outcome.codes
    told = outcome.finding(0)
    assert f"guard [steps]: rank 1 skipped step {skipped}: 2 forward passes in it, 1 on rank 0" in told
    assert "on every rank" in told
    assert "guard [steps]" in outcome.finding(1)


@pytest.mark.slow
def test_a_forked_child_is_compared_when_it_ends() -> None:
    outcome = run_script("forked.py", 2)
    assert outcome.out[0].startswith("done"), outcome.err[0]
    assert "guard [drift]" in outcome.finding(0)
    assert "'bias'" in outcome.finding(0) or "'weight'" in outcome.finding(0)


@pytest.mark.slow
def test_without_a_watching_thread_a_skipped_step_does_not_hang_the_guard() -> None:
    """Ranks that wait for one that is a step behind give the comparison up; that one compares and is named."""
    outcome = run_script("mistakes.py", 2, "skipped-late", "unwatched", seconds=60)
    assert all(code > 0 for code in outcome.codes), (outcome.codes, outcome.err)
    assert "guard [waiting]: ranks were not compared at step 8" in outcome.err[0]
    assert "guard [steps]: rank 1 skipped step 6" in outcome.finding(1)


def test_every_mistake_of_the_script_is_tested() -> None:
    named = set(re.findall(r'mistake (?:==|!=) "([a-z0-9-]+)"', "\n".join(LINES)))
    tested = Path(__file__).read_text()
    assert [name for name in sorted(named) if f'"{name}"' not in tested] == []

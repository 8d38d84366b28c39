"""Every guard: a plain DDP script with the mistake, on two real processes over gloo, and its message."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.guards.scripts_run import SCRIPTS, Outcome, run_script, run_scripts

LINES = (SCRIPTS / "mistakes.py").read_text().splitlines()


def line_of(text: str) -> str:
    """`mistakes.py:LINE: ` and the line itself, as a finding quotes it."""
    (number,) = [number for number, line in enumerate(LINES, 1) if line.strip() == text]
    return f"mistakes.py:{number}: `{text}`"


FOUND = {
    # mistake: guard, step, texts that the message must contain
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


HANGS = ("short", "short-exit", "short-barrier", "skipped-batch", "skipped-update", "skipped-late")
"""Ranks wait for seconds here, so these run at the same time."""


@cache
def hanging() -> dict[str, Outcome]:
    return dict(zip(HANGS, run_scripts("mistakes.py", 2, [[name] for name in HANGS]), strict=True))


@cache
def found(first: int) -> dict[str, Outcome]:
    """Three mistakes at the same time: their ranks often wait for each other."""
    names = list(FOUND)[first : first + 3]
    return dict(zip(names, run_scripts("mistakes.py", 2, [[name] for name in names]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FOUND)
def test_a_mistake_stops_every_rank_with_the_same_message(mistake: str) -> None:
    guard, step, texts = FOUND[mistake]
    outcome = found(list(FOUND).index(mistake) // 3 * 3)[mistake]
    assert outcome.codes == [1, 1]
    for rank in (0, 1):
        printed = outcome.finding(rank)
        assert printed.startswith(f"drumline guard [{guard}]"), printed
        assert re.search(rf"since: step {step}\b", printed), printed
        for text in texts:
            assert text in printed, printed
        assert "fix: " in printed
        assert "done" not in outcome.out[rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "guard", "texts"),
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
def test_mistakes_that_may_be_intended_warn_and_do_not_stop(
    mistake: str, guard: str, texts: list[str]
) -> None:
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes == [0, 0]
    printed = outcome.err[0]
    assert printed.count(f"drumline guard [{guard}]") == 1
    assert f"silence: ignore=['{guard}']" in printed
    for text in texts:
        assert text in printed, printed


@pytest.mark.slow
def test_a_warning_lets_the_script_continue_and_is_printed_once() -> None:
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
def test_a_wrong_evaluation_count_is_reported_with_the_difference(mistake: str, off: str) -> None:
    outcome = run_script("mistakes.py", 2, mistake)
    assert outcome.codes == [1, 1]
    assert off in outcome.finding(0)
    assert "guard [evaluation]" in outcome.finding(1)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["short", "short-exit", "short-barrier"])
def test_unequal_numbers_of_steps_end_within_seconds_and_name_where_each_rank_is(mistake: str) -> None:
    outcome = hanging()[mistake]
    assert outcome.codes[0] == 1
    printed = outcome.finding(0)
    assert "guard [steps]: ranks take unequal numbers of steps" in printed
    assert "rank 0 waits in step 6" in printed
    assert "`out = model(x)`" in printed or mistake == "short-exit"
    if mistake == "short-barrier":
        assert f"rank 1 is past step 5 at {SCRIPTS}/{line_of('dist.barrier()')}" in printed
        assert "guard [steps]" in outcome.finding(1)
    else:
        assert "rank 1 finished after step 5" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "skipped"), [("skipped-batch", 3), ("skipped-update", 2), ("skipped-late", 6)]
)
def test_a_rank_that_skips_a_step_is_named_and_every_rank_ends(mistake: str, skipped: int) -> None:
    """One rank waits in the guard, the other in a collective: neither would ever continue."""
    outcome = hanging()[mistake]
    assert all(code > 0 for code in outcome.codes), outcome.codes
    printed = outcome.finding(0)
    assert f"guard [steps]: rank 1 skipped step {skipped}: 2 forward passes in it, 1 on rank 0" in printed
    assert "on every rank" in printed
    assert "guard [steps]" in outcome.finding(1)


@pytest.mark.slow
def test_a_forked_child_is_compared_when_it_ends() -> None:
    outcome = run_script("forked.py", 2)
    assert outcome.out[0].startswith("done"), outcome.err[0]
    assert "guard [drift]" in outcome.finding(0)
    assert "'bias'" in outcome.finding(0) or "'weight'" in outcome.finding(0)


@pytest.mark.slow
def test_without_a_watching_thread_a_skipped_step_does_not_hang_the_guard() -> None:
    """Ranks that wait for one that is a step behind give up the comparison; that one compares and is named."""
    outcome = run_script("mistakes.py", 2, "skipped-late", "unwatched", seconds=60)
    assert all(code > 0 for code in outcome.codes), (outcome.codes, outcome.err)
    assert "guard [waiting]: ranks were not compared at step 8" in outcome.err[0]
    assert "guard [steps]: rank 1 skipped step 6" in outcome.finding(1)


def test_every_mistake_of_the_script_is_tested() -> None:
    named = set(re.findall(r'mistake (?:==|!=) "([a-z0-9-]+)"', "\n".join(LINES)))
    tested = Path(__file__).read_text()
    assert [name for name in sorted(named) if f'"{name}"' not in tested] == []

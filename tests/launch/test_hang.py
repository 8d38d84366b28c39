"""Which rank hangs and which one the others wait for; stacks of a hung process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from drumline.core.heartbeat import Beat, Phase
from drumline.launch.hang import (
    LINES,
    Limits,
    Pulse,
    Sign,
    Stacks,
    blocking_rank,
    describe,
    format_stacks,
    innermost,
    is_busy,
    is_hung,
    is_stopped,
    verdict,
)

LIMITS = Limits(hang=3.0, starting=60.0)


def sign(rank: int, silent: float, phase: Phase = Phase.STEPPING, step: int = 10, **more: float) -> Sign:
    return Sign(rank, Beat(step, step, phase), silent, **more)


def test_silence_beyond_the_limit_is_a_hang() -> None:
    assert not is_hung([sign(0, 2.9), sign(1, 2.9)], LIMITS)
    assert is_hung([sign(0, 2.9), sign(1, 3.1)], LIMITS)
    assert not is_hung([sign(0, 1e6)], Limits(hang=0.0, starting=60.0))


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.SAVING, Phase.ENDING])
def test_what_may_take_long_has_a_limit_of_its_own_and_others_may_wait_for_it(phase: Phase) -> None:
    assert not is_hung([sign(0, 59, phase), sign(1, 59)], LIMITS)
    assert is_busy([sign(0, 59, phase), sign(1, 59)], LIMITS)
    assert is_hung([sign(0, 61, phase), sign(1, 59)], LIMITS)
    assert not is_hung([sign(1, 59)], LIMITS, busy_elsewhere=True)


def test_a_stopped_process_has_hung_in_any_phase() -> None:
    assert is_hung([sign(0, 3.1, Phase.SAVING, stopped=3.1), sign(1, 3.1)], LIMITS, busy_elsewhere=True)
    assert not is_hung([sign(0, 0.1, stopped=0.1)], LIMITS)


def test_slow_steps_get_time_in_proportion() -> None:
    assert not is_hung([sign(0, 11.9, slowest=4.0)], LIMITS)
    assert is_hung([sign(0, 12.1, slowest=4.0)], LIMITS)


def test_a_pulse_knows_silence_and_the_slowest_step() -> None:
    pulse = Pulse(0, now=0.0)
    assert pulse.update(Beat(1, 0, Phase.STARTING), False, 0.1).silent == 0
    first = pulse.update(Beat(2, 1, Phase.STEPPING), False, 0.9)
    assert (first.silent, first.slowest) == (0, pytest.approx(0.8))
    assert pulse.update(Beat(2, 1, Phase.STEPPING), False, 1.8).silent == pytest.approx(0.9)
    saving = pulse.update(Beat(3, 1, Phase.SAVING), False, 2.7)
    after = pulse.update(Beat(4, 2, Phase.STEPPING), False, 3.6)
    assert saving.slowest == after.slowest == pytest.approx(0.8)


def test_time_in_which_the_launcher_stood_still_does_not_count() -> None:
    pulse = Pulse(0, now=0.0)
    pulse.update(Beat(1, 1, Phase.STEPPING), False, 0.5)
    assert pulse.update(Beat(1, 1, Phase.STEPPING), True, 600.5).silent == 0
    now = pulse.update(Beat(1, 1, Phase.STEPPING), True, 601.0)
    assert (now.silent, now.stopped) == (0.5, 0.5)


def test_the_culprit_is_stopped_or_behind_or_elsewhere_in_the_code() -> None:
    alike = [sign(rank, 4.0) for rank in range(3)]
    assert blocking_rank([*alike[:2], sign(2, 4.0, stopped=4.0)], {})[0] == 2
    assert blocking_rank([sign(0, 4.0), sign(1, 4.0, step=9)], {}) == (1, "it has taken the fewest steps, 9")
    assert blocking_rank(alike, {0: "reduce", 1: "read", 2: "reduce"})[0] == 1
    assert blocking_rank(alike, {0: "reduce", 1: "reduce", 2: "reduce"})[0] is None
    assert (
        blocking_rank(alike[:2], {0: "reduce", 1: "read"})[0] is None
    )  # which of the two waits is anybody's guess


def test_a_machine_further_behind_is_blamed_instead() -> None:
    signs = [sign(0, 4.0), sign(1, 4.0)]
    assert not verdict(signs, {}, [10], 0.0).follows
    assert verdict(signs, {}, [9], 0.0).follows
    assert not verdict([sign(0, 4.0, stopped=4.0)], {}, [9], 0.0).follows


def test_a_rank_that_does_not_answer_is_reported_as_such() -> None:
    assert (
        describe(sign(0, 4.0), "")
        == "rank 0: stepping, 10 steps done, silent for 4.0 s\n  no answer to the request for its stack"
    )


HANGING = """
import os, threading, time
from drumline.launch.hang import answer_signal
answer_signal(os.environ)
def under_the_bed():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
under_the_bed()
"""


def test_a_process_writes_its_stacks_each_time_it_is_asked() -> None:
    stacks = Stacks(1)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        env=os.environ | stacks.variable(0),
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(2):
            answer = stacks.ask({0: process.pid})[0]
            lines = format_stacks(answer)
            assert lines[0] == "main thread:"
            assert re.fullmatch(r"  <string>:[67] in under_the_bed", lines[1])
            assert lines.count("another thread:") == 1
            assert innermost(answer) == lines[1].strip()
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not is_stopped(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(process.pid)
        assert stacks.ask({0: process.pid}) == {0: ""}
    finally:
        process.kill()
        process.communicate()
        stacks.close()


def test_stacks_are_shortened() -> None:
    frames = "\n".join(
        f'  File "/x/lib/python3.11/site-packages/torch/a.py", line {n} in f' for n in range(30)
    )
    answer = "\n".join(f"Thread 0x{n} (most recent call first):\n{frames}\n" for n in range(20))
    lines = format_stacks(answer)
    assert len(lines) == LINES
    assert lines[0] == "main thread:"
    assert lines[1] == "  torch/a.py:0 in f"
    assert lines[17] == "  ... 14 more"
    assert lines[-1].endswith("more lines")
    assert format_stacks("") == []

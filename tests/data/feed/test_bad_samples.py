"""Broken samples counted once each, listed in one order, and too many of them refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import UserError
from drumline.data.feed.bad_samples import SHOWN, BadSamples
from drumline.data.feed.sample import BadSample


def test_a_sample_counts_once_and_keeps_its_first_words() -> None:
    bad_samples = BadSamples("training", 100, 0.02)
    for epoch in range(50):
        bad_samples.add([BadSample(7, f"seen in epoch {epoch}"), BadSample(3, "file 3 is cut off")])
    assert bad_samples.bad == {7: "seen in epoch 0", 3: "file 3 is cut off"}
    assert bad_samples.lines() == ["training\t3\tfile 3 is cut off", "training\t7\tseen in epoch 0"]


@pytest.mark.parametrize(
    ("samples", "share", "limit"),
    [(100, 0.02, 2), (50, 0.01, 1), (100, 0.29, 29), (100, 0.07, 7), (10, 0.0, 0), (10, 1.0, 10)],
)
def test_as_many_as_allowed_pass_and_one_more_is_refused(samples: int, share: float, limit: int) -> None:
    bad_samples = BadSamples("training", samples, share)
    assert bad_samples.limit == limit
    bad_samples.add(BadSample(sample, f"file {sample}") for sample in range(limit))
    with pytest.raises(UserError, match=f"{limit + 1} of {samples} training samples") as caught:
        bad_samples.add([BadSample(samples, "one more")])
    assert "data.bad_limit" in caught.value.what
    assert f"allows {limit}" in caught.value.what
    assert bad_samples.some() in caught.value.what
    assert "drumline verify" in caught.value.fix


def test_nothing_broken_is_never_too_much() -> None:
    bad_samples = BadSamples("training", 5, 0.0)
    bad_samples.add([])
    assert bad_samples.lines() == []
    assert bad_samples.some() == ""


@given(parts=st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=4))
def test_the_list_is_the_same_however_processes_shared_the_samples(parts: list[list[int]]) -> None:
    everyone = BadSamples("training", 100, 1.0)
    everyone.add(BadSample(sample, f"file {sample}") for part in parts for sample in part)
    ranks = [BadSamples("training", 100, 1.0) for _ in parts]
    for rank, part in zip(ranks, parts, strict=True):
        rank.add(BadSample(sample, f"file {sample}") for sample in part)
    merged = BadSamples("training", 100, 1.0)
    merged.merge([rank.bad for rank in ranks])
    assert merged.lines() == everyone.lines()
    assert merged.lines() == [f"training\t{s}\tfile {s}" for s in sorted({s for part in parts for s in part})]


def test_merging_refuses_what_is_too_much_together() -> None:
    bad_samples = BadSamples("evaluation", 100, 0.02)
    with pytest.raises(UserError, match="3 of 100 evaluation samples"):
        bad_samples.merge([{1: "a", 2: "b"}, {2: "b"}, {9: "c"}])


def test_a_message_shows_the_first_and_counts_the_rest() -> None:
    bad_samples = BadSamples("training", 2000, 1.0)
    bad_samples.add(BadSample(sample, f"file {sample}") for sample in reversed(range(1234 + SHOWN)))
    assert bad_samples.some().startswith("file 0; file 1; ")
    assert bad_samples.some().endswith(f"file {SHOWN - 1}; and 1,234 more")

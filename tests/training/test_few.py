"""An evaluation set that leaves ranks without a batch: every layout goes on, and counts each sample once."""

from __future__ import annotations

import pytest

from tests.training import few_ranks

pytestmark = pytest.mark.slow


def test_every_layout_trains_on_and_scores_each_sample_once_where_ranks_have_no_batch() -> None:
    found = few_ranks.results()
    for name in few_ranks.LAYOUTS:
        samples, correct, loss = found[0][name]
        assert samples == few_ranks.SCORED
        assert correct == found[0]["ddp"][1]
        assert loss == pytest.approx(found[0]["ddp"][2], rel=1e-5)
    assert all(each == found[0] for each in found)


def test_a_run_resumed_after_such_an_evaluation_has_the_same_bits() -> None:
    assert few_ranks.results()[0]["resumed"]


def test_a_finished_run_a_teacher_and_weights_are_scored_the_same_way() -> None:
    found = few_ranks.results()[0]
    assert found["finished fsdp"] == found["scored"] == found["fsdp"]
    assert found["taught"] == few_ranks.SCORED
    assert found["teacher"] == found["fsdp"][1] / few_ranks.SCORED

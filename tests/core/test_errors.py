"""Errors for the user: their text, their code, and that they survive a pickle, as between processes."""

from __future__ import annotations

import pickle

import pytest

from drumline.core.errors import LostError, UserError


@pytest.mark.parametrize("kind", [UserError, LostError])
def test_an_error_keeps_its_parts_across_processes(kind: type[UserError]) -> None:
    error = pickle.loads(
        pickle.dumps(kind("optim.lr = -1: too small", "give at least 0", code="out-of-range"))
    )
    assert type(error) is kind
    assert (error.what, error.fix, error.code) == (
        "optim.lr = -1: too small",
        "give at least 0",
        "out-of-range",
    )
    assert str(error) == "optim.lr = -1: too small\n  fix: give at least 0"


def test_the_text_of_an_error_does_not_show_its_code() -> None:
    assert str(UserError("data.path is empty", code="empty")) == "data.path is empty"

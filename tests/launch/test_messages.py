"""The secret that launchers share, and messages that are not signed with it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from drumline.core.errors import UserError
from drumline.launch.messages import secret_file, shared_secret


def test_a_variable_comes_first_and_must_be_hard_to_guess(tmp_path: Path) -> None:
    env = {"DRUMLINE_SECRET": "0123456789abcdef", "HOME": str(tmp_path)}
    assert shared_secret(env) == b"0123456789abcdef"
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="could be guessed"):
        shared_secret({"DRUMLINE_SECRET": "short"})


def test_a_file_is_made_once_for_the_user_alone(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "DRUMLINE_SECRET": ""}
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(shared_secret(env))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert len(found[0]) == 64
    path = tmp_path / ".config/drumline/secret"
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert shared_secret(env) == found[0]
    other = env | {"XDG_CONFIG_HOME": str(tmp_path / "other")}
    assert secret_file(other) == tmp_path / "other/drumline/secret"
    assert shared_secret(other) != found[0]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_file_that_others_can_read_or_write_is_rejected(tmp_path: Path, mode: int) -> None:
    env = {"HOME": str(tmp_path)}
    shared_secret(env)
    secret_file(env).chmod(mode)
    with pytest.raises(UserError, match="other users") as caught:
        shared_secret(env)
    assert "chmod 600" in caught.value.fix


def test_without_a_folder_for_the_file_the_error_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("a file")
    with pytest.raises(UserError, match="cannot use") as caught:
        shared_secret({"HOME": str(tmp_path)})
    assert "DRUMLINE_SECRET" in caught.value.fix


def test_an_empty_secret_file_is_reported(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    shared_secret(env)
    secret_file(env).write_text("")
    with pytest.raises(UserError, match="holds no secret"):
        shared_secret(env)

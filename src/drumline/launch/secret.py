"""The secret that the launchers of one run share: it proves that a message comes from one of them.

Promises: DRUMLINE_SECRET where it is set; otherwise a file in the user's configuration folder, which machines with a
common home share by themselves, created with random content at its first use. Rejects a file that others can read.
One machine alone never asks for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from drumline.core.errors import UserError

VARIABLE = "DRUMLINE_SECRET"
SHORTEST = 16


def shared_secret(env: Mapping[str, str]) -> bytes:
    """The secret of this user's runs."""
    if given := env.get(VARIABLE):
        if len(given) < SHORTEST:
            raise UserError(
                f"{VARIABLE} has {len(given)} characters and could be guessed",
                f"use {SHORTEST} or more, such as the output of `openssl rand -hex 32`, the same on each machine",
            )
        return given.encode()
    path = secret_file(env)
    try:
        return _read(path) if path.exists() else _create(path)
    except OSError as error:
        raise UserError(
            f"cannot use {path} for the secret that the machines of a run share ({error.strerror or error})",
            f"set {VARIABLE} to the same random text on each machine",
        ) from error


def secret_file(env: Mapping[str, str]) -> Path:
    """Where the secret is kept."""
    base = env.get("XDG_CONFIG_HOME") or ""
    folder = Path(base) if Path(base).is_absolute() else Path(env.get("HOME") or Path.home()) / ".config"
    return folder / "drumline/secret"


def different_secret(place: str, env: Mapping[str, str]) -> UserError:
    """Two machines that do not have the same secret."""
    return UserError(
        f"the machines that meet at {place} have different secrets",
        f"copy {secret_file(env)} from one machine to the others (mode 600), or set {VARIABLE} to the same random "
        "text on each",
    )


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if state.st_mode & 0o077 or state.st_uid != os.geteuid() or not stat.S_ISREG(state.st_mode):
            raise UserError(
                f"{path} holds a secret, and other users can read or replace it",
                f"chmod 600 {path}, as its owner; if others may have read it, delete it on each machine",
            )
        content = file.read(4096).strip()
    if len(content) < SHORTEST:
        raise UserError(f"{path} holds no secret", "delete it; the next run creates a new one")
    return content


def _create(path: Path) -> bytes:
    """Appears whole or not at all; of two that try at once, the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".secret-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):  # another launcher was first
            os.link(draft, path)
    finally:
        draft.unlink()
    return _read(path)

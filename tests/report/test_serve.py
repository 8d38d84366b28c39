"""The server answers for one page, to those who may see it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from drumline.core.errors import UserError
from drumline.report.serve import PageServer
from tests.report.run_folder import make_run


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(runs, host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: PageServer, path: str = "/", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(
        "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_it_serves_the_page_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    with serving(run) as server:
        status, text, headers = get(server)
        assert status == 200
        assert "78 k parameters" in text
        assert "connect-src 'self'" in text
        paths = ("/log.txt", "/../log.txt", "/%2e%2e/log.txt", f"/{run}/log.txt", "//x", "/report.html")
        for path in paths:
            assert get(server, path)[0] == 404
        assert get(server, If_None_Match=headers["ETag"])[:2] == (304, "")
        with (run / "log.txt").open("a") as log:
            log.write("2026-01-02 11:00:00  started: again\n")
        status, text, changed = get(server, If_None_Match=headers["ETag"])
        assert (status, changed["ETag"] != headers["ETag"]) == (200, True)
        assert "killed" in text


def test_another_site_cannot_read_it_by_a_name_that_leads_here(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "a")) as server:
        assert get(server, Host="evil.example")[0] == 403
        assert get(server, Host="localhost:99")[0] == 200
        assert get(server, Host="[")[0] == 403
        assert get(server, "//[x")[0] in (403, 404)


def test_a_browser_that_leaves_and_a_run_that_is_deleted_print_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [BrokenPipeError("gone"), ValueError("odd\x1b[2J file")]
    with serving(make_run(tmp_path / "a")) as server:
        for error in errors:
            with monkeypatch.context() as patch:
                patch.setattr(server, "current", Mock(side_effect=error))
                with pytest.raises(http.client.RemoteDisconnected):
                    get(server)
        assert get(server)[0] == 200
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "gone" not in said
    assert said.count("odd") == 1
    assert "\x1b" not in said


def test_at_other_addresses_a_token_is_needed(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "a"), host="0.0.0.0") as server:
        assert len(server.token) >= 20
        assert f"?token={server.token}" in server.url
        for path in ("/", "/?token=", "/?token=x", f"/?token={server.token}x", "/?token=%ff"):
            status, text, _ = get(server, path)
            assert (status, "parameters" in text) == (403, False)
        assert get(server, f"/?token={server.token}", Host="anything")[0] == 200


def test_a_port_in_use_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use") as error:
            PageServer([make_run(tmp_path / "a")], "127.0.0.1", port)
        assert "--port" in str(error.value)


def test_a_foreign_address_is_an_error() -> None:
    with pytest.raises(UserError, match="not an address of this machine"):
        PageServer([], "192.0.2.1", 0)


def test_interrupting_the_command_ends_it_cleanly(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    command = [sys.executable, "-m", "drumline", "report", "a", "--serve", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as server:
        assert server.stderr is not None
        assert "http://127.0.0.1:" in server.stderr.readline()
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=60)
    assert server.returncode == 0
    assert "Traceback" not in err
    assert '"url"' in out.splitlines()[-1]

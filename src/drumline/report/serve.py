"""Serves the page of runs while they train. The page in the browser updates itself.

Promises: answers for this page only, whatever the path, and reads no file that a request names. On this machine's own
address, it answers only requests that were made to that address; on any other, only those with the token of its URL.
The page is made again only after a file of a run has changed.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from drumline.core import lock
from drumline.core.errors import UserError
from drumline.core.text import printable
from drumline.report.page import page, read_runs
from drumline.report.record import FOLDER

LOOPBACK = ("localhost", "127.0.0.1", "::1")
QUIET_S = 10.0
"""How long a connection may be silent."""


class PageServer(ThreadingHTTPServer):
    """The server of one page. `url` is its address, with the token if one is needed."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, runs: Sequence[Path], host: str, port: int) -> None:
        self._runs, self._host = tuple(runs), host
        self._busy = threading.Lock()
        self._made: tuple[str, bytes] = ("", b"")
        self.token = "" if host in LOOPBACK else secrets.token_urlsafe(18)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error

    @property
    def url(self) -> str:
        everywhere = self._host in ("", "0.0.0.0", "::")
        name = socket.gethostname() if everywhere else self._host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def admits(self, path: str, host: str) -> bool:
        """Whether a request may see the page. A page of another site that a name was made to lead here cannot."""
        try:
            if not self.token:
                return (urlsplit(f"//{host}").hostname or "") in LOOPBACK
            given = parse_qs(urlsplit(path).query).get("token", [""])[0]
        except ValueError:  # no address
            return False
        return hmac.compare_digest(given.encode(), self.token.encode())

    def current(self) -> tuple[str, bytes]:
        """The page, and the tag of its state."""
        with self._busy:
            tag = f'"{hash(self._state()):x}"'
            if tag != self._made[0]:
                self._made = tag, page(read_runs(self._runs), live=True).encode()
            return self._made

    def handle_error(self, request: object, client_address: object) -> None:
        """One line instead of a traceback, and nothing for a browser that has left."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(printable(f"the page cannot be made: {type(error).__name__}: {error}"), file=sys.stderr)

    def _state(self) -> tuple[object, ...]:
        """What changes when a run does: the times and sizes of its files, and whether it is under way."""
        files = [
            file for run in self._runs for folder in (run, run / FOLDER) for file in sorted(folder.glob("*"))
        ]
        return (
            *((str(file), *_stamp(file)) for file in files),
            *(lock.is_held(run) for run in self._runs),
        )


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "drumline", ""
    timeout = QUIET_S

    def do_GET(self) -> None:
        if not self.server.admits(self.path, self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"Open the address that `drumline report --serve` printed.\n")
        elif self.path.partition("?")[0] != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"Not found: this server has only one page.\n")
        else:
            tag, content = self.server.current()
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", tag)
            else:
                self._answer(HTTPStatus.OK, content, tag)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, content: bytes, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if tag else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: their addresses hold the token."""


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        return UserError(f"port {port} is in use", "choose a different one, or --port 0 for any free port")
    if error.errno == errno.EACCES:
        return UserError(f"port {port} is not permitted", "choose one above 1023, or --port 0")
    reason = error.strerror or str(error)
    return UserError(
        f"--host {printable(host)} is not an address of this machine ({reason})",
        "leave --host out to serve this machine only, or give 0.0.0.0 for all its addresses",
    )

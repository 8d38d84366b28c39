"""Launchers that exchange messages over sockets, over a folder, or not at all. No process is started."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.core.errors import UserError
from drumline.launch import cluster as clusters
from drumline.launch import hub as hubs
from drumline.launch.cluster import Cluster, Contact, NotConnected, RendezvousBackend, View
from drumline.launch.failure import Failure
from drumline.launch.hub import Client, Reply, Server, Unreachable
from drumline.launch.messages import GREETING, BadMessage, Channel, sign, verify
from drumline.launch.network import free_port
from drumline.launch.nodes import Heard, Node, Round
from drumline.launch.shared_folder import SharedFolder

SECRET = b"for tests and nothing else"


def node(letter: str, **changes: object) -> Node:
    made = Node(letter * 32, f"host-{letter}", "127.0.0.1", 7, 2, 1, 4000, launch_id=letter * 32)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[tuple[Server, int]]:
    port = free_port("127.0.0.1")
    made = Server(2, 2, 5.0, SECRET, "127.0.0.1", port)
    yield made, port
    made.close()


def test_two_launchers_join_a_round_and_receive_each_others_reports(server: tuple[Server, int]) -> None:
    here, port = server
    client = Client("127.0.0.1", port, f"127.0.0.1:{port}", SECRET)
    failure = Failure(0, "boom", time=time.monotonic() - 3)
    here.exchange(node("a", failure=failure, clock=time.time()))
    reply = client.exchange(node("b", clock=time.time() + 120))
    assert reply.round is not None
    assert set(reply.round.ids) == {"a" * 32, "b" * 32}
    reported = reply.heard["a" * 32].node.failure
    assert reported is not None
    assert abs(reported.time - failure.time) < 1
    assert 119 < reply.heard["b" * 32].ahead < 121
    assert client.exchange(node("b", state="left")).round == reply.round
    assert here.still_here() == 1
    client.close()


def test_a_different_secret_is_rejected_with_both_fixes(server: tuple[Server, int]) -> None:
    here, port = server
    with pytest.raises(UserError, match="have different secrets") as caught:
        Client("127.0.0.1", port, "there", b"some other secret").exchange(node("b"))
    assert "DRUMLINE_SECRET" in caught.value.fix
    assert "drumline/secret" in caught.value.fix
    reply = here.exchange(node("a"))
    assert reply.strangers == ("127.0.0.1",)
    assert set(reply.heard) == {"a" * 32}


def test_other_programs_are_rejected_and_delay_no_launcher(
    server: tuple[Server, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, port = server
    monkeypatch.setattr(hubs, "CALL_SECONDS", 0.5)
    greeting = GREETING + b"0" * 32 + b"\n"
    texts = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04cos\nsystem\n.",
        greeting + b"x" * 700_000,
        greeting + sign(b"foreign", "drumline tcp", {}),
    ]
    client = Client("127.0.0.1", port, "there", SECRET)
    client.exchange(node("b"))
    with contextlib.ExitStack() as open_connections:
        for text in texts * 3:
            connection = open_connections.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with contextlib.suppress(OSError):
                connection.sendall(text)
        for _ in range(100):  # silent ones, more than are accepted
            open_connections.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        begin = time.monotonic()
        assert client.exchange(node("b")).heard
        assert time.monotonic() - begin < 0.5
        time.sleep(1.0)  # until they time out
        other = Client("127.0.0.1", port, "there", SECRET)
        assert "c" * 32 in other.exchange(node("c")).heard
    assert set(here.exchange(node("a")).heard) == {letter * 32 for letter in "abc"}


def test_a_recorded_message_is_rejected_on_another_connection(server: tuple[Server, int]) -> None:
    _, port = server
    recorded: list[bytes] = []

    class Recorder(socket.socket):
        def sendall(self, data: bytes, *rest: int) -> None:  # type: ignore[override]
            recorded.append(bytes(data))
            super().sendall(data, *rest)

    with Recorder(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.connect(("127.0.0.1", port))
        deadline = time.monotonic() + 5
        channel = Channel(connection, SECRET, asks=True, deadline=deadline)
        channel.send(json.loads(json.dumps(hubs.node_to_fields(node("b"), 0.0))), deadline)
        assert channel.receive(1 << 20, deadline)["round"] is None
    with socket.create_connection(("127.0.0.1", port), 5) as other:
        other.sendall(b"".join(recorded))
        assert b"a different secret" in other.recv(1000) + other.recv(1000)


def test_a_signature_is_valid_for_one_context_only() -> None:
    line = sign(SECRET, "here", {"a": 1})
    assert verify(SECRET, "here", line) == {"a": 1}
    for secret, context, text in (
        (SECRET, "there", line),
        (b"other", "here", line),
        (SECRET, "here", line.replace(b"1", b"2")),
        (SECRET, "here", b""),
    ):
        with pytest.raises(BadMessage):
            verify(secret, context, text)


def program(answer: Callable[[socket.socket], object]) -> int:
    """Another program's port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_port_of_another_program_is_reported_at_once_or_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hubs, "CALL_SECONDS", 0.3)
    for text, why in ((b"SSH-2.0-OpenSSH\r\n", "it answers 'SSH"), (b"x" * 70_000, "without a newline")):
        talks = program(lambda connection, text=text: connection.sendall(text))
        with pytest.raises(
            UserError, match=rf"the program at there is not a Drumline launcher .+{why}"
        ) as wrong:
            Client("127.0.0.1", talks, "there", SECRET).exchange(node("b"))
        assert wrong.value.code == "not-a-launcher"
    for answer in (lambda connection: None, lambda connection: time.sleep(0.5)):
        with pytest.raises(Unreachable) as caught:
            Client("127.0.0.1", program(answer), "there", SECRET).exchange(node("b"))
        assert caught.value.code == "not-a-launcher"
    with pytest.raises(Unreachable, match="refused"):
        Client("127.0.0.1", free_port("127.0.0.1"), "there", SECRET).exchange(node("b"))


class Stuck:
    """A backend that hangs, like one whose cable was pulled."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.reply: Reply | None = None

    def exchange(self, node: Node) -> Reply:
        if self.reply is not None:
            return self.reply
        self.released.wait(30)
        raise Unreachable("no answer")

    def leave(self) -> None:
        self.released.set()

    def close(self) -> None:
        self.released.set()


def made(backend: RendezvousBackend, limit: float = 0.3) -> Contact:
    return Contact(backend, node("a"), rendezvous="there", limit=limit, pace=0.02)


class Seen(Contact):
    """A contact with a given view."""

    def __init__(self, reply: Reply, limit: float = 5.0) -> None:
        super().__init__(Stuck(), node("a"), rendezvous="there", limit=limit, pace=0.02)
        self.reply = reply

    def view(self) -> View:
        return View(self.reply, 0.0)


ROUND = Round(1, "a" * 32, 0, "", ("a" * 32, "b" * 32), (1, 1), "127.0.0.1", 4000)


def test_the_supervisor_never_waits_for_a_backend_that_hangs() -> None:
    stuck = Stuck()
    stuck.reply = Reply(ROUND, {"b" * 32: Heard(node("b", round=1, state="running"), 0.0)})
    contact = made(stuck)
    cluster = Cluster(contact, "host-a")
    checks: list[int] = []
    assert cluster.next_round(5, print, lambda: checks.append(1)) == ROUND
    assert cluster.losses(ROUND) == []
    stuck.reply = None
    begin = time.monotonic()
    while not (lost := cluster.losses(ROUND)):
        assert time.monotonic() - begin < 5
        contact.report(step=3)
        time.sleep(0.01)
    assert lost[0].message.startswith("lost contact with the rendezvous at there for")
    with pytest.raises(NotConnected, match="no answer"):
        cluster.next_round(0.1, print, lambda: checks.append(1))
    with pytest.raises(KeyboardInterrupt):
        cluster.next_round(60, print, _interrupt)
    begin = time.monotonic()
    contact.leave(5.0)
    assert time.monotonic() - begin < 1
    stuck.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_time_in_which_this_process_was_stopped_does_not_count_as_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(hubs.time, "monotonic", lambda: now[0])
    clock = hubs.AwakeClock()
    now[0] += 0.5
    assert clock.now() == 0.5
    now[0] += 3600
    assert clock.now() == 1.5


def test_silence_a_failure_and_a_run_that_continued_are_losses_and_leaving_after_the_end_is_not() -> None:
    contact = Seen(Reply(ROUND, {}))
    cluster = Cluster(contact, "host-a")

    def with_other(silent: float = 0.0, **changes: object) -> list[str]:
        other = node("b", round=1, state="running")
        contact.reply = Reply(ROUND, {"b" * 32: Heard(replace(other, **changes), silent)})  # type: ignore[arg-type]
        return [f"{each.host} {each.message}" for each in cluster.losses(ROUND)]

    assert with_other() == []
    assert with_other(6.2) == ["machine 1, host-b lost: no message from its launcher for 6 s"]
    assert with_other(failure=Failure(1, "boom", 1.0, host="h")) == ["h boom"]
    assert with_other(failure=Failure(1, "boom", 1.0), round=0) == []  # of a round before
    assert with_other(60.0, state="left") == []
    behind = replace(ROUND, number=2, ids=("b" * 32,), processes=(1,))
    contact.reply = Reply(behind, {})
    (lost,) = cluster.losses(ROUND)
    assert "continued without this machine" in lost.message


def test_a_clock_that_is_far_ahead_is_reported_once() -> None:
    reply = Reply(ROUND, {"a" * 32: Heard(node("a"), 0.0, -10.0), "b" * 32: Heard(node("b"), 0.0, 110.0)})
    cluster = Cluster(Seen(reply), "host-a")
    (line,) = cluster.skewed_clocks()
    assert line.startswith("the clock of host-b is 120 s ahead of this machine's")
    assert cluster.skewed_clocks() == []


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[str], SharedFolder]:
    def make(secret: str) -> SharedFolder:
        return SharedFolder(str(tmp_path / "meet"), secret.encode() or SECRET, 2, 1, 0.5)

    return make


def test_launchers_join_a_round_at_a_folder_and_the_last_deletes_it(
    folders: Callable[[str], SharedFolder], tmp_path: Path
) -> None:
    first, second = folders(""), folders("")
    replies = []
    for _ in range(3):
        replies = [first.exchange(node("a")), second.exchange(node("b"))]
    assert replies[0].round is not None
    assert replies[0].round == replies[1].round
    assert replies[0].round.number == 1
    first.exchange(node("a", state="left"))
    first.leave()
    assert second.exchange(node("b")).heard["a" * 32].node.state == "left"
    second.exchange(node("b", state="left"))
    second.leave()
    assert not (tmp_path / "meet").exists()


def test_files_of_an_earlier_run_of_other_programs_or_of_a_different_secret_are_ignored(
    folders: Callable[[str], SharedFolder], tmp_path: Path
) -> None:
    old = [folders(""), folders("")]
    for _ in range(3):
        for letter, folder in zip("ab", old, strict=True):
            folder.exchange(node(letter))
    place = tmp_path / "meet"
    kept = {path.name: path.read_bytes() for path in place.iterdir()}
    (place / "node-zz.json").write_text("x")
    (place / f"node-{'c' * 32}.json").write_bytes(kept[f"node-{'a' * 32}.json"])  # under another name
    (place / f"node-{'d' * 32}.json").symlink_to("/etc/passwd")
    (place / f"node-{'e' * 32}.json").write_bytes(b"x" * 600_000)
    for number in (2, 7):
        (place / f"round-{number}.json").write_bytes(kept["round-1.json"])
    (place / f"node-{'9' * 32}.json").mkdir()
    folders("a foreign secret").exchange(node("f"))
    new = [folders(""), folders("")]
    found = None
    deadline = time.monotonic() + 10
    while found is None or found.number < 2:
        assert time.monotonic() < deadline
        for letter, folder in zip("12", new, strict=True):
            found = folder.exchange(node(letter)).round
        # Old files that come back later are old still.
        for name, content in kept.items():
            if name.startswith("node-"):
                (place / name).write_bytes(content)
        time.sleep(0.05)
    assert (found.number, set(found.ids)) == (3, {"1" * 32, "2" * 32})
    assert "f" * 32 not in new[0].exchange(node("1")).heard


def test_a_path_where_the_folder_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "is a file"), (tmp_path / "no/where", "does not exist")):
        with pytest.raises(UserError, match=words):
            SharedFolder(str(path), SECRET, 2, 1, 0.5).exchange(node("a"))


def test_limits_are_as_documented() -> None:
    assert (clusters.SILENT_SECONDS, clusters.FILE_SILENT_SECONDS) == (5.0, 25.0)
    assert clusters.BIG_SKEW == 10.0

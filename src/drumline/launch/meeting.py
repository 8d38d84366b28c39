"""How launchers of one run meet, round after round, on torch's rendezvous.

Promises: every store that we keep listens on one address only; each round has keys and a workers' store of its own,
so nothing of a lost round is read again; the first round waits for all machines, later ones go on with `least` of
them after a short wait. Machines numbered by the user are always all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from drumline.launch.listen import host_store

LAST_CALL_SECONDS = 5.0
"""How long a restart waits for more machines once it has as many as it needs."""

FOR_EVER = timedelta(days=3650)


class Meeting(DynamicRendezvousHandler):
    """torch's c10d rendezvous, with stores bound to one address."""

    on_wait: Callable[[], None] = staticmethod(lambda: None)
    """Called when the run is under way without this machine, which then waits for its next restart."""
    _least, _timeout = 1, 60.0

    @classmethod
    def at(
        cls,
        store: Store,
        run_id: str,
        address: str,
        *,
        nodes: int,
        least: int,
        timeout: float,
        keep_alive: int,
    ) -> Meeting:
        """`address` is this machine's; a launcher that has not been heard of for three times `keep_alive` seconds is
        gone."""
        waits = RendezvousTimeout(
            join=timedelta(seconds=timeout), last_call=timedelta(seconds=LAST_CALL_SECONDS)
        )
        backend = C10dRendezvousBackend(store, run_id)
        meeting: Meeting = cls.from_backend(
            run_id, store, backend, nodes, nodes, address, waits, keep_alive, 3
        )
        meeting._least, meeting._timeout = least, timeout
        return meeting

    def next_rendezvous(self) -> RendezvousInfo:
        # torch would keep the workers' store of the round before, with all that they had left in it; and a machine
        # that was not the first one would go on to look for it where it was.
        self._bootstrap_store_info = self._shared_tcp_store_server = None
        self._state_holder.sync()
        state = self._state_holder.state
        if state.complete and self._this_node not in state.participants:
            self.settings.timeout._set_timeouts(join=FOR_EVER)
            self.on_wait()
        try:
            return super().next_rendezvous()
        finally:
            # Frozen, but read anew at each meeting.
            object.__setattr__(self.settings, "min_nodes", self._least)
            self.settings.timeout._set_timeouts(
                join=timedelta(seconds=self._timeout), last_call=timedelta(seconds=LAST_CALL_SECONDS)
            )

    def num_nodes_waiting(self) -> int:
        """None that would end a round: who comes late joins at the next restart."""
        return 0

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return host_store(master_addr, master_port, self._timeout)


class Numbered(RendezvousHandler):
    """Machines that the user has numbered meet at the store of machine 0. A round is not over before each of them has
    heard of it (`notice.py`), so they count the rounds alike."""

    def __init__(self, make_store: Callable[[], TCPStore], run_id: str, rank: int, machines: int) -> None:
        self._make_store, self._run_id, self._rank, self._machines = make_store, run_id, rank, machines
        self._store: TCPStore | None = None
        self._round = 0

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """The workers meet at the launchers' store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            try:
                self._store = self._make_store()
            except OSError as error:
                raise RendezvousConnectionError(str(error)) from error
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        info = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(store, self._rank, self._machines, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

"""One unit on its way over one connection: requested as its exact range, checked, received."""

from __future__ import annotations

import time

from dataset.federation.connection import Connection
from dataset.federation.framing import ProtocolError
from dataset.federation.lookup import Lookup
from dataset.federation.servers import Server
from dataset.stream.unit_map import UnitMap
from dataset.transfer.receive import Body, check_answer, open_file_range, open_range


class UnitRequest:
    """A request for a unit; without a server, one to verify the file that is there."""

    def __init__(self, unit: int, server: Server | None, now: float) -> None:
        self.unit, self.server, self.started = unit, server, now
        self.received, self.last_data = 0, now
        self.is_cut = False
        self._connection: Connection | None = None

    def hold(self, connection: Connection) -> None:
        self._connection = connection
        if self.is_cut:
            connection.cut()

    def let_go(self) -> Connection | None:
        connection, self._connection = self._connection, None
        return connection

    def cut(self) -> None:
        self.is_cut = True
        if self._connection is not None:
            self._connection.cut()

    def receive(self, lookup: Lookup, units: UnitMap, view: memoryview) -> None:
        """Fills the view with the bytes of the unit; raises one of NETWORK_ERRORS."""
        server = self.server
        assert server is not None
        begin, end = units.bounds[self.unit : self.unit + 2].tolist()
        if server.url.startswith("file:"):
            self._fill(open_file_range(server.url, begin), view)
            return
        keep = False
        try:
            answer = open_range(lookup.pool, lookup, server, begin, end, self.hold)
            found = check_answer(answer, begin, end, units.size, server)
            server.note_answer(found.etag, found.is_range)
            if not found.is_range:
                raise ProtocolError("the whole object instead of a part")
            keep = self._fill(answer, view)
        finally:
            with lookup.lock:  # from here on nobody cuts it
                connection = self.let_go()
            if connection is not None:
                if keep and not self.is_cut:
                    lookup.pool.give(connection)
                else:
                    connection.close()

    def _fill(self, body: Body, view: memoryview) -> bool:
        """The body into the view; whether its connection can be used again."""
        while self.received < len(view):
            got = body.readinto(view[self.received :])
            if not got:
                raise ProtocolError("ended early")
            self.received, self.last_data = self.received + got, time.monotonic()
        return body.release(self.received)

"""Orders to the process in front of the XRootDs: faults to set, traffic to report."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tests.cluster.osdf.layout import HOST, Layout
from tests.cluster.osdf.rules import Fault


def ask(layout: Layout, target: str, order: dict[str, Any] | None = None) -> Any:
    """The answer to a question, or to an order; ValueError when it was refused."""
    connection = http.client.HTTPConnection(HOST, layout.control_port, timeout=30)
    try:
        content = None if order is None else json.dumps(order)
        connection.request("GET" if content is None else "POST", target, content)
        answer = connection.getresponse()
        result = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 200:
        raise ValueError(result["error"])
    return result


class FaultHandle:
    """Faults that are set; a context manager that withdraws them at its end."""

    def __init__(self, layout: Layout, faults: Sequence[Fault], seed: int) -> None:
        self._layout = layout
        self._name = secrets.token_hex(8)
        fields = [fault.as_json() for fault in faults]
        ask(layout, "/faults/add", {"name": self._name, "faults": fields, "seed": seed})

    def hits(self) -> list[int]:
        """How often each fault has struck so far, in the order in which they were given."""
        result: list[int] = ask(self._layout, "/faults/hits", {"name": self._name})
        return result

    def remove(self) -> None:
        """Withdraws the faults; answers that they held up end."""
        ask(self._layout, "/faults/remove", {"name": self._name})

    def __enter__(self) -> FaultHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

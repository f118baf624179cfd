"""Responses before they are sent, and those that faults put in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from tests.cluster.osdf import bodies
from tests.cluster.osdf.rules import Fault

INGRESS_PAGE = """\
<html>
<head><title>{0}</title></head>
<body>
<center><h1>{0}</h1></center>
<hr><center>nginx</center>
</body>
</html>
"""


@dataclass
class Answer:
    """A response before it is sent; `readinto` fills a buffer from its body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    length: int = 0
    readinto: Callable[[memoryview], int] = lambda view: 0
    close: bool = False


def bytes_answer(status: int, content: bytes, headers: dict[str, str]) -> Answer:
    """A response whose body is at hand."""
    return Answer(status, dict(headers), len(content), bodies.reader(content))


def fault_answer(fault: Fault, target: str) -> Answer:
    """What a `loop`, `ingress` or `status` fault answers to a request for the target."""
    if fault.kind == "loop":
        return Answer(307, {"Location": target, "Server": "XrootD/v5.5.3"})
    if fault.kind == "ingress":
        status = fault.status or 404
        page = INGRESS_PAGE.format(f"{status} {HTTPStatus(status).phrase}").encode()
        return bytes_answer(status, page, {"Server": "nginx", "Content-Type": "text/html"})
    headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
    return bytes_answer(fault.status or 503, b"a fault on command\n", headers)


def set_headers(headers: dict[str, str], changes: dict[str, str | None]) -> None:
    """Sets headers in place, whatever the case of their names; None removes one."""
    for name, value in changes.items():
        for known in [known for known in headers if known.lower() == name.lower()]:
            del headers[known]
        if value is not None:
            headers[name] = value

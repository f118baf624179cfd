"""Processes that hold a case ready and run it when asked: settings of a process stay its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

Case = Callable[[str], Any]  # what to run, by name -> what was measured


class CaseProcess:
    """One process with a case that was made in it; it sleeps between two questions."""

    def __init__(self, make: Callable[..., Case], *args: Any, env: dict[str, str] | None = None):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args))
        with mock.patch.dict(os.environ, env or {}):  # read before the first line of Python
            self._process.start()
        theirs.close()

    def begin(self, name: str) -> None:
        """Asks; the answer is fetched with `end`, so that several processes can work at once."""
        self._pipe.send(name)

    def end(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask(self, name: str) -> Any:
        self.begin(name)
        return self.end()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def ask_all(group: list[CaseProcess], name: str) -> float:
    """The slowest answer of processes that work at the same time."""
    for process in group:
        process.begin(name)
    slowest: float = max([process.end() for process in group])
    return slowest


def _serve(pipe: Any, make: Callable[..., Case], args: tuple[Any, ...]) -> None:
    case = make(*args)
    while True:
        try:
            pipe.send(case(pipe.recv()))
        except EOFError:
            return
        except Exception as error:
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))

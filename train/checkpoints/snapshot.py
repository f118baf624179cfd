"""Copies a state now, and brings it to host memory later, so that a checkpoint costs one copy.

On a GPU that copy is made on the device, in order with the steps before and after it. Another
thread then brings it to pinned memory on a stream of its own, while training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Snapshot:
    """A deep copy of a state, whose tensors may still be on their way to the host."""

    def __init__(self, state: Any) -> None:
        """Copies it; training may change the originals at once."""
        self._taken: Any = None
        originals: dict[int, torch.Tensor] = {}
        map_tensors(state, lambda t: originals.setdefault(id(t), t) if t.is_cuda else t)
        try:
            copies = _copy_on_device(list(originals.values()))
        except torch.cuda.OutOfMemoryError:  # a batch that just fits leaves no room for a copy
            self._state = copy_to_host(state)
            return
        found = dict(zip(originals, copies, strict=True))
        self._state = map_tensors(state, lambda t: found.get(id(t)) if t.is_cuda else _own(t))
        if copies:
            self._taken = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._taken.record(torch.cuda.current_stream(copies[0].device))
            self._device = copies[0].device

    def fetch(self) -> Any:
        """The state in host memory, once the copies are there; called once, in any thread."""
        if self._taken is None:
            return self._state
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(self._taken)
            state = map_tensors(self._state, lambda t: _copy_to_pinned(t) if t.is_cuda else t)
        arrived = stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        arrived.synchronize()
        self._state = None  # the copies on the device are free only now: this stream has read them
        return state


def copy_to_host(value: Any) -> Any:
    """A deep copy with every tensor in host memory, waited for."""
    return map_tensors(value, _own)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The value with other tensors, in new dicts and lists."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


@torch.no_grad()
def _copy_on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the same layout, with a few launches for hundreds of tensors."""
    copies = [torch.empty_like(t) for t in tensors]
    for dtype in {t.dtype for t in tensors}:
        pairs = [pair for pair in zip(copies, tensors, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([copy for copy, _ in pairs], [t.detach() for _, t in pairs])
    return copies


def _copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Started, and not waited for; torch keeps pinned memory for the next time."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

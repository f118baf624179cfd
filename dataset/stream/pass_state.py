"""What a pass over an object has reached, in one file beside its result: a kill costs little."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.durable import writing_whole
from dataset.own_names import part_path

_FORMAT = 2
_HEAD = "head"
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class PassState:
    """A pass over [0, chunk) of an object: its hash, the sums of its chunks, and the walk."""

    identity: str
    size: int
    chunk: int  # the first one that is not in the hash
    kinds: tuple[str, ...]  # of the sums of each chunk
    md5: str  # the state of the hash in hex; empty when it could not be saved
    etags: Mapping[str, str] = field(default_factory=dict)
    format: int = _FORMAT


def write_state(result: Path, state: PassState, sums: npt.NDArray[np.uint32], walk: Arrays) -> None:
    """Writes the state, whole or not at all."""
    head: npt.NDArray[Any] = np.frombuffer(json.dumps(asdict(state)).encode(), np.uint8)
    arrays: dict[str, Any] = {_HEAD: head, "sums": sums, **walk}
    with writing_whole(part_path(result), is_shared=True) as file:
        np.savez(file, **arrays)


def read_state(result: Path, identity: str) -> tuple[PassState, Arrays] | None:
    """The state of a pass over this object, with its arrays; None without a usable one."""
    try:
        with np.load(part_path(result), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays.pop(_HEAD).tobytes())
        state = PassState(**{**head, "kinds": tuple(head["kinds"])})
        is_whole = arrays["sums"].shape == (state.chunk, len(state.kinds))
    except FileNotFoundError:
        return None
    except Exception:  # damaged in any way: zipfile, zlib, numpy and json have a dozen kinds
        return None
    is_usable = is_whole and state.format == _FORMAT and state.identity == identity
    return (state, arrays) if is_usable else None


def discard_state(result: Path) -> None:
    """Removes the state, and what a kill left of writing one."""
    place = part_path(result)
    place.unlink(missing_ok=True)
    for leftover in place.parent.glob(f"{glob.escape(place.name)}.*.part"):
        leftover.unlink(missing_ok=True)

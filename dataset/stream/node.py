"""The stream of a node: a temporary folder with the maps, and the fetcher that is kept alive.

Whoever reads maps the same files; the process that created the folder keeps the fetcher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dataset.archive.index_file import cut_as_summed
from dataset.durable import write_json
from dataset.stream.arrivals import ArrivalMap
from dataset.stream.keeper import Keeper
from dataset.stream.node_folder import NodeFolder
from dataset.stream.plan import PlannedObject, StreamPlan
from dataset.stream.spec import Needs, StreamedObject, StreamSpec, write_needs
from dataset.stream.unit_map import UnitMap

_PLAN = "plan.json"


class NodeStream:
    """A plan and its folder; of the process that keeps the fetcher, also that."""

    def __init__(self, plan: StreamPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self._keeper: Keeper | None = None
        self._held: NodeFolder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return NodeStream, (self.plan, self.folder)  # another rank only reads

    @classmethod
    def create(cls, plan: StreamPlan) -> NodeStream:
        """A new folder, with maps in which nothing is here."""
        held = NodeFolder()
        node = cls(plan, held.path)
        node._held = held
        for name, planned in node.objects.items():
            if node.is_bounded(name):
                bounds = cut_as_summed(planned.load_index()).bounds
                UnitMap.create_for(node.map_path(name), bounds)
            else:
                ArrivalMap.create(node.map_path(name), planned.size)
        values = json.loads(json.dumps(asdict(plan), default=str))
        write_json(node.folder / _PLAN, values, is_synced=False)
        return node

    @classmethod
    def load(cls, folder: Path) -> NodeStream:
        """The stream that another process of this node has created."""
        values: dict[str, Any] = json.loads((folder / _PLAN).read_text())
        train, val = (_read_object(values[name]) for name in ("train", "val"))
        assert train is not None
        return cls(
            StreamPlan(Path(values["data"]), train, val, is_bounded=values["is_bounded"]), folder
        )

    @property
    def objects(self) -> dict[str, PlannedObject]:
        """What is streamed: the tar of training, and that of validation if it has an index."""
        val = self.plan.val
        is_streamed = val is not None and not val.is_here and val.index is not None
        return {"train": self.plan.train} | ({"val": val} if val and is_streamed else {})

    @property
    def whole_val(self) -> str:
        """The URL of validation if it has to be fetched whole first, as it has no index."""
        val = self.plan.val
        return val.url if val is not None and not val.is_here and val.index is None else ""

    def is_bounded(self, name: str) -> bool:
        """Whether only a part of an object is on the disk at a time: its map is one of units."""
        return name == "train" and self.plan.is_bounded

    @property
    def num_bytes(self) -> int:
        return sum(planned.size for planned in self.objects.values())

    @property
    def num_restarts(self) -> int:
        """How often a fetcher that died was started again."""
        return self._keeper.num_restarts if self._keeper else 0

    def map_path(self, name: str) -> Path:
        return self.folder / f"{name}.map"

    def describe(
        self, name: str, needs: Needs | None = None, *, is_asked: bool = False
    ) -> StreamedObject:
        """An object for the task of the fetcher; its needs are written down."""
        planned = self.objects[name]
        if needs is not None:
            write_needs(self.folder / "needs", needs)
        return StreamedObject(
            planned.url,
            str(planned.path),
            str(self.map_path(name)),
            str(planned.index),
            str(self.folder / "needs") if needs is not None else "",
            is_asked,
        )

    def start(self, spec: StreamSpec, maps: Sequence[ArrivalMap]) -> None:
        """Starts the fetcher on a task; ends the one that has worked on another."""
        self.stop()
        spec.write(self.folder / "spec.json")
        self._keeper = Keeper(self.folder / "spec.json", maps)
        self._keeper.start()

    def stop(self) -> None:
        """Ends the fetcher, if it runs; what has arrived is kept."""
        if self._keeper is not None:
            self._keeper.stop()

    def kill(self) -> None:
        """Ends the fetcher at once, in a process that is about to end."""
        if self._keeper is not None:
            self._keeper.kill()

    def remove(self) -> None:
        """Removes the folder; what has arrived lies elsewhere."""
        if self._held is not None:
            self._held.close()


def _read_object(values: dict[str, Any] | None) -> PlannedObject | None:
    if values is None:
        return None
    found = PlannedObject(**values)
    index = Path(found.index) if found.index is not None else None
    return replace(found, path=Path(found.path), index=index)

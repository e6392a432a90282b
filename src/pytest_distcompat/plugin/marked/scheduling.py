"""Which scheduler xdist gets. Imported under xdist only; a session without tests of ours imports nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling, WorkStealingScheduling

#: From all collected tests and the number of workers to what comes first: lists of places, each for one worker in a row.
Plan = Callable[[Sequence[str], int], Sequence[Sequence[int]]]
#: What xdist itself does under the values of ``--dist`` that leave the order to it. The others say what belongs together.
OWN: Mapping[str, Any] = {"load": LoadScheduling, "worksteal": WorkStealingScheduling}


class LateScheduling:
    """xdist's own scheduler until all workers have collected; then, if there is anything to pack, a packed one.

    Before that nobody knows whether there is, and a session without tests of ours is to be as if we were not there.
    """

    def __init__(self, config: pytest.Config, log: Any, plan: Plan) -> None:
        self._config, self._log, self._plan = config, log, plan
        self._now: Any = OWN[config.getoption("dist")](config, log)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What it stands for: xdist tells the user the name."""
        return type(self._now)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the business of the one that it stands for."""
        return getattr(self._now, name)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """One worker has collected; with the last one the choice is made."""
        self._now.add_node_collection(node, collection)
        if self._now.collection is None and self._now.collection_is_completed:
            self._choose()

    def _choose(self) -> None:
        found = dict(self._now.node2collection)
        first = next(iter(found.values()))
        if any(collection != first for collection in found.values()):
            # xdist will say so.
            return
        units = self._plan(first, len(found))
        if units:
            from pytest_distcompat.plugin.marked.packed import PackedScheduling

            self._now = PackedScheduling(self._config, self._log, units)
            for node, collection in found.items():
                self._now.add_node(node)
                self._now.add_node_collection(node, collection)

"""The xdist scheduler that switches to a packed one. Imported under xdist only, and light without distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling, WorkStealingScheduling

#: A function from the collected node ids and the number of workers to lists of indices, each for one worker in a row.
Plan = Callable[[Sequence[str], int], Sequence[Sequence[int]]]
#: xdist's schedulers for the values of ``--dist`` that leave the order to it. Other values group tests by their own rules.
XDIST_SCHEDULERS: Mapping[str, Any] = {"load": LoadScheduling, "worksteal": WorkStealingScheduling}


class LateScheduling:
    """xdist's own scheduler until all workers have collected; then a packed one, if there are distributed tests.

    Before that it is not known whether there are any. Without them the session is the same as without the plugin.
    """

    def __init__(self, config: pytest.Config, log: Any, plan: Plan) -> None:
        self._config, self._log, self._plan = config, log, plan
        self._scheduler: Any = XDIST_SCHEDULERS[config.getoption("dist")](config, log)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the current scheduler, whose name xdist prints."""
        return type(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the current scheduler."""
        return getattr(self._scheduler, name)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Take the collection of a worker; after the last one, choose the scheduler."""
        self._scheduler.add_node_collection(node, collection)
        if self._scheduler.collection is None and self._scheduler.collection_is_completed:
            self._choose()

    def _choose(self) -> None:
        collections = dict(self._scheduler.node2collection)
        first = next(iter(collections.values()))
        if any(collection != first for collection in collections.values()):
            # xdist reports the difference.
            return
        units = self._plan(first, len(collections))
        if units:
            from pytest_distcompat.plugin.marked.packed import PackedScheduling

            self._scheduler = PackedScheduling(self._config, self._log, units)
            for node, collection in collections.items():
                self._scheduler.add_node(node)
                self._scheduler.add_node_collection(node, collection)

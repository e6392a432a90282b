"""A hand-made trace and ways to alter it, so that a test shows only what is wrong in its case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.trace import ParameterInfo, Snapshot, StateInfo, Trace


class Able(Driver):
    """Has every optional methods, and speaks every option."""

    name = "able"
    options = tuple(OPTIONS)

    @classmethod
    def can(cls, action: str) -> bool:
        return bool(action)


@dataclass(frozen=True)
class Story:
    """A cell with the trace of train, resume and reference; every alteration gives a new story."""

    cell: Cell
    trace: Trace
    #: How a parameter of the unwrapped model is called in this cell.
    live: Callable[[str], str]

    def judges(self, check: str) -> bool:
        """Return whether the check applies in this cell and the story has its runs."""
        found = CHECKS.get(check)
        if found.not_applicable(self.cell, Able):
            return False
        return {run.name for run in found.runs(self.cell, Able).runs} <= set(self.trace.runs)

    def findings(self, check: str) -> list[str]:
        """Return the findings of the check of that name."""
        return CHECKS.get(check).findings(self.cell, self.trace)

    def alter(
        self,
        change: Callable[[Snapshot], Snapshot | None],
        *,
        run: str = "train",
        action: str = "",
        nth: int | None = None,
        rank: int | None = None,
    ) -> Story:
        """Change the chosen snapshots (None takes one out); no action means all, no ``nth`` every such action."""
        old = self.trace.run(run)
        chosen = [
            snapshot
            for snapshot in (old.at(action, nth) if nth is not None else old.snapshots)
            if action in {"", snapshot.action} and rank in {None, snapshot.rank}
        ]
        assert chosen, "a test that alters nothing tests nothing"
        snapshots = (change(snapshot) if snapshot in chosen else snapshot for snapshot in old.snapshots)
        new = replace(old, snapshots=tuple(snapshot for snapshot in snapshots if snapshot))
        return replace(self, trace=replace(self.trace, runs={**self.trace.runs, run: new}))

    def without(self, action: str, **where: Any) -> Story:
        """Return the story without the snapshots after that action."""
        return self.alter(lambda snapshot: None, action=action, **where)

    def snapshot(self, action: str, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields in the snapshots after that action."""
        return self.alter(lambda snapshot: replace(snapshot, **changes), action=action, **where)

    def model(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields of the live model."""
        return self._part("model", lambda model: replace(model, **changes), where)

    def optimizer(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields of the optimizer."""
        return self._part("optimizer", lambda optimizer: replace(optimizer, **changes), where)

    def state(self, key: str, changes: dict[str, Any], *, only: str = "", **where: Any) -> Story:
        """Return the story with other fields in the optimizer's state: under that key, of one parameter, or all but the steps."""
        name = self.live(only) if only else ""

        def change(info: StateInfo) -> StateInfo:
            meant = info.key == key if key else info.key != "step"
            return replace(info, **changes) if meant and name in {"", info.owner} else info

        return self._part("optimizer", lambda optimizer: _each(optimizer, "states", change), where)

    def stepped(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other dtypes where the optimizer stepped."""
        return self._each("steps", lambda step: replace(step, **changes), where)

    def parameters(self, changes: dict[str, Any], *, only: str = "", **where: Any) -> Story:
        """Return the story with other fields of one live parameter (by its unwrapped name), or of all."""
        name = self.live(only) if only else ""

        def change(info: ParameterInfo) -> ParameterInfo:
            return replace(info, **changes) if name in {"", info.name} else info

        return self._part("model", lambda model: _each(model, "parameters", change), where)

    def buffers(self, changes: dict[str, Any], **where: Any) -> Story:
        """With every buffer of the live model changed."""
        return self._part(
            "model",
            lambda model: replace(model, buffers=tuple(replace(info, **changes) for info in model.buffers)),
            where,
        )

    def renamed(self, old: str, new: str, **where: Any) -> Story:
        """Return the story with a live parameter (by its unwrapped name) under another live name, in the optimizer too."""
        name = self.live(old)

        def state(info: StateInfo) -> StateInfo:
            return replace(info, owner=new) if info.owner == name else info

        story = self.parameters({"name": new}, only=old, **where)
        return story._part("optimizer", lambda optimizer: _each(optimizer, "states", state), where)

    def file(self, position: int, **changes: Any) -> Story:
        """Return the story with other fields of one saved file: 0 is the model's, 1 the optimizer's."""

        def change(snapshot: Snapshot) -> Snapshot:
            files = list(snapshot.files)
            files[position] = replace(files[position], **changes)
            return replace(snapshot, files=tuple(files))

        return self.alter(change, action="files", rank=0)

    def _part(self, name: str, change: Callable[[Any], Any], where: dict[str, Any]) -> Story:
        def altered(snapshot: Snapshot) -> Snapshot:
            part = getattr(snapshot, name)
            return replace(snapshot, **{name: part and change(part)})

        return self.alter(altered, **where)

    def _each(self, name: str, change: Callable[[Any], Any], where: dict[str, Any]) -> Story:
        return self.alter(lambda snapshot: _each(snapshot, name, change), **where)


#: What the fixture gives: from a cell's id to its sound story.
Sound = Callable[[str], Story]


def _each(info: Any, name: str, change: Callable[[Any], Any]) -> Any:
    return replace(info, **{name: tuple(change(one) for one in getattr(info, name))})

"""A hand-made trace and ways to alter it, so that a test shows only what is wrong in its case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_distcompat.cell import OPTIONS, Cell
from pytest_distcompat.checks import CHECKS
from pytest_distcompat.driver import Driver
from pytest_distcompat.trace import ParameterInfo, RunTrace, Snapshot, StateInfo, Trace


class Able(Driver):
    """A driver with every optional method and every option."""

    name = "able"
    options = tuple(OPTIONS)

    @classmethod
    def can(cls, action: str) -> bool:
        return bool(action)


@dataclass(frozen=True)
class Story:
    """A cell with a trace of the runs train, resume and reference. Each method below returns an altered copy."""

    cell: Cell
    trace: Trace
    #: From a parameter's name in the unwrapped model to its name in this cell's wrapped model.
    live: Callable[[str], str]

    def judges(self, check: str) -> bool:
        """Return whether the check applies in this cell and the story has its runs."""
        claim = CHECKS.get(check)
        if claim.not_applicable(self.cell, Able):
            return False
        needed = {run.name for run in claim.runs(self.cell, Able).runs}
        return needed <= set(self.trace.runs)

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
        candidates = old.snapshots if nth is None else old.at(action, nth)
        chosen = []
        for snapshot in candidates:
            if action in {"", snapshot.action} and rank in {None, snapshot.rank}:
                chosen.append(snapshot)
        assert chosen, "a test that alters nothing tests nothing"
        altered = []
        for snapshot in old.snapshots:
            changed = change(snapshot) if snapshot in chosen else snapshot
            if changed is not None:
                altered.append(changed)
        return self.with_run(replace(old, snapshots=tuple(altered)))

    def without(self, action: str, **where: Any) -> Story:
        """Return the story without the snapshots after that action."""
        return self.alter(lambda snapshot: None, action=action, **where)

    def snapshot(self, action: str, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields in the snapshots after that action."""
        return self.alter(lambda snapshot: replace(snapshot, **changes), action=action, **where)

    def model(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields of the live model."""
        return self._part("model", lambda model: replace(model, **changes), where)

    def unwrapped(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields of the unwrapped model."""
        return self._part("unwrapped", lambda unwrapped: replace(unwrapped, **changes), where)

    def with_option(self, name: str, value: bool | str | int) -> Story:
        """Return the story as that of a cell with one more option."""
        options = (*self.cell.options, (name, value))
        return replace(self, cell=replace(self.cell, options=options))

    def with_run(self, run: RunTrace) -> Story:
        """Return the story with one more run, or another one of that name."""
        runs = {**self.trace.runs, run.name: run}
        return replace(self, trace=replace(self.trace, runs=runs))

    def optimizer(self, changes: dict[str, Any], **where: Any) -> Story:
        """Return the story with other fields of the optimizer."""
        return self._part("optimizer", lambda optimizer: replace(optimizer, **changes), where)

    def state(self, key: str, changes: dict[str, Any], *, only: str = "", **where: Any) -> Story:
        """Return the story with other fields in the optimizer's state.

        Args:
            key: The state to change, such as ``exp_avg``; empty for all but the numbers of steps.
            changes: The new values of its fields.
            only: The parameter whose state changes, by its unwrapped name; empty for all.
            where: The snapshots, as ``alter`` takes them.
        """
        name = self.live(only) if only else ""

        def change(info: StateInfo) -> StateInfo:
            if name and info.owner != name:
                return info
            if key and info.key != key:
                return info
            if not key and info.key == "step":
                return info
            return replace(info, **changes)

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
        """Return the story with other fields of every buffer of the live model."""

        def change(info: ParameterInfo) -> ParameterInfo:
            return replace(info, **changes)

        return self._part("model", lambda model: _each(model, "buffers", change), where)

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
    return replace(info, **{name: tuple(change(entry) for entry in getattr(info, name))})

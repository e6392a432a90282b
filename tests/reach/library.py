"""A small file of a library, which tests trace and analyse; its lines are counted in tests."""

from __future__ import annotations

__all__ = ["Trainer", "save"]


class Trainer:
    def prepare(self, model: object, *, shard: bool = False) -> str:
        if shard:
            return self._sharded()
        for _ in range(2):
            if self._ready():
                return "ready"
        return "left"

    def _sharded(self) -> str:
        return "sharded"

    def _ready(self) -> bool:
        done = True
        if done and not self.__dict__.get("config"):
            return False
        return done


def save(path: str) -> bool:
    return path != ""


def helper(count: int) -> int:
    local = count * 2
    if local > 2:
        return 1
    if count:
        return 2
    return 3

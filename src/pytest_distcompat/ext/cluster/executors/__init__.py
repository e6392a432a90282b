"""Registry of executors: how the node agents of a session are started."""

from pytest_distcompat.ext.cluster.executors._base import Asked, Executor, Given
from pytest_distcompat.registry import Registry

EXECUTORS: Registry[type[Executor]] = Registry(
    __name__,
    Executor,  # type: ignore[arg-type]  # its items are subclasses
    "executor",
    group="pytest_distcompat.executors",
)

__all__ = ["EXECUTORS", "Asked", "Executor", "Given"]

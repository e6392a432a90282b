"""Executors, which start agents on other machines.

These are the names of ``ext.cluster`` that users import.
"""

from pytest_distcompat.ext.cluster.executors import EXECUTORS, Asked, Executor, Given

__all__ = ["EXECUTORS", "Asked", "Executor", "Given"]

"""Executors, which start agents on other machines: names that users import to write one.

An agent is a process of this package on each further machine, which starts ranks there. An
``Executor`` starts agents by a scheduler such as Slurm or Ray. The code is in ``ext.cluster``.
"""

from pytest_distcompat.ext.cluster.executors import EXECUTORS, Asked, Executor, Given

__all__ = ["EXECUTORS", "Asked", "Executor", "Given"]

"""Keep DeepSpeed on the CPU from compiling an operator and from leaving shared memory behind.

``preload`` calls ``without_shared_memory`` in the processes from which ranks on the CPU are forked.
On ranks, code that is about to use DeepSpeed calls it too: ``strategies/zero``, and
``ext/scripts/bridge`` for users' scripts. Drivers (the trainers under test) that begin DeepSpeed's
process group do so by ``init_distributed``.
"""

from __future__ import annotations

import sys

#: The all-reduce through /dev/shm: compiled at first use (40 s), and it leaves 66 MiB a rank that
#: nothing unlinks.
OPERATOR = "deepspeed_shm_comm"


def init_distributed(backend: str) -> None:
    """Have DeepSpeed begin its process group, on the CPU without shared memory.

    Args:
        backend: ``gloo`` or ``nccl``.
    """
    import deepspeed

    without_shared_memory()
    deepspeed.init_distributed(dist_backend=backend)


def without_shared_memory() -> None:
    """Switch DeepSpeed's shared-memory all-reduce off in this process and its forks.

    gloo does the work then. It does nothing where DeepSpeed is not imported. ``__compatible_ops__``
    is DeepSpeed's table of the operators that it may build (printed by ``ds_report``), read when
    its communication back end starts.
    """
    ops = sys.modules.get("deepspeed.ops")
    if ops is not None:
        ops.__compatible_ops__[OPERATOR] = False

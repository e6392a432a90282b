"""Keep DeepSpeed on the CPU from compiling an operator and from leaving shared memory behind.

``preload`` calls it in the processes from which ranks on the CPU are forked. On ranks, code that is
about to use DeepSpeed calls it too: ``strategies/zero``, drivers (the trainers under test), and
``ext/scripts/bridge`` for users' scripts.
"""

from __future__ import annotations

import sys

#: The all-reduce through /dev/shm: compiled at first use (40 s), and it leaves 66 MiB a rank that
#: nothing unlinks.
OPERATOR = "deepspeed_shm_comm"


def without_shared_memory() -> None:
    """Switch DeepSpeed's shared-memory all-reduce off in this process and its forks.

    gloo does the work then. It does nothing where DeepSpeed is not imported. ``__compatible_ops__``
    is DeepSpeed's table of the operators that it may build (printed by ``ds_report``), read when
    its communication back end starts.
    """
    ops = sys.modules.get("deepspeed.ops")
    if ops is not None:
        ops.__compatible_ops__[OPERATOR] = False

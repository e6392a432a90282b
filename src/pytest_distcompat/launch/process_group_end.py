"""End of a rank's default process group: destroyed, or left to the end of the process where that follows at once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pytest_distcompat.launch import rank

#: How long to wait for other ranks, in seconds. After that the group is destroyed, as for ranks that do not end at once.
WAIT_S = 2.0
#: The key of the store by which the ranks count those that have left.
_LEFT = "distcompat/left"
#: The key that the last one sets.
_ALL_LEFT = "distcompat/all-left"


def leave_process_group() -> None:
    """Be done with the default process group, which is initialized.

    NCCL takes half a second to destroy a communicator: its proxy thread looks at its sockets that often (``poll`` in
    src/proxy.cc of NCCL 2.28 and 2.31; 0.50 s on an H100). A forked rank ends by ``os._exit`` right afterwards, which frees all
    that the communicator has. So it only waits until no other rank needs it any more.
    """
    from torch import distributed

    if rank.ends_at_once and distributed.get_backend() == "nccl" and _have_all_left():
        return
    distributed.destroy_process_group()


def _have_all_left() -> bool:
    """Wait until the kernels of all ranks are done, and tell whether they are: they read and write memory of other ranks.

    Ranks meet at the store, since a collective is such a kernel itself.
    """
    import torch
    from torch import distributed

    torch.cuda.synchronize()
    store = default_store()
    if store.add(_LEFT, 1) == distributed.get_world_size():
        store.set(_ALL_LEFT, "")
    try:
        store.wait([_ALL_LEFT], timedelta(seconds=WAIT_S))
    except distributed.DistStoreError:
        # Another rank has more to do. It is not known whether its kernels are done.
        return False
    return True


def default_store() -> Any:
    """Return the store of the default process group.

    torch has only a private name for it; ``tests/launch/test_private_names.py`` fails when it goes away.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()  # noqa: SLF001 - see the docstring

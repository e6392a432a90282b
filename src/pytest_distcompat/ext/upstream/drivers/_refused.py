"""Why walks of the built-in drivers lack some calls.

A walk calls a live trainer in random order (``save()``, ``load()``, ``step()``). The modules
``_..._calls.py`` list the calls that it must not make, each with the reason; these are the reasons
that several of them share.
"""

from __future__ import annotations

#: Why walks under FSDP1 on the CPU have no call of accelerate that takes the whole state dict.
OFFLOADS = (
    "accelerate offloads: a segmentation fault, https://github.com/pytorch/pytorch/issues/188989"
)
#: Pattern of calls -> why walks under ZeRO-3 lack them.
NO_SECOND_LOAD = {
    "load*": (
        "under ZeRO-3 a checkpoint cannot be loaded after one was saved, "
        "says load_checkpoint's documentation"
    )
}

"""Why walks of the built-in drivers lack some calls."""

from __future__ import annotations

#: Why walks under FSDP1 on the CPU have no call of accelerate that takes the whole state dict.
OFFLOADS = (
    "accelerate offloads: a segmentation fault, https://github.com/pytorch/pytorch/issues/188989"
)
#: What walks under ZeRO-3 lack.
NO_SECOND_LOAD = {
    "load*": (
        "under ZeRO-3 a checkpoint cannot be loaded after one was saved, "
        "says load_checkpoint's documentation"
    )
}

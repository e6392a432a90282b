"""How many GPUs this process may use: asked of NVML, so that CUDA is not initialised and torch not imported."""

from __future__ import annotations

import os
from collections.abc import Sequence


def visible_gpus() -> int:
    """The number of GPUs that CUDA would show a process of ours, ``CUDA_VISIBLE_DEVICES`` obeyed. 0 without a driver."""
    uuids = gpu_uuids()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(uuids) if wanted is None else count_visible(wanted, uuids)


def gpu_uuids() -> list[str]:
    """The UUID of every GPU of the machine, in NVML's order; empty where there is no driver."""
    return _of_each_gpu("nvmlDeviceGetUUID")


def gpu_name() -> str:
    """What the machine's first GPU is called (``NVIDIA H200``); empty where there is no driver."""
    return next(iter(_of_each_gpu("nvmlDeviceGetName")), "")


def _of_each_gpu(question: str) -> list[str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_text(getattr(pynvml, question)(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def count_visible(wanted: str, uuids: Sequence[str]) -> int:
    """How many of the machine's GPUs a value of CUDA_VISIBLE_DEVICES shows.

    Entries are indices, UUIDs or beginnings of UUIDs (``GPU-8932f937``), or MIG names (taken as they are: NVML lists
    them under their GPU). As CUDA does, stop at the first entry that names nothing, and show nothing if one is named twice.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    shown: list[str] = []
    for raw in wanted.split(","):
        entry = raw.strip()
        if entry.isdigit() and int(entry) < len(uuids):
            shown.append(uuids[int(entry)])
        elif entry.startswith("MIG-"):
            shown.append(entry)
        elif entry.startswith("GPU-") and (match := [uuid for uuid in uuids if uuid.startswith(entry)]):
            shown.append(match[0])
        else:
            break
    return len(shown) if len(set(shown)) == len(shown) else 0

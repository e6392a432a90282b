"""GPUs that this process may use, according to NVML: CUDA is not initialised and torch not imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: The default world size on the CPU: the smallest with which anything is distributed.
CPU_WORLD_SIZE = 2


@dataclass(frozen=True)
class MigInstance:
    """Part of a GPU in MIG mode: the GPU's UUID, its own UUID, and its older name (``MIG-GPU-8932f937.../3/0``)."""

    gpu: str
    uuid: str
    path: str


def visible_gpus() -> int:
    """Return the number of GPUs that CUDA would show this process, by ``CUDA_VISIBLE_DEVICES``; 0 without a driver."""
    return len(visible_ids())


def visible_ids() -> list[str]:
    """Return the UUIDs of the GPUs and MIG instances that CUDA would show this process."""
    return names_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), gpu_uuids(), mig_instances())


def gpu_uuids() -> list[str]:
    """Return the UUID of every GPU of the machine, in NVML's order, empty for a lost one; nothing without a driver."""
    return _query_each_gpu("nvmlDeviceGetUUID")


def gpu_name() -> str:
    """Return the name of the machine's first GPU (``NVIDIA H200``); empty without a driver."""
    return next(filter(None, _query_each_gpu("nvmlDeviceGetName")), "")


def mig_instances() -> list[MigInstance]:
    """Return every MIG instance of the machine, in NVML's order; empty where no GPU is in MIG mode."""
    found = []
    with _nvml() as nvml:
        for gpu in filter(None, _handles(nvml)):
            for index in range(_most_instances(nvml, gpu)):
                # The numbers have gaps where an instance was destroyed.
                with contextlib.suppress(nvml.NVMLError):
                    part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
                    gpu_uuid, uuid = (_text(nvml.nvmlDeviceGetUUID(handle)) for handle in (gpu, part))
                    numbers = (nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part))
                    found.append(MigInstance(gpu_uuid, uuid, f"MIG-{gpu_uuid}/{numbers[0]}/{numbers[1]}"))
    return found


def used_memory(ids: Sequence[str]) -> dict[str, int]:
    """Return the bytes that all processes use on each of these GPUs or MIG instances, as far as NVML knows them."""
    found = {}
    with _nvml() as nvml:
        for uuid in ids if nvml else ():
            with contextlib.suppress(nvml.NVMLError):
                found[uuid] = int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    return found


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first visible GPU, ``(9, 0)``; None if NVML does not know it."""
    with _nvml() as nvml:
        for uuid in visible_ids()[:1] if nvml else ():
            with contextlib.suppress(nvml.NVMLError):
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(nvml.nvmlDeviceGetHandleByUUID(uuid))
                return int(major), int(minor)
    return None


def _query_each_gpu(function: str) -> list[str]:
    with _nvml() as nvml:
        found = []
        for handle in _handles(nvml):
            value = ""
            if handle is not None:
                with contextlib.suppress(nvml.NVMLError):
                    value = _text(getattr(nvml, function)(handle))
            found.append(value)
        return found


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML's functions, None without a driver."""
    import pynvml

    with contextlib.ExitStack() as end:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            yield None
            return
        end.callback(pynvml.nvmlShutdown)
        yield pynvml


def _handles(nvml: Any) -> list[Any]:
    """Return the handle of every GPU, None for one that is lost: NVML counts it, and has no handle of it."""
    found: list[Any] = []
    for index in range(nvml.nvmlDeviceGetCount()) if nvml else ():
        try:
            found.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError:
            found.append(None)
    return found


def _most_instances(nvml: Any, gpu: Any) -> int:
    """Return how many MIG instances that GPU may have; 0 if it is not in MIG mode or has none."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
        return int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) if current else 0
    except nvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def names_visible(wanted: str | None, uuids: Sequence[str], instances: Sequence[MigInstance] = ()) -> list[str]:
    """Return the UUIDs of the devices that a value of CUDA_VISIBLE_DEVICES shows, in its order; None: it is not set.

    Entries are indices, UUIDs or beginnings of one (``GPU-8932f937``), or MIG names; one that NVML does not list is
    taken as it is. Like CUDA, stop at the first entry that names nothing, and show nothing if a device is named twice.
    A GPU in MIG mode stands for its first instance. A lost GPU, an empty text among ``uuids``, is never shown.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#cuda-device-enumeration
    """
    first = {instance.gpu: instance.uuid for instance in reversed(instances)}
    whole = [first.get(uuid, uuid) for uuid in uuids]
    if wanted is None:
        return [name for name in whole if name]
    shown: list[str] = []
    for raw in wanted.split(","):
        entry = raw.strip()
        if entry.isdigit() and int(entry) < len(uuids) and whole[int(entry)]:
            shown.append(whole[int(entry)])
        elif entry.startswith("MIG-"):
            named = {part.uuid for part in instances if part.uuid.startswith(entry) or part.path == entry}
            shown.append(named.pop() if len(named) == 1 else entry)
        elif len(match := [name for name, uuid in zip(whole, uuids, strict=True) if _begins(uuid, entry)]) == 1:
            shown.append(match[0])
        else:
            break
    return shown if len(set(shown)) == len(shown) else []


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)

"""GPUs that this process may use, according to NVML, NVIDIA's library for reading GPUs.

pytest's process asks how many GPUs there are, to choose world sizes and to lease devices
(``lease``), and how much memory is in use. It does so without CUDA: a process that has initialised
CUDA cannot be forked, and takes GPU memory. torch is not imported either.

A GPU goes by its UUID, ``GPU-8932f937-d72c-4106-c12f-20bd9faed9f6``. A GPU in MIG mode is divided
into instances with UUIDs of their own, ``MIG-...``. Without NVIDIA's driver there are no GPUs. A
*lost* GPU has fallen off the bus: NVML counts it and cannot read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: The default world size on the CPU: the smallest with which anything is distributed.
CPU_WORLD_SIZE = 2


@dataclass(frozen=True)
class GpuFacts:
    """Number of visible GPUs and capability of the first, for a process that may not open NVML.

    A fork server (a process from which ranks are forked) gets them from the process that starts it.
    """

    #: The number of visible GPUs.
    count: int
    #: The compute capability of the first, ``(9, 0)`` for an H100; None if unknown.
    capability: tuple[int, int] | None


#: The process that may not open NVML, and the facts that it got instead. Processes that are forked
#: from it ask NVML themselves.
_preset_process = 0
_preset: GpuFacts | None = None


def set_gpu_facts(facts: GpuFacts) -> None:
    """Have this process use these facts and not open NVML.

    NVML starts a thread, which does not survive a fork.
    """
    global _preset_process, _preset  # noqa: PLW0603 - a fork server has its facts as long as it lives
    _preset_process = os.getpid()
    _preset = facts


def preset_gpu_facts() -> GpuFacts | None:
    """Return the facts that were set in this process; None in all others."""
    return _preset if os.getpid() == _preset_process else None


@dataclass(frozen=True)
class MigInstance:
    """Part of a GPU in MIG mode."""

    #: The UUID of the GPU.
    gpu: str
    #: The UUID of the part.
    uuid: str
    #: Its older name: ``MIG-GPU-8932f937.../3/0``.
    path: str


def visible_gpus() -> int:
    """Return the number of GPUs that CUDA would show this process.

    ``CUDA_VISIBLE_DEVICES`` is applied. Without a driver there are 0.
    """
    facts = preset_gpu_facts()
    if facts is not None:
        return facts.count
    return len(visible_ids())


def visible_ids(wanted: str | None = None) -> list[str]:
    """Return the UUIDs of the GPUs and MIG instances that CUDA would show this process.

    ``wanted`` is a value of ``CUDA_VISIBLE_DEVICES`` to use in place of the environment's.
    """
    if wanted is None:
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names_visible(wanted, gpu_uuids(), mig_instances())


def gpu_uuids() -> list[str]:
    """Return the UUID of every GPU of the machine, in NVML's order.

    A lost GPU has an empty one. Without a driver there are none.
    """
    return _query_each_gpu("nvmlDeviceGetUUID")


def gpu_numbers(ids: Sequence[str]) -> list[int] | None:
    """Return the number of each of these GPUs in NVML's order, which is that of their PCI bus.

    Leases (``lease/inventory``) make CUDA_VISIBLE_DEVICES of them. None if one of them has no
    number, as a MIG instance: torch counts no list that mixes numbers and UUIDs
    (``_parse_visible_devices`` in torch/cuda/__init__.py).
    """
    # A lost GPU has none.
    number_by_uuid = {uuid: number for number, uuid in enumerate(gpu_uuids()) if uuid}
    numbers: list[int] = []
    for uuid in ids:
        if uuid not in number_by_uuid:
            return None
        numbers.append(number_by_uuid[uuid])
    return numbers


def gpu_name() -> str:
    """Return the name of the machine's first GPU (``NVIDIA H200``); empty without a driver."""
    for name in _query_each_gpu("nvmlDeviceGetName"):
        if name:
            return name
    # A lost GPU has no name.
    return ""


def mig_instances() -> list[MigInstance]:
    """Return every MIG instance of the machine, in NVML's order.

    There is none where no GPU is in MIG mode.
    """
    instances: list[MigInstance] = []
    with _nvml() as nvml:
        if nvml is None:
            return []
        for number in range(nvml.nvmlDeviceGetCount()):
            # A lost GPU has no handle, and most GPUs have no such mode.
            with contextlib.suppress(nvml.NVMLError):
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
                active, _ = nvml.nvmlDeviceGetMigMode(gpu)
                if active:
                    instances += _instances_of(nvml, gpu)
    return instances


def _instances_of(nvml: Any, gpu: Any) -> list[MigInstance]:
    """Return the MIG instances of the GPU with that handle, in NVML's order."""
    instances: list[MigInstance] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        # The numbers have gaps where an instance was destroyed.
        with contextlib.suppress(nvml.NVMLError):
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            gpu_uuid = _text(nvml.nvmlDeviceGetUUID(gpu))
            uuid = _text(nvml.nvmlDeviceGetUUID(instance))
            gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(instance)
            compute_instance = nvml.nvmlDeviceGetComputeInstanceId(instance)
            instances.append(
                MigInstance(gpu_uuid, uuid, f"MIG-{gpu_uuid}/{gpu_instance}/{compute_instance}")
            )
    return instances


def used_memory(ids: Sequence[str]) -> dict[str, int]:
    """Return the bytes in use on each of these GPUs or MIG instances.

    That is all memory in use, less that of unrelated processes. Processes below this one, and
    memory that no process owns, count. A device is left out if NVML does not know it, or if another
    process uses it and NVML does not tell how much.
    """
    memory_by_id: dict[str, int] = {}
    processes = _query(ids, "nvmlDeviceGetComputeRunningProcesses")
    for uuid, info in _query(ids, "nvmlDeviceGetMemoryInfo").items():
        # Where NVML lists no processes, as in most containers, all memory counts.
        memory_of_others = []
        for process in processes.get(uuid, ()):
            if not _is_ours(process.pid):
                memory_of_others.append(process.usedGpuMemory)
        # NVML may say None for a process.
        if None not in memory_of_others:
            memory_by_id[uuid] = int(info.used) - sum(memory_of_others)
    return memory_by_id


def own_memory(ids: Sequence[str]) -> dict[str, int]:
    """Return the bytes that this process and those below it use on each of these GPUs.

    It is for a GPU that other runs share. Unlike ``used_memory`` it does not count memory that no
    process owns: that may be another run's, whose process ends just now or is not listed. So it is
    0 where NVML lists no processes, as in most containers. A GPU is left out if NVML does not know
    it, or does not tell how much one of these processes uses.
    """
    memory_by_id: dict[str, int] = {}
    for uuid, processes in _query(ids, "nvmlDeviceGetComputeRunningProcesses").items():
        own = [process.usedGpuMemory for process in processes if _is_ours(process.pid)]
        # NVML may say None for a process.
        if None not in own:
            memory_by_id[uuid] = sum(own)
    return memory_by_id


def _is_ours(pid: int) -> bool:
    """Tell whether that is this process or one below it.

    A process that outlives the rank that started it counts too: the launcher process, a child of
    this one, adopts it.
    """
    # A session without GPUs must not pay for the import.
    import psutil

    try:
        process = psutil.Process(pid)
        parents = [parent.pid for parent in process.parents()]
        return os.getpid() in {pid, *parents}
    except psutil.Error:
        # It is in another container, or ends just now.
        return False


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first visible GPU, ``(9, 0)``.

    None if NVML does not know it.
    """
    facts = preset_gpu_facts()
    if facts is not None:
        return facts.capability
    first_gpu = visible_ids()[:1]
    # At most one answer.
    for major, minor in _query(first_gpu, "nvmlDeviceGetCudaComputeCapability").values():
        return int(major), int(minor)
    return None


def gpu_facts() -> GpuFacts:
    """Return the facts of the GPUs that CUDA would show this process."""
    return GpuFacts(visible_gpus(), compute_capability())


def _query(ids: Sequence[str], function: str) -> dict[str, Any]:
    """Return what a function of NVML returns for each of these devices, by UUID.

    A device that NVML does not know is left out. ``function`` is a name:
    ``nvmlDeviceGetMemoryInfo``.
    """
    answers: dict[str, Any] = {}
    with _nvml() as nvml:
        if nvml is None:
            return {}
        for uuid in ids:
            with contextlib.suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByUUID(uuid)
                answers[uuid] = getattr(nvml, function)(device)
    return answers


def _query_each_gpu(function: str) -> list[str]:
    """Return the text that a function of NVML returns for every GPU, empty for a lost one."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        answers = [""] * nvml.nvmlDeviceGetCount()
        for number in range(len(answers)):
            with contextlib.suppress(nvml.NVMLError):
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
                answers[number] = _text(getattr(nvml, function)(gpu))
    return answers


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML's functions, None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def names_visible(
    wanted: str | None, uuids: Sequence[str], instances: Sequence[MigInstance] = ()
) -> list[str]:
    """Return the UUIDs of the devices that a value of CUDA_VISIBLE_DEVICES shows, in its order.

    ``wanted`` is None where the variable is not set.

    Entries are indices, UUIDs or beginnings of one (``GPU-8932f937``), or MIG names; a MIG name
    that NVML does not list is taken as it is. Like CUDA, stop at the first entry that names
    nothing, and show nothing if a device is named twice. A GPU in MIG mode stands for its first
    instance. A lost GPU, an empty text among ``uuids``, is never shown.

    Numbers are taken to be NVML's. Those of CUDA are the same where CUDA_DEVICE_ORDER is
    PCI_BUS_ID, and in practice where all GPUs have one name. Where they differ and that is not set,
    CUDA puts the fastest first, in an order that NVML cannot tell.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    https://docs.nvidia.com/datacenter/tesla/mig-user-guide/#cuda-device-enumeration
    """
    # Reversed, so that the first instance of a GPU is the one that stays.
    first_instance = {instance.gpu: instance.uuid for instance in reversed(instances)}
    devices = [first_instance.get(uuid, uuid) for uuid in uuids]
    if wanted is None:
        return [device for device in devices if device]
    shown: list[str] = []
    for entry in wanted.split(","):
        device = _named_device(entry.strip(), devices, uuids, instances)
        if device is None:
            break
        shown.append(device)
    if len(set(shown)) < len(shown):
        return []
    return shown


def _named_device(
    entry: str, devices: Sequence[str], uuids: Sequence[str], instances: Sequence[MigInstance]
) -> str | None:
    """Return the UUID of the device that an entry of CUDA_VISIBLE_DEVICES names.

    None if it names none. ``devices`` has for each GPU of ``uuids`` the device that stands for it:
    itself, or its first MIG instance.
    """
    if entry.isdigit() and int(entry) < len(devices):
        numbered = devices[int(entry)]
        # A lost GPU has an empty UUID.
        if numbered:
            return numbered
    if entry.startswith("MIG-"):
        named: set[str] = set()
        for instance in instances:
            if instance.uuid.startswith(entry) or instance.path == entry:
                named.add(instance.uuid)
        # NVML may not list it.
        return named.pop() if len(named) == 1 else entry
    if not entry.startswith("GPU-"):
        return None
    matching = []
    for device, uuid in zip(devices, uuids, strict=True):
        if uuid.startswith(entry):
            matching.append(device)
    # The beginning of several UUIDs names none of them.
    return matching[0] if len(matching) == 1 else None

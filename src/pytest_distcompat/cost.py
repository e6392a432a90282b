"""Cost of a cell, from its trace: time, throughput, memory."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_distcompat.trace import RunTrace, Snapshot, StateInfo, Trace, UnwrappedInfo

#: Steps at the start that are not measured: allocators, compilers and bucket sizes settle in them.
WARM_UP = 8

#: Bytes of an element, by torch's name of its dtype.
BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "uint8", "int8", "bool"), 1),
}

#: Dense bfloat16 operations a second, from the vendor's data sheets, by a part of the device's name.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


#: From how many elements on a rank on, in blocks of how many, option ``optimizer=adam8bit`` keeps state in 8 bits:
#: https://github.com/pytorch/ao/tree/main/torchao/optim, which took both numbers from bitsandbytes.
QUANTIZED_FROM, _QUANTIZED_BLOCK = 4096, 256


@dataclass(frozen=True)
class Cost:
    """Cost of the training in a cell.

    ``tokens_per_second`` is for one rank, ``state_bytes`` masters and optimizer state per trained parameter over all
    ranks, ``memory`` the peak of the rank that needed most, in bytes. ``mfu`` is the fraction of the device's peak that
    the model's own operations use (6 per parameter and token: https://arxiv.org/abs/2204.02311, appendix B), None where
    the peak is not known.
    """

    step_seconds: float
    tokens_per_second: float
    memory: int
    state_bytes: float
    mfu: float | None = None


def cost(trace: Trace, device: str = "", run: str = "train") -> Cost | None:
    """Return the cost of the training, on that GPU or (empty) the CPU; None if it has too few steps."""
    if run not in trace.runs:
        return None
    trained = trace.run(run)
    steps = [trained.at("step", nth) for nth in range(WARM_UP, len(trained.indices("step")))]
    if not steps:
        return None
    # A step takes as long as its slowest rank.
    seconds = statistics.median(max(snapshot.seconds for snapshot in snapshots) for snapshots in steps)
    tokens = statistics.mean(snapshot.tokens for snapshots in steps for snapshot in snapshots)
    rate = tokens / seconds if seconds else 0.0
    peak = next((value for name, value in PEAK.items() if name in device), None)
    size = sum(math.prod(info.shape) for info in trained.unwrapped.parameters) if trained.unwrapped else 0
    memory = max((snapshot.memory for snapshots in steps for snapshot in snapshots), default=0)
    mfu = 6 * size * rate / peak if peak else None
    return Cost(seconds, rate, memory, state_bytes(trained), mfu)


def is_quantized(state: StateInfo) -> bool:
    """Tell whether option ``optimizer=adam8bit`` keeps this rank's part of a tensor of the optimizer's state in 8 bits."""
    large = state.numel >= QUANTIZED_FROM and state.numel % _QUANTIZED_BLOCK == 0
    return large and state.key not in {"step", "master"}


def state_bytes(run: RunTrace, nth: int = 2) -> float:
    """Return the bytes of masters and optimizer state on all ranks per trained parameter, after step ``nth``."""
    # Float32 masters and two moments are 12 bytes: https://huggingface.co/blog/deepspeed-to-fsdp-and-back.
    stored = (item for snapshot in run.at("step", nth) for item in state_elements(snapshot).items())
    size = sum(numel * BYTES.get(dtype, 4) for (_, dtype), numel in stored)
    trained = trained_elements(run.unwrapped)
    return size / trained if trained else 0.0


def state_elements(snapshot: Snapshot) -> Mapping[tuple[str, str], int]:
    """Return the elements that this rank's optimizer stores, without step counters, by (key or ``master``, dtype)."""
    found: dict[tuple[str, str], int] = {}
    for state in snapshot.states:
        if state.numel > 1 or state.key != "step":
            found[state.key, state.dtype] = found.get((state.key, state.dtype), 0) + state.numel
    if not any(key == "master" for key, _ in found):
        # Without flat copies the optimizer updates the live parameters themselves.
        for info in snapshot.parameters:
            if info.held and info.trainable:
                found["master", info.dtype] = found.get(("master", info.dtype), 0) + info.local_numel
    return found


def tensor_bytes(run: RunTrace) -> dict[str, list[int]]:
    """Return the bytes of ``parameters``, ``gradients`` and ``optimizer`` state on each rank, after three steps.

    Gradients are those that the optimizer gets; flat masters count as optimizer state.
    """
    found: dict[str, dict[int, int]] = {}
    for snapshot in run.trained:
        live, stored = snapshot.parameters, state_elements(snapshot)
        flat = any(state.key == "master" for state in snapshot.states)
        without = snapshot.optimizer.without_gradient if snapshot.optimizer else ()
        updated = sum(numel for (key, _), numel in stored.items() if key == "master")
        updated -= 0 if flat else sum(info.local_numel for info in live if info.held and info.name in without)
        width = max((BYTES.get(dtype, 4) for step in snapshot.steps for dtype in step.gradient), default=0)
        sizes = {
            "parameters": sum(info.local_numel * BYTES.get(info.dtype, 4) for info in live),
            "gradients": updated * width,
            "optimizer": sum(n * BYTES.get(dtype, 4) for (key, dtype), n in stored.items() if flat or key != "master"),
        }
        for name, size in sizes.items():
            found.setdefault(name, {}).update(dict.fromkeys(snapshot.ranks, size))
    return {name: [size for _, size in sorted(sizes.items())] for name, sizes in found.items()}


#: Kinds of collectives, by how their operators begin; each with the part of its input that a rank of n sends in a ring.
_KINDS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def sent_bytes(run: RunTrace) -> list[dict[str, Any]]:
    """Return what rank 0 sends in the recorded step of a simulation, in a ring: by kind of collective and mesh dimension."""
    calls, sent = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    for snapshot in run.trained[:1] if run.simulated else ():
        dims = [
            (dim.name, dim.size) for dim in max((info.layout.dims for info in snapshot.parameters), key=len, default=())
        ]
        # An operator without ranks, such as ``wait_tensor``, sends nothing.
        for info in (one for one in snapshot.collectives if one.ranks):
            op = next((kind for kind in _KINDS if info.op.replace("_", "").startswith(kind.replace("_", ""))), info.op)
            part = _KINDS[op](len(info.ranks)) if op in _KINDS else 1.0
            kind = op, _along(dims, info.ranks), len(info.ranks)
            calls[kind] += info.calls
            sent[kind] += round(info.total * BYTES.get(info.dtype, 4) * part)
    return [
        {"collective": kind[0], "mesh": kind[1], "ranks": kind[2], "calls": calls[kind], "bytes": sent[kind]}
        for kind in calls
    ]


def _along(dims: Iterable[tuple[str, int]], ranks: tuple[int, ...]) -> str:
    """Return the names of the mesh dimensions along which these ranks differ, the outermost first."""
    names: list[str] = []
    for name, size in reversed([*dims]):
        names[:0] = [name] if len({rank % size for rank in ranks}) > 1 else []
        ranks = tuple(rank // size for rank in ranks)
    return " x ".join(names)


def trained_elements(unwrapped: UnwrappedInfo | None) -> int:
    """Return the number of trained elements of the unwrapped model; 0 if it was not recorded."""
    return sum(math.prod(info.shape) for info in (unwrapped.parameters if unwrapped else ()) if info.trainable)

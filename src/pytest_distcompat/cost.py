"""Cost of a cell, from its trace: time, throughput, memory.

A cell is one point of the matrix, such as ``fsdp2-fp32-w2``; its trace is what the ranks recorded
after each step. Reports show the cost of each cell's training (``cost``, ``tensor_bytes``). The
check ``throughput`` compares it with a baseline, and the check of memory compares the number of
stored elements with what the strategy should keep (``state_elements``).

A *master* is the tensor that the optimizer updates: a float32 copy of a parameter in lower
precision, or the parameter itself where there is no copy. ZeRO joins the masters of many parameters
into flat ones. ``ParameterInfo.held`` is how often the optimizer's param groups have a live
parameter, 0 if it is not optimized; None where they have flat copies instead.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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

#: Dense bfloat16 operations a second, from the vendor's data sheets, by a part of the device's
#: name.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


#: ``optimizer=adam8bit`` keeps a state in 8 bits if a rank has at least so many elements of it, and
#: if they fill blocks of so many: https://github.com/pytorch/ao/tree/main/torchao/optim, which took
#: both numbers from bitsandbytes.
QUANTIZED_FROM, _QUANTIZED_BLOCK = 4096, 256


@dataclass(frozen=True)
class Cost:
    """Cost of the training in a cell."""

    #: The median duration of a step in seconds.
    step_seconds: float
    #: The mean of one rank.
    tokens_per_second: float
    #: The peak memory of the rank that needed most, in bytes.
    memory: int
    #: The bytes of masters and optimizer state of all ranks, per trained element of the model: 12
    #: for Adam with float32 masters and nothing replicated.
    state_bytes: float
    #: Model FLOPs utilization: the fraction of the device's peak that the model's own operations
    #: use (6 per parameter and token: https://arxiv.org/abs/2204.02311, appendix B). None where the
    #: peak is not known.
    mfu: float | None = None


def cost(trace: Trace, device: str = "", run: str = "train") -> Cost | None:
    """Return the cost of a run of training.

    None if the trace lacks the run, or if it has no steps beyond ``WARM_UP``.

    Args:
        trace: The runs of a scenario.
        device: The name of the GPU (``NVIDIA H200``), empty for the CPU.
        run: The name of the run: the training of the checks, or ``baseline``.
    """
    if run not in trace.runs:
        return None
    training = trace.run(run)
    step_seconds: list[float] = []
    tokens: list[int] = []
    peak_memory = 0
    for nth in range(WARM_UP, len(training.indices("step"))):
        snapshots = training.at("step", nth)
        # A step takes as long as its slowest rank.
        step_seconds.append(max(snapshot.seconds for snapshot in snapshots))
        tokens.extend(snapshot.tokens for snapshot in snapshots)
        peak_memory = max(peak_memory, *(snapshot.memory for snapshot in snapshots))
    if not step_seconds:
        return None
    seconds = statistics.median(step_seconds)
    rate = 0.0
    if seconds:
        rate = statistics.mean(tokens) / seconds
    mfu = None
    peak = _peak_operations(device)
    if peak is not None:
        mfu = 6 * _model_elements(training.unwrapped) * rate / peak
    return Cost(seconds, rate, peak_memory, state_bytes(training), mfu)


def _peak_operations(device: str) -> float | None:
    """Return the dense bfloat16 operations a second of the device.

    None if its data sheet is not listed in ``PEAK``.
    """
    for part_of_name, operations in PEAK.items():
        if part_of_name in device:
            return operations
    return None


def _model_elements(unwrapped: UnwrappedInfo | None) -> int:
    """Return the number of elements of all parameters, trained or frozen.

    It is 0 if the unwrapped model was not recorded.
    """
    if unwrapped is None:
        return 0
    return sum(math.prod(info.shape) for info in unwrapped.parameters)


def is_quantized(state: StateInfo) -> bool:
    """Tell whether ``optimizer=adam8bit`` keeps this part of the optimizer's state in 8 bits.

    ``state`` is what one rank has of one tensor.
    """
    if state.key in {"step", "master"}:
        return False
    return state.numel >= QUANTIZED_FROM and state.numel % _QUANTIZED_BLOCK == 0


def state_bytes(run: RunTrace, nth: int = 2) -> float:
    """Return the bytes of masters and optimizer state per trained element.

    They are those of all ranks after step ``nth``.
    """
    # Float32 masters and two moments are 12 bytes:
    # https://huggingface.co/blog/deepspeed-to-fsdp-and-back.
    trained = trained_elements(run.unwrapped)
    if not trained:
        return 0.0
    size = 0
    for snapshot in run.at("step", nth):
        for (_key, dtype), numel in state_elements(snapshot).items():
            size += nbytes(numel, dtype)
    return size / trained


def nbytes(numel: int, dtype: str) -> int:
    """Return the bytes of so many elements.

    A dtype that ``BYTES`` does not list counts as float32.
    """
    return numel * BYTES.get(dtype, 4)


def state_elements(snapshot: Snapshot) -> Mapping[tuple[str, str], int]:
    """Return the elements that this rank's optimizer stores, without step counters.

    They are counted by key of the state (or ``master``) and dtype: ``{("exp_avg", "float32"): 512,
    ("master", "float32"): 512, ...}``.
    """
    stored = Counter[tuple[str, str]]()
    for state in snapshot.states:
        # A step counter is one number.
        if state.numel > 1 or state.key != "step":
            stored[state.key, state.dtype] += state.numel
    if not any(key == "master" for key, _dtype in stored):
        # Without flat copies the optimizer updates the live parameters themselves.
        for info in snapshot.parameters:
            if info.held and info.trainable:
                stored["master", info.dtype] += info.local_numel
    return stored


def tensor_bytes(run: RunTrace) -> dict[str, list[int]]:
    """Return the bytes of each kind of tensor on each rank, after three steps.

    The kinds are ``parameters``, ``gradients`` and ``optimizer`` (its state): ``{"parameters":
    [4096, 4096], ...}`` on two ranks. Gradients are those that the optimizer gets; flat masters
    count as optimizer state.
    """
    sizes_by_rank: dict[int, dict[str, int]] = {}
    for snapshot in run.trained:
        sizes = {
            "parameters": _parameter_bytes(snapshot),
            "gradients": _gradient_bytes(snapshot),
            "optimizer": _optimizer_bytes(snapshot),
        }
        # One rank, or all those for which a stand-in for ranks took one snapshot.
        for rank in snapshot.ranks:
            sizes_by_rank[rank] = sizes
    listed: dict[str, list[int]] = {}
    for rank in sorted(sizes_by_rank):
        for name, size in sizes_by_rank[rank].items():
            listed.setdefault(name, []).append(size)
    return listed


def _parameter_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of what this rank stores of the live parameters."""
    return sum(nbytes(info.local_numel, info.dtype) for info in snapshot.parameters)


def _has_flat_masters(snapshot: Snapshot) -> bool:
    """Tell whether the optimizer updates flat copies of the parameters (ZeRO).

    Otherwise it updates the live parameters themselves.
    """
    return any(state.key == "master" for state in snapshot.states)


def _gradient_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of the gradients that this rank's optimizer gets.

    All that it updates has one, counted in the widest dtype of any.
    """
    numel = 0
    for (key, _dtype), master_numel in state_elements(snapshot).items():
        if key == "master":
            numel += master_numel
    if not _has_flat_masters(snapshot) and snapshot.optimizer is not None:
        # A parameter whose gradient was None in all steps is updated without one.
        for info in snapshot.parameters:
            if info.held and info.name in snapshot.optimizer.without_gradient:
                numel -= info.local_numel
    element_size = 0
    for step in snapshot.steps:
        for dtype in step.gradient:
            element_size = max(element_size, nbytes(1, dtype))
    return numel * element_size


def _optimizer_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of this rank's optimizer state.

    Masters are part of it if they are copies of the parameters.
    """
    flat = _has_flat_masters(snapshot)
    size = 0
    for (key, dtype), numel in state_elements(snapshot).items():
        if flat or key != "master":
            size += nbytes(numel, dtype)
    return size


def trained_elements(unwrapped: UnwrappedInfo | None) -> int:
    """Return the number of trained elements of the unwrapped model; 0 if it was not recorded."""
    if unwrapped is None:
        return 0
    return sum(math.prod(info.shape) for info in unwrapped.parameters if info.trainable)

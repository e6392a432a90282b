"""What libraries have for all of a process: settings, hooks and singletons that a test may leave changed."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any

#: What torch's settings are read from, below ``torch``; an older release may lack some. Functions are called.
_FLAGS = (
    "get_default_dtype",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_cache_enabled",
    "is_anomaly_enabled",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "is_warn_always_enabled",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_num_interop_threads",
    "autograd.is_multithreading_enabled",
    "multiprocessing.get_sharing_strategy",
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.fp32_precision",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.mha.get_fastpath_enabled",
)
_read_flags = tuple(map(operator.attrgetter, _FLAGS))
#: Half of it is 0 where numbers so small are taken for 0.
_SMALL = sys.float_info.min
#: What of torch is replaced most often: by tests, and by DeepSpeed for as long as models are made in parts.
_patched = operator.attrgetter(
    *("empty", "zeros", "ones", "full", "tensor", "randn", "save", "load"),
    *("Tensor.backward", "autograd.backward", "optim.Optimizer.zero_grad", "nn.utils.clip_grad_norm_"),
    *(f"nn.Module.{name}" for name in ("__init__", "__call__", "to", "state_dict", "load_state_dict")),
)
_patched_collectives = operator.attrgetter(
    *("init_process_group", "destroy_process_group", "is_initialized", "get_rank", "get_world_size", "new_group"),
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "send", "recv", "isend", "irecv"),
)
#: By module: the dicts of hooks that are called for all modules, and for all optimizers.
_HOOKS = {"torch.nn.modules.module": "_global_", "torch.optim.optimizer": "_global_optimizer_"}


def _torch() -> list[object]:
    """The global flags of torch."""
    torch: Any = sys.modules["torch"]
    found = [
        str(torch.get_default_device()),
        _SMALL / 2 == 0.0,
        *[torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        *[torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
    ]
    for read in _read_flags:
        try:
            value = read(torch)
            found.append(value() if callable(value) else value)
        except (AttributeError, RuntimeError):
            # Old and new ways to say which precision products have: who used one is refused by the other.
            found.append(None)
    return found


@functools.cache
def _hook_dicts() -> tuple[dict[object, object], ...]:
    """Where torch keeps the functions that it calls for every module, and for every optimizer.

    It does so under private names; ``tests/spawn/test_private_names.py`` says when they go away.
    """
    return tuple(
        value
        for module, prefix in _HOOKS.items()
        for name, value in vars(sys.modules[module]).items()
        if name.startswith(prefix) and isinstance(value, dict)
    )


def _hooks() -> list[int]:
    """How many of them there are."""
    return list(map(len, _hook_dicts()))


def _modes() -> tuple[int, int]:
    """How many modes were entered through which all calls of torch go, and all operators.

    Under private names; ``tests/spawn/test_private_names.py`` says when they go away.
    """
    torch: Any = sys.modules["torch"]
    operators = sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode_stack()  # noqa: SLF001
    return len(torch.overrides._get_current_function_mode_stack()), len(operators)  # noqa: SLF001


def _functions() -> object:
    """Functions of torch, which are the same as long as nobody puts others in their place."""
    return _patched(sys.modules["torch"])


def _collectives() -> object:
    """The same of its process groups."""
    return _patched_collectives(sys.modules["torch.distributed"])


def _numpy() -> list[object]:
    """What numpy does about floating-point errors, and how it prints."""
    numpy: Any = sys.modules["numpy"]
    return [numpy.geterr(), numpy.geterrcall(), numpy.get_printoptions()]


def _level(logger: str) -> int:
    return logging.getLogger(logger).level


def _memory_of_gpu() -> int:
    """Bytes in tensors on this rank's GPU; one that is referred to in a cycle is none that was left."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated())


def _accelerate() -> bool:
    """Whether accelerate's shared states are made: they keep the device, the strategy and the precision.

    The public question, ``accelerate.state.is_initialized``, tells of one of the three only;
    ``tests/spawn/test_private_names.py`` says when the dicts go away.
    """
    state: Any = sys.modules["accelerate.state"]
    return any(kind._shared_state for kind in (state.PartialState, state.AcceleratorState, state.GradientState))  # noqa: SLF001


def _asked(module: str, function: str) -> object:
    """What a function of that module says."""
    return getattr(sys.modules[module], function)()


def _says(module: str, function: str) -> tuple[str, Callable[[], object]]:
    return module, functools.partial(_asked, module, function)


#: What is told of it to the module that must be imported for it, and what reads it. What there always is:
SETTINGS: dict[str, tuple[str, Callable[[], object]]] = {
    "torch's global flags": ("torch", _torch),
    "torch's global hooks": ("torch", _hooks),
    "torch's modes": ("torch.utils._python_dispatch", _modes),
    "functions of torch": ("torch", _functions),
    "functions of torch.distributed": ("torch.distributed", _collectives),
    # Digests of modules that hold settings; torch makes a new one only after a change.
    "torch.compile's settings": _says("torch._dynamo.config", "get_hash"),
    "inductor's settings": _says("torch._inductor.config", "get_hash"),
    "numpy's settings": ("numpy", _numpy),
    **{
        f"the log level of {name}": (module, functools.partial(_level, name))
        for module, name in (
            *((name, name) for name in ("torch", "accelerate", "transformers")),
            ("deepspeed", "DeepSpeed"),
        )
    },
}
#: And what there is after the first use only.
SINGLETONS: dict[str, tuple[str, Callable[[], object]]] = {
    "torch's memory on the GPU": ("torch", _memory_of_gpu),
    "accelerate's singletons": ("accelerate.state", _accelerate),
    "DeepSpeed's communication": _says("deepspeed.comm", "is_initialized"),
    "DeepSpeed's checkpointing": _says("deepspeed.runtime.activation_checkpointing.checkpointing", "is_configured"),
    # From a TrainingArguments to its end it takes all models for ZeRO-3's.
    "transformers' ZeRO-3 mode": _says("transformers.integrations.deepspeed", "is_deepspeed_zero3_enabled"),
}

"""Process-wide state of libraries: settings, hooks and singletons that a test may leave changed."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

#: A setting by name: the module that must be imported for it, and what reads it.
_Settings = dict[str, tuple[str, Callable[[], object]]]


class Registered(dict[Any, Any]):  # noqa: PLW1641 - a dict has no hash either
    """Objects that are registered under names.

    A new one does not count as a change: a library that was imported meanwhile registers its own.
    """

    def __eq__(self, before: object) -> bool:
        """Return whether all that was registered before still is, and is the same."""
        return isinstance(before, Registered) and before.items() <= self.items()

    def __ne__(self, before: object) -> bool:
        """Return whether something that was registered before is gone, or is another."""
        return not self == before


#: Names of torch's settings, below ``torch``; an older release may lack some. Functions are called.
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
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.fp32_precision",
    "__future__.get_overwrite_module_params_on_conversion",
    "__future__.get_swap_module_params_on_conversion",
    "sparse.check_sparse_tensor_invariants.is_enabled",
    "jit.onednn_fusion_enabled",
    "hub._hub_dir",
    "nn.attention.current_flash_attention_impl",
    # Private names; ``tests/launch/kept_changes.py`` changes each setting that is read by one.
    "_C._is_fwd_grad_enabled",
    "_C._autograd._profiler_enabled",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
)
_read_flags = tuple(map(operator.attrgetter, _FLAGS))
#: Names of how torch loads and saves, below ``torch.serialization``, and of how it recomputes, below ``torch.utils.checkpoint``.
_FILE_OPTIONS = ("get_default_load_endianness", "get_crc32_options", "get_default_mmap_options")
_RECOMPUTE_OPTIONS = (
    "_enable_checkpoint_early_stop",
    "_checkpoint_debug_enabled",
    "DefaultDeviceType._default_device_type",
)
#: Packages that register classes as safe to load when they are imported.
_SAFE_PACKAGES = frozenset({"torch", "deepspeed"})
#: Half of it is 0 if denormal numbers are flushed to 0.
_SMALLEST_NORMAL = sys.float_info.min
#: The functions of torch that are replaced most often: by tests, and by DeepSpeed while it builds a model in parts.
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


def _torch_flags() -> list[object]:
    """Return the global flags of torch."""
    torch: Any = sys.modules["torch"]
    found = [
        str(torch.get_default_device()),
        _SMALLEST_NORMAL / 2 == 0.0,
        *[torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        *[torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")],
    ]
    readers: tuple[Callable[[Any], Any], ...] = (*_read_flags, *_readers_of_setters())
    for read in readers:
        try:
            value = read(torch)
            found.append(value() if callable(value) else value)
        except (AttributeError, RuntimeError):
            # Old and new ways to set the precision of products: torch refuses the one once the other was used.
            found.append(None)
    return found


@functools.cache
def _readers_of_setters() -> tuple[Callable[[Any], Any], ...]:
    """Return a reader for each flag with a private setter in torch's C++ part, and a getter without arguments.

    The flags of all backends are among them, those of later releases too.
    """
    core: Any = sys.modules["torch._C"]
    found: list[Callable[[Any], Any]] = []
    for name in dir(core):
        if name.startswith("_get_") and hasattr(core, f"_set_{name.removeprefix('_get_')}"):
            with contextlib.suppress(TypeError, RuntimeError):
                getattr(core, name)()
                found.append(operator.attrgetter(f"_C.{name}"))
    return tuple(found)


def _attributes(module: str, names: tuple[str, ...]) -> list[object]:
    """Return the values of a module's names, called if they are functions; None for what an older release lacks."""
    found: list[object] = []
    for name in names:
        try:
            value = operator.attrgetter(name)(sys.modules[module])
            found.append(value() if callable(value) and not isinstance(value, type) else value)
        except AttributeError:
            found.append(None)
    return found


def _loading_and_saving() -> list[object]:
    """Return how torch loads and saves, and which classes of other packages it takes for safe to load."""
    torch: Any = sys.modules["torch.serialization"]
    safe = [one[0] if isinstance(one, tuple) else one for one in torch.get_safe_globals()]
    others = [one for one in safe if str(getattr(one, "__module__", "")).partition(".")[0] not in _SAFE_PACKAGES]
    return [*_attributes("torch.serialization", _FILE_OPTIONS), others]


def _printing() -> Mapping[str, object]:
    """Return how tensors are printed; torch has only a private name for that."""
    return dict(vars(sys.modules["torch._tensor_str"].PRINT_OPTS))


def _saved_tensors() -> object:
    """Return the hooks through which tensors go that are saved for the backward pass."""
    torch: Any = sys.modules["torch"]
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001


def _decimal() -> list[object]:
    """Return how decimal numbers are computed; which signals were raised so far is no setting."""
    decimal: Any = sys.modules["decimal"]
    return [_of_context(one) for one in (decimal.getcontext(), decimal.DefaultContext)]


_of_context = operator.attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")


def _asyncio() -> list[object]:
    """Return the policy of event loops, and the loop that was set; Python makes a policy at its first use."""
    events: Any = sys.modules["asyncio.events"]
    policy = events._event_loop_policy  # noqa: SLF001
    loop = getattr(getattr(policy, "_local", None), "_loop", None)
    default = getattr(sys.modules["asyncio"], "_DefaultEventLoopPolicy", None)
    default = default or getattr(sys.modules["asyncio"], "DefaultEventLoopPolicy", None)
    return [None if type(policy) is default else policy, loop]


def _collating() -> Registered:
    """Return how a DataLoader makes a batch of each type."""
    return Registered(sys.modules["torch.utils.data._utils.collate"].default_collate_fn_map)


def _gpu() -> int:
    """Return what torch does about calls that wait for the GPU; 0 as long as CUDA is not initialised."""
    torch: Any = sys.modules["torch"]
    return int(torch.cuda.get_sync_debug_mode()) if torch.cuda.is_initialized() else 0


@functools.cache
def _hook_dicts() -> tuple[dict[object, object], ...]:
    """Return the dicts in which torch keeps the functions that it calls for every module, and for every optimizer.

    They have private names; ``tests/launch/test_private_names.py`` fails when they go away.
    """
    return tuple(
        value
        for module, prefix in _HOOKS.items()
        for name, value in vars(sys.modules[module]).items()
        if name.startswith(prefix) and isinstance(value, dict)
    )


def _hooks() -> list[int]:
    """Return how many global hooks there are."""
    return list(map(len, _hook_dicts()))


def _modes() -> tuple[int, int]:
    """Return how many modes are active: those for all functions of torch, and those for all operators.

    They have private names; ``tests/launch/test_private_names.py`` fails when they go away.
    """
    torch: Any = sys.modules["torch"]
    operators = sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode_stack()  # noqa: SLF001
    return len(torch.overrides._get_current_function_mode_stack()), len(operators)  # noqa: SLF001


def _functions() -> object:
    """Return functions of torch, which stay the same unless a test replaces them."""
    return _patched(sys.modules["torch"])


def _collectives() -> object:
    """Return functions of torch.distributed, which stay the same unless a test replaces them."""
    return _patched_collectives(sys.modules["torch.distributed"])


def _numpy() -> list[object]:
    """Return how numpy handles floating-point errors, and how it prints."""
    numpy: Any = sys.modules["numpy"]
    return [numpy.geterr(), numpy.geterrcall(), numpy.get_printoptions(), numpy.getbufsize()]


def _unicode() -> object:
    """Return how numpy prints polynomials."""
    return sys.modules["numpy.polynomial._polybase"].ABCPolyBase._use_unicode  # noqa: SLF001


def _level(logger: str) -> int:
    return logging.getLogger(logger).level


def _memory_of_gpu() -> int:
    """Return the bytes in tensors on this rank's GPU. Tensors in reference cycles are collected first."""
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated())


def _accelerate() -> bool:
    """Tell whether accelerate's shared states are made: they keep the device, the strategy and the precision.

    The public function ``accelerate.state.is_initialized`` knows of one of the three only;
    ``tests/launch/test_private_names.py`` fails when the dicts go away.
    """
    state: Any = sys.modules["accelerate.state"]
    return any(kind._shared_state for kind in (state.PartialState, state.AcceleratorState, state.GradientState))  # noqa: SLF001


def _call(module: str, function: str) -> object:
    """Return the result of a function of that module."""
    return getattr(sys.modules[module], function)()


def _from_function(module: str, function: str) -> tuple[str, Callable[[], object]]:
    return module, functools.partial(_call, module, function)


#: Settings that always have a value: by the name in messages, the module that must be imported, and what reads the setting.
SETTINGS: _Settings = {
    "torch's global flags": ("torch", _torch_flags),
    "torch's global hooks": ("torch", _hooks),
    "torch's modes": ("torch.utils._python_dispatch", _modes),
    "functions of torch": ("torch", _functions),
    "functions of torch.distributed": ("torch.distributed", _collectives),
    "how torch loads and saves": ("torch.serialization", _loading_and_saving),
    "how torch prints": ("torch._tensor_str", _printing),
    "hooks for saved tensors": ("torch", _saved_tensors),
    "the debug level of torch.distributed": _from_function("torch.distributed", "get_debug_level"),
    "what torch does about waiting for the GPU": ("torch", _gpu),
    "how torch recomputes": (
        "torch.utils.checkpoint",
        functools.partial(_attributes, "torch.utils.checkpoint", _RECOMPUTE_OPTIONS),
    ),
    "the level of forward differentiation": (
        "torch.autograd.forward_ad",
        functools.partial(_attributes, "torch.autograd.forward_ad", ("_current_level",)),
    ),
    "how distributions check their arguments": (
        "torch.distributions",
        functools.partial(_attributes, "torch.distributions", ("Distribution._validate_args",)),
    ),
    "how batches are collated": ("torch.utils.data._utils.collate", _collating),
    # Digests of modules that hold settings; torch makes a new one only after a change.
    "torch.compile's settings": _from_function("torch._dynamo.config", "get_hash"),
    "torch.compile's stance": (
        "torch._dynamo.eval_frame",
        functools.partial(_attributes, "torch._dynamo.eval_frame", ("_stance",)),
    ),
    "inductor's settings": _from_function("torch._inductor.config", "get_hash"),
    "functorch's settings": _from_function("torch._functorch.config", "get_hash"),
    "fx's settings": _from_function("torch.fx.experimental._config", "get_hash"),
    "torch.distributed's settings": _from_function("torch.distributed.config", "get_hash"),
    "torch.compiler's settings": _from_function("torch.compiler.config", "get_hash"),
    "numpy's settings": ("numpy", _numpy),
    "how numpy prints polynomials": ("numpy.polynomial._polybase", _unicode),
    "how decimal numbers are computed": ("decimal", _decimal),
    "asyncio's event loops": ("asyncio", _asyncio),
    "how long a field of csv may be": _from_function("csv", "field_size_limit"),
    **{
        f"the log level of {name}": (module, functools.partial(_level, name))
        for module, name in (
            *((name, name) for name in ("torch", "accelerate", "transformers")),
            ("deepspeed", "DeepSpeed"),
        )
    },
}
#: The same for state that exists only after the first use of a library.
SINGLETONS: _Settings = {
    "torch's memory on the GPU": ("torch", _memory_of_gpu),
    "accelerate's singletons": ("accelerate.state", _accelerate),
    "DeepSpeed's communication": _from_function("deepspeed.comm", "is_initialized"),
    "DeepSpeed's checkpointing": _from_function(
        "deepspeed.runtime.activation_checkpointing.checkpointing", "is_configured"
    ),
    # As long as a TrainingArguments lives, transformers takes all models for ZeRO-3's.
    "transformers' ZeRO-3 mode": _from_function("transformers.integrations.deepspeed", "is_deepspeed_zero3_enabled"),
}

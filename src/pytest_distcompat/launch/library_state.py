"""What libraries have for all of a process: settings, hooks and singletons that a test may leave changed."""

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


class Known(dict[Any, Any]):  # noqa: PLW1641 - a dict has no hash either
    """What is registered under names. What is new does not count: a library that was imported meanwhile brings its own."""

    def __eq__(self, before: object) -> bool:
        """Return whether all that was there is there, and is the same."""
        return isinstance(before, Known) and before.items() <= self.items()

    def __ne__(self, before: object) -> bool:
        """Return whether something that was there is gone, or is another."""
        return not self == before


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
    # Under private names; ``tests/spawn/kept_changes.py`` changes each thing that is read by one.
    "_C._is_fwd_grad_enabled",
    "_C._autograd._profiler_enabled",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
)
_read_flags = tuple(map(operator.attrgetter, _FLAGS))
#: How torch loads and saves, below ``torch.serialization``; and how it recomputes, below ``torch.utils.checkpoint``.
_OF_FILES = ("get_default_load_endianness", "get_crc32_options", "get_default_mmap_options")
_OF_RECOMPUTING = (
    "_enable_checkpoint_early_stop",
    "_checkpoint_debug_enabled",
    "DefaultDeviceType._default_device_type",
)
#: Whose classes are registered as safe to load when they are imported.
_SAFE = frozenset({"torch", "deepspeed"})
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
    readers: tuple[Callable[[Any], Any], ...] = (*_read_flags, *_pairs())
    for read in readers:
        try:
            value = read(torch)
            found.append(value() if callable(value) else value)
        except (AttributeError, RuntimeError):
            # Old and new ways to say which precision products have: who used one is refused by the other.
            found.append(None)
    return found


@functools.cache
def _pairs() -> tuple[Callable[[Any], Any], ...]:
    """Return what reads each flag that torch's C++ part has a private setter and a getter without arguments for.

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


def _below(module: str, names: tuple[str, ...]) -> list[object]:
    """Return what these names of a module stand for, or say if called; None for what an older release lacks."""
    found: list[object] = []
    for name in names:
        try:
            value = operator.attrgetter(name)(sys.modules[module])
            found.append(value() if callable(value) and not isinstance(value, type) else value)
        except AttributeError:
            found.append(None)
    return found


def _files() -> list[object]:
    """Return how torch loads and saves, and what of others' it takes for safe to load."""
    torch: Any = sys.modules["torch.serialization"]
    safe = [one[0] if isinstance(one, tuple) else one for one in torch.get_safe_globals()]
    others = [one for one in safe if str(getattr(one, "__module__", "")).partition(".")[0] not in _SAFE]
    return [*_below("torch.serialization", _OF_FILES), others]


def _printing() -> Mapping[str, object]:
    """Return how tensors are printed; torch says it under a private name only."""
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
    """Return the policy of event loops, and the loop that was set; a policy is made when one is first asked for."""
    events: Any = sys.modules["asyncio.events"]
    policy = events._event_loop_policy  # noqa: SLF001
    loop = getattr(getattr(policy, "_local", None), "_loop", None)
    default = getattr(sys.modules["asyncio"], "_DefaultEventLoopPolicy", None)
    default = default or getattr(sys.modules["asyncio"], "DefaultEventLoopPolicy", None)
    return [None if type(policy) is default else policy, loop]


def _collating() -> Known:
    """Return how a DataLoader makes a batch of each type."""
    return Known(sys.modules["torch.utils.data._utils.collate"].default_collate_fn_map)


def _gpu() -> int:
    """Return what torch does about calls that wait for the GPU; nothing as long as there is none."""
    torch: Any = sys.modules["torch"]
    return int(torch.cuda.get_sync_debug_mode()) if torch.cuda.is_initialized() else 0


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
    return [numpy.geterr(), numpy.geterrcall(), numpy.get_printoptions(), numpy.getbufsize()]


def _unicode() -> object:
    """Return how numpy prints polynomials."""
    return sys.modules["numpy.polynomial._polybase"].ABCPolyBase._use_unicode  # noqa: SLF001


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
SETTINGS: _Settings = {
    "torch's global flags": ("torch", _torch),
    "torch's global hooks": ("torch", _hooks),
    "torch's modes": ("torch.utils._python_dispatch", _modes),
    "functions of torch": ("torch", _functions),
    "functions of torch.distributed": ("torch.distributed", _collectives),
    "how torch loads and saves": ("torch.serialization", _files),
    "how torch prints": ("torch._tensor_str", _printing),
    "hooks for saved tensors": ("torch", _saved_tensors),
    "the debug level of torch.distributed": _says("torch.distributed", "get_debug_level"),
    "what torch does about waiting for the GPU": ("torch", _gpu),
    "how torch recomputes": (
        "torch.utils.checkpoint",
        functools.partial(_below, "torch.utils.checkpoint", _OF_RECOMPUTING),
    ),
    "the level of forward differentiation": (
        "torch.autograd.forward_ad",
        functools.partial(_below, "torch.autograd.forward_ad", ("_current_level",)),
    ),
    "how distributions check their arguments": (
        "torch.distributions",
        functools.partial(_below, "torch.distributions", ("Distribution._validate_args",)),
    ),
    "how batches are collated": ("torch.utils.data._utils.collate", _collating),
    # Digests of modules that hold settings; torch makes a new one only after a change.
    "torch.compile's settings": _says("torch._dynamo.config", "get_hash"),
    "torch.compile's stance": (
        "torch._dynamo.eval_frame",
        functools.partial(_below, "torch._dynamo.eval_frame", ("_stance",)),
    ),
    "inductor's settings": _says("torch._inductor.config", "get_hash"),
    "functorch's settings": _says("torch._functorch.config", "get_hash"),
    "fx's settings": _says("torch.fx.experimental._config", "get_hash"),
    "torch.distributed's settings": _says("torch.distributed.config", "get_hash"),
    "torch.compiler's settings": _says("torch.compiler.config", "get_hash"),
    "numpy's settings": ("numpy", _numpy),
    "how numpy prints polynomials": ("numpy.polynomial._polybase", _unicode),
    "how decimal numbers are computed": ("decimal", _decimal),
    "asyncio's event loops": ("asyncio", _asyncio),
    "how long a field of csv may be": _says("csv", "field_size_limit"),
    **{
        f"the log level of {name}": (module, functools.partial(_level, name))
        for module, name in (
            *((name, name) for name in ("torch", "accelerate", "transformers")),
            ("deepspeed", "DeepSpeed"),
        )
    },
}
#: And what there is after the first use only.
SINGLETONS: _Settings = {
    "torch's memory on the GPU": ("torch", _memory_of_gpu),
    "accelerate's singletons": ("accelerate.state", _accelerate),
    "DeepSpeed's communication": _says("deepspeed.comm", "is_initialized"),
    "DeepSpeed's checkpointing": _says("deepspeed.runtime.activation_checkpointing.checkpointing", "is_configured"),
    # From a TrainingArguments to its end it takes all models for ZeRO-3's.
    "transformers' ZeRO-3 mode": _says("transformers.integrations.deepspeed", "is_deepspeed_zero3_enabled"),
}

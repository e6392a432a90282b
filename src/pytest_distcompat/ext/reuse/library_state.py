"""Process-wide state of libraries: settings, hooks and singletons that a test may leave changed.

A reused rank is a process that runs one test after the other. ``process_state`` reads this state
before and after each test, and a rank on which it differs is replaced. Two tables, at the end of
the module, say what is read: ``SETTINGS``, which always have a value, and ``SINGLETONS``, which
exist only once a library was used. An entry has what messages call the state, the module that must
be loaded for it, and a reader, a function that gets this module and returns a value. For example
``"torch's modes": ("torch.utils._python_dispatch", _modes)``; ``_modes`` returns ``(0, 0)``, and
``(1, 0)`` after a test that has left a ``TorchFunctionMode`` active. Values are only compared.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

#: Reads a setting from a module.
_Reader = Callable[[Any], object]
#: A setting by name: the module that must be imported for it, and what reads it from that module.
_Settings = dict[str, tuple[str, _Reader]]


class Registered(dict[Any, Any]):  # noqa: PLW1641 - a dict has no hash either
    """Objects that are registered under keys, to be compared with those before a test.

    A new key does not count as a change: a library that was imported meanwhile registers its own.
    So ``after == before`` is true if all of ``before`` is in ``after``.
    """

    def __eq__(self, before: object) -> bool:
        """Return whether all that was registered before still is, and is the same."""
        return isinstance(before, Registered) and before.items() <= self.items()

    def __ne__(self, before: object) -> bool:
        return not self == before


#: Names below ``torch`` of settings that ``_named_flags`` does not find by itself. A name of a
#: function stands for what it returns. An older release may lack some.
_FLAGS = (
    "get_default_dtype",
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_cache_enabled",
    "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "get_num_threads",
    "get_num_interop_threads",
    "autograd.is_multithreading_enabled",
    "multiprocessing.get_sharing_strategy",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.mha.get_fastpath_enabled",
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "backends.cudnn.benchmark_limit",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "__future__.get_overwrite_module_params_on_conversion",
    "__future__.get_swap_module_params_on_conversion",
    "sparse.check_sparse_tensor_invariants.is_enabled",
    "jit.onednn_fusion_enabled",
    "hub._hub_dir",
    "nn.attention.current_flash_attention_impl",
    # Private names; ``tests/launch/state_changes.py`` changes each setting that is read by one.
    "_C._is_fwd_grad_enabled",
    "_C._autograd._profiler_enabled",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
)
#: Packages that register classes as safe to load when they are imported.
_SAFE_PACKAGES = frozenset({"torch", "deepspeed"})
#: The smallest normal number. Half of it is a denormal number, or 0 if the CPU flushes denormal
#: numbers to 0 (``torch.set_flush_denormal``).
_SMALLEST_NORMAL = sys.float_info.min
#: The functions of torch that are replaced most often: by tests, and by DeepSpeed while it builds a
#: model in parts.
_patched = attrgetter(
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "randn",
    "save",
    "load",
    "Tensor.backward",
    "autograd.backward",
    "optim.Optimizer.zero_grad",
    "nn.utils.clip_grad_norm_",
    "nn.Module.__init__",
    "nn.Module.__call__",
    "nn.Module.to",
    "nn.Module.state_dict",
    "nn.Module.load_state_dict",
)
#: Functions of torch.distributed that tests replace.
_patched_collectives = attrgetter(
    "init_process_group",
    "destroy_process_group",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "new_group",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)
#: By module: how the names of its dicts begin that have hooks for all modules (``nn.Module``), or
#: for all optimizers.
_HOOKS = {"torch.nn.modules.module": "_global_", "torch.optim.optimizer": "_global_optimizer_"}


def _values(*names: str) -> Callable[[Any], list[object]]:
    """Return a reader of a module's attributes, called if they are functions.

    It gives None for what cannot be read: an older release may lack an attribute, and torch refuses
    the old way to set the precision of products once the new one was used.
    """
    getters = tuple(map(attrgetter, names))

    def read(module: Any) -> list[object]:
        values: list[object] = []
        for get in getters:
            try:
                value = get(module)
                if callable(value) and not isinstance(value, type):
                    value = value()
                values.append(value)
            except (AttributeError, RuntimeError):
                values.append(None)
        return values

    return read


def _torch_flags(torch: Any) -> list[object]:
    """Return torch's global settings: default device, autocast, flags of backends and so on."""
    return [
        str(torch.get_default_device()),
        _SMALLEST_NORMAL / 2 == 0.0,
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        *_named_flags(torch._C)(torch),  # noqa: SLF001
    ]


@functools.cache
def _named_flags(core: Any) -> Callable[[Any], list[object]]:
    """Return a reader of ``_FLAGS`` and of the named flags of torch's C++ part.

    Named flags are pairs such as ``_get_cudnn_enabled`` and ``_set_cudnn_enabled``, of which the
    getter takes no arguments. The flags of all backends are among them, those of later releases
    too.

    Args:
        core: The module ``torch._C``.
    """
    getters = []
    for name in dir(core):
        setter = f"_set_{name.removeprefix('_get_')}"
        if name.startswith("_get_") and hasattr(core, setter):
            # A getter that takes arguments raises TypeError, and is left out.
            with contextlib.suppress(TypeError, RuntimeError):
                getattr(core, name)()
                getters.append(f"_C.{name}")
    return _values(*_FLAGS, *getters)


_file_options = _values(
    "get_default_load_endianness", "get_crc32_options", "get_default_mmap_options"
)


def _loading_and_saving(serialization: Any) -> list[object]:
    """Return torch's options for files, and the classes that a test has declared safe to load.

    ``torch.load`` accepts only classes that were declared safe (``add_safe_globals``). torch and
    DeepSpeed declare their own at import, which is no change by a test.
    """
    others = []
    for entry in serialization.get_safe_globals():
        # A class, or a pair of it and its name in files.
        safe_class = entry[0] if isinstance(entry, tuple) else entry
        module = str(getattr(safe_class, "__module__", ""))
        if module.partition(".")[0] not in _SAFE_PACKAGES:
            others.append(safe_class)
    return [*_file_options(serialization), others]


def _asyncio(events: Any) -> list[object]:
    """Return the policy of event loops (None for Python's default), and the loop that was set.

    Python makes its default policy at the first use, which is no change.
    """
    policy = events._event_loop_policy  # noqa: SLF001
    loop = getattr(getattr(policy, "_local", None), "_loop", None)
    asyncio = sys.modules["asyncio"]
    default = getattr(asyncio, "_DefaultEventLoopPolicy", None)
    if default is None:
        default = getattr(asyncio, "DefaultEventLoopPolicy", None)
    if type(policy) is default:
        policy = None
    return [policy, loop]


@functools.cache
def _hook_dicts() -> tuple[dict[object, object], ...]:
    """Return torch's dicts of hooks for every module, as ``_global_forward_hooks``, and optimizer.

    They have private names; ``tests/launch/test_private_names.py`` fails when they go away.
    """
    dicts = []
    for module, prefix in _HOOKS.items():
        for name, value in vars(sys.modules[module]).items():
            if name.startswith(prefix) and isinstance(value, dict):
                dicts.append(value)
    return tuple(dicts)


def _modes(dispatch: Any) -> tuple[int, int]:
    """Return how many modes are active, as (function modes, dispatch modes).

    A ``TorchFunctionMode`` sees all calls of torch's functions, a ``TorchDispatchMode`` those of
    operators.

    They have private names; ``tests/launch/test_private_names.py`` fails when they go away.
    """
    functions = sys.modules["torch.overrides"]._get_current_function_mode_stack()  # noqa: SLF001
    return len(functions), len(dispatch._get_current_dispatch_mode_stack())  # noqa: SLF001


def _memory_of_gpu(torch: Any) -> int:
    """Return the bytes in tensors on this rank's GPU.

    Tensors in reference cycles are collected first.
    """
    if not torch.cuda.is_initialized():
        return 0
    gc.collect()
    return int(torch.cuda.memory_allocated())


def _accelerate(state: Any) -> bool:
    """Tell whether accelerate's shared states are made, as an ``Accelerator`` makes them.

    They keep the device, the strategy and the precision. The public function
    ``accelerate.state.is_initialized`` knows of one of the three only;
    ``tests/launch/test_private_names.py`` fails when the dicts go away.
    """
    singletons = (state.PartialState, state.AcceleratorState, state.GradientState)
    # See the docstring.
    return any(singleton._shared_state for singleton in singletons)  # noqa: SLF001


def _level(logger: str, _: Any) -> int:
    """Return the level of a logger of that name; the module is not needed."""
    return logging.getLogger(logger).level


def _decimal_contexts(decimal: Any) -> list[object]:
    """Return the settings of the context in use and of the one that new threads get.

    Raised signals are no setting.
    """
    return [_of_decimal(decimal.getcontext()), _of_decimal(decimal.DefaultContext)]


_of_decimal = attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")
# A digest of all settings of a module such as ``torch._dynamo.config``; torch computes it anew only
# after a change.
_get_hash = methodcaller("get_hash")

#: Settings that always have a value: by the name in messages, the module that must be imported, and
#: what reads the setting.
SETTINGS: _Settings = {
    "torch's global flags": ("torch", _torch_flags),
    "torch's global hooks": ("torch", lambda _: list(map(len, _hook_dicts()))),
    "torch's modes": ("torch.utils._python_dispatch", _modes),
    "functions of torch": ("torch", _patched),
    "functions of torch.distributed": ("torch.distributed", _patched_collectives),
    "how torch loads and saves": ("torch.serialization", _loading_and_saving),
    # torch has only private names for these two.
    "how torch prints": ("torch._tensor_str", lambda module: dict(vars(module.PRINT_OPTS))),
    "hooks for saved tensors": (
        "torch._C",
        lambda core: core._autograd._top_saved_tensors_default_hooks(True),  # noqa: SLF001
    ),
    "the debug level of torch.distributed": ("torch.distributed", methodcaller("get_debug_level")),
    # 0 as long as CUDA is not initialised.
    "what torch does about waiting for the GPU": (
        "torch.cuda",
        lambda cuda: int(cuda.get_sync_debug_mode()) if cuda.is_initialized() else 0,
    ),
    "how torch recomputes": (
        "torch.utils.checkpoint",
        _values(
            "_enable_checkpoint_early_stop",
            "_checkpoint_debug_enabled",
            "DefaultDeviceType._default_device_type",
        ),
    ),
    "the level of forward differentiation": (
        "torch.autograd.forward_ad",
        _values("_current_level"),
    ),
    "how distributions check their arguments": (
        "torch.distributions",
        _values("Distribution._validate_args"),
    ),
    "how batches are collated": (
        "torch.utils.data._utils.collate",
        lambda collate: Registered(collate.default_collate_fn_map),
    ),
    "torch.compile's settings": ("torch._dynamo.config", _get_hash),
    "torch.compile's stance": ("torch._dynamo.eval_frame", _values("_stance")),
    "inductor's settings": ("torch._inductor.config", _get_hash),
    "functorch's settings": ("torch._functorch.config", _get_hash),
    "fx's settings": ("torch.fx.experimental._config", _get_hash),
    "torch.distributed's settings": ("torch.distributed.config", _get_hash),
    "torch.compiler's settings": ("torch.compiler.config", _get_hash),
    "numpy's settings": (
        "numpy",
        _values("geterr", "geterrcall", "get_printoptions", "getbufsize"),
    ),
    "how numpy prints polynomials": (
        "numpy.polynomial._polybase",
        attrgetter("ABCPolyBase._use_unicode"),
    ),
    "how decimal numbers are computed": ("decimal", _decimal_contexts),
    "asyncio's event loops": ("asyncio.events", _asyncio),
    "how long a field of csv may be": ("csv", methodcaller("field_size_limit")),
    "the log level of torch": ("torch", functools.partial(_level, "torch")),
    "the log level of accelerate": ("accelerate", functools.partial(_level, "accelerate")),
    "the log level of transformers": ("transformers", functools.partial(_level, "transformers")),
    "the log level of DeepSpeed": ("deepspeed", functools.partial(_level, "DeepSpeed")),
}
#: The same for state that exists only after the first use of a library. Before, the reader returns
#: False or 0.
SINGLETONS: _Settings = {
    "torch's memory on the GPU": ("torch", _memory_of_gpu),
    "accelerate's singletons": ("accelerate.state", _accelerate),
    "DeepSpeed's communication": ("deepspeed.comm", methodcaller("is_initialized")),
    "DeepSpeed's checkpointing": (
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        methodcaller("is_configured"),
    ),
    # As long as a TrainingArguments lives, transformers takes all models for ZeRO-3's.
    "transformers' ZeRO-3 mode": (
        "transformers.integrations.deepspeed",
        methodcaller("is_deepspeed_zero3_enabled"),
    ),
}

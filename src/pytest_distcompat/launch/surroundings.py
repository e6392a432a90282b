"""What of a process a test may leave changed, and the next one would see. Ranks that live on are compared by it."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pytest_distcompat.launch.process import children

#: How much more memory a rank may use than at its beginning, in bytes, before it leaves.
GROWTH = 256 * 2**20
#: How many more threads of C libraries, and how many more open files. Those that a library starts once are no leak.
NATIVE_THREADS = 32
OPEN_FILES = 128

_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True)
class Surroundings:
    """What must be the same after a test as before it, by name."""

    same: dict[str, Any]

    @classmethod
    def now(cls) -> Surroundings:
        """Of this process."""
        same: dict[str, Any] = {
            "the environment": dict(os.environ),
            "the working directory": _directory(),
            "the file mode mask": _mask(),
            "sys.path": list(sys.path),
            "signal handlers": [signal.getsignal(number) for number in _SIGNALS],
            "threads": set(threading.enumerate()),
            "what is to be done at exit": _at_exit(),
            "multiprocessing's start method": multiprocessing.get_start_method(allow_none=True),
            "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        }
        same |= {name: read() for name, (module, read) in _OF_LIBRARIES.items() if module in sys.modules}
        return cls(same)

    def changes(self, before: Surroundings) -> list[str]:
        """The names of what is not as it was."""
        # A library that was not imported before had nothing set up.
        return [name for name, value in self.same.items() if value != before.same.get(name, False)]


class Sizes:
    """What may grow in the life of a process, but not beyond a limit."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._first = self._now()

    def _now(self) -> dict[str, int]:
        own = self._own
        return {
            "memory": own.memory_info().rss,
            "native threads": own.num_threads(),
            "open files": own.num_fds(),
            "child processes": len(children(os.getpid())),
        }

    def grown(self) -> list[str]:
        """The names of what has grown too much since this was made."""
        return [name for name, size in self._now().items() if size - self._first[name] > _LIMITS[name]]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _at_exit() -> tuple[int, int]:
    """How many functions wait for the end of the interpreter, and of a process of multiprocessing, which a rank is.

    What they do belongs to the test that left them. The standard library tells it under private names only;
    ``tests/spawn/test_private_names.py`` says when they go away.
    """
    registry: Any = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]  # noqa: SLF001
    return atexit._ncallbacks(), len(registry)  # noqa: SLF001


_LIMITS = {"memory": GROWTH, "native threads": NATIVE_THREADS, "open files": OPEN_FILES, "child processes": 0}


def _torch() -> tuple[object, ...]:
    """The global flags of torch."""
    torch: Any = sys.modules["torch"]
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32,
    )


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


def _deepspeed() -> bool:
    """Whether DeepSpeed's communication is set up."""
    return bool(sys.modules["deepspeed.comm"].is_initialized())


def _transformers() -> bool:
    """Whether transformers takes all models for ZeRO-3's, which it does from a TrainingArguments to its end."""
    return bool(sys.modules["transformers.integrations.deepspeed"].is_deepspeed_zero3_enabled())


#: What is told of it to the module that must be imported for it, and what reads it.
_OF_LIBRARIES: dict[str, tuple[str, Callable[[], object]]] = {
    "torch's global flags": ("torch", _torch),
    "torch's memory on the GPU": ("torch", _memory_of_gpu),
    "accelerate's singletons": ("accelerate.state", _accelerate),
    "DeepSpeed's communication": ("deepspeed.comm", _deepspeed),
    "transformers' ZeRO-3 mode": ("transformers.integrations.deepspeed", _transformers),
}

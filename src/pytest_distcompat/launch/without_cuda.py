"""Keep a fork server from opening CUDA or NVML, although libraries ask for GPUs at their import.

A fork server is a process that imports libraries, and from which ranks are forked. Neither a CUDA
context nor the thread that NVML (NVIDIA's library of device management) starts survives a fork.
``preload.import_libraries`` calls both functions before it imports libraries, in sessions with
GPUs. The facts about the GPUs come from pytest's process, which may open NVML.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pytest_distcompat import devices
from pytest_distcompat.devices import GpuFacts

#: The lowest major compute capability on which Triton runs (torch/utils/_triton.py).
_OF_TRITON = 7
#: The functions of NVML that a program calls first to learn about devices.
_FIRST_QUESTIONS = (
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlSystemGetDriverVersion",
)


def answer_without_cuda(gpus: GpuFacts) -> None:
    """Let torch answer questions about GPUs from known facts instead of by NVML or CUDA.

    Libraries, such as torchao, call four functions of torch when they are imported. To answer,
    torch would open NVML or CUDA, whose thread and context do not survive the fork of a rank. In
    ranks, and once CUDA is initialised, torch answers by itself. ``has_triton`` is private;
    ``tests/unit/test_ask_nvml.py`` fails when it changes.

    Args:
        gpus: The facts, as ``GpuFacts(count=2, capability=(9, 0))``: the number of GPUs, and the
            compute capability of the first, None if unknown.
    """
    devices.set_gpu_facts(gpus)
    torch: Any = importlib.import_module("torch")
    cuda: Any = importlib.import_module("torch.cuda")
    triton: Any = importlib.import_module("torch.utils._triton")

    def answer(by_torch: Callable[..., Any], known: Callable[[], Any]) -> Callable[..., Any]:
        """Return a function in place of torch's that answers from the known facts."""

        @functools.wraps(by_torch)
        def function(*args: Any, **kwargs: Any) -> Any:
            # A call with an argument is about another GPU than the first, for which libraries do
            # not ask at import.
            of_other_gpu = any(argument is not None for argument in (*args, *kwargs.values()))
            # ``preset_gpu_facts`` returns None in a forked rank: it is another process than the one
            # that called ``set_gpu_facts``.
            if of_other_gpu or devices.preset_gpu_facts() is None or cuda.is_initialized():
                return by_torch(*args, **kwargs)
            return known()

        return function

    # A torch for CPUs alone has no GPUs, whatever the machine has.
    if torch.backends.cuda.is_built():
        cuda.device_count = answer(cuda.device_count, lambda: gpus.count)
        cuda.is_available = answer(cuda.is_available, lambda: gpus.count > 0)
    if gpus.capability is not None:
        major, minor = gpus.capability
        cuda.get_device_capability = answer(cuda.get_device_capability, lambda: (major, minor))
        triton.has_triton = answer(
            triton.has_triton, lambda: triton.has_triton_package() and major >= _OF_TRITON
        )


def postpone_nvml() -> None:
    """Postpone ``nvmlInit`` until a program first asks NVML for a device.

    DeepSpeed calls ``nvmlInit`` when it is imported, and asks for devices later. So a fork server
    never opens NVML, and a rank that asks opens it itself.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return
    _PostponedNvml(nvml).install()


class _PostponedNvml:
    """Replacements for functions of NVML that postpone calls of ``nvmlInit``.

    In the fork server a call of ``nvmlInit`` is only counted. Ranks inherit the number. In a rank,
    the first question about a device makes so many calls before it is asked: NVML counts them, and
    ends after as many calls of ``nvmlShutdown``.

    Args:
        nvml: The module ``pynvml``.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._init = nvml.nvmlInit
        self._shutdown = nvml.nvmlShutdown
        #: How many calls of ``nvmlInit`` are postponed.
        self._waiting = 0

    def install(self) -> None:
        """Replace the functions in the module ``pynvml``."""
        self._nvml.nvmlInit = self._postpone
        self._nvml.nvmlShutdown = self._take_back
        for name in _FIRST_QUESTIONS:
            # A release of the module may lack some.
            function = getattr(self._nvml, name, None)
            if function is not None:
                setattr(self._nvml, name, self._initialised(function))

    def _postpone(self) -> None:
        """Take the place of ``nvmlInit``: in a process that may not open NVML, count the call."""
        if devices.preset_gpu_facts() is not None:
            self._waiting += 1
        else:
            self._init()

    def _take_back(self) -> None:
        """Take the place of ``nvmlShutdown``: it takes back a call that is postponed still."""
        if self._waiting:
            self._waiting -= 1
        else:
            self._shutdown()

    def _initialised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that first makes the postponed calls of ``nvmlInit``."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            while self._waiting:
                self._waiting -= 1
                self._init()
            return function(*args)

        return call

"""Queries of GPU capabilities through NVML: a CUDA context would not survive the fork of a rank."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pytest_distcompat.devices import compute_capability

#: The first major compute capability that Triton runs on (torch/utils/_triton.py).
_OF_TRITON = 7


def instead_of_cuda() -> None:
    """Have NVML answer two functions of torch in this process and its forks, as long as CUDA is not initialised there.

    Libraries call them when they are imported, and torch creates a CUDA context to answer: transformers 5 imports torchao where
    it is installed, and that calls both. ``has_triton`` is private; ``tests/unit/test_ask_nvml.py`` fails when it goes away.
    """
    cuda: Any = importlib.import_module("torch.cuda")
    triton: Any = importlib.import_module("torch.utils._triton")

    def answer(by_torch: Callable[..., Any], by_nvml: Callable[[tuple[int, int]], Any]) -> Callable[..., Any]:
        @functools.wraps(by_torch)
        def function(device: Any = None) -> Any:
            # NVML does not know an AMD GPU; of others than the first nobody asks at import.
            capability = None if device is not None or cuda.is_initialized() else compute_capability()
            if capability is not None:
                return by_nvml(capability)
            return by_torch() if device is None else by_torch(device)

        return function

    cuda.get_device_capability = answer(cuda.get_device_capability, lambda capability: capability)
    triton.has_triton = answer(
        triton.has_triton, lambda capability: triton.has_triton_package() and capability[0] >= _OF_TRITON
    )

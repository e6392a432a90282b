"""Readers of everything beside model and optimizer: RNG states, gradient scaler, memory, a model's output."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import torch

from pytest_distcompat.probe.optimizer import links

#: How many numbers of an output go into the trace: enough to tell two models apart, few enough to read.
SAMPLED = 32


def read_rng(device: str) -> str:
    """Return a digest of torch's RNG state on the CPU and, if ``device`` is a GPU, of that on the GPU."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    hasher = hashlib.sha256()
    for state in states:
        hasher.update(bytes(state.tolist()))
    return hasher.hexdigest()[:16]


def read_scaler(scaler: Any, optimizer: Any) -> dict[str, float]:
    """Return the numbers of a ``torch.amp.GradScaler``, or those of DeepSpeed's loss scaler, which its optimizers have."""
    if scaler is not None:
        state = scaler.state_dict()
        return {key: float(value) for key, value in state.items() if isinstance(value, (int, float))}
    scaling = next((link for link in links(optimizer) if hasattr(link, "loss_scale")), None)
    return {} if scaling is None else {"scale": float(scaling.loss_scale), **_hysteresis(scaling)}


def _hysteresis(optimizer: Any) -> dict[str, float]:
    """Return ``hysteresis``: the number of further overflows until the scale shrinks; empty without such a number."""
    # DeepSpeed's ZeRO optimizers keep it in ``loss_scaler``, which is not documented; ``tests/launch/test_private_names.py``
    # fails when it changes.
    hysteresis = getattr(getattr(optimizer, "loss_scaler", None), "cur_hysteresis", None)
    return {} if hysteresis is None else {"hysteresis": float(hysteresis)}


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes: allocated by torch on the GPU, or resident in the process on the CPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sample(output: torch.Tensor) -> tuple[float, ...]:
    """Return at most ``SAMPLED`` evenly spaced numbers of the output, rounded to 6 digits. Raises TypeError for no tensor."""
    if not hasattr(output, "detach"):
        raise TypeError(f"evaluate() returned {output!r:.100}; expected a tensor: what the model computes, not a loss")
    flat = output.detach().float().cpu().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    return tuple(round(value, 6) for value in flat[::step][:SAMPLED].tolist())

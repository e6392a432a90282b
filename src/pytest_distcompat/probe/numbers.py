"""Reads what is neither model nor optimizer: random states, a gradient scaler, memory, a model's output."""

from __future__ import annotations

import hashlib
import resource
from typing import Any

import torch

from pytest_distcompat.probe.optimizer import links

#: Numbers of an output that go into the trace: enough to tell two models apart, few enough to read.
SAMPLED = 32


def read_rng(device: str) -> str:
    """A digest of torch's random state on the CPU and, where the rank has one, on its GPU."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    found = hashlib.sha256()
    for state in states:
        found.update(state.numpy().tobytes())
    return found.hexdigest()[:16]


def read_scaler(scaler: Any, optimizer: Any) -> dict[str, float]:
    """The numbers of a ``torch.amp.GradScaler``, or the scale of DeepSpeed's own, which its optimizers show."""
    if scaler is not None:
        state = scaler.state_dict()
        return {key: float(value) for key, value in state.items() if isinstance(value, (int, float))}
    own = next((link for link in links(optimizer) if hasattr(link, "loss_scale")), None)
    return {} if own is None else {"scale": float(own.loss_scale), **_patience(own)}


def _patience(optimizer: Any) -> dict[str, float]:
    """``hysteresis``: which overflow from now on makes the scale smaller, 1 for the next; empty if there is no such thing.

    Of DeepSpeed's ZeRO optimizers, which keep it in ``loss_scaler``; that is not documented, and
    ``tests/spawn/test_private_names.py`` says when it goes away.
    """
    bears = getattr(getattr(optimizer, "loss_scaler", None), "cur_hysteresis", None)
    return {} if bears is None else {"hysteresis": float(bears)}


def peak_memory(device: str) -> int:
    """Bytes: the most that torch ever had on this rank's GPU, on the CPU the most that the process ever had resident."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sample(output: torch.Tensor) -> tuple[float, ...]:
    """Numbers from all over the output, always the same places. Raises TypeError for what is no tensor."""
    if not hasattr(output, "detach"):
        raise TypeError(f"evaluate() returned {output!r:.100}; expected a tensor: what the model computes, not a loss")
    flat = output.detach().float().cpu().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    return tuple(round(value, 6) for value in flat[::step][:SAMPLED].tolist())

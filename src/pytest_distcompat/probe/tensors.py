"""Single tensors: dtype names and digests."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank stores of the tensor: the local shard of a DTensor, any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        local: torch.Tensor = to_local() if to_local is not None else tensor.detach()
    return local


def digest(value: Any) -> str:
    """A hash of the local bytes; numbers hash like a tensor that holds them, so a ``step`` of 3 and of 3.0 agree."""
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, torch.Tensor):
        return ""
    flat = local_of(value).detach().cpu().contiguous().reshape(-1)
    if flat.is_meta or flat.numel() == 0:
        return f"empty:{flat.numel()}"
    # A view as bytes: numpy has no bfloat16 and no float8.
    raw = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()

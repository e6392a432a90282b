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


def zero3_shard(parameter: Any) -> torch.Tensor:
    """What this rank holds of a ZeRO-3 parameter, without the padding.

    Every rank stores the same rounded-up size, and anything may stand in what is too much.
    """
    from torch import distributed

    stored: torch.Tensor = parameter.ds_tensor
    start = stored.numel() * distributed.get_rank()
    return stored.reshape(-1)[: max(0, int(parameter.ds_numel) - start)]


def digest(value: Any) -> str:
    """A hash of the local values, whatever they are stored in: bfloat16 hashes like the float32 it is cast to, exactly.

    FSDP1 shows its upcast only at the first forward, and a frozen weight has not moved by that. Numbers hash like a
    tensor that holds them, so a ``step`` of 3 and of 3.0 agree. All zeros are told from all else: ``zero:<elements>``.
    """
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, torch.Tensor):
        return ""
    flat = local_of(value).detach().cpu().contiguous().reshape(-1)
    if flat.is_meta or flat.numel() == 0:
        return f"empty:{flat.numel()}"
    if flat.is_floating_point() and flat.element_size() < torch.float32.itemsize:
        flat = flat.float()
    if not flat.any():
        return f"zero:{flat.numel()}"
    raw = flat.view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=12).hexdigest()

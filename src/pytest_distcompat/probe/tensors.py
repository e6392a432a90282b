"""Single tensors: dtype names, local shards and digests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pytest_distcompat import digests


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module: ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of the tensor that this rank stores: the local shard of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        local: torch.Tensor = to_local() if to_local is not None else tensor.detach()
    return local


def zero3_shard(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a ZeRO-3 parameter, without the padding, whose values are undefined."""
    from torch import distributed

    stored: torch.Tensor = parameter.ds_tensor
    start = stored.numel() * distributed.get_rank()
    return stored.reshape(-1)[: max(0, int(parameter.ds_numel) - start)]


#: Words hashed at a time: the sum of so many products of 16-bit halves is below 2**53, so float64 has it exactly.
_CHUNK = 1 << 15


@functools.cache
def _powers() -> torch.Tensor:
    """Return float64 of shape (chunk, 4): the 16-bit halves of base**(n-1), ..., base, 1 modulo each prime."""
    columns = []
    for prime, base in zip(digests.PRIMES, digests.BASES, strict=True):
        powers = torch.ones(1, dtype=torch.int64)
        while powers.numel() < _CHUNK:
            powers = torch.cat((powers, powers * pow(base, powers.numel(), prime) % prime))
        columns += [powers.flip(0) >> 16, powers.flip(0) & 0xFFFF]
    return torch.stack(columns, dim=1).double()


def digest(value: Any) -> str:
    """Return a digest of the local values; digests of parts can be combined, see ``pytest_distcompat.digests``.

    It is of the values, not of their storage: bfloat16 hashes like the float32 that it is cast to (FSDP1 upcasts at the
    first forward), and numbers like a tensor that holds them. The digest of anything else is empty.
    """
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, torch.Tensor):
        return ""
    flat = local_of(value)
    try:
        return _of_values(flat)
    except NotImplementedError:
        if not hasattr(flat, "__tensor_flatten__"):
            raise
        # A quantized tensor (torchao's ``OptimState8bit``) may have no arithmetic, so its inner tensors are hashed.
        names, _ = flat.__tensor_flatten__()
        return digests.combine(digest(getattr(flat, name)) for name in names)


def _of_values(flat: torch.Tensor) -> str:
    with torch.no_grad():
        if flat.is_meta or flat.numel() == 0:
            return digests.EMPTY
        flat = flat.cpu().contiguous().reshape(-1)
        if flat.is_floating_point():
            # -0.0 equals 0.0, so it must hash like it.
            flat = (flat.float() if flat.element_size() < torch.float32.itemsize else flat) + 0.0
        elif flat.element_size() % 4:
            flat = flat.to(torch.int32)
        words = flat.view(torch.uint16).double().view(-1, 2)
        return digests.form(len(words), _hash(words))


def _hash(words: torch.Tensor) -> tuple[int, int]:
    """Return the hashes modulo both primes of words, float64 of shape (n, 2): lower and upper 16-bit halves."""
    # Both come from one matrix product, because a probe hashes hundreds of small tensors a step.
    powers = _powers()
    if len(words) <= _CHUNK:
        chunks = [torch.mm(words.t(), powers[_CHUNK - len(words) :]).tolist()]
    else:
        # Zeros in front do not change the sum, so the first chunk may be filled up.
        padded = torch.nn.functional.pad(words, (0, 0, -len(words) % _CHUNK, 0)).view(-1, _CHUNK, 2)
        chunks = (padded.transpose(1, 2) @ powers).tolist()
    hashes = [0, 0]
    for index, (prime, base) in enumerate(zip(digests.PRIMES, digests.BASES, strict=True)):
        step = pow(base, _CHUNK, prime)
        for lower, upper in chunks:
            higher, lowest = int(lower[2 * index]) + int(upper[2 * index + 1]), int(lower[2 * index + 1])
            total = (int(upper[2 * index]) << 32) + (higher << 16) + lowest
            hashes[index] = (hashes[index] * step + total) % prime
    return hashes[0], hashes[1]

"""Single tensors: dtype names and digests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pytest_distcompat import digests


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


#: Words hashed at a time: so many products of halves of 16 bits sum up to less than 2**53, and float64 has them exactly.
_CHUNK = 1 << 15


@functools.cache
def _powers() -> torch.Tensor:
    """base**(n-1), ..., base, 1 modulo its prime, for a whole chunk and either prime, in halves: float64 of shape (chunk, 4)."""
    columns = []
    for prime, base in zip(digests.PRIMES, digests.BASES, strict=True):
        powers = torch.ones(1, dtype=torch.int64)
        while powers.numel() < _CHUNK:
            powers = torch.cat((powers, powers * pow(base, powers.numel(), prime) % prime))
        columns += [powers.flip(0) >> 16, powers.flip(0) & 0xFFFF]
    return torch.stack(columns, dim=1).double()


def digest(value: Any) -> str:
    """A digest of the local values that composes, see ``pytest_distcompat.digests``.

    Of the values, whatever they are stored in: bfloat16 hashes like the float32 it is cast to, exactly. FSDP1 shows its
    upcast only at the first forward, and a frozen weight has not moved by that. Numbers hash like a tensor that holds
    them, so a ``step`` of 3 and of 3.0 agree. Empty text for what is no tensor.
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
        # What is quantized (torchao's ``OptimState8bit``) may have no arithmetic: of the tensors that it is made of.
        names, _ = flat.__tensor_flatten__()
        return digests.combine(digest(getattr(flat, name)) for name in names)


def _of_values(flat: torch.Tensor) -> str:
    with torch.no_grad():
        if flat.is_meta or flat.numel() == 0:
            return digests.EMPTY
        flat = flat.cpu().contiguous().reshape(-1)
        if flat.is_floating_point():
            # -0.0 equals 0.0, and is to hash like it.
            flat = (flat.float() if flat.element_size() < torch.float32.itemsize else flat) + 0.0
        elif flat.element_size() % 4:
            flat = flat.to(torch.int32)
        words = flat.view(torch.uint16).double().view(-1, 2)
        return digests.form(len(words), _hash(words))


def _hash(words: torch.Tensor) -> tuple[int, int]:
    """Of words in halves, the lower one first: float64 of shape (n, 2). Under both primes at once, by one product of matrices:
    a probe hashes hundreds of small tensors a step, and each operator is a call.
    """
    powers = _powers()
    if len(words) <= _CHUNK:
        chunks = [torch.mm(words.t(), powers[_CHUNK - len(words) :]).tolist()]
    else:
        # Zeros in front do not change the sum, so the first chunk may be filled up.
        filled = torch.nn.functional.pad(words, (0, 0, -len(words) % _CHUNK, 0)).view(-1, _CHUNK, 2)
        chunks = (filled.transpose(1, 2) @ powers).tolist()
    found = [0, 0]
    for which, (prime, base) in enumerate(zip(digests.PRIMES, digests.BASES, strict=True)):
        step = pow(base, _CHUNK, prime)
        for lower, upper in chunks:
            higher, lowest = int(lower[2 * which]) + int(upper[2 * which + 1]), int(lower[2 * which + 1])
            total = (int(upper[2 * which]) << 32) + (higher << 16) + lowest
            found[which] = (found[which] * step + total) % prime
    return found[0], found[1]

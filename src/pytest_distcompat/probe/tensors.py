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


#: Elements hashed at a time; their sum must stay below 2**63.
_CHUNK = 1 << 15


@functools.cache
def _powers() -> tuple[torch.Tensor, torch.Tensor]:
    """The primes, shape (2, 1), and for each base**(n-1), ..., base, 1 modulo it, for a whole chunk: shape (2, chunk)."""
    rows = []
    for prime, base in zip(digests.PRIMES, digests.BASES, strict=True):
        powers = torch.ones(1, dtype=torch.int64)
        while powers.numel() < _CHUNK:
            powers = torch.cat((powers, powers * pow(base, powers.numel(), prime) % prime))
        rows.append(powers.flip(0))
    return torch.tensor(digests.PRIMES, dtype=torch.int64).unsqueeze(1), torch.stack(rows)


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
    flat = local_of(value).detach()
    with torch.no_grad():
        if flat.is_meta or flat.numel() == 0:
            return digests.EMPTY
        flat = flat.cpu().contiguous().reshape(-1)
        if flat.is_floating_point():
            # -0.0 equals 0.0, and is to hash like it.
            flat = (flat.float() if flat.element_size() < torch.float32.itemsize else flat) + 0.0
        elif flat.element_size() % 4:
            flat = flat.to(torch.int32)
        words = flat.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        return digests.form(words.numel(), _hash(words))


def _hash(words: torch.Tensor) -> tuple[int, int]:
    """Under both primes at once: a probe hashes hundreds of small tensors a step, and each operator is a call."""
    primes, powers = _powers()
    rest = words % primes
    if words.numel() <= _CHUNK:
        sums: list[int] = (rest * powers[:, _CHUNK - words.numel() :] % primes).sum(dim=1).tolist()
        return sums[0] % digests.PRIMES[0], sums[1] % digests.PRIMES[1]
    # Zeros in front do not change the sum, so the first chunk may be filled up.
    filled = torch.nn.functional.pad(rest, (-words.numel() % _CHUNK, 0)).reshape(2, -1, _CHUNK)
    parts: list[list[int]] = (filled * powers[:, None] % primes[:, None]).sum(dim=2).tolist()
    found = [0, 0]
    for which, (prime, base) in enumerate(zip(digests.PRIMES, digests.BASES, strict=True)):
        step = pow(base, _CHUNK, prime)
        for part in parts[which]:
            found[which] = (found[which] * step + part) % prime
    return found[0], found[1]

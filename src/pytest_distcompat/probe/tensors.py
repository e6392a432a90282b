"""Single tensors: dtype names, local shards and digests.

The rest of the probe calls this module for each tensor that it reads on a rank. A tensor may be a
plain one, a DTensor (of which the rank stores a shard), a parameter of ZeRO-3 (whose shard is in
its attribute ``ds_tensor``), a quantized one (which stores codes and scales), or a fake one without
values.

A digest is a text such as ``32:1f2e...``: the number of 32-bit words, and a hash of the values at
their positions in the full tensor. The hash is a sum: each word times ``base ** position``, modulo
a prime. So digests of shards add up to that of the full tensor; there are two sums, for two primes
(``digests``). Most of this module computes those sums fast: positions are taken in *runs* of
consecutive elements, and in chunks of ``_CHUNK`` words whose powers are kept. Words and powers are
split into an upper and a lower half of 16 bits, because products of halves, and sums of them, are
exact in float64.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from pytest_distcompat import digests
from pytest_distcompat.probe.layouts import starts_of


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module: ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank stores of a tensor: of a DTensor its local shard.

    The result is a view without gradient.
    """
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        local: torch.Tensor = to_local() if to_local is not None else tensor.detach()
    return local


def stored_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that this rank stores of a tensor: codes, scales and the like."""
    local = local_of(tensor)
    # A subclass of Tensor that wraps others, as torchao's quantized ones do, has this method of
    # torch's. It returns the names of the attributes with the inner tensors.
    if not hasattr(local, "__tensor_flatten__"):
        return [local]
    parts: list[torch.Tensor] = []
    for name in local.__tensor_flatten__()[0]:
        parts += stored_parts(getattr(local, name))
    return parts


def stored_dtype(tensor: torch.Tensor) -> str:
    """Return the dtype of most of the stored bytes: of a quantized tensor that of its codes."""

    # Not ``nbytes``, which Dynamo cannot trace: it traces the hooks of a compiled
    # ``optimizer.step`` too.
    def byte_count(part: torch.Tensor) -> int:
        return part.numel() * part.element_size()

    largest = max(stored_parts(tensor), key=byte_count)
    return dtype_name(largest.dtype)


def valueless(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has no values: it is on the meta device, or fake."""
    # Fake tensors are private; ``tests/launch/test_simulated.py`` fails when they change.
    return tensor.is_meta or hasattr(tensor, "fake_mode")


def square_of(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of this rank's elements, in float64.

    It is 0 for a tensor without values, see ``valueless``.
    """
    local = local_of(tensor)
    if valueless(local):
        return 0.0
    return float(local.detach().double().square().sum())


def zero3_shard(parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a ZeRO-3 parameter without its padding, which is undefined.

    ZeRO-3 flattens a parameter and cuts it into equal shards: of 5 elements on 2 ranks each stores
    3, and the last element of rank 1 is padding.
    """
    from torch import distributed

    stored: torch.Tensor = parameter.ds_tensor
    rank = distributed.get_rank(parameter.ds_process_group)
    # Of the parameter, from the first element of this rank's shard on.
    remaining_numel = int(parameter.ds_numel) - stored.numel() * rank
    return stored.reshape(-1)[: max(0, remaining_numel)]


#: How many words are hashed at a time. The sum of so many products of 16-bit halves is below 2**53,
#: so it is exact in float64.
_CHUNK = 1 << 15


@functools.cache
def _powers(level: int = 0) -> torch.Tensor:
    """Return powers of both bases modulo their primes: int64 of shape (2, chunk).

    Column n has ``base ** (n * chunk ** level)``.
    """
    rows: list[torch.Tensor] = []
    for prime, base in zip(digests.PRIMES, digests.BASES, strict=True):
        step = pow(base, _CHUNK**level, prime)
        powers = torch.ones(1, dtype=torch.int64)
        while powers.numel() < _CHUNK:
            # Each round doubles their number: the next n powers are the first n, times the n-th
            # power.
            nth_power = pow(step, powers.numel(), prime)
            powers = torch.cat((powers, powers * nth_power % prime))
        rows.append(powers)
    return torch.stack(rows)


@functools.cache
def _halves() -> torch.Tensor:
    """Return the powers of level 0 in halves: float64 of shape (chunk, 4).

    The columns are the upper and lower 16 bits for the first prime, then for the second.
    """
    halves: list[torch.Tensor] = []
    for powers in _powers():
        halves += [powers >> 16, powers & 0xFFFF]
    return torch.stack(halves, dim=1).double()


def digest(value: Any, starts: torch.Tensor | None = None) -> str:
    """Return a digest of the local values of a tensor: ``32:1f2e...``, see ``digests``.

    It is a digest of the values, not of their storage. bfloat16 hashes like the float32 to which it
    is cast (FSDP1 upcasts at the first forward), and a number like a tensor that has it.

    Args:
        value: A tensor, of which a DTensor's local shard is read, or a number. The digest of
            anything else is empty.
        starts: Where the runs of consecutive elements start in the flattened full tensor, int64;
            all runs have the same length. None for the tensor's own (``layouts.starts_of``).
    """
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if not isinstance(value, torch.Tensor):
        return ""
    flat = local_of(value)
    if valueless(flat):
        return digests.EMPTY
    if starts is None:
        starts = starts_of(value)
    try:
        return _of_values(flat, starts)
    except NotImplementedError:
        # A plain tensor must not fail; a quantized one may.
        if not hasattr(flat, "__tensor_flatten__"):
            raise
        # A quantized tensor may have no arithmetic. torchao's state has a method that returns its
        # values; otherwise codes and scales are hashed.
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            return _of_values(flat.dequantize(), starts)
        return digests.concatenate(map(digest, stored_parts(flat)))


def digest_rounded(tensor: torch.Tensor, dtype: str) -> str:
    """Return the digest of a tensor rounded to a dtype; empty if that changes nothing.

    Args:
        tensor: The tensor.
        dtype: The name of the dtype, such as ``bfloat16``; empty for no rounding.
    """
    # A quantized tensor cannot be cast, and is never wider than the dtype that a model computes in.
    if not tensor.is_floating_point() or hasattr(tensor, "__tensor_flatten__"):
        return ""
    if not dtype:
        return ""
    rounded: torch.dtype = getattr(torch, dtype)
    if rounded == tensor.dtype or rounded.itemsize >= torch.float32.itemsize:
        return ""
    return digest(tensor.detach().to(rounded))


def _of_values(flat: torch.Tensor, starts: torch.Tensor | None) -> str:
    """Return the digest of a plain tensor's values.

    ``starts`` is as in ``digest``, None for one run from 0.
    """
    with torch.no_grad():
        if flat.numel() == 0:
            return digests.EMPTY
        flat = flat.cpu().contiguous().reshape(-1)
        if flat.is_floating_point():
            if flat.element_size() < torch.float32.itemsize:
                flat = flat.float()
            # -0.0 equals 0.0, so it must hash like it.
            flat = flat + 0.0
        elif flat.element_size() % 4:
            flat = flat.to(torch.int32)
        words_per_element = flat.element_size() // 4
        words = flat.view(torch.uint16).double().view(-1, 2)
        if starts is None:
            hashes = _hash(words.view(1, -1, 2), None)
        else:
            if words_per_element > 1:
                starts = starts * words_per_element
            hashes = _hash(words.view(len(starts), -1, 2), starts)
        return digests.form(len(words), hashes)


def _hash(words: torch.Tensor, starts: torch.Tensor | None) -> tuple[int, int]:
    """Return the hashes of runs of words modulo both primes.

    Args:
        words: float64 of shape (runs, words of a run, 2): the lower and upper 16 bits of each word.
        starts: The position of the first word of each run; None for one run from 0.
    """
    length = words.shape[1]
    if length > _CHUNK:
        # Zeros at the end do not change the sum, so the last chunk is filled up with them.
        missing = -length % _CHUNK
        words = torch.nn.functional.pad(words, (0, 0, 0, missing)).view(-1, _CHUNK, 2)
        chunk_starts = torch.arange(0, length, _CHUNK)
        if starts is None:
            starts = chunk_starts
        else:
            starts = (starts[:, None] + chunk_starts).flatten()
    # Both hashes come from one matrix product, because a probe hashes hundreds of small tensors a
    # step.
    if len(words) != 1:
        return _hash_of_runs(words, starts)
    start = 0
    if starts is not None:
        start = int(starts[0])
    return _hash_of_run(words[0], start)


def _hash_of_run(words: torch.Tensor, start: int) -> tuple[int, int]:
    """Return both hashes of one run of words, of shape (n, 2), computed with Python's integers.

    That is faster than tensors for one run.
    """
    halves = _halves()[: len(words)]
    low_sums, high_sums = torch.mm(words.t(), halves).tolist()
    low = [int(number) for number in low_sums]
    high = [int(number) for number in high_sums]
    hashes: list[int] = []
    # Each prime has two columns: products with the upper halves of the powers, and with the lower
    # halves.
    for upper, prime, base in zip((0, 2), digests.PRIMES, digests.BASES, strict=True):
        lower = upper + 1
        # A word is ``high * 2**16 + low``, and so is a power: their product has four parts.
        mixed = low[upper] + high[lower]
        value = (high[upper] << 32) + (mixed << 16) + low[lower]
        hashes.append(value * pow(base, start, prime) % prime)
    return hashes[0], hashes[1]


def _hash_of_runs(words: torch.Tensor, starts: torch.Tensor | None) -> tuple[int, int]:
    """Return the sums of both hashes of several runs of words, of shape (runs, n, 2)."""
    primes = torch.tensor(digests.PRIMES)
    halves = _halves()[: words.shape[1]]
    products = words.transpose(1, 2) @ halves
    # The shape is (runs, halves of the words, primes, halves of the powers).
    sums = products.long().view(-1, 2, 2, 2)
    low = sums[:, 0]
    high = sums[:, 1]
    # Each factor is below 2**31, so no product leaves 64 bits.
    mixed = (low[..., 0] + high[..., 1]) % primes
    total = high[..., 0] % primes * ((1 << 32) % primes)
    total += (mixed << 16) + low[..., 1]
    total = total % primes
    if starts is not None:
        total = total * _factors(starts) % primes
    first, second = (total.sum(0) % primes).tolist()
    return first, second


#: The result of ``_factors`` for each tensor of starts. All tensors of a layout share one tensor of
#: starts, which ``layouts`` keeps.
_known_factors: Any = WeakIdKeyDictionary()


def _factors(starts: torch.Tensor) -> torch.Tensor:
    """Return each base to the power of each start, modulo its prime: int64 of shape (starts, 2)."""
    factors: torch.Tensor | None = _known_factors.get(starts)
    if factors is None:
        factors = _powers_of_bases(starts)
        _known_factors[starts] = factors
    return factors


def _powers_of_bases(exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of both bases modulo their primes: int64 of shape (exponents, 2)."""
    primes = torch.tensor(digests.PRIMES)
    powers = torch.ones(len(exponents), 2, dtype=torch.int64)
    # Digit by digit: an exponent is written with digits from 0 to chunk - 1.
    level = 0
    while exponents.any():
        powers_of_digits = _powers(level)[:, exponents % _CHUNK].t()
        powers = powers * powers_of_digits % primes
        exponents = exponents // _CHUNK
        level += 1
    return powers

"""Digests of tensors that compose: the digest of a whole follows from those of its shards.

A digest reads ``words:hash``: the number of 32-bit words and a polynomial hash of them, modulo two primes below 2**31,
so that products fit into 64 bits. All zeros hash to 0. ``probe.tensors.digest`` makes digests.
"""

from __future__ import annotations

from collections.abc import Iterable

PRIMES = (2147483647, 2147483629)
BASES = (1103515245, 69069069)

EMPTY = "0:0"


def form(words: int, hashes: tuple[int, ...]) -> str:
    """Return the text of a digest."""
    return f"{words}:{hashes[0] << 32 | hashes[1]:x}"


def read(digest: str) -> tuple[int, tuple[int, int]]:
    """Return the words and hashes of a digest. Raises ValueError for a text that is no digest."""
    words, _, text = digest.partition(":")
    number = int(text, 16)
    return int(words), (number >> 32, number & 0xFFFFFFFF)


def combine(digests: Iterable[str]) -> str:
    """Return the digest of the concatenation, in that order; of flat shards in rank order that is the whole's."""
    words, hashes = 0, [0, 0]
    for digest in digests:
        more, parts = read(digest)
        words += more
        for n, (prime, base) in enumerate(zip(PRIMES, BASES, strict=True)):
            hashes[n] = (hashes[n] * pow(base, more, prime) + parts[n]) % prime
    return form(words, (hashes[0], hashes[1]))


def is_zero(digest: str) -> bool:
    """Tell whether every element is zero; an empty tensor has none that is not."""
    return digest.endswith(":0")

"""Digests of tensors that add up: the digest of a whole is the sum of those of its parts, however it was cut.

A digest reads ``words:hash``: the number of 32-bit words, and the sum of each word times ``base`` to the power of its position
in the whole, modulo two primes below 2**31, so that products fit into 64 bits. The position of a word is that in the flattened
whole tensor, so parts need no order, whatever dimension a mesh has cut: rows, columns, or pieces of pieces. All zeros hash to
0. ``probe.tensors.digest`` makes digests.
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
    """Return the digest of the whole that these parts make up, each made with its position in the whole."""
    words, hashes = 0, [0, 0]
    for digest in digests:
        more, parts = read(digest)
        words += more
        hashes = [
            (one + part) % prime for one, part, prime in zip(hashes, parts, PRIMES, strict=True)
        ]
    return form(words, (hashes[0], hashes[1]))


def concatenate(digests: Iterable[str]) -> str:
    """Return the digest of tensors one after the other, each digested as a whole of its own."""
    start, shifted = 0, []
    for digest in digests:
        words, parts = read(digest)
        moved = (
            part * pow(base, start, prime) % prime
            for part, base, prime in zip(parts, BASES, PRIMES, strict=True)
        )
        shifted.append(form(words, tuple(moved)))
        start += words
    return combine(shifted)


def is_zero(digest: str) -> bool:
    """Tell whether every element is zero; an empty tensor has none that is not."""
    return digest.endswith(":0")

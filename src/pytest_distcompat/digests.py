"""Digests of tensors that add up: that of a full tensor is the sum of those of its shards.

Checks must compare a parameter on 2 ranks with the same parameter on 4 ranks, sharded in another
way, without gathering it. So each rank computes a digest of its own shard
(``probe.tensors.digest``), which knows the position of each element in the full tensor. In pytest's
process ``model_values`` combines the digests of all shards into that of the full tensor, and
compares texts.

A digest is a text ``words:hash``. ``words`` is the number of 32-bit words of the tensor's memory.
The hash combines two sums, one for each of PRIMES and BASES: each word is multiplied by ``base **
position``, and the products are added modulo the prime. ``position`` is the place of the word in
the flattened full tensor, so it does not matter along which dimensions a mesh has sharded the
tensor. The primes are below 2**31, so that products fit into 64 bits. A tensor of zeros has the
hash 0: ``32:0`` for 32 elements of float32.
"""

from __future__ import annotations

from collections.abc import Iterable

#: The modulus of each of the two sums.
PRIMES = (2147483647, 2147483629)
#: The base of each of the two sums.
BASES = (1103515245, 69069069)

#: The digest of a tensor without elements.
EMPTY = "0:0"


def form(words: int, hashes: tuple[int, ...]) -> str:
    """Return a digest as text, from the number of words and the two sums."""
    combined = hashes[0] << 32 | hashes[1]
    return f"{words}:{combined:x}"


def read(digest: str) -> tuple[int, tuple[int, int]]:
    """Return the number of words and the two sums. Raises ValueError for another text."""
    words, _, text = digest.partition(":")
    combined = int(text, 16)
    sums = (combined >> 32, combined & 0xFFFFFFFF)
    return int(words), sums


def combine(digests: Iterable[str]) -> str:
    """Return the digest of a full tensor from the digests of its shards, in any order.

    The digest of a shard uses the positions of its words in the full tensor.
    """
    total_words = 0
    totals = [0, 0]
    for digest in digests:
        words, sums = read(digest)
        total_words += words
        for nth, prime in enumerate(PRIMES):
            totals[nth] = (totals[nth] + sums[nth]) % prime
    return form(total_words, (totals[0], totals[1]))


def concatenate(digests: Iterable[str]) -> str:
    """Return the digest of the concatenation of tensors from their digests, in order.

    FSDP1 and ZeRO cut a flattened tensor into pieces of unknown positions: the digest of each piece
    begins at position 0. Piece by piece in the order of the ranks they make up the whole.
    """
    start = 0
    shifted_digests: list[str] = []
    for digest in digests:
        words, sums = read(digest)
        # Each word moves by ``start`` positions, which multiplies its term by ``base ** start``.
        shifted_sums: list[int] = []
        for part, base, prime in zip(sums, BASES, PRIMES, strict=True):
            shifted_sums.append(part * pow(base, start, prime) % prime)
        shifted_digest = form(words, tuple(shifted_sums))
        shifted_digests.append(shifted_digest)
        start += words
    return combine(shifted_digests)


def is_zero(digest: str) -> bool:
    """Tell whether all elements are zero, as they are in an empty tensor."""
    return digest.endswith(":0")

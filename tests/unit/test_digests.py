"""Digests compose: what the shards of all ranks hash to is what the whole does."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from pytest_distcompat import digests
from pytest_distcompat.digests import EMPTY, combine, concatenate, form, is_zero, read

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from pytest_distcompat.probe.tensors import digest

#: How many words are hashed at a time.
BLOCK = 1 << 15
#: Around the sizes that are hashed at a time, where a carry would get lost.
SIZES = (1, 2, 91, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)


def values(numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator)


def joined(*tensors: torch.Tensor) -> str:
    """The digests of these tensors, one after the other."""
    return concatenate(digest(tensor) for tensor in tensors)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_any_cut_gives_the_digest_of_the_whole(numel: int, parts: int) -> None:
    complete = values(numel)
    chance = random.Random(numel * parts)
    cuts = [0, numel]
    for _ in range(parts - 1):
        cuts.append(chance.randrange(numel + 1))
    cuts.sort()
    shards = [complete[start:end] for start, end in itertools.pairwise(cuts)]
    expected = digest(complete)
    assert joined(*shards) == expected
    assert concatenate([expected, EMPTY]) == expected
    assert concatenate([EMPTY, expected]) == expected


def test_a_cut_by_rows_is_one_of_the_flat_tensor() -> None:
    complete = values(13 * 7).reshape(13, 7)
    # As Shard(0) cuts it over four ranks: 4, 4, 4 and 1 rows.
    rows_by_rank = torch.split(complete, 4)
    assert joined(*rows_by_rank) == digest(complete)
    transposed_in_memory = complete.t().contiguous().t()
    assert digest(complete) == digest(complete.flatten())
    assert digest(complete) == digest(transposed_in_memory)


def test_order_and_values_count() -> None:
    first = values(8)
    second = values(8, seed=1)
    assert joined(first, second) != joined(second, first)
    changed = first.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    assert digest(changed) != digest(first)
    assert digest(torch.zeros(3)) != digest(torch.zeros(4))


@pytest.mark.parametrize("numel", [1, 5, BLOCK + 1])
def test_zero(numel: int) -> None:
    zero = torch.zeros(numel)
    almost = torch.zeros(numel)
    almost[-1] = 1e-30
    assert is_zero(digest(zero))
    assert is_zero(concatenate([digest(zero), EMPTY, digest(zero)]))
    assert not is_zero(digest(almost))
    # Equal numbers, equal digests.
    assert digest(-zero) == digest(zero)


def test_empty() -> None:
    assert digest(torch.empty(0)) == EMPTY
    assert digest(torch.empty(0, 7)) == EMPTY
    assert concatenate([]) == EMPTY
    assert is_zero(EMPTY)
    assert digest(torch.empty(3, device="meta")) == EMPTY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_digest_is_of_values_whatever_they_are_kept_in(dtype: torch.dtype) -> None:
    rounded = values(200).to(dtype)
    assert digest(rounded) == digest(rounded.float())
    assert digest(values(200)) != digest(rounded)
    # An odd number of two-byte elements ends inside a word, and composes all the same.
    assert joined(rounded[:7], rounded[7:]) == digest(rounded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.int8, torch.bool])
def test_other_dtypes_compose_too(dtype: torch.dtype) -> None:
    complete = (values(101) * 3).to(dtype)
    assert joined(complete[:30], complete[30:]) == digest(complete)
    changed = ~complete if dtype == torch.bool else complete + 1
    assert digest(complete) != digest(changed)


def test_a_number_is_a_tensor_of_one() -> None:
    expected = digest(torch.tensor(3.0))
    assert digest(3) == expected
    assert digest(3.0) == expected
    assert digest("adamw") == ""
    assert digest(None) == ""


def test_a_digest_reads_back() -> None:
    summary = digest(values(17))
    words, hashes = read(summary)
    assert words == 17
    assert form(words, hashes) == summary
    for part, prime in zip(hashes, digests.PRIMES, strict=True):
        assert 0 <= part < prime


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_parts_of_a_grid_add_up_in_any_order(dtype: torch.dtype) -> None:
    complete = (values(6 * 10) * 9).to(dtype).reshape(6, 10)
    places = torch.arange(60).reshape(6, 10)
    rows = (slice(0, 5), slice(5, 6))
    columns = (slice(4, 10), slice(0, 4))
    digests = []
    digests_at_start = []
    for part in itertools.product(rows, columns):
        row_starts = places[part][:, 0]
        digests.append(digest(complete[part], row_starts))
        digests_at_start.append(digest(complete[part], row_starts * 0))
    expected = digest(complete)
    assert combine(digests) == expected
    assert combine(digests[::-1]) == expected
    # Each value twice, once each at another's place.
    assert combine([digests[0], *digests[:3]]) != expected
    assert combine(digests_at_start) != expected


def test_runs_far_into_a_large_tensor() -> None:
    # Beyond each table of powers: by itself, and as one of several runs.
    first = values(4)[:2]
    second = values(4)[1:3]
    both = torch.cat((first, second))
    for start in (5, BLOCK + 3, BLOCK * BLOCK + 9, 1 << 46):
        end = start + 2
        digest_of_first = digest(first, torch.tensor([start]))
        digest_of_second = digest(second, torch.tensor([end]))
        digest_of_both = digest(both, torch.tensor([start, end]))
        assert combine([digest_of_first, digest_of_second]) == digest_of_both


@pytest.mark.parametrize("text", ["", "12", "12:", ":ff", "twelve:ff", "12:xyz"])
def test_an_invalid_digest_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        read(text)
    with pytest.raises(ValueError, match="invalid literal"):
        combine([text])
